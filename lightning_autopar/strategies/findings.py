"""What planning finds out about a module in forked children: its footprint, and whether its step survives shards, stages and a split batch.

It reads the trainer and changes nothing in it; it doesn't know which plans there are.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lightning.pytorch.utilities import rank_zero_warn

from lightning_autopar._fork import ChildFailed, run_forked
from lightning_autopar._lightning_compat import is_overridden
from lightning_autopar.memory.batch import FirstBatch
from lightning_autopar.memory.fake import as_if_real, drawing_nothing, fake_copy, fake_mode
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.guess import guess
from lightning_autopar.memory.rehearsal import STEPS
from lightning_autopar.memory.trace import first_batch, trace
from lightning_autopar.planning.candidates import SplitFinding, shardable
from lightning_autopar.strategies.backward import backward_survives_fork
from lightning_autopar.strategies.batch_parts import pads
from lightning_autopar.strategies.draws import DrawPlan
from lightning_autopar.strategies.failure import Failure
from lightning_autopar.strategies.features_zero import unpartitioned_module, unpartitioned_optimizer
from lightning_autopar.strategies.micro import why_whole
from lightning_autopar.strategies.probe import probe_evaluation, probe_split
from lightning_autopar.strategies.rehearse import rehearsed
from lightning_autopar.strategies.rehearse_fsdp import rehearse_fsdp, unshardable
from lightning_autopar.strategies.staged.finding import StagingFinding, refused
from lightning_autopar.strategies.staged.probe import precision_of, probe_stages

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

log = logging.getLogger(__name__)

#: Tracing and probing together may take so long; after that the estimate is coarse, and the report says so.
_TRACE_SECONDS = 600.0
#: Why a forked child may be unable to run a backward pass.
_THREADS = "autograd's threads for the GPU were started"


@dataclass(frozen=True, kw_only=True)
class Questions:
    """What candidates there are to ask about.

    Args:
        split: whether some of them split the batch.
        room_bytes: from where on a step is so large that one device may have to work its batch off in parts; None where no plan does.
        sharded: whether some shard the module with FSDP2.
        partitioned: whether some partition it with DeepSpeed.
        staged: whether some run it in stages.
        gpu: whether there are devices other than the CPU.
    """

    split: bool = False
    room_bytes: int | None = None
    sharded: bool = False
    partitioned: bool = False
    staged: bool = False
    gpu: bool = False


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What was found out about the module.

    Args:
        footprint: of its step.
        split: what a split batch changes; None where no candidate splits it.
        draws: the step's random draws; None where it draws nothing.
        data_draws: where making a batch draws, see :class:`.assignment.Assignment`.
        unshardable: why FSDP2 can't run it; None where it can.
        unpartitionable: why DeepSpeed can't, by what the module and its optimizer are; None where that isn't known.
        ungathered: why it can't gather parameters module by module, at stage 3; None where it can.
        several_loaders: whether a batch comes from several of them.
        whole: why a training step's batch can't be worked off in parts; None where it can.
        staging: where it can be cut into stages; None where no candidate does so.
        counted: FQNs of buffers that a training step changes, which it would do once for each part of a batch.
        batches: training batches of the whole fit, at most; None where nobody knows, and where nothing is trained.
    """

    footprint: Footprint
    split: SplitFinding | None
    draws: DrawPlan | None
    data_draws: tuple[str, ...]
    unshardable: str | None
    unpartitionable: str | None = None
    ungathered: str | None = None
    several_loaders: bool = False
    whole: str | None = None
    staging: StagingFinding | None = None
    counted: tuple[str, ...] = ()
    batches: int | None = None


def find_out(trainer: Trainer, questions: Questions) -> Findings:
    """What the forked child finds out; a coarse estimate where it takes too long or is killed.

    Raises:
        BaseException: what the user's own ``prepare_data``, ``setup`` or loader raised, with the child's traceback as its cause.
        RuntimeError: if not even the first batch can be had.
    """
    try:
        if backward_survives_fork():
            findings = run_forked(_find, trainer, questions, timeout_seconds=_TRACE_SECONDS)
        else:
            findings = _find_here(trainer, questions)
    except ChildFailed as error:
        rank_zero_warn(f"autopar: the step could not be looked at, so that memory and time are guessed: {error.reason}")
        try:
            findings = run_forked(_guess, trainer, questions, error.reason, timeout_seconds=_TRACE_SECONDS)
        except ChildFailed as again:
            raise RuntimeError(
                f"planning needs the run's first batch, and couldn't have it: {again.reason}; "
                "look whether the loader gives a batch by itself, as in next(iter(loader))"
            ) from again
    if isinstance(findings, Failure):
        raise findings.exception()
    return findings


