"""What is allowed with holes in this process at the moment: to compute with them, and to write them into real tensors.

Knows no tensors but by their ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Rules:
    """Of this process: whether holes may be computed with, and which real tensors are never to become holes."""

    strict = False
    hollowing = False
    kept: Callable[[], frozenset[int]] = frozenset
    simulated = False


RULES = Rules()


def set_strict(value: bool) -> bool:
    """Whether operations on unfilled holes are errors; returns what it was."""
    before, RULES.strict = RULES.strict, value
    return before


@contextmanager
def hollowing(kept: Callable[[], frozenset[int]] = frozenset) -> Iterator[None]:
    """While open, a real tensor that is written to in terms of holes becomes one; else that is an error.

    Args:
        kept: gives the ids of tensors that don't: what is written to these, or to a parameter, is dropped.
    """
    before = RULES.hollowing, RULES.kept
    RULES.hollowing, RULES.kept = True, kept
    try:
        yield
    finally:
        RULES.hollowing, RULES.kept = before
