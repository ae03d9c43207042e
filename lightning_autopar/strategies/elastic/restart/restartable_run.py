"""An elastic run in processes that torchrun or Slurm started: it leaves with a snapshot, and resumes from it when it is started again.

Such processes can't move by themselves: whoever started them decides how many there are. All ranks save at one boundary now and then, and
when a process is told to leave; the next start of the same script, with whatever number of processes, resumes there.
A signal is noted when it comes, and acted on at that boundary; the trainer's own handlers are replaced.
``processes/between_batches`` knows what happens there, ``store_rendezvous`` where ranks meet, ``snapshot_store`` where snapshots lie.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import torch

from lightning_autopar._lightning import SLURMEnvironment, Trainer, rank_zero_info, rank_zero_warn
from lightning_autopar._lightning_compat import TrainerFn, TunerExit, from_snapshot
from lightning_autopar.strategies.elastic.restart.store_rendezvous import StoreRendezvous, Word
from lightning_autopar.strategies.elastic.snapshot_schedule import SnapshotSettings, save_seconds
from lightning_autopar.strategies.elastic.snapshot_store import Snapshot, SnapshotStore
from lightning_autopar.strategies.elastic.start_elastic_fit import ElasticRun, asked_for, snapshot_settings, watchers
from lightning_autopar.strategies.processes.between_batches import Boundary, CheckpointJournal

if TYPE_CHECKING:
    from lightning_autopar.strategies.base.run_plan import BatchRule
    from lightning_autopar.strategies.elastic.restart.store_rendezvous import Stop
    from lightning_autopar.strategies.processes.external_launcher import Peers

#: How long ranks wait for each other at a boundary before the processes leave; launchers kill 30 s after SIGTERM.
_LEAVE_SECONDS = 10.0
#: The same before a snapshot after which training goes on; a rank may be busy with work of its own.
_MEET_SECONDS = 600.0
#: How long a leaving rank waits for its own signal, if it got none yet: torchrun's agent on another node may notice a change of nodes a
#: moment later, and would take processes that ended earlier for failed ones.
_GRACE_SECONDS = 3.0
#: How long after the job was requeued Slurm may take to end it.
_REQUEUED_SECONDS = 20.0
#: How long rank 0 may take to complete a snapshot before the others leave without hearing of it.
_DONE_SECONDS = 60.0
#: How long computing the checksums of a snapshot's files may take before the process leaves.
_SUMS_SECONDS = 3.0


def leaving(trainer: Trainer, peers: Peers, batch: BatchRule) -> SnapshotSettings | None:
    """How to save a run in a launcher's processes; None where ``CheckpointMigrate`` doesn't ask for it, or nothing is trained.

    Raises:
        ValueError: if each device draws batches of its own.
    """
    asked = asked_for(trainer) is not None
    if trainer.state.fn != TrainerFn.FITTING or not (asked or watchers(trainer)):
        return None
    how = snapshot_settings(trainer, batch) if asked else None
    if watchers(trainer) and peers.rank == 0:
        what = "on SIGTERM it saves a snapshot and ends; its next start goes on from there, in any number of processes"
        rank_zero_warn(
            "autopar: ElasticReplan can't move this run: torchrun or Slurm started its processes, and decides how many there are; "
            + (what if asked else "with CheckpointMigrate it would save a snapshot on SIGTERM, and its next start would go on from there")
        )
    if how is not None and not peers.restartable:
        rank_zero_warn("autopar: CheckpointMigrate does nothing in this run: its processes are reruns of the script, which end with it")
        return None
    return how


class RestartableRun:
    """One call of ``fit`` in processes that may be started anew.

    Args:
        run: the same call as an elastic run of this process alone, which gives the run's key and the survey of its objects before the run.
        trainer: as before the run.
    """

    def __init__(self, peers: Peers, how: SnapshotSettings, run: ElasticRun, call: partial[Any], trainer: Trainer) -> None:
        self._peers, self._how, self._run, self._trainer = peers, how, run, trainer
        self._call = call
        self._snapshots: SnapshotStore | None = None
        self.snapshot: Path | None = None

    def find(self) -> None:
        """Agree on the snapshot to go on from, if there is one; every rank calls it.

        Raises:
            ValueError: if not all ranks see the folder.
        """
        peers, home = self._peers, self._how.home(self._trainer.default_root_dir).absolute()
        if peers.rank == 0:
            try:
                self._snapshots = SnapshotStore(self._run.key(), home, self._run.state_bytes, shared=True, job=_job())
                latest = self._snapshots.latest()
            except BaseException as error:
                peers.tell(error)
                raise
            peers.tell((self._snapshots.home, latest))
            found: tuple[Path, Snapshot | None] = self._snapshots.home, latest
        else:
            found = peers.hear()
        if not _is_there(found[0]):
            raise ValueError(
                f"CheckpointMigrate keeps snapshots in {found[0]}, where rank {peers.rank} on node {peers.node} doesn't see what rank 0 "
                "made there; give a folder that all nodes share: CheckpointMigrate(folder=...)"
            )
        self._home, latest = found
        if latest is not None:
            self.snapshot = latest.path
            rank_zero_info(f"autopar: the run goes on from the snapshot of step {latest.step} in {latest.path}; remove it to begin anew")

    @contextmanager
    def going_on(self) -> Iterator[partial[Any]]:
        """The context of the run, with the engine installed; gives the call to make. When the run ends well, its snapshots are
        removed; when it fails, they wait for the next start.
        """
        slurm = self._peers.environment if isinstance(self._peers.environment, SLURMEnvironment) else None
        with Signals(self._trainer, slurm.requeue_signal if slurm is not None and slurm.requeue_signal else signal.SIGUSR1) as signals:
            boundary = StoreBoundary(self, signals, requeues=slurm is not None and slurm.auto_requeue)
            try:
                if self.snapshot is None:
                    yield self._call
                else:
                    boundary.take_up(self.snapshot)
                    yield from_snapshot(self._call, self.snapshot)
            except BaseException as error:  # if one rank is gone, the others end by an exception as well
                if self._snapshots is not None:
                    self._snapshots.close(keep=not isinstance(error, TunerExit), within_seconds=_SUMS_SECONDS)
                raise
            finally:
                boundary.close()
            if self._snapshots is not None:  # a run that was told to leave while it ended may be started anew
                self._snapshots.close(keep=signals.told("leave"))


class StoreBoundary(Boundary):
    """One rank's boundaries in a restartable run.

    Args:
        signals: those that came to this process.
        requeues: whether a signal that asks for a snapshot means that Slurm is to start the job anew.
    """

    def __init__(self, run: RestartableRun, signals: Signals, *, requeues: bool) -> None:
        self._run, self._signals, self._requeues = run, signals, requeues
        self._peers, self._snapshots = run._peers, run._snapshots
        self._rendezvous = StoreRendezvous(self._peers.store, self._peers.rank, self._peers.world_size, str(run._run.number))
        self._saved_at, self._save_seconds, self._refusal = time.monotonic(), None, ""
        self._events: list[Any] = []
        self._terminated = self._asked = self._requeue = False
        super().__init__(run._trainer, None, run._run.before, self._peers.rank)

    _save_seconds: float | None

    def close(self) -> None:
        """Restore the loop."""
        vars(self._epoch_loop).pop("advance", None)

    def _refuse(self, error: BaseException) -> None:
        self._refusal = f"{type(error).__name__}: {error}"

    # -- at a boundary -----------------------------------------------------------------------------------------------------------------

    def _meet_and_advance(self, data_fetcher: Any) -> None:
        """``_TrainingEpochLoop.advance``, after a boundary."""
        self._signals.arm()
        if self._journal is None and self._rank == 0:
            self._go_on_after(self._run._home / "s000000")
        self._wait_for_device()
        stop = self._rendezvous.arrived(in_window=self._in_window)
        if self._rank != 0:
            for word in self._signals.words():
                self._rendezvous.request(word)
        elif stop is None and not self._rendezvous.waits:
            self._call()
        if stop is not None:
            self._stop(stop)
        self._advance(data_fetcher)

    def _wait_for_device(self) -> None:
        """Wait until the batch before the last one is computed: on a GPU the host runs further ahead than the rendezvous allows."""
        if self._trainer.strategy.root_device.type != "cuda":
            return
        event = torch.cuda.Event()
        event.record()
        self._events.append(event)
        if len(self._events) > 1:
            self._events.pop(0).synchronize()

    def _call(self) -> None:
        """Rank 0: call a stop of all ranks if a process was told to leave, or a snapshot is wanted or due."""
        words: set[Word] = {*self._signals.words(), *self._rendezvous.requests()}
        if not words and time.monotonic() - self._saved_at <= self._interval():
            return
        assert self._snapshots is not None, "rank 0 has it"
        self._terminated, self._asked = "leave" in words, "save" in words
        self._requeue = self._asked and self._requeues
        leave = self._terminated or self._requeue
        self._rendezvous.call(accumulation=self._trainer.accumulate_grad_batches, leave=leave, target=str(self._snapshots.target()))

    def _interval(self) -> float:
        how, takes = self._run._how, self._save_seconds
        if how.snapshot_seconds is not None:
            return how.snapshot_seconds
        return (save_seconds(self._run._run.state_bytes) if takes is None else takes) / how.overhead

    def _stop(self, stop: Stop) -> None:
        """Write the snapshot, all ranks together, and leave if the stop says so."""
        self._trainer.strategy.meter.pause(self._trainer.strategy)  # type: ignore[attr-defined]  # a snapshot is no part of a step
        started = time.monotonic()
        target = Path(stop.target)
        here = self._rendezvous.gather(stop, _LEAVE_SECONDS if stop.leave else _MEET_SECONDS)
        if not here:
            self._refusal = "not all ranks came to the same boundary"
        self._signals.hold()
        saved = here and self._save(target)
        if self._rank == 0:
            self._keep(stop, target, saved)
            self._save_seconds = time.monotonic() - started
            self._saved_at = time.monotonic()
            if self._asked and saved and not stop.leave:
                rank_zero_info(f"autopar: asked by a signal, the run wrote a snapshot at step {self._trainer.global_step}, and goes on")
        if stop.leave:
            self._leave(stop, saved)
        self._signals.release()

    def _keep(self, stop: Stop, target: Path, saved: bool) -> None:
        """Rank 0: from here on, the snapshot is the one to resume from."""
        assert self._snapshots is not None, "rank 0 has it"
        if saved:
            self._journal = CheckpointJournal(target)
            self._snapshots.keep(target, self._trainer.global_step)
            self._journal.clear()
        else:
            self._snapshots.discard(target)
            rank_zero_warn(f"autopar: a snapshot couldn't be written to {target}: {self._refusal or 'another rank says why'}")

    # -- leaving -----------------------------------------------------------------------------------------------------------------------

    def _leave(self, stop: Stop, saved: bool) -> None:
        """End this process as its launcher expects, unless Slurm should start the job anew and can't."""
        if self._rank == 0:
            leaves = (self._requeue and requeue()) or self._terminated
            self._rendezvous.say(stop, "done", leaves)
            if leaves:
                assert self._snapshots is not None, "rank 0 has it"
                self._snapshots.close(keep=True, within_seconds=_SUMS_SECONDS)
                which = "here" if saved else "its latest snapshot, if there is one"
                rank_zero_info(f"autopar: the run leaves at step {self._trainer.global_step}; its next start goes on from {which}")
        else:
            leaves = self._rendezvous.hear(stop, "done", _DONE_SECONDS) is not False
        if not leaves:
            return
        self._signals.wait_for_leave(_REQUEUED_SECONDS if self._requeues and not self._signals.told("leave") else _GRACE_SECONDS)
        self.close_bars()
        self._rendezvous.leave(stop, _GRACE_SECONDS + 1)
        _end()


