"""Decide on a plan for one call of the trainer: trace in a forked child, probe the split, rule out what this run can't use, plan.

It reads the trainer and changes nothing in it; it doesn't know how a plan is executed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_autopar._fork import ChildFailed, run_forked
from lightning_autopar._lightning_compat import TrainerFn, is_overridden, verify_configuration
from lightning_autopar.memory.allocator_options import options_from_environment
from lightning_autopar.memory.batch import FirstBatch
from lightning_autopar.memory.cache_files import cache_folder
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.guess import guess
from lightning_autopar.memory.inventory import Inventory
from lightning_autopar.memory.residual_cache import load_residuals
from lightning_autopar.memory.residuals import Residuals
from lightning_autopar.memory.trace import first_batch, trace
from lightning_autopar.planning.calibrate import Calibrated
from lightning_autopar.planning.candidates import Constraints, SplitFinding, shardable
from lightning_autopar.planning.planner import make_report
from lightning_autopar.planning.report import Candidate, Report
from lightning_autopar.plans import Engine, Plan
from lightning_autopar.state.snapshot import is_snapshot
from lightning_autopar.strategies.backward import backward_survives_fork
from lightning_autopar.strategies.calibration import calibrate, calibrated
from lightning_autopar.strategies.draws import DrawPlan
from lightning_autopar.strategies.engine import Assignment, BatchRule
from lightning_autopar.strategies.failure import Failure
from lightning_autopar.strategies.features import exclusions
from lightning_autopar.strategies.micro import why_whole
from lightning_autopar.strategies.probe import pads, probe_evaluation, probe_split
from lightning_autopar.strategies.rehearse import rehearse_fsdp, unshardable

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

log = logging.getLogger(__name__)

#: Tracing and probing together may take so long; after that the estimate is coarse, and the report says so.
_TRACE_SECONDS = 600.0
#: Why a forked child may be unable to run a backward pass.
_THREADS = "autograd's threads for the GPU were started"
#: From this size on, a module is built whole on rank 0 alone.
_LARGE_BYTES = 1024**3


CalibrationRule = Literal["auto", "now", "off", "trial"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The strategy's arguments, checked."""

    allow: tuple[Engine, ...]
    memory_limit_bytes: int | None = None
    memory_margin: float = 0.05
    batch: BatchRule = "global"
    plan: Plan | None = None
    objective: str = "speed"
    exact: bool = False
    calibrate: CalibrationRule = "off"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The report, and the assignment of its best plan."""

    report: Report
    assignment: Assignment

    @property
    def candidate(self) -> Candidate:
        """The chosen candidate."""
        candidate = self.report.best_candidate
        assert candidate is not None
        return candidate

    def announce(self) -> None:
        """Log the table and the notes of the chosen candidate, once, on rank 0."""
        rank_zero_info(f"autopar:\n{self.report}")
        for note in self.candidate.notes:
            rank_zero_warn(f"autopar: {note}")


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What the forked child found out about the module."""

    footprint: Footprint
    split: SplitFinding | None
    draws: DrawPlan | None
    data_draws: tuple[str, ...]
    unshardable: str | None
    several_loaders: bool = False
    whole: str | None = None


