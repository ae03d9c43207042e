"""One generation: a set of forked workers that execute one plan, with the parent as their agent.

It starts the workers, listens to them, ends them together, and leaves nothing behind. It doesn't know why this plan was chosen.
"""

from __future__ import annotations

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
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import torch

from lightning_autopar._lightning import rank_zero_warn
from lightning_autopar._lightning_compat import SIGTERMException
from lightning_autopar.devices.discover import of_its_gpu
from lightning_autopar.sharing.runs.folders import LOCKS, RUN_PREFIX, leftovers, remove
from lightning_autopar.state import gpu_pickles
from lightning_autopar.strategies.base.worker_exception import Failure, WorkerFailed
from lightning_autopar.strategies.processes.agent_protocol import StopRendezvous
from lightning_autopar.strategies.processes.handover import back_to_script as handover
from lightning_autopar.strategies.processes.stack_dumps import raised_at
from lightning_autopar.strategies.processes.stalled_workers import Stalls
from lightning_autopar.strategies.processes.worker import WorkerJob, work

#: How long workers may take to leave once one has failed or the run was interrupted.
GRACE_SECONDS = 3.5
#: How long a worker may take over the hooks of its exception (they may write a checkpoint) and over handing its state back.
_HOOKS_SECONDS = 300.0
#: How often the parent looks for crashed workers: a pipe doesn't show a crash while a child of the worker holds it open.
LOOK_SECONDS = 0.05
#: How long to wait for a killed process: one that is in the kernel, in a driver or a disk that hangs, doesn't end.
_KILL_SECONDS = 10.0
#: The signals by which a worker may crash because another one has ended: torch's watchdogs abort, and libraries read freed memory.
_CRASHES = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS)
#: Deaths this close together may be seen in the wrong order: a process whose sockets are closed can take a while to end.
_TOGETHER_SECONDS = 1.0


@dataclass(kw_only=True)
class Outcome:
    """The outcome of a generation.

    Args:
        results: each rank's, in rank order; after a failure those that were written, if together they hold the whole state, else none.
        tuner_exit: whether the run ended as Lightning's tuner ends it.
        error: the exception that ended the run, if one did.
        hooks_ran: whether the workers have run the hooks that belong to ``error``.
        saved: whether a snapshot holds the run, from which its next start goes on.
        interrupted: whether the user or the system has interrupted it.
    """

    results: list[handover.Results]
    tuner_exit: bool = False
    error: BaseException | None = None
    hooks_ran: bool = True
    saved: bool = False
    interrupted: bool = False