def _find(trainer: Trainer, questions: Questions) -> Findings | Failure:
    """In the forked child: the user's first batch, the traced step, and whether it survives shards and its batch being split."""
    module = trainer.lightning_module
    stage = stage_of(trainer)
    try:
        batch = first_batch(module, trainer, stage)
    except Exception as error:  # the user's own code, which would raise it in the run as well
        return Failure.of(error)
    validation = validation_batch(module, trainer) if stage == "fit" else None
    footprint = _traced(trainer, questions, batch, validation)
    room_bytes = questions.room_bytes
    probe = questions.split or (stage == "fit" and room_bytes is not None and _step_bytes(footprint) > room_bytes)
    unpartitionable = _unpartitionable(module, trainer) if questions.partitioned and stage == "fit" else None
    # What follows changes the module in this process.
    staging = _staged(module, trainer, stage, batch, validation, footprint) if questions.staged else None
    refusal = None
    if questions.sharded:
        units = shardable(footprint)[0]
        refusal = rehearse_fsdp(module, trainer, batch, units, flops=footprint.flops) if stage == "fit" else unshardable(module)
    # An evaluation has no loss that anything is trained on; what it draws is told by shape.
    split, draws = None, DrawPlan() if footprint.random_draws else None
    if probe and stage == "fit":
        batch = _collated_whole(batch)
        # Where collating draws random numbers or pads, ranks take their rows of the collated batch, and so does the probe.
        probed = replace(batch, samples=None, collate=None) if "collate" in batch.draws else batch
        split, draws = probe_split(module, trainer, probed, flops=footprint.flops)
        if refusal is None and questions.sharded:
            refusal = _routed(module, split.uneven_calls, units)
    if probe and stage != "predict":
        split = _with_evaluation(split or SplitFinding(), module, trainer, validation if stage == "fit" else batch, stage)
    return Findings(
        footprint=footprint,
        split=split,
        draws=draws,
        data_draws=batch.draws,
        unshardable=refusal,
        unpartitionable=unpartitionable,
        ungathered=None if split is None else _uneven(module, split.uneven_calls),
        several_loaders=batch.kind == "combined",
        whole=_whole(batch, stage),
        staging=staging,
        counted=(*(() if staging is None else staging.counted), *(() if split is None else split.counted)),
        batches=_batches_of_fit(trainer, batch),
    )


def _unpartitionable(module: LightningModule, trainer: Trainer) -> str | None:
    """What of the module as it will be built, and of its optimizer, DeepSpeed can't partition; a fake copy is built."""
    mode = fake_mode()
    try:
        with drawing_nothing(), as_if_real(None, "cpu"):
            copy = fake_copy(module, mode, None)
            with mode:
                rehearsal = rehearsed(copy, trainer)
                rehearsal.build()
                return unpartitioned_module(copy, str(trainer.precision)) or unpartitioned_optimizer(copy, rehearsal.optimizers)
    except Exception:  # tracing says why; what comes of it in a run, a rehearsal finds out
        log.debug("the optimizer can't be looked at", exc_info=True)
        return None


def _staged(
    module: LightningModule, trainer: Trainer, stage: str, batch: FirstBatch, validation: FirstBatch | None, footprint: Footprint
) -> StagingFinding:
    """Where the steps of the run can be cut into stages."""
    batches = {STEPS[stage]: batch}
    if validation is not None:
        batches[STEPS["validate"]] = validation
    return probe_stages(module, trainer, batches, stage, precision=precision_of(str(trainer.precision)), flops=footprint.flops)


def stage_of(trainer: Trainer) -> str:
    """What the trainer is about to do; ``"fit"`` where it doesn't say."""
    return str(trainer.state.fn.value) if trainer.state.fn is not None else "fit"


def _traced(trainer: Trainer, questions: Questions, batch: FirstBatch, validation: FirstBatch | None) -> Footprint:
    """The step as it will run on the devices there are."""
    return trace(
        trainer.lightning_module,
        trainer,
        batch,
        stage=stage_of(trainer),
        precision=str(trainer.precision),
        target="cuda" if questions.gpu else "cpu",
        validation=validation,
    )


def _step_bytes(footprint: Footprint) -> int:
    """At most what a step takes on one device, but for what lies around it."""
    state = footprint.parameter_bytes + footprint.gradient_bytes + footprint.optimizer_bytes + footprint.buffer_bytes
    return state + footprint.activation_bytes + footprint.temporary_bytes + footprint.input_bytes


def _whole(batch: FirstBatch, stage: str) -> str | None:
    """Why a training step's batch can't be worked off in parts; None where it can."""
    return why_whole(batch.batch, several=batch.kind == "combined") if stage == "fit" else None


def _find_here(trainer: Trainer, questions: Questions) -> Findings | Failure:
    """The same where no forked child can run a backward pass: the batches come from a child, the step is traced on a fake copy in here.

    What needs backward passes on real copies isn't looked at: how a split changes the loss, and whether the step survives shards.
    """
    module = trainer.lightning_module
    stage = stage_of(trainer)
    batches = run_forked(_batches, trainer, stage, timeout_seconds=_TRACE_SECONDS)
    if isinstance(batches, Failure):
        return batches
    batch, validation = batches
    footprint = _traced(trainer, questions, batch, validation)
    unpartitionable = _unpartitionable(module, trainer) if questions.partitioned and stage == "fit" else None
    return Findings(
        footprint=footprint,
        split=SplitFinding(probed=False, reason=f"{_THREADS} before this run, so that no copy of the step could be run"),
        draws=DrawPlan(),
        data_draws=batch.draws,
        unshardable=unshardable(module),
        unpartitionable=unpartitionable,
        several_loaders=batch.kind == "combined",
        whole=_whole(batch, stage),
        staging=refused(f"{_THREADS} before this run, so that no stages could be tried") if questions.staged else None,
        batches=_batches_of_fit(trainer, batch),
    )