def decide(
    trainer: Trainer,
    settings: Settings,
    bound: tuple[Inventory, int | None],
    *,
    arguments: Mapping[str, Any] | None = None,
    world_size: int | None = None,
) -> Decision:
    """The best plan for what the trainer is about to do.

    Args:
        trainer: with module and data attached.
        arguments: those of the trainer's function, by name.
        settings: the strategy's.
        bound: the devices to choose from, and at most how many of them.
        world_size: the number of processes, where somebody else has started them: then a plan uses exactly as many devices.

    Raises:
        NothingFits: if no plan fits.
        ValueError: if the devices can only be planned for, or a pinned plan can't be run here.
    """
    inventory = bound[0]
    arguments = arguments or {}
    if all(device.kind == "catalogue" for device in inventory.devices):
        names = ", ".join(device.id for device in inventory.devices) or "none"
        raise ValueError(f"devices {names} can be planned for, not run on; give devices that are here, such as devices='2xcpu:4GiB'")
    report, findings = survey(trainer, settings, bound, world_size=world_size)
    plan = report.best
    assert plan is not None, "make_report raises where nothing fits"
    return Decision(
        report=report,
        assignment=Assignment(
            plan=plan,
            devices=tuple(inventory.device(device) for device in plan.devices),
            batch=settings.batch,
            draws=findings.draws,
            data_draws=findings.data_draws,
            log_rules=findings.split.log_rules if findings.split is not None else {},
            from_snapshot=is_snapshot(arguments.get("ckpt_path")),
            weights_only=arguments.get("weights_only"),
            large=findings.footprint.parameter_bytes >= _LARGE_BYTES,
            candidate=report.best_candidate,
            budgets=report.budgets,
        ),
    )


def survey(
    trainer: Trainer, settings: Settings, bound: tuple[Inventory, int | None], *, world_size: int | None = None
) -> tuple[Report, Findings]:
    """Every plan for what the trainer is about to do, also on devices that can only be planned for. Arguments as :func:`decide`'s.

    Raises:
        NothingFits: if no plan fits.
        ValueError: if a pinned plan can't be run on these devices.
    """
    inventory, max_devices = bound
    probe, gpu = _splits(inventory, settings, max_devices), any(device.kind != "cpu" for device in inventory.devices)
    sharded = _several(inventory, max_devices) and "fsdp" in settings.allow
    verify_configuration(trainer)  # in Lightning's own words what it would say later
    findings = _found(trainer, probe, _room_bytes(inventory, settings), sharded, gpu)
    training = findings.footprint.training
    excluded = exclusions(trainer, findings.footprint)
    if findings.unshardable is not None:
        excluded.setdefault("fsdp", findings.unshardable)
    if findings.several_loaders:
        excluded.setdefault("shares", "the step's batch comes from several loaders, whose parts would weigh differently on each device")
    if findings.whole is not None:
        excluded.setdefault("micro_batches", findings.whole)
    rates = _rates(trainer, settings, inventory, max_devices)
    constraints = Constraints(
        allow=settings.allow,
        max_devices=max_devices if world_size is None else world_size,
        min_devices=world_size,
        memory_limit_bytes=settings.memory_limit_bytes,
        memory_margin=settings.memory_margin,
        objective="memory" if settings.objective == "memory" else "speed",
        exact=settings.exact,
        precision=str(trainer.precision),
        pinned=settings.plan,
        excluded=excluded,
        split=findings.split if settings.batch == "global" else None,
        split_batch=settings.batch == "global",
        allocator=options_from_environment(os.environ),
        residuals=_residuals(trainer, inventory, rates) if training else Residuals(),
    )
    return make_report(findings.footprint, inventory, constraints, rates=rates), findings


def _residuals(trainer: Trainer, inventory: Inventory, rates: Calibrated | None) -> Residuals:
    """What earlier runs of the module took here."""
    by = {} if rates is None else {"rates": rates.identity}
    return load_residuals(trainer.lightning_module, str(trainer.precision), inventory, **by)


def _rates(trainer: Trainer, settings: Settings, inventory: Inventory, max_devices: int | None) -> Calibrated | None:
    """What this machine was measured to reach; None for data sheets.

    Measuring takes seconds, once: worth it where plans of several devices are to be compared, by a run that will take longer than that.
    """
    if settings.calibrate == "off" or any(device.kind == "catalogue" for device in inventory.devices):
        return None
    if settings.calibrate == "now":
        return calibrate(inventory, again=True)
    compares = _several(inventory, max_devices) and settings.plan is None and settings.allow != ("single",)
    long = trainer.state.fn == TrainerFn.FITTING and not getattr(trainer, "fast_dev_run", False)
    if settings.calibrate == "trial" or (compares and long and cache_folder("rates") is not None):
        return calibrate(inventory)
    return calibrated(inventory)


