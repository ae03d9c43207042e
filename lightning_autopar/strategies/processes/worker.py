"""A worker of a generation: a forked process that installs an engine on the trainer it inherited and runs the trainer's function.

It tells its agent over a pipe how that ended, and leaves results or the failure as files. It knows neither the other workers' processes nor
why there is a generation.
"""

from __future__ import annotations

import contextvars
import logging
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import connection, util
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group as abort_process_group

from lightning_autopar._fork import begin_child, die_with
from lightning_autopar._lightning import Trainer, rank_zero_only
from lightning_autopar._lightning_compat import (
    SIGTERMException,
    TunerExit,
    call_on_exception,
    from_snapshot,
    installed,
    share_cores,
    without_word_of_signals,
)
from lightning_autopar._temporary import patched
from lightning_autopar._trackers import settle, track
from lightning_autopar.exact.random import generator_states as rng
from lightning_autopar.sharing.runs.progress import RunProgress
from lightning_autopar.state import gpu_pickles
from lightning_autopar.strategies.base.engine_mixin import EngineMixin
from lightning_autopar.strategies.base.out_of_memory.gpu_limit import gpu_limit_for
from lightning_autopar.strategies.base.out_of_memory.running_step import explain
from lightning_autopar.strategies.base.process_group import RENDEZVOUS_FILE
from lightning_autopar.strategies.base.run_plan import RunPlan
from lightning_autopar.strategies.base.worker_exception import WHERE, Failure
from lightning_autopar.strategies.processes import jupyter
from lightning_autopar.strategies.processes.agent_protocol import GenerationFiles, ShortageRendezvous, StopRendezvous
from lightning_autopar.strategies.processes.between_batches import Boundary, Paused
from lightning_autopar.strategies.processes.failed_together import FailedRank
from lightning_autopar.strategies.processes.handover import back_to_script as handover
from lightning_autopar.strategies.processes.out_of_memory_exit import LeavingBoundary
from lightning_autopar.strategies.processes.stack_dumps import tell_when_asked

log = logging.getLogger(__name__)

#: How long leaving the process group may take: NCCL may wait for work of a rank that is gone.
_ABORT_SECONDS = 10.0
#: How long a rank that has failed waits for the others to fail as well; then for their hooks, which may write a checkpoint.
_LEAST_WAIT_SECONDS, _MOST_WAIT_SECONDS = 1.0, 3.0
_HOOKS_SECONDS = 60.0
#: The bytes left of a UNIX socket's name, which has 107, after what multiprocessing appends.
_LONGEST_SOCKET_FOLDER = 107 - len("/pymp-xxxxxxxx/listener-xxxxxxxx")


@dataclass(kw_only=True)
class WorkerJob:
    """What each worker does."""

    run_plan: RunPlan
    make_engine: Callable[[RunPlan], EngineMixin]
    trainer: Trainer
    #: Of the trainer's function, with its arguments by name.
    call: partial[Any]
    folder: Path
    before: handover.Before
    elastic: GenerationFiles | None = None
    #: Where ranks meet to leave a step in which one runs out of memory; None where the run doesn't go on after that.
    shortage: ShortageRendezvous | None = None
    progress: RunProgress | None = None


def make_job(run_plan: RunPlan, trainer: Trainer, call: partial[Any], folder: Path) -> WorkerJob:
    """The job by which workers run the trainer's function."""
    return WorkerJob(
        run_plan=run_plan,
        make_engine=trainer.strategy.make_engine,  # type: ignore[attr-defined]  # the user's AutoParallelStrategy
        trainer=trainer,
        call=call,
        folder=folder,
        before=handover.survey(trainer),
    )


def work(rank: int, job: WorkerJob, stop_rendezvous: StopRendezvous, pipe: connection.Connection, parent_pid: int) -> None:
    """A worker's main thread: it sets up environment and signals; the run has a thread of its own, see :mod:`lightning_autopar._fork`."""
    with suppress(OSError):
        os.setpgid(0, 0)
    die_with(parent_pid)
    begin_child(gpus=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave_it_to_the_parent)
    for number in (signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)  # the terminal must not stop a process group of its own
    _make_scratch(job.folder)
    device = job.run_plan.devices[rank]
    jupyter.speak_through_kernel()
    rank_zero_only.rank = rank  # type: ignore[attr-defined]  # Lightning hangs it on the function
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(job.run_plan.plan.world_size), MASTER_ADDR="127.0.0.1")
    os.environ[RENDEZVOUS_FILE] = str(job.folder / "rendezvous")
    if device.kind == "cpu" and device.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(device.threads)
    if device.index is None or device.in_doubt:  # CUDA shows a process at most one MIG instance, and only by name
        os.environ["CUDA_VISIBLE_DEVICES"] = device.id
        devices = tuple(each.known_by_name() if each is device else each for each in job.run_plan.devices)
        job = replace(job, run_plan=replace(job.run_plan, devices=devices))
    default_device = torch.get_default_device()

    def body() -> None:
        if default_device.type != "cpu":  # torch keeps this setting per thread
            torch.set_default_device(default_device)
        track(here=rank == 0)
        _run(rank, job, stop_rendezvous, pipe)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(body,), name="autopar-body")
    thread.start()
    assert thread.ident is not None, "it was started"
    tell_when_asked(job.folder, rank, thread.ident, job.run_plan.torch_devices[rank])
    thread.join()
    _end()


