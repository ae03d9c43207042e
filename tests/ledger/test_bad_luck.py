"""Bad luck under the ledger and the queue: disks, descriptors and folders that give out, clocks that jump, garbage, processes that stop.

What can't be written or read is said, and nothing is granted by it; nobody waits for a process that does nothing; no run is lost.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest

from lightning_autopar import AutoParallelStrategy
from lightning_autopar.sharing.lease_files import LeaseFile, live_leases
from lightning_autopar.sharing.ledger import Ledger, Room, Shortage
from lightning_autopar.sharing.queue import Place, PlaceFile, live_places
from lightning_autopar.sharing.queue_order import SILENT_SECONDS, ahead
from tests.ledger.test_ledger import child
from tests.strategies.modules import QUIET, Regression, loader


def look(free: int = 80) -> Room:
    return lambda leases: {"gpu": free - sum(lease.pending_bytes("gpu") for lease in leases)}


def claim(folder: Path, size: int, **options: Any) -> LeaseFile | Shortage:
    return Ledger(folder).claim({"gpu": size}, look, run="test", **options)


def held(folder: Path, size: int) -> LeaseFile:
    found = claim(folder, size)
    assert isinstance(found, LeaseFile)
    return found


@pytest.fixture
def folder() -> Iterator[Path]:
    home = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=home, prefix="autopar-luck-test-", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o1777)
        yield Path(name)


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    """A file system of its own there; skipped where nobody may mount one."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("only root can mount a small disk, and not in every container")
    try:
        folder.chmod(0o1777)
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def process(body: Callable[[], None]) -> Iterator[int]:
    """A forked process; killed at the end, whatever it does."""
    pid = child(body)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def stopped(pid: int) -> None:
    """Stop a process, and return once it does nothing."""
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)


# -- disks, descriptors, folders ------------------------------------------------------------------------------------------------------


def test_on_a_full_disk_nothing_is_claimed_and_what_is_held_lasts(folder: Path) -> None:
    with small_disk(folder, "size=128k"):
        first, place = held(folder, 50), PlaceFile(folder, run="waits")
        with open(folder / "full", "wb") as full:
            full.write(b"x" * (psutil.disk_usage(str(folder)).free))
        with pytest.raises(OSError, match="No space left"):
            claim(folder, 10)
        with pytest.raises(OSError, match="No space left"):
            PlaceFile(folder, run="another")
        first.expect(time.monotonic_ns())
        first.show("gpu", 20)
        place.tell(wants={"gpu": 70}, start_ns=1, seconds=2.0)
        (lease,), (there,) = Ledger(folder).leases(), live_places(folder)
        assert (lease.visible_bytes, lease.ends_ns is None) == ({"gpu": 20}, False)
        assert there.wants == {"gpu": 70}
        assert len(os.listdir(folder)) == 3, "nothing half written is left"
        first.release()
        place.withdraw()
        (folder / "full").unlink()
        held(folder, 80).release()


def test_without_inodes_nothing_is_claimed(folder: Path) -> None:
    with small_disk(folder, "nr_inodes=4"):
        left = os.statvfs(folder).f_ffree
        there = [held(folder, 1) for _ in range(left)]
        with pytest.raises(OSError, match="No space left"):
            held(folder, 1)
        assert len(Ledger(folder).leases()) == len(there) > 1
        while there:
            there.pop().release()
        held(folder, 10).release()


def test_a_folder_that_can_only_be_read_is_refused_and_one_that_becomes_so_loses_nothing(folder: Path) -> None:
    seen = folder / "seen"
    seen.mkdir()
    with small_disk(folder, "size=1m"):
        seen.mkdir()
        subprocess.run(["mount", "--bind", folder, seen], check=True)
        try:
            first, book = held(folder, 50), Ledger(seen)
            subprocess.run(["mount", "-o", "remount,bind,ro", seen], check=True)
            with pytest.raises(ValueError, match=r"is no folder that this user can read and write; name another, or 'off'"):
                Ledger(seen)
            with pytest.raises(OSError, match="Read-only"):
                book.claim({"gpu": 10}, look, run="test")
            dead = folder / f"autopar-lease-{os.geteuid()}-1-aa"
            dead.touch()
            assert [lease.name for lease in book.leases()] == [first.name], "what can't be removed is passed over"
            first.release()
        finally:
            subprocess.run(["umount", "--lazy", seen], check=True)


