"""A run that keeps no snapshots goes on after a worker ran out of memory, under a plan that takes less: from the batch at which all ranks
have left its step, or anew if nothing was trained yet. Knows the generations' jobs and outcomes; not how a worker leaves a step.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_autopar._lightning_compat import TrainerFn
from lightning_autopar.report.report import NothingFits
from lightning_autopar.strategies.base.worker_exception import AT_FIRST, IN_STEP, WHERE
from lightning_autopar.strategies.elastic.run_state import AvoidedDevices
from lightning_autopar.strategies.preparation.decide import decide_again
from lightning_autopar.strategies.preparation.decision import Decision
from lightning_autopar.strategies.preparation.learning import learn_shortage
from lightning_autopar.strategies.preparation.smaller import in_more_parts
from lightning_autopar.strategies.processes.protocol import GenerationFiles, ShortageRendezvous, SnapshotRendezvous
from lightning_autopar.strategies.processes.shortage import left_step
from lightning_autopar.strategies.processes.worker import WorkerJob
from lightning_autopar.strategies.processes.worker_generation import Outcome

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_autopar.strategies.base.run_host import RunHost


#: No warning: one that somebody has turned into an exception would end the run.
_LOG = logging.getLogger(__name__)


class SmallerPlans:
    """The plans of one call of the trainer, each smaller than the one before it.

    Args:
        strategy: the user's.
        first: the first decision.
        trainer: of the run.
    """

    def __init__(self, strategy: RunHost, first: Decision, trainer: Trainer) -> None:
        self._strategy, self._first, self._trainer = strategy, first, trainer
        self._avoided: AvoidedDevices | None = None
        self._generations = 0
        self._goes_on = trainer.state.fn == TrainerFn.FITTING and first.look is not None and first.run_plan.batch == "global"

    def job(self, job: WorkerJob, snapshot: Path | None, folder: Path) -> WorkerJob:
        """The next generation's job.

        Args:
            job: with its plan.
            snapshot: what it goes on from, if anything.
            folder: the run's.
        """
        if not self._goes_on:
            return job
        self._generations += 1
        own = folder / f"g{self._generations}"
        own.mkdir()
        world_size, elastic = job.run_plan.plan.world_size, None
        if snapshot is not None:
            rendezvous = SnapshotRendezvous(world_size)
            rendezvous.final = True  # any other failure ends the run
            elastic = GenerationFiles(rendezvous=rendezvous, begin=get_context("fork").Event(), folder=own)
            elastic.let_begin(snapshot)
        return replace(job, folder=own, elastic=elastic, shortage=ShortageRendezvous(world_size))

    def after(self, outcome: Outcome, job: WorkerJob, decision: Decision, snapshot: Path | None) -> tuple[Decision, Path | None] | None:
        """The decision with which the run goes on, and the snapshot from which it does; None if it is over.

        Args:
            outcome: the generation's.
            job: the generation's.
            decision: its plan.
            snapshot: what the generation went on from.
        """
        left = left_step(job.folder) if self._goes_on and outcome.error is not None and not outcome.interrupted else None
        error, snapshot = left or (outcome.error, snapshot)
        if left is not None:
            outcome.error = error
        elif not self._goes_on or not getattr(error, AT_FIRST, False):
            return None
        assert error is not None
        less = self._with_less(decision, error)
        if less is None:
            outcome.hooks_ran = False
            return None
        learn_shortage(decision.report, error)
        batch = "The batch is run again, with the same samples and the same random numbers, and the run goes on"
        anew = "Nothing had been trained yet, so the run begins again"
        known = f"; {less.run_plan.unknown}" if less.run_plan.unknown else ""
        _LOG.warning(
            f"autopar: {getattr(error, WHERE)} ({type(error).__name__}: {error}). {anew if left is None else batch} under the plan "
            f"{less.run_plan.plan.title()!r}{known}"
        )
        return less, snapshot

    def _with_less(self, decision: Decision, error: BaseException) -> Decision | None:
        inventory = self._strategy.inventory(fewer=True)[0]
        found = in_more_parts(self._trainer, decision, inventory) if getattr(error, IN_STEP, False) else None
        if found is None:
            self._avoided = self._avoided or AvoidedDevices()
            self._avoided.lower(decision.run_plan.reserved_bytes)
            try:
                found = decide_again(self._trainer, self._first, self._avoided.without(inventory), elastic=False)
            except (NothingFits, ValueError):  # the second where a pinned plan's device is gone
                return None
        short = self._strategy.leases.take(found.run_plan.needed_bytes, self._strategy.devices_now)
        return found if short is None else None
