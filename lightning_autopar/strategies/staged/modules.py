"""Modules of the user's, looked at for blocks and for what isn't looked into. Knows torch and Lightning modules; no recordings."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_autopar.memory.fake import is_compiled


def opaque_methods(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """What isn't looked into: torchmetrics' work, and what Lightning does with what is logged."""
    found = []
    for child in module.modules():
        classes = {base.__name__ for base in type(child).__mro__ if base.__module__.startswith("torchmetrics")}
        if classes & {"Metric", "MetricCollection"}:
            found += [(child, name) for name in ("update", "compute", "forward")]
        elif isinstance(child, LightningModule):
            found += [(child, name) for name in ("log", "log_dict", "print")]
    return found


def unseen(module: nn.Module) -> str | None:
    """Why torch doesn't show what a module does, in a sentence; None where it does."""
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule) and next(child.parameters(), None) is not None:
            return f"{name!r} is scripted, and its parameters can't be left out"
        if is_compiled(child):
            return f"{name or type(child).__name__!r} was given to torch.compile, which would compile what tells the stages apart"
    return None


def find_block(module: nn.Module, fqn: str) -> nn.Module:
    """The block of a name.

    Raises:
        ValueError: if there is none.
    """
    try:
        return module.get_submodule(fqn)
    except AttributeError as error:
        raise ValueError(f"the module has no block {fqn!r}; name blocks by their FQNs, as the footprint has them") from error
