"""The batch size that ``BatchSizeFinder`` looks for, where a plan may have several devices.

Lightning's search runs batches until memory runs out. On several devices one rank would run out while others wait for it, so the search
asks the predictions instead: a size fits if some plan runs its global batch in one piece, with nothing recomputed or offloaded. The size
found is then traced as it is, and run for some steps under its plan. Where that fails, a smaller one is tried.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_autopar._fork import ChildFailed, run_forked
from lightning_autopar._lightning import BaseFinetuning, GradientAccumulationScheduler, Trainer, lightning_setattr, rank_zero_info
from lightning_autopar.memory.batch_scaling import scaled
from lightning_autopar.planning.make_report import best_candidate
from lightning_autopar.report.report import Candidate, NothingFits
from lightning_autopar.strategies.base.run_plan import RunPlan
from lightning_autopar.strategies.calibration.calibration import be_silent
from lightning_autopar.strategies.preparation.confirmed_plan import Prospect
from lightning_autopar.strategies.preparation.decision import Decision, PlanningInputs
from lightning_autopar.strategies.processes.worker import make_job
from lightning_autopar.strategies.processes.worker_supervisor import run_folder, run_generation

log = logging.getLogger(__name__)

#: Features that a plan may not use here: a size counts only if it fits without them.
_REMEDIES = ("micro_batches", "pipeline_parts", "recompute", "offload")
#: How long the trial of a size may take.
_TRIAL_SECONDS = 300.0
#: How many times as large a size is tried where the one that a search by halves came to fails.
_LESS = 0.9
#: Callbacks that change what a step computes, and leave nothing behind: a trial keeps them.
_KEPT = (BaseFinetuning, GradientAccumulationScheduler)


def find_batch_size(finder: Any, trainer: Trainer, prospects: Callable[[], Prospect], call: partial[Any]) -> Prospect:
    """Set the module's batch size to the largest that fits, and return what was found out about its step.

    Args:
        finder: the callback, which the trainer doesn't have now.
        prospects: finds out about the step with the batch size as it is then.
        call: of the trainer's ``_fit_impl``, with its arguments by name.

    Raises:
        NothingFits: if no plan fits.
    """

    def take(size: int) -> tuple[Prospect, Decision]:
        lightning_setattr(trainer.lightning_module, finder._batch_arg_name, size)
        prospect = prospects()
        return prospect, prospect.decision()

    prospect, decision = take(finder._init_val)
    look = decision.look
    assert look is not None, "it was made here"
    lengths = look.findings.footprint.lengths
    samples = lengths.of if lengths is not None and lengths.unit == "samples" else None
    size = searched(finder, lambda size: _in_one_piece(look, size) is not None, samples)
    while size > finder._init_val:
        try:
            prospect, decision = take(size)
            why = _why_not(decision, trainer, call, finder._steps_per_trial)
        except NothingFits as error:
            why = str(error).partition("\n")[0]
        if why is None:
            break
        size = max(finder._init_val, size // 2 if finder._mode == "power" else int(size * _LESS))
        rank_zero_info(f"autopar: BatchSizeFinder: a batch of that size was predicted to fit and doesn't, so {size} is tried: {why}")
    if size <= finder._init_val:
        prospect, decision = take(size)
    finder.optimal_batch_size = size
    whose = "each device's batch" if look.constraints.split_batch is False else "the global batch"
    tried = "" if size <= finder._init_val else "; some steps ran with it"
    rank_zero_info(
        f"autopar: BatchSizeFinder sets {whose} to {size}: of the sizes that it tries (mode={finder._mode!r}, init_val={finder._init_val}, "
        f"max_trials={finder._max_trials}, at most the dataset), this is the largest that is predicted to fit as it is{tried}"
    )
    return prospect


def searched(finder: Any, fits: Callable[[int], bool], samples: int | None) -> int:
    """The size that Lightning's search comes to (``tuner/batch_size_scaling.py``), where ``fits`` says which sizes run.

    Args:
        samples: of the dataset, beyond which no size is tried; None where nobody knows.
    """
    most = min(finder._max_val, finder._max_val if samples is None else max(finder._init_val, samples))
    good, bad, size = finder._init_val, None, finder._init_val
    for _ in range(finder._max_trials):
        if size > most or (bad is not None and bad - good <= 1):
            break
        if fits(size):
            good = size
        else:
            bad = size
            if finder._mode == "power":
                break
        size = min(2 * size, most) if bad is None else (good + bad) // 2
        if size == good:
            break
    return max(1, int(good * (1 - finder._margin))) if finder._mode == "binsearch" and finder._margin else good


def _in_one_piece(look: PlanningInputs, size: int | None = None) -> Candidate | None:
    """The best plan that runs a batch of so many samples as it is; of the traced batch unless given."""
    words = dict.fromkeys(_REMEDIES, "BatchSizeFinder looks for the batch that fits as it is")
    constraints = replace(look.constraints, excluded={**words, **look.constraints.excluded})
    footprint = look.findings.footprint if size is None else scaled(look.findings.footprint, size)
    return best_candidate(footprint, look.inventory, constraints, rates=look.rates)


def _why_not(decision: Decision, trainer: Trainer, call: partial[Any], steps: int) -> str | None:
    """Why the decision's batch doesn't run in one piece, by its own footprint or by some steps; None where it does."""
    assert decision.look is not None, "it was made here"
    candidate = _in_one_piece(decision.look)
    if candidate is None:
        return "its own step needs more than its size alone says"
    try:
        run_plan = replace(_assigned(decision, candidate), undivided="it is a trial of its size")
        run_forked(_run_steps, run_plan, trainer, call, steps, timeout_seconds=_TRIAL_SECONDS, gpus=True)
    except ChildFailed as error:
        log.debug("a batch size's trial failed", exc_info=True)
        return error.reason
    return None


def _assigned(decision: Decision, candidate: Candidate) -> RunPlan:
    """The decision's run plan with another plan."""
    devices = tuple(decision.report.inventory.device(device) for device in candidate.plan.devices)
    return replace(decision.run_plan, plan=candidate.plan, devices=devices, candidate=candidate)


def _run_steps(run_plan: RunPlan, trainer: Trainer, call: partial[Any], steps: int) -> None:
    """Run some steps of a plan, in a forked child: the trainer is its own copy, and nothing that it writes or logs is kept.

    Raises:
        BaseException: what ended them.
    """
    be_silent()
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks[:] = [callback for callback in callbacks if isinstance(callback, _KEPT)]
    trainer.loggers = []
    trainer.limit_val_batches = trainer.num_sanity_val_steps = 0
    loop: Any = trainer.fit_loop
    loop.max_epochs, loop.min_epochs, loop.epoch_loop.min_steps = -1, 0, None
    loop.epoch_loop.max_steps = steps * trainer.accumulate_grad_batches
    with run_folder(1 << 20) as folder:
        job = make_job(replace(run_plan, from_snapshot=False), trainer, partial(call, ckpt_path=None), folder)
        outcome = run_generation(job)
    if outcome.error is not None:
        raise outcome.error
