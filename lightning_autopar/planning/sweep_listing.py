"""List scheduling: jobs in an order, each in a way that was chosen for it, each as early as its devices are free.

For devices that are alike the best schedule of all is among these (of the order in which it starts its jobs, and of its ways).
It chooses neither the order nor the ways: ``sweep.py`` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lightning_autopar.planning.sweep_jobs import Job, Placed, Schedule, SweepDevice, Way, seatings

#: Sets of devices that are looked at one by one, where a way may not have any of its kinds.
_Sets = tuple[tuple[int, ...], ...]


class Seating(NamedTuple):
    """A way, made ready to be placed often.

    ``groups`` are (devices that will do, the smallest first; how many of them), the most demanding first; ``sets`` stand in their place
    where the way may have only some sets of devices.
    """

    seconds: float
    groups: tuple[tuple[tuple[int, ...], int], ...]
    sets: _Sets


class Listing:
    """Jobs and devices, made ready for many lists of the same.

    Args:
        jobs: with their ways; those that fit on no device are left out of each job.
        devices: to place them on.
        busy_seconds: until when devices are taken, by id.

    Raises:
        ValueError: if a job has no way that fits on the devices.
    """

    def __init__(self, jobs: Sequence[Job], devices: Sequence[SweepDevice], busy_seconds: Mapping[str, float] | None = None) -> None:
        self.jobs, self.devices = tuple(jobs), tuple(devices)
        self.busy = {device: seconds for device, seconds in (busy_seconds or {}).items() if seconds > 0}
        self.ways: list[list[Way]] = []
        self.seatings: list[list[Seating]] = []
        for job in jobs:
            ready = [(way, made) for way in job.ways if (made := _seating(way, self.devices)) is not None]
            if not ready:
                raise ValueError(
                    f"{job.name} fits on none of the devices {', '.join(device.id for device in devices) or '(there are none)'}"
                )
            self.ways.append([way for way, _ in ready])
            self.seatings.append([made for _, made in ready])
        self._free_at = [self.busy.get(device.id, 0.0) for device in devices]

    def length(self, order: Sequence[int], ways: Sequence[int]) -> tuple[float, float]:
        """How long the list takes, and the sum of the times at which jobs end, which tells equally long ones apart.

        Args:
            order: of the jobs, as indices.
            ways: of each job, as an index.
        """
        free_at = self._free_at[:]
        total = 0.0
        for job in order:
            seating = self.seatings[job][ways[job]]
            start, on = _place(seating, free_at)
            end = start + seating.seconds
            total += end
            for index in on:
                free_at[index] = end
        return max(free_at, default=0.0), total

    def schedule(self, order: Sequence[int], ways: Sequence[int]) -> Schedule:
        """The list's schedule. Arguments as :meth:`length`'s."""
        free_at = self._free_at[:]
        placed = []
        for job in order:
            seating, way = self.seatings[job][ways[job]], self.ways[job][ways[job]]
            start, on = _place(seating, free_at)
            for index in on:
                free_at[index] = start + seating.seconds
            devices = _in_order_of_seats(way, [self.devices[index] for index in on])
            placed.append(Placed(job=self.jobs[job].name, way=way, devices=devices, start_seconds=start))
        return Schedule(placed=tuple(sorted(placed, key=lambda place: place.start_seconds)), busy_seconds=dict(self.busy))

    def bound_seconds(self) -> float:
        """No schedule is shorter: neither than any job at its fastest, nor than all work at its least, spread evenly."""
        if not self.jobs:
            return max(self._free_at, default=0.0)
        fastest = max(min(_place(seating, self._free_at[:])[0] + seating.seconds for seating in seatings) for seatings in self.seatings)
        work = sum(min(way.device_seconds for way in ways) for ways in self.ways)
        return max(fastest, *self._free_at, (sum(self._free_at) + work) / len(self.devices))


def _seating(way: Way, devices: tuple[SweepDevice, ...]) -> Seating | None:
    """A way on these devices; None where it fits nowhere."""
    if way.among:
        sets = tuple(seatings(way, devices))
        return Seating(way.seconds, (), sets) if sets else None
    groups: dict[tuple[int, ...], int] = {}
    for seat in sorted(way.seats, key=lambda seat: (seat.kind, -seat.needed_bytes)):
        able = [index for index, device in enumerate(devices) if device.kind == seat.kind and device.free_bytes >= seat.needed_bytes]
        able.sort(key=lambda index: devices[index].free_bytes)
        groups[tuple(able)] = groups.get(tuple(able), 0) + 1
    # Of one kind, what a more demanding seat can have is among what a less demanding one can: so enough for each prefix is enough.
    by_kind: dict[str, int] = {}
    for able_here, count in groups.items():
        if not able_here:
            return None
        kind = devices[able_here[0]].kind
        by_kind[kind] = by_kind.get(kind, 0) + count
        if len(able_here) < by_kind[kind]:
            return None
    return Seating(way.seconds, tuple(groups.items()), ())


def _place(seating: Seating, free_at: list[float]) -> tuple[float, Sequence[int]]:
    """The earliest start, and the devices for it: of those free by then the smallest that will do, and of these the latest."""
    if seating.sets:
        return min((max(free_at[index] for index in chosen), chosen) for chosen in seating.sets)
    if len(seating.groups) == 1:  # by far the most
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


def _in_order_of_seats(way: Way, devices: Sequence[SweepDevice]) -> tuple[str, ...]:
    """Which device is which seat's: of a kind, the seat that needs most has the largest."""
    left = sorted(devices, key=lambda device: -device.free_bytes)
    seated: dict[int, str] = {}
    for seat in sorted(range(len(way.seats)), key=lambda index: -way.seats[index].needed_bytes):
        device = next(device for device in left if device.kind == way.seats[seat].kind)
        left.remove(device)
        seated[seat] = device.id
    return tuple(seated[index] for index in range(len(way.seats)))
