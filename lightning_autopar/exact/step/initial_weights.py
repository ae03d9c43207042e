"""Draws a module's initial weights on the device, although the module is built in host memory: plain Lightning builds it on the device.

A GPU's generator gives other numbers than the host's from the same seed. Knows tensors and generators; no module and no plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_PLAIN = (Tensor, nn.Parameter)


def drawn_on(device: torch.device) -> AbstractContextManager[object]:
    """While open, draws into host memory come from the device's generator, one tensor at a time. Draws with a user's own generator aren't
    changed.
    """
    return nullcontext() if device.type == "cpu" else _DrawnOn(device)


def random_states(device: torch.device) -> list[Tensor]:
    """The states of the host's and the device's default generators, in host memory."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def set_random_states(states: Sequence[Tensor], device: torch.device) -> None:
    """Set such states, maybe another rank's."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


class _DrawnOn(TorchDispatchMode):
    """A dispatch mode below all functions of Python and C++, so that it sees every draw."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self._device = device

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator, on the device where it draws."""
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        in_host_memory = all(type(tensor) in _PLAIN and tensor.device.type == "cpu" for tensor in tensors)
        if (
            not tensors
        ):  # torch.normal of numbers isn't among the functions that `with torch.device` reaches: it draws on the host there, too
            in_host_memory = torch.device(kwargs.get("device") or "cpu").type == "cpu" and func is not torch.ops.aten.normal.float_float
        draws = torch.Tag.nondeterministic_seeded in func.tags  # type: ignore[attr-defined]  # an operator has them
        if not draws or not in_host_memory or kwargs.get("generator") is not None or kwargs.get("pin_memory"):
            return func(*args, **kwargs)
        there = {id(tensor): tensor.to(self._device) for tensor in tensors}
        moved_args, moved = tree_map_only(Tensor, lambda tensor: there[id(tensor)], (args, kwargs))
        drawn = func(*moved_args, **moved if tensors else {**moved, "device": self._device})
        if not func._schema.is_mutable:  # type: ignore[attr-defined]
            return tree_map_only(Tensor, Tensor.cpu, drawn)
        for tensor in tensors:
            tensor.copy_(there[id(tensor)])
        back = {id(copy): tensor for tensor in tensors for copy in [there[id(tensor)]]}
        return tree_map_only(Tensor, lambda tensor: back.get(id(tensor), tensor), drawn)
