"""One generation: a set of forked workers that execute one plan, with the parent as their agent.

It starts them, listens to them, ends them together, and leaves nothing behind. It doesn't know why this plan was chosen.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from lightning_autopar._lightning_compat import SIGTERMException, TunerExit, call_on_exception, installed, request_stop
from lightning_autopar.strategies import results as handover
from lightning_autopar.strategies.engine import Assignment, EngineMixin
from lightning_autopar.strategies.group import RENDEZVOUS_FILE

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

#: How long the other workers may take to leave once one has failed or the run was interrupted.
GRACE_SECONDS = 4.0


class WorkerFailed(RuntimeError):
    """A worker ended without saying why: killed by a signal, or by ``os._exit``."""


class RemoteTraceback(Exception):
    """The traceback of a worker's exception, as the cause of the same exception in the parent."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._text = text

    def __str__(self) -> str:
        return f"\n\n{self._text}"


@dataclass(kw_only=True)
class Outcome:
    """What came out of a generation: each rank's results in rank order, and the folder with their files."""

    results: list[handover.Results]
    tuner_exit: bool


@dataclass(kw_only=True)
class Job:
    """What each worker is to do."""

    assignment: Assignment
    make_engine: Callable[[Assignment], EngineMixin]
    trainer: Trainer
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    folder: Path


