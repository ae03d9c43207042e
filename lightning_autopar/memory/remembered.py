"""What is made of a footprint, kept while it is asked for: a search asks hundreds of times. Knows footprints by identity alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from lightning_autopar.memory.footprint import Footprint

T = TypeVar("T")


class Remembered(Generic[T]):
    """The last few results by footprint and key. A footprint is too large to be compared, so that one is told from another by identity.

    Args:
        most: how many are kept.
    """

    def __init__(self, most: int = 32) -> None:
        self._most = most
        self._known: dict[tuple[int, Hashable], tuple[Footprint, T]] = {}

    def get(self, footprint: Footprint, key: Hashable, make: Callable[[], T]) -> T:
        """What was made before, or is made now."""
        known = self._known.get((id(footprint), key))
        if known is None or known[0] is not footprint:
            while len(self._known) >= self._most:
                del self._known[next(iter(self._known))]
            # The footprint is kept along, so that no other one can come to have its identity.
            known = self._known[id(footprint), key] = footprint, make()
        return known[1]
