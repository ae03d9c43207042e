"""Keeps an elastic run's latest snapshots: in memory where they fit, else on disk. A later start of the run finds them after its death.

A snapshot counts once it is complete, which its manifest says. One that doesn't match its manifest is left out with a warning. Knows files
and sizes; no trainer, no process but this one.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from lightning_autopar.devices.host import host_memory
from lightning_autopar.sharing.runs.folders import LOCKS, SNAPSHOTS_PREFIX
from lightning_autopar.state.snapshot_folder import SPARE, provide, set_aside, spare_bytes

log = logging.getLogger(__name__)

#: Not the name of a run's folder (``worker_supervisor.run_folder``), which the next run removes if its run is dead.
_LOCK, _MANIFEST = LOCKS["snapshots"], "manifest.json"
#: How many complete snapshots are kept: if one is damaged, another is left.
_KEPT = 2
#: The share of a home's free space that snapshots may take: other users' files must fit as well.
_SHARE = 0.8
#: How long snapshots of a killed run wait for the run's next start.
_DEAD_SECONDS = 24 * 3600.0
_BLOCK_BYTES = 8 * 1024**2
#: How long after a snapshot its checksums are computed, and at which niceness.
_SUM_AFTER_SECONDS, _LEAST_PRIORITY = 20.0, 19


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A complete snapshot.

    Args:
        step: the trainer's global step in it.
        on_disk: whether it survives the machine's restart.
    """

    path: Path
    step: int
    on_disk: bool


