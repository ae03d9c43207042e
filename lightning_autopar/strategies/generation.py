"""One generation: a set of forked workers that execute one plan, with the parent as their agent.

It starts them, listens to them, ends them together, and leaves nothing behind. It doesn't know why this plan was chosen.
"""

from __future__ import annotations

import contextvars
import ctypes
import fcntl
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection, get_context, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_only
from torch.distributed.distributed_c10d import _abort_process_group as abort_process_group

from lightning_autopar._lightning_compat import SIGTERMException, TunerExit, call_on_exception, installed
from lightning_autopar.state import rng
from lightning_autopar.strategies import results as handover
from lightning_autopar.strategies.brake import Brake
from lightning_autopar.strategies.engine import Assignment, EngineMixin
from lightning_autopar.strategies.failure import Failure, WorkerFailed
from lightning_autopar.strategies.group import RENDEZVOUS_FILE

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

#: How long workers may take to leave once one has failed or the run was interrupted.
GRACE_SECONDS = 3.5
#: How long a worker may take over the hooks of its exception (they may write a checkpoint) and over handing its state back.
_HOOKS_SECONDS = 300.0
#: A crash shows in no pipe while something that the worker started still holds it open, so we look ourselves so often.
_LOOK_SECONDS = 0.05
_LOCK_NAME = "in-use"
#: Of the 107 bytes of a UNIX socket's name, less what multiprocessing appends.
_LONGEST_SOCKET_FOLDER = 107 - len("/pymp-xxxxxxxx/listener-xxxxxxxx")


@dataclass(kw_only=True)
class Outcome:
    """What came out of a generation.

    Args:
        results: each rank's, in rank order; after a failure those that could be had, if they hold all of the state, else none.
        tuner_exit: whether the run ended as Lightning's tuner ends it.
        error: the exception that ended the run, if one did.
        hooks_ran: whether the workers have run the hooks that belong to ``error``.
    """

    results: list[handover.Results]
    tuner_exit: bool = False
    error: BaseException | None = None
    hooks_ran: bool = True


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
    before: handover.Before


@contextmanager
def run_folder(needed_bytes: int) -> Iterator[Path]:
    """A folder for what passes between workers and parent: in memory where there is room for it twice, else on disk; removed on leaving.

    A lock in it, which the kernel lets go of when this process and its workers are gone, tells the folders of dead runs; they are removed.
    """
    shared = Path("/dev/shm")
    roomy = shared.is_dir() and os.access(shared, os.W_OK) and psutil.disk_usage(str(shared)).free > 2 * needed_bytes
    home = shared if roomy else Path(tempfile.gettempdir())
    _remove_dead(home)
    hidden = Path(tempfile.mkdtemp(prefix=".autopar-", dir=home))
    lock = os.open(hidden / _LOCK_NAME, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    folder = hidden.rename(home / hidden.name[1:])
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_dead(home: Path) -> None:
    """Remove the folders of runs that were killed: in memory they would stay until the machine restarts."""
    for path in home.glob(f"autopar-*/{_LOCK_NAME}"):
        with suppress(OSError):  # another user's, or somebody is quicker
            lock = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
            finally:
                os.close(lock)


# -- the parent ------------------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Worker:
    """A worker as the parent sees it."""

    rank: int
    process: BaseProcess
    pipe: connection.Connection
    words: list[str] = field(default_factory=list)
    open: bool = True
    gone: bool = False
    ended_by_us: bool = False

    def listen(self) -> None:
        """Take in what it has said; its words are shorter than what a pipe passes on in one piece."""
        try:
            while self.open and self.pipe.poll():
                self.words.append(self.pipe.recv())
        except (EOFError, OSError):
            self.open = False

    def look(self) -> None:
        """Notice that it has ended. Data loader workers, in its process group, are ended before its id may be given to somebody else."""
        pid = self.process.pid
        if self.gone or pid is None:
            return
        try:
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            ended = True
        if ended:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            self.process.join()
            self.listen()
            self.gone, self.open = True, False

    def end(self) -> None:
        """Kill it, with everything that it started."""
        self.look()
        if not self.gone and self.process.pid is not None:
            self.ended_by_us = True
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
            while not self.gone:
                time.sleep(1e-3)
                self.look()

    @property
    def silent(self) -> bool:
        """Whether it has ended by itself without a last word."""
        return self.gone and not self.words and not self.ended_by_us


def run_generation(job: Job) -> Outcome:
    """Fork one worker per rank, wait until all are gone, and return what they left, with the exception that ended the run, if one did.

    That is the exception which a worker raised first, with that worker's traceback as its cause; :class:`WorkerFailed` if a worker died
    without a word; KeyboardInterrupt or SIGTERMException if this process was interrupted. A second interruption isn't waited for.
    """
    world_size = job.assignment.plan.world_size
    brake = Brake(world_size)
    workers: list[_Worker] = []
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with _noted_interrupts() as noted:
        try:
            for rank in range(world_size):
                workers.append(_start(rank, job, brake))
            _wait(workers, brake, noted)
        finally:
            for worker in workers:
                worker.end()
                worker.pipe.close()
    return _outcome(job, workers, noted)


def _start(rank: int, job: Job, brake: Brake) -> _Worker:
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_worker, args=(rank, job, brake, theirs, os.getpid()), name=f"autopar-rank-{rank}")
    with warnings.catch_warnings():
        # Python 3.12 warns of threads at every fork; the fresh thread in the worker is the answer to that. Workers inherit the filter.
        warnings.filterwarnings("ignore", message=".*use of fork.*", category=DeprecationWarning)
        process.start()
    assert process.pid is not None
    with suppress(OSError):  # it does so itself; whoever is first, the group is there when we need it
        os.setpgid(process.pid, process.pid)
    theirs.close()
    return _Worker(rank=rank, process=process, pipe=ours)


