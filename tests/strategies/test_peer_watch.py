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

from lightning_autopar.strategies.peer_watch import Watch, _Process


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
    until = time.monotonic() + 5
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