class SnapshotStore:
    """The snapshots of one run. If the process dies, the run's next start finds them; :meth:`close` removes them.

    Args:
        key: the key by which the run's next start finds them; see :func:`run_key`.
        disk: a folder on disk for snapshots that don't fit into memory; made if need be.
        needed_bytes: about what a snapshot takes.
        shared: whether processes of other machines write and read them: then all go to the disk, which every machine must see. One process
            of the run has the snapshot store.
        job: for a shared store, the name that successive starts of one job have in common.
    """

    def __init__(self, key: str, disk: Path, needed_bytes: int, *, shared: bool = False, job: str | None = None) -> None:
        self._needed_bytes, self._shared = needed_bytes, shared
        memory = Path("/dev/shm")
        self._memory_home = memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
        _remove_old(self._memory_home)
        for number in range(1000):
            name = f"{SNAPSHOTS_PREFIX}{os.getuid()}-{key}-{number}"
            self._homes = (self._memory_home / name, disk / name)
            if (locks := self._lock(job)) is not None:
                break
        else:
            raise RuntimeError(f"1000 runs have snapshots under the key {key}, or this process can't write to {disk}; check that it can")
        self._locks = locks
        if shared:
            self._move_to_disk()
        self._number = max((_number(path) for path in self._all()), default=0)
        self._threads: list[threading.Thread] = []
        self._wake = threading.Event()

    def __enter__(self) -> SnapshotStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.close()

    def _lock(self, job: str | None) -> list[int] | None:
        """Lock both homes for this run; None where another live run has one of them."""
        memory, disk = self._homes
        first = _locked(memory)
        if first is None or not (self._shared or disk.is_dir()):
            return None if first is None else [first]
        second = _locked(disk, job)
        if second is None:
            os.close(first)
            return None
        return [first, second]

    def _move_to_disk(self) -> None:
        """Move to the disk what an earlier start, as a single process, left in this machine's memory, which other machines can't read."""
        memory, disk = self._homes
        for path in memory.glob("s*"):
            with suppress(OSError):  # the disk is full: an older snapshot may be there
                if path.is_file():  # the files that belong to a snapshot
                    shutil.copy(path, disk)
                elif (path / _MANIFEST).is_file():
                    partial = disk / f"{path.name}.part"
                    shutil.copytree(path, partial)
                    partial.replace(disk / path.name)
        for path in memory.glob("s*"):
            path.unlink() if path.is_file() else shutil.rmtree(path, ignore_errors=True)

    @property
    def home(self) -> Path:
        """The folder of the snapshots on disk."""
        return self._homes[1]

    def target(self, *, on_disk: bool = False) -> Path:
        """The folder for the next snapshot, which doesn't exist yet.

        Args:
            on_disk: whether it must survive this machine's restart, or didn't fit into memory.
        """
        self._number += 1
        home = self._homes[1] if on_disk or self._shared or not self._fits() else self._homes[0]
        return home / f"s{self._number:06d}"

    def _fits(self) -> bool:
        """Whether memory has room, by the file system's limit and by the machine's."""
        room_bytes = min(psutil.disk_usage(str(self._memory_home)).free, host_memory()[1]) + spare_bytes(self._spare)
        return self._needed_bytes <= _SHARE * room_bytes

    @property
    def _spare(self) -> Path:
        return self._homes[0] / SPARE

    def provide(self, ranks: int) -> None:
        """Reserve room in memory for the next snapshot, in the background, so that its writers needn't wait.

        Args:
            ranks: how many will write it, in about equal parts.
        """
        if self._shared or spare_bytes(self._spare) >= self._needed_bytes or not self._fits():
            return
        sizes_bytes = [self._needed_bytes // ranks] * ranks

        def find() -> None:
            with suppress(OSError):  # somebody else took the room; then the snapshot may go to the disk
                provide(self._spare, sizes_bytes)

        self._start(find)

    def keep(self, path: Path, step: int) -> Snapshot:
        """A snapshot is complete: write its manifest, and remove snapshots that are no longer needed."""
        files = {str(each.relative_to(path)): each.stat().st_size for each in sorted(path.rglob("*")) if each.is_file()}
        snapshot = Snapshot(path=path, step=step, on_disk=self._homes[1] in path.parents)
        if snapshot.on_disk:
            for name in files:
                _flush(path / name)
        self._write(path, {"step": step, "bytes": files, "sums": {}})
        complete = [each for each in self._all() if (each / _MANIFEST).is_file()]
        old = [each for each in self._all() if each not in complete[:_KEPT] and each != path]
        self._wake.set()  # the checksums of the one before are no longer needed
        self._wake = threading.Event()
        # Nobody waits for room and checksums, and a run that moves needs the cores now.
        wake = self._wake
        self._start(lambda: self._tidy(path, step, files, old, wake))
        return snapshot

    def _start(self, work: Callable[[], None]) -> None:
        """Run something in a background thread, for which nobody waits."""
        thread = threading.Thread(target=work, name="autopar-snapshots", daemon=True)
        thread.start()
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]

    @staticmethod
    def _write(path: Path, manifest: dict[str, object]) -> None:
        partial = path / f"{_MANIFEST}.part"
        partial.write_text(json.dumps(manifest), encoding="utf-8")
        _flush(partial)
        partial.replace(path / _MANIFEST)

    def _tidy(self, path: Path, step: int, files: dict[str, int], old: list[Path], wake: threading.Event) -> None:
        """Remove older snapshots; some time later, unless there is a newer one, compute the checksums of this one's files."""
        with suppress(OSError):  # not Linux: the thread isn't a process there
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_PRIORITY)
        for each in old:
            # In memory, where finding room takes longest, its room is kept for the next one
            if each.parent == self._homes[0]:
                with suppress(OSError):
                    (each / _MANIFEST).unlink(missing_ok=True)  # from here on it isn't complete
                    set_aside(each, self._spare)
            shutil.rmtree(each, ignore_errors=True)
        if wake.wait(_SUM_AFTER_SECONDS) and self._wake is not wake:
            return
        with suppress(OSError):  # removed, as there is a newer one
            self._write(path, {"step": step, "bytes": files, "sums": {name: _checksum(path / name) for name in files}})

    def discard(self, path: Path) -> None:
        """Remove a snapshot that isn't complete."""
        shutil.rmtree(path, ignore_errors=True)

    def latest(self) -> Snapshot | None:
        """The latest complete and undamaged snapshot; others on the way are logged and removed."""
        for path in self._all():
            damage = _damage(path)
            if damage is None:
                manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
                return Snapshot(path=path, step=int(manifest["step"]), on_disk=self._homes[1] in path.parents)
            if damage:
                log.warning("autopar: a snapshot can't be used, so the one before it is: %s", damage)
            shutil.rmtree(path, ignore_errors=True)
        return None

    def close(self, *, keep: bool = False, within_seconds: float | None = None) -> None:
        """The run is over: remove its snapshots, unless its next start shall go on from them.

        Args:
            within_seconds: how long to wait for checksums, without which only the files' sizes are checked; None: until they are computed.
        """
        if keep:
            self.settle(within_seconds)
            shutil.rmtree(self._spare, ignore_errors=True)
        else:
            self._wake.set()
            self._wake = threading.Event()
            for thread in self._threads:
                thread.join()
            for home in self._homes:
                shutil.rmtree(home, ignore_errors=True)
        for lock in self._locks:
            os.close(lock)

    def settle(self, within_seconds: float | None = None) -> None:
        """Finish the work in the background now."""
        until = float("inf") if within_seconds is None else time.monotonic() + within_seconds
        self._wake.set()
        for thread in self._threads:
            thread.join(None if within_seconds is None else max(0.0, until - time.monotonic()))

    def _all(self) -> list[Path]:
        """All snapshots, complete or not, the latest first."""
        found = [path for home in self._homes if home.is_dir() for path in home.iterdir() if _number(path)]
        return sorted(found, key=_number, reverse=True)


