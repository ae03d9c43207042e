"""Files that live as long as their process, in a folder that all users of a host share: written as a whole, and protected from other users.

Each file is held by ``flock``, which the kernel releases however the process dies; a forked child closes its copies of the locks, or it
would hold them after its parent's death. A file's name says what it is, whose it is and when it was made, and its owner in the file system
must agree. Readers trust nothing else: no links, no pipes, no name with another owner, no file that somebody has locked after its process
died. The name never changes, as a listing of the folder may miss a file that is renamed meanwhile. Needs the standard library alone;
doesn't know what the files say.
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
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from lightning_autopar.sharing.process_ids import lives, pid_namespace, started_ticks

_own: set[int] = set()


def own(descriptor: int) -> int:
    """Register a descriptor as this process's own; returns it."""
    _own.add(descriptor)
    return descriptor


def is_own(descriptor: int) -> bool:
    """Whether this process still owns it: not in a forked child, nor after :func:`let_go`."""
    return descriptor in _own


def let_go(descriptor: int) -> None:
    """Close it, which releases the lock."""
    _own.discard(descriptor)
    os.close(descriptor)


def _let_go_in_child() -> None:
    for descriptor in _own:
        os.close(descriptor)
    _own.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


#: Errors on opening a file that was just withdrawn, is a link, or isn't readable for us: our own files give none of them.
_NO_FILE_OF_OURS = (errno.ENOENT, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO, errno.ESTALE)
#: Larger files aren't ours.
_MOST_BYTES = 64 * 1024


class LiveFile:
    """A file of this process.

    Args:
        prefix: of its name: what it is.
        said: what it says for good, beside whose it is.
        body: what it says now, which :meth:`write` changes in place.

    Raises:
        OSError: if the file can't be written; nothing is left behind then.
    """

    def __init__(self, folder: Path, prefix: str, said: Mapping[str, Any], body: bytes) -> None:
        self.made_ns = time.monotonic_ns()
        self.name = f"{prefix}{os.geteuid()}-{self.made_ns}-{secrets.token_hex(8)}"
        owner = {"pid": os.getpid(), "started": started_ticks(os.getpid()), "namespace": pid_namespace()}
        head = json.dumps({**said, **owner}).encode() + b"\n"
        data = head + body
        assert len(data) <= _MOST_BYTES, "others wouldn't read it"
        self._offset, self._gone = len(head), False
        # It has no name until it is locked and written, so that nobody sees it before.
        self._descriptor = own(os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o644))
        try:
            os.fchmod(self._descriptor, 0o644)  # whatever the umask is: others must be able to read it
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.write(self._descriptor, data) != len(data):
                raise OSError(errno.ENOSPC, "no room for a file", str(folder))
            self._path = folder / self.name
            # With a folder's descriptor, though an absolute path needs none, Python calls linkat, which follows the link to the file.
            os.link(f"/proc/self/fd/{self._descriptor}", self._path, src_dir_fd=self._descriptor, follow_symlinks=True)
        except BaseException:
            let_go(self._descriptor)
            raise

    @property
    def is_ours(self) -> bool:
        """Whether this process holds it, and not a forked child's parent; False after it was withdrawn."""
        return not self._gone and is_own(self._descriptor)

    def write(self, offset: int, data: bytes) -> None:
        """Change some bytes of the body; does nothing if it isn't ours any more."""
        if self.is_ours:
            os.pwrite(self._descriptor, data, self._offset + offset)

    def withdraw(self) -> None:
        """It is no more."""
        if self.is_ours:
            self._gone = True
            with suppress(OSError):
                self._path.unlink()
            let_go(self._descriptor)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A file whose process is alive.

    Args:
        uid: whose it is, by the file system.
        made_ns: when it was made, on the host's monotonic clock, which no change of the date moves.
        pid: its process, as that one's namespace counts.
        here: whether that is this process's namespace; else it is a container's.
        started_ticks: when its process began, in the kernel's ticks since the host's start; 0 if unknown.
        said: what it says for good.
    """

    name: str
    uid: int
    made_ns: int
    pid: int
    here: bool
    started_ticks: int
    said: Mapping[str, Any]
    body: bytes

    @property
    def started_ns(self) -> int:
        """When its process began, by the monotonic clock, or somewhat earlier, as the host may have slept; 0 if unknown."""
        if not self.started_ticks:
            return 0
        slept_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()  # the kernel's ticks go on while the host sleeps
        return max(0, self.started_ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK") - slept_ns)

    @property
    def since_ns(self) -> int:
        """When its run first asked, by the monotonic clock: as the file says, but not before its process began.

        Raises:
            ValueError, KeyError, TypeError, OverflowError: if the file doesn't say it correctly.
        """
        return self.made_ns if self.said["since"] is None else max(self.started_ns, int(self.said["since"]))


def byte_sizes(words: Any) -> dict[str, int]:
    """Bytes by device id, written by another process.

    Raises:
        ValueError, TypeError, AttributeError, OverflowError: if they are none.
    """
    found = {str(device): int(size) for device, size in words.items()}
    if min(found.values(), default=0) < 0:
        raise ValueError(f"{found} are no sizes")
    return found


def live_files(folder: Path, prefix: str) -> Iterator[Found]:
    """All files of that prefix whose processes live, in no order; dead ones are removed if this user is allowed to.

    Raises:
        OSError: if the folder can't be read.
    """
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.name.startswith(prefix)]
    for name in names:
        found = _read(f"{folder}/{name}", name, prefix)
        if found is not None:
            yield found


def _read(path: str, name: str, prefix: str) -> Found | None:
    """The contents of a file; None if its process is dead, or it isn't one of ours."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NO_FILE_OF_OURS:
            return None
        raise  # no descriptors are left, say: an unreadable file isn't an absent one
    try:
        found = os.fstat(descriptor)
        parts = name.removeprefix(prefix).split("-")
        ours = stat.S_ISREG(found.st_mode) and len(parts) == 3 and parts[0] == str(found.st_uid) and parts[1].isdecimal()
        if not ours or found.st_size > _MOST_BYTES:
            return None
        if _unlocked(descriptor):
            if os.geteuid() in (0, found.st_uid):
                with suppress(OSError):
                    os.unlink(path)
            return None
        if found.st_nlink != 1:  # a second name for a file
            return None
        return _parsed(name, os.pread(descriptor, _MOST_BYTES, 0), found.st_uid, int(parts[1]))
    finally:
        os.close(descriptor)


def _unlocked(descriptor: int) -> bool:
    """Whether nobody holds its lock, so that its process is dead."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@lru_cache(maxsize=256)
def _head(data: bytes) -> Mapping[str, Any]:
    """The permanent part of a file: cached, as every process reads it at every look.

    Raises:
        ValueError: if it is no JSON.
    """
    return json.loads(data)  # type: ignore[no-any-return]  # whatever it is: who reads it looks


def _parsed(name: str, data: bytes, uid: int, made_ns: int) -> Found | None:
    """The contents of a file; None if they can't be right, or its process is dead and another one holds the file."""
    head, _, body = data.partition(b"\n")
    try:
        said = _head(head)
        pid, started, namespace = int(said["pid"]), int(said["started"]), str(said["namespace"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    here, ticks = namespace == pid_namespace(), 0
    if here:
        ticks = started_ticks(pid)
        if ticks != started and (ticks or not lives(pid, started)):
            return None
    return Found(name=name, uid=uid, made_ns=made_ns, pid=pid, here=here, started_ticks=ticks, said=said, body=body)