def _batches(trainer: Trainer, stage: str) -> tuple[FirstBatch, FirstBatch | None] | Failure:
    """In a forked child: the first batches, without what makes them, which may not travel."""
    module = trainer.lightning_module
    try:
        batch = first_batch(module, trainer, stage)
    except Exception as error:  # as in _find
        return Failure.of(error)
    validation = validation_batch(module, trainer) if stage == "fit" else None
    if stage == "fit":
        batch = _collated_whole(batch)
    return replace(batch, samples=None, collate=None), None if validation is None else replace(validation, samples=None, collate=None)


def _batches_of_fit(trainer: Trainer, batch: FirstBatch) -> int | None:
    """Training batches from the first to the last, by the trainer's limits; from a checkpoint, or stopped early, it is fewer."""
    if stage_of(trainer) != "fit":
        return None
    an_epoch, epochs, steps, found = batch.epoch_batches, trainer.max_epochs, trainer.max_steps, []
    if an_epoch is not None and epochs is not None and epochs >= 0:
        found.append(an_epoch * epochs)
    if steps >= 0 and trainer.lightning_module.automatic_optimization:  # else a batch may have any number of steps
        each = trainer.accumulate_grad_batches
        if an_epoch:  # an epoch's last step may be of fewer batches
            whole, rest = divmod(steps, -(-an_epoch // each))
            found.append(whole * an_epoch + rest * each)
        else:
            found.append(steps * each)
    return min(found, default=None)


def _collated_whole(batch: FirstBatch) -> FirstBatch:
    """The batch, marked as one that ranks must collate whole if its samples are padded to the longest: a part would be padded otherwise."""
    return replace(batch, draws=(*batch.draws, "collate")) if "collate" not in batch.draws and pads(batch) else batch


def validation_batch(module: LightningModule, trainer: Trainer) -> FirstBatch | None:
    """The first batch of the validation within ``fit``; None where there is none. The limit of batches may be set, the sanity check off."""
    if not is_overridden("validation_step", module) or not trainer.limit_val_batches:
        return None
    try:
        return first_batch(module, trainer, "validate", prepared=True)
    except Exception:  # no validation data, or the user's loader fails: the run will say so
        log.debug("there is no validation batch to look at", exc_info=True)
        return None


def _routed(module: LightningModule, uneven_calls: Sequence[str], units: Sequence[str]) -> str | None:
    """Why the module can't be sharded where the samples decide which of its blocks are called: all ranks must gather a block together."""
    outermost = () if module.automatic_optimization else [name for name, _ in module.named_children()]
    for name in uneven_calls:
        if name in units or name in outermost:
            return f"the samples decide whether {name!r} is called (as with routed experts), and FSDP2 needs every rank to call every block"
    return None


def _uneven(module: LightningModule, uneven_calls: Sequence[str]) -> str | None:
    """The same under DeepSpeed's stage 3, which gathers parameters in the order in which a rank comes to them."""
    for name in uneven_calls:
        if next(module.get_submodule(name).parameters(), None) is not None:
            return (
                f"the samples decide whether {name!r} is called (as with routed experts), and ZeRO-3 needs every rank to call the same "
                "modules"
            )
    return None


def _with_evaluation(split: SplitFinding, module: LightningModule, trainer: Trainer, batch: FirstBatch | None, stage: str) -> SplitFinding:
    """The finding, with what was found out of the values that an evaluation step logs."""
    hook = "test_step" if stage == "test" else "validation_step"
    if not split.splittable or not is_overridden(hook, module) or batch is None:
        return split
    compared = probe_evaluation(module, trainer, batch, hook)
    return replace(split, log_rules={**split.log_rules, **compared.rules}, notes=(*split.notes, *compared.notes))


def _guess(trainer: Trainer, questions: Questions, reason: str) -> Findings | Failure:
    """In another forked child: a footprint from the parameters and the first batch alone; nothing is known of a split or of draws."""
    module = trainer.lightning_module
    stage = stage_of(trainer)
    try:
        batch = first_batch(module, trainer, stage)
    except Exception as error:  # as above
        return Failure.of(error)
    if stage == "fit":
        batch = _collated_whole(batch)
    footprint = guess(module, trainer, batch, stage=stage, dtype=None, reason=reason)
    split = SplitFinding(probed=False, reason=f"the step could not be looked at: {reason}")
    return Findings(
        footprint=footprint,
        split=split,
        draws=DrawPlan(),
        data_draws=batch.draws,
        unshardable=None,
        several_loaders=batch.kind == "combined",
        whole=_whole(batch, stage),
        staging=refused(f"the step could not be looked at: {reason}") if questions.staged else None,
        batches=_batches_of_fit(trainer, batch),
    )
