"""What an elastic run does for runs that wait: it makes room for a more important run that asks, and doesn't grow into devices that others
wait for.

This is voluntary: no run can force another. Knows the queue and the run's view of itself; moves nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_autopar.planning.move_verdict import fits
from lightning_autopar.report.report import NothingFits
from lightning_autopar.sharing.queue_order import Asking, Need, Reservation, ahead, left_for_later, quantum_seconds, reserve
from lightning_autopar.sharing.runs.folders import user_name
from lightning_autopar.strategies.preparation.decision import MoveRequest
from lightning_autopar.text import format_bytes, printable

if TYPE_CHECKING:
    from lightning_autopar.devices.inventory import Inventory
    from lightning_autopar.sharing.queue import Place
    from lightning_autopar.sharing.take_leases import Leases
    from lightning_autopar.strategies.preparation.decision import Decision

#: For whose more important runs a run makes room: "all" users' (the default), its "own" user's, or "none".
YIELD_VARIABLE = "AUTOPAR_YIELD_TO"
_LOOK_SECONDS = 0.25


class Yielding:
    """Decides when an elastic run makes room for others, and what it waits for itself while it is parked.

    Raises:
        ValueError: if :data:`YIELD_VARIABLE` holds something else.
    """

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._yields_to = os.environ.get(YIELD_VARIABLE, "").strip().lower() or "all"
        if self._yields_to not in ("all", "own", "none"):
            raise ValueError(f"{YIELD_VARIABLE}={self._yields_to!r} must be 'all', 'own' (runs of the same user) or 'none'")
        self._quantum_seconds = quantum_seconds()
        self._looked = 0.0
        self._asked = Asking()

    def look(
        self, *, since: float, plan: Callable[[Inventory], Decision], seen: Callable[[], Inventory], decision: Decision
    ) -> MoveRequest | None:
        """The move that makes room for runs that ask for it; None to go on as it is.

        Args:
            since: when the run began, last moved or resumed, as ``time.monotonic`` counts. It stays there for at least the minimum quantum.
            plan: the best plan for an inventory.
            seen: the devices as they are now, with what the run holds itself counted as free.
        """
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS or now - since < self._quantum_seconds:
            return None
        self._looked = now
        asking = self._asking()
        if not asking:
            return None
        left = self._without(seen(), asking)
        who = ", ".join(f"{printable(place.run)} of {user_name(place.uid)} (priority {place.priority})" for place in asking)
        what = "; ".join(f"{format_bytes(size)} of {device}" for place in asking for device, size in place.wants.items())
        reason = f"{who} asked for room: {what}"
        if fits(decision.candidate, left):
            return None  # there is room for both: the run that asks will see it
        try:
            found = plan(left)
        except NothingFits:
            return MoveRequest(action="park", decision=None, reason=reason, urgent=True)
        return MoveRequest(action="move", decision=found, reason=reason, urgent=True)

    def leave_room(self, inventory: Inventory, holds: Mapping[str, int] | None) -> Inventory:
        """The devices, without what the runs wait for that come before this one.

        Args:
            inventory: with what the run holds itself counted as free.
            holds: bytes promised to the run, by device, which nobody takes from it unasked; None where it is parked and waits itself.
        """
        now_ns = time.monotonic_ns()
        # A run that has devices grows only after equally important runs that have none, however short they have waited.
        first = self._ahead(now_ns) if holds is None else self._from_priority(self._leases.priority, now_ns)
        if not first:
            return inventory
        left = left_for_later(inventory, self._leases.others(), first, now_ns)
        kept = {} if holds is None else holds
        devices = tuple(
            replace(device, free_bytes=min(device.free_bytes, max(kept.get(device.id, 0), there.free_bytes)))
            for device, there in zip(inventory.devices, left.devices, strict=True)
        )
        return replace(inventory, devices=devices)

    def reserve(self, inventory: Inventory, need: Callable[[Inventory], Need | None]) -> Reservation | None:
        """What this run waits for while it is parked; None where it wouldn't fit on the idle devices.

        Args:
            inventory: the devices as they are now, less what others were promised.
            need: what the best plan for an inventory takes; None where nothing fits.
        """
        now_ns, others = time.monotonic_ns(), self._leases.others()
        made = reserve(
            need, inventory, others, self._ahead(now_ns), now_ns=now_ns, priority=self._leases.priority, refused=self._asked.refused(now_ns)
        )
        self._asked.ask(() if made is None else made.asks, now_ns)
        return made

    def _ahead(self, now_ns: int) -> list[Place]:
        """The runs that come before this one while it is parked."""
        return ahead(self._leases.places(), (-self._leases.priority, self._leases.since_ns, ""), now_ns)

    def _from_priority(self, priority: int, now_ns: int) -> list[Place]:
        """The waiting runs of this priority or a higher one."""
        return ahead(self._leases.places(), (1 - priority, 0, ""), now_ns)

    def _asking(self) -> list[Place]:
        """The runs that ask this one for room and are allowed to."""
        if self._yields_to == "none":
            return []
        names = self._leases.held_names
        return [
            place
            for place in self._from_priority(self._leases.priority + 1, time.monotonic_ns())
            if names.intersection(place.asks) and (self._yields_to == "all" or place.uid == os.geteuid())
        ]

    def _without(self, inventory: Inventory, asking: Sequence[Place]) -> Inventory:
        """The devices after the asking runs have taken what they want."""
        taken: dict[str, int] = {}
        for place in asking:
            for device, size in place.wants.items():
                taken[device] = taken.get(device, 0) + size
        devices = tuple(replace(device, free_bytes=max(0, device.free_bytes - taken.get(device.id, 0))) for device in inventory.devices)
        return replace(inventory, devices=devices)