@contextmanager
def run_folder(needed_bytes: int) -> Iterator[Path]:
    """A folder for files between workers and parent: in memory if that has twice the room, else on disk; removed on leaving. It holds a
    lock, which the kernel releases when this process and its workers are gone: so the folders of dead runs are found, and removed.
    """
    shared = Path("/dev/shm")
    roomy = shared.is_dir() and os.access(shared, os.W_OK) and psutil.disk_usage(str(shared)).free > 2 * needed_bytes
    home = shared if roomy else Path(tempfile.gettempdir())
    for left in leftovers([home]):
        if left.kind == "files":  # in memory they would stay until the machine restarts
            remove(left)
    hidden = Path(tempfile.mkdtemp(prefix=f".{RUN_PREFIX}", dir=home))
    lock = os.open(hidden / LOCKS["files"], os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    folder = hidden.rename(home / hidden.name[1:])
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
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
    ready: bool = False
    gone: bool = False
    gone_seconds: float = float("inf")
    ended_by_us: bool = False

    def listen(self) -> None:
        """Read its message; messages are short enough for a pipe to pass on in one piece."""
        try:
            while self.open and self.pipe.poll():
                word = self.pipe.recv()
                if word == "ready":
                    self.ready = True
                else:
                    self.words.append(word)
        except (EOFError, OSError):
            self.open = False

    def look(self) -> None:
        """Notice that it has ended. Data loader workers, in its process group, are ended before its id can be reused."""
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
        """Kill it, and everything that it started."""
        self.look()
        if not self.gone and self.process.pid is not None:
            self.ended_by_us = True
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
            until = time.monotonic() + _KILL_SECONDS
            while not self.gone:
                time.sleep(1e-3)
                self.look()
                if time.monotonic() > until:
                    self.gone, self.open = True, False
                    rank_zero_warn(
                        f"autopar: process {self.process.pid}, the worker of rank {self.rank}, was killed but doesn't end: it "
                        "waits in the kernel for a driver or a disk, and keeps its memory until then"
                    )

    @property
    def silent(self) -> bool:
        """Whether it has ended by itself without a last message."""
        return self.gone and not self.words and not self.ended_by_us


def run_generation(job: WorkerJob, look: Callable[[], None] | None = None) -> Outcome:
    """Fork one worker per rank, wait until all are gone, and return their results, with the exception that ended the run, if one did. That
    is the exception that a worker raised first, with that worker's traceback as its cause; :class:`WorkerFailed` if a worker died before
    that without a message; KeyboardInterrupt or SIGTERMException if this process was interrupted. A second interruption is raised at once.

    Args:
        look: called in this process again and again while they work.
    """
    with noted_interrupts() as noted:
        generation = Generation(job)
        try:
            while not generation.gone:
                generation.round(noted)
                if look is not None:
                    look()
        finally:
            generation.end()
    return generation.outcome(noted)


class Generation:
    """The workers of one plan, from their fork to their end."""

    def __init__(self, job: WorkerJob) -> None:
        self.job = job
        self._stop_rendezvous = StopRendezvous(job.run_plan.plan.world_size)
        self._workers: list[_Worker] = []
        self._deadline = self._hooks_deadline = float("inf")
        run_plan = job.run_plan
        self._stalls = Stalls(folder=job.folder, devices=run_plan.plan.devices, predicted_seconds=run_plan.predicted_step_seconds)
        self._stalled = ""
        self._asked = False
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        try:
            for rank in range(job.run_plan.plan.world_size):
                self._workers.append(_start(rank, job, self._stop_rendezvous))
        except BaseException:
            self.end()
            raise

    @property
    def gone(self) -> bool:
        """Whether all workers have ended."""
        return all(worker.gone for worker in self._workers)

    @property
    def ready(self) -> bool:
        """Whether all workers wait for permission to begin."""
        return all(worker.ready for worker in self._workers)

    @property
    def paused(self) -> bool:
        """Whether all workers have left at a boundary, after a snapshot."""
        return all("paused" in worker.words for worker in self._workers)

    @property
    def failed(self) -> bool:
        """Whether some worker has failed, has ended without a message, or keeps the others waiting for ever."""
        return bool(self._stalled) or any(worker.silent or "error" in worker.words for worker in self._workers)

    @property
    def ended_by_us(self) -> bool:
        """Whether some worker had to be killed."""
        return any(worker.ended_by_us for worker in self._workers)

    @property
    def progress(self) -> int:
        """How many batches have begun, over all ranks and loops."""
        return sum(self._stop_rendezvous.begun)

    def pid(self, rank: int) -> int:
        """A worker's process id."""
        pid = self._workers[rank].process.pid
        assert pid is not None, "it was started"
        return pid

    def pids(self) -> list[int]:
        """The process ids of the workers that still run, in rank order."""
        return list(self._living().values())

    def _living(self) -> dict[int, int]:
        return {worker.rank: self.pid(worker.rank) for worker in self._workers if not worker.gone}

    def round(self, noted: list[type[BaseException]], *, timeout_seconds: float = LOOK_SECONDS) -> None:
        """Listen once. A failure, an interruption or the end of the work sets a time after which workers that still live are killed."""
        workers = self._workers
        connection.wait([worker.pipe for worker in workers if worker.open], timeout=timeout_seconds)
        for worker in workers:
            worker.listen()
            worker.look()
        now = time.monotonic()
        for worker in workers:
            if worker.gone:
                worker.gone_seconds = min(worker.gone_seconds, now)
        if all(worker.gone or not worker.open for worker in workers):
            time.sleep(1e-3)  # the workers are about to end
        self._look_for_stalls()
        now = time.monotonic()
        if noted and not self._stop_rendezvous.stopping:
            self._stop_rendezvous.stop(noted[0])
            self._deadline = min(self._deadline, now + GRACE_SECONDS + 2 * self._stop_rendezvous.longest_seconds)
        if self.failed or all(worker.gone or worker.words for worker in workers):
            self._deadline = min(self._deadline, now + GRACE_SECONDS)
        if self._deadline < float("inf"):
            self._hooks_deadline = min(self._hooks_deadline, now + _HOOKS_SECONDS)
        for worker in workers:
            busy = worker.words and worker.words[-1] in ("error", "stopped")
            if not worker.gone and now > (self._hooks_deadline if busy else self._deadline):
                worker.end()

    def _look_for_stalls(self) -> None:
        """End a worker that keeps the others waiting for ever; where one is gone, ask the others where they wait."""
        if self.failed:
            if not self._asked:
                self._asked = True
                self._stalls.ask({rank: pid for rank, pid in self._living().items() if not self._workers[rank].words})
            return
        stall = self._stalls.look(self._living(), self._stop_rendezvous.begun)
        if stall is not None:
            self._stalled, self._asked = stall.sentence, True
            for rank in stall.ranks:
                self._workers[rank].end()

    def end(self) -> None:
        """Kill what still runs."""
        for worker in self._workers:
            worker.end()
            worker.pipe.close()

    def outcome(self, noted: list[type[BaseException]]) -> Outcome:
        """The generation's outcome, from the workers' last messages, when all are gone."""
        job, workers = self.job, self._workers
        if not noted and all("done" in worker.words or "tuner" in worker.words for worker in workers):
            return Outcome(results=_results(job, workers), tuner_exit=any("tuner" in worker.words for worker in workers))
        failures = [self._failure(worker) for worker in workers if "error" in worker.words]
        failures.sort(key=lambda failure: failure.at_seconds)
        silent = [worker for worker in workers if worker.silent]
        died_seconds = min((worker.gone_seconds for worker in silent), default=float("inf"))
        # Of two that died together, one that was killed or exited may have made the other crash, but not the other way round.
        together_seconds = died_seconds + _TOGETHER_SECONDS
        silent.sort(key=lambda worker: (worker.gone_seconds > together_seconds, worker.process.exitcode in _CRASHES, worker.gone_seconds))
        culprits = [failure for failure in failures if not failure.echo and failure.at_seconds <= died_seconds]
        hooks_ran = True
        error: BaseException
        if self._stalled:
            error = WorkerFailed(self._stalled)
        elif culprits:
            error = culprits[0].exception()
        elif noted:
            error = noted[0]()
            hooks_ran = not all("done" in worker.words for worker in workers)
        elif silent:
            worker = silent[0]
            error = WorkerFailed(
                f"the worker of {self._stalls.name(worker.rank)} ended without a word: {_describe(worker.process.exitcode)}"
                f"{of_its_gpu(job.run_plan.devices[worker.rank])}{self._others(worker.rank)}"
            )
            error.__cause__ = failures[0].exception() if failures else None
        elif failures:
            error = failures[0].exception()
        else:
            error = WorkerFailed("the workers were ended by their agent")
        left = _results(job, workers)
        if not left or [each.rank for each in left[: left[0].ranks]] != list(range(left[0].ranks)):
            left = []  # a part of the state is lost
        return Outcome(results=left, error=error, hooks_ran=hooks_ran, interrupted=bool(noted))

    def _others(self, dead: int) -> str:
        """Where the workers were that needed a dead one: those that raised because of it, and those that went on waiting."""
        told = {worker.rank: raised_at(self._failure(worker).text) for worker in self._workers if "error" in worker.words}
        words = [f"{self._stalls.name(rank)} failed in {place}" for rank, place in told.items() if place is not None]
        crashed = {worker.rank: worker.process.exitcode for worker in self._workers if worker.silent and worker.rank != dead}
        words += [f"{self._stalls.name(rank)} ended after that: {_describe(code)}" for rank, code in crashed.items()]
        waited = self._stalls.places([worker.rank for worker in self._workers if worker.rank not in (dead, *told, *crashed)])
        return "".join(f"; {part}" for part in (*words, waited) if part)

    def _failure(self, worker: _Worker) -> Failure:
        failure: Failure = pickle.loads((self.job.folder / f"error{worker.rank}.pkl").read_bytes())
        return failure


def _start(rank: int, job: WorkerJob, stop_rendezvous: StopRendezvous) -> _Worker:
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(rank, job, stop_rendezvous, theirs, os.getpid()), name=f"autopar-rank-{rank}")
    with warnings.catch_warnings():
        # Python 3.12 warns of threads at every fork; the fresh thread in the worker is the answer to that. Workers inherit the filter.
        warnings.filterwarnings("ignore", message=".*use of fork.*", category=DeprecationWarning)
        process.start()
    assert process.pid is not None
    with suppress(OSError):  # the worker does so itself, too: whoever is first, the group exists when we need it
        os.setpgid(process.pid, process.pid)
    theirs.close()
    return _Worker(rank=rank, process=process, pipe=ours)


def _results(job: WorkerJob, workers: list[_Worker]) -> list[handover.Results]:
    """The results of those workers that left any."""
    paths = [job.folder / f"rank{worker.rank}.pkl" for worker in workers if {"done", "tuner", "left"} & set(worker.words)]
    return [gpu_pickles.loads(path.read_bytes(), torch.device("cpu")) for path in paths]


def _describe(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    short = {-signal.SIGKILL: "the host's memory is short", -signal.SIGBUS: "shared memory (/dev/shm) or the disk is full"}
    cause = f"; the system does that when {short[code]}" if code in short else ""
    return f"killed by {signal.Signals(-code).name}{cause}"


@contextmanager
def noted_interrupts() -> Iterator[list[type[BaseException]]]:
    """While open, Ctrl-C and SIGTERM are recorded, so that the workers are ended in order, wherever this process is; the second one is
    raised. The user's own handlers are called, too; a user's handler of SIGINT replaces this.
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
