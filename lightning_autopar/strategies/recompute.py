"""Activation checkpointing of whole blocks, without changing the module's classes or FQNs. Knows FQNs only, no plan and no strategy."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


@contextmanager
def recomputed(module: nn.Module, fqns: Sequence[str]) -> Iterator[None]:
    """While open, the blocks of those names keep their input only and run their forward again in backward.

    The instance's ``forward`` is replaced, rather than the block wrapped: FQNs, classes and checkpoints stay as they are. The non-reentrant
    variant preserves the RNG state, so that dropout draws the same mask twice.

    Args:
        module: the root.
        fqns: names of blocks in it.

    Raises:
        ValueError: if there is no block of a name.
    """
    blocks = []
    for fqn in fqns:
        try:
            blocks.append(module.get_submodule(fqn))
        except AttributeError as error:
            raise ValueError(f"the plan recomputes {fqn!r}, but the module has no such block; plan again for this module") from error
    for block in blocks:
        block.forward = functools.partial(_forward, block.forward)
    try:
        yield
    finally:
        for block in blocks:
            block.__dict__.pop("forward", None)


def _forward(forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
