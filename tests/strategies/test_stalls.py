"""Processes that don't come along are found, and those that only take long aren't taken for such."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from lightning_autopar.strategies import whereabouts
from lightning_autopar.strategies.stalls import STOPPED_SECONDS, Stalls


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def pid() -> Iterator[int]:
    """Of a process that sleeps in one that it has started."""
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        while not psutil.Process(process.pid).children():
            time.sleep(0.01)
        family = psutil.Process(process.pid).children()
        try:
            yield process.pid
        finally:
            process.kill()
            for each in family:
                each.kill()


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.001)


def _look_for(stalls: Stalls, clock: Clock, pid: int, seconds: float) -> str | None:
    """Look once a second; what is found."""
    until = clock.now + seconds
    while clock.now < until:
        stall = stalls.look({0: pid}, [7])
        if stall is not None:
            return stall.sentence
        clock.now += 1
    return None


def test_a_stopped_process_is_found_after_a_while(pid: int, tmp_path: Path) -> None:
    clock = Clock()
    stalls = Stalls(folder=tmp_path, devices=("cuda:3",), clock=clock)
    assert _look_for(stalls, clock, pid, 3600) is None
    _stop(pid)
    assert _look_for(stalls, clock, pid, STOPPED_SECONDS - 5) is None
    os.kill(pid, signal.SIGCONT)
    while psutil.Process(pid).status() == psutil.STATUS_STOPPED:
        time.sleep(0.001)
    assert _look_for(stalls, clock, pid, 10) is None
    _stop(pid)
    assert _look_for(stalls, clock, pid, STOPPED_SECONDS + 5) == (
        f"the worker of rank 0 on cuda:3, process {pid}, has been stopped by a signal (SIGSTOP) for 30 s, after 7 batches had begun there, "
        "and the others can't go on without it"
    )


def test_a_stopped_process_of_a_workers_is_found_too(pid: int, tmp_path: Path) -> None:
    clock = Clock()
    stalls = Stalls(folder=tmp_path, devices=("cuda:3",), clock=clock)
    child = psutil.Process(pid).children()[0].pid
    _stop(child)
    found = _look_for(stalls, clock, pid, 58)
    assert found is not None
    assert f"what was started by the worker of rank 0 on cuda:3, process {child}, has been stopped" in found


def test_the_time_for_which_the_looking_process_was_stopped_itself_doesnt_count(pid: int, tmp_path: Path) -> None:
    clock = Clock()
    stalls = Stalls(folder=tmp_path, devices=("cuda:3",), clock=clock)
    _stop(pid)
    assert _look_for(stalls, clock, pid, 5) is None
    clock.now += 3600
    assert _look_for(stalls, clock, pid, 5) is None


def test_a_traceback_says_where_in_words() -> None:
    try:
        [int(word) for word in ("1", "x")]
    except ValueError:
        words = whereabouts.raised_at(traceback.format_exc())
    assert words is not None
    assert "test_stalls.py:" in words
    assert whereabouts.raised_at("") is None


def test_who_hasnt_said_where_it_is_isnt_asked(pid: int, tmp_path: Path) -> None:
    whereabouts.ask(tmp_path, {0: pid})  # the signal would end it
    time.sleep(0.05)
    assert psutil.Process(pid).is_running()
    assert whereabouts.place(tmp_path, 0) is None


def _return_from_many_calls(deep: int) -> None:
    if deep:
        _return_from_many_calls(deep - 1)


def _be_asked(folder: Path, seconds: float) -> None:
    """A worker whose thread calls and returns all the time, which is when its stack mustn't be read from outside."""

    def body() -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            _return_from_many_calls(200)

    thread = threading.Thread(target=body)
    thread.start()
    whereabouts.tell_when_asked(folder, 0, thread.ident or 0, torch.device("cpu"))
    thread.join()


def test_to_ask_a_thread_in_the_midst_of_its_work_where_it_is_never_crashes_it(tmp_path: Path) -> None:
    worker = multiprocessing.get_context("fork").Process(target=_be_asked, args=(tmp_path, 4))
    worker.start()
    places = []
    while worker.is_alive():
        whereabouts.ask(tmp_path, {0: worker.pid or 0})
        time.sleep(0.003)
        places.append(whereabouts.place(tmp_path, 0))
    worker.join()
    assert worker.exitcode == 0
    told = [place for place in places if place is not None]
    assert len(told) > 50
    assert all(place.split(" ")[0] in ("_return_from_many_calls", "body") for place in told), set(told)
