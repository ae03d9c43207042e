"""What a sweep's schedule is made of: devices, jobs with the ways in which each may run, and where each is put.

Plain values. Knows no model, no report and no process: how a way's seconds and bytes came to be is somebody else's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations


@dataclass(frozen=True, kw_only=True)
class SweepDevice:
    """A device that runs are put on.

    Args:
        id: its own.
        kind: devices of one kind are as fast as each other; a way names kinds, not devices.
        free_bytes: what a run may take of it.
    """

    id: str
    kind: str
    free_bytes: int


@dataclass(frozen=True, kw_only=True)
class Seat:
    """What one rank of a way needs.

    Args:
        kind: of the device.
        needed_bytes: that must be free there.
    """

    kind: str
    needed_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to run a job: on how many devices of which kinds, and for how long.

    Args:
        seats: one a device.
        seconds: of the whole run, predicted.
        title: the plan in words.
        among: the sets of devices that it may have, where not all devices of its kinds are linked as well; empty where any will do.

    Raises:
        ValueError: if it needs no device, or takes no time.
    """

    seats: tuple[Seat, ...]
    seconds: float
    title: str = ""
    among: tuple[frozenset[str], ...] = ()

    def __post_init__(self) -> None:
        if not self.seats:
            raise ValueError(f"the way {self.title!r} has no seats; a run needs a device at least")
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"the way {self.title!r} takes {self.seconds} s; it must be a number above 0")

    @property
    def device_seconds(self) -> float:
        """What it takes of the devices in all."""
        return len(self.seats) * self.seconds


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run that has to be done.

    Args:
        name: its own among the sweep's.
        ways: how it may run; at least one.
        priority: a larger one is put first.
    """

    name: str
    ways: tuple[Way, ...]
    priority: int = 0


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Where and when a job runs.

    Args:
        job: its name.
        way: how.
        devices: their ids.
        start_seconds: from now on.
    """

    job: str
    way: Way
    devices: tuple[str, ...]
    start_seconds: float

    @property
    def end_seconds(self) -> float:
        """When it is over, from now on."""
        return self.start_seconds + self.way.seconds


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Every job's place.

    Args:
        placed: in the order in which they start.
        busy_seconds: until when devices are taken by what runs already, by id.
    """

    placed: tuple[Placed, ...] = ()
    busy_seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def makespan_seconds(self) -> float:
        """When the last job is over, what runs already among them."""
        return max([place.end_seconds for place in self.placed] + list(self.busy_seconds.values()), default=0.0)

    @property
    def now(self) -> tuple[Placed, ...]:
        """Those that start at once."""
        return tuple(place for place in self.placed if place.start_seconds <= 0)


def check_schedule(schedule: Schedule, jobs: Sequence[Job], devices: Sequence[SweepDevice]) -> None:
    """Whether a schedule can be: each job once, no device twice at a time, no more memory than is free.

    Raises:
        AssertionError: if it can't.
    """
    by_id = {device.id: device for device in devices}
    assert sorted(place.job for place in schedule.placed) == sorted(job.name for job in jobs), "each job has one place"
    ways = {job.name: job.ways for job in jobs}
    taken: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for device, seconds in schedule.busy_seconds.items():
        taken[device].append((0.0, seconds))
    for place in schedule.placed:
        assert place.way in ways[place.job], f"{place.job} runs in a way of its own"
        assert len(set(place.devices)) == len(place.devices) == len(place.way.seats), f"{place.job} has a device for each rank"
        for seat, device in zip(place.way.seats, place.devices, strict=True):
            assert seat.kind == by_id[device].kind, f"{place.job} needs {seat.kind}"
            assert seat.needed_bytes <= by_id[device].free_bytes, f"{place.job} needs more memory than {device} has"
            taken[device].append((place.start_seconds, place.end_seconds))
        assert not place.way.among or frozenset(place.devices) in place.way.among, f"{place.job} can't have these devices"
    for device, spans in taken.items():
        for (_, end), (start, _) in zip(sorted(spans), sorted(spans)[1:], strict=False):
            assert start >= end - 1e-9 * max(1.0, end), f"two jobs are on {device} at a time"


def seatings(way: Way, devices: Sequence[SweepDevice]) -> list[tuple[int, ...]]:
    """Every set of devices on which a way can run, as indices in the order of its seats; for few devices only."""
    wanted = sorted(range(len(way.seats)), key=lambda index: -way.seats[index].needed_bytes)
    found = []
    for chosen in combinations(range(len(devices)), len(way.seats)):
        if way.among and frozenset(devices[index].id for index in chosen) not in way.among:
            continue
        left = sorted(chosen, key=lambda index: -devices[index].free_bytes)
        seated: dict[int, int] = {}
        for seat in wanted:
            need = way.seats[seat]
            # The seat that needs most takes the largest device of its kind.
            on = next((index for index in left if devices[index].kind == need.kind), None)
            if on is None or devices[on].free_bytes < need.needed_bytes:
                break
            left.remove(on)
            seated[seat] = on
        else:
            found.append(tuple(seated[seat] for seat in range(len(way.seats))))
    return found