def _wait(workers: list[_Worker], brake: Brake, noted: list[type[BaseException]]) -> None:
    """Until all are gone; a failure, an interruption or the end of the work sets a time after which those that linger are killed."""
    deadline = hooks_deadline = float("inf")
    while not all(worker.gone for worker in workers):
        connection.wait([worker.pipe for worker in workers if worker.open], timeout=_LOOK_SECONDS)
        for worker in workers:
            worker.listen()
            worker.look()
        if all(worker.gone or not worker.open for worker in workers):
            time.sleep(1e-3)  # they are on their last steps
        now = time.monotonic()
        if noted and not brake.pulled:
            brake.pull(noted[0])
            deadline = min(deadline, now + GRACE_SECONDS + 2 * brake.longest_seconds)
        failed = any(worker.silent or "error" in worker.words for worker in workers)
        if failed or all(worker.gone or worker.words for worker in workers):
            deadline = min(deadline, now + GRACE_SECONDS)
        if deadline < float("inf"):
            hooks_deadline = min(hooks_deadline, now + _HOOKS_SECONDS)
        for worker in workers:
            busy = worker.words and worker.words[-1] in ("error", "stopped")
            if not worker.gone and now > (hooks_deadline if busy else deadline):
                worker.end()


def _outcome(job: Job, workers: list[_Worker], noted: list[type[BaseException]]) -> Outcome:
    """What to make of the workers' last words."""
    if not noted and all("done" in worker.words or "tuner" in worker.words for worker in workers):
        return Outcome(results=_results(job, workers), tuner_exit=any("tuner" in worker.words for worker in workers))
    failures = [pickle.loads((job.folder / f"error{worker.rank}.pkl").read_bytes()) for worker in workers if "error" in worker.words]
    failures.sort(key=lambda failure: failure.at_seconds)
    culprits = [failure for failure in failures if not failure.echo]
    silent = [worker for worker in workers if worker.silent]
    hooks_ran = True
    error: BaseException
    if culprits:
        error = culprits[0].exception()
    elif noted:
        error = noted[0]()
        hooks_ran = not all("done" in worker.words for worker in workers)
    elif silent:
        worker = silent[0]
        error = WorkerFailed(
            f"the worker of rank {worker.rank} on {job.assignment.plan.devices[worker.rank]} ended without a word: "
            f"{_describe(worker.process.exitcode)}"
        )
    else:
        assert failures, [worker.words for worker in workers]
        error = failures[0].exception()
    left = _results(job, workers)
    if not left or [each.rank for each in left[: left[0].ranks]] != list(range(left[0].ranks)):
        left = []  # a part of the state is lost
    return Outcome(results=left, error=error, hooks_ran=hooks_ran)


def _results(job: Job, workers: list[_Worker]) -> list[handover.Results]:
    """The results of those workers that left any."""
    paths = [job.folder / f"rank{worker.rank}.pkl" for worker in workers if {"done", "tuner", "left"} & set(worker.words)]
    return [pickle.loads(path.read_bytes()) for path in paths]


def _describe(code: int | None) -> str:
    """An exit code in words."""
    if code is None or code >= 0:
        return f"exit code {code}"
    cause = "; the system does that when the host's memory is short" if code == -signal.SIGKILL else ""
    return f"killed by {signal.Signals(-code).name}{cause}"


@contextmanager
def _noted_interrupts() -> Iterator[list[type[BaseException]]]:
    """While open, Ctrl-C and SIGTERM are noted, so that the workers are ended in order, wherever this process is; the second one is raised.

    Handlers that the user has set are called, too; a user's handler of SIGINT instead.
    """
    noted: list[type[BaseException]] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    kinds: dict[int, type[BaseException]] = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: SIGTERMException}

    def note(number: int, frame: Any) -> None:
        noted.append(kinds[number])
        users = before[signal.SIGTERM]
        if number == signal.SIGTERM and callable(users):
            users(number, frame)
        if len(noted) > 1:
            raise kinds[number]

    if before[signal.SIGINT] is signal.default_int_handler:
        signal.signal(signal.SIGINT, note)
    if before[signal.SIGTERM] is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, note)
    try:
        yield noted
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is note:
                signal.signal(number, handler)


# -- the worker ------------------------------------------------------------------------------------------------------------------------


