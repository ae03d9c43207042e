"""Seconds a batch of two plans on one scale: that of what a run has measured.

A measured figure is never set beside a bare prediction: predictions are compared with predictions, each corrected by what this run measured
of a plan of that kind, or else of the current one. It measures nothing and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from lightning_autopar.memory.inventory import Inventory
from lightning_autopar.memory.residuals import Residuals
from lightning_autopar.planning.appraisal import Appraiser
from lightning_autopar.planning.constraints import Constraints
from lightning_autopar.planning.report import Report
from lightning_autopar.plans import Plan


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds a batch of the current plan and of the best one, on one scale: that of what was measured.

    Args:
        now: of the current plan on the devices as they are.
        then: of the best plan.
        factor: what was measured of the current plan over its prediction.
    """

    now: float
    then: float
    factor: float = 1.0


def plan_kind(plan: Plan, inventory: Inventory) -> tuple[object, ...]:
    """What plans have in common whose predictions miss by the same factor: engine, what it does besides, how many devices of what name."""
    return (
        plan.engine,
        tuple(sorted(inventory.device(device).name for device in plan.devices)),
        plan.replicas,
        plan.zero_stage,
        plan.offload,
        plan.schedule,
        plan.micro_batches > 1,
        bool(plan.recompute),
    )


def raw_batch_seconds(plan: Plan, report: Report, *, split_batch: bool = True, residuals: Residuals | None = None) -> float:
    """Predicted seconds of a batch under a plan on a report's devices, not corrected by earlier runs.

    Args:
        plan: its devices are among the report's.
        report: whose footprint, devices and rates count.
        split_batch: whether ranks share a batch.
        residuals: earlier runs by which to correct it after all.
    """
    plain = Constraints(precision=report.precision, residuals=residuals or Residuals(), split_batch=split_batch)
    return Appraiser(report.footprint, report.inventory, plain, rates=report.rates).step_seconds(plan)


def pace_of(
    current: Plan,
    best: Plan,
    report: Report,
    step_seconds: float,
    *,
    factors: Mapping[tuple[object, ...], float] | None = None,
    split_batch: bool = True,
    raw: Callable[[Plan], float] | None = None,
) -> Pace:
    """Seconds a batch now and under the best plan, both predicted for the same devices and corrected alike.

    The current plan's prediction is multiplied by what it was seen to miss by, which gives what was measured. The best plan's is multiplied
    by the same, unless this run has measured a plan of its kind before; what earlier runs say of the two plans beside each other counts.

    Args:
        current: the plan that runs.
        best: the report's best.
        report: of the devices as they are now.
        step_seconds: measured of late under the current plan.
        factors: by :func:`plan_kind`, what this run's earlier plans missed by.
        split_batch: whether ranks share a batch.
        raw: :func:`raw_batch_seconds` of a plan, where somebody remembers it.
    """
    predicted = raw or partial(raw_batch_seconds, report=report, split_batch=split_batch)
    now = step_seconds / (1 if split_batch else current.world_size)
    factor = now / max(predicted(current), 1e-12)
    known = (factors or {}).get(plan_kind(best, report.inventory))
    if plan_kind(best, report.inventory) == plan_kind(current, report.inventory):
        known = factor
    if known is None:
        known = factor
        if report.residuals.time_factors.told:
            learned = partial(raw_batch_seconds, report=report, split_batch=split_batch, residuals=report.residuals)
            known *= learned(best) / predicted(best) * predicted(current) / learned(current)
    return Pace(now=now, then=predicted(best) * known, factor=factor)
