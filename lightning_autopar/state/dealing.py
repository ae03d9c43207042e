"""Who gets which sample of a batch: dealt out in turns that a plan names, evenly or not. Knows numbers only, no batch and no tensor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from lightning_autopar.plans import count_dealt


@dataclass(frozen=True)
class Dealing:
    """Sample ``i`` of a batch is the holder's ``turns[i % len(turns)]``. A holder is a rank, or one of the parts of a rank's samples.

    Where a holder's turns come at equal distances, as in an even dealing all do, its samples are a slice.

    Args:
        turns: holders, from 0 without a gap; see :attr:`lightning_autopar.plans.Plan.dealing`.
    """

    turns: tuple[int, ...]

    @classmethod
    def even(cls, holders: int) -> Dealing:
        """One sample each in turn: holder ``r`` gets the samples ``[r::holders]``."""
        return cls(tuple(range(holders)))

    @cached_property
    def holders(self) -> int:
        """How many they are."""
        return max(self.turns) + 1

    def rank_of(self, sample: int) -> int:
        """Whose sample it is."""
        return self.turns[sample % len(self.turns)]

    def rows(self, of: int, holder: int) -> int:
        """How many of a batch's ``of`` samples the holder gets."""
        return count_dealt(self.turns, of)[holder]

    def indices(self, of: int, holder: int) -> range | tuple[int, ...]:
        """Which of a batch's ``of`` samples the holder gets, in order: a range where they come at equal distances."""
        return _indices(self.turns, of, holder)

    def split(self, parts: int) -> Dealing:
        """Each holder's samples dealt out evenly to its parts: part ``p`` of holder ``r`` is the new dealing's ``r * parts + p``."""
        seen, turns = [0] * self.holders, []
        for holder in self.turns * parts:
            turns.append(holder * parts + seen[holder] % parts)
            seen[holder] += 1
        return Dealing(tuple(turns))


@lru_cache(maxsize=1024)
def _indices(turns: tuple[int, ...], of: int, holder: int) -> range | tuple[int, ...]:
    """See :meth:`Dealing.indices`."""
    period = len(turns)
    places = [place for place, whose in enumerate(turns) if whose == holder]
    gaps = {after - before for before, after in zip(places, [*places[1:], places[0] + period], strict=True)}
    if len(gaps) == 1:
        return range(min(places[0], of), of, gaps.pop())
    return tuple(sample for begin in range(0, of, period) for sample in (begin + place for place in places) if sample < of)
