"""What planning is given for one call of the trainer: a forked child traces and probes its step, and what the run can't use is ruled out.

It reads the trainer and changes nothing in it; it doesn't know how a plan is executed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal

from lightning_autopar import engines
from lightning_autopar._fork import unforkable
from lightning_autopar._lightning import Trainer
from lightning_autopar._lightning_compat import TrainerFn, is_overridden, verify_configuration
from lightning_autopar.constraints import Constraints
from lightning_autopar.devices.inventory import Inventory, usable
from lightning_autopar.exact.data.rank_share import Dealing
from lightning_autopar.memory.allocator.options import options_from_environment
from lightning_autopar.memory.cuda_overhead import target_of
from lightning_autopar.memory.learned.cache_files import cache_folder
from lightning_autopar.memory.learned.memory_records import load_residuals
from lightning_autopar.planning.make_report import best_candidate
from lightning_autopar.planning.refusals import missing_packages, undivided, unknown_split
from lightning_autopar.plans import Engine, Plan, all_engines
from lightning_autopar.report.report import Report
from lightning_autopar.sharing.wait_options import Turn
from lightning_autopar.state.pretrained import check_values
from lightning_autopar.state.snapshot_folder import is_snapshot
from lightning_autopar.strategies.base.run_plan import BatchRule
from lightning_autopar.strategies.calibration.calibration import calibrate, calibrated, is_calibrated, things_of
from lightning_autopar.strategies.preparation.callback_copies import handed_over
from lightning_autopar.strategies.preparation.confirmed_plan import Prospect
from lightning_autopar.strategies.preparation.decision import Decision, PlanningInputs
from lightning_autopar.strategies.preparation.longest_footprint import without_margin
from lightning_autopar.strategies.preparation.module_findings import Findings, Questions, drawn_by_rank, find_out
from lightning_autopar.strategies.preparation.trainer_options import exclusions
from lightning_autopar.strategies.processes.users_script import NO_WORKERS, runs_script
from lightning_autopar.timing.measured_rates import MeasuredRates

log = logging.getLogger(__name__)

#: Said of plans whose engine hasn't looked at the first batch.
_NOT_LOOKED = "not checked on the first batch, as another plan was chosen"
CalibrationRule = Literal["auto", "now", "off"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The strategy's arguments, checked."""

    allow: tuple[Engine, ...]
    memory_limit_bytes: int | None = None
    memory_margin: float = 0.05
    batch: BatchRule = "global"
    own_draws: bool = False
    despite: tuple[str, ...] = ()
    plan: Plan | None = None
    objective: str = "speed"
    exact: bool = False
    calibrate: CalibrationRule = "off"
    wait: Turn = field(default_factory=Turn)


def find_prospect(
    trainer: Trainer,
    settings: Settings,
    bound: tuple[Inventory, int | None],
    *,
    arguments: Mapping[str, Any] | None = None,
    world_size: int | None = None,
    elastic: bool = False,
) -> Prospect:
    """Find out what planning needs to know of what the trainer is about to do.

    Args:
        arguments: those of the trainer's function, by name.
        bound: the devices to choose from, and at most how many of them.
        world_size: the number of processes, where a launcher has started them: a plan then uses exactly as many devices.
        elastic: whether planning for other devices may follow: then everything is found out that any plan may need.

    Raises:
        ValueError: if the devices can only be planned for, or the module has no values to run with.
    """
    inventory = usable(bound[0]) if usable(bound[0]).devices else bound[0]
    arguments = arguments or {}
    if all(device.kind == "catalogue" for device in inventory.devices):
        names = ", ".join(device.id for device in inventory.devices) or "none"
        raise ValueError(f"devices {names} can be planned for, not run on; give devices that are here, such as devices='2xcpu:4GiB'")
    if not is_overridden("configure_model", trainer.lightning_module):
        check_values(trainer.lightning_module)
    # A launcher's processes exist already.
    alone = NO_WORKERS if world_size is None and not runs_script() and unforkable() is not None else None
    # An elastic run may come to any engine's plan.
    later = not elastic and settings.plan is None
    look = look_at_step(trainer, settings, (inventory, bound[1]), world_size, elastic=elastic, later=later, alone=alone)
    from_snapshot, weights_only = is_snapshot(arguments.get("ckpt_path")), arguments.get("weights_only")
    return Prospect(trainer, look, batch=settings.batch, from_snapshot=from_snapshot, weights_only=weights_only, elastic=elastic)


