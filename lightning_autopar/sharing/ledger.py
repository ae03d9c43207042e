"""The ledger: how much of each device's memory is promised to which run of this host, without a server and without a lock that can be held.

Seconds pass between the moment a run finds room and the moment others see its memory in use, and meanwhile every run would find the same
room. So each run writes down what it is about to take, and only then looks whether that is free. Of two runs that ask at once, the one that
wrote later sees the other's line and counts it, so that both are never granted what only one can have. No run waits for another: a process
that is stopped in between delays others by some seconds at most.

An inventory less all promises is what is left to plan with. Knows devices by their ids and bytes; no model, no plan, no driver.
"""

from __future__ import annotations

import os
import random
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from lightning_autopar.devices.inventory import Device, Inventory
from lightning_autopar.sharing.lease_files import Lease, LeaseFile, live_leases
from lightning_autopar.sharing.process_ids import is_drivers

#: The variable that names the folder that all runs of the host share; "off": there are no leases.
LEDGER_VARIABLE = "AUTOPAR_LEDGER"
#: How long another process's undecided claim counts: that process may have been stopped. A process that needs more than half of this asks
#: anew.
FRESH_SECONDS = 4.0
#: Gives the bytes on each device for a new claim, besides these leases of others, at the time of the look.
Room = Callable[[Sequence[Lease]], Mapping[str, int]]
#: Seconds between two looks whether others have decided.
_LOOK_SECONDS = 0.001


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """Why a claim wasn't granted.

    Args:
        device: one that has too little.
        room_bytes: the bytes that are free there and promised to nobody else.
        holders: who has a lease on it.
    """

    device: str
    wanted_bytes: int
    room_bytes: int
    holders: tuple[Lease, ...] = ()


class Ledger:
    """The leases of a host.

    Args:
        folder: the one that all its runs share.

    Raises:
        ValueError: if users could remove others' leases in that folder, or it can't be used, with the remedy.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            found = folder.stat()
        except OSError as error:
            raise ValueError(
                f"{LEDGER_VARIABLE}={folder} can't be used: {error.strerror}; name a folder that all users can write to, or 'off'"
            ) from None
        if not stat.S_ISDIR(found.st_mode) or not os.access(folder, os.W_OK | os.X_OK | os.R_OK):
            raise ValueError(f"{LEDGER_VARIABLE}={folder} is no folder that this user can read and write; name another, or 'off'")
        if found.st_uid not in (0, os.geteuid()):
            raise ValueError(
                f"{LEDGER_VARIABLE}={folder} belongs to user {found.st_uid}, who could remove others' leases; name one of root's, or 'off'"
            )
        if found.st_mode & (stat.S_IWOTH | stat.S_IWGRP) and not found.st_mode & stat.S_ISVTX:
            raise ValueError(f"in {LEDGER_VARIABLE}={folder} users can remove each other's leases; set its sticky bit (chmod +t), or 'off'")

    def leases(self) -> list[Lease]:
        """All granted leases that are alive, in the order in which they were asked for.

        Raises:
            OSError: if the folder can't be read any more.
        """
        return sorted((lease for lease in live_leases(self.folder) if lease.granted), key=lambda lease: lease.order)

    def claim(
        self,
        wants: Mapping[str, int],
        look: Callable[[], Room],
        *,
        run: str,
        instead_of: LeaseFile | None = None,
        beside: LeaseFile | None = None,
        within_seconds: float = 10.0,
        priority: int = 0,
        elastic: bool = False,
        since_ns: int | None = None,
        part_of: int = 0,
        ours: Callable[[Lease], bool] = lambda lease: False,
    ) -> LeaseFile | Shortage:
        """Claim memory on devices: it is promised on all of them or on none.

        Args:
            wants: bytes by device id.
            look: looks at the devices, after others' leases were read: so what they take meanwhile is counted twice rather than not at all.
            instead_of: what this run has and gives back for it, once it is granted; its memory must count as free.
            beside: what this run has and keeps for now, whose memory counts as free, too.
            within_seconds: how long to wait until others that ask at the same time have decided.
            elastic: whether it can give devices back before its end.
            since_ns: when the run first asked for anything, on the monotonic clock; now by default.
            part_of: the process whose run it is a part of, if another's than this one.
            ours: whether a lease is a part of this run that it also gives back, and whose memory counts as free, too.

        Raises:
            OSError: if the folder can't be read or written, as on a full disk; nothing is claimed then.
        """
        until = time.monotonic() + within_seconds
        names = {held.name for held in (instead_of, beside) if held is not None}

        def besides(lease: Lease) -> bool:
            return lease.name in names or ours(lease)

        while True:
            file = LeaseFile(self.folder, wants, run, priority=priority, elastic=elastic, since_ns=since_ns, part_of=part_of)
            granted = False
            try:
                verdict = self._judged(file, wants, look, besides)
                if verdict is None:
                    file.grant()
                    # Others no longer count a claim that was undecided for too long: this process may have been stopped.
                    granted = time.monotonic_ns() - file.made_ns <= FRESH_SECONDS / 2 * 1e9
                    if granted:
                        if instead_of is not None:
                            instead_of.release()
                        return file
            finally:
                if not granted:
                    file.release()
            decided = verdict is not None and all(holder.granted for holder in verdict.holders)
            if verdict is not None and (decided or time.monotonic() > until):
                return verdict
            time.sleep(random.uniform(1, 4) * _LOOK_SECONDS)

    def _judged(
        self, file: LeaseFile, wants: Mapping[str, int], look: Callable[[], Room], besides: Callable[[Lease], bool]
    ) -> Shortage | None:
        """None if there is room for a claim, whatever other askers do; else the shortage."""
        while True:
            others = self._others(file, besides)
            now = time.monotonic_ns()
            granted = [lease for lease in others if lease.granted]
            asking = [lease for lease in others if not lease.granted and now - lease.made_ns <= FRESH_SECONDS * 1e9]
            room = look()
            short = _shortage(wants, room, granted)
            if short is not None:
                again = [lease for lease in self._others(file, besides) if lease.granted]
                if again == granted or now - file.made_ns > FRESH_SECONDS / 2 * 1e9:
                    return short
                continue  # another process took what it was promised, or gave it back: it may have been counted twice
            short = _shortage(wants, room, [*granted, *asking])
            if short is None:
                return None
            before = any(lease.order < (file.made_ns, file.name) for lease in asking if any(lease.bytes.get(each) for each in wants))
            if before or now - file.made_ns > FRESH_SECONDS / 2 * 1e9:
                return short
            time.sleep(_LOOK_SECONDS)  # the later asker gives way, and asks again

    def _others(self, file: LeaseFile, besides: Callable[[Lease], bool]) -> list[Lease]:
        """Others' leases and claims, in order, so that two readings can be compared."""
        others = [lease for lease in live_leases(self.folder) if lease.name != file.name and not besides(lease)]
        return sorted(others, key=lambda lease: lease.order)