def _end() -> NoReturn:
    """End this process; its parent ends whatever it has started."""
    settle()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or nobody reads any more
            stream.flush()
    jupyter.fall_silent()
    os._exit(0)


def _make_scratch(folder: Path) -> None:
    """Give multiprocessing, in this process and its data loader workers, a folder for sockets that is removed with the run's. Its default,
    in the system's temporary folder, is left behind when a process is killed. A socket's name must be short, so its path must be.
    """
    if len(str(folder)) > _LONGEST_SOCKET_FOLDER:
        return
    with patched(tempfile, "tempdir", str(folder)):
        util.get_temp_dir()


def _leave_it_to_the_parent(number: int, frame: Any) -> None:
    """Ignore interruptions: the parent says when to stop. Not by SIG_IGN, which a program that the user's code starts would inherit."""


def _run(rank: int, job: WorkerJob, stop_rendezvous: StopRendezvous, pipe: connection.Connection) -> None:
    """Install the engine, run the trainer's function, leave the results."""
    trainer, device = job.trainer, job.run_plan.devices[rank]
    if device.kind == "cpu" and device.threads is not None:
        torch.set_num_threads(device.threads)
    elif device.kind == "cuda":
        share_cores(job.run_plan.plan.world_size)
    module = trainer.lightning_module
    rng.restore(job.before.random, {})
    job.before.survey.begin()
    try:
        engine = job.make_engine(job.run_plan)
        if job.progress is not None and (rank == 0 or device.kind == "cuda"):  # ranks on CPU devices have no GPU memory to show
            engine.at_batch.append(partial(job.progress.at_batch, trainer, rank, job.run_plan.torch_devices[rank]))
        engine.at_batch.append(partial(stop_rendezvous.boundary, rank))
        with installed(trainer, engine, module, job.run_plan.torch_devices, keep_sampler=job.run_plan.batch == "per_device"):
            engine.gpu_limit = gpu_limit_for(job.run_plan, rank)
            word, value = "done", None
            call = job.call
            boundary: Boundary | None = None
            try:
                if job.shortage is not None and job.elastic is not None:
                    boundary = LeavingBoundary(
                        trainer, job.elastic, job.before, rank, shortage=job.shortage, folder=job.folder, give_up_group=_abort_group
                    )
                elif job.elastic is not None:
                    boundary = Boundary(trainer, job.elastic, job.before, rank)
                if job.elastic is not None:
                    assert boundary is not None
                    call = _begin(job, job.elastic, engine, boundary, pipe)
                with without_word_of_signals(trainer):  # the parent handles signals, and stops all ranks at one batch
                    value = call()
            except TunerExit:
                word = "tuner"
            except Paused:
                assert boundary is not None
                boundary.close_bars()
                pipe.send("paused")
                _end()  # at once: the next generation waits for the memory, and taking shards apart takes a second
            except BaseException as error:
                explain(engine, error)
                if hasattr(error, WHERE) and job.shortage is not None:
                    job.shortage.note()
                    job.shortage.answer(rank, None)
                _leave(error, rank, job, stop_rendezvous, pipe)
                return
            left = handover.collect(trainer, value, job.before, job.folder, rank)
        (job.folder / f"rank{rank}.pkl").write_bytes(gpu_pickles.dumps(left))
        engine.wait_for_peers()
        pipe.send(word)
    except BaseException as error:
        _report(error, rank, job, pipe)


