"""The memory that an elastic run has promised from plan to plan, and a parked run's place in the host's queue.

A parked run waits by its own priority and age, and says what for. This module doesn't decide when the run resumes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.report.report import NothingFits
from lightning_autopar.sharing.lease_files import LeaseFile
from lightning_autopar.sharing.ledger import Shortage
from lightning_autopar.sharing.queue import PlaceFile
from lightning_autopar.sharing.queue_order import Need
from lightning_autopar.sharing.take_leases import Leases, words

if TYPE_CHECKING:
    from lightning_autopar.strategies.elastic.generation_progress import RunningGeneration
    from lightning_autopar.strategies.elastic.yielding import Yielding
    from lightning_autopar.strategies.preparation.decision import Decision


_LOOK_SECONDS = 0.5
#: Planning what it waits for takes at most this share of a core.
_PLANNING_SHARE = 0.1
_LEAST_SECONDS = 1.0


class ParkedPlace:
    """The place in the queue of a run that is parked and wants to go on.

    Args:
        promises: the run's, which give it a place in the ledger's queue.
        preempt: says what the run waits for.
        seconds: how long the run still takes; None where nobody knows.
    """

    def __init__(self, promises: Promises, preempt: Yielding, seconds: float | None) -> None:
        self._promises, self._preempt, self._seconds = promises, preempt, seconds
        self._place: PlaceFile | None = None
        self._looked = self._planned = float("-inf")
        self._pause = _LEAST_SECONDS

    def look(self, seen: Callable[[], Inventory], plan: Callable[[Inventory], Decision]) -> None:
        """Show that the run still waits, and from time to time what it waits for.

        Args:
            seen: the devices as they are now, less what others were promised.
            plan: the best plan for an inventory.
        """
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        if self._place is None and (place := self._promises.queue()) is not None:
            self._place = place
        if self._place is None:
            return
        if now - self._planned < self._pause:
            self._place.stay()
            return
        at_ns = time.monotonic_ns()
        reserved = self._preempt.reserve(seen(), lambda inventory: self._need(plan, inventory))
        if reserved is None:
            self._place.stay()
        else:
            self._place.tell(wants=reserved.wants, start_ns=reserved.start_ns, seconds=reserved.seconds, asks=reserved.asks, at_ns=at_ns)
        self._planned = time.monotonic()
        self._pause = max(_LEAST_SECONDS, (self._planned - now) / _PLANNING_SHARE)

    def leave(self) -> None:
        """Leave the queue: the run goes on, ends, or must stay parked. A second call does nothing."""
        if self._place is not None:
            self._place.withdraw()
            self._place = None

    def _need(self, plan: Callable[[Inventory], Decision], inventory: Inventory) -> Need | None:
        try:
            return replace(plan(inventory).need, seconds=self._seconds)
        except (NothingFits, ValueError):  # ValueError: a pinned plan's device isn't there
            return None


class Promises:
    """The leases of an elastic run, from plan to plan.

    Args:
        probe: the devices as the driver shows them, with what a generation of this run holds counted as free.
    """

    def __init__(self, leases: Leases, probe: Callable[[RunningGeneration | None], Inventory]) -> None:
        self._leases, self._probe = leases, probe
        self._prepared: LeaseFile | None = None

    @property
    def held_bytes(self) -> dict[str, int]:
        """The bytes that are promised to this run now, by device id."""
        return self._leases.held_bytes

    def expect(self, seconds: float | None) -> None:
        """See :meth:`Leases.expect`."""
        self._leases.expect(seconds)

    def queue(self) -> PlaceFile | None:
        """See :meth:`Leases.queue`."""
        return self._leases.queue()

    def take(self, wants: Mapping[str, int], running: RunningGeneration | None) -> str | None:
        """Get a plan's memory promised in place of the earlier plan's; returns why that failed, in words, or None."""
        short = self._leases.take(wants, lambda: self._probe(running))
        return None if short is None else words(short)

    def prepare(self, wants: Mapping[str, int], running: RunningGeneration | None) -> str | None:
        """Get the next plan's memory promised in addition to the running plan's; returns why that failed, in words, or None."""
        assert self._prepared is None, "one move at a time"
        found = self._leases.prepare(wants, lambda: self._probe(running))
        if isinstance(found, Shortage):
            return words(found)
        self._prepared = found
        return None

    def settle(self) -> None:
        """The run has moved: give back what it had before."""
        self._leases.settle(self._prepared)
        self._prepared = None

    def drop(self) -> None:
        """The run didn't move: give back what was prepared, if anything."""
        if self._prepared is not None:
            self._prepared.release()
            self._prepared = None

    def release(self) -> None:
        """The run has left all devices: give everything back."""
        self._leases.release()
