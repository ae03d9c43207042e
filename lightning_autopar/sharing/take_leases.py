"""A run's leases: the memory that the ledger has promised it on its plan's devices, from before its first process starts until after its
last ends.

Of a plan it knows only what the plan needs of each device.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from lightning_autopar._lightning import rank_zero_info, rank_zero_warn
from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.sharing.lease_files import Lease, LeaseFile
from lightning_autopar.sharing.ledger import (
    LEDGER_VARIABLE,
    Ledger,
    Room,
    Shortage,
    is_leased,
    open_ledger,
    room_bytes,
    without_leased,
)
from lightning_autopar.sharing.queue import Place, PlaceFile, live_places
from lightning_autopar.sharing.runs.folders import user_name
from lightning_autopar.text import format_bytes, printable

_Answer = TypeVar("_Answer")


class Leases:
    """The leases of one process's runs, one after the other.

    If the ledger can't be used, and the user has named none, runs use only what the driver shows, which is logged once.
    """

    def __init__(self) -> None:
        self._ledger: Ledger | None = None
        self._opened_for: str | None = None
        self._held: LeaseFile | None = None
        #: What others read of the run: its priority, whether it makes room when asked, and its age.
        self.priority = 0
        self.elastic = False
        self.since_ns = time.monotonic_ns()

    def ask_as(self, *, priority: int, elastic: bool) -> None:
        """A run begins to ask; from now on others read this of it."""
        self.priority, self.elastic, self.since_ns = priority, elastic, time.monotonic_ns()

    @property
    def held_names(self) -> set[str]:
        """The names of this run's leases, with which others ask it for room."""
        return set() if self._held is None else {self._held.name}

    def expect(self, seconds: float | None) -> None:
        """Tell others in how many seconds the run is expected to end; None where nobody knows."""
        if self._held is not None:
            self._held.expect(None if seconds is None or seconds == math.inf else time.monotonic_ns() + int(seconds * 1e9))

    def others(self) -> list[Lease]:
        """Others' leases, in the order in which they were asked for; empty without a ledger."""
        return self._ask(lambda ledger: [lease for lease in ledger.leases() if not _is_own(lease)]) or []

    def places(self) -> list[Place]:
        """The places of others that wait on this host, in order; empty without a ledger."""
        return self._ask(lambda ledger: [place for place in live_places(ledger.folder) if not _is_here(place)]) or []

    def queue(self) -> PlaceFile | None:
        """A place in the queue, by this run's priority and age; None where there is no ledger."""
        return self._ask(lambda ledger: PlaceFile(ledger.folder, run=_run_name(), priority=self.priority, since_ns=self.since_ns))

    @property
    def held_bytes(self) -> dict[str, int]:
        """The bytes that are promised to this run now, by device id."""
        return {} if self._held is None else dict(self._held.bytes)

    def see(self, inventory: Inventory) -> Inventory:
        """The inventory without what others were promised."""
        return without_leased(inventory, self.others())

    def take(self, wants: Mapping[str, int], probe: Callable[[], Inventory]) -> Shortage | None:
        """Get a plan's memory promised, in place of what this run has; None if that worked, else the shortage.

        Args:
            wants: bytes by device id.
            probe: the devices as the driver shows them, with what this run holds counted as free.
        """
        held = self._claim(wants, probe, instead_of=self._held)
        if isinstance(held, Shortage):
            return held
        if held is None:  # the needed memory isn't shared, or there is no ledger any more
            self.release()
        self._held = held
        return None

    def take_for_run(self, wants: Mapping[str, int], probe: Callable[[], Inventory], seconds: float | None) -> bool:
        """Get the memory of a run's plan promised, see :meth:`take`; where others were promised too much meanwhile, plan again."""
        if (short := self.take(wants, probe)) is not None:
            rank_zero_info(f"autopar: planned again, as another run took the memory first: {words(short)}")
            return False
        self.expect(seconds)
        return True

    def prepare(self, wants: Mapping[str, int], probe: Callable[[], Inventory]) -> LeaseFile | Shortage | None:
        """Get the next plan's memory promised, while this run keeps what it has; None where there are no leases. The caller passes the
        promise to :meth:`settle`, or releases it.
        """
        return self._claim(wants, probe, beside=self._held)

    def settle(self, held: LeaseFile | None) -> None:
        """The prepared promise becomes this run's; give back what it had before."""
        self.release()
        self._held = held

    def release(self) -> None:
        """Give back all that this run has."""
        if self._held is not None:
            self._held.release()
            self._held = None

    def _claim(self, wants: Mapping[str, int], probe: Callable[[], Inventory], **options: LeaseFile | None) -> LeaseFile | Shortage | None:
        if self._open() is None:
            return None
        known = {device.id for device in probe().devices if is_leased(device)}
        asked = {device: size for device, size in wants.items() if device in known}
        if not asked:
            return None

        def look() -> Room:
            found = probe()
            return lambda leases: room_bytes(found, leases)

        about = {"priority": self.priority, "elastic": self.elastic, "since_ns": self.since_ns, "ours": _is_a_part}
        return self._ask(lambda ledger: ledger.claim(asked, look, run=_run_name(), **about, **options))  # type: ignore[arg-type]  # of LeaseFile alone

    def _ask(self, what: Callable[[Ledger], _Answer]) -> _Answer | None:
        """The ledger's answer; None without a ledger, or if it no longer works."""
        ledger = self._open()
        if ledger is None:
            return None
        try:
            return what(ledger)
        except OSError as error:
            self._do_without(f"{type(error).__name__}: {error}")
            return None

    def _open(self) -> Ledger | None:
        """The ledger of the environment as it is now."""
        named = os.environ.get(LEDGER_VARIABLE, "").strip()
        if self._opened_for != named:
            self._opened_for = named
            try:
                self._ledger = open_ledger()
            except ValueError as error:
                if named:
                    raise
                self._do_without(str(error))
        return self._ledger

    def _do_without(self, why: str) -> None:
        self._ledger = None
        rank_zero_warn(
            f"autopar: this run takes no leases, so other runs may plan with the same memory; it knows the driver's figures alone: {why}"
        )


def _is_own(lease: Lease) -> bool:
    """Whether a lease is this process's, or one that its worker has in addition (``gpu_limit``)."""
    return lease.here and lease.uid == os.geteuid() and os.getpid() in (lease.pid, lease.part_of)


def _is_here(place: Place) -> bool:
    """Whether a place in the queue is this process's."""
    return place.here and place.pid == os.getpid()


def _is_a_part(lease: Lease) -> bool:
    """Whether a lease belongs to a worker of this process."""
    return lease.here and lease.uid == os.geteuid() and lease.part_of == os.getpid()


def words(short: Shortage) -> str:
    """Why there was no lease, in words."""
    holders = ", ".join(f"{printable(lease.run)} of {user_name(lease.uid)}" for lease in short.holders)
    whose = f"; promised to {holders}" if holders else ""
    return f"{format_bytes(short.room_bytes)} of the {format_bytes(short.wanted_bytes)} wanted are left on {short.device}{whose}"


def _run_name() -> str:
    """The run's name for others: the script and its process."""
    return f"{Path(sys.argv[0]).stem or 'python'} ({os.getpid()})"
