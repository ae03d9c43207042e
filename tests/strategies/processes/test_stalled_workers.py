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
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import lightning_autopar
from lightning_autopar.strategies.processes import stack_dumps
from lightning_autopar.strategies.processes.stalled_workers import STOPPED_SECONDS, Stalls
from tests.fresh import fresh

TORCH, OURS = (str(Path(str(package.__file__)).parent) for package in (torch, lightning_autopar))


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
        words = stack_dumps.raised_at(traceback.format_exc())
    assert words is not None
    assert "test_stalled_workers.py:" in words
    assert stack_dumps.raised_at("") is None


@pytest.mark.parametrize(
    ("frames", "words", "waits"),
    [
        (
            [(f"{TORCH}/_ops.py", "9", "__call__"), (f"{TORCH}/_functional_collectives.py", "142", "wait_tensor")],
            "wait_tensor (_functional_collectives.py:142)",
            True,
        ),
        ([(f"{OURS}/a.py", "1", "inner"), ("/home/me/b.py", "2", "step")], "inner (a.py:1), called by step (b.py:2)", False),
        (
            [(f"{TORCH}/autograd/graph.py", "3", "_engine_run_backward"), (f"{OURS}/a.py", "1", "inner"), ("/home/me/b.py", "2", "step")],
            "backward (graph.py:3), called by inner (a.py:1), called by step (b.py:2)",
            True,
        ),
    ],
)
def test_a_place_is_the_collective_and_the_users_line(frames: list[tuple[str, str, str]], words: str, waits: bool) -> None:
    assert stack_dumps._in_words(frames) == words
    assert stack_dumps.in_collective(words) == waits


def test_who_hasnt_said_where_it_is_isnt_asked(pid: int, tmp_path: Path) -> None:
    stack_dumps.ask(tmp_path, {0: pid})  # the signal would end it
    time.sleep(0.05)
    assert psutil.Process(pid).is_running()
    assert stack_dumps.place(tmp_path, 0) is None


def _return_from_many_calls(deep: int) -> None:
    if deep:
        _return_from_many_calls(deep - 1)


def _be_asked(folder: Path, over: Any) -> None:
    """A worker whose thread calls and returns all the time, which is when its stack mustn't be read from outside."""

    def body() -> None:
        while not over[0]:
            _return_from_many_calls(200)

    thread = threading.Thread(target=body)
    thread.start()
    stack_dumps.tell_when_asked(folder, 0, thread.ident or 0, torch.device("cpu"))
    thread.join()


def test_to_ask_a_thread_in_the_midst_of_its_work_where_it_is_never_crashes_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    over = context.RawArray("b", 1)
    worker = context.Process(target=_be_asked, args=(tmp_path, over))
    worker.start()
    told: list[str] = []
    while len(told) < 100 and worker.is_alive():
        stack_dumps.ask(tmp_path, {0: worker.pid or 0})
        time.sleep(0.003)
        if (place := stack_dumps.place(tmp_path, 0)) is not None:
            told.append(place)
    over[0] = 1
    worker.join()
    assert worker.exitcode == 0
    assert all(place.split(" ")[0] in ("_return_from_many_calls", "body") for place in told), set(told)


def _counts_around_a_graph() -> list[int]:
    """Of a GPU's queue: at two looks, while a graph is captured, and after that."""
    queue, thread, x = stack_dumps.GpuQueue(torch.device("cuda", 0)), threading.get_ident(), torch.zeros(8, device="cuda")
    counts = []

    def look() -> None:
        counts.append(queue.count(thread))
        if queue._wait is not None:
            queue._wait.join()

    look()
    look()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # on stubs
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x += 1
            look()
    look()
    return counts


@pytest.mark.gpu
def test_a_gpus_count_grows_while_it_does_what_it_is_given_and_a_captured_graph_is_left_alone() -> None:
    assert fresh(_counts_around_a_graph) == [1, 2, 0, 3]