@contextmanager
def run_folder(needed_bytes: int) -> Iterator[Path]:
    """A folder for what passes between workers and parent: in memory where there is room for it twice, otherwise on disk; removed on leaving."""
    shared = Path("/dev/shm")
    roomy = shared.is_dir() and os.access(shared, os.W_OK) and psutil.disk_usage(str(shared)).free > 2 * needed_bytes
    folder = Path(tempfile.mkdtemp(prefix="autopar-", dir=shared if roomy else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_generation(job: Job) -> Outcome:
    """Fork one worker per rank, wait for all of them, and return what they left.

    Raises:
        BaseException: the exception that a worker raised first, with that worker's traceback as its cause. The others are gone by then.
        WorkerFailed: if a worker died without a word.
        KeyboardInterrupt, SIGTERMException: if the parent was interrupted; the workers have left at a batch boundary, or were killed.
    """
    context = get_context("fork")
    workers: list[BaseProcess] = []
    pipes: list[connection.Connection] = []
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        with _terminated_as_exception():
            for rank in range(job.assignment.plan.world_size):
                ours, theirs = context.Pipe(duplex=False)
                worker = context.Process(target=_worker, args=(rank, job, theirs, os.getpid()), name=f"autopar-rank-{rank}")
                worker.start()
                theirs.close()
                workers.append(worker)
                pipes.append(ours)
            return _listen(job, workers, pipes)
    except (KeyboardInterrupt, SIGTERMException):
        for worker in workers:
            _signal(worker, signal.SIGTERM)
        _await_exit(workers)
        raise
    finally:
        for worker in workers:
            _kill(worker)
        for pipe in pipes:
            pipe.close()


def _listen(job: Job, workers: list[BaseProcess], pipes: list[connection.Connection]) -> Outcome:
    """Collect each worker's last word."""
    words: dict[int, tuple[str, Any]] = {}
    while len(words) < len(workers):
        waiting: dict[Any, int] = {}
        for rank, (worker, pipe) in enumerate(zip(workers, pipes, strict=True)):
            if rank not in words:
                waiting[pipe] = rank
                waiting[worker.sentinel] = rank
        for ready in connection.wait(list(waiting)):
            rank = waiting[ready]
            if rank in words:
                continue
            if pipes[rank].poll():
                with suppress(EOFError):
                    words[rank] = pipes[rank].recv()
                    if words[rank][0] == "error":
                        _raise(words[rank][1], workers)
                    continue
            if not workers[rank].is_alive() or ready is pipes[rank]:
                workers[rank].join(timeout=GRACE_SECONDS)
                code = workers[rank].exitcode
                _await_exit([worker for worker in workers if worker is not workers[rank]])
                raise WorkerFailed(
                    f"the worker of rank {rank} on {job.assignment.plan.devices[rank]} ended without a word ({_describe(code)}); "
                    "a kill by the system often means that the host's memory ran out"
                )
    _await_exit(workers)
    return Outcome(
        results=[pickle.loads((job.folder / f"rank{rank}.pkl").read_bytes()) for rank in range(len(workers))],
        tuner_exit=any(word == "tuner" for word, _ in words.values()),
    )


def _raise(error: tuple[bytes | None, str], workers: list[BaseProcess]) -> None:
    """Give the other workers a moment, then raise the failed one's exception as it was."""
    data, text = error
    _await_exit(workers)
    exception: BaseException = RuntimeError(f"a worker failed\n\n{text}")
    if data is not None:
        with suppress(Exception):  # an exception that can't be rebuilt here is reported by its text
            exception = pickle.loads(data)
    raise exception from RemoteTraceback(text)


def _describe(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _await_exit(workers: list[BaseProcess]) -> None:
    """Wait until all are gone, and end those that aren't after the grace time."""
    deadline = time.monotonic() + GRACE_SECONDS
    for worker in workers:
        worker.join(timeout=max(0.0, deadline - time.monotonic()))
    for worker in workers:
        _kill(worker)


def _signal(worker: BaseProcess, signum: int) -> None:
    if worker.pid is not None and worker.is_alive():
        with suppress(ProcessLookupError):
            os.kill(worker.pid, signum)


def _kill(worker: BaseProcess) -> None:
    """End a worker with everything that it started (data loader workers are in its process group)."""
    if worker.pid is None:
        return
    if worker.is_alive():
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.kill()
    worker.join()


@contextmanager
def _terminated_as_exception() -> Iterator[None]:
    """While open, SIGTERM raises Lightning's SIGTERMException in the main thread, so that the workers are ended in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_sigterm(signum: int, frame: Any) -> None:
        raise SIGTERMException

    before = signal.signal(signal.SIGTERM, on_sigterm)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


# -- the worker --------------------------------------------------------------------------------------------------------------------------------


def _worker(rank: int, job: Job, pipe: connection.Connection, parent_pid: int) -> None:
    """The main thread of a worker: environment and signals here, the run in a thread of its own.

    A forked child hangs in its first parallel region if the parent has used OpenMP; a fresh thread gets a pool of its own.
    """
    os.setpgid(0, 0)
    _die_with(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop
    signal.signal(signal.SIGTERM, lambda signum, frame: request_stop(job.trainer))
    device = job.assignment.devices[rank]
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(job.assignment.plan.world_size), MASTER_ADDR="127.0.0.1")
    os.environ[RENDEZVOUS_FILE] = str(job.folder / "rendezvous")
    if device.kind == "cpu" and device.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(device.threads)
    if device.index is None:  # a MIG instance: CUDA shows a process one of them at most, and only by name
        os.environ["CUDA_VISIBLE_DEVICES"] = device.id
    codes = [1]
    thread = threading.Thread(target=_body, args=(rank, job, pipe, codes), name="autopar-body")
    thread.start()
    thread.join()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(codes[0])


def _body(rank: int, job: Job, pipe: connection.Connection, codes: list[int]) -> None:
    trainer, device = job.trainer, job.assignment.devices[rank]
    if device.kind == "cpu" and device.threads is not None:
        torch.set_num_threads(device.threads)
    module = trainer.lightning_module
    try:
        before = handover.digest_attributes(trainer) if rank == 0 else {}
        engine = job.make_engine(job.assignment)
        with installed(trainer, engine, module, job.assignment.torch_devices, keep_sampler=job.assignment.batch == "per_device"):
            cap_allocator(job.assignment, rank)
            word, value = "done", None
            try:
                value = job.function(*job.args, **job.kwargs)
            except TunerExit:
                word = "tuner"
            left = handover.collect(trainer, value, before, job.folder, rank)
        (job.folder / f"rank{rank}.pkl").write_bytes(pickle.dumps(left))
        pipe.send((word, None))
        codes[0] = 0
    except BaseException as error:
        _report(error, pipe)
        if not isinstance(error, TunerExit):
            with suppress(Exception):  # a hook that fails while the run is failing must not hide the failure itself
                call_on_exception(trainer, error)


def _report(error: BaseException, pipe: connection.Connection) -> None:
    """Send the exception, or its text alone where it can't be pickled."""
    text = "".join(traceback.format_exception(error))
    try:
        data: bytes | None = pickle.dumps(error.with_traceback(None))
        pickle.loads(data or b"")
    except Exception:  # whatever a stranger's exception class does, its text still says what happened
        data = None
    with suppress(OSError):  # the parent may be gone
        pipe.send(("error", (data, text)))


def cap_allocator(assignment: Assignment, rank: int) -> None:
    """Bound a GPU's allocator by what was free there when the plan was made, so that an error in the prediction hurts nobody else."""
    device = assignment.devices[rank]
    if device.kind == "cuda":
        share = min(1.0, device.free_bytes / device.total_bytes)
        torch.cuda.set_per_process_memory_fraction(share, assignment.torch_devices[rank])


def _die_with(parent_pid: int) -> None:
    """Ask Linux to kill this process when its parent dies, however that comes about; elsewhere the closed pipe tells it too late."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(1)
