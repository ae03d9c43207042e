"""The best schedule there is, by branch and bound: for few jobs on few devices, what the heuristic's schedules are compared with.

Jobs are started in the order of their start times, each as early as its devices are free: an optimal schedule, every job moved as early
as it can be, is among these. Priorities are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_autopar.sharing.sweep.scheduler import Job, Listing, Placed, Schedule, SweepDevice, schedule, seatings

#: Numbers that differ by less are the same time.
_DIGITS = 9


class TooMany(Exception):
    """The search would take longer than it was given."""


def best_schedule(
    jobs: Sequence[Job], devices: Sequence[SweepDevice], busy_seconds: Mapping[str, float] | None = None, *, most_nodes: int = 2_000_000
) -> Schedule:
    """The shortest schedule.

    Args:
        jobs: up to some eight.
        devices: up to some five.
        busy_seconds: for how long devices are taken, by id.
        most_nodes: after so many steps the search is given up.

    Raises:
        TooMany: if it is.
        ValueError: if a job fits on none of the devices.
    """
    listing = Listing(jobs, devices, busy_seconds)
    if not jobs:
        return listing.schedule([], [])
    plain = [Job(name=job.name, options=job.options) for job in jobs]
    search = _Search(listing, schedule(plain, devices, busy_seconds), most_nodes)
    search.go(frozenset(range(len(jobs))), [listing.busy.get(device.id, 0.0) for device in devices], 0.0, [])
    return search.best


def bound_seconds(listing: Listing) -> float:
    """A lower bound of schedules: the longest job at its fastest, or the least work of all jobs, spread evenly."""
    free_at = [listing.busy.get(device.id, 0.0) for device in listing.devices]
    count = len(listing.jobs)
    fastest = [min(listing.length([job], [option] * count)[1] for option in range(len(listing.options[job]))) for job in range(count)]
    work = sum(min(option.device_seconds for option in options) for options in listing.options)
    return max(*fastest, *free_at, (sum(free_at) + work) / len(free_at))


class _Search:
    """The state of one search: the best schedule so far, and what has been looked at."""

    def __init__(self, listing: Listing, best: Schedule, most_nodes: int) -> None:
        self.listing, self.best, self._nodes_left = listing, best, most_nodes
        self.length = best.makespan_seconds
        self._bound = bound_seconds(listing)
        self._seen: dict[tuple[object, ...], float] = {}
        self._choices = [[(option, seatings(option, listing.devices)) for option in options] for options in listing.options]
        self._least_work = [min(option.device_seconds for option in options) for options in listing.options]
        named = any(option.among for options in listing.options for option in options)
        self._classes = [(device.kind, device.free_bytes, device.id if named else "") for device in listing.devices]
        # Jobs that are alike are started in their order.
        self._before = [
            next((other for other in reversed(range(job)) if listing.options[other] == listing.options[job]), None)
            for job in range(len(listing.jobs))
        ]

    def go(self, left: frozenset[int], free_at: list[float], now: float, placed: list[Placed]) -> None:
        """Every continuation that could be shorter than the best one so far."""
        length = max(free_at)
        if not left:
            if length < self.length * (1 - 1e-12):
                self.length, self.best = length, Schedule(placed=tuple(placed), busy_seconds=dict(self.listing.busy))
            return
        if self.length <= self._bound * (1 + 1e-9):
            return
        self._nodes_left -= 1
        if self._nodes_left < 0:
            raise TooMany("the best schedule takes too long to find")
        idle = [max(seconds, now) for seconds in free_at]
        least = (sum(idle) + sum(self._least_work[job] for job in left)) / len(free_at)
        least = max(least, length, *(self._soonest(job, idle) for job in left))
        if least >= self.length * (1 - 1e-9):
            return
        state = tuple(sorted((each, round(seconds, _DIGITS)) for each, seconds in zip(self._classes, idle, strict=True)))
        key = (left, state)
        if self._seen.get(key, float("inf")) <= length:
            return
        self._seen[key] = length
        moves = []
        for job in left:
            if self._before[job] in left:
                continue
            for option, choices in self._choices[job]:
                moves += [(start, start + option.seconds, job, option, chosen) for start, chosen in self._starts(choices, free_at, now)]
        moves.sort(key=lambda move: (move[0], -move[4].__len__(), -move[1], move[2]))
        for start, end, job, option, chosen in moves:
            if end >= self.length * (1 - 1e-12):
                continue
            after = free_at[:]
            for index in chosen:
                after[index] = end
            names = tuple(self.listing.devices[index].id for index in chosen)
            place = Placed(job=self.listing.jobs[job].name, option=option, devices=names, start_seconds=start)
            self.go(left - {job}, after, start, [*placed, place])

    def _starts(self, choices: list[tuple[int, ...]], free_at: list[float], now: float) -> list[tuple[float, tuple[int, ...]]]:
        """When a way could start, not before the last job did, and on what; of sets that are alike only one."""
        found: dict[tuple[object, ...], tuple[float, tuple[int, ...]]] = {}
        for chosen in choices:
            start = max(free_at[index] for index in chosen)
            # Devices that have been free for long are as good as those just freed: later jobs start no sooner than now.
            if start < now:
                start = now
            alike = tuple(sorted((self._classes[index], max(free_at[index], now)) for index in chosen))
            found.setdefault(alike, (start, chosen))
        return list(found.values())

    def _soonest(self, job: int, idle: list[float]) -> float:
        """No earlier than this a job can be over."""
        return min(
            option.seconds + min(max(idle[index] for index in chosen) for chosen in choices) for option, choices in self._choices[job]
        )