def _begin(job: WorkerJob, elastic: GenerationFiles, engine: EngineMixin, boundary: Boundary, pipe: connection.Connection) -> partial[Any]:
    """Get ready, wait for the generation's beginning, and resume; returns the call to make."""
    engine.prepare()
    pipe.send("ready")
    snapshot = elastic.beginning()
    engine.plan_changes = elastic.changes
    if snapshot is None:
        boundary.begin_anew()
        return job.call
    boundary.take_up(snapshot)
    return from_snapshot(job.call, snapshot)


def _leave(error: BaseException, rank: int, job: WorkerJob, stop_rendezvous: StopRendezvous, pipe: connection.Connection) -> None:
    """The run ends by an exception: tell the parent, run the trainer's hooks, and write the state as it is, if possible."""
    trainer, together = job.trainer, stop_rendezvous.stopping
    if job.shortage is not None and job.shortage.noted:
        _report(error, rank, job, pipe)  # the run goes on under a smaller plan, if there is one: no hook may see the exception
        if job.run_plan.from_snapshot or trainer.strategy.running.begun > 1:  # type: ignore[attr-defined]  # of EngineMixin
            _leave_state(rank, job, pipe)  # for where there is none
        return
    if (
        job.elastic is not None
        and not job.elastic.rendezvous.final
        and not (stop_rendezvous.stopping and type(error) in (KeyboardInterrupt, SIGTERMException))
    ):
        _report(error, rank, job, pipe)  # the agent goes on from a snapshot, as if nothing had happened: no hook may see it
        return
    if stop_rendezvous.stopping and type(error) in (KeyboardInterrupt, SIGTERMException):
        pipe.send("stopped")  # all ranks are here, so that hooks may use collectives
    else:
        _report(error, rank, job, pipe)
        peers = FailedRank(rank=rank, world_size=job.run_plan.plan.world_size, folder=job.folder)
        # The others end the same step, but not at the same moment.
        seconds = min(_LEAST_WAIT_SECONDS + stop_rendezvous.longest_seconds, _MOST_WAIT_SECONDS)
        together = dist.is_initialized() and peers.failed_alike(error, batches=stop_rendezvous.begun[rank], timeout_seconds=seconds)
        if dist.is_initialized() and not together and not _abort_group():
            return  # a hook could wait for the device, as this did
    try:
        call_on_exception(trainer, error, finalize=True)
    except Exception as failure:  # it must not hide the failure itself
        if rank == 0:
            log.warning(_hook_words(failure, apart=not together and job.run_plan.plan.devices_per_replica > 1))
    if together and not stop_rendezvous.stopping:
        together = peers.went_on_alike(timeout_seconds=_HOOKS_SECONDS)
    _leave_state(rank, job, pipe, together=together)
    with suppress(Exception):  # as Lightning does, for a checkpoint that is still being written in the background
        trainer.strategy.teardown()


def _hook_words(failure: Exception, *, apart: bool) -> str:
    why = ". The weights lie on several ranks, and not all of them have raised the run's exception, so that no checkpoint can be written"
    return f"a hook for the run's exception failed: {type(failure).__name__}: {str(failure).rstrip('.')}{why if apart else ''}"


def _leave_state(rank: int, job: WorkerJob, pipe: connection.Connection, *, together: bool = False) -> None:
    """Write the state of a run that has failed; ``together`` says that all ranks are here."""
    trainer = job.trainer
    if not together and dist.is_initialized() and not _abort_group():
        return  # a GPU waits for a rank that is gone, and so would who reads from it
    with suppress(Exception):  # sharded weights can't be gathered when ranks have failed; the parent warns of it
        left = handover.collect(trainer, None, job.before, job.folder, rank, apart=True)
        (job.folder / f"rank{rank}.pkl").write_bytes(gpu_pickles.dumps(left))
        if together and dist.is_initialized():
            trainer.strategy.wait_for_peers()  # type: ignore[attr-defined]  # of EngineMixin
        pipe.send("left")


def _abort_group() -> bool:
    """Leave the process group, as the other ranks are elsewhere: a hook's collective would hang, or meet another collective of theirs.
    Returns whether that ended in time: it can wait for NCCL's work on the device, which waits for a rank that is gone.
    """
    thread = threading.Thread(target=abort_process_group, daemon=True, name="autopar-abort")
    thread.start()
    thread.join(_ABORT_SECONDS)
    return not thread.is_alive()


def _report(error: BaseException, rank: int, job: WorkerJob, pipe: connection.Connection) -> None:
    """Report what happened, in a file: a pipe passes long messages on in pieces, and a worker may be killed in between."""
    with suppress(OSError):  # the parent may be gone
        (job.folder / f"error{rank}.pkl").write_bytes(pickle.dumps(Failure.of(error)))
        pipe.send("error")
