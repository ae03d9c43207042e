"""Whose turn it is on a host: what the runs that wait leave of the devices to those behind them. Pure: no file, no clock, no plan.

Every waiting run reserves what it wants of some devices from when it expects to start, and everybody computes the same from the same files.
Whoever is behind may take what is free now and is neither reserved from some later moment on, nor given back by then (EASY backfill, Lifka
1995, but for everybody ahead rather than the first alone, as conservative backfill has it: Mu'alem and Feitelson 2001).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from lightning_autopar.memory.inventory import Device, Inventory
from lightning_autopar.memory.lease_files import Lease
from lightning_autopar.memory.queue_files import Place

#: Whose process hasn't looked for so long is passed over until it does.
SILENT_SECONDS = 10.0


def ahead(places: Iterable[Place], order: tuple[int, int, str], now_ns: int) -> list[Place]:
    """The places before this one in the queue, without those whose process is silent; in order."""
    return sorted(
        (place for place in places if place.order < order and now_ns - place.seen_ns <= SILENT_SECONDS * 1e9),
        key=lambda place: place.order,
    )


def left_behind(
    inventory: Inventory,
    leases: Iterable[Lease],
    ahead: Iterable[Place],
    now_ns: int,
    *,
    from_ns: int | None = None,
    ends_ns: int | None = None,
) -> Inventory:
    """What of the devices a run may take without delaying anybody ahead of it, by their predictions and those of the leases' runs.

    Args:
        inventory: the devices as they are now, less what others were promised.
        leases: others'.
        ahead: see :func:`ahead`.
        now_ns: on the host's monotonic clock.
        from_ns: when the run would begin, later than now; as it is expected to be then.
        ends_ns: when the run is expected to end; it keeps what it takes for ever, unless given.
    """
    timeline = _Timeline(leases, ahead, now_ns)
    devices = tuple(replace(device, free_bytes=timeline.left_bytes(device, from_ns, ends_ns)) for device in inventory.devices)
    return replace(inventory, devices=devices)


def moments(leases: Iterable[Lease], ahead: Iterable[Place], now_ns: int) -> list[int]:
    """When something is expected to be given back after now, in order, on the monotonic clock."""
    ends: list[float] = [lease.ends_ns for lease in leases if lease.ends_ns is not None]
    ends += [_end_ns(place, now_ns) for place in ahead if place.start_ns is not None]
    return sorted({math.ceil(end) for end in ends if now_ns < end < math.inf})


def idle(inventory: Inventory, leases: Iterable[Lease]) -> Inventory:
    """The devices as they would be without any other run and without strangers; what this process has itself stays.

    A CPU device without a budget of its own shares the host's memory with all that runs there: of that, runs' leases alone are given back.
    """
    if inventory.source == "cpu":
        return without(inventory, leases)
    devices = []
    for device in inventory.devices:
        own_bytes = sum(process.used_bytes or 0 for process in device.processes if process.own)
        devices.append(replace(device, free_bytes=max(device.free_bytes, device.total_bytes - own_bytes)))
    return replace(inventory, devices=tuple(devices))


def without(inventory: Inventory, leases: Iterable[Lease]) -> Inventory:
    """The devices as they would be if these leases were given back."""
    given = list(leases)
    devices = tuple(
        replace(device, free_bytes=min(device.total_bytes, device.free_bytes + sum(lease.bytes.get(device.id, 0) for lease in given)))
        for device in inventory.devices
    )
    return replace(inventory, devices=devices)


def _start_ns(place: Place, now_ns: int) -> int:
    """When a place with a known start is expected to start; not before now."""
    assert place.start_ns is not None
    return max(now_ns, place.start_ns)


def _end_ns(place: Place, now_ns: int) -> float:
    """When a place with a known start is expected to end."""
    return math.inf if place.seconds is None else _start_ns(place, now_ns) + place.seconds * 1e9


class _Timeline:
    """What is expected of each device, from now on."""

    def __init__(self, leases: Iterable[Lease], ahead: Iterable[Place], now_ns: int) -> None:
        self._leases, self._now_ns = list(leases), now_ns
        self._known = [place for place in ahead if place.start_ns is not None]
        self._unknown = [place for place in ahead if place.start_ns is None]

    def left_bytes(self, device: Device, from_ns: int | None, ends_ns: int | None) -> int:
        """See :func:`left_behind`."""
        begins_ns = self._now_ns if from_ns is None else from_ns
        least = device.free_bytes if from_ns is None else self._level(device, begins_ns)
        for place in self._known:
            start_ns = _start_ns(place, self._now_ns)
            if place.wants.get(device.id) and start_ns >= begins_ns and (ends_ns is None or start_ns < ends_ns):
                least = min(least, self._level(device, start_ns))
        if any(place.wants.get(device.id) for place in self._unknown):  # nobody knows when: perhaps before any end
            wanted = sum(place.wants.get(device.id, 0) for place in (*self._known, *self._unknown))
            least = min(least, device.total_bytes - wanted)
        return max(0, min(least, device.total_bytes))

    def _level(self, device: Device, at_ns: int) -> int:
        """What is free of a device at some moment, beside those ahead who run then."""
        returned = sum(lease.bytes.get(device.id, 0) for lease in self._leases if lease.ends_ns is not None and lease.ends_ns <= at_ns)
        wanted = sum(
            place.wants.get(device.id, 0) for place in self._known if _start_ns(place, self._now_ns) <= at_ns < _end_ns(place, self._now_ns)
        )
        return device.free_bytes + returned - wanted
