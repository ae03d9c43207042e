"""The ledger: never more promised than there is, whoever dies or stops when, and nobody's lease another's to touch."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.machine import machine
from lightning_autopar.sharing import ledger
from lightning_autopar.sharing.lease_files import LeaseFile, live_leases
from lightning_autopar.sharing.ledger import Ledger, Room, Shortage, ledger_folder
from tests.work import counted

HERE = Path(__file__).resolve().parent
RESULT = HERE.parents[1] / "benchmarks" / "results" / "ledger.json"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become three users")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A place that all users share, in memory where there is one."""
    home = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=home, prefix="autopar-ledger-test-") as name:
        Path(name).chmod(0o1777)
        yield Path(name)


@pytest.fixture
def book(folder: Path) -> Ledger:
    return Ledger(folder)


def look(**free: int) -> Callable[[], Room]:
    """Devices with so much free, as a driver tells."""
    return lambda: lambda leases: {device: size - sum(lease.pending_bytes(device) for lease in leases) for device, size in free.items()}


def claim(book: Ledger, size: int, *, free: int = 80, **options: Any) -> LeaseFile | Shortage:
    return book.claim({"gpu": size}, look(gpu=free), run="test", **options)


def held(book: Ledger, size: int, **options: Any) -> LeaseFile:
    found = claim(book, size, **options)
    assert isinstance(found, LeaseFile)
    return found


