"""The trial: runs the best plans for some steps on the user's own batches, and takes the fastest.

Each plan runs in a forked child with workers of its own, without callbacks, loggers and checkpoints: the run itself starts as if there had
been no trial. Knows decisions and generations; nothing of how plans are predicted.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_autopar._fork import ChildFailed, run_forked, unforkable
from lightning_autopar._lightning import BaseFinetuning, GradientAccumulationScheduler, Trainer, rank_zero_warn
from lightning_autopar.report.report import Candidate
from lightning_autopar.strategies.base.run_plan import RunPlan
from lightning_autopar.strategies.calibration.calibration import be_silent
from lightning_autopar.strategies.preparation.decision import Decision
from lightning_autopar.strategies.processes.handover import back_to_script as handover
from lightning_autopar.strategies.processes.worker import WorkerJob
from lightning_autopar.strategies.processes.worker_supervisor import run_folder, run_generation
from lightning_autopar.text import format_seconds

log = logging.getLogger(__name__)

#: How many plans are tried, and at most how many times as long as the best they may be predicted to take.
_MOST_PLANS, _MOST_TIMES = 3, 2.0
#: Steps of each trial: the first four aren't timed (no optimizer state; memory is recorded), and the rest should take about so long.
_WARM_UP, _LEAST_STEPS, _MOST_STEPS, _SECONDS = 4, 4, 40, 4.0
#: A trial is given up when a step takes so many times as long as predicted, or everything around the steps takes so long.
_LATE, _AROUND_SECONDS = 20.0, 120.0
#: Plans whose measured times differ by less count as equally fast: then the prediction decides.
_NOISE = 0.03
#: Callbacks that change what a step computes, and leave nothing behind: a trial keeps them.
_KEPT = (BaseFinetuning, GradientAccumulationScheduler)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one plan's trial.

    Args:
        step_seconds: of the slowest rank; None where the trial didn't finish.
        reason: why not.
    """

    step_seconds: float | None
    reason: str = ""


#: Runs a plan for a number of steps.
Run = Callable[[RunPlan, int, float], Outcome]


