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
    """While open, the blocks of those names keep their input only and run their forward again in backward.

    The instance's ``forward`` is replaced, rather than the block wrapped: FQNs, classes and checkpoints stay as they are. The non-reentrant
    variant preserves the RNG state, so that dropout draws the same mask twice. Buffers that a forward moves (BatchNorm's running
    statistics) are put back after the second one, so that they move once.

    Args:
        module: the root.
        fqns: names of blocks in it.

    Raises:
        ValueError: if there is no block of a name.
    """
    blocks = [_block(module, fqn) for fqn in fqns]
    own = [block.__dict__.get("forward") for block in blocks]
    for block in blocks:
        block.forward = functools.partial(_forward, block, block.forward)
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


def _forward(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    moved = _statistics(block)
    before = [(buffer, buffer._version) for buffer in block.buffers()]

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _put_back(moved)

    output = checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    moved.extend(buffer for buffer, version in before if buffer._version != version)
    return output


def _statistics(block: nn.Module) -> list[Tensor]:
    """The running statistics of normalisation layers: their kernels move them without telling autograd's version counter."""
    layers = (child for child in block.modules() if isinstance(child, _NormBase) and child.training)
    return [buffer for layer in layers for buffer in layer.buffers(recurse=False)]


@contextmanager
def _put_back(buffers: list[Tensor]) -> Iterator[None]:
    """Around the second forward. Only buffers that move are copied back: a write to another would spoil what autograd has saved of it."""
    values = [(buffer, buffer.detach().clone()) for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
