"""Waits for a run that can't start yet: it takes a place in the host's queue until it is the run's turn, and comes back with its memory
promised.

There is no server. Each waiting run looks by itself and says what it reserves. It takes nothing that would delay a run ahead, nor memory
that came free before the runs ahead have looked at it. The process that waits touches no GPU. Knows devices, leases and places; of plans
only what they take (``planning_inputs``), and not how they run.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Generic, Protocol, TypeVar

from rich.console import Console
from rich.markup import escape

from lightning_autopar._lightning import rank_zero_info
from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.report.report import NothingFits
from lightning_autopar.sharing.lease_files import Lease
from lightning_autopar.sharing.ledger import LEDGER_VARIABLE, is_leased
from lightning_autopar.sharing.queue import Place, PlaceFile
from lightning_autopar.sharing.queue_order import Asking, Need, Reservation, ahead, idle, left_for_later, may_ask, quantum_seconds, reserve
from lightning_autopar.sharing.runs.folders import user_name
from lightning_autopar.sharing.runs.own_status import Decided, RunDisplay
from lightning_autopar.sharing.take_leases import Leases
from lightning_autopar.text import format_bytes, format_seconds, printable

#: The type of the decision that planning makes for a run.
D = TypeVar("D", bound=Decided)
D_co = TypeVar("D_co", bound=Decided, covariant=True)
#: Between two looks.
_LOOK_SECONDS = 0.3
#: A change of free memory by a smaller share of the device isn't planned for at once.
_NOTABLE_SHARE = 0.01
#: Planning takes at most one second in so many, and happens at least this often, as the expected may not happen.
_PLANNING_SHARE, _PLAN_SECONDS = 20, 10.0
#: Expected ends that differ by less are the same.
_END_NS = 5_000_000_000
#: Seconds between two lines in a log: with news, and without.
_NEWS_SECONDS, _STILL_SECONDS = 10.0, 300.0


class Prospect(Protocol[D_co]):
    """What was found out about a run, before any plan is chosen."""

    def decision(self, inventory: Inventory | None = None) -> D_co:
        """The best plan for these devices; raises NothingFits."""

    def need(self, inventory: Inventory) -> Need | None:
        """What the best plan for these devices takes; None where nothing fits."""


@dataclass(frozen=True, kw_only=True)
class View:
    """The host at one look.

    Args:
        at_ns: when, on the monotonic clock.
        inventory: the devices that the run may use, less what others were promised.
        leases: others'.
        ahead: the waiting runs that go before this one.
    """

    at_ns: int
    inventory: Inventory
    leases: Sequence[Lease]
    ahead: Sequence[Place]

    def left(self, seconds: float | None = None) -> Inventory:
        """What the runs ahead leave for a run that takes so long; for ever, unless given."""
        if not self.ahead:
            return self.inventory
        ends_ns = None if seconds is None else self.at_ns + int(seconds * 1e9)
        found = left_for_later(self.inventory, self.leases, self.ahead, self.at_ns, ends_ns=ends_ns)
        many = len(self.ahead)
        note = f"minus memory reserved by {many} queued runs" if many > 1 else "minus memory reserved by a queued run"
        return replace(found, notes=(*found.notes, note))

    def delays_nobody(self, need: Need) -> bool:
        """Whether a run that takes this leaves the runs ahead what they reserve."""
        there = {device.id: device.free_bytes for device in self.left(need.seconds).devices}
        return all(size <= there.get(device, 0) for device, size in need.bytes.items())


class Waiting(Generic[D]):
    """How one run waits for its turn.

    Args:
        prospect: what was found out of the run.
        leases: of this process, with the run's priority and age.
        inventory: the devices that the run may use as they are now, less what others were promised.
        devices: all devices as the driver shows them.
        wait_seconds: how long it waits at most.
    """

    def __init__(
        self,
        prospect: Prospect[D],
        leases: Leases,
        *,
        inventory: Callable[[], Inventory],
        devices: Callable[[], Inventory],
        wait_seconds: float,
        shown: RunDisplay,
    ) -> None:
        self._prospect, self._leases, self._inventory, self._devices = prospect, leases, inventory, devices
        self._wait_seconds, self._shown = wait_seconds, shown
        self._place: PlaceFile | None = None
        self._asking = Asking()
        self._reserved: Reservation | None = None
        self._view: View | None = None
        self._planned: View | None = None
        self._plan_seconds = 0.0
        self._fits_since_ns: int | None = None
        self._begun = time.monotonic()
        self._told: tuple[str, float] = ("", -_STILL_SECONDS)
        self._shown_at = 0.0

    def start(self) -> D:
        """The decision to run by, with its memory promised; at once, or once it is the run's turn.

        Raises:
            NothingFits: if nothing would fit on the idle devices either, or nothing fits until the time is over.
        """
        view = self._look_around()
        while not view.ahead:
            try:
                decision = self._prospect.decision(view.inventory)
            except NothingFits:
                if self._wait_seconds == 0 or not self._is_shared():
                    raise
                break
            if self._leases.take_for_run(decision.run_plan.needed_bytes, self._devices, decision.expected_seconds):
                return decision
            view = self._look_around()
        if self._prospect.need(view.inventory) is None and self._prospect.need(idle(view.inventory, view.leases)) is None:
            self._prospect.decision(view.inventory)  # it says why the run doesn't fit, and never will
        if self._wait_seconds == 0:
            return self._without_waiting()
        with _told_to_end(), self._in_the_queue(), ExitStack() as until_the_turn:
            console = Console(stderr=True)
            status = until_the_turn.enter_context(console.status("waiting")) if console.is_terminal else None
            while True:
                if (found := self.look()) is not None:
                    title = found.run_plan.plan.title()
                    rank_zero_info(f"autopar: after {format_seconds(self._waited())} it is this run's turn: {title}")
                    return found
                left = self._begun + self._wait_seconds - time.monotonic()
                if left <= 0:
                    self._give_up(f"it waited {format_seconds(self._waited())}{self._for_what()}, {self._for_whom()}")
                told = self.words()
                if status is not None:
                    status.update(escape(told))
                self._tell(told, log=status is None)
                time.sleep(max(0.0, min(_LOOK_SECONDS, left)))  # the run waits for files, and for memory that others release

    def look(self) -> D | None:
        """If it is this run's turn: the decision, with its memory promised. If not, tell others what it waits for."""
        view = self._look_around()
        fits_since_ns, decision = self._fits_since_ns, None
        if fits_since_ns is not None or self._is_worth_planning(view):
            begun = time.monotonic()
            there = self._to_plan_on(view)
            if there is None:
                self._fits_since_ns = None
                self._reserve(view)
            else:
                self._fits_since_ns = view.at_ns if fits_since_ns is None else fits_since_ns
                if all(place.passed_ns >= self._fits_since_ns for place in view.ahead):
                    decision = self._try(there)
            self._planned, self._plan_seconds = view, time.monotonic() - begun
        if decision is None and self._place is not None:
            # Runs behind mustn't take what this run is about to take.
            at_ns = view.at_ns if self._fits_since_ns is None else min(view.at_ns, self._fits_since_ns - 1)
            made = self._reserved or Reservation(wants={}, start_ns=None, seconds=None)
            self._place.tell(wants=made.wants, start_ns=made.start_ns, seconds=made.seconds, asks=made.asks, at_ns=at_ns)
        return decision

    def words(self) -> str:
        """What the run waits for, behind whom, and how long as far as is known, in words."""
        made, view = self._reserved, self._view
        assert view is not None, "it has looked"
        told = f"waiting{self._for_what()}, {self._for_whom()}"
        if made is not None and made.asks:
            told += f"; {len(made.asks)} elastic run{'s are' if len(made.asks) > 1 else ' is'} asked to make room"
        elif made is not None and made.start_ns is not None:
            told += f"; expected to start in about {format_seconds(max(1.0, round((made.start_ns - view.at_ns) / 1e9)))}"
        return told if self._place is None else f"{told}, {_ordinal(len(view.ahead) + 1)} in turn"

    # -- one look ----------------------------------------------------------------------------------------------------------------------

    def _look_around(self) -> View:
        at_ns = time.monotonic_ns()
        places = self._leases.places()
        leases = self._leases.others()
        order = (-self._leases.priority, self._leases.since_ns, "" if self._place is None else self._place.name)
        self._view = View(at_ns=at_ns, inventory=self._inventory(), leases=leases, ahead=())
        if self._is_shared():
            self._view = replace(self._view, ahead=ahead(places, order, at_ns))
        return self._view

    def _is_shared(self) -> bool:
        """Whether other runs' leases count for one of the devices; if not, there is nothing to wait for in turn."""
        assert self._view is not None, "it has looked"
        return any(map(is_leased, self._view.inventory.devices))

    def _is_worth_planning(self, view: View) -> bool:
        """Whether something has changed since the last planning that justifies the cost of planning again."""
        before = self._planned
        if before is None or self._outline(view) != self._outline(before):
            return True
        since = (view.at_ns - before.at_ns) / 1e9
        if since > max(_PLAN_SECONDS, _PLANNING_SHARE * self._plan_seconds):
            return True
        pairs = list(zip(before.inventory.devices, view.inventory.devices, strict=True))
        if any(abs(now.free_bytes - was.free_bytes) > _NOTABLE_SHARE * now.total_bytes for was, now in pairs):
            return True
        return any(now.free_bytes != was.free_bytes for was, now in pairs) and since > _PLANNING_SHARE * self._plan_seconds

    def _outline(self, view: View) -> tuple[object, ...]:
        """The values whose change always justifies planning again."""
        return (
            [(device.id, device.error) for device in view.inventory.devices],
            [(lease.name, None if lease.ends_ns is None else lease.ends_ns // _END_NS) for lease in view.leases],
            [(place.name, dict(place.wants), None if place.start_ns is None else place.start_ns // _END_NS) for place in view.ahead],
            [lease.name for lease in self._askable(view)],
        )

    def _askable(self, view: View) -> list[Lease]:
        refused = self._asking.refused(view.at_ns)
        return may_ask(view.leases, self._leases.priority, view.at_ns, quantum_seconds(), refused)

    def _to_plan_on(self, view: View) -> Inventory | None:
        """The devices as the run may use them now; None where nothing fits, or would delay a run ahead."""
        need = self._need(view.inventory)
        if need is None or view.delays_nobody(need):
            return None if need is None else view.inventory
        left = view.left()
        return None if self._need(left) is None else left

    def _need(self, there: Inventory) -> Need | None:
        """What the best plan for these devices takes; meanwhile others see that this process lives."""
        if self._place is not None:
            self._place.stay()
        return self._prospect.need(there)

    def _try(self, there: Inventory) -> D | None:
        """Start on these devices, if nothing has changed when planning is done."""
        self._shown.planning()
        try:
            decision = self._prospect.decision(there)
        except NothingFits:  # the plan that was predicted to fit failed its trial
            self._fits_since_ns = None
            return None
        needed = decision.run_plan.needed_bytes
        if self._look_around().delays_nobody(decision.need) and self._leases.take_for_run(needed, self._devices, decision.expected_seconds):
            return decision
        self._fits_since_ns = None
        return None

    def _reserve(self, view: View) -> None:
        made = reserve(
            self._need,
            view.inventory,
            view.leases,
            view.ahead,
            now_ns=view.at_ns,
            priority=self._leases.priority,
            refused=self._asking.refused(view.at_ns),
        )
        self._asking.ask(() if made is None else made.asks, view.at_ns)
        self._reserved = made

    # -- the queue ---------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _in_the_queue(self) -> Iterator[None]:
        """While open, this run has a place."""
        self._place = self._leases.queue()
        if self._place is None:
            rank_zero_info(
                "autopar: nothing fits now; the run waits for free memory, but in no queue: without leases "
                f"({LEDGER_VARIABLE}) the runs of this host don't know of each other"
            )
        try:
            yield
        finally:
            if self._place is not None:
                self._place.withdraw()
                self._place = None

    def _without_waiting(self) -> D:
        """For a run that doesn't wait: take what waiting runs leave, as soon as they have looked at it."""
        while (found := self.look()) is None:
            if self._fits_since_ns is None:
                self._give_up(f"it doesn't wait, {self._for_whom()}")
            time.sleep(_LOOK_SECONDS)  # as in start
        return found

    def _give_up(self, waited: str) -> None:
        """Raise the error, if nothing fits still.

        Raises:
            NothingFits: with that.
        """
        view = self._look_around()
        try:
            self._prospect.decision(view.left())
        except NothingFits as error:
            raise NothingFits(error.report, waited) from None

    # -- what it says ------------------------------------------------------------------------------------------------------------------

    def _waited(self) -> float:
        return time.monotonic() - self._begun

    def _for_what(self) -> str:
        made = self._reserved
        return " for devices that it fits on" if made is None else f" for {_amounts(made.wants)}"

    def _for_whom(self) -> str:
        """Who goes first, or has what this run waits for, in words."""
        view = self._view
        assert view is not None, "it has looked"
        if view.ahead:
            return f"behind {_names(view.ahead)}"
        wants: Mapping[str, int] = {} if self._reserved is None else self._reserved.wants
        holders = [lease for lease in view.leases if any(lease.bytes.get(device) for device in wants or lease.bytes)]
        return f"held by {_names(holders)}" if holders else "held by processes that have no lease"

    def _tell(self, told: str, *, log: bool) -> None:
        """Show the state; without a terminal, write a line from time to time."""
        now = time.monotonic()
        news, at = told.partition("; expected")[0], self._told
        if log and now - at[1] >= (_STILL_SECONDS if news == at[0] else _NEWS_SECONDS):
            self._told = news, now
            rank_zero_info(f"autopar: {told}")
        if now - self._shown_at >= 1.0:
            self._shown_at, made = now, self._reserved
            known = None if made is None or made.start_ns is None or made.seconds is None else made.start_ns / 1e9 + made.seconds - now
            self._shown.queued(
                told,
                wanted_bytes={} if made is None else made.wants,
                ends_at=None if known is None else time.time() + known,
                priority=self._leases.priority,
            )
        for request in self._shown.requests():
            self._shown.answer(request, "the run is in the queue and holds no device; cancel it, or let it wait")


@contextmanager
def _told_to_end() -> Iterator[None]:
    """While open, SIGTERM ends the script as Ctrl-C does, so that nothing is left behind; the user's own handler is called first."""
    own = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if not own:
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _names(holders: Sequence[Lease] | Sequence[Place]) -> str:
    """The first name, and how many more."""
    first = f"{printable(holders[0].run)} of {user_name(holders[0].uid)}"
    return first if len(holders) == 1 else f"{first} and {len(holders) - 1} more"


def _amounts(wants: Mapping[str, int]) -> str:
    """Bytes on devices, in words."""
    sizes = {device: format_bytes(size) for device, size in wants.items()}
    if len(sizes) <= 2:
        return " and ".join(f"{size} on {device}" for device, size in sizes.items())
    least, most = format_bytes(min(wants.values())), format_bytes(max(wants.values()))
    return f"{least if least == most else f'{least} to {most}'} on each of {len(wants)} devices"


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
