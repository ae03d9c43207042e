"""What lasts for a while: an attribute of somebody else's module or class that is replaced, lines on stderr that are hidden, and what one
run has that a copy of its trainer hasn't.

C++ libraries write some lines to stderr that no setting turns off. This module knows attributes and file descriptors, not why they are
touched.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

#: Words in lines that the profiler and the allocator always write to stderr while memory is profiled (torch 2.13, kineto).
_NOISE = (
    b"USDT:",
    b"External init callback must run in same thread",
    b"Memory block of unknown size was allocated before the profiling started",
)


@contextmanager
def without_noise(lines: tuple[bytes, ...] = _NOISE) -> Iterator[None]:
    """While open, stderr goes to a file; then its lines are passed on, without those that contain any of these words."""
    sys.stderr.flush()
    real = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(real, 2)
            file.seek(0)
            kept = b"".join(line for line in file if not any(noise in line for noise in lines))
            if kept:
                os.write(real, kept)
            os.close(real)


class Exits(ExitStack):
    """What must be undone at an end. If a trainer or a callback of a run is copied, the copy of this has nothing to undo."""

    def __reduce__(self) -> tuple[type[Exits], tuple[()]]:
        return Exits, ()


class Calls(list[Callable[[], None]]):
    """The callbacks that a run calls. A copy calls none, as for :class:`Exits`."""

    def __reduce__(self) -> tuple[type[Calls], tuple[()]]:
        return Calls, ()


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute, and put back or remove it on leaving."""
    is_property = hasattr(getattr(type(owner), name, None), "__set__")
    own = is_property or name in vars(owner)
    before = getattr(owner, name) if is_property else vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
