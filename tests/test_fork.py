"""A forked child's result, failure and end."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing.pool import Pool, ThreadPool
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_autopar import _fork
from lightning_autopar._fork import ChildFailed, forked, run_forked, unforkable
from lightning_autopar.memory.fakes.fake_copies import fake_mode
from tests.processes import descendants


def test_result_comes_back_and_the_parent_is_untouched() -> None:
    box = [1]

    def change(value: int) -> tuple[list[int], int]:
        box.append(value)
        return box, os.getpid()

    result, pid = run_forked(change, 2, timeout_seconds=20)
    assert result == [1, 2]
    assert box == [1]
    assert pid != os.getpid()


def test_a_pool_of_threads_works_in_a_child_and_in_its_child() -> None:
    """Of a pool that has worked a fork leaves the threads behind, for which its next task would wait."""
    with ThreadPoolExecutor(2) as pool:
        assert pool.submit(os.getpid).result() == os.getpid()

        def nested() -> tuple[int, int, int]:
            mine = pool.submit(os.getpid).result(timeout=20)
            return os.getpid(), mine, run_forked(lambda: os.getpid() - pool.submit(os.getpid).result(timeout=20), timeout_seconds=30)

        child, mine, difference = run_forked(nested, timeout_seconds=60)
        assert (child, difference) == (mine, 0)
        assert pool.submit(os.getpid).result(timeout=20) == os.getpid()


def test_multiprocessing_s_pool_of_threads_works_in_a_child() -> None:
    with ThreadPool(2) as pool:
        assert pool.map(abs, [-1]) == [1]
        assert run_forked(lambda: pool.map_async(abs, [-2, -3]).get(timeout=20), timeout_seconds=60) == [2, 3]


_ready: list[str] = []


def _shown(number: int) -> tuple[int, list[str], int]:
    return abs(number), _ready, os.getpid()


@pytest.mark.parametrize("kind", [Pool, ProcessPoolExecutor])
def test_a_pool_of_processes_begins_anew_in_a_child_and_ends_with_it(kind: Any) -> None:
    """A child's task would be done by nobody, and its pool's processes would be left."""
    with kind(1, initializer=_ready.append, initargs=("ready",)) as pool:
        ((one, ready, own),) = pool.map(_shown, [-1])

        def nested() -> list[Any]:
            return [*pool.map(_shown, [-2]), *run_forked(lambda: list(pool.map(_shown, [-3])), timeout_seconds=30)]

        (two, also, child), (three, too, grandchild) = run_forked(nested, timeout_seconds=60)
        ((four, _, same),) = pool.map(_shown, [-4])
    assert (one, two, three, four) == (1, 2, 3, 4)
    assert ready == also == too == ["ready"]
    assert same == own not in (child, grandchild)
    psutil.wait_procs([psutil.Process(pid) for pid in (child, grandchild) if psutil.pid_exists(pid)], timeout=20)
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in (child, grandchild))


def test_a_pool_that_is_closed_stays_so_in_a_child() -> None:
    pool = ThreadPoolExecutor(1)
    pool.submit(abs, -1).result()
    pool.shutdown()
    with pytest.raises(ChildFailed, match="cannot schedule new futures after shutdown"):
        run_forked(lambda: pool.submit(abs, -1), timeout_seconds=60)


def test_processes_of_a_server_of_forks_begin_in_a_child_of_a_process_that_has_one() -> None:
    """A loader's workers, say: the first ``ensure_running`` in the child waited for the parent's server, "No child processes"."""

    def start() -> int:
        process = multiprocessing.get_context("forkserver").Process(target=os.getpid)
        process.start()
        process.join(60)
        return process.exitcode if process.exitcode is not None else -1

    assert start() == 0
    assert run_forked(start, timeout_seconds=120) == 0
    assert start() == 0


def test_this_process_does_something_meanwhile() -> None:
    reader, writer = os.pipe()
    done: list[int] = []
    others = psutil.Process().children()

    def meanwhile() -> None:
        done.append(os.getpid())
        os.write(writer, b"x")

    assert run_forked(lambda: os.read(reader, 1), timeout_seconds=20, meanwhile=meanwhile) == b"x"
    assert done == [os.getpid()]
    with pytest.raises(ZeroDivisionError):
        run_forked(lambda: os.read(reader, 1), timeout_seconds=20, meanwhile=lambda: 1 // 0)  # type: ignore[arg-type,return-value]
    assert {*psutil.Process().children()} <= {*others}, "the child was ended"
    os.close(reader)
    os.close(writer)


def test_random_numbers_go_on_as_in_the_parent() -> None:
    random.seed(5)
    theirs = run_forked(random.random)
    assert theirs == random.random()


def test_large_result() -> None:
    tensor = run_forked(lambda: torch.arange(3_000_000), timeout_seconds=20)
    assert torch.equal(tensor, torch.arange(3_000_000))


def test_exception_carries_the_childs_traceback() -> None:
    def broken_function() -> None:
        raise KeyError("no such thing")

    with pytest.raises(ChildFailed, match="no such thing") as caught:
        run_forked(broken_function, timeout_seconds=20)
    assert "broken_function" in caught.value.child_traceback
    line = broken_function.__code__.co_firstlineno + 1
    assert caught.value.reason == f"KeyError: 'no such thing', at test_fork.py:{line}"


@pytest.mark.parametrize("leave", [lambda: sys.exit(3), lambda: (_ for _ in ()).throw(KeyboardInterrupt())])
def test_leaving_is_failing(leave) -> None:
    with pytest.raises(ChildFailed, match=r"SystemExit|KeyboardInterrupt"):
        run_forked(leave, timeout_seconds=20)


def test_result_that_cannot_be_pickled() -> None:
    with pytest.raises(ChildFailed, match="pickle"):
        run_forked(lambda: lambda: None, timeout_seconds=20)


def test_kill_is_told() -> None:
    with pytest.raises(ChildFailed, match="SIGKILL"):
        run_forked(lambda: os.kill(os.getpid(), signal.SIGKILL), timeout_seconds=20)


def test_exit_status_is_told() -> None:
    with pytest.raises(ChildFailed, match="exit status 7"):
        run_forked(lambda: os._exit(7), timeout_seconds=20)


def test_time_out_ends_the_child() -> None:
    before = descendants()
    with pytest.raises(ChildFailed, match=r"after 0\.5 seconds"):
        run_forked(lambda: time.sleep(600), timeout_seconds=0.5)
    assert descendants() <= before


def test_negative_time_out_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        run_forked(int, timeout_seconds=-1)


def test_nothing_leaks() -> None:
    run_forked(int, timeout_seconds=20)
    before, children = set(os.listdir("/proc/self/fd")), psutil.Process().children()
    for _ in range(5):
        run_forked(int, timeout_seconds=20)
    assert set(os.listdir("/proc/self/fd")) == before
    assert psutil.Process().children() == children, "others' may be there, such as multiprocessing's own"


def test_openmp_after_use_in_the_parent() -> None:
    """The hazard: several threads in a forked child's main thread never return."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        (torch.randn(600, 600) @ torch.randn(600, 600)).sum()
        total = run_forked(lambda: float((torch.ones(600, 600) @ torch.ones(600, 600)).sum()), timeout_seconds=30)
    finally:
        torch.set_num_threads(before)
    assert total == 600.0**3