def test_where_no_file_may_grow_nothing_is_claimed(folder: Path) -> None:
    def body() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        for make in (lambda: held(folder, 10), lambda: PlaceFile(folder, run="waits")):
            try:
                make()
            except OSError as error:
                os.write(told[1], f"{errno.errorcode[error.errno or 0]} ".encode())

    told = os.pipe()
    with process(body) as pid:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    words = os.read(told[0], 100).decode().split()
    assert len(words) == 2
    assert set(words) <= {"EFBIG", "ENOSPC"}
    assert os.listdir(folder) == []
    for end in told:
        os.close(end)


def test_without_descriptors_others_leases_are_not_overlooked(folder: Path) -> None:
    def body() -> None:
        most = max(int(name) for name in os.listdir("/proc/self/fd")) + 20
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        taken: list[int] = []
        with suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(8):  # with ever one more that is left
            try:
                word = type(book.claim({"gpu": 50}, look, run="short")).__name__
            except OSError as error:
                word = errno.errorcode[error.errno or 0]
            os.write(told[1], f"{word} ".encode())
            os.close(taken.pop())

    told, book = os.pipe(), Ledger(folder)
    with held(folder, 50) as ours, process(body) as pid:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        words = os.read(told[0], 1000).decode().split()
        assert set(words) == {"EMFILE", "Shortage"}, "never granted, whichever of its files can't be opened"
        assert [lease.name for lease in book.leases()] == [ours.name]
    for end in told:
        os.close(end)


def test_a_folder_that_is_removed_takes_no_run_with_it(folder: Path) -> None:
    book, first, place = Ledger(folder), held(folder, 50), PlaceFile(folder, run="waits")
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError):
        book.claim({"gpu": 10}, look, run="test")
    with pytest.raises(FileNotFoundError):
        book.leases()
    with pytest.raises(FileNotFoundError):
        live_places(folder)
    first.expect(None)
    place.look()
    first.release()
    place.withdraw()
    folder.mkdir()
    held(folder, 80).release()


def test_a_run_whose_ledger_is_removed_ends_as_it_would(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_LEDGER", str(folder))
    there: list[int] = []

    class Remove(pl.Callback):
        def on_train_start(self, *_: Any) -> None:
            there.append(len(os.listdir(folder)))
            shutil.rmtree(folder)

    strategy = AutoParallelStrategy(devices="2xcpu:1GiB", calibrate="off", allow=["single"])
    options: dict[str, Any] = {"max_epochs": 1, "default_root_dir": tmp_path, "enable_checkpointing": False, **QUIET}
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", callbacks=[Remove()], **options)
    trainer.fit(Regression(), loader(), loader())
    assert trainer.global_step > 0
    assert there == [1], "its lease"


# -- clocks ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [-1e9, 1e9])
def test_a_date_that_jumps_changes_nothing(folder: Path, jump: float, monkeypatch: pytest.MonkeyPatch) -> None:
    first, place = held(folder, 50), PlaceFile(folder, run="waits")
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + jump)
    monkeypatch.setattr(time, "time_ns", lambda: int((now() + jump) * 1e9))
    os.utime(folder / first.name, (now() + jump, now() + jump))
    later = PlaceFile(folder, run="later")
    assert [lease.name for lease in Ledger(folder).leases()] == [first.name]
    assert isinstance(claim(folder, 50), Shortage)
    assert [found.name for found in live_places(folder)] == [place.name, later.name]
    assert [found.name for found in ahead(live_places(folder), by_name(folder, later).order, time.monotonic_ns())] == [place.name]
    first.release()
    for each in (place, later):
        each.withdraw()


def by_name(folder: Path, place: PlaceFile) -> Place:
    return next(found for found in live_places(folder) if found.name == place.name)


def test_what_an_earlier_boot_left_is_removed(folder: Path) -> None:
    """On a disk, where files outlive the machine: their numbers are of another clock, and their processes of another life."""
    uid = os.geteuid()
    for prefix in ("lease", "place"):
        path = folder / f"autopar-{prefix}-{uid}-{time.monotonic_ns() + 10**15}-aa"
        path.write_bytes(b'{"pid": 1, "started": 5, "namespace": "x", "run": "old", "bytes": {"gpu": 80}}\n1\n')
    assert list(live_leases(folder)) == []
    assert live_places(folder) == []
    assert os.listdir(folder) == []