def _worker(rank: int, job: Job, brake: Brake, pipe: connection.Connection, parent_pid: int) -> None:
    """The main thread of a worker: environment and signals here, the run in a thread of its own.

    A forked child hangs in its first parallel region if the parent has used OpenMP; a fresh thread gets a pool of its own.
    """
    with suppress(OSError):
        os.setpgid(0, 0)
    die_with(parent_pid)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave_it_to_the_parent)
    for number in (signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)  # a process group of its own must not be stopped by the terminal
    _make_scratch(job.folder)
    device = job.assignment.devices[rank]
    rank_zero_only.rank = rank  # type: ignore[attr-defined]  # Lightning hangs it on the function
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(job.assignment.plan.world_size), MASTER_ADDR="127.0.0.1")
    os.environ[RENDEZVOUS_FILE] = str(job.folder / "rendezvous")
    if device.kind == "cpu" and device.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(device.threads)
    if device.index is None:  # a MIG instance: CUDA shows a process one of them at most, and only by name
        os.environ["CUDA_VISIBLE_DEVICES"] = device.id
    default_device = torch.get_default_device()

    def body() -> None:
        if default_device.type != "cpu":  # torch keeps it per thread
            torch.set_default_device(default_device)
        _run(rank, job, brake, pipe)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(body,), name="autopar-body")
    thread.start()
    thread.join()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or nobody reads any more
            stream.flush()
    os._exit(0)


def _make_scratch(folder: Path) -> None:
    """Give multiprocessing, in this process and its data loader workers, a place for sockets that goes with the run's folder.

    Its own, in the system's temporary folder, stays behind when a process is killed. A socket's name must be short: not under a long path.
    """
    if len(str(folder)) > _LONGEST_SOCKET_FOLDER:
        return
    before = tempfile.tempdir
    tempfile.tempdir = str(folder)
    try:
        util.get_temp_dir()
    finally:
        tempfile.tempdir = before


def _leave_it_to_the_parent(number: int, frame: Any) -> None:
    """The parent says when to stop. No SIG_IGN: a program that the user's code starts would inherit that."""


def _run(rank: int, job: Job, brake: Brake, pipe: connection.Connection) -> None:
    """Install the engine, run the trainer's function, leave the results."""
    trainer, device = job.trainer, job.assignment.devices[rank]
    if device.kind == "cpu" and device.threads is not None:
        torch.set_num_threads(device.threads)
    module = trainer.lightning_module
    rng.restore(job.before.random, {})
    try:
        engine = job.make_engine(job.assignment)
        brake.watch(engine, rank)
        with installed(trainer, engine, module, job.assignment.torch_devices, keep_sampler=job.assignment.batch == "per_device"):
            cap_allocator(job.assignment, rank)
            word, value = "done", None
            try:
                value = job.function(*job.args, **job.kwargs)
            except TunerExit:
                word = "tuner"
            except BaseException as error:
                _leave(error, rank, job, brake, pipe)
                return
            left = handover.collect(trainer, value, job.before, job.folder, rank)
        (job.folder / f"rank{rank}.pkl").write_bytes(pickle.dumps(left))
        pipe.send(word)
    except BaseException as error:
        _report(error, rank, job, pipe)


def _leave(error: BaseException, rank: int, job: Job, brake: Brake, pipe: connection.Connection) -> None:
    """The run ends by an exception: tell the parent, run the trainer's hooks, and leave the state as it is, where it can be had."""
    trainer = job.trainer
    if brake.pulled and type(error) in (KeyboardInterrupt, SIGTERMException):
        pipe.send("stopped")  # all ranks are here, so that hooks may use collectives
    else:
        _report(error, rank, job, pipe)
        if dist.is_initialized():
            # The others are somewhere else: what a hook tried to do with them would hang, or pair with something else of theirs.
            abort_process_group()
    with suppress(Exception):  # a hook that fails while the run is failing must not hide the failure itself
        call_on_exception(trainer, error)
    with suppress(Exception):  # sharded weights can't be gathered when ranks have failed; the parent says so
        left = handover.collect(trainer, None, job.before, job.folder, rank, apart=True)
        (job.folder / f"rank{rank}.pkl").write_bytes(pickle.dumps(left))
        pipe.send("left")
    with suppress(Exception):  # as Lightning does, for a checkpoint that is still being written in the background
        trainer.strategy.teardown()


def _report(error: BaseException, rank: int, job: Job, pipe: connection.Connection) -> None:
    """Say what happened; as a file, since a pipe takes long words piece by piece, and a worker may be killed in between."""
    with suppress(OSError):  # the parent may be gone
        (job.folder / f"error{rank}.pkl").write_bytes(pickle.dumps(Failure.of(error)))
        pipe.send("error")


def cap_allocator(assignment: Assignment, rank: int) -> None:
    """Bound a GPU's allocator by what was free there when the plan was made, so that an error in the prediction hurts nobody else."""
    device = assignment.devices[rank]
    if device.kind == "cuda":
        share = min(1.0, device.free_bytes / device.total_bytes)
        torch.cuda.set_per_process_memory_fraction(share, assignment.torch_devices[rank])


def die_with(parent_pid: int) -> None:
    """Ask Linux to kill this process when its parent dies, however that comes about; elsewhere the closed pipe tells it too late."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(1)