class Workers:
    """Two workers as they answer: each its place, and how often its GPU has been seen to have done all that it was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pid: int, folder: Path) -> None:
        self.places = {0: "backward (graph.py:824)", 1: "all_reduce (distributed_c10d.py:3001)"}
        self.done, self.hang, self.silent = {0: 1, 1: 1}, set[int](), set[int]()
        self.clock, self.batches = Clock(), [7, 7]
        self._pids = {0: pid, 1: pid}
        self.stalls = Stalls(folder=folder, devices=("cuda:0", "cuda:1"), clock=self.clock)
        monkeypatch.setattr(stack_dumps, "ask", self._ask)
        monkeypatch.setattr(stack_dumps, "answer", lambda _, rank: None if rank in self.silent else (self.places[rank], self.done[rank]))

    def _ask(self, folder: Path, pids: Mapping[int, int]) -> None:
        self.done = {rank: count + (count > 0 and rank not in self.hang) for rank, count in self.done.items()}

    def look_for(self, seconds: float) -> str | None:
        """Look once a second; what is found."""
        until = self.clock.now + seconds
        while self.clock.now < until:
            stall = self.stalls.look(self._pids, self.batches)
            if stall is not None:
                return stall.sentence
            self.clock.now += 1
        return None


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch, pid: int, tmp_path: Path) -> Workers:
    return Workers(monkeypatch, pid, tmp_path)


def test_gpus_that_hang_are_found_within_a_minute_and_gpus_that_come_along_never(workers: Workers) -> None:
    assert workers.look_for(200) is None
    workers.hang, began = {0}, workers.clock.now
    assert workers.look_for(34) is None
    found = workers.look_for(60)
    assert found is not None
    assert "the GPUs don't do what they were given (rank 0 on cuda:0 for" in found
    assert workers.clock.now - began < 60


def test_a_rank_that_moves_on_lets_the_others_wait(workers: Workers) -> None:
    workers.hang = {0, 1}
    for line in range(10):
        workers.places[1] = f"step (train.py:{line})"
        assert workers.look_for(20) is None


def test_ranks_that_wait_for_each_other_are_found_whether_they_have_gpus_or_not(workers: Workers) -> None:
    for count in (0, 1):
        workers.places, workers.done = dict.fromkeys((0, 1), f"recv (distributed_c10d.py:{count})"), dict.fromkeys((0, 1), count)
        assert workers.look_for(34) is None
        found = workers.look_for(60)
        assert found is not None
        assert "as all of them wait for each other" in found


def test_a_machine_under_load_answers_late_and_isnt_mistaken_for_a_hang(workers: Workers) -> None:
    workers.hang = {0, 1}
    assert workers.look_for(25) is None
    workers.silent = {1}
    assert workers.look_for(200) is None
    workers.silent, workers.hang = set(), set()
    assert workers.look_for(200) is None


def test_the_time_for_which_all_were_stopped_isnt_held_against_gpus(workers: Workers) -> None:
    workers.hang = {0, 1}
    assert workers.look_for(20) is None
    workers.clock.now += 3600
    assert workers.look_for(6) is None
    workers.hang = set()
    assert workers.look_for(200) is None


@pytest.mark.parametrize(("batches", "seconds_each", "bound"), [([2, 2], 1, 40), ([4, 3], 20, 200)])
def test_a_gpu_may_take_longer_where_batches_do_and_before_that_is_known(
    batches: list[int], seconds_each: int, bound: int, workers: Workers
) -> None:
    for number in range(1, min(batches) + 1):
        workers.batches = [number, number]
        assert workers.look_for(seconds_each) is None
    workers.batches, workers.hang = batches, {0, 1}
    assert workers.look_for(bound) is None
    assert workers.look_for(30) is not None


def test_a_gpu_may_take_longer_where_a_step_is_predicted_to(workers: Workers) -> None:
    workers.stalls.predicted_seconds = 9.0
    workers.batches, workers.hang = [1, 1], {0, 1}
    assert workers.look_for(90) is None
    assert workers.look_for(30) is not None


def test_a_gpu_may_take_longer_while_a_rank_compiles(workers: Workers) -> None:
    workers.batches, workers.hang, began = [1, 1], {0, 1}, workers.clock.now
    workers.places[1] += ", while code is compiled"
    assert workers.look_for(120) is None
    assert workers.look_for(30) is not None
    workers.batches, workers.places[1], began = [2, 2], "training_step (train.py:3)", workers.clock.now
    assert workers.look_for(60) is not None
    assert workers.clock.now - began < 60


def test_a_place_says_whether_code_is_compiled_not_whether_compiled_code_runs() -> None:
    places: list[str | None] = []

    def note() -> None:
        places.append(stack_dumps.where(threading.get_ident()))

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        note()
        return lambda *args: (note(), graph.forward(*args))[1]

    torch.compile(lambda x: x * 2, backend=compiler)(torch.ones(2))
    assert list(map(stack_dumps.compiles, places)) == [True, False]
