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
from lightning_autopar.sharing.leases import Leases

#: What measuring takes of a GPU: tensors, at which the allocator is capped; with them the context, cuBLAS' and NCCL's memory.
TENSOR_BYTES, ROOM_BYTES = 1 << 30, 5 << 29
#: Until when a process of ours that has just ended may still be shown on a GPU.
_GONE_SECONDS = 1.0


def may_be_measured(device: Device) -> bool:
    """Whether a device is this host's, and nobody's work there would be disturbed, or disturb.

    A CPU device is whatever the user made of the host. A process of somebody else's on a GPU is no hindrance as long as it doesn't compute;
    of a GPU of which nobody knows that (a MIG instance) it is.
    """
    if device.kind == "catalogue" or device.node or device.index is None:
        return False
    if device.kind == "cpu":
        return True
    idle = busy_share(device) == 0.0 if device.utilization is not None else not strangers(device)
    return idle and device.error is None and device.slowdown == 1.0 and device.free_bytes >= ROOM_BYTES


@contextmanager
def leased(inventory: Inventory, wanted: Callable[[Inventory], Sequence[Device]]) -> Iterator[Inventory]:
    """While open, what is to be measured is this run's: an inventory of the devices that may be, as they are now.

    Args:
        inventory: whose devices.
        wanted: those of them on which anything is to be measured, where these may be.
    """
    if not any(device.kind == "cuda" for device in inventory.devices):
        yield inventory
        return
    leases = Leases()
    chosen = _now(inventory, leases)
    while (wants := {device.id: ROOM_BYTES for device in wanted(chosen) if device.kind == "cuda"}) and (
        short := leases.take(wants, probe)
    ) is not None:  # somebody was faster
        chosen = replace(chosen, devices=tuple(device for device in chosen.devices if device.id != short.device))
    try:
        yield chosen
    finally:
        leases.release()


def _now(inventory: Inventory, leases: Leases) -> Inventory:
    """The inventory's devices that may be measured, as this process sees them now, less what others were promised of them."""
    there = {device.id: device for device in leases.see(probe()).devices}
    seen = [there.get(device.id) if device.kind == "cuda" else device for device in inventory.devices]
    return replace(inventory, devices=tuple(device for device in seen if device is not None and may_be_measured(device)))


def strangers(device: Device) -> set[int]:
    """The processes on a device that aren't this one, by the driver's numbers."""
    return {process.pid for process in device.processes if not process.own}


def came_meanwhile(devices: Sequence[Device], before: Mapping[str, Device]) -> bool:
    """Whether somebody came to one of these devices while it was measured, which makes what was measured worthless.

    Args:
        devices: on which it was measured.
        before: as they were, by id.
    """
    gpus = {device.id for device in devices if device.kind == "cuda"}
    if not gpus:
        return False
    until = time.monotonic() + _GONE_SECONDS
    while True:
        now = [device for device in probe().devices if device.id in gpus]
        # This process may be a new Python that measures for one which has used the GPU: no stranger to itself when it was looked at.
        there = {device.id: {process.pid for process in before[device.id].processes} for device in now}
        new = [pid for device in now for pid in strangers(device) - there[device.id] if not _is_ours(pid)]
        if not new or time.monotonic() > until:
            return bool(new)
        time.sleep(0.05)


def _is_ours(pid: int) -> bool:
    """Whether a process was started by this one, and is on its way out."""
    try:
        return os.getpid() in [parent.pid for parent in psutil.Process(pid).parents()]
    except psutil.Error:
        return False