def tried(decision: Decision, trainer: Trainer, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Decision:
    """The decision for the fastest of the best plans, after a trial of each; the given decision where there is nothing to try.

    Args:
        decision: as it was predicted.
        trainer: with module and data attached; it stays as it is.
        function: the trainer's ``_fit_impl``.
        arguments: its arguments, by name.
    """
    if (reason := unforkable()) is not None:
        rank_zero_warn(f"autopar: no plan is tried, as {reason} and none can be run beside it; set calibrate='auto'")
        return decision

    def run(run_plan: RunPlan, steps: int, timeout_seconds: float) -> Outcome:
        try:
            seconds = run_forked(run_steps, run_plan, trainer, function, arguments, steps, timeout_seconds=timeout_seconds, gpus=True)
        except ChildFailed as error:
            log.debug("a plan's trial failed", exc_info=True)
            return Outcome(step_seconds=None, reason=error.reason)
        return Outcome(step_seconds=seconds, reason="" if seconds else "it had too few steps")

    return choose(decision, run)


def choose(decision: Decision, run: Run, *, clock: Callable[[], float] = time.monotonic) -> Decision:
    """The decision for the plan that is fastest when ``run`` runs it.

    Args:
        decision: as it was predicted.
        run: runs a plan for some steps.
        clock: seconds, for what the trial took.
    """
    report = decision.report
    finalists = _finalists(report.candidates)
    if len(finalists) < 2:
        return decision
    begun = clock()
    found: dict[int, Outcome] = {}
    for index in finalists:
        candidate = report.candidates[index]
        steps = _steps(candidate)
        timeout = _AROUND_SECONDS + _LATE * (steps + _WARM_UP) * candidate.step_seconds
        found[index] = run(assigned(decision, candidate), steps + _WARM_UP, timeout)
    took = clock() - begun
    for index, outcome in found.items():
        if outcome.step_seconds is None:
            rank_zero_warn(f"autopar: the trial of {report.candidates[index].plan.title()} measured no step time: {outcome.reason}")
    times = {index: outcome.step_seconds for index, outcome in found.items() if outcome.step_seconds is not None}
    if len(times) < 2:
        return decision
    fastest = min(times.values())
    best = next(index for index in sorted(times) if times[index] <= fastest * (1 + _NOISE))
    candidates = list(report.candidates)
    for index, seconds in times.items():
        told = f"{format_seconds(seconds)} a step in the trial"
        candidates[index] = replace(candidates[index], learned=(*candidates[index].learned, told))
    others = ", ".join(f"{candidates[index].plan.title()} {format_seconds(times[index])}" for index in sorted(times) if index != best)
    reason = (
        f"the fastest of {len(times)} plans tried on this run's batches, {format_seconds(times[best])} a step ({others}); the trial took "
    )
    plan = candidates[best].plan
    chosen = replace(candidates[best], plan=replace(plan, reasons=(*plan.reasons, reason + format_seconds(took))))
    ordered = (chosen, *(candidate for index, candidate in enumerate(candidates) if index != best))
    changed = replace(decision, report=replace(report, candidates=ordered, best_index=0))
    return replace(changed, run_plan=assigned(changed, chosen))


def assigned(decision: Decision, candidate: Candidate) -> RunPlan:
    """The decision's run plan with another plan."""
    devices = tuple(decision.report.inventory.device(device) for device in candidate.plan.devices)
    return replace(decision.run_plan, plan=candidate.plan, devices=devices, candidate=candidate)


def _finalists(candidates: Sequence[Candidate]) -> list[int]:
    """The plans worth a trial, the best first; one of each engine before a second of the same engine."""
    fitting = [index for index, candidate in enumerate(candidates) if candidate.fits and candidate.seconds is not None]
    if not fitting:
        return []
    most = _MOST_TIMES * candidates[fitting[0]].step_seconds
    close = [index for index in fitting if candidates[index].step_seconds <= most]
    first = {candidates[index].plan.engine: index for index in reversed(close)}
    return sorted(sorted(close, key=lambda index: (index != first[candidates[index].plan.engine], index))[:_MOST_PLANS])


def _steps(candidate: Candidate) -> int:
    return max(_LEAST_STEPS, min(_MOST_STEPS, math.ceil(_SECONDS / max(candidate.step_seconds, 1e-6))))


# -- in a forked child -----------------------------------------------------------------------------------------------------------------


def run_steps(run_plan: RunPlan, trainer: Trainer, function: Callable[..., Any], arguments: Mapping[str, Any], steps: int) -> float | None:
    """Seconds of a step under a plan; the trainer is this process's own copy, and nothing that it writes or logs is kept."""
    be_silent()
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks[:] = [callback for callback in callbacks if isinstance(callback, _KEPT)]
    trainer.loggers = []
    trainer.limit_val_batches = trainer.num_sanity_val_steps = 0
    loop: Any = trainer.fit_loop
    loop.max_epochs, loop.min_epochs, loop.epoch_loop.min_steps = -1, 0, None
    loop.epoch_loop.max_steps = steps * trainer.accumulate_grad_batches
    with run_folder(1 << 20) as folder:
        job = WorkerJob(
            run_plan=replace(run_plan, from_snapshot=False),
            make_engine=trainer.strategy.make_engine,  # type: ignore[attr-defined]  # the user's AutoParallelStrategy
            trainer=trainer,
            function=function,
            args=(),
            kwargs={**arguments, "ckpt_path": None},
            folder=folder,
            before=handover.survey(trainer),
        )
        outcome = run_generation(job)
    if outcome.error is not None:
        raise outcome.error
    taken = [left.measured.step_seconds for left in outcome.results]
    return max((seconds for seconds in taken if seconds is not None), default=None)