def _found(trainer: Trainer, probe: bool, room_bytes: int | None, sharded: bool, gpu: bool) -> Findings:
    """What the forked child finds out; a coarse estimate where it takes too long or is killed.

    Raises:
        BaseException: what the user's own ``prepare_data``, ``setup`` or loader raised, with the child's traceback as its cause.
        RuntimeError: if not even the first batch can be had.
    """
    try:
        if backward_survives_fork():
            findings = run_forked(_find, trainer, probe, room_bytes, sharded, gpu, timeout_seconds=_TRACE_SECONDS)
        else:
            findings = _find_here(trainer, gpu)
    except ChildFailed as error:
        rank_zero_warn(f"autopar: the step could not be looked at, so that memory and time are guessed: {error.reason}")
        try:
            findings = run_forked(_guess, trainer, error.reason, timeout_seconds=_TRACE_SECONDS)
        except ChildFailed as again:
            raise RuntimeError(
                f"planning needs the run's first batch, and couldn't have it: {again.reason}; "
                "look whether the loader gives a batch by itself, as in next(iter(loader))"
            ) from again
    if isinstance(findings, Failure):
        raise findings.exception()
    return findings


def _splits(inventory: Inventory, settings: Settings, max_devices: int | None) -> bool:
    """Whether any candidate would split the batch, so that the probe has something to say."""
    if settings.batch != "global":
        return False
    if settings.plan is not None:
        return settings.plan.world_size > 1 or settings.plan.micro_batches > 1
    return _several(inventory, max_devices) and any(engine != "single" for engine in settings.allow)


def _room_bytes(inventory: Inventory, settings: Settings) -> int | None:
    """From where on a step is so large that one device may have to work its batch off in parts; None where no plan does."""
    if settings.batch != "global" or settings.plan is not None:
        return None
    free = max(device.free_bytes for device in inventory.devices)
    return min(free, free if settings.memory_limit_bytes is None else settings.memory_limit_bytes) // 2


def _several(inventory: Inventory, max_devices: int | None) -> bool:
    return min(len(inventory.devices), max_devices or len(inventory.devices)) > 1


def _find(trainer: Trainer, probe: bool, room_bytes: int | None, sharded: bool, gpu: bool) -> Findings | Failure:
    """In the forked child: the user's first batch, the traced step, and whether it survives shards and its batch being split."""
    module = trainer.lightning_module
    stage = str(trainer.state.fn.value) if trainer.state.fn is not None else "fit"
    try:
        batch = first_batch(module, trainer, stage)
    except Exception as error:  # the user's own code, which would raise it in the run as well
        return Failure.of(error)
    validation = _validation_batch(module, trainer) if stage == "fit" else None
    footprint = trace(
        module,
        trainer,
        batch,
        stage=stage,
        precision=str(trainer.precision),
        target="cuda" if gpu else "cpu",
        validation=validation,
    )
    probe = probe or (stage == "fit" and room_bytes is not None and _step_bytes(footprint) > room_bytes)
    refusal = None
    if sharded:
        units = shardable(footprint)[0]
        refusal = rehearse_fsdp(module, trainer, batch, units, flops=footprint.flops) if stage == "fit" else unshardable(module)
    # An evaluation has no loss that anything is trained on; what it draws is told by shape.
    split, draws = None, DrawPlan() if footprint.random_draws else None
    if probe and stage == "fit":
        batch = _collated_whole(batch)
        # Where collating draws random numbers or pads, ranks take their rows of the collated batch, and so does the probe.
        probed = replace(batch, samples=None, collate=None) if "collate" in batch.draws else batch
        split, draws = probe_split(module, trainer, probed, flops=footprint.flops)
        if refusal is None and sharded:
            refusal = _routed(module, split.uneven_calls, units)
    if probe and stage != "predict":
        split = _with_evaluation(split or SplitFinding(), module, trainer, validation if stage == "fit" else batch, stage)
    return Findings(
        footprint=footprint,
        split=split,
        draws=draws,
        data_draws=batch.draws,
        unshardable=refusal,
        several_loaders=batch.kind == "combined",
        whole=_whole(batch, stage),
    )


