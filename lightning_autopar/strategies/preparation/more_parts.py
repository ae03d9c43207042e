"""The plan with which a run goes on after it ran out of memory: the same one in more micro-batches, or its validations in more parts.

Knows plans and their predictions; neither who ran out, nor from where the run goes on.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_autopar._lightning import Trainer
from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.report.report import NothingFits
from lightning_autopar.strategies.base.worker_exception import EVALUATED
from lightning_autopar.strategies.preparation.decision import Decision
from lightning_autopar.strategies.preparation.planning_inputs import decide_again


def in_more_parts(trainer: Trainer, decision: Decision, inventory: Inventory) -> Decision | None:
    """The same plan with each rank's batch in twice as many micro-batches; None where they can't be made. Whether it is predicted to take
    less doesn't count: a step ran out of memory that was predicted to fit.
    """
    plan = decision.run_plan.plan
    parts = min(2 * plan.micro_batches, _samples(decision))
    return _in(parts, trainer, decision, inventory) if parts > plan.micro_batches else None


def in_more_evaluation_parts(decision: Decision, error: BaseException) -> Decision | None:
    """The same plan with each batch of validations and tests in twice as many parts; None where that isn't what ran out, or doesn't help.

    Args:
        error: what ended it.
    """
    if getattr(error, EVALUATED, 1) <= 1:
        return None
    run_plan = decision.run_plan
    return replace(decision, run_plan=replace(run_plan, evaluation_parts=2 * run_plan.evaluation_parts))


def in_parts_of(most_samples: int | None, trainer: Trainer, decision: Decision, inventory: Inventory) -> Decision:
    """The decision, in as many micro-batches as it takes for no rank to run more samples at once than have fitted so far.

    Args:
        most_samples: how many have fitted; None where memory never ran out.
    """
    if most_samples is None or samples_at_once(decision) <= most_samples:
        return decision
    return _in(-(-_samples(decision) // most_samples), trainer, decision, inventory) or decision


def samples_at_once(decision: Decision) -> int:
    """How many samples a rank runs at once under a plan, at most."""
    return -(-_samples(decision) // decision.run_plan.plan.micro_batches)


def _samples(decision: Decision) -> int:
    """How many samples of a batch a rank has, at most."""
    return max(decision.run_plan.plan.rows(decision.report.footprint.batch_size or 1))


def _in(parts: int, trainer: Trainer, decision: Decision, inventory: Inventory) -> Decision | None:
    look, plan = decision.look, decision.run_plan.plan
    if look is None or decision.run_plan.undivided is not None:
        return None
    try:
        pinned = replace(plan, micro_batches=parts)
        found = decide_again(trainer, decision, inventory, plan=pinned, elastic=decision.run_plan.elastic)
    except (NothingFits, ValueError):  # an engine may refuse micro-batches, with a sentence
        return None
    assert found.look is not None, "it was made here"
    free = replace(found.look, constraints=replace(found.look.constraints, pinned=look.constraints.pinned))
    return replace(found, look=free)