def test_handlers_of_the_parent_are_forgotten() -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with pytest.raises(ChildFailed, match="SIGTERM"):
            run_forked(lambda: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(30)), timeout_seconds=20)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_from_another_thread() -> None:
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(run_forked(lambda: 5, timeout_seconds=20)))
    thread.start()
    thread.join()
    assert results == [5]


def test_no_exit_hook_and_no_doubled_output(tmp_path) -> None:
    mark = tmp_path / "mark"

    def hook() -> None:
        with mark.open("a") as file:
            file.write("x")

    atexit.register(hook)
    try:
        run_forked(int, timeout_seconds=20)
        assert not mark.exists()
    finally:
        atexit.unregister(hook)
    script = "from lightning_autopar._fork import run_forked\nprint('once')\nrun_forked(print, 'child', timeout_seconds=20)\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "once\n"


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_child_dies_with_the_parent() -> None:
    script = textwrap.dedent("""
        import os, sys, time
        from lightning_autopar._fork import run_forked
        def body():
            print(os.getpid(), file=sys.stderr, flush=True)
            time.sleep(600)
        run_forked(body, timeout_seconds=600)
    """)
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stderr is not None
        assert parent.stderr.readline().strip().isdigit()
        parent.kill()
        # The child, which would sleep on, holds the pipe's other end: the end of the file is its own.
        assert parent.stderr.read() == ""


def test_values_that_planning_makes_up_are_no_anomalies() -> None:
    with torch.autograd.set_detect_anomaly(True):
        assert not run_forked(torch.is_anomaly_enabled, timeout_seconds=20)
        assert torch.is_anomaly_enabled()


