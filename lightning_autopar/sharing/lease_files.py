"""Leases as files: each run of a host writes its own, and every run reads all. Doesn't know how much memory there is to lease."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from lightning_autopar.sharing.live_files import Found, LiveFile, byte_sizes, live_files

_PREFIX = "autopar-lease-"
#: Digits of a number that is overwritten while others read it.
_DIGITS = 20
#: A line that is overwritten once.
_ASKED, _GRANTED = b"0\n", b"1\n"
#: A line with the number twice, so that a reader notices if it is half written.
_ENDS_BYTES = 2 * (_DIGITS + 1)


@dataclass(frozen=True, kw_only=True)
class Lease:
    """A live lease, as every process on the host can read it.

    Args:
        uid: whose it is, by the file system.
        pid: its process, as that one's namespace counts.
        here: whether that is this process's namespace, not a container's.
        run: what its owner calls the run.
        bytes: what is leased, by device id.
        visible_bytes: how much of that its owner has taken already, so that the driver's figures show it.
        granted: whether it is granted; if not, its process is just asking for it.
        made_ns: when it was made, by the host's monotonic clock, which doesn't change with the date.
        priority: of its run, larger first.
        elastic: whether the run can give devices back before its end.
        since_ns: when the run first asked for anything, on the same clock.
        ends_ns: when it expects to end, on the same clock; None where nobody knows.
        part_of: the process of whose run this is a part, in addition to that one's own lease, counted like ``pid``; 0: it is the run's own.
    """

    name: str
    uid: int
    pid: int
    here: bool = True
    run: str
    bytes: Mapping[str, int]
    visible_bytes: Mapping[str, int] = field(default_factory=dict)
    granted: bool = True
    made_ns: int = 0
    priority: int = 0
    elastic: bool = False
    since_ns: int = 0
    ends_ns: int | None = None
    part_of: int = 0

    def pending_bytes(self, device: str) -> int:
        """The bytes that are promised on a device and that the driver doesn't show as used yet."""
        return max(0, self.bytes.get(device, 0) - self.visible_bytes.get(device, 0))

    @property
    def order(self) -> tuple[int, str]:
        """The sort key: who asked first."""
        return self.made_ns, self.name


class LeaseFile(LiveFile):
    """A lease of this process, a context manager; once granted it lasts until it is released or the process ends in any way.

    Args:
        wants: bytes by device id.
        since_ns: see :class:`Lease`; now by default.

    Raises:
        OSError: if the file can't be written; nothing is left behind then.
    """

    def __init__(
        self,
        folder: Path,
        wants: Mapping[str, int],
        run: str,
        *,
        priority: int = 0,
        elastic: bool = False,
        since_ns: int | None = None,
        part_of: int = 0,
    ) -> None:
        self.bytes = dict(wants)
        said = {"run": run, "bytes": dict(wants), "priority": priority, "elastic": elastic, "since": since_ns, "part_of": part_of}
        body = _ASKED + _ends_line(None) + b"".join(b"%0*d\n" % (_DIGITS, 0) for _ in wants)
        super().__init__(folder, _PREFIX, said, body)

    def __enter__(self) -> LeaseFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.release()

    def grant(self) -> None:
        """Mark the lease as granted."""
        self.write(0, _GRANTED)

    def expect(self, ends_ns: int | None) -> None:
        """Tell others when the run expects to end, by the host's monotonic clock; None if unknown. They see it at their next look."""
        self.write(len(_GRANTED), _ends_line(ends_ns))

    def show(self, device: str, visible_bytes: int) -> None:
        """Tell others how much of it is in use on the device, so that the driver's figures include it."""
        place = len(_GRANTED) + _ENDS_BYTES + list(self.bytes).index(device) * (_DIGITS + 1)
        self.write(place, b"%0*d" % (_DIGITS, visible_bytes))

    def release(self) -> None:
        """Give it back; the memory must be free before. A second call does nothing."""
        self.withdraw()


def live_leases(folder: Path) -> Iterator[Lease]:
    """All live leases, in no order; dead ones are removed if this user is allowed to.

    Raises:
        OSError: if the folder can't be read.
    """
    for found in live_files(folder, _PREFIX):
        lease = _parsed(found)
        if lease is not None:
            yield lease


def _ends_line(ends_ns: int | None) -> bytes:
    ends = b"%0*d" % (_DIGITS, ends_ns or 0)
    return ends + b" " + ends + b"\n"


def _parsed(found: Found) -> Lease | None:
    """The lease in a file; None if the file holds no lease."""
    said, body = found.said, found.body
    state, ends, shown = body[: len(_GRANTED)], body[len(_GRANTED) :][:_ENDS_BYTES], body[len(_GRANTED) + _ENDS_BYTES :]
    try:
        wants = byte_sizes(said["bytes"])
        visible = dict(zip(wants, map(int, shown.split()), strict=True))
        run, priority, elastic = str(said["run"]), int(said["priority"]), bool(said["elastic"])
        part_of, since_ns = int(said["part_of"]), found.since_ns
        expected = [int(word) for word in ends.split()]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None
    if min(visible.values(), default=0) < 0 or state not in (_ASKED, _GRANTED):
        return None
    return Lease(
        name=found.name,
        uid=found.uid,
        pid=found.pid,
        here=found.here,
        run=run,
        bytes=wants,
        visible_bytes=visible,
        granted=state == _GRANTED,
        made_ns=found.made_ns,
        priority=priority,
        elastic=elastic,
        since_ns=since_ns,
        ends_ns=expected[0] or None if len(expected) == 2 and expected[0] == expected[1] else None,
        part_of=part_of,
    )
