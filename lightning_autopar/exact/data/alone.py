"""Runs the user's data code as on one device: ``torch.distributed`` tells it that there is no process group.

Batches are cut for the ranks after they are made. A sampler or dataset that dealt samples out by rank itself would deal them out twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

_T = TypeVar("_T")


@contextmanager
def without_group() -> Iterator[None]:
    """While open, this process is in no group as far as torch says, and so are workers that it forks. For code without collectives."""
    if not dist.is_available() or not dist.is_initialized():
        yield
        return
    group, dist.group.WORLD = dist.group.WORLD, None
    try:
        yield
    finally:
        dist.group.WORLD = group


def alone(call: Callable[..., _T], *args: Any) -> _T:
    """What the user's code gives where there is no process group."""
    with without_group():
        return call(*args)
