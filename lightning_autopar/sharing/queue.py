"""A run's place in the host's queue, as a file: a run that waits writes down what it waits for, and every run reads that.

No server calls the next run: each one reads all places and leases, and starts when :mod:`.queue_order` says that it is its turn. Knows
devices by their ids and bytes; no plan.
"""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_autopar.sharing.live_files import Found, LiveFile, byte_sizes, live_files

#: The bounds of a priority; a larger one goes first.
LEAST_PRIORITY, MOST_PRIORITY = -100, 100
_PREFIX = "autopar-place-"
#: Changing values are written to two such slots in turn, so that one of them is always complete.
_SLOT_BYTES = 16 * 1024
#: The most names of others that fit.
MOST_ASKS = 64


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of a waiting run, as every process on the host can read it. All times are on the host's monotonic clock.

    Args:
        uid: whose it is, by the file system.
        pid: its process, as that one's namespace counts.
        here: whether that is this process's namespace; else it is a container's.
        run: what its owner calls the run.
        priority: from -100 to 100, larger first.
        since_ns: when the run first asked; not before its process began, whatever it says.
        seen_ns: when its process was last there.
        passed_ns: until when it has looked and taken nothing: runs behind it may take what was free then.
        wants: what it reserves, bytes by device id, by its own prediction; empty until it knows.
        start_ns: when it expects to start; None where nobody knows.
        seconds: how long it expects to run; None where it doesn't know.
        asks: names of leases whose runs it asks to make room.
    """

    name: str
    uid: int
    pid: int
    here: bool = True
    run: str
    made_ns: int
    priority: int = 0
    since_ns: int
    seen_ns: int
    passed_ns: int = 0
    wants: Mapping[str, int] = field(default_factory=dict)
    start_ns: int | None = None
    seconds: float | None = None
    asks: tuple[str, ...] = ()

    @property
    def order(self) -> tuple[int, int, str]:
        """The sort key: whose turn comes first."""
        return -self.priority, self.since_ns, self.name


class PlaceFile(LiveFile):
    """A place of this process, until it is withdrawn or the process ends in any way.

    Args:
        folder: that all runs of the host share.
        priority: from -100 to 100, larger first.
        since_ns: when the run first asked, on the monotonic clock; now by default.

    Raises:
        OSError: if the file can't be written; nothing is left behind then.
    """

    def __init__(self, folder: Path, *, run: str, priority: int = 0, since_ns: int | None = None) -> None:
        assert LEAST_PRIORITY <= priority <= MOST_PRIORITY, "checked where the user said so"
        self.priority = priority
        self._told: dict[str, Any] = {"wants": {}, "start": None, "seconds": None, "asks": []}
        self._count = self._passed_ns = 0
        said = {"run": run, "priority": priority, "since": since_ns}
        slots = self._slot().ljust(_SLOT_BYTES, b" ") + b" " * _SLOT_BYTES
        super().__init__(folder, _PREFIX, said, slots)
        self.since_ns = self.made_ns if since_ns is None else since_ns

    def tell(
        self,
        *,
        wants: Mapping[str, int],
        start_ns: int | None,
        seconds: float | None,
        asks: Sequence[str] = (),
        at_ns: int | None = None,
    ) -> None:
        """Write what it waits for; that counts as a look. Arguments as :class:`Place`'s and :meth:`look`'s."""
        self._told = {"wants": dict(wants), "start": start_ns, "seconds": seconds, "asks": list(asks)[:MOST_ASKS]}
        self.look(at_ns)

    def look(self, at_ns: int | None = None) -> None:
        """Its process has looked, and doesn't start.

        Args:
            at_ns: when it looked at the devices; now by default. Runs behind it take nothing that came free later.
        """
        self._passed_ns = time.monotonic_ns() if at_ns is None else at_ns
        self.stay()

    def stay(self) -> None:
        """Its process lives, and is about to look."""
        self._count += 1
        self.write(self._count % 2 * _SLOT_BYTES, self._slot())

    def _slot(self) -> bytes:
        words = json.dumps({**self._told, "count": self._count, "seen": time.monotonic_ns(), "passed": self._passed_ns}).encode()
        slot = b"%08x %d " % (zlib.crc32(words), len(words)) + words
        assert len(slot) <= _SLOT_BYTES, "a host has fewer devices"
        return slot


def live_places(folder: Path) -> list[Place]:
    """All places whose process is alive, in order; dead ones are removed where this user may.

    Raises:
        OSError: if the folder can't be read.
    """
    places = (_parsed(found) for found in live_files(folder, _PREFIX))
    return sorted((place for place in places if place is not None), key=lambda place: place.order)


def _parsed(found: Found) -> Place | None:
    """The place in a file; None if the file holds no place."""
    told = max((_told(slot) for slot in (found.body[:_SLOT_BYTES], found.body[_SLOT_BYTES:])), key=_count)
    if told is None:
        return None
    try:
        priority, since_ns, wants = int(found.said["priority"]), found.since_ns, byte_sizes(told["wants"])
        start_ns = None if told["start"] is None else int(told["start"])
        seconds = None if told["seconds"] is None else float(told["seconds"])
        seen_ns, passed_ns, asks, run = int(told["seen"]), int(told["passed"]), tuple(map(str, told["asks"])), str(found.said["run"])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None
    if not LEAST_PRIORITY <= priority <= MOST_PRIORITY or (seconds is not None and not 0 <= seconds < math.inf):
        return None
    now = time.monotonic_ns()
    return Place(
        name=found.name,
        uid=found.uid,
        pid=found.pid,
        here=found.here,
        run=run,
        made_ns=found.made_ns,
        priority=priority,
        since_ns=min(since_ns, now),
        seen_ns=min(seen_ns, now),
        passed_ns=min(passed_ns, now),
        wants=wants,
        start_ns=start_ns,
        seconds=seconds,
        asks=asks,
    )


def _told(slot: bytes) -> dict[str, Any] | None:
    """The contents of a slot; None while it is being written, or if it never was."""
    try:
        crc, length, words = slot.split(b" ", 2)
        words = words[: int(length)]
        told = json.loads(words) if zlib.crc32(words) == int(crc, 16) else None
    except (ValueError, RecursionError):
        return None
    return told if isinstance(told, dict) else None


def _count(told: dict[str, Any] | None) -> int:
    count = None if told is None else told.get("count")
    return count if isinstance(count, int) else -1
