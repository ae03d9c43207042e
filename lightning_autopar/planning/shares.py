"""How many samples of a batch each rank should get, where devices differ in speed or in free memory. Arithmetic: it knows no plan."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from math import floor

import numpy as np

#: Ranks from which on arrays are faster than lists.
_MANY_RANKS = 32


def share_out(
    rows: int,
    row_seconds: Sequence[float],
    most_rows: Sequence[int],
    *,
    fixed_seconds: Sequence[float] | None = None,
    least_rows: int = 1,
) -> tuple[int, ...] | None:
    """The samples of each rank with which the slowest is done soonest; None where the ranks can't take them all.

    A rank takes ``fixed_seconds + rows * row_seconds``. Of ranks that would be done at once the first gets a sample more.

    Args:
        rows: samples of the batch.
        row_seconds: of one sample, by rank; above 0.
        most_rows: what each rank's memory holds.
        fixed_seconds: what each rank takes beside its samples; 0 unless given.
        least_rows: what each rank gets at least.
    """
    ranks = len(row_seconds)
    fixed = fixed_seconds or [0.0] * ranks
    if least_rows * ranks > rows or sum(most_rows) < rows or min(most_rows) < least_rows:
        return None
    # By a deadline that all but the last few samples keep; those go one by one to whoever is done first with one more.
    low, high = 0.0, max(start + rows * each for start, each in zip(fixed, row_seconds, strict=True))
    through = _all_through(fixed, row_seconds, most_rows, least_rows)
    for _ in range(60):
        deadline = (low + high) / 2
        low, high = (low, deadline) if through(deadline) >= rows else (deadline, high)
    given = _until(low, fixed, row_seconds, most_rows, least_rows)
    waiting = [(fixed[rank] + (given[rank] + 1) * row_seconds[rank], rank) for rank in range(ranks) if given[rank] < most_rows[rank]]
    heapq.heapify(waiting)
    for _ in range(rows - sum(given)):
        _, rank = heapq.heappop(waiting)
        given[rank] += 1
        if given[rank] < most_rows[rank]:
            heapq.heappush(waiting, (fixed[rank] + (given[rank] + 1) * row_seconds[rank], rank))
    return tuple(given)


def _all_through(
    fixed: Sequence[float], row_seconds: Sequence[float], most_rows: Sequence[int], least_rows: int
) -> Callable[[float], float]:
    """How many samples all ranks get through by a deadline."""
    if len(row_seconds) < _MANY_RANKS:
        return lambda deadline: sum(_until(deadline, fixed, row_seconds, most_rows, least_rows))
    start, each, most = (np.asarray(values, dtype=np.float64) for values in (fixed, row_seconds, most_rows))
    return lambda deadline: float(np.maximum(least_rows, np.minimum(most, np.floor((deadline - start) / each))).sum())


def _until(deadline: float, fixed: Sequence[float], row_seconds: Sequence[float], most_rows: Sequence[int], least_rows: int) -> list[int]:
    """What each rank gets through by then."""
    return [
        max(least_rows, min(most, floor((deadline - start) / each)))
        for start, each, most in zip(fixed, row_seconds, most_rows, strict=True)
    ]


def largest_rows(rows: tuple[int, int], needs: tuple[int, int], budget: int, most: int) -> int:
    """How many samples a device's memory holds, going by what it needs for two numbers of them: a straight line through both.

    Args:
        rows: two numbers of samples.
        needs: bytes for each of them.
        budget: bytes that are there.
        most: samples of the batch.
    """
    (few, many), (less, more) = rows, needs
    if few == many or more <= less:
        return most if min(needs) <= budget else 0
    each = (more - less) / (many - few)
    return max(0, min(most, few + floor((budget - less) / each)))
