"""All ranks of a run leave a step together in which one of them has run out of memory, with a snapshot of the state before it.

The rank that runs out says so, and gives up its communicators; by that, peers that wait for it are freed. A GPU's kernels that waited for a
collective then run on whatever they find, which is harmless before the optimizer's step: gradients are dropped, and buffers are put back.
So all ranks say at which batch they are, and whether its optimizer's step has begun; nothing is saved unless all can leave the same step.
Then each undoes the step (:func:`.running_step.undo`), and in a new process group all write a snapshot, as between two batches.
The run goes on from it in new processes; it doesn't know under which plan. Where not all ranks can leave a step, and outside of one, the
run goes back to the snapshot that its parent has asked for now and then, if there is one.
"""

from __future__ import annotations

import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist

from lightning_autopar import engines
from lightning_autopar._lightning import Trainer
from lightning_autopar._lightning_compat import mute_hooks
from lightning_autopar.exact.data.loader import ExactLoader
from lightning_autopar.strategies.base.out_of_memory import running_step
from lightning_autopar.strategies.base.out_of_memory.running_step import BACKWARD, RunningStep
from lightning_autopar.strategies.base.process_group import RENDEZVOUS_FILE
from lightning_autopar.strategies.base.worker_exception import Failure, out_of_memory
from lightning_autopar.strategies.processes.agent_protocol import BEGIN, GenerationFiles, ShortageRendezvous
from lightning_autopar.strategies.processes.between_batches import Boundary, say_no_folder
from lightning_autopar.strategies.processes.handover.to_next_generation import carry_loggers_in, write_loggers

if TYPE_CHECKING:
    from lightning_autopar.strategies.processes.handover.back_to_script import Before

#: How long a rank waits for what the others say; they come out of a collective, or to a batch's end.
_ANSWER_SECONDS = 300.0
#: How long until a rank's watch has heard. Longer: its host waits within torch for a collective that never ends, and holds the interpreter
#: meanwhile (torch 2.13's DTensors do, where a GPU's allocation waits for the stream), so that nobody there gives up the communicators.
_HEAR_SECONDS = 20.0
_LOOK_SECONDS = 0.1
#: In the generation's folder: what ran out of memory, the snapshot, and the hooks that the left step has called already.
_WHY, _SNAPSHOT, _CALLED = "shortage.pkl", "s1", "called.pkl"
#: Beside the loggers' state at the run's beginning: it is complete.
_READY = "ready"
#: Hooks of a batch that come before its forward; and those between its forward and its backward.
_BEFORE_STEP, _BEFORE_BACKWARD = ("on_train_batch_start",), ("on_before_zero_grad", "on_before_backward")


def left_step(folder: Path) -> tuple[BaseException, Path] | None:
    """Why the workers of a generation have left a step, and the snapshot that they wrote; None if they haven't."""
    if not (folder / _WHY).is_file() or not (folder / _SNAPSHOT / _CALLED).is_file():
        return None
    failure: Failure = pickle.loads((folder / _WHY).read_bytes())
    return failure.exception(), folder / _SNAPSHOT


def cut_off(pids: Iterable[int]) -> None:
    """Close this process's TCP connections to other processes of this host. gloo has no other way to end a collective that a peer waits in:
    its ``abort`` leaves the connections open (torch 2.13).
    """
    theirs: set[Any] = set()
    for pid in pids:
        with suppress(psutil.Error):  # it has ended
            theirs.update(each.laddr for each in psutil.Process(pid).net_connections("tcp"))
    for each in psutil.Process().net_connections("tcp"):
        if each.raddr and each.raddr in theirs and each.fd >= 0:
            with suppress(OSError), socket.socket(fileno=os.dup(each.fd)) as connection:  # the peer was faster
                connection.shutdown(socket.SHUT_RDWR)


