"""Puts jobs on devices so that the last one ends soonest: by which option each runs, on which devices, in which order.

The options come from a plan's report, as ``lightning-autopar plan --json`` prints it. A report names particular devices; an option may use
any others of the same kinds that are linked as well. Knows no model, no process, and not how seconds and bytes were predicted.

The problem (moldable jobs on a few devices) is NP-hard. Allotments that are good for some deadline (J. Turek, J. L. Wolf, P. S. Yu:
Approximate algorithms for scheduling parallelizable tasks, SPAA 1992) are listed longest first, and the best lists improved job by job. A
list is scheduled in its order, each job as early as its devices are free; on equal devices the best schedule of all is such a list.
``benchmarks/sweep_exact.py`` compares small cases with the best schedule. A longer search gains nothing once runs take longer or shorter
than predicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, NamedTuple

from lightning_autopar.planning.device_sets import LINKS


@dataclass(frozen=True, kw_only=True)
class SweepDevice:
    """A device on which runs are placed.

    Args:
        kind: devices of one kind are as fast as each other; a way names kinds, not devices.
        free_bytes: what a run may take of it.
    """

    id: str
    kind: str
    free_bytes: int


@dataclass(frozen=True, kw_only=True)
class DeviceNeed:
    """What one rank of a way needs.

    Args:
        needed_bytes: that must be free there.
    """

    kind: str
    needed_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class RunOption:
    """One way to run a job: on how many devices of which kinds, and for how long.

    Args:
        needs: one a device.
        seconds: of the whole run, predicted.
        title: the plan in words.
        among: the sets of devices that it may have, if not all devices of its kinds are linked equally well; empty if any set may be used.

    Raises:
        ValueError: if it needs no device, or takes no time.
    """

    needs: tuple[DeviceNeed, ...]
    seconds: float
    title: str = ""
    among: tuple[frozenset[str], ...] = ()

    def __post_init__(self) -> None:
        if not self.needs:
            raise ValueError(f"the plan {self.title!r} has no devices; a run needs at least one")
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"the plan {self.title!r} takes {self.seconds} s; it must be a number above 0")

    @property
    def device_seconds(self) -> float:
        """The device seconds that it takes in all."""
        return len(self.needs) * self.seconds


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run that has to be done.

    Args:
        name: its own among the sweep's.
        options: how it may run; at least one.
        priority: a larger one is put first.
    """

    name: str
    options: tuple[RunOption, ...]
    priority: int = 0


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Where and when a job runs.

    Args:
        devices: their ids.
        start_seconds: from now on.
    """

    job: str
    option: RunOption
    devices: tuple[str, ...]
    start_seconds: float

    @property
    def end_seconds(self) -> float:
        """When it is over, from now on."""
        return self.start_seconds + self.option.seconds


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


def seatings(option: RunOption, devices: Sequence[SweepDevice]) -> list[tuple[int, ...]]:
    """Every set of devices on which a way can run, as indices in the order of its seats; for few devices only."""
    wanted = sorted(range(len(option.needs)), key=lambda index: -option.needs[index].needed_bytes)
    found = []
    for chosen in combinations(range(len(devices)), len(option.needs)):
        if option.among and frozenset(devices[index].id for index in chosen) not in option.among:
            continue
        left = sorted(chosen, key=lambda index: -devices[index].free_bytes)
        seated: dict[int, int] = {}
        for device_need in wanted:
            need = option.needs[device_need]
            # The seat that needs most takes the largest device of its kind.
            on = next((index for index in left if devices[index].kind == need.kind), None)
            if on is None or devices[on].free_bytes < need.needed_bytes:
                break
            left.remove(on)
            seated[device_need] = on
        else:
            found.append(tuple(seated[device_need] for device_need in range(len(option.needs))))
    return found


#: If there are more sets of devices than this to choose from, an option keeps the one that it was planned for.
_MOST_SETS = 300

Report = Mapping[str, Any]


def devices_of(report: Report) -> list[SweepDevice]:
    """The devices that a report was made for. Those with an error aren't among them."""
    nodes = {device["node"] for device in report["inventory"]["devices"]}
    return [
        SweepDevice(id=device["id"], kind=_kind(device, several_nodes=len(nodes) > 1), free_bytes=int(device["free_bytes"]))
        for device in report["inventory"]["devices"]
        if device["error"] is None
    ]


