"""A process of a launcher's sees when another one is stopped or gone, and isn't mistaken about one that has done its work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from lightning_autopar.strategies.processes.peer_watch import Standstill, Watch, _Process


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def peer() -> Iterator[_Process]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield _Process(rank=1, host="here", pid=process.pid, created=psutil.Process(process.pid).create_time())
        process.kill()


def _look_for(watch: Watch, clock: Clock, seconds: float) -> str | None:
    until = clock.now + seconds
    while clock.now < until:
        words = watch.look()
        if words is not None:
            return words
        clock.now += 1
    return None


def _signal(peer: _Process, number: int, status: str) -> None:
    os.kill(peer.pid, number)
    until = time.monotonic() + 30
    while psutil.Process(peer.pid).status() != status and time.monotonic() < until:
        time.sleep(0.001)


def test_a_stopped_peer(peer: _Process) -> None:
    clock, left = Clock(), set[int]()
    watch = Watch(processes=[peer], devices=("cuda:0", "cuda:1"), left=left.__contains__, clock=clock)
    assert _look_for(watch, clock, 3600) is None
    _signal(peer, signal.SIGSTOP, psutil.STATUS_STOPPED)
    assert _look_for(watch, clock, 25) is None
    clock.now += 3600  # this process itself was stopped
    assert _look_for(watch, clock, 2) is None
    words = f"rank 1 on cuda:1, process {peer.pid}, has been stopped by a signal (SIGSTOP) for 30 s"
    assert _look_for(watch, clock, 20) == words
    os.kill(peer.pid, signal.SIGCONT)


def test_a_peer_that_is_gone_unless_its_work_is_done(peer: _Process) -> None:
    clock, left = Clock(), {1}
    watch = Watch(processes=[peer], devices=("cuda:0", "cuda:1"), left=left.__contains__, clock=clock)
    _signal(peer, signal.SIGKILL, psutil.STATUS_ZOMBIE)
    assert _look_for(watch, clock, 3600) is None
    left.clear()
    assert _look_for(watch, clock, 60) == f"rank 1 on cuda:1, process {peer.pid}, has been gone for 20 s"


class Rank:
    """A process of a run as far as its standstill is concerned: where it is, and whether its GPU does what it is given."""

    def __init__(self, number: int, said: dict[int, str], clock: Clock) -> None:
        self.place, self.hangs, self.begun, self.done = "backward (step.py:7)", False, 3, 1
        self.clock = clock
        self.standstill = Standstill(
            rank=number,
            devices=("cuda:0", "cuda:1"),
            begun=lambda: self.begun,
            look_at=self._look_at,
            tell=lambda word: said.update({number: word}),
            told=lambda each: said.get(each, ""),
            clock=clock,
        )

    def _look_at(self) -> tuple[str, int]:
        self.done += not self.hangs
        return self.place, self.done


def _until_both_end(ranks: list[Rank], seconds: float) -> dict[int, tuple[float, str]]:
    """Look once a second; when each rank ends, and by which sentence."""
    found: dict[int, tuple[float, str]] = {}
    until = ranks[0].clock.now + seconds
    while ranks[0].clock.now < until:
        for number, rank in enumerate(ranks):
            words = rank.standstill.look()
            if words is not None:
                found.setdefault(number, (rank.clock.now, words))
        ranks[0].clock.now += 1
    return found


@pytest.fixture
def ranks() -> list[Rank]:
    clock, said = Clock(), dict[int, str]()
    return [Rank(number, said, clock) for number in (0, 1)]


def test_ranks_before_gpus_that_hang_all_end_within_a_minute_and_no_other_rank_does(ranks: list[Rank]) -> None:
    clock = ranks[0].clock
    assert _until_both_end(ranks, 3600) == {}, "at one place, such as backward, but their GPUs come along"
    ranks[0].hangs = True
    assert _until_both_end(ranks, 600) == {}, "rank 0 waits for rank 1, which validates"
    ranks[1].place, began = "wait (distributed_c10d.py:5), called by step (step.py:9)", clock.now
    found = _until_both_end(ranks, 60)
    assert found.keys() == {0, 1}
    for number, (at, words) in found.items():
        assert at - began < 60
        assert "GPUs don't do what they were given (rank 0 on cuda:0)" in words
        assert words.endswith(f"this rank waited in {ranks[number].place}")


def test_what_processes_were_stopped_for_isnt_held_against_their_gpus(ranks: list[Rank]) -> None:
    assert not _until_both_end(ranks, 10)
    for rank in ranks:
        rank.hangs = True
    assert not _until_both_end(ranks, 10)
    ranks[0].clock.now += 3600  # all of them: by Slurm, or by a container's pause; their GPUs have come along since, which nobody has seen
    assert not _until_both_end(ranks, 3)
    for rank in ranks:
        rank.hangs = False
    assert not _until_both_end(ranks, 600)


def test_where_a_batch_takes_long_a_gpu_is_waited_for_longer(ranks: list[Rank]) -> None:
    for seconds in (1, 20, 1):  # from batch to batch
        for rank in ranks:
            rank.begun += 1
        assert not _until_both_end(ranks, seconds)
    for rank in ranks:
        rank.hangs = True
    assert not _until_both_end(ranks, 195)
    assert _until_both_end(ranks, 30).keys() == {0, 1}


@pytest.mark.parametrize(("compiles", "seconds"), [("", 38), (", while code is compiled", 118)])
def test_in_the_first_batches_a_gpu_is_waited_for_longer_and_longest_while_a_rank_compiles(
    compiles: str, seconds: int, ranks: list[Rank]
) -> None:
    ranks[1].place += compiles
    for rank in ranks:
        rank.begun, rank.hangs = 2, True
    assert not _until_both_end(ranks, seconds)
    assert _until_both_end(ranks, 20).keys() == {0, 1}
