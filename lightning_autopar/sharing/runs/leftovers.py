"""What killed runs have left in memory and among temporary files: the folders of their processes, and the snapshots that their next start
would go on from. Each has a lock, which the kernel releases with the last process of its run. Needs the standard library alone.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["files", "snapshots"]

#: The lock within a folder, by what lies there; and how the folders' names begin.
LOCKS: dict[Kind, str] = {"files": "in-use", "snapshots": "lock"}
RUN_PREFIX, SNAPSHOTS_PREFIX = "autopar-", "autopar-snapshots-"
#: Where small files of all processes lie.
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """A folder of a run that is dead.

    Args:
        since: when it was last changed, in seconds since the epoch.
    """

    path: Path
    kind: Kind
    size_bytes: int
    since: float

    @property
    def goes_on(self) -> bool:
        """Whether the run's next start goes on from it, rather than that it was killed before its first snapshot."""
        return self.kind == "snapshots" and self.size_bytes > 0


def leftovers(homes: Sequence[Path] | None = None) -> tuple[Leftover, ...]:
    """This user's, by path.

    Args:
        homes: the folders to look in; by default shared memory and the folder for temporary files.
    """
    if homes is None:
        homes = list(dict.fromkeys((SHARED_MEMORY, Path(tempfile.gettempdir()))))
    found = []
    for home in homes:
        for kind, prefix in (("files", RUN_PREFIX), ("snapshots", f"{SNAPSHOTS_PREFIX}{os.getuid()}-")):
            for path in home.glob(f"{prefix}*/{LOCKS[kind]}"):  # type: ignore[index]
                with suppress(OSError), _dead(path) as dead:  # another process removes it first
                    if dead:
                        folder = path.parent
                        size = sum(each.lstat().st_size for each in folder.rglob("*") if each.is_file())
                        found.append(Leftover(path=folder, kind=kind, size_bytes=size, since=folder.stat().st_mtime))  # type: ignore[arg-type]
    return tuple(sorted(found, key=lambda each: each.path))


def remove(left: Leftover) -> bool:
    """Remove the folder, unless a run has taken it over meanwhile; returns whether it is gone."""
    with suppress(FileNotFoundError), _dead(left.path / LOCKS[left.kind], alone=True) as dead:
        if dead:
            shutil.rmtree(left.path, ignore_errors=True)
    return not left.path.exists()


@contextmanager
def _dead(lock: Path, *, alone: bool = False) -> Iterator[bool]:
    """Whether nobody holds a lock of this user's; while open, no run takes it if it is held ``alone``."""
    descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield os.fstat(descriptor).st_uid == os.getuid()
    finally:
        os.close(descriptor)
