"""What a run that can't start reserves: which devices, from when on, and whom it asks to make room. Pure but for one variable; of plans it
knows what they take.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_autopar.memory.inventory import Inventory
from lightning_autopar.memory.lease_files import Lease
from lightning_autopar.memory.queue_files import MOST_ASKS, Place
from lightning_autopar.memory.turn import idle, left_behind, moments, without

#: Sets another number of seconds that an elastic run is left alone before it is asked to make room.
QUANTUM_VARIABLE = "AUTOPAR_QUANTUM"
_QUANTUM_SECONDS = 60.0
#: Who was asked for room and is there after so long doesn't answer, and isn't asked again for as long as the second.
_ANSWER_SECONDS, _REFUSED_SECONDS = 30.0, 600.0


def quantum_seconds() -> float:
    """How long an elastic run is left alone after each start and move, before others may ask it to make room.

    Raises:
        ValueError: if the variable is no such number.
    """
    words = os.environ.get(QUANTUM_VARIABLE, "").strip()
    if not words:
        return _QUANTUM_SECONDS
    try:
        seconds = float(words)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise ValueError(f"the environment variable {QUANTUM_VARIABLE} is {words!r}, but must be seconds, at least 0, such as 60")
    return seconds


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a plan takes.

    Args:
        bytes: that must be free for it, by device id.
        seconds: how long it runs; None where nobody knows.
    """

    bytes: Mapping[str, int]
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """What a run waits for, as :class:`~lightning_autopar.memory.queue_files.Place` has it."""

    wants: Mapping[str, int]
    start_ns: int | None
    seconds: float | None
    asks: tuple[str, ...] = ()


def reserve(
    plan: Callable[[Inventory], Need | None],
    inventory: Inventory,
    leases: Sequence[Lease],
    ahead: Sequence[Place],
    *,
    now_ns: int,
    priority: int = 0,
    quantum: float | None = None,
    refused: Collection[str] = (),
) -> Reservation | None:
    """What a run that doesn't fit now waits for: what others make room for as it asks them to, or else the earliest moment that is known at
    which a plan fits, or else the idle devices.

    Args:
        plan: what the best plan for these devices takes; None where nothing fits.
        inventory: the devices as they are now, less what others were promised.
        leases: others'.
        ahead: see :func:`~lightning_autopar.memory.turn.ahead`.
        now_ns: on the host's monotonic clock.
        priority: of the run.
        quantum: see :func:`quantum_seconds`, which it is by default.
        refused: names of leases that aren't asked, see :class:`Asking`.

    Returns:
        None where it wouldn't fit on the idle devices either.

    Raises:
        ValueError: as :func:`quantum_seconds`.
    """
    made = _with_room(plan, inventory, leases, ahead, now_ns, may_ask(leases, priority, now_ns, _quantum(quantum), refused))
    if made is not None:
        return made
    times = moments(leases, ahead, now_ns)
    found: dict[int, Need | None] = {}

    def fits(index: int) -> bool:
        if index not in found:
            found[index] = plan(left_behind(inventory, leases, ahead, now_ns, from_ns=times[index]))
        return found[index] is not None

    if times and fits(len(times) - 1):
        first = bisect_left(range(len(times)), True, key=fits)  # what is left grows from moment to moment
        need = found[first]
        assert need is not None, "it is one at which it fits"
        return Reservation(wants=need.bytes, start_ns=times[first], seconds=need.seconds)
    empty = idle(inventory, leases)
    need = plan(left_behind(empty, (), ahead, now_ns)) or plan(empty)
    return None if need is None else Reservation(wants=need.bytes, start_ns=None, seconds=need.seconds)


class Asking:
    """Whom a run that waits has asked to make room, so that it doesn't go on asking those who don't."""

    def __init__(self) -> None:
        self._since: dict[str, int] = {}
        self._until: dict[str, int] = {}

    def refused(self, now_ns: int) -> set[str]:
        """The names of leases that aren't to be asked now."""
        for name, since_ns in list(self._since.items()):
            if now_ns - since_ns > _ANSWER_SECONDS * 1e9:
                del self._since[name]
                self._until[name] = now_ns + int(_REFUSED_SECONDS * 1e9)
        self._until = {name: until_ns for name, until_ns in self._until.items() if until_ns > now_ns}
        return set(self._until)

    def ask(self, names: Iterable[str], now_ns: int) -> None:
        """These are asked, and no others."""
        self._since = {name: self._since.get(name, now_ns) for name in names}


def _with_room(
    plan: Callable[[Inventory], Need | None],
    inventory: Inventory,
    leases: Sequence[Lease],
    ahead: Sequence[Place],
    now_ns: int,
    askable: Sequence[Lease],
) -> Reservation | None:
    """What a run gets as soon as some of these have made room; None where that isn't enough."""
    needs: dict[tuple[str, ...], Need | None] = {}

    def fits(given: Sequence[Lease]) -> bool:
        kept = [lease for lease in leases if lease not in given]
        needs[_names(given)] = need = plan(left_behind(without(inventory, given), kept, ahead, now_ns))
        return need is not None

    asked = _names(least(askable, fits))
    need = needs.get(asked)
    if not asked or len(asked) > MOST_ASKS or need is None:
        return None
    return Reservation(wants=need.bytes, start_ns=now_ns, seconds=need.seconds, asks=asked)


def _names(leases: Iterable[Lease]) -> tuple[str, ...]:
    return tuple(sorted(lease.name for lease in leases))


def _quantum(seconds: float | None) -> float:
    return quantum_seconds() if seconds is None else seconds


def may_ask(leases: Iterable[Lease], priority: int, now_ns: int, quantum: float, refused: Collection[str] = ()) -> list[Lease]:
    """The leases whose runs may be asked to make room for one of this priority, the first to ask first.

    Args:
        leases: others'.
        priority: of whoever would ask.
        now_ns: on the host's monotonic clock.
        quantum: seconds, see :func:`quantum_seconds`.
        refused: names of those that aren't to be asked.
    """
    found = [
        lease
        for lease in leases
        if lease.elastic and lease.priority < priority and now_ns - lease.made_ns >= quantum * 1e9 and lease.name not in refused
    ]
    return sorted(found, key=lambda lease: (lease.priority, -lease.since_ns, lease.name))


def least(leases: Sequence[Lease], fits: Callable[[Sequence[Lease]], bool]) -> tuple[Lease, ...]:
    """As few of these leases as it takes, so that a run fits without them; none where it doesn't even fit without all.

    Args:
        leases: those to ask first come first.
        fits: whether it fits without these.
    """
    for lease in leases:
        if fits([lease]):
            return (lease,)
    if len(leases) < 2 or not fits(leases):
        return ()
    kept = list(leases)
    for lease in reversed(leases):
        rest = [each for each in kept if each is not lease]
        if fits(rest):
            kept = rest
    return tuple(kept)
