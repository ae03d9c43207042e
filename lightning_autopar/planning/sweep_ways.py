"""A plan's report, as ``lightning-autopar plan --json`` prints it, made into the ways in which its run may be placed.

A report names particular devices; a way may have any others of the same kinds that are linked as well. Knows JSON's values, no process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from lightning_autopar.planning.device_sets import LINKS
from lightning_autopar.planning.sweep_jobs import Seat, SweepDevice, Way

#: Where there are more sets of devices than that to choose from, a way keeps the one that it was planned for.
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


def ways_of(report: Report, *, start_seconds: float = 0.0, unknown_seconds: float | None = None) -> tuple[Way, ...]:
    """How a run may be placed by its report's fitting plans: for each number of devices of each kind the fastest.

    Args:
        report: with ``run_seconds`` of each candidate.
        start_seconds: until the first step; added to each way.
        unknown_seconds: how long a run takes at its fastest where nobody knows; without it such a run has no ways.
    """
    devices = {device.id: device for device in devices_of(report)}
    left_alone = {device: devices[device].free_bytes - budget for device, budget in report["budgets"].items() if device in devices}
    fitting = [each for each in report["candidates"] if each["fits"] and all(device in devices for device in each["plan"]["devices"])]
    fastest = min((each["seconds"]["step"] for each in fitting), default=None)
    links = _Links(report, list(devices.values()))
    found: dict[tuple[_Able, tuple[frozenset[str], ...]], Way] = {}
    for each in fitting:
        seconds = each.get("run_seconds")
        if seconds is None:
            if unknown_seconds is None or not fastest:
                continue
            seconds = unknown_seconds * each["seconds"]["step"] / fastest
        ids = each["plan"]["devices"]
        seats = tuple(
            Seat(kind=devices[device].kind, needed_bytes=int(each["needs_bytes"].get(device, 0)) + left_alone.get(device, 0))
            for device in ids
        )
        title = f"{each['plan']['engine']} on {len(ids)}" if len(ids) > 1 else str(each["plan"]["engine"])
        way = Way(seats=seats, seconds=start_seconds + float(seconds), title=title, among=links.as_good(ids))
        able = tuple(sorted((seat.kind, _able(seat, devices.values())) for seat in seats))
        if (key := (able, way.among)) not in found or way.seconds < found[key].seconds:
            found[key] = way
    ways = sorted(((able, way) for (able, _), way in found.items()), key=lambda each: (len(each[1].seats), each[1].seconds))
    return tuple(way for index, (able, way) in enumerate(ways) if not any(_beats(other, (able, way)) for other in ways[:index]))


def scaled(ways: Sequence[Way], factor: float) -> tuple[Way, ...]:
    """The same, so many times slower."""
    return tuple(replace(way, seconds=way.seconds * factor) for way in ways)


def _kind(device: Mapping[str, Any], *, several_nodes: bool) -> str:
    """Devices of one kind are as fast as each other."""
    words = [device["name"]]
    if device["kind"] == "cpu":
        words.append(f"{device['threads']} threads")
    if device["slowdown"] != 1:
        words.append(f"{device['slowdown']:.2g} times slower")
    if several_nodes:
        words.append(f"node {device['node']}")
    return ", ".join(words)


_Able = tuple[tuple[str, int], ...]


def _able(seat: Seat, devices: Iterable[SweepDevice]) -> int:
    """On how many devices there is room for a rank; of two ranks on a kind, the one with more has all that the other has."""
    return sum(device.kind == seat.kind and device.free_bytes >= seat.needed_bytes for device in devices)


def _beats(one: tuple[_Able, Way], other: tuple[_Able, Way]) -> bool:
    """Whether one is no slower, and runs wherever the other does, on some of its devices."""
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
