"""Puts jobs on devices so that the last one ends soonest: by which option each runs, on which devices, in which order.

The problem (moldable jobs on a few devices) is NP-hard. Allotments that are good for some deadline (J. Turek, J. L. Wolf, P. S. Yu:
Approximate algorithms for scheduling parallelizable tasks, SPAA 1992) are listed longest first, and the best lists improved job by job. A
list is scheduled in its order, each job as early as its devices are free; on equal devices the best schedule of all is such a list.
``benchmarks/sweep_exact.py`` compares small cases with the best schedule. A longer search gains nothing once runs take longer or shorter
than predicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from lightning_autopar.sharing.sweep.jobs import Job, Placed, RunOption, Schedule, SweepDevice, seatings

#: The most sets of devices that are looked at one by one, for an option that can't have any devices of its kinds.
_Sets = tuple[tuple[int, ...], ...]


class Seating(NamedTuple):
    """An option, prepared to be placed often. ``groups`` are (suitable devices, the smallest first; how many of them), the most demanding
    first; ``sets`` replaces them if the option may have only some sets of devices.
    """

    seconds: float
    groups: tuple[tuple[tuple[int, ...], int], ...]
    sets: _Sets


class Listing:
    """Jobs and devices, prepared for many lists of the same jobs.

    Args:
        jobs: with their ways; those that fit on no device are left out of each job.

    Raises:
        ValueError: if a job has no way that fits on the devices.
    """

    def __init__(self, jobs: Sequence[Job], devices: Sequence[SweepDevice], busy_seconds: Mapping[str, float] | None = None) -> None:
        self.jobs, self.devices = tuple(jobs), tuple(devices)
        self.busy = {device: seconds for device, seconds in (busy_seconds or {}).items() if seconds > 0}
        self.options: list[list[RunOption]] = []
        self.seatings: list[list[Seating]] = []
        for job in jobs:
            ready = [(option, made) for option in job.options if (made := _seating(option, self.devices)) is not None]
            if not ready:
                raise ValueError(
                    f"{job.name} fits on none of the devices {', '.join(device.id for device in devices) or '(there are none)'}"
                )
            self.options.append([option for option, _ in ready])
            self.seatings.append([made for _, made in ready])
        self._free_at = [self.busy.get(device.id, 0.0) for device in devices]

    def length(self, order: Sequence[int], options: Sequence[int]) -> tuple[float, float]:
        """How long the list takes, and the sum of the times at which jobs end, which ranks equally long lists.

        Args:
            order: of the jobs, as indices.
            options: of each job, as an index.
        """
        free_at = self._free_at[:]
        total = 0.0
        for job in order:
            seating = self.seatings[job][options[job]]
            start, on = _place(seating, free_at)
            end = start + seating.seconds
            total += end
            for index in on:
                free_at[index] = end
        return max(free_at, default=0.0), total

    def schedule(self, order: Sequence[int], options: Sequence[int]) -> Schedule:
        """The list's schedule. Arguments as :meth:`length`'s."""
        free_at = self._free_at[:]
        placed = []
        for job in order:
            seating, option = self.seatings[job][options[job]], self.options[job][options[job]]
            start, on = _place(seating, free_at)
            for index in on:
                free_at[index] = start + seating.seconds
            devices = _in_order_of_seats(option, [self.devices[index] for index in on])
            placed.append(Placed(job=self.jobs[job].name, option=option, devices=devices, start_seconds=start))
        return Schedule(placed=tuple(sorted(placed, key=lambda place: place.start_seconds)), busy_seconds=dict(self.busy))


def _seating(option: RunOption, devices: tuple[SweepDevice, ...]) -> Seating | None:
    """A way on these devices; None where it fits nowhere."""
    if option.among:
        sets = tuple(seatings(option, devices))
        return Seating(option.seconds, (), sets) if sets else None
    groups: dict[tuple[int, ...], int] = {}
    for device_need in sorted(option.needs, key=lambda device_need: (device_need.kind, -device_need.needed_bytes)):
        able = [
            index
            for index, device in enumerate(devices)
            if device.kind == device_need.kind and device.free_bytes >= device_need.needed_bytes
        ]
        able.sort(key=lambda index: devices[index].free_bytes)
        groups[tuple(able)] = groups.get(tuple(able), 0) + 1
    # Within a kind, a less demanding seat can use all devices that a more demanding one can: so it suffices that each prefix has enough.
    by_kind: dict[str, int] = {}
    for able_here, count in groups.items():
        if not able_here:
            return None
        kind = devices[able_here[0]].kind
        by_kind[kind] = by_kind.get(kind, 0) + count
        if len(able_here) < by_kind[kind]:
            return None
    return Seating(option.seconds, tuple(groups.items()), ())


def _place(seating: Seating, free_at: list[float]) -> tuple[float, Sequence[int]]:
    """The earliest start, and the devices for it: of those free by then, the smallest suitable ones, and of these the latest."""
    if seating.sets:
        return min((max(free_at[index] for index in chosen), chosen) for chosen in seating.sets)
    if len(seating.groups) == 1:  # by far the most frequent case
        able, count = seating.groups[0]
        start = sorted([free_at[index] for index in able])[count - 1]
        # Stable: of devices that are free by then those with the least memory, which come first.
        return start, [index for index in able if free_at[index] <= start][:count]
    start, taken = 0.0, set[int]()
    for able, count in seating.groups:
        soonest = sorted((index for index in able if index not in taken), key=free_at.__getitem__)[:count]
        taken.update(soonest)
        start = max(start, free_at[soonest[-1]])
    on: list[int] = []
    for able, count in seating.groups:
        on += [index for index in able if free_at[index] <= start and index not in on][:count]
    return start, on


def _in_order_of_seats(option: RunOption, devices: Sequence[SweepDevice]) -> tuple[str, ...]:
    """The device of each seat: within a kind, the seat that needs most gets the largest."""
    left = sorted(devices, key=lambda device: -device.free_bytes)
    seated: dict[int, str] = {}
    for device_need in sorted(range(len(option.needs)), key=lambda index: -option.needs[index].needed_bytes):
        device = next(device for device in left if device.kind == option.needs[device_need].kind)
        left.remove(device)
        seated[device_need] = device.id
    return tuple(seated[index] for index in range(len(option.needs)))


_List = tuple[list[int], list[int]]
#: How many lists are improved.
_IMPROVED = 3


def schedule(jobs: Sequence[Job], devices: Sequence[SweepDevice], busy_seconds: Mapping[str, float] | None = None) -> Schedule:
    """The list that ends soonest. Jobs of a higher priority stand before all others; the rest is free.

    Args:
        devices: to run on, one job at a time each: two that share a device take as long as one after the other, and memory besides.
        busy_seconds: for how long devices are taken by what runs already, by id.

    Raises:
        ValueError: if a job fits on none of the devices.
    """
    listing = Listing(jobs, devices, busy_seconds)
    found = sorted(_lists(listing), key=lambda each: listing.length(*each))
    return listing.schedule(*min((_improved(listing, each) for each in found[:_IMPROVED]), key=lambda each: listing.length(*each)))


def _lists(listing: Listing) -> Iterator[_List]:
    """The lists: for each deadline, the options that meet it with the least work; and for each number of devices, the fastest."""
    count = len(listing.jobs)
    seconds = sorted({option.seconds for options in listing.options for option in options})
    for deadline in seconds:
        chosen = [_for_deadline(options, deadline) for options in listing.options]
        yield _longest_first(listing, chosen), chosen
    for most in sorted({len(option.needs) for options in listing.options for option in options}):
        chosen = [at_most(options, most) for options in listing.options]
        yield _longest_first(listing, chosen), chosen
    # The list in which each job, longest first, takes the way that ends soonest.
    order = _longest_first(listing, [0] * count)
    chosen = [0] * count
    for place, job in enumerate(order):
        so_far = order[: place + 1]

        def end(option: int, job: int = job, so_far: list[int] = so_far) -> float:
            trial = chosen[:]
            trial[job] = option
            return listing.length(so_far, trial)[1]

        chosen[job] = min(range(len(listing.options[job])), key=end)
    yield order, chosen


def _improved(listing: Listing, found: _List) -> _List:
    """The list with other options of single jobs, as long as one makes it shorter."""
    best, before = listing.length(*found), None
    while best != before:
        before = best
        for job, options in enumerate(listing.options):
            for option in range(len(options)):
                chosen = [*found[1][:job], option, *found[1][job + 1 :]]
                for order in (found[0], _longest_first(listing, chosen)):
                    if (length := listing.length(order, chosen)) < best:
                        best, found = length, (order, chosen)
    return found


def at_most(options: Sequence[RunOption], most: int) -> int:
    """The fastest way of no more than so many devices, or else of those with the fewest; as an index."""
    few = [index for index, option in enumerate(options) if len(option.needs) <= most]
    if not few:
        fewest = min(len(option.needs) for option in options)
        few = [index for index, option in enumerate(options) if len(option.needs) == fewest]
    return min(few, key=lambda index: (options[index].seconds, len(options[index].needs)))


def _for_deadline(options: Sequence[RunOption], deadline: float) -> int:
    in_time = [index for index, option in enumerate(options) if option.seconds <= deadline]
    if in_time:
        return min(in_time, key=lambda index: (options[index].device_seconds, options[index].seconds))
    return min(range(len(options)), key=lambda index: options[index].seconds)


def _longest_first(listing: Listing, options: Sequence[int]) -> list[int]:
    def key(job: int) -> tuple[float, ...]:
        option = listing.options[job][options[job]]
        return -listing.jobs[job].priority, -option.seconds, -len(option.needs), job

    return sorted(range(len(listing.jobs)), key=key)
