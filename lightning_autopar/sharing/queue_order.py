"""What each waiting run reserves, whose turn it is, and what a run may take without delaying those ahead of it. Reads no file and no clock.

Every waiting run reserves what it wants of some devices from the moment it expects to start, and every run computes the same from the same
files. A run further behind may take what is free now if nobody ahead has reserved it for later, or if it gives it back by then. This is
EASY backfill (Lifka 1995), but for all runs ahead instead of the first alone, as in conservative backfill (Mu'alem and Feitelson 2001). Of
plans it knows what they take.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_autopar.devices.inventory import Device, Inventory
from lightning_autopar.sharing.lease_files import Lease
from lightning_autopar.sharing.queue import MOST_ASKS, Place

#: A run whose process hasn't looked for so long is skipped until it does.
SILENT_SECONDS = 10.0


def ahead(places: Iterable[Place], order: tuple[int, int, str], now_ns: int) -> list[Place]:
    """The places before this one in the queue, in order, without those whose process is silent."""
    return sorted(
        (place for place in places if place.order < order and now_ns - place.seen_ns <= SILENT_SECONDS * 1e9),
        key=lambda place: place.order,
    )


def left_for_later(
    inventory: Inventory,
    leases: Iterable[Lease],
    ahead: Iterable[Place],
    now_ns: int,
    *,
    from_ns: int | None = None,
    ends_ns: int | None = None,
) -> Inventory:
    """The devices with what a run may take without delaying any run ahead of it, by their predictions and those of the leases' runs.

    Args:
        inventory: the devices as they are now, less what others were promised.
        leases: others'.
        now_ns: on the host's monotonic clock.
        from_ns: when the run would begin, if later than now: the devices as they are expected then.
        ends_ns: when the run is expected to end; it keeps what it takes for ever, unless given.
    """
    timeline = _Timeline(leases, ahead, now_ns)
    devices = tuple(replace(device, free_bytes=timeline.left_bytes(device, from_ns, ends_ns)) for device in inventory.devices)
    return replace(inventory, devices=devices)


def moments(leases: Iterable[Lease], ahead: Iterable[Place], now_ns: int) -> list[int]:
    """The times after now at which something is expected to be given back, in order, by the monotonic clock."""
    ends: list[float] = [lease.ends_ns for lease in leases if lease.ends_ns is not None]
    ends += [_end_ns(place, now_ns) for place in ahead if place.start_ns is not None]
    return sorted({math.ceil(end) for end in ends if now_ns < end < math.inf})


def idle(inventory: Inventory, leases: Iterable[Lease]) -> Inventory:
    """The devices as they would be without any other run or process; what this process has stays. A CPU device without a budget shares the
    host's memory with all that runs there: of that, only runs' leases count as free.
    """
    if inventory.source == "cpu":
        return without(inventory, leases)
    devices = []
    for device in inventory.devices:
        own_bytes = sum(process.used_bytes or 0 for process in device.processes if process.own)
        devices.append(replace(device, free_bytes=max(device.free_bytes, device.total_bytes - own_bytes)))
    return replace(inventory, devices=tuple(devices))


def without(inventory: Inventory, leases: Iterable[Lease]) -> Inventory:
    """The devices as they would be if these leases were given back."""
    given = list(leases)
    devices = tuple(
        replace(device, free_bytes=min(device.total_bytes, device.free_bytes + sum(lease.bytes.get(device.id, 0) for lease in given)))
        for device in inventory.devices
    )
    return replace(inventory, devices=devices)


def _start_ns(place: Place, now_ns: int) -> int:
    """When a place with a known start is expected to start; not before now."""
    assert place.start_ns is not None
    return max(now_ns, place.start_ns)


def _end_ns(place: Place, now_ns: int) -> float:
    """When a place with a known start is expected to end."""
    return math.inf if place.seconds is None else _start_ns(place, now_ns) + place.seconds * 1e9


class _Timeline:
    """The expected free bytes of each device, from now on."""

    def __init__(self, leases: Iterable[Lease], ahead: Iterable[Place], now_ns: int) -> None:
        self._leases, self._now_ns = list(leases), now_ns
        self._known = [place for place in ahead if place.start_ns is not None]
        self._unknown = [place for place in ahead if place.start_ns is None]

    def left_bytes(self, device: Device, from_ns: int | None, ends_ns: int | None) -> int:
        """See :func:`left_for_later`."""
        begins_ns = self._now_ns if from_ns is None else from_ns
        least = device.free_bytes if from_ns is None else self._level(device, begins_ns)
        for place in self._known:
            start_ns = _start_ns(place, self._now_ns)
            if place.wants.get(device.id) and start_ns >= begins_ns and (ends_ns is None or start_ns < ends_ns):
                least = min(least, self._level(device, start_ns))
        if any(place.wants.get(device.id) for place in self._unknown):  # it isn't known when: perhaps before any end
            wanted = sum(place.wants.get(device.id, 0) for place in (*self._known, *self._unknown))
            least = min(least, device.total_bytes - wanted)
        return max(0, min(least, device.total_bytes))

    def _level(self, device: Device, at_ns: int) -> int:
        """The free bytes of a device at some moment, besides the runs ahead that run then."""
        returned = sum(lease.bytes.get(device.id, 0) for lease in self._leases if lease.ends_ns is not None and lease.ends_ns <= at_ns)
        wanted = sum(
            place.wants.get(device.id, 0) for place in self._known if _start_ns(place, self._now_ns) <= at_ns < _end_ns(place, self._now_ns)
        )
        return device.free_bytes + returned - wanted


#: The variable that sets for how many seconds an elastic run is left alone before it is asked to make room.
QUANTUM_VARIABLE = "AUTOPAR_QUANTUM"
_QUANTUM_SECONDS = 60.0
#: If a run that was asked for room is still there after the first time, it doesn't answer, and isn't asked again for the second time.
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
    """What a run waits for; see :class:`~lightning_autopar.sharing.queue.Place`."""

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
    """What a run that doesn't fit now waits for: room that others make as it asks them to, or else the earliest known moment at which a
    plan fits, or else the idle devices.

    Args:
        plan: gives what the best plan for these devices takes; None where nothing fits.
        quantum: see :func:`quantum_seconds`, which it is by default.
        refused: names of leases that aren't asked, see :class:`Asking`.

    Returns:
        None if it wouldn't fit on the idle devices either.

    Raises:
        ValueError: as :func:`quantum_seconds`.
    """
    quantum = quantum_seconds() if quantum is None else quantum
    made = _with_room(plan, inventory, leases, ahead, now_ns, may_ask(leases, priority, now_ns, quantum, refused))
    if made is not None:
        return made
    times = moments(leases, ahead, now_ns)
    found: dict[int, Need | None] = {}

    def fits(index: int) -> bool:
        if index not in found:
            found[index] = plan(left_for_later(inventory, leases, ahead, now_ns, from_ns=times[index]))
        return found[index] is not None

    if times and fits(len(times) - 1):
        first = bisect_left(range(len(times)), True, key=fits)  # what is free grows from moment to moment
        need = found[first]
        assert need is not None, "it is one at which it fits"
        return Reservation(wants=need.bytes, start_ns=times[first], seconds=need.seconds)
    empty = idle(inventory, leases)
    need = plan(left_for_later(empty, (), ahead, now_ns)) or plan(empty)
    return None if need is None else Reservation(wants=need.bytes, start_ns=None, seconds=need.seconds)


class Asking:
    """Records which runs a waiting run has asked to make room, so that it doesn't ask those again that don't."""

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
        """Record that these are asked, and no others."""
        self._since = {name: self._since.get(name, now_ns) for name in names}


def _with_room(
    plan: Callable[[Inventory], Need | None],
    inventory: Inventory,
    leases: Sequence[Lease],
    ahead: Sequence[Place],
    now_ns: int,
    askable: Sequence[Lease],
) -> Reservation | None:
    """What a run gets when some of these have made room; None where that isn't enough."""
    needs: dict[tuple[str, ...], Need | None] = {}

    def fits(given: Sequence[Lease]) -> bool:
        kept = [lease for lease in leases if lease not in given]
        needs[_names(given)] = need = plan(left_for_later(without(inventory, given), kept, ahead, now_ns))
        return need is not None

    asked = _names(least(askable, fits))
    need = needs.get(asked)
    if not asked or len(asked) > MOST_ASKS or need is None:
        return None
    return Reservation(wants=need.bytes, start_ns=now_ns, seconds=need.seconds, asks=asked)


def _names(leases: Iterable[Lease]) -> tuple[str, ...]:
    return tuple(sorted(lease.name for lease in leases))


def may_ask(leases: Iterable[Lease], priority: int, now_ns: int, quantum: float, refused: Collection[str] = ()) -> list[Lease]:
    """The leases whose runs may be asked to make room for one of this priority, the first to ask first.

    Args:
        priority: of the run that would ask.
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
    """The fewest of these leases without which a run fits; empty if it doesn't fit even without all.

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
