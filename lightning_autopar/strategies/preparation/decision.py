"""The decision for one call of the trainer: the report, the run plan of its best candidate, and what the report was made from.

Values only; doesn't know how they were found out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from lightning_autopar._lightning import rank_zero_info, rank_zero_warn
from lightning_autopar.constraints import Constraints
from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.planning.planner import make_report
from lightning_autopar.report.report import Candidate, Report
from lightning_autopar.sharing.reservation import Need
from lightning_autopar.strategies.base.run_plan import BatchRule, RunPlan
from lightning_autopar.strategies.preparation.findings import Findings
from lightning_autopar.timing.measured_rates import MeasuredRates


@dataclass(frozen=True, kw_only=True)
class PlanningInputs:
    """All inputs of a report, and what it says of batches that are run again.

    Args:
        findings: about the module.
        inventory: the devices to choose from.
        constraints: what a plan must keep to.
        rates: of this machine; None to use data sheets.
        undivided: see :class:`.run_plan.RunPlan`; the same for ``unknown``.
    """

    findings: Findings
    inventory: Inventory
    constraints: Constraints
    rates: MeasuredRates | None
    undivided: str | None = None
    unknown: str = ""

    @cached_property
    def report(self) -> Report:
        """Every plan with its prediction.

        Raises:
            NothingFits: if no plan fits.
            ValueError: if a pinned plan can't be run on these devices.
        """
        return make_report(self.findings.footprint, self.inventory, self.constraints, rates=self.rates)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The report, and the run plan of its best plan.

    Args:
        report: of all plans.
        run_plan: of the best one.
        look: the report's inputs, for :func:`.decide.decide_again`; it stays in the process that planned.
        batches: training batches of the whole fit, at most; None where nobody knows, and where nothing is trained.
        memory_margin: the share of what is free that the plan had to leave.
    """

    report: Report
    run_plan: RunPlan
    look: PlanningInputs | None = None
    batches: int | None = None
    memory_margin: float = 0.0

    @property
    def candidate(self) -> Candidate:
        """The chosen candidate."""
        candidate = self.report.best_candidate
        assert candidate is not None
        return candidate

    @property
    def expected_seconds(self) -> float | None:
        """The predicted seconds of training, without validation and everything around it; None where nobody knows."""
        return self.need.seconds

    @property
    def need(self) -> Need:
        """What must be free for the plan, and how long it trains."""
        return need_of(self.candidate, self.batches, self.run_plan.batch, self.memory_margin)

    def announce(self) -> None:
        """Log the table and the notes of the chosen candidate, once, on rank 0."""
        rank_zero_info(f"autopar:\n{self.report}")
        for note in self.candidate.notes:
            rank_zero_warn(f"autopar: {note}")


def need_of(candidate: Candidate, batches: int | None, batch: BatchRule, memory_margin: float) -> Need:
    """What must be free for a plan, and how long it trains.

    Args:
        candidate: the plan with its prediction.
        batches: training batches of the whole fit, at most; None where nobody knows.
        batch: what a batch is to several devices.
        memory_margin: the share of what is free that the plan has to leave.
    """
    seconds = None
    if batches is not None and candidate.seconds is not None:
        ranks = candidate.plan.data_ranks if batch == "per_device" else 1
        seconds = -(-batches // ranks) * candidate.step_seconds
    sizes = {device: math.ceil(size / (1 - memory_margin)) for device, size in candidate.needs.items()}
    return Need(bytes=sizes, seconds=seconds)