def _shortage(wants: Mapping[str, int], room: Room, others: list[Lease]) -> Shortage | None:
    there = room(others)
    for device, wanted_bytes in wants.items():
        if wanted_bytes > there.get(device, 0):
            holders = tuple(lease for lease in others if lease.bytes.get(device))
            return Shortage(device=device, wanted_bytes=wanted_bytes, room_bytes=there.get(device, 0), holders=holders)
    return None


def ledger_folder() -> Path | None:
    """The folder of this host's leases; None if leases are off. By default in shared memory, which a restart of the machine clears, as it
    must; a container has its own unless it is given the host's.
    """
    named = os.environ.get(LEDGER_VARIABLE, "").strip()
    if named:
        return None if named.lower() == "off" else Path(named).expanduser()
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


def open_ledger() -> Ledger | None:
    """The host's ledger; None if leases are off.

    Raises:
        ValueError: if the folder that the variable names can't be used.
    """
    folder = ledger_folder()
    return None if folder is None else Ledger(folder)


def live() -> list[Lease]:
    """All leases of this host, only for reading; empty without a readable ledger."""
    try:
        ledger = open_ledger()
        return [] if ledger is None else ledger.leases()
    except (OSError, ValueError):
        return []


def is_leased(device: Device) -> bool:
    """Whether runs share a device by leases: a GPU of this host. CPU devices are each run's own, unless a ledger is named."""
    named = os.environ.get(LEDGER_VARIABLE, "").strip()
    return device.node == 0 and (device.kind == "cuda" or (device.kind == "cpu" and bool(named)))


def promised_bytes(device: Device, leases: Iterable[Lease]) -> int:
    """The bytes that these leases promise of a device beyond what their runs' processes have already taken.

    Args:
        device: with the processes that the driver sees on it. What one of them holds counts for its own lease first, as a worker may have
            one in addition to its run's, then for the lease of the process that has started it.
        leases: others'.
    """
    owed: dict[int, int] = {}
    total = 0
    for lease in leases:
        if lease.here:
            owed[lease.pid] = owed.get(lease.pid, 0) + lease.pending_bytes(device.id)
        else:  # a container's processes have other ids here
            total += lease.pending_bytes(device.id)
    for process in device.processes:
        used_bytes = process.used_bytes or 0
        for owner in owners(process.pid, owed) if used_bytes else ():
            paid_bytes = min(owed[owner], used_bytes)
            owed[owner] -= paid_bytes
            used_bytes -= paid_bytes
    return total + sum(owed.values())


def room_bytes(inventory: Inventory, leases: Sequence[Lease]) -> dict[str, int]:
    """The bytes that are left on each device besides what is promised to these."""
    return {device.id: max(0, device.free_bytes - promised_bytes(device, leases)) for device in inventory.devices}


def without_leased(inventory: Inventory, leases: Sequence[Lease]) -> Inventory:
    """The inventory that a run may use without touching others' leases."""
    if not leases:
        return inventory
    left = room_bytes(inventory, leases)
    devices = tuple(replace(device, free_bytes=left[device.id]) if is_leased(device) else device for device in inventory.devices)
    return replace(inventory, devices=devices)


def owners(pid: int, among: Collection[int]) -> list[int]:
    """The processes, of ``among``, that are the driver's process or have started it, the nearest first; empty where that isn't known."""
    if not is_drivers(pid):
        return []
    try:
        process = psutil.Process(pid)
        return [each for each in (pid, *(parent.pid for parent in process.parents())) if each in among]
    except psutil.Error:  # it has ended
        return []