def decide_again(
    trainer: Trainer, decision: Decision, inventory: Inventory, *, plan: Plan | None = None, elastic: bool = True, begun: bool = True
) -> Decision:
    """The best plan for the same run on the devices as they are now; what was found out about the module still counts.

    Args:
        decision: of :func:`find_prospect`'s plan.
        plan: if given, the only one that is considered.
        begun: whether the run has, so that its callbacks' copies of weights are handed over.

    Raises:
        NothingFits: if no plan fits.
        ValueError: if ``plan`` can't be run on these devices, or its engine wasn't asked for when the run began.
    """
    assert decision.look is not None, "it was made here"
    findings = decision.look.findings
    if begun:
        findings = replace(findings, footprint=handed_over(findings.footprint))
    look = replace(decision.look, inventory=inventory, findings=findings)
    if plan is not None:
        asked = {*look.findings.engines, *look.findings.later, *look.constraints.excluded}
        if plan.engine not in asked and type(engines.of(plan)).look is not engines.Engine.look:
            raise ValueError(
                f"the engine {plan.engine!r} hasn't looked at the run's first batch, so it isn't known whether it runs the step right; "
                "name it in allow, and pin no plan when the run begins"
            )
        look = replace(look, constraints=replace(look.constraints, pinned=plan))
    before = decision.run_plan
    again = Prospect(
        trainer, look, batch=before.batch, from_snapshot=before.from_snapshot, weights_only=before.weights_only, elastic=elastic
    )
    return again.decision()


def plan_only(trainer: Trainer, settings: Settings, bound: tuple[Inventory, int | None]) -> tuple[Report, Findings]:
    """Every plan for what the trainer is about to do, also on devices that can only be planned for. Arguments as :func:`find_prospect`'s.

    Raises:
        NothingFits: if no plan fits.
        ValueError: if a pinned plan can't be run on these devices.
    """
    look = look_at_step(trainer, settings, bound, None)
    return look.report, look.findings


def look_at_step(
    trainer: Trainer,
    settings: Settings,
    bound: tuple[Inventory, int | None],
    world_size: int | None,
    *,
    elastic: bool = False,
    later: bool = False,
    alone: str | None = None,
) -> PlanningInputs:
    """Find out all about the step, and turn it into constraints; with ``later``, without what only plans need that aren't chosen. ``alone``
    says why this process can't start others.
    """
    inventory, max_devices = bound
    several = alone is None and (has_several(inventory, max_devices) or (elastic and max_devices != 1))
    verify_configuration(trainer)  # raises now what Lightning would raise later
    on_gpus = any(device.kind == "cuda" for device in inventory.devices)
    excluded = exclusions(trainer, finds=alone is None and world_size is None and not elastic, on_gpus=on_gpus)
    if alone is not None:  # and engines whose ranks share their samples have several
        excluded |= dict.fromkeys(("multi", *(name for name in all_engines() if not engines.named(name).splits)), alone)

    def asked(engine: Engine) -> bool:
        return (engine in settings.allow if settings.plan is None else settings.plan.engine == engine) and engine not in excluded

    questions = Questions(
        split=_splits(settings, several),
        room_bytes=_room_bytes(inventory, settings),
        engines=tuple(filter(asked, all_engines())),
        later=later,
        several=several,
        excluded=dict(excluded),
        target=target_of(inventory.devices),
        despite=settings.despite,
    )
    findings = find_out(trainer, questions)
    if settings.own_draws:
        findings = drawn_by_rank(findings)
    most = min(len(inventory.devices), max_devices or len(inventory.devices))
    if findings.split is not None and (reason := unevenly_dealt(findings.together, range(2, max(2, most) + 1))) is not None:
        findings = replace(findings, split=replace(findings.split, splittable=False, reason=reason))
    training = findings.footprint.training
    for finding in findings.engines.values():
        for name, sentence in finding.refusals.items():
            if sentence is not None:
                excluded.setdefault(name, sentence)
    if findings.split is not None and findings.split.skips:
        words = "training_step returns None in some steps, where Lightning ends a run on several devices; return a loss in every step"
        excluded |= {name: words for name in all_engines() if engines.named(name).splits and engines.named(name).several} | excluded
    for engine, missing in missing_packages(inventory).items():
        excluded.setdefault(engine, missing)
    if findings.several_loaders:
        excluded.setdefault("shares", "the step's batch comes from several loaders, whose parts would weigh differently on each device")
    if findings.footprint.sharing is not None:
        excluded.setdefault("shares", "the ranks share the step's network, and each has the whole batch")
    if findings.whole is not None:
        excluded.setdefault("micro_batches", findings.whole)
    if findings.collated is not None:
        excluded.setdefault("rerun", findings.collated)
    if findings.rowless is not None:
        excluded.setdefault("pipeline_parts", findings.rowless)
    if findings.counted and not findings.footprint.batch_norm:
        excluded.setdefault("micro_batches", f"the step changes the buffer {findings.counted[0]!r}, which each part of a batch would do")
    conduct = findings.footprint.conduct
    written = [] if conduct is None else [name for name, hook in conduct.written if hook == "training_step"]
    if written:
        excluded.setdefault("micro_batches", f"training_step writes to the parameter {written[0]!r}, so each part of a batch would write")
    if findings.split is not None and findings.split.part_reason is not None:
        excluded.setdefault("micro_batches", findings.split.part_reason)
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
        uncuttable={block: reason for finding in findings.engines.values() for block, reason in finding.uncuttable.items()},
        notes={name: finding.notes for name, finding in findings.engines.items() if finding.notes}
        | dict.fromkeys(findings.later, (_NOT_LOOKED,)),
        split=findings.split if settings.batch == "global" else None,
        despite=settings.despite,
        split_batch=settings.batch == "global",
        allocator=options_from_environment(os.environ),
    )

    def fits() -> bool:
        return best_candidate(findings.footprint, inventory, constraints, rates=calibrated(inventory)) is not None

    rates = _rates(trainer, settings, inventory, max_devices, fits, things_of(settings.allow, findings.footprint))
    if training:
        by = {} if rates is None else {"rates": rates.identity}
        constraints = replace(constraints, residuals=load_residuals(trainer.lightning_module, constraints.precision, inventory, **by))
    closer = without_margin(findings.footprint)
    if closer is not None and best_candidate(findings.footprint, inventory, constraints, rates=rates) is None:
        findings = replace(findings, footprint=closer)
    return PlanningInputs(
        findings=findings,
        inventory=inventory,
        constraints=constraints,
        rates=rates,
        questions=questions,
        undivided=undivided(findings.footprint, constraints),
        unknown=unknown_split(constraints),
    )