def _step_bytes(footprint: Footprint) -> int:
    """At most what a step takes on one device, but for what lies around it."""
    state = footprint.parameter_bytes + footprint.gradient_bytes + footprint.optimizer_bytes + footprint.buffer_bytes
    return state + footprint.activation_bytes + footprint.temporary_bytes + footprint.input_bytes


def _whole(batch: FirstBatch, stage: str) -> str | None:
    """Why a training step's batch can't be worked off in parts; None where it can."""
    return why_whole(batch.batch, several=batch.kind == "combined") if stage == "fit" else None


def _find_here(trainer: Trainer, gpu: bool) -> Findings | Failure:
    """The same where no forked child can run a backward pass: the batches come from a child, the step is traced on a fake copy in here.

    What needs backward passes on real copies isn't looked at: how a split changes the loss, and whether the step survives shards.
    """
    module = trainer.lightning_module
    stage = str(trainer.state.fn.value) if trainer.state.fn is not None else "fit"
    batches = run_forked(_batches, trainer, stage, timeout_seconds=_TRACE_SECONDS)
    if isinstance(batches, Failure):
        return batches
    batch, validation = batches
    footprint = trace(
        module, trainer, batch, stage=stage, precision=str(trainer.precision), target="cuda" if gpu else "cpu", validation=validation
    )
    return Findings(
        footprint=footprint,
        split=SplitFinding(probed=False, reason=f"{_THREADS} before this run, so that no copy of the step could be run"),
        draws=DrawPlan(),
        data_draws=batch.draws,
        unshardable=unshardable(module),
        several_loaders=batch.kind == "combined",
        whole=_whole(batch, stage),
    )


def _batches(trainer: Trainer, stage: str) -> tuple[FirstBatch, FirstBatch | None] | Failure:
    """In a forked child: the first batches, without what makes them, which may not travel."""
    module = trainer.lightning_module
    try:
        batch = first_batch(module, trainer, stage)
    except Exception as error:  # as in _find
        return Failure.of(error)
    validation = _validation_batch(module, trainer) if stage == "fit" else None
    if stage == "fit":
        batch = _collated_whole(batch)
    return replace(batch, samples=None, collate=None), None if validation is None else replace(validation, samples=None, collate=None)


def _collated_whole(batch: FirstBatch) -> FirstBatch:
    """The batch, marked as one that ranks must collate whole if its samples are padded to the longest: a part would be padded otherwise."""
    return replace(batch, draws=(*batch.draws, "collate")) if "collate" not in batch.draws and pads(batch) else batch


def _validation_batch(module: LightningModule, trainer: Trainer) -> FirstBatch | None:
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


def _with_evaluation(split: SplitFinding, module: LightningModule, trainer: Trainer, batch: FirstBatch | None, stage: str) -> SplitFinding:
    """The finding, with what was found out of the values that an evaluation step logs."""
    hook = "test_step" if stage == "test" else "validation_step"
    if not split.splittable or not is_overridden(hook, module) or batch is None:
        return split
    compared = probe_evaluation(module, trainer, batch, hook)
    return replace(split, log_rules={**split.log_rules, **compared.rules}, notes=(*split.notes, *compared.notes))


def _guess(trainer: Trainer, reason: str) -> Findings | Failure:
    """In another forked child: a footprint from the parameters and the first batch alone; nothing is known of a split or of draws."""
    module = trainer.lightning_module
    stage = str(trainer.state.fn.value) if trainer.state.fn is not None else "fit"
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
    )
