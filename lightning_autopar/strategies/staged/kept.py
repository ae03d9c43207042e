"""What a step leaves on the module beside parameters and buffers (lists of outputs, counters), and whether stages come apart in it.

A stage leaves the user's step at its end, so that what the step keeps after that is on later stages alone; a hook that runs on every rank
would read something else there. Knows modules; nothing of how a step is run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_autopar._lightning_compat import is_overridden
from lightning_autopar.memory.blocks import find_blocks
from lightning_autopar.strategies.staged.hole import is_hole

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

#: Hooks that run on every rank after steps, and may read what these kept.
_LATER = tuple(
    [f"on_{loop}_{point}_end" for loop in ("train", "validation", "test", "predict") for point in ("batch", "epoch")]
    + [f"on_{loop}_end" for loop in ("train", "validation", "test", "predict", "fit")]
    + [f"on_{loop}_epoch_start" for loop in ("train", "validation", "test", "predict")]
    + ["on_save_checkpoint", "on_before_zero_grad", "on_before_optimizer_step"]
)
_DEEP = 4
_EQUAL = 1e-5


def kept_apart(before: LightningModule, whole: LightningModule, stages: Sequence[LightningModule]) -> str | None:
    """Why the stages' modules aren't alike after a step in what a later hook may read; None where they are, or where there is no such hook.

    Args:
        before: the module before the step.
        whole: a copy that ran the step whole.
        stages: a copy for each stage that ran the step in stages.
    """
    hooks = [hook for hook in _LATER if is_overridden(hook, before)]
    if not hooks:
        return None
    old, theirs = dict(_attributes(before)), dict(_attributes(whole))
    for name, value in theirs.items():
        if name in old and _alike(old[name], value, 0):
            continue  # the step leaves it as it was
        for stage in stages:
            ours = dict(_attributes(stage))
            if name not in ours or not _alike(ours[name], value, 0):
                return f"the step keeps {name!r} on the module, which only some of the stages would have when {hooks[0]} may read it"
    return None


def _attributes(module: LightningModule) -> Iterator[tuple[str, Any]]:
    """The attributes of the module and its children, but for those of blocks and metrics, by a dotted name."""
    blocks = tuple(f"{name}." for name in find_blocks(module))
    for prefix, child in module.named_modules():
        if f"{prefix}.".startswith(blocks) or _is_metric(child):
            continue
        for name, value in vars(child).items():
            if name not in _TORCH and not name.startswith("_"):
                yield f"{prefix}.{name}" if prefix else name, value


def _is_metric(module: nn.Module) -> bool:
    return any(base.__name__ == "Metric" and base.__module__.startswith("torchmetrics") for base in type(module).__mro__)


def _alike(one: Any, other: Any, depth: int) -> bool:
    """Whether two values are the same as far as numbers, texts, tensors and what holds them tell."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return _tensors_alike(one, other)
    kinds = [(type(each).__module__, type(each).__qualname__) for each in (one, other)]  # each mock has a class of its own
    if depth > _DEEP or kinds[0] != kinds[1]:
        return kinds[0] == kinds[1]
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_alike(value, other[name], depth + 1) for name, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(_alike(a, b, depth + 1) for a, b in zip(one, other, strict=True))
    if isinstance(one, float):
        return math.isclose(one, other, rel_tol=_EQUAL) or (math.isnan(one) and math.isnan(other))
    return one == other if isinstance(one, (bool, int, str, bytes)) else True


def _tensors_alike(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or is_hole(one) or is_hole(other) or one.shape != other.shape:
        return False
    return torch.allclose(one.detach().double(), other.detach().double(), rtol=_EQUAL, atol=_EQUAL, equal_nan=True)


#: What torch and Lightning keep on every module.
_TORCH = frozenset((*vars(nn.Module()), "training", "log", "log_dict", "print", "all_gather", "manual_backward", "optimizers",
                    "lr_schedulers", "clip_gradients", "configure_model", "forward"))  # fmt: skip
