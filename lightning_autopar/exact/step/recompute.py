"""Activation checkpointing of whole blocks, without changing the module's classes or FQNs. Knows FQNs only, no plan and no strategy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint


@contextmanager
def recomputed(module: nn.Module, fqns: Sequence[str]) -> Iterator[None]:
    """While open, the blocks of those names keep only their input and run their forward again in backward. The instance's ``forward`` is
    replaced, and the block isn't wrapped: FQNs, classes and checkpoints stay as they are. The non-reentrant variant preserves the RNG
    state, so that dropout draws the same mask twice. Buffers that a forward changes (BatchNorm's running statistics) change once, and the
    second forward finds them as the first one did, whatever ran in between, such as other micro-batches of a pipeline.

    Raises:
        ValueError: if there is no block of a name.
    """
    blocks = [_block(module, fqn) for fqn in fqns]
    own = [block.__dict__.get("forward") for block in blocks]
    for block in blocks:
        block.forward = functools.partial(_forward, block, block.forward, _Moving())
    try:
        yield
    finally:
        for block, forward in zip(blocks, own, strict=True):
            block.__dict__.pop("forward", None)
            if forward is not None:
                block.__dict__["forward"] = forward


def _block(module: nn.Module, fqn: str) -> nn.Module:
    try:
        return module.get_submodule(fqn)
    except AttributeError as error:
        raise ValueError(f"the plan recomputes or shards {fqn!r}, but the module has no such block; plan again for this module") from error


class _Moving:
    """The buffers that a block's forward changes, by the path of their owner in the block; None while they aren't known."""

    def __init__(self) -> None:
        self.names: set[tuple[str, str]] | None = None


def _forward(block: nn.Module, forward: Callable[..., Any], moving: _Moving, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    entered = {
        (path, name): (owner, buffer, buffer._version, _kept(owner, buffer, moving.names is None or (path, name) in moving.names))
        for path, owner in block.named_modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    }
    as_entered: list[tuple[nn.Module, str, Tensor]] = []

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _swapped(as_entered)

    output = checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    moved: dict[tuple[str, str], Tensor] = {}
    for key, (owner, buffer, version, kept) in entered.items():
        if owner._buffers.get(key[1]) is not buffer:
            moved[key] = buffer  # replaced, so that the buffer itself isn't changed
        elif buffer._version != version or _untold(owner):
            moved[key] = kept if kept is not None else buffer.detach().clone()
    moving.names = (moving.names or set()) | set(moved)
    as_entered.extend((entered[key][0], key[1], buffer) for key, buffer in moved.items())
    return output


def _kept(owner: nn.Module, buffer: Tensor, moves: bool) -> Tensor | None:
    """A copy of the value of a buffer that a forward may change."""
    return buffer.detach().clone() if moves or _untold(owner) else None


def _untold(owner: nn.Module) -> bool:
    """Whether it is a normalisation layer that updates its running statistics, which doesn't change autograd's version counter."""
    return isinstance(owner, _NormBase) and owner.training


@contextmanager
def _swapped(buffers: list[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
    """The context of the second forward, which changes other tensors in place of the buffers. Writing to the buffers themselves would spoil
    what autograd has saved of them.
    """
    present = [owner._buffers[name] for owner, name, _ in buffers]
    for owner, name, as_entered in buffers:
        owner._buffers[name] = as_entered
    try:
        yield
    finally:
        for (owner, name, _), buffer in zip(buffers, present, strict=True):
            owner._buffers[name] = buffer
