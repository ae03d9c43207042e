"""Devices, leases and places of a host that is made up."""

from __future__ import annotations

from lightning_autopar.devices.inventory import Device, Inventory
from lightning_autopar.sharing.lease_files import Lease
from lightning_autopar.sharing.queue import Place

SECOND = 1_000_000_000
TOTAL = 10
DEVICES = ("a", "b")


def inventory(*free: int, source: str = "nvml") -> Inventory:
    devices = tuple(
        Device(id=name, kind="cuda", name="GPU", total_bytes=TOTAL, free_bytes=size) for name, size in zip(DEVICES, free, strict=False)
    )
    return Inventory(devices=devices, host_total_bytes=1, host_free_bytes=1, source=source)


def place(
    name: str = "p", *, wants: dict[str, int] | None = None, start: int | None = None, seconds: float | None = None, **more: int
) -> Place:
    about = {"priority": 0, "since_ns": 0, "seen_ns": 0, **more}
    start_ns = None if start is None else start * SECOND
    return Place(name=name, uid=0, pid=1, run=name, made_ns=0, wants=wants or {}, start_ns=start_ns, seconds=seconds, **about)


def lease(name: str = "l", *, ends: int | None = None, **sizes: int) -> Lease:
    return Lease(name=name, uid=0, pid=1, run=name, bytes=sizes, ends_ns=None if ends is None else ends * SECOND)
