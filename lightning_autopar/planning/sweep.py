"""Put jobs on devices so that the last is over soonest: which way each takes, on which devices, in which order.

The problem (moldable jobs on a few devices) is NP-hard. Here allotments that are good for some deadline (J. Turek, J. L. Wolf, P. S. Yu:
Approximate algorithms for scheduling parallelizable tasks, SPAA 1992) are listed longest first, and the best lists are then improved by
annealing, as Saturn (K. Nagrecha, A. Kumar, VLDB 2023) leaves to a solver. Small cases are compared with the best schedule there is
(``benchmarks/sweep_exact.py``). The same jobs on the same devices give the same schedule.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence

from lightning_autopar.planning.sweep_jobs import Job, Schedule, SweepDevice, Way
from lightning_autopar.planning.sweep_listing import Listing

#: So many lists are looked at for each schedule, divided by the number of jobs: a second for 50 jobs, less for few.
_LOOKS = 200_000
_MOST_LOOKS = 8_000
#: Of the lists to begin with so many are improved.
_KEPT = 3
#: Where annealing begins and ends, as a share of the makespan.
_HOT, _COLD = 0.05, 0.001

_List = tuple[list[int], list[int]]


def schedule(
    jobs: Sequence[Job], devices: Sequence[SweepDevice], busy_seconds: Mapping[str, float] | None = None, *, looks: int | None = None
) -> Schedule:
    """A schedule that ends soon. Jobs of a higher priority stand before all others; the rest is free.

    Args:
        jobs: to be run, each once.
        devices: to run on, one job at a time each: two that share a device take as long as one after the other, and memory besides.
        busy_seconds: for how long devices are taken by what runs already, by id.
        looks: how many lists to look at; by default as many as a second allows.

    Raises:
        ValueError: if a job fits on none of the devices.
    """
    listing = Listing(jobs, devices, busy_seconds)
    if not jobs:
        return listing.schedule([], [])
    bound = listing.bound_seconds() * (1 + 1e-9)
    starts = _distinct(listing, _starts(listing))
    best = starts[0]
    looks = min(_MOST_LOOKS, _LOOKS // len(jobs)) if looks is None else looks
    draw = random.Random(len(jobs))
    for start in starts[:_KEPT]:
        if best[0][0] <= bound:
            break
        found = _annealed(listing, start, looks // _KEPT, bound, draw)
        best = min(best, found, key=lambda each: each[0])
    return listing.schedule(*best[1])


def _starts(listing: Listing) -> Iterator[_List]:
    """Lists to begin with: for each deadline the ways that keep it with the least work; and for each number of devices the fastest."""
    count = len(listing.jobs)
    seconds = sorted({way.seconds for ways in listing.ways for way in ways})
    for deadline in seconds:
        chosen = [_for_deadline(ways, deadline) for ways in listing.ways]
        yield _longest_first(listing, chosen), chosen
    for most in sorted({len(way.seats) for ways in listing.ways for way in ways}):
        chosen = [at_most(ways, most) for ways in listing.ways]
        yield _longest_first(listing, chosen), chosen
    # The list in which each job, longest first, takes the way that ends soonest.
    order = _longest_first(listing, [0] * count)
    chosen = [0] * count
    for place, job in enumerate(order):
        so_far = order[: place + 1]

        def end(way: int, job: int = job, so_far: list[int] = so_far) -> float:
            trial = chosen[:]
            trial[job] = way
            return listing.length(so_far, trial)[1]

        chosen[job] = min(range(len(listing.ways[job])), key=end)
    yield order, chosen


def at_most(ways: Sequence[Way], most: int) -> int:
    """The fastest way of no more than so many devices, or else of those with the fewest; as an index."""
    few = [index for index, way in enumerate(ways) if len(way.seats) <= most]
    if not few:
        fewest = min(len(way.seats) for way in ways)
        few = [index for index, way in enumerate(ways) if len(way.seats) == fewest]
    return min(few, key=lambda index: (ways[index].seconds, len(ways[index].seats)))


def _for_deadline(ways: Sequence[Way], deadline: float) -> int:
    in_time = [index for index, way in enumerate(ways) if way.seconds <= deadline]
    if in_time:
        return min(in_time, key=lambda index: (ways[index].device_seconds, ways[index].seconds))
    return min(range(len(ways)), key=lambda index: ways[index].seconds)


def _longest_first(listing: Listing, ways: Sequence[int]) -> list[int]:
    def key(job: int) -> tuple[float, ...]:
        way = listing.ways[job][ways[job]]
        return -listing.jobs[job].priority, -way.seconds, -len(way.seats), job

    return sorted(range(len(listing.jobs)), key=key)


_Looked = tuple[tuple[float, float], _List]


def _distinct(listing: Listing, lists: Iterator[_List]) -> list[_Looked]:
    """Each with its length, best first, without those of equal ways."""
    found = {tuple(ways): (listing.length(order, ways), (order, ways)) for order, ways in lists}
    return sorted(found.values(), key=lambda each: each[0])


def _annealed(listing: Listing, start: _Looked, looks: int, bound: float, draw: random.Random) -> _Looked:
    """The best list found from one, by changing a way or moving a job, where worse ones are taken less and less often."""
    (order, ways), length = ([*start[1][0]], [*start[1][1]]), start[0]
    best: _Looked = (length, (order[:], ways[:]))
    count, scale = len(order), start[0][0]
    first, last = _class_bounds(listing, order)
    several = [job for job in range(count) if len(listing.ways[job]) > 1]
    for look in range(looks):
        heat = scale * _HOT * (_COLD / _HOT) ** (look / looks)
        trial_order, trial_ways = order, ways
        kind = draw.random()
        if several and kind < 0.45:
            job = several[draw.randrange(len(several))]
            way = draw.randrange(len(listing.ways[job]) - 1)
            trial_ways = ways[:]
            trial_ways[job] = way + (way >= ways[job])
        if kind >= 0.35:  # the two overlap: sometimes both
            at = draw.randrange(count)
            to = draw.randrange(first[at], last[at])
            trial_order = order[:]
            if kind < 0.8:
                trial_order.insert(to, trial_order.pop(at))
            else:
                trial_order[at], trial_order[to] = trial_order[to], trial_order[at]
        found = listing.length(trial_order, trial_ways)
        # Equally long lists are told apart by when jobs end on average, which counts little.
        worse = found[0] - length[0] + 0.01 * (found[1] - length[1]) / count
        if worse <= 0 or draw.random() < math.exp(-worse / heat):
            order, ways, length = trial_order, trial_ways, found
            if length < best[0]:
                best = length, (order[:], ways[:])
                if length[0] <= bound:
                    break
    return best


def _class_bounds(listing: Listing, order: Sequence[int]) -> tuple[list[int], list[int]]:
    """For each place in the order, where its class of priority begins and ends: no job leaves its class."""
    priorities = [listing.jobs[job].priority for job in order]
    first = [priorities.index(priority) for priority in priorities]
    last = [start + priorities.count(priority) for start, priority in zip(first, priorities, strict=True)]
    return first, last
