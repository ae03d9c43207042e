"""Places in the queue: whole whenever they are read, alive while their process is, and no older than it."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from lightning_autopar.sharing import queue as queue_files
from lightning_autopar.sharing.queue import PlaceFile, live_places

HERE = os.getpid()


def test_what_is_told_is_read(tmp_path: Path) -> None:
    before_ns = time.monotonic_ns()
    file = PlaceFile(tmp_path, run="train", priority=-3)
    (place,) = live_places(tmp_path)
    assert (place.run, place.pid, place.uid, place.here, place.priority) == ("train", HERE, os.geteuid(), True, -3)
    assert (dict(place.wants), place.start_ns, place.seconds, place.asks) == ({}, None, None, ())
    assert before_ns <= place.seen_ns <= place.since_ns == place.made_ns <= time.monotonic_ns()
    file.tell(wants={"a": 5, "b": 7}, start_ns=99, seconds=2.5, asks=["x"], at_ns=before_ns)
    (place,) = live_places(tmp_path)
    assert (dict(place.wants), place.start_ns, place.seconds, place.asks) == ({"a": 5, "b": 7}, 99, 2.5, ("x",))
    assert (place.name, place.passed_ns) == (file.name, before_ns)
    assert place.seen_ns > before_ns
    file.stay()
    (again,) = live_places(tmp_path)
    assert again.seen_ns > place.seen_ns
    assert again.passed_ns == before_ns
    file.look()
    assert live_places(tmp_path)[0].passed_ns > again.seen_ns
    assert dict(again.wants) == {"a": 5, "b": 7}
    file.withdraw()
    file.withdraw()
    file.stay()
    assert os.listdir(tmp_path) == []


def test_they_are_in_order(tmp_path: Path) -> None:
    files = [PlaceFile(tmp_path, run=run, priority=priority) for run, priority in (("c", 0), ("d", 0), ("b", 1), ("e", -1), ("a", 100))]
    assert [place.run for place in live_places(tmp_path)] == ["a", "b", "c", "d", "e"]
    for file in files:
        file.withdraw()


def test_no_run_is_older_than_its_process_nor_from_the_future(tmp_path: Path) -> None:
    now_ns = time.monotonic_ns()
    with open("/proc/self/stat", encoding="ascii") as stat:
        ticks = int(stat.read().rpartition(")")[2].split()[19])
    slept = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    files = [
        PlaceFile(tmp_path, run=run, since_ns=since_ns) for run, since_ns in (("old", 1), ("late", now_ns + 10**15), ("parked", now_ns))
    ]
    found = {place.run: place.since_ns for place in live_places(tmp_path)}
    assert found["old"] / 1e9 == pytest.approx(ticks / os.sysconf("SC_CLK_TCK") - slept, abs=1.0)
    assert now_ns < found["late"] <= time.monotonic_ns()
    assert found["parked"] == now_ns, "a run that is parked keeps its age"
    for file in files:
        file.withdraw()


def test_a_half_written_slot_leaves_what_was_there_before(tmp_path: Path) -> None:
    file = PlaceFile(tmp_path, run="train")
    file.tell(wants={"a": 1}, start_ns=None, seconds=None)
    path = tmp_path / file.name
    words = path.read_bytes()
    file.tell(wants={"a": 2}, start_ns=None, seconds=None)
    newer = path.read_bytes()
    changed = [index for index in range(len(words)) if words[index] != newer[index]]
    for upto in range(changed[0] + 1, changed[-1], 7):
        path.write_bytes(newer[:upto] + words[upto:])
        (place,) = live_places(tmp_path)
        assert dict(place.wants) == {"a": 1}
    path.write_bytes(newer)
    assert dict(live_places(tmp_path)[0].wants) == {"a": 2}
    file.withdraw()


def test_readers_never_see_a_mixture(tmp_path: Path) -> None:
    file = PlaceFile(tmp_path, run="train")
    over = threading.Event()

    def tell() -> None:
        size = 0
        while not over.is_set():
            size += 1
            file.tell(wants={"a": size, "b": size}, start_ns=size, seconds=float(size))

    teller = threading.Thread(target=tell)
    teller.start()
    try:
        seen = set()
        for _ in range(300):
            (place,) = live_places(tmp_path)
            if place.wants:
                seen.add(place.wants["a"])
                assert place.wants["a"] == place.wants["b"] == place.start_ns == place.seconds
    finally:
        over.set()
        teller.join()
    assert len(seen) > 1
    file.withdraw()


def test_a_process_that_is_killed_has_no_place(tmp_path: Path) -> None:
    told = os.pipe()
    pid = os.fork()
    if pid == 0:
        PlaceFile(tmp_path, run="killed")
        os.write(told[1], b"1")
        signal.pause()
    os.read(told[0], 1)
    assert [place.pid for place in live_places(tmp_path)] == [pid]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert live_places(tmp_path) == []
    assert os.listdir(tmp_path) == []
    for end in told:
        os.close(end)


def test_what_is_no_place_is_passed_over(tmp_path: Path) -> None:
    real = PlaceFile(tmp_path, run="real")
    head, _, body = (tmp_path / real.name).read_bytes().partition(b"\n")
    said = json.loads(head)
    locks = []
    wrong = [
        json.dumps({**said, "priority": 101}).encode() + b"\n" + body,
        json.dumps({**said, "since": "yesterday"}).encode() + b"\n" + body,
        head + b"\n",
        head + b"\n" + b"x" * len(body),
        b"[]\n" + body,
        head + b"\n" + _slot(seconds=float("nan")),
        head + b"\n" + _slot(wants={"a": -1}),
        head + b"\n" + _slot(wants=[]),
    ]
    for number, words in enumerate(wrong):
        path = tmp_path / f"autopar-place-{os.geteuid()}-{time.monotonic_ns()}-{number:02}"
        path.write_bytes(words)
        locks.append(os.open(path, os.O_RDWR))
        fcntl.flock(locks[-1], fcntl.LOCK_EX)
    assert [place.run for place in live_places(tmp_path)] == ["real"]
    for lock in locks:
        os.close(lock)
    assert [place.run for place in live_places(tmp_path)] == ["real"]
    assert os.listdir(tmp_path) == [real.name], "what nobody holds is dead"
    real.withdraw()


def _slot(**changes: object) -> bytes:
    """What a place would tell, with a checksum that is right."""
    words = json.dumps({"wants": {}, "start": None, "seconds": None, "asks": [], "count": 1, "seen": 1, "passed": 1, **changes}).encode()
    return b"%08x %d " % (queue_files.zlib.crc32(words), len(words)) + words
