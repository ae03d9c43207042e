"""A chosen plan confirmed before it is taken: what tracing didn't try is tried in a forked child.

It reads the trainer and changes nothing in it; it doesn't know which plans there are beside.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning_autopar._clean import CannotTravel, run_clean
from lightning_autopar._fork import ChildFailed
from lightning_autopar.memory.footprint import Conduct, Footprint
from lightning_autopar.memory.rehearsal import STEPS
from lightning_autopar.memory.trace import first_batch
from lightning_autopar.planning.candidates import Constraints
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.check import Check, not_made
from lightning_autopar.strategies.decision import Look
from lightning_autopar.strategies.findings import Findings, stage_of, validation_batch
from lightning_autopar.strategies.rehearse_fsdp import rehearse_fsdp
from lightning_autopar.strategies.rehearse_zero import rehearse_zero
from lightning_autopar.strategies.staged.finding import StagingFinding, refused
from lightning_autopar.strategies.staged.probe import confirm_stages, precision_of

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

log = logging.getLogger(__name__)

#: The trial of a plan's stages may take so long.
_CONFIRM_SECONDS = 180.0


def after_trial(trainer: Trainer, look: Look, plan: Plan) -> Constraints:
    """The constraints, with what a trial of the plan found out; only what tracing didn't try is tried."""
    constraints, findings = look.constraints, look.findings
    refusal, what = None, str(plan.engine)
    if plan.engine == "pipeline" and findings.staging is not None and findings.staging.untried is not None:
        confirmed = confirm(trainer, findings.footprint, plan.cuts)
        refusal = confirmed.staging.refusal
        if refusal is None and confirmed.untried is None:
            return replace(constraints, pipeline_notes=())
        refusal = refusal or unstaged(findings.footprint.conduct, str(confirmed.untried))
    elif findings.footprint.training and _to_rehearse(plan, findings):
        refusal = rehearse(trainer, findings.footprint, plan).refusal
        what = "zero_3" if plan.zero_stage == 3 else what
    if refusal is None:
        return constraints
    # Sharded on several devices it was rehearsed already, but for what the plan does besides.
    ruled_out = [what] if plan.engine != "fsdp" or plan.world_size == 1 else ["offload", "replicas"]
    return replace(constraints, excluded={**constraints.excluded, **dict.fromkeys(ruled_out, refusal)})


def unstaged(conduct: Conduct | None, untried: str) -> str | None:
    """Why a pipeline whose stages can't be tried isn't taken; None where the traced step does nothing that stages may do otherwise.

    Args:
        conduct: what the step does with parameters by themselves; None where it wasn't traced.
        untried: why they can't be tried, as the end of a sentence.
    """
    if conduct is None:
        return not_made(f"{untried}, and it couldn't be traced either").reason
    names = (*dict(conduct.written), *conduct.exchanged)
    return not_made(f"{untried}, and it writes to the parameter {names[0]!r} by itself").reason if names else None


def _to_rehearse(plan: Plan, findings: Findings) -> bool:
    """Whether there is something in a plan that planning hasn't tried."""
    if plan.engine != "fsdp":
        return plan.engine == "zero"
    return plan.world_size == 1 or ((bool(plan.offload) or plan.replicas > 1) and findings.footprint.configures_model)


def confirm(trainer: Trainer, footprint: Footprint, cuts: Sequence[str]) -> StagingFinding:
    """Whether stages cut so compute what the whole module does, where they were only recorded so far: tried in a forked child.

    Returns:
        With a refusal where they don't, or where that can't be told; with ``untried`` where the step is too large to be tried.
    """
    try:
        return run_clean(_confirm, trainer, footprint, tuple(cuts), timeout_seconds=_CONFIRM_SECONDS)
    except (ChildFailed, CannotTravel) as error:
        log.debug("the plan's stages can't be tried", exc_info=True)
        return refused(not_made(_why(error)).reason)


def _confirm(trainer: Trainer, footprint: Footprint, cuts: tuple[str, ...]) -> StagingFinding:
    module = trainer.lightning_module
    stage = stage_of(trainer)
    batches = {STEPS[stage]: first_batch(module, trainer, stage)}
    if stage == "fit" and (validation := validation_batch(module, trainer)) is not None:
        batches[STEPS["validate"]] = validation
    precision = precision_of(str(trainer.precision))
    return confirm_stages(module, trainer, batches, stage, cuts, precision=precision, flops=footprint.flops)


def rehearse(trainer: Trainer, footprint: Footprint, plan: Plan) -> Check:
    """Whether a plan that shards or partitions runs the training step as one process does, tried in a forked child.

    Args:
        trainer: with module and data attached.
        footprint: of its step.
        plan: of engine ``"zero"``, or ``"fsdp"``.
    """
    try:
        return run_clean(_rehearse, trainer, footprint, plan, timeout_seconds=_CONFIRM_SECONDS)
    except (ChildFailed, CannotTravel) as error:
        log.debug("the plan can't be rehearsed", exc_info=True)
        return not_made(_why(error))


def _why(error: ChildFailed | CannotTravel) -> str:
    return error.reason if isinstance(error, CannotTravel) else f"trying it came to no end ({error.reason})"


def _rehearse(trainer: Trainer, footprint: Footprint, plan: Plan) -> Check:
    module = trainer.lightning_module
    first = first_batch(module, trainer, "fit")
    told: Any = {"flops": footprint.flops, "conduct": footprint.conduct}
    if plan.engine == "fsdp":
        return rehearse_fsdp(module, trainer, first, plan.shard, by_plan=bool(plan.offload) or plan.replicas > 1, **told)
    return rehearse_zero(module, trainer, first, plan, **told)