def arena(folder: Path, rounds: int, seed: int, *uids: int) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "arena.py"), str(folder), str(rounds), str(seed), *map(str, uids)]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def keep(name: str, found: dict[str, Any]) -> None:
    """Write down what `make chaos` measured, and what a claim takes alone and beside sixteen leases."""
    known = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.is_file() else {}
    taken = found.pop("seconds")
    figures = {**found, "median_claim_seconds_of_16_at_once": taken[len(taken) // 2]}
    known |= {**machine(), name: figures, "claim_seconds": {str(count): claim_seconds(count) for count in (0, 16)}}
    RESULT.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def claim_seconds(others: int) -> float:
    """Of the fastest claim beside so many leases."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        book = Ledger(Path(name))
        there = [held(book, 1) for _ in range(others)]
        taken = []
        for _ in range(200):
            began = time.perf_counter()
            found = held(book, 1)
            taken.append(time.perf_counter() - began)
            found.release()
        for each in there:
            each.release()
    return min(taken)


def child(body: Any) -> int:
    """A process that runs this and ends."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os._exit(0)
    return pid


@pytest.mark.timeout(900)
@pytest.mark.parametrize("uids", [(), pytest.param((2001, 2002, 2003), marks=needs_root)], ids=["one user", "three users"])
def test_never_more_than_there_is(folder: Path, uids: tuple[int, ...], request: pytest.FixtureRequest) -> None:
    nightly = request.config.getoption("--nightly-chaos", default=False)
    rounds = 1000 if nightly else 40
    found = arena(folder, rounds, 7, *uids)
    if nightly:
        keep(f"{len(uids) or 1} users", found)
    assert found["wrong"] == []
    assert found["left"] == []
    assert found["claims"] == 16 * rounds
    assert found["deaths"] > rounds
    assert found["grants"] > 2 * rounds


def test_a_claim_takes_a_few_calls(book: Ledger) -> None:
    held(book, 10).release()
    found, calls = counted(held, book, 10)
    found.release()
    assert calls < 400


def test_what_is_promised_counts_until_it_can_be_seen(book: Ledger) -> None:
    first = held(book, 50)
    short = claim(book, 40)
    assert isinstance(short, Shortage)
    assert (short.device, short.wanted_bytes, short.room_bytes) == ("gpu", 40, 30)
    assert [holder.run for holder in short.holders] == ["test"]
    first.show("gpu", 45)  # the driver shows it as used from now on
    (lease,) = book.leases()
    assert (lease.pending_bytes("gpu"), lease.uid, lease.pid) == (5, os.geteuid(), os.getpid())
    held(book, 30, free=35).release()
    assert isinstance(claim(book, 31, free=35), Shortage)
    first.release()
    first.release()
    held(book, 80).release()
    assert os.listdir(book.folder) == []


def test_all_devices_or_none(book: Ledger) -> None:
    free = {"a": 10, "b": 10}
    first = book.claim({"a": 5}, look(**free), run="first")
    assert isinstance(first, LeaseFile)
    assert isinstance(book.claim({"b": 5, "a": 6}, look(**free), run="second"), Shortage)
    third = book.claim({"b": 10}, look(**free), run="third")
    assert isinstance(third, LeaseFile), "nothing of the second is left"
    third.release()
    first.release()


def test_a_run_changes_what_it_has_without_letting_go(book: Ledger) -> None:
    first = held(book, 50)
    second = held(book, 70, instead_of=first)
    assert [lease.name for lease in book.leases()] == [second.name]
    assert isinstance(claim(book, 90, instead_of=second), Shortage)
    assert [lease.name for lease in book.leases()] == [second.name], "it keeps what it has"
    second.release()


def test_a_child_does_not_hold_its_parents_lease(book: Ledger) -> None:
    told, hold = os.pipe(), os.pipe()
    pids: list[int] = []

    def parent() -> None:
        held(book, 50)
        os.close(hold[1])
        grandchild = child(lambda: os.read(hold[0], 1))
        os.write(told[1], f"{grandchild}".encode())
        os.kill(os.getpid(), signal.SIGKILL)

    pids.append(child(parent))
    os.waitpid(pids[0], 0)
    grandchild = int(os.read(told[0], 100))
    os.kill(grandchild, 0)  # it lives
    assert book.leases() == []
    for end in (*told, *hold):
        os.close(end)


def test_a_process_that_is_stopped_holds_up_nobody_for_long(book: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "FRESH_SECONDS", 0.4)
    told, answer = os.pipe(), os.pipe()

    def stopped() -> None:
        def stop() -> Room:
            os.write(told[1], b"1")
            os.kill(os.getpid(), signal.SIGSTOP)
            return look(gpu=80)()

        once = iter([stop])
        found = book.claim({"gpu": 50}, lambda: next(once, look(gpu=80))(), run="stopped", within_seconds=0.2)
        os.write(answer[1], b"held" if isinstance(found, LeaseFile) else b"short")

    pid = child(stopped)
    os.read(told[0], 1)
    os.waitpid(pid, os.WUNTRACED)
    ours = held(book, 50, within_seconds=600.0)  # of which it takes a fraction
    os.kill(pid, signal.SIGCONT)
    assert os.read(answer[0], 10) == b"short", "what it saw before it was stopped counts no more"
    os.waitpid(pid, 0)
    ours.release()
    for end in (*told, *answer):
        os.close(end)


def test_what_is_no_lease_is_passed_over(book: Ledger, folder: Path) -> None:
    uid = os.geteuid()
    stamp = time.monotonic_ns()
    real = LeaseFile(folder, {"gpu": 10}, "real")
    real.grant()
    os.mkfifo(folder / f"autopar-lease-{uid}-{stamp}-aa")
    (folder / f"autopar-lease-{uid}-{stamp}-bb").symlink_to(folder / real.name)
    os.link(folder / real.name, folder / f"autopar-lease-{uid}-{stamp}-cc")
    locks = []
    for name, words in (("dd", b"garbage"), ("ee", b'{"bytes": {"gpu": -5}}\n1\n'), ("ff", b"x" * 100_000)):
        path = folder / f"autopar-lease-{uid}-{stamp}-{name}"
        path.write_bytes(words)
        locks.append(os.open(path, os.O_RDWR))
        fcntl.flock(locks[-1], fcntl.LOCK_EX)
    (folder / "autopar-lease-of-somebody").write_bytes(b"")
    found = list(live_leases(folder))
    assert [lease.run for lease in found] == [], "a file of two names may be anybody's"
    (folder / f"autopar-lease-{uid}-{stamp}-cc").unlink()
    assert [lease.run for lease in live_leases(folder)] == ["real"]
    for lock in locks:
        os.close(lock)
    real.withdraw()
    held(book, 80).release()


def test_a_dead_process_has_no_lease_whoever_holds_its_file(book: Ledger, folder: Path) -> None:
    watched = os.pipe()
    pid = os.fork()
    if pid == 0:
        held(book, 50)
        os.write(watched[1], b"1")
        signal.pause()
    os.read(watched[0], 1)
    (name,) = os.listdir(folder)
    lock = os.open(folder / name, os.O_RDONLY)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert book.leases() == []
    held(book, 80).release()
    for end in (lock, *watched):
        os.close(end)


def test_nothing_is_left_where_there_is_no_room(book: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        claim(book, 10)
    monkeypatch.undo()
    assert os.listdir(book.folder) == []
    assert len(os.listdir("/proc/self/fd")) == before
    held(book, 80).release()


def test_a_folder_in_which_others_could_interfere_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        Ledger(folder / "missing")
    folder.chmod(0o777)
    with pytest.raises(ValueError, match=r"sticky bit \(chmod \+t\)"):
        Ledger(folder)
    (folder / "file").touch()
    with pytest.raises(ValueError, match="is no folder"):
        Ledger(folder / "file")


@needs_root
def test_a_folder_of_another_user_is_refused(folder: Path) -> None:
    os.chown(folder, 2001, -1)
    with pytest.raises(ValueError, match="belongs to user 2001, who could remove others' leases"):
        Ledger(folder)


@needs_root
def test_nobody_can_take_block_or_fake_another_users_lease(book: Ledger, folder: Path) -> None:
    ours = held(book, 50)
    told = os.pipe()

    def other() -> None:
        os.setuid(2001)
        did = []
        for name, act in {
            "removed": lambda: os.unlink(folder / ours.name),
            "renamed": lambda: os.rename(folder / ours.name, folder / "x"),
            "changed": lambda: os.open(folder / ours.name, os.O_RDWR),
        }.items():
            try:
                act()
                did.append(name)
            except PermissionError:
                pass
        fake = folder / f"autopar-lease-0-{time.monotonic_ns()}-00"
        lock = os.open(fake, os.O_CREAT | os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX)
        words = (folder / ours.name).read_bytes()
        os.write(lock, words)
        leases = Ledger(folder).leases()
        did.append("saw" if [lease.uid for lease in leases] == [0] else f"saw {leases}")
        os.write(told[1], json.dumps(did).encode())
        os._exit(0)

    pid = child(other)
    os.waitpid(pid, 0)
    assert json.loads(os.read(told[0], 4096)) == ["saw"]
    assert [lease.name for lease in book.leases()] == [ours.name]
    ours.release()
    for end in told:
        os.close(end)


def test_where_the_leases_are(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("AUTOPAR_LEDGER", "off")
    assert ledger_folder() is None
    monkeypatch.setenv("AUTOPAR_LEDGER", str(folder))
    assert ledger_folder() == folder
    monkeypatch.delenv("AUTOPAR_LEDGER")
    assert ledger_folder() in (Path("/dev/shm"), Path(tempfile.gettempdir()))
