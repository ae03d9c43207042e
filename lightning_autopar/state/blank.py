"""Tensors without values in the places of a module's own, where another process or a file is to give them. Knows modules alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def move_tensors(module: nn.Module, device: str, which: Callable[[Tensor], bool]) -> None:
    """Put tensors without values into the places of some of a module's, on another device; those that are tied stay so.

    Args:
        module: whose parameters and buffers.
        device: of what takes their place.
        which: tells the ones.
    """
    fresh: dict[int, Any] = {}
    for child in module.modules():
        slots: dict[str, Any]
        for slots in (child._parameters, child._buffers):
            for name, tensor in slots.items():
                if tensor is None or not which(tensor):
                    continue
                if id(tensor) not in fresh:
                    empty = torch.empty_like(tensor.detach(), device=device)
                    parameter = isinstance(tensor, nn.Parameter)
                    fresh[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if parameter else empty
                slots[name] = fresh[id(tensor)]
