"""A run whose user has asked for no snapshots goes on after a worker ran out of memory, under a plan that takes less.

It goes on from the batch at which all ranks have left its step, if they could; else from the latest snapshot, which it has its workers
write now and then, as often as that costs at most 1 % of the time; else from the beginning, as ``validate``, ``test`` and ``predict`` do.
Knows the generations' jobs and outcomes; not how a worker leaves a step.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_autopar._lightning import Trainer
from lightning_autopar._lightning_compat import TrainerFn
from lightning_autopar.devices.host import host_memory
from lightning_autopar.report.report import NothingFits
from lightning_autopar.strategies.base.worker_exception import AT_FIRST, IN_STEP, WHERE
from lightning_autopar.strategies.elastic.run_state import AvoidedDevices
from lightning_autopar.strategies.elastic.snapshot_schedule import Saver, SnapshotSettings
from lightning_autopar.strategies.elastic.snapshot_store import Snapshot
from lightning_autopar.strategies.preparation.decision import Decision
from lightning_autopar.strategies.preparation.finished_run import learn_shortage
from lightning_autopar.strategies.preparation.module_findings import stage_of
from lightning_autopar.strategies.preparation.more_parts import in_more_evaluation_parts, in_more_parts, in_parts_of, samples_at_once
from lightning_autopar.strategies.preparation.planning_inputs import decide_again
from lightning_autopar.strategies.processes.agent_protocol import BEGIN, GenerationFiles, ShortageRendezvous, SnapshotRendezvous
from lightning_autopar.strategies.processes.between_batches import CheckpointJournal
from lightning_autopar.strategies.processes.out_of_memory_exit import left_step
from lightning_autopar.strategies.processes.worker import WorkerJob
from lightning_autopar.strategies.processes.worker_supervisor import Outcome

if TYPE_CHECKING:
    from lightning_autopar.strategies.base.run_plan import RunPlan
    from lightning_autopar.strategies.base.strategy_protocol import RunHost

#: A plan that needs more of what it may use of a GPU than this is tight.
_TIGHT_SHARE = 0.8

#: No warning: one that somebody has turned into an exception would end the run.
_LOG = logging.getLogger(__name__)


def needs_way_back(run_plan: RunPlan, trainer: Trainer) -> bool:
    """Whether a plan of one device had better run in a worker, which can be started again under a smaller plan: it trains, it is tight, and
    a batch that runs out of memory can't be run again in parts, as in manual optimization.
    """
    if trainer.state.fn != TrainerFn.FITTING or run_plan.undivided is None or run_plan.batch != "global":
        return False
    device = run_plan.devices[0]
    budget_bytes = run_plan.budgets.get(device.id, device.free_bytes)
    return device.kind == "cuda" and run_plan.needed_bytes.get(device.id, 0) > _TIGHT_SHARE * budget_bytes


class LatestSnapshot:
    """The snapshot to go back to, in the run's folder, and none but the latest."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0
        self.path: Path | None = None

    def latest(self) -> Snapshot | None:
        """None: a run begins without one."""
        return None

    def target(self, *, on_disk: bool = False) -> Path:
        """The folder for the next one, which doesn't exist yet."""
        self._number += 1
        return self._folder / f"s{self._number:06d}"

    def keep(self, path: Path, step: int) -> Snapshot:
        """It is complete: the one before it goes."""
        if self.path is not None:
            shutil.rmtree(self.path, ignore_errors=True)
        self.path = path
        return Snapshot(path=path, step=step, on_disk=False)

    def discard(self, path: Path) -> None:
        """Remove one that isn't complete."""
        shutil.rmtree(path, ignore_errors=True)


