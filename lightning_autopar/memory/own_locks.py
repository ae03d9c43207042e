"""Descriptors by which this process holds locks that others look at. A forked child lets go of them, or it would hold them after its
parent's death. Needs the standard library alone; doesn't know what is locked.
"""

from __future__ import annotations

import os

_own: set[int] = set()


def own(descriptor: int) -> int:
    """Keep a descriptor to this process; returns it."""
    _own.add(descriptor)
    return descriptor


def is_own(descriptor: int) -> bool:
    """Whether it is kept here still: not in a forked child, nor after :func:`let_go`."""
    return descriptor in _own


def let_go(descriptor: int) -> None:
    """Close it, and with it the lock."""
    _own.discard(descriptor)
    os.close(descriptor)


def _let_go_in_child() -> None:
    for descriptor in _own:
        os.close(descriptor)
    _own.clear()


os.register_at_fork(after_in_child=_let_go_in_child)
