"""The files behind leases, in a folder that all users of a host share: made whole, alive while their process is, nobody else's to touch.

A lease is one file, held by ``flock``, which the kernel lets go of however its process dies. Its name says whose it is and when it was
made; its owner, by the file system, must agree. Whoever reads it trusts nothing else: no links, no pipes, no file of another name's
owner, none that is locked by somebody after its process has died. The name never changes while the lease lasts, as a listing of the folder
may miss a file that is renamed meanwhile. Needs the standard library alone; doesn't know what is leased out nor how much there is.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from lightning_autopar.memory.own_locks import is_own, let_go, own

_PREFIX = "autopar-lease-"
#: Larger files aren't ours.
_MOST_BYTES = 64 * 1024
#: Digits of a number that is written over while others read it.
_DIGITS = 20
#: A line that is written over once.
_ASKED, _GRANTED = b"0\n", b"1\n"


@dataclass(frozen=True, kw_only=True)
class Lease:
    """A lease that is alive, as anybody on the host can read it.

    Args:
        name: of its file.
        uid: whose it is, by the file system.
        pid: its process, as that one's namespace counts.
        here: whether that is this process's namespace; else it is a container's.
        run: what its owner calls the run.
        bytes: what is leased, by device id.
        visible_bytes: how much of that its owner has taken already, so that the driver's figures show it.
        granted: whether it is decided; else somebody is just asking for it.
        made_ns: when it was made, on the host's monotonic clock, which no change of the date moves.
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

    def pending_bytes(self, device: str) -> int:
        """What is promised on a device and can't be seen there yet."""
        return max(0, self.bytes.get(device, 0) - self.visible_bytes.get(device, 0))

    @property
    def order(self) -> tuple[int, str]:
        """Who asked before whom."""
        return self.made_ns, self.name


class LeaseFile:
    """A lease of this process.

    Args:
        folder: the shared one.
        wants: bytes by device id.
        run: a name for others to read.

    Raises:
        OSError: if the file can't be written; nothing is left behind then.
    """

    def __init__(self, folder: Path, wants: Mapping[str, int], run: str) -> None:
        self._devices = list(wants)
        self.made_ns = time.monotonic_ns()
        self.name = f"{_PREFIX}{os.geteuid()}-{self.made_ns}-{secrets.token_hex(8)}"
        said = {"run": run, "pid": os.getpid(), "started": _started(os.getpid()), "namespace": _namespace(), "bytes": dict(wants)}
        head = json.dumps(said).encode() + b"\n"
        self._offset = len(head)
        # Without a name until it is locked and written, so that nobody ever sees one that isn't.
        self._descriptor = own(os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o644))
        try:
            os.fchmod(self._descriptor, 0o644)  # whatever the umask is: others must be able to read it
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            data = head + _ASKED + b"".join(b"%0*d\n" % (_DIGITS, 0) for _ in self._devices)
            if os.write(self._descriptor, data) != len(data):
                raise OSError(errno.ENOSPC, "no room for a lease", str(folder))
            self._path = folder / self.name
            # With a folder's descriptor, which an absolute path needs not, Python calls linkat, which follows the link to the file.
            os.link(f"/proc/self/fd/{self._descriptor}", self._path, src_dir_fd=self._descriptor, follow_symlinks=True)
        except BaseException:
            let_go(self._descriptor)
            raise

    def grant(self) -> None:
        """It is decided."""
        os.pwrite(self._descriptor, _GRANTED, self._offset)

    def show(self, device: str, visible_bytes: int) -> None:
        """So much of a device's share is taken, and seen by others as used."""
        place = self._offset + len(_GRANTED) + self._devices.index(device) * (_DIGITS + 1)
        os.pwrite(self._descriptor, b"%0*d" % (_DIGITS, visible_bytes), place)

    def withdraw(self) -> None:
        """It is no more."""
        if is_own(self._descriptor):  # else a forked child's, or withdrawn before
            with suppress(OSError):
                self._path.unlink()
            let_go(self._descriptor)


def live_leases(folder: Path) -> Iterator[Lease]:
    """All leases that are alive, in no order; dead ones are removed where this user may.

    Raises:
        OSError: if the folder can't be read.
    """
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.name.startswith(_PREFIX)]
    for name in names:
        lease = _read(f"{folder}/{name}", name)
        if lease is not None:
            yield lease


def _read(path: str, name: str) -> Lease | None:
    """The lease in a file; None where it is dead, or no lease."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # withdrawn just now; or a link, or one that isn't for us to read: no lease looks so
        return None
    try:
        found = os.fstat(descriptor)
        parts = name.removeprefix(_PREFIX).split("-")
        ours = stat.S_ISREG(found.st_mode) and len(parts) == 3 and parts[0] == str(found.st_uid) and parts[1].isdecimal()
        if not ours or found.st_size > _MOST_BYTES:
            return None
        if _unlocked(descriptor):
            if os.geteuid() in (0, found.st_uid):
                with suppress(OSError):
                    os.unlink(path)
            return None
        if found.st_nlink != 1:  # a second name for one
            return None
        return _parsed(name, os.pread(descriptor, _MOST_BYTES, 0), found.st_uid, int(parts[1]))
    finally:
        os.close(descriptor)


def _unlocked(descriptor: int) -> bool:
    """Whether nobody holds it: its process is dead."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _parsed(name: str, data: bytes, uid: int, made_ns: int) -> Lease | None:
    """What a file says; None where that is no lease's words, or its process is dead and somebody else holds the file."""
    head, _, rest = data.partition(b"\n")
    state, shown = rest[: len(_GRANTED)], rest[len(_GRANTED) :]
    try:
        said = json.loads(head)
        wants = {str(device): int(size) for device, size in said["bytes"].items()}
        visible = dict(zip(wants, map(int, shown.split()), strict=True))
        pid, started, namespace, run = int(said["pid"]), int(said["started"]), str(said["namespace"]), str(said["run"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if min(wants.values(), default=0) < 0 or min(visible.values(), default=0) < 0 or state not in (_ASKED, _GRANTED):
        return None
    if namespace == _namespace() and not _lives(pid, started):
        return None
    return Lease(
        name=name,
        uid=uid,
        pid=pid,
        here=namespace == _namespace(),
        run=run,
        bytes=wants,
        visible_bytes=visible,
        granted=state == _GRANTED,
        made_ns=made_ns,
    )


def _started(pid: int) -> int:
    """When a process began, in the kernel's ticks: with its number it is known for good; 0 where there is none."""
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        return int(os.read(descriptor, 4096).rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0
    finally:
        os.close(descriptor)


def _lives(pid: int, started: int) -> bool:
    """Whether the process that began then is there; one that this user may not look at counts as it."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        pass
    except (ProcessLookupError, OverflowError):
        return False
    return _started(pid) in (0, started)


@lru_cache(maxsize=1)
def _namespace() -> str:
    """Which processes' numbers this process knows: a container's are its own."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