def test_who_asks_in_the_future_blocks_nobody_for_ever(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        now = time.monotonic_ns
        patched.setattr(time, "monotonic_ns", lambda: now() + 10**15)
        undecided, early = LeaseFile(folder, {"gpu": 50}, "of the future"), PlaceFile(folder, run="of the future", since_ns=now() + 10**15)
    monkeypatch.setattr("lightning_autopar.sharing.ledger.FRESH_SECONDS", 0.2)
    found = claim(folder, 50, within_seconds=0.5)
    assert isinstance(found, Shortage)
    assert [holder.run for holder in found.holders] == ["of the future"], "it is said who"
    (place,) = live_places(folder)
    assert place.since_ns <= time.monotonic_ns(), "nor is its place one of later"
    undecided.withdraw()
    early.withdraw()
    held(folder, 50).release()


# -- processes that stop --------------------------------------------------------------------------------------------------------------


def test_a_process_that_is_stopped_keeps_what_it_has_and_others_are_told_at_once(folder: Path) -> None:
    told, go = os.pipe(), os.pipe()

    def body() -> None:
        found = held(folder, 50)
        os.write(told[1], b"1")
        os.read(go[0], 1)
        os.write(told[1], b"1" if [lease.name for lease in Ledger(folder).leases()] == [found.name] else b"0")
        found.release()
        os.write(told[1], b"1")

    with process(body) as pid:
        os.read(told[0], 1)
        stopped(pid)
        found = claim(folder, 50, within_seconds=600.0)  # of which it takes nothing
        assert isinstance(found, Shortage)
        assert [holder.pid for holder in found.holders] == [pid]
        held(folder, 30).release()
        os.kill(pid, signal.SIGCONT)
        os.write(go[1], b"1")
        assert os.read(told[0], 1) == b"1", "it has it still"
        os.read(told[0], 1)
        held(folder, 80).release()
    for end in (*told, *go):
        os.close(end)


def test_a_stopped_one_in_the_queue_is_passed_over_and_has_its_turn_again(folder: Path) -> None:
    told, go = os.pipe(), os.pipe()

    def body() -> None:
        place = PlaceFile(folder, run="first")
        place.tell(wants={"gpu": 50}, start_ns=None, seconds=None)
        os.write(told[1], b"1")
        os.read(go[0], 1)
        place.look()
        os.write(told[1], b"1")
        os.read(go[0], 1)

    def before() -> list[str]:
        return [place.run for place in ahead(live_places(folder), by_name(folder, ours).order, time.monotonic_ns() + later_ns)]

    later_ns = 0
    with process(body) as pid:
        os.read(told[0], 1)
        ours = PlaceFile(folder, run="ours")
        assert before() == ["first"]
        stopped(pid)
        assert before() == ["first"], "for some seconds anybody may be slow"
        later_ns = int((SILENT_SECONDS + 1) * 1e9)
        assert before() == []
        later_ns = 0
        os.kill(pid, signal.SIGCONT)
        os.write(go[1], b"1")
        os.read(told[0], 1)
        assert before() == ["first"], "its age is what it was"
    assert before() == []
    assert [place.run for place in live_places(folder)] == ["ours"], "what was killed waits no more"
    ours.withdraw()
    for end in (*told, *go):
        os.close(end)


# -- garbage --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lease", "place"])
def test_whatever_is_in_a_file_reading_goes_on(folder: Path, kind: str) -> None:
    draw = random.Random(3)
    real = LeaseFile(folder, {"gpu": 10}, "real") if kind == "lease" else PlaceFile(folder, run="real")
    words = (folder / real.name).read_bytes()
    head, _, body = words.partition(b"\n")
    deep = b'{"a": ' * 5000 + b"1" + b"}" * 5000
    huge = head.replace(b'"real"', b'"real", "priority": 1e999, "since": -1e999')
    bad = [b"", b"\n", b"null\n1\n", b"[]\n1\n", deep + b"\n1\n", huge + b"\n" + body, head, b"\xff" * 200, head + b"\n" + b"9" * 5000]
    for _ in range(150):
        broken = bytearray(words)
        for _ in range(draw.randrange(1, 6)):
            broken[draw.randrange(min(len(broken), 600))] = draw.randrange(256)
        bad.append(bytes(broken[: draw.randrange(len(broken))]) if draw.random() < 0.3 else bytes(broken))
    path = folder / f"autopar-{kind}-{os.geteuid()}-{time.monotonic_ns()}-aa"
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    read: Callable[[], list[Any]] = (lambda: list(live_leases(folder))) if kind == "lease" else (lambda: live_places(folder))
    for data in bad:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, data, 0)
        found = read()
        assert real.name in [each.name for each in found]
        for each in found:
            sizes = each.bytes if kind == "lease" else each.wants
            assert min(sizes.values(), default=0) >= 0
            assert each.order is not None
    os.close(descriptor)
    real.withdraw()
