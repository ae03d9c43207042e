"""Folders of runs in a place that all users share: their owners, whether their run is alive, and files in them that are never half written.

A run's folder has a lock that only its user can open, and that the kernel releases however the process dies. In such a place anybody can
make a folder of any name, so the file system decides whose it is, and another user's files are read with distrust. Needs the standard
library alone; doesn't know what the files say.

Also what killed runs have left in memory and among temporary files: the folders of their processes, and the snapshots that their next start
would go on from. Each of these has such a lock, too, which is released with the last process of its run.
"""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_autopar.sharing.live_files import let_go, own

#: A folder for all runs' folders, where the host has no ``/dev/shm`` that its processes share.
RUNS_VARIABLE = "AUTOPAR_RUNS"
SHARED_MEMORY = Path("/dev/shm")
_LOCK = "lock"
#: Larger files aren't ours.
_MOST_BYTES = 64 * 1024
#: The most runs of one user; more would make others wait who look at them.
_MOST_FOLDERS = 1000
#: The modes of files that all users may read, and of those that only the owner may.
PUBLIC, PRIVATE = 0o644, 0o600
_PUBLIC_FOLDER = 0o755
_ROOT = "autopar-runs-"
#: A hidden folder without a lock may be one that is being made, but not for longer than this.
_MAKING_SECONDS = 60.0


def user_name(uid: int | None = None) -> str:
    """A user's name, this process's by default; ``"user 1001"`` where the host knows none."""
    number = os.geteuid() if uid is None else uid
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:  # a container's user
        return f"user {number}"


def run_homes() -> list[Path]:
    """The places for runs' folders, the best first."""
    if named := os.environ.get(RUNS_VARIABLE, "").strip():
        return [Path(named).expanduser()]
    homes = [SHARED_MEMORY, Path("/tmp")]
    with suppress(OSError):  # no temporary folder at all
        homes.insert(1, Path(tempfile.gettempdir()))
    return list(dict.fromkeys(homes))


def own_root(home: Path) -> Path:
    """The folder of this user's runs, made if need be.

    Raises:
        OSError: if it can't be made, or is somebody else's.
    """
    root = home / f"{_ROOT}{os.geteuid()}"
    with suppress(FileExistsError):
        root.mkdir(mode=_PUBLIC_FOLDER)
    if not is_own(root):
        raise PermissionError(f"{root.name} exists already, and belongs to {user_name(root.lstat().st_uid)} or is no folder")
    if stat.S_IMODE(root.stat().st_mode) != _PUBLIC_FOLDER:
        root.chmod(_PUBLIC_FOLDER)
    return root


def roots() -> list[tuple[Path, int]]:
    """All users' folders of runs on this host, each with its owner; folders that one user made in another's name are left out."""
    found = []
    for home in run_homes():
        with suppress(OSError):  # no such place, or it isn't for us to read
            for root in sorted(home.glob(f"{_ROOT}*")):
                entry = root.lstat()
                if stat.S_ISDIR(entry.st_mode) and root.name == f"{_ROOT}{entry.st_uid}":
                    found.append((root, entry.st_uid))
    return found


def folders_in(root: Path) -> list[Path]:
    """The folders in a user's folder, by name; only some if there are too many."""
    found = []
    with suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    found.append(root / entry.name)
            if len(found) == _MOST_FOLDERS:
                break
    return sorted(found)


def is_own(path: Path) -> bool:
    """Whether it is this user's own folder: in a shared place any user can make a folder of that name, or a link."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def make_folder(folder: Path, files: Mapping[str, Any]) -> int:
    """Make a run's folder with its first files, which others see only after it is locked; returns the lock, for
    :func:`~lightning_autopar.sharing.live_files.let_go`.

    Raises:
        FileExistsError: if there is one of that name.
        OSError: if it can't be made.
    """
    hidden = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    lock = None
    try:
        lock = own(os.open(hidden / _LOCK, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name, data in files.items():
            write_json(hidden / name, data, PUBLIC)
        hidden.chmod(_PUBLIC_FOLDER)
        if os.path.lexists(folder):  # an empty one would be replaced
            raise FileExistsError(f"{folder} is there")
        try:
            hidden.rename(folder)
        except OSError as error:
            raise FileExistsError(f"{folder} is there") if os.path.lexists(folder) else error from None
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        if lock is not None:
            let_go(lock)
        raise
    return lock


def is_alive(folder: Path) -> bool:
    """Whether the run is alive: its agent holds the lock. If that isn't known, it counts as alive, since dead runs are removed."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDONLY | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def is_abandoned(folder: Path) -> bool:
    """Whether it may be removed: its run is dead, and it isn't just being made."""
    if is_alive(folder):
        return False
    try:
        return not folder.name.startswith(".") or time.time() - folder.lstat().st_mtime > _MAKING_SECONDS
    except OSError:
        return False


def remove_folder(folder: Path) -> None:
    """Hide it, then remove it, so that nobody sees a half, and what is written meanwhile is removed, too."""
    hidden = folder.with_name(f".gone-{secrets.token_hex(8)}")
    with suppress(OSError):  # somebody is quicker
        folder.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def write_json(path: Path, data: Any, mode: int = PRIVATE) -> None:
    """Write a file that exists whole or not at all, with exactly this mode, whatever the umask is.

    Raises:
        OSError: if it can't be written.
    """
    hidden = path.with_name(f".{secrets.token_hex(8)}")
    try:
        handle = os.open(hidden, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            os.fchmod(handle, mode)
            json.dump(data, file, allow_nan=False)
        os.replace(hidden, path)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise


def read_json(path: Path, uid: int | None = None) -> Any:
    """A file's contents; it must be a plain file of that user: a pipe or a link could make the reader wait, or read something else.

    Args:
        uid: whose it has to be, this user's by default.

    Raises:
        OSError: if it can't be read.
        ValueError: if it isn't ours.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb", closefd=True) as file:
        found = os.fstat(handle)
        owner = os.geteuid() if uid is None else uid
        if not stat.S_ISREG(found.st_mode) or found.st_uid != owner or found.st_size > _MOST_BYTES:
            raise ValueError(f"it is no file of {user_name(owner)}'s of at most {_MOST_BYTES} bytes")
        return json.loads(file.read(_MOST_BYTES))


def take_away(path: Path) -> bool:
    """Whether it was this call that removed it."""
    try:
        path.unlink()
    except (IsADirectoryError, PermissionError):
        shutil.rmtree(path, ignore_errors=True)
    except OSError:
        return False
    return True


Kind = Literal["files", "snapshots"]

#: The lock within a folder, by what lies there; and how the folders' names begin.
LOCKS: dict[Kind, str] = {"files": "in-use", "snapshots": "lock"}
RUN_PREFIX, SNAPSHOTS_PREFIX = "autopar-", "autopar-snapshots-"


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