class SmallerPlans:
    """The plans of one call of the trainer, each smaller than the one before it."""

    def __init__(self, strategy: RunHost, first: Decision, trainer: Trainer, folder: Path) -> None:
        self._strategy, self._first, self._trainer, self._folder = strategy, first, trainer, folder
        self._avoided = AvoidedDevices()
        #: How many samples a rank can run at once, after more ran out of memory; None before that.
        self._samples_at_once: int | None = None
        self._generations = 0
        self._goes_on = first.look is not None and first.run_plan.batch == "global"
        self._fits = trainer.state.fn == TrainerFn.FITTING
        footprint = first.report.footprint
        self._state_bytes = footprint.parameter_bytes + footprint.optimizer_bytes
        store: Any = LatestSnapshot(folder)
        self._store: LatestSnapshot = store
        self._saver = Saver(store, SnapshotSettings(), self._state_bytes, first_at_once=False, say=self._cant_save)
        self._saves = True
        #: The steps at which no plan took less than the one that ran out of memory.
        self._tried: set[int] = set()
        self._files: GenerationFiles | None = None

    @property
    def snapshot(self) -> Path | None:
        """What the next generation goes on from; None where it begins as the user's call says."""
        return self._store.path

    def job(self, job: WorkerJob) -> WorkerJob:
        """The next generation's job."""
        if not self._goes_on:
            return job
        self._generations += 1
        own = self._folder / f"g{self._generations}"
        own.mkdir()
        world_size = job.run_plan.plan.world_size
        if not self._fits:
            return replace(job, folder=own, shortage=ShortageRendezvous(world_size))
        rendezvous = SnapshotRendezvous(world_size)
        rendezvous.final = True  # any other failure ends the run
        self._files = GenerationFiles(rendezvous=rendezvous, begin=get_context("fork").Event(), folder=own)
        self._files.let_begin(self.snapshot)
        self._saver.begin()
        return replace(job, folder=own, elastic=self._files, shortage=ShortageRendezvous(world_size))

    def look(self) -> None:
        """Have a snapshot written when one is due and the host has room for it; to be called again and again."""
        if self._files is not None and self._saves and (self._saver.waits or host_memory()[1] > 2 * self._state_bytes):
            self._saver.watch(self._files)

    def _cant_save(self, words: str) -> None:
        """Nobody has asked for snapshots, so that one that can't be written is no matter until memory runs out."""
        _LOG.info(words)
        self._saves = False

    def after(self, outcome: Outcome, job: WorkerJob, decision: Decision) -> Decision | None:
        """The decision with which the run goes on; None if it is over."""
        if self._files is not None:
            self._saver.give_up(self._files)
        if outcome.error is None or outcome.interrupted or job.shortage is None or not job.shortage.noted:
            return None
        left = left_step(job.folder)
        if left is not None:
            outcome.error, snapshot = left
            self._store.keep(snapshot, 0)
        error = outcome.error
        less = self._with_less(decision, error) if hasattr(error, WHERE) else None
        if less is None:
            outcome.hooks_ran = False
            error.add_note("autopar: the run ends, as no plan that it may use takes less memory than the one that ran out of it")
            return None
        learn_shortage(decision.report, error)
        run_plan = less.run_plan
        what = "validations" if self._fits else "each batch"
        evaluated = f", with {what} in {run_plan.evaluation_parts} parts{' a batch' * self._fits}" if run_plan.evaluation_parts > 1 else ""
        known = f"; {run_plan.unknown}" if run_plan.unknown else ""
        _LOG.warning(
            f"autopar: {getattr(error, WHERE)} ({type(error).__name__}: {error}). {self._goes_on_from(error, left is not None)} under the "
            f"plan {run_plan.plan.title()!r}{evaluated}{known}"
        )
        if self.snapshot is None and self._fits:  # before anybody looks for the last checkpoint
            CheckpointJournal(self._folder / BEGIN).undo(self._trainer.strategy.remove_checkpoint)
        return less

    def _goes_on_from(self, error: BaseException, left: bool) -> str:
        if not self._fits:
            return f"{stage_of(self._trainer)}() begins again, with the same samples and the same random numbers,"
        if left:
            return "The batch is run again, with the same samples and the same random numbers, and the run goes on"
        if self.snapshot is not None:
            return "The run goes back to its latest snapshot, and on from there, with the same samples and the same random numbers,"
        if getattr(error, AT_FIRST, False):
            return "Nothing had been trained yet, so the run begins again"
        return "The run had no snapshot yet, so it begins again, with the same samples and the same random numbers,"

    def _with_less(self, decision: Decision, error: BaseException) -> Decision | None:
        inventory = self._strategy.inventory(fewer=True)[0]
        fitted = None if self._files is None else self._files.rendezvous.samples_at_once()
        self._samples_at_once = min([each for each in (self._samples_at_once, fitted) if each is not None], default=None)
        found = in_more_parts(self._trainer, decision, inventory) if getattr(error, IN_STEP, False) else None
        if found is not None:
            self._samples_at_once = samples_at_once(found)
        found = found or in_more_evaluation_parts(decision, error)
        if found is None:
            self._avoided.lower(decision.run_plan.reserved_bytes)
            left = self._avoided.without(inventory)
            try:
                found = in_parts_of(
                    self._samples_at_once, self._trainer, decide_again(self._trainer, self._first, left, elastic=False), left
                )
            except (NothingFits, ValueError):  # the second where a pinned plan's device is gone
                return self._again(decision)
        parts = max(decision.run_plan.evaluation_parts, found.run_plan.evaluation_parts)
        found = replace(found, run_plan=replace(found.run_plan, evaluation_parts=parts))
        short = self._strategy.leases.take(found.run_plan.needed_bytes, self._strategy.devices_now)
        return found if short is None else None

    def _again(self, decision: Decision) -> Decision | None:
        """No plan takes less: the same one again, once at each step, as new processes have no memory in pieces."""
        self._avoided.lift()
        step = 0 if self._files is None else self._files.rendezvous.furthest_step()
        if step in self._tried:
            return None
        self._tried.add(step)
        return decision
