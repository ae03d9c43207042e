"""What a sweep's schedule is made of: devices, jobs, the options by which each job may run, and where each job is put.

The options come from a plan's report, as ``lightning-autopar plan --json`` prints it. A report names particular devices; an option may use
any others of the same kinds that are linked as well. Plain values: knows no model, no process, and not how seconds and bytes were
predicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

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