def test_a_childs_child_leaves_no_file_unclosed() -> None:
    """Python prints a traceback for each one, where warnings are errors."""
    script = """if True:
        from lightning_autopar._fork import run_forked
        run_forked(lambda: run_forked(lambda: "done", timeout_seconds=20), timeout_seconds=40)
    """
    done = subprocess.run([sys.executable, "-W", "error::ResourceWarning", "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_what_a_child_prints_is_no_part_of_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    def speaks() -> int:
        print("by Python")
        os.write(1, b"by the system\n")
        os.system("echo by a program")
        print("a warning", file=sys.stderr)
        return 1

    assert run_forked(speaks) == 1
    print("afterwards")
    said = capfd.readouterr()
    assert said.out == "afterwards\n"
    assert "a warning" in said.err


# -- what a child can do after what its parent has done --------------------------------------------------------------------------------


def test_without_threads_for_gpus_a_child_may_go_backward() -> None:
    torch.ones(1, requires_grad=True).sum().backward()
    assert unforkable() is None


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        ("Unable to handle autograd's threading in combination with fork-based multiprocessing.", "has run a backward pass already"),
        ("out of luck", r"can't run a backward pass \(RuntimeError: out of luck, at test_fork.py:\d+\)"),
    ],
)
def test_a_child_that_fails_tells(failure: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError(failure)

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    assert unforkable() is None
    monkeypatch.setattr(_fork, "_try", refuse)
    assert re.search(words, unforkable() or "")


def test_a_process_that_has_asked_the_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)  # as after torch.cuda.is_available() on a machine without GPUs
    assert unforkable() is None
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert unforkable() == "this process has asked CUDA's driver for its GPUs already"


def test_a_child_works_while_its_parent_goes_on_and_ends_if_nobody_waits_for_it() -> None:
    before = {child.pid for child in psutil.Process().children()}
    reader, writer = os.pipe()
    with forked(os.read, reader, 4, timeout_seconds=20) as result:
        os.write(writer, b"done")
        assert result() == b"done"
    with pytest.raises(KeyError, match="meanwhile"), forked(os.read, reader, 4):
        raise KeyError("meanwhile")
    assert {child.pid for child in psutil.Process().children()} <= before
    os.close(reader)
    os.close(writer)


def test_a_child_sees_gpus_only_where_it_is_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert run_forked(os.getenv, "CUDA_VISIBLE_DEVICES", timeout_seconds=20) == ""
    assert run_forked(os.getenv, "CUDA_VISIBLE_DEVICES", timeout_seconds=20, gpus=True) == "3"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_tracing_starts_no_thread_for_gpus_that_are_not_there() -> None:
    """Under fakes torch's build for CUDA pretends that there were eight GPUs; see ``FastFakeMode.avoid_device_init``."""

    def threads() -> list[str]:
        with fake_mode():
            torch.ones(2, requires_grad=True).sum().backward()
        torch.ones(1, requires_grad=True).sum().backward()
        return [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]

    assert not [name for name in run_forked(threads, timeout_seconds=60) if name.startswith("pt_autograd")]


@pytest.mark.gpu
def test_a_child_of_a_process_that_has_set_its_threads_gets_a_whole_pool() -> None:
    """A child's first backward has autograd's thread of each GPU ask for it at once: "Invalid thread pool!", in every seventh child."""
    script = textwrap.dedent("""
        import torch
        from lightning_autopar._fork import run_forked
        def backward():
            torch.ones(1, requires_grad=True).sum().backward()
        torch.set_num_threads(2)
        (torch.ones(300, 300) @ torch.ones(300, 300)).sum()
        for _ in range(100):
            run_forked(backward, timeout_seconds=20, gpus=True)
    """)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if "NULLGPU_DEVICES" in environment:
        environment["NULLGPU_DEVICES"] = "16"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100, env=environment)


@pytest.mark.gpu
def test_a_child_that_has_run_a_backward_may_fork_on() -> None:
    """It sees no GPU; one that did would start a thread on each, and torch would refuse its children every backward."""
    script = textwrap.dedent("""
        import torch
        from lightning_autopar._fork import run_forked, unforkable
        def backward():
            torch.ones(1, requires_grad=True).sum().backward()
        def twice():
            backward()
            run_forked(backward, timeout_seconds=20)
            return torch.cuda.device_count()
        print(run_forked(twice, timeout_seconds=60), unforkable())
        backward()
        print(unforkable())
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.splitlines() == [
        "0 None",
        "this process has run a backward pass already, which started autograd's threads for the GPUs",
    ]


class _Labelled(torch.Tensor):
    """As people write a tensor with an attribute."""

    labels: str

    @staticmethod
    def __new__(cls, x: torch.Tensor, labels: str) -> _Labelled:
        return super().__new__(cls, x)  # type: ignore[no-any-return]

    def __init__(self, x: torch.Tensor, labels: str) -> None:
        self.labels = labels


class _Watch(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def test_users_tensors_can_be_made_while_a_child_watches_operations() -> None:
    def work() -> tuple[str, list[float], list[float]]:
        weight = torch.ones(2, requires_grad=True)
        with _Watch():
            made = _Labelled(weight * 2, "a")
            made.sum().backward()
        assert weight.grad is not None
        return made.labels + type(made).__name__, weight.grad.tolist(), torch.Tensor([1, 2]).tolist()

    assert run_forked(work) == ("a_Labelled", [2.0, 2.0], [1.0, 2.0])