def run_key(*parts: object) -> str:
    """A run's key: the next start with the same parts has the same key."""
    return hashlib.sha256("\0".join(map(repr, parts)).encode()).hexdigest()[:16]


def _number(path: Path) -> int:
    """A snapshot's number; 0 for anything else."""
    digits = path.name[1:]
    return int(digits) if path.name.startswith("s") and digits.isdecimal() else 0


def _locked(folder: Path, job: str | None = None) -> int | None:
    """Lock a folder for this run; None where a live run has it, or it belongs to another user. An earlier start of the same job is over: if
    its lock is left, it is a dead node's, which an NFS server keeps until its lease ends.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid() or folder.is_symlink():
            return None
        lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        without = error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # some shared file systems have no locks
        if not without and (job is None or os.pread(lock, 4096, 0).decode() != job):
            os.close(lock)
            return None
    os.ftruncate(lock, 0)
    os.pwrite(lock, (job or "").encode(), 0)
    return lock


def _flush(path: Path) -> None:
    """Flush a file to the disk, before anything says that it exists."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _remove_old(home: Path) -> None:
    """Remove what dead runs left long ago and no run has resumed: in memory it would stay until the machine restarts."""
    for folder in home.glob(f"{SNAPSHOTS_PREFIX}{os.getuid()}-*"):
        with suppress(OSError):
            old = time.time() - folder.stat().st_mtime > _DEAD_SECONDS
            if old and (lock := _locked(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _damage(path: Path) -> str | None:
    """What is wrong with a snapshot: None if nothing, "" if it was never complete."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        sizes, sums = manifest["bytes"], manifest["sums"]
        for name, size_bytes in sizes.items():
            found_bytes = (path / name).stat().st_size
            if found_bytes != size_bytes:
                return f"{path / name} has {found_bytes} bytes, and had {size_bytes} when it was written"
        for name, total in sums.items():
            if _checksum(path / name) != total:
                return f"{path / name} isn't what was written"
    except FileNotFoundError as error:
        return "" if error.filename == str(path / _MANIFEST) else f"{error.filename} is missing"
    except (OSError, ValueError, KeyError) as error:
        return f"{path}: {error}"
    return None


def _checksum(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            total = zlib.crc32(block, total)
    return total
