"""What others have been promised of devices and can't be seen on them yet, taken off an inventory. Knows leases and devices, no plan."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import psutil

from lightning_autopar.memory.driver_pids import is_drivers
from lightning_autopar.memory.inventory import Device, Inventory
from lightning_autopar.memory.lease_files import Lease
from lightning_autopar.memory.ledger import LEDGER_VARIABLE, Ledger, ledger_folder


def open_ledger() -> Ledger | None:
    """The host's ledger; None where there is to be none.

    Raises:
        ValueError: if the folder that the variable names can't be used.
    """
    folder = ledger_folder()
    return None if folder is None else Ledger(folder)


def live() -> list[Lease]:
    """All leases of this host, for whoever only looks; none where there is no ledger that can be read."""
    try:
        ledger = open_ledger()
        return [] if ledger is None else ledger.leases()
    except (OSError, ValueError):
        return []


def is_leased(device: Device) -> bool:
    """Whether runs share a device by leases: a GPU of this host. CPU devices are each run's own idea, unless a ledger is named for them."""
    named = os.environ.get(LEDGER_VARIABLE, "").strip()
    return device.node == 0 and (device.kind == "cuda" or (device.kind == "cpu" and bool(named)))


def promised_bytes(device: Device, leases: Iterable[Lease]) -> int:
    """What these leases promise of a device beyond what their runs' processes have taken of it already.

    Args:
        device: with the processes that the driver sees on it. What one of them has counts for its own lease first, as a worker may have one
            beside its run's, then for that of whoever has started it.
        leases: others'.
    """
    owed: dict[int, int] = {}
    total = 0
    for lease in leases:
        if lease.here:
            owed[lease.pid] = owed.get(lease.pid, 0) + lease.pending_bytes(device.id)
        else:  # a container's processes have other numbers here
            total += lease.pending_bytes(device.id)
    for process in device.processes:
        used_bytes = process.used_bytes or 0
        for owner in owners(process.pid, owed) if used_bytes else ():
            paid_bytes = min(owed[owner], used_bytes)
            owed[owner] -= paid_bytes
            used_bytes -= paid_bytes
    return total + sum(owed.values())


def room_bytes(inventory: Inventory, leases: Sequence[Lease]) -> dict[str, int]:
    """What is left on each device beside what is promised to these."""
    return {device.id: max(0, device.free_bytes - promised_bytes(device, leases)) for device in inventory.devices}


def less_promised(inventory: Inventory, leases: Sequence[Lease]) -> Inventory:
    """The inventory as a run that keeps others' leases may use it."""
    if not leases:
        return inventory
    left = room_bytes(inventory, leases)
    devices = tuple(replace(device, free_bytes=left[device.id]) if is_leased(device) else device for device in inventory.devices)
    return replace(inventory, devices=devices)


def owners(pid: int, among: Collection[int]) -> list[int]:
    """Of ``among`` the one that the driver means and those that have started it, the nearest first; none where that can't be told."""
    if not is_drivers(pid):
        return []
    try:
        process = psutil.Process(pid)
        return [each for each in (pid, *(parent.pid for parent in process.parents())) if each in among]
    except psutil.Error:  # it has ended
        return []