class LeavingBoundary(Boundary):
    """One rank's boundaries in a run whose user has asked for no snapshots.

    Args:
        elastic: where the generation begins, and where snapshots are asked for.
        shortage: where its ranks meet.
        give_up_group: leaves the process group without waiting; returns whether that succeeded.
    """

    def __init__(
        self,
        trainer: Trainer,
        elastic: GenerationFiles,
        before: Before,
        rank: int,
        *,
        shortage: ShortageRendezvous,
        folder: Path,
        give_up_group: Callable[[], bool],
    ) -> None:
        super().__init__(trainer, elastic, before, rank)
        self._shortage: ShortageRendezvous = shortage
        self._folder, self._give_up_group = folder, give_up_group
        self._begin = folder.parent / BEGIN
        engine: Any = trainer.strategy
        self._engine = engine
        self._step: RunningStep = engine.running
        self._step.leaves, self._step.before_optimizer = engines.of(engine.run_plan.plan).runs_parts, shortage.look
        shortage.enter(rank, os.getpid())
        self._backend, self._given_up, self._giving_up = "", False, threading.Lock()
        #: The hooks that the running batch doesn't call again, as an earlier generation has.
        self._called: tuple[str, ...] = ()
        if self._engine.root_device.type == "cuda":
            threading.Thread(target=self._watch, daemon=True, name="autopar-shortage").start()
        else:  # gloo's collectives end by themselves
            shortage.hear(rank)

    def take_up(self, snapshot: Path) -> None:
        """See :class:`.Boundary`; the first batch's hooks that were called before its step was left aren't called again."""
        super().take_up(snapshot)
        if not (snapshot / _CALLED).is_file():  # no step was left
            return
        go_on, self._called = self._engine.before_loops, pickle.loads((snapshot / _CALLED).read_bytes())

        def begin() -> None:
            go_on()
            advance, unmute = self._advance, mute_hooks(self._called, heard_by=type(None))

            def first(data_fetcher: Any) -> None:
                self._advance = advance
                try:
                    advance(data_fetcher)
                    self._called = ()
                finally:
                    unmute()

            self._advance = first

        self._engine.before_loops = begin

    def begin_anew(self) -> None:
        """See :class:`.Boundary`."""
        if (self._begin / _READY).is_file():
            say_no_folder()
            carry_loggers_in(self._trainer, self._before, self._begin)

    def _go_on_after(self, beside: Path) -> None:
        super()._go_on_after(beside)
        if self._rank == 0 and beside == self._begin and not (beside / _READY).is_file():
            beside.mkdir(exist_ok=True)
            with suppress(Exception):  # of a user's logger: then it goes on with a second version of its logs
                write_loggers(self._trainer, self._before, beside)
                (beside / _READY).touch()

    def _watch(self) -> None:
        """On a GPU a collective waits for ever for a rank that has left, and this process's main thread with it."""
        ended = threading.Event()
        while not ended.wait(_LOOK_SECONDS):
            if self._shortage.noted:
                self._shortage.hear(self._rank)
                self._give_up()
                return

    def _give_up(self) -> bool:
        """Leave the process group, so that no peer waits for this rank and this one for no peer; returns whether the device is sound."""
        with self._giving_up:
            if not self._backend and dist.is_initialized():
                self._backend = dist.get_backend_config()
                cut_off(self._shortage.peers(self._rank))
                self._given_up = self._give_up_group()
            return self._given_up

    def _leaves(self, error: Exception) -> bool:
        """See :class:`.Boundary`."""
        why = self._why_not(error)
        if out_of_memory(error) and not isinstance(error, dist.DistError):
            if why is not None:
                if not self._engine.reruns_batches:  # which says so itself
                    error.add_note(f"autopar: the batch wasn't run again in more micro-batches: {why}")
                return False
            running_step.explain(self._engine, error)
            if not (self._folder / _WHY).exists():
                (self._folder / _WHY).write_bytes(pickle.dumps(Failure.of(error)))
            self._shortage.note()
        elif not self._shortage.noted:
            return False
        number = self._step.begun if self._give_up() and self._settles() and why is None else None
        if not self._shortage.leave(self._rank, number, _ANSWER_SECONDS, hear_seconds=_HEAR_SECONDS):
            error.add_note(
                "autopar: the batch wasn't run again in more micro-batches: not all ranks could leave its step; another one may have begun "
                "the optimizer's step, or wait for a collective on its GPU and not answer"
            )
            return False
        return True

    def _settles(self) -> bool:
        """Wait until the GPU has done what it was given, which waits for no peer any more; whether it still works after that."""
        try:
            if self._engine.root_device.type == "cuda":
                torch.cuda.synchronize(self._engine.root_device)
        except RuntimeError:  # what came of a broken collective was an index out of bounds, say
            return False
        return True

    def _why_not(self, error: Exception) -> str | None:
        """Why this rank can't leave the running step; None where it can."""
        trainer, step, undivided = self._trainer, self._step, self._engine.run_plan.undivided
        if not trainer.training or step.found is None or not step.in_step:
            return undivided or f"memory ran out in {running_step.place_of(self._engine, error) or 'a hook'}"
        if self._epoch_loop.batch_idx % trainer.accumulate_grad_batches:
            return "the gradients of earlier batches of its window can't be told apart"
        combined = trainer.fit_loop._combined_loader
        if combined is None or not all(isinstance(loader, ExactLoader) for loader in combined.flattened):
            return "its loader can't go back to it"
        return step.found.why_not()

    def _save_here(self) -> None:
        """See :class:`.Boundary`."""
        engine = self._engine
        called = {*self._called, *_BEFORE_STEP, *(_BEFORE_BACKWARD if self._step.place == BACKWARD else ())}
        running_step.undo(engine)
        self._epoch_loop.batch_progress.is_last_batch = False  # fetched again: else Lightning takes the epoch for over
        os.environ[RENDEZVOUS_FILE] = str(self._folder / "rendezvous_again")
        running_step.join_again(engine, self._backend)
        target = self._folder / _SNAPSHOT
        if not self._save(target):
            raise RuntimeError("autopar: the state before the batch that ran out of memory couldn't be written")
        if self._rank == 0:
            (target / _CALLED).write_bytes(pickle.dumps(tuple(called)))
        engine.wait_for_peers()