def options_of(report: Report, *, start_seconds: float = 0.0, unknown_seconds: float | None = None) -> tuple[RunOption, ...]:
    """How a run may be placed, by its report's fitting plans: the fastest for each number of devices of each kind.

    Args:
        report: with ``run_seconds`` of each candidate.
        start_seconds: until the first step; added to each way.
        unknown_seconds: the assumed fastest time of a run of unknown length; without it such a run has no options.
    """
    devices = {device.id: device for device in devices_of(report)}
    left_alone = {device: devices[device].free_bytes - budget for device, budget in report["budgets"].items() if device in devices}
    fitting = [each for each in report["candidates"] if each["fits"] and all(device in devices for device in each["plan"]["devices"])]
    fastest = min((each["seconds"]["step"] for each in fitting), default=None)
    links = _Links(report, list(devices.values()))
    found: dict[tuple[_Able, tuple[frozenset[str], ...]], RunOption] = {}
    for each in fitting:
        seconds = each.get("run_seconds")
        if seconds is None:
            if unknown_seconds is None or not fastest:
                continue
            seconds = unknown_seconds * each["seconds"]["step"] / fastest
        ids = each["plan"]["devices"]
        needs = tuple(
            DeviceNeed(kind=devices[device].kind, needed_bytes=int(each["needs_bytes"].get(device, 0)) + left_alone.get(device, 0))
            for device in ids
        )
        title = f"{each['plan']['engine']} on {len(ids)}" if len(ids) > 1 else str(each["plan"]["engine"])
        option = RunOption(needs=needs, seconds=start_seconds + float(seconds), title=title, among=links.as_good(ids))
        able = tuple(sorted((device_need.kind, _able(device_need, devices.values())) for device_need in needs))
        if (key := (able, option.among)) not in found or option.seconds < found[key].seconds:
            found[key] = option
    options = sorted(((able, option) for (able, _), option in found.items()), key=lambda each: (len(each[1].needs), each[1].seconds))
    return tuple(
        option for index, (able, option) in enumerate(options) if not any(_beats(other, (able, option)) for other in options[:index])
    )


def scaled(options: Sequence[RunOption], factor: float) -> tuple[RunOption, ...]:
    """The option, so many times slower."""
    return tuple(replace(option, seconds=option.seconds * factor) for option in options)


def _kind(device: Mapping[str, Any], *, several_nodes: bool) -> str:
    """The kind of a device: devices of one kind are equally fast."""
    words = [device["name"]]
    if device["kind"] == "cpu":
        words.append(f"{device['threads']} threads")
    if device["slowdown"] != 1:
        words.append(f"{device['slowdown']:.2g} times slower")
    if several_nodes:
        words.append(f"node {device['node']}")
    return ", ".join(words)


_Able = tuple[tuple[str, int], ...]


def _able(device_need: DeviceNeed, devices: Iterable[SweepDevice]) -> int:
    """On how many devices there is room for a rank; of two ranks on a kind, the one with more devices has all that the other has."""
    return sum(device.kind == device_need.kind and device.free_bytes >= device_need.needed_bytes for device in devices)


def _beats(one: tuple[_Able, RunOption], other: tuple[_Able, RunOption]) -> bool:
    """Whether one option isn't slower, and runs wherever the other does, on some of its devices."""
    if one[1].seconds > other[1].seconds or one[1].among:
        return False
    for kind in {kind for kind, _ in one[0]}:
        rooms, theirs = ([room for name, room in able if name == kind] for able in (one[0], other[0]))  # the most demanding first
        if len(rooms) > len(theirs) or any(room < their for room, their in zip(rooms, theirs, strict=False)):
            return False
    return True


class _Links:
    """How well sets of a report's devices are linked."""

    def __init__(self, report: Report, devices: Sequence[SweepDevice]) -> None:
        self._devices = devices
        self._by_id = {device.id: device for device in devices}
        self._quality = {
            frozenset((link["a"], link["b"])): (LINKS.index(link["kind"]), link["bytes_per_second"] or 0.0)
            for link in report["inventory"]["links"]
        }
        pairs: dict[tuple[str, ...], set[tuple[int, float]]] = {}
        for a, b in combinations(devices, 2):
            pairs.setdefault(tuple(sorted((a.kind, b.kind))), set()).add(self._of((a.id, b.id)))
        self._even = all(len(found) == 1 for found in pairs.values())

    def as_good(self, ids: Sequence[str]) -> tuple[frozenset[str], ...]:
        """The sets of devices of the same kinds that are linked at least as well; none where all are."""
        if self._even or len(ids) == 1:
            return ()
        wanted, least = Counter(self._by_id[device].kind for device in ids), self._of(ids)
        found: list[frozenset[str]] = []
        for looked, chosen in enumerate(combinations(self._devices, len(ids))):
            if looked > 100 * _MOST_SETS or len(found) > _MOST_SETS:
                return (frozenset(ids),)
            if Counter(device.kind for device in chosen) == wanted and self._of([device.id for device in chosen]) >= least:
                found.append(frozenset(device.id for device in chosen))
        return tuple(found)

    def _of(self, ids: Sequence[str]) -> tuple[int, float]:
        """The worst link of a set."""
        return min(self._quality.get(frozenset(pair), (LINKS.index("host"), 0.0)) for pair in combinations(ids, 2))


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