def unevenly_dealt(together: Iterable[Sequence[int]], holders: Iterable[int]) -> str | None:
    """Why several loaders' batches can't be split; None where some number of holders gets the same share of each of a step's batches.

    Args:
        together: the numbers of samples of the batches of one step, each combination once.
        holders: how many ranks, or parts, there may be.
    """

    def uneven(sizes: Sequence[int], count: int) -> bool:
        dealing = Dealing.even(count)
        return any(len({Fraction(dealing.rows(of, holder), of) for of in sizes}) > 1 for holder in range(count))

    combinations = [sizes for sizes in together if sizes]
    worst = {count: next((sizes for sizes in combinations if uneven(sizes, count)), None) for count in holders}
    if not worst or any(sizes is None for sizes in worst.values()):
        return None
    count, sizes = next(iter(worst.items()))
    return (
        f"the loaders' batches of one step have {' and '.join(map(str, sizes or ()))} samples, so that their parts weigh differently on "
        f"each of {count} devices or micro-batches; set drop_last=True with batch sizes that {count} divides evenly"
    )


def _rates(
    trainer: Trainer,
    settings: Settings,
    inventory: Inventory,
    max_devices: int | None,
    fits: Callable[[], bool] = lambda: True,
    wanted: Collection[str] | None = None,
) -> MeasuredRates | None:
    """The measured rates of this machine; None to use data sheets. Measuring takes seconds, once: worth it for a run that compares plans of
    several devices and will take longer than that. If nothing fits for a run now, it doesn't measure. ``wanted`` names what
    this run's engines and step need; a later run that needs more measures the rest.
    """
    if settings.calibrate == "off" or any(device.kind == "catalogue" for device in inventory.devices):
        return None
    compares = has_several(inventory, max_devices) and settings.plan is None and any(engines.named(name).several for name in settings.allow)
    long = trainer.state.fn == TrainerFn.FITTING and not getattr(trainer, "fast_dev_run", False)
    again = settings.calibrate == "now"
    if not (again or (compares and long and cache_folder("rates") is not None)):
        return calibrated(inventory)
    if (again or not is_calibrated(inventory, wanted)) and not fits():
        return calibrated(inventory)
    return calibrate(inventory, wanted=wanted, again=again)


def _splits(settings: Settings, several: bool) -> bool:
    """Whether any candidate would split the batch, so that the probe must run."""
    if settings.batch != "global":
        return False
    if settings.plan is not None:
        return settings.plan.world_size > 1 or settings.plan.micro_batches > 1
    return several and any(engines.named(name).several for name in settings.allow)


def _room_bytes(inventory: Inventory, settings: Settings) -> int | None:
    """The bytes of a step from which one device may have to run its batch in parts; None where no plan does so."""
    if settings.batch != "global" or settings.plan is not None:
        return None
    free = max(device.free_bytes for device in inventory.devices)
    return min(free, free if settings.memory_limit_bytes is None else settings.memory_limit_bytes) // 2


def has_several(inventory: Inventory, max_devices: int | None) -> bool:
    """Whether a plan may have several devices."""
    return min(len(inventory.devices), max_devices or len(inventory.devices)) > 1
