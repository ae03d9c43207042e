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
from typing import TYPE_CHECKING, TypeVar

from lightning.pytorch.utilities import rank_zero_warn

from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.sharing.lease_files import Lease
from lightning_autopar.sharing.ledger import (
    LEDGER_VARIABLE,
    Held,
    Ledger,
    Room,
    Shortage,
    is_leased,
    open_ledger,
    room_bytes,
    without_leased,
)
from lightning_autopar.sharing.queue import PlaceFile, live_places
from lightning_autopar.sharing.runs.folders import user_name
from lightning_autopar.text import format_bytes, printable

if TYPE_CHECKING:
    from lightning_autopar.sharing.queue import Place

_Answer = TypeVar("_Answer")


class Leases:
    """The leases of one process's runs, one after the other.

    Where the ledger can't be used, and nobody has named one, runs go by what the driver says alone, which is said once.
    """

    def __init__(self) -> None:
        self._ledger: Ledger | None = None
        self._opened_for: str | None = None
        self._held: Held | None = None
        #: What others read of the run: how important its user takes it to be, whether it makes room when asked, and its age.
        self.priority = 0
        self.elastic = False
        self.since_ns = time.monotonic_ns()

    def ask_as(self, *, priority: int, elastic: bool) -> None:
        """A run begins to ask: what others read of it from now on."""
        self.priority, self.elastic, self.since_ns = priority, elastic, time.monotonic_ns()

    @property
    def held_names(self) -> set[str]:
        """The names of this run's leases, by which others ask it for room."""
        return set() if self._held is None else {self._held.name}

    def expect(self, seconds: float | None) -> None:
        """The run is expected to end in so many seconds; None where nobody knows. Others read it."""
        if self._held is not None:
            self._held.expect(None if seconds is None or seconds == math.inf else time.monotonic_ns() + int(seconds * 1e9))

    def others(self) -> list[Lease]:
        """Others' leases, in the order in which they were asked for; none where there is no ledger."""
        return self._ask(lambda ledger: [lease for lease in ledger.leases() if not _is_own(lease)]) or []

    def places(self) -> list[Place]:
        """Who waits on this host, in order, without this process; nobody where there is no ledger."""
        return self._ask(lambda ledger: [place for place in live_places(ledger.folder) if not _is_here(place)]) or []

    def queue(self) -> PlaceFile | None:
        """A place in the queue, by this run's priority and age; None where there is no ledger."""
        return self._ask(lambda ledger: PlaceFile(ledger.folder, run=_run_name(), priority=self.priority, since_ns=self.since_ns))

    @property
    def held_bytes(self) -> dict[str, int]:
        """What is promised to this run now, by device id."""
        return {} if self._held is None else dict(self._held.bytes)

    def see(self, inventory: Inventory) -> Inventory:
        """The inventory less what others have been promised."""
        return without_leased(inventory, self.others())

    def take(self, wants: Mapping[str, int], probe: Callable[[], Inventory]) -> Shortage | None:
        """Have a plan's memory promised, instead of what this run has; None once it is.

        Args:
            wants: bytes by device id.
            probe: the devices as the driver shows them, with what this run holds counted as free.
        """
        held = self._claim(wants, probe, instead_of=self._held)
        if isinstance(held, Shortage):
            return held
        if held is None:  # what is needed isn't shared, or there is no ledger any more
            self.release()
        self._held = held
        return None

    def prepare(self, wants: Mapping[str, int], probe: Callable[[], Inventory]) -> Held | Shortage | None:
        """Have the next plan's memory promised, while this run keeps what it has; None where there are no leases.

        Whoever gets a promise hands it to :meth:`settle`, or releases it.
        """
        return self._claim(wants, probe, beside=self._held)

    def settle(self, held: Held | None) -> None:
        """What was prepared is what this run has; what it had before it gives back."""
        self.release()
        self._held = held

    def release(self) -> None:
        """Give back all that this run has."""
        if self._held is not None:
            self._held.release()
            self._held = None

    def _claim(self, wants: Mapping[str, int], probe: Callable[[], Inventory], **options: Held | None) -> Held | Shortage | None:
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
        return self._ask(lambda ledger: ledger.claim(asked, look, run=_run_name(), **about, **options))  # type: ignore[arg-type]  # of Held alone

    def _ask(self, what: Callable[[Ledger], _Answer]) -> _Answer | None:
        """What the ledger says; None where there is none, or none any more."""
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
        rank_zero_warn(f"autopar: runs of this host can't be told what this one takes, and it goes by what the driver says alone: {why}")


def _is_own(lease: Lease) -> bool:
    """Whether it is this process's, or that of one of its workers, which have some beside it (``growth``)."""
    return lease.here and lease.uid == os.geteuid() and os.getpid() in (lease.pid, lease.part_of)


def _is_here(place: Place) -> bool:
    """Whether it is this process's."""
    return place.here and place.pid == os.getpid()


def _is_a_part(lease: Lease) -> bool:
    """Whether it is a worker's of this process."""
    return lease.here and lease.uid == os.geteuid() and lease.part_of == os.getpid()


def words(short: Shortage) -> str:
    """Why there was no lease, for people."""
    holders = ", ".join(f"{printable(lease.run)} of {user_name(lease.uid)}" for lease in short.holders)
    whose = f"; promised to {holders}" if holders else ""
    return f"{format_bytes(short.room_bytes)} of the {format_bytes(short.wanted_bytes)} wanted are left on {short.device}{whose}"


def _run_name() -> str:
    """What others read: the script and its process."""
    return f"{Path(sys.argv[0]).stem or 'python'} ({os.getpid()})"
