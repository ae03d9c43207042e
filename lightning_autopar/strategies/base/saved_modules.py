"""Modules among a module's hyperparameters, as ``save_hyperparameters()`` without ``ignore`` keeps them: whole in a checkpoint.

Lightning pickles them into each file. Where ranks have parts of the weights, such a module would be a rank's part, or couldn't be pickled.
Knows modules and a checkpoint's dictionary; no engine.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

_LOG = logging.getLogger(__name__)
_KEY = "hyper_parameters"


class SavedModules:
    """Of each module among the hyperparameters that is a part of the module itself, a copy without weights, made before ranks have parts.

    Args:
        module: the user's, whole.
    """

    def __init__(self, module: nn.Module) -> None:
        self._copies: dict[int, tuple[str, nn.Module]] = {}
        names = {id(child): name for name, child in module.named_modules()}
        for each in tree_leaves(dict(getattr(module, "hparams", {}))):
            hollow: dict[int, Any] = {id(weight): _hollow(weight) for weight in _weights(each)} if id(each) in names else {}
            if hollow:
                with suppress(TypeError, RuntimeError):  # what can't be copied can't be pickled, as Lightning would say of its file
                    self._copies[id(each)] = names[id(each)], copy.deepcopy(each, hollow)

    def in_file(self, checkpoint: dict[str, Any]) -> None:
        """Put copies with the checkpoint's weights in the place of the modules; nothing where it has no weights, as on other ranks."""
        if self._copies and _KEY in checkpoint:
            checkpoint[_KEY] = tree_map_only(nn.Module, lambda each: self._whole(each, checkpoint["state_dict"]), checkpoint[_KEY])

    def _whole(self, module: nn.Module, state: Mapping[str, Any]) -> nn.Module | None:
        if id(module) not in self._copies:
            return module
        name, hollow = self._copies[id(module)]
        made = copy.deepcopy(hollow)
        wanted = made.state_dict()
        own = {key: state[f"{name}.{key}"] for key in wanted if f"{name}.{key}" in state}
        if state and own.keys() != wanted.keys():
            _LOG.warning("the checkpoint's hyperparameters lack the module %r, as on_save_checkpoint has left weights of it out", name)
        if own.keys() != wanted.keys():
            return None
        made.load_state_dict(own, assign=True)
        return made


def _weights(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    kept = module.state_dict(keep_vars=True)
    yield from (buffer for name, buffer in module.named_buffers() if name in kept)


def _hollow(weight: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(weight, device="meta")
    return nn.Parameter(empty, weight.requires_grad) if isinstance(weight, nn.Parameter) else empty
