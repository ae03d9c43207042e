"""Which devices may be measured now: idle ones with room. Others see their memory as leased while the measurement lasts.

A GPU that somebody computes on would show half its speed, and the measurement would slow the other run down. Knows the inventory and the
ledger; nothing of what is measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import psutil

from lightning_autopar.devices.discover import probe
from lightning_autopar.devices.inventory import Device, Inventory, busy_share
from lightning_autopar.sharing.take_leases import Leases

#: Bytes of a GPU that measuring takes: of tensors, where the allocator is capped; with context, cuBLAS' and NCCL's memory.
TENSOR_BYTES, ROOM_BYTES = 1 << 30, 5 << 29
#: How long the driver may still show a process of ours that has ended on a GPU.
_GONE_SECONDS = 1.0


def may_be_measured(device: Device) -> bool:
    """Whether a device is this host's, and others' work there wouldn't disturb the measurement or be disturbed. A CPU device is always
    free: the user has defined it. Another process on a GPU doesn't matter as long as it doesn't compute; where that isn't known (a MIG
    instance), it does.
    """
    if device.kind == "catalogue" or device.node or device.index is None or device.in_doubt:
        return False
    if device.kind == "cpu":
        return True
    idle = busy_share(device) == 0.0 if device.utilization is not None else not strangers(device)
    return idle and device.error is None and device.slowdown == 1.0 and device.free_bytes >= ROOM_BYTES


@contextmanager
def leased(inventory: Inventory, wanted: Callable[[Inventory], Sequence[Device]]) -> Iterator[Inventory]:
    """While open, this process has leases on the devices to measure; yields the inventory of those that may be measured, as they are now.

    Args:
        wanted: those of them on which anything is to be measured, where these may be.
    """
    if not any(device.kind == "cuda" for device in inventory.devices):
        yield inventory
        return
    leases = Leases()
    chosen = _now(inventory, leases)
    while (wants := {device.id: ROOM_BYTES for device in wanted(chosen) if device.kind == "cuda"}) and (
        short := leases.take(wants, probe)
    ) is not None:  # another process was faster
        chosen = replace(chosen, devices=tuple(device for device in chosen.devices if device.id != short.device))
    try:
        yield chosen
    finally:
        leases.release()


def _now(inventory: Inventory, leases: Leases) -> Inventory:
    """The inventory's devices that may be measured, as this process sees them now, without what others were promised."""
    there = {device.id: device for device in leases.see(probe()).devices}
    seen = [there.get(device.id) if device.kind == "cuda" else device for device in inventory.devices]
    return replace(inventory, devices=tuple(device for device in seen if device is not None and may_be_measured(device)))


def strangers(device: Device) -> set[int]:
    """The processes on a device, without this one, by the driver's numbers."""
    return {process.pid for process in device.processes if not process.own}


def came_meanwhile(devices: Sequence[Device], before: Mapping[str, Device]) -> bool:
    """Whether another process came to one of these devices during the measurement, which makes it worthless.

    Args:
        devices: on which it was measured.
        before: their state at the beginning, by id.
    """
    gpus = {device.id for device in devices if device.kind == "cuda"}
    if not gpus:
        return False
    until = time.monotonic() + _GONE_SECONDS
    while True:
        now = [device for device in probe().devices if device.id in gpus]
        # This process may be a new Python that measures for one that has used the GPU, which was no stranger when it looked.
        there = {device.id: {process.pid for process in before[device.id].processes} for device in now}
        new = [pid for device in now for pid in strangers(device) - there[device.id] if not _is_ours(pid)]
        if not new or time.monotonic() > until:
            return bool(new)
        time.sleep(0.05)


def _is_ours(pid: int) -> bool:
    """Whether a process was started by this one, and is about to end."""
    try:
        return os.getpid() in [parent.pid for parent in psutil.Process(pid).parents()]
    except psutil.Error:
        return False
