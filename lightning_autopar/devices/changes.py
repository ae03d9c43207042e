"""What happened to the devices between two looks at them, as sentences with numbers. It decides nothing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from lightning_autopar.devices.inventory import Device, Inventory, device_label, idle_share
from lightning_autopar.text import format_bytes

#: Changes of free memory by a smaller share of the device aren't reported: allocators cause them all the time.
_NOTABLE_SHARE = 0.02
#: The host's memory is short if a smaller share of it is free.
_SHORT_HOST_SHARE = 0.05
#: Changes of speed by less aren't reported.
_NOTABLE_SPEED = 1.1

EventKind = Literal["shrank", "grew", "appeared", "vanished", "error", "recovered", "slower", "faster", "host"]


@dataclass(frozen=True, kw_only=True)
class DeviceEvent:
    """Something that happened to the devices.

    Args:
        device: to which, by id; None for the host.
        text: a sentence with the numbers.
        ours: whether the run's plan uses the device.
    """

    kind: EventKind
    device: str | None
    text: str
    ours: bool = False


def device_events(before: Inventory, now: Inventory, devices: Collection[str] = ()) -> tuple[DeviceEvent, ...]:
    """What happened between two looks.

    Args:
        devices: ids of those that the run's plan uses.
    """
    was, there = ({device.id: device for device in inventory.devices} for inventory in (before, now))
    events: list[DeviceEvent] = []
    for device in before.devices:
        if device.id not in there:
            events.append(
                DeviceEvent(
                    kind="vanished", device=device.id, text=f"the run can no longer use {device_label(device)}", ours=device.id in devices
                )
            )
    for device in now.devices:
        ours = device.id in devices
        if device.id not in was:
            free = f"{format_bytes(device.free_bytes)} free"
            events.append(
                DeviceEvent(kind="appeared", device=device.id, text=f"the run can now use {device_label(device)}, with {free}", ours=ours)
            )
        else:
            events += _of_device(was[device.id], device, ours)
    return (*events, *_of_host(before, now))


def _of_device(was: Device, device: Device, ours: bool) -> list[DeviceEvent]:
    events = []
    name = device_label(device)
    if device.error != was.error:
        kind: EventKind = "error" if device.error else "recovered"
        text = f"{name} is in error: {device.error}" if device.error else f"{name} is no longer in error ({was.error})"
        events.append(DeviceEvent(kind=kind, device=device.id, text=text, ours=ours))
    change = device.free_bytes - was.free_bytes
    if abs(change) > _NOTABLE_SHARE * max(was.total_bytes, device.total_bytes):
        there = f"{format_bytes(was.free_bytes)} to {format_bytes(device.free_bytes)}"
        who = "somebody took it" if change < 0 else "somebody gave it back"
        verb: EventKind = "shrank" if change < 0 else "grew"
        text = f"the free memory of {name} {verb} by {format_bytes(abs(change))}, from {there}: {who}"
        events.append(DeviceEvent(kind=verb, device=device.id, text=text, ours=ours))
    ratio = _slowness(device) / _slowness(was)
    if ratio >= _NOTABLE_SPEED or ratio <= 1 / _NOTABLE_SPEED:
        pace: EventKind = "slower" if ratio > 1 else "faster"
        text = f"{name} became {pace}: its work takes {_slowness(device):.3g} times as long as by itself, after {_slowness(was):.3g} times"
        events.append(DeviceEvent(kind=pace, device=device.id, text=text, ours=ours))
    return events


def _of_host(before: Inventory, now: Inventory) -> list[DeviceEvent]:
    """The event that the host's memory got short, or is no longer short."""
    short = [at.host_total_bytes > 0 and at.host_free_bytes < _SHORT_HOST_SHARE * at.host_total_bytes for at in (before, now)]
    if short[0] == short[1]:
        return []
    free = f"{format_bytes(now.host_free_bytes)} of {format_bytes(now.host_total_bytes)}"
    text = f"the host's memory is {'short' if short[1] else 'no longer short'}: {free} are free"
    return [DeviceEvent(kind="host", device=None, text=text)]


def _slowness(device: Device) -> float:
    """How many times longer work takes on the device than on an idle one, as planning assumes."""
    return device.slowdown / idle_share(device)


def usable(inventory: Inventory) -> Inventory:
    """The inventory without the devices that are in error: nothing new should run on them."""
    if all(device.error is None for device in inventory.devices):
        return inventory
    notes = tuple(f"{device_label(device)} is left out: {device.error}" for device in inventory.devices if device.error is not None)
    kept = inventory.with_devices(device for device in inventory.devices if device.error is None)
    return replace(kept, notes=(*inventory.notes, *notes))