def requeue() -> bool:
    """Ask Slurm to start this job anew, as Lightning does (``_SignalConnector._slurm_sigusr_handler_fn``); returns whether it will."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    job = os.environ["SLURM_JOB_ID"] if array is None else f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=_REQUEUED_SECONDS / 2, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        rank_zero_warn(f"autopar: Slurm couldn't be asked to requeue job {job}, so the run goes on: {error}")
        return False
    if done.returncode != 0:
        rank_zero_warn(f"autopar: Slurm didn't requeue job {job}, so the run goes on: {done.stderr.strip() or done.stdout.strip()}")
        return False
    rank_zero_info(f"autopar: Slurm requeued job {job}")
    return True


def _job() -> str | None:
    """A name that every start of this job has, and no other job."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")  # torchrun's default, which names no job
    names = [os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_ARRAY_TASK_ID", ""), "" if run == "none" else run]
    return "/".join(names) if any(names) else None


def _is_there(folder: Path, within_seconds: float = 10.0) -> bool:
    """Whether this process sees a folder that another made; a network file system's cache may be some seconds old."""
    until = time.monotonic() + within_seconds
    while not folder.is_dir():
        if time.monotonic() > until:
            return False
        with suppress(OSError):
            os.listdir(folder.parent)  # refreshes the cache
        time.sleep(0.1)
    return True


def _end() -> None:
    """End this process by SIGTERM: no hooks run, as the run isn't over, and the launcher sees that the process was terminated."""
    for child in multiprocessing.active_children():  # data loaders' workers
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or nobody reads any more
            stream.flush()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    os._exit(128 + signal.SIGTERM)


#: If a process that was told to leave comes to no boundary for so long, and for three batches, it waits for a rank that is gone.
_PATIENCE_SECONDS = 20.0
_BATCHES = 3


class Signals:
    """Handles SIGTERM and the signal that asks for a snapshot, while a run goes on.

    Lightning's own handlers aren't set meanwhile: the one for SIGTERM starts collectives on a rank that may be in the middle of others, and
    ends the run by an exception; the one for Slurm's requeue signal saves wherever the process is (``_SignalConnector``, Lightning issue
    #21406). As in Lightning, the user's own handler of SIGTERM is called too, and one for the other signal is called alone.

    Args:
        save: the signal that asks for a snapshot.
    """

    def __init__(self, trainer: Trainer, save: int) -> None:
        self._connector: Any = trainer._signal_connector
        self._words: dict[int, Word] = {int(signal.SIGTERM): "leave", int(save): "save"}
        self._before: dict[int, Any] = {}
        self._came: dict[int, int] = {}
        self._taken: dict[int, int] = {}
        self._armed = False
        self._held = False
        self._at = time.monotonic()
        self._batch_seconds = 0.0
        self._leave = threading.Event()
        self._pipe: tuple[int, int] | None = None
        self._wakeup_before = -1

    def __enter__(self) -> Signals:
        if threading.current_thread() is not threading.main_thread():
            rank_zero_warn("autopar: fit isn't called from the main thread, so that signals can't ask this run to leave with a snapshot")
            return self
        self._connector.register_signal_handlers = lambda: setattr(self._connector, "received_sigterm", False)
        for number, word in self._words.items():
            before = signal.getsignal(number)
            if word == "save" and before not in (signal.SIG_DFL, None):
                continue
            self._before[number] = before
            signal.signal(number, self._note)
        self._listen()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        vars(self._connector).pop("register_signal_handlers", None)
        for number, before in self._before.items():
            signal.signal(number, before)
        if self._pipe is not None:
            signal.set_wakeup_fd(self._wakeup_before)
            os.close(self._pipe[1])  # ends the thread, which closes the other end of the pipe

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._armed and self._words[number] == "leave" and not callable(self._before[number]):
            signal.signal(number, signal.SIG_DFL)  # there is nothing to save yet
            os.kill(os.getpid(), number)
            return
        self._came[number] = self._came.get(number, 0) + 1
        if self._words[number] == "leave":
            self._leave.set()
        if callable(before := self._before.get(number)):
            before(number, frame)

    # -- what the run asks -------------------------------------------------------------------------------------------------------------

    def arm(self) -> None:
        """This process is at a boundary: from the first one on there is something to save."""
        now = time.monotonic()
        if self._armed:
            self._batch_seconds = max(self._batch_seconds, now - self._at)
        self._at, self._armed = now, True

    def words(self) -> list[Word]:
        """The requests by signals that weren't returned yet."""
        found = [self._words[number] for number, count in self._came.items() if count > self._taken.get(number, 0)]
        self._taken = dict(self._came)
        return found

    def told(self, word: Word) -> bool:
        """Whether a signal has asked for this."""
        return any(self._words[number] == word for number in self._came)

    def wait_for_leave(self, seconds: float) -> None:
        """Wait until this process is told to leave, at most so many seconds."""
        self._leave.wait(seconds)

    def hold(self) -> None:
        """A snapshot is being written: until it is, only a kill ends this process."""
        self._held = True

    def release(self) -> None:
        """The snapshot is written."""
        self._held, self._at = False, time.monotonic()

    # -- a process that can't come to a boundary any more ------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Let a thread see signals at once: a Python handler doesn't run while the main thread waits in a collective."""
        pipe = os.pipe()
        os.set_blocking(pipe[1], False)
        self._wakeup_before = signal.set_wakeup_fd(pipe[1], warn_on_full_buffer=False)
        if self._wakeup_before != -1:  # somebody else listens, such as an event loop
            signal.set_wakeup_fd(self._wakeup_before)
            os.close(pipe[0])
            os.close(pipe[1])
            return
        self._pipe = pipe
        threading.Thread(target=self._watch, args=(pipe[0],), daemon=True, name="autopar-signals").start()

    def _watch(self, pipe: int) -> None:
        while (numbers := os.read(pipe, 64)) and int(signal.SIGTERM) not in numbers:
            pass
        closed, told_at = not numbers, time.monotonic()
        while not closed:
            os.set_blocking(pipe, False)
            with suppress(BlockingIOError):
                closed = not os.read(pipe, 64)
            patience = max(_PATIENCE_SECONDS, _BATCHES * self._batch_seconds)
            if not closed and self._armed and not self._held and time.monotonic() - max(self._at, told_at) > patience:
                sys.stderr.write(
                    f"autopar: told to leave, but no batch has ended for {patience:.0f} s: another rank is gone; this one ends\n"
                )
                sys.stderr.flush()
                os._exit(128 + signal.SIGTERM)
            threading.Event().wait(0.5)
        os.close(pipe)
