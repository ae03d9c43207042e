"""A parked run's place in the queue of its host: it waits by its own priority and age, and says what for.

It doesn't decide when the run resumes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_autopar.memory.reservation import Need
from lightning_autopar.planning.report import NothingFits

if TYPE_CHECKING:
    from lightning_autopar.memory.inventory import Inventory
    from lightning_autopar.memory.queue_files import PlaceFile
    from lightning_autopar.strategies.courtesy import Courtesy
    from lightning_autopar.strategies.decision import Decision
    from lightning_autopar.strategies.leasing import Promises

_LOOK_SECONDS = 0.5
#: To plan what it waits for takes at most this share of a core.
_PLANNING_SHARE = 0.1
_LEAST_SECONDS = 1.0


class ParkedPlace:
    """The place of a run while it is parked and wants to go on.

    Args:
        promises: of memory, whose ledger the queue is beside.
        courtesy: says what the run waits for.
        seconds: how long it still takes; None where nobody knows.
    """

    def __init__(self, promises: Promises, courtesy: Courtesy, seconds: float | None) -> None:
        self._promises, self._courtesy, self._seconds = promises, courtesy, seconds
        self._place: PlaceFile | None = None
        self._looked = self._planned = float("-inf")
        self._pause = _LEAST_SECONDS

    def look(self, seen: Callable[[], Inventory], plan: Callable[[Inventory], Decision]) -> None:
        """Show that the run still waits, and now and then for what.

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
        reserved = self._courtesy.reserve(seen(), lambda inventory: self._need(plan, inventory))
        if reserved is None:
            self._place.stay()
        else:
            self._place.tell(wants=reserved.wants, start_ns=reserved.start_ns, seconds=reserved.seconds, asks=reserved.asks, at_ns=at_ns)
        self._planned = time.monotonic()
        self._pause = max(_LEAST_SECONDS, (self._planned - now) / _PLANNING_SHARE)

    def leave(self) -> None:
        """The run goes on, ends, or isn't to go on; again does nothing."""
        if self._place is not None:
            self._place.withdraw()
            self._place = None

    def _need(self, plan: Callable[[Inventory], Decision], inventory: Inventory) -> Need | None:
        try:
            return replace(plan(inventory).need, seconds=self._seconds)
        except (NothingFits, ValueError):  # the latter where a pinned plan's device isn't there
            return None
