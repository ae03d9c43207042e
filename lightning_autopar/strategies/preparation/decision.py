"""The decision for one call of the trainer: the report, the run plan of its best candidate, and what the report was made from; and
what callbacks and others ask of a run's agent, which is to go to such a decision, or to park.

Values only; doesn't know how they were found out.
"""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from lightning_autopar._lightning import rank_zero_info, rank_zero_warn
from lightning_autopar.constraints import Constraints
from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.memory.learned.cache_files import cache_folder, write_json
from lightning_autopar.planning.make_report import make_report
from lightning_autopar.planning.refusals import weighing_notes
from lightning_autopar.plans import all_engines
from lightning_autopar.report.report import Candidate, Report
from lightning_autopar.sharing.queue_order import Need
from lightning_autopar.strategies.base.run_plan import BatchRule, RunPlan
from lightning_autopar.strategies.preparation.module_findings import Findings, Questions
from lightning_autopar.timing.measured_rates import MeasuredRates

#: The last plan's place in the cache.
_KIND, _NAME = "last_plan", "plan.json"
#: Fields of a plan whose words are this package's own; of other words only the number is kept.
_OWN_WORDS = ("engine", "schedule", "offload")


@dataclass(frozen=True, kw_only=True)
class PlanningInputs:
    """All inputs of a report, and what it says of batches that are run again.

    Args:
        rates: of this machine; None to use data sheets.
        questions: the kinds of plans that were considered; None where no engine was left for later.
        undivided: see :class:`.run_plan.RunPlan`; the same for ``unknown``.
    """

    findings: Findings
    inventory: Inventory
    constraints: Constraints
    rates: MeasuredRates | None
    questions: Questions | None = None
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
        look: the report's inputs, for :func:`.planning_inputs.decide_again`; it stays in the process that planned.
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
        told = () if self.look is None else weighing_notes(self.look.constraints.split)
        for note in self.candidate.notes:
            if note not in told:
                rank_zero_warn(f"autopar: {note}")

    def keep(self) -> None:
        """Keep it for a bug report, without anything of the user's; where the cache is off, or the disk full, nothing is kept."""
        if (folder := cache_folder(_KIND)) is not None:
            write_json(folder / _NAME, _record(self))


def need_of(candidate: Candidate, batches: int | None, batch: BatchRule, memory_margin: float) -> Need:
    """What must be free for a plan, and how long it trains."""
    seconds = None
    if batches is not None and candidate.seconds is not None:
        ranks = candidate.plan.data_ranks if batch == "per_device" else 1
        seconds = -(-batches // ranks) * candidate.step_seconds
    sizes = {device: math.ceil(size / (1 - memory_margin)) for device, size in candidate.needs.items()}
    return Need(bytes=sizes, seconds=seconds)


def _record(decision: Decision) -> dict[str, Any]:
    """The plan, every candidate's figures, and what the checks of the first batch found, as numbers and names of this package's own: names
    of modules, parameters and logged values, and every sentence, may come from the user's code, so only their number is kept.
    """
    report = decision.report
    order = {device.id: f"device {index}" for index, device in enumerate(report.inventory.devices)}
    needs = report.footprint.to_dict()["bytes"]
    found: dict[str, Any] = {
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "precision": report.precision,
        "batch": {"samples": report.footprint.batch_size, "rule": decision.run_plan.batch},
        "step": {"bytes": {name: int(size) for name, size in needs.items()}, "margin": report.footprint.margin},
        "free_bytes": {order[device.id]: device.free_bytes for device in report.inventory.devices},
        "chosen": report.best_index,
        "candidates": [_of_candidate(candidate, order) for candidate in report.candidates],
        "elastic": decision.run_plan.elastic,
    }
    if decision.look is not None:
        findings = decision.look.findings
        split = findings.split
        found["checks"] = {
            "traced": findings.untraced is None and findings.footprint.conduct is not None,
            "whole_batch_only": findings.whole is not None,
            "several_loaders": findings.several_loaders,
            "data_draws": len(findings.data_draws),
            "engines": {
                name: {"refusals": sum(words is not None for words in finding.refusals.values()), "notes": len(finding.notes)}
                for name, finding in findings.engines.items()
                if name in all_engines()
            },
        }
        if split is not None:
            found["checks"]["split"] = {
                "splittable": split.splittable,
                "probed": split.probed,
                "difference": split.difference if abs(split.difference) < float("inf") else None,  # neither is NaN JSON, nor infinity
                "notes": len(split.notes),
                "weighed": bool(weighing_notes(split)),
                "logged_values": sum(name != "" for _, name in split.log_rules),
                "logged_without_rule": sum(not rules for (_, name), rules in split.log_rules.items() if name),
            }
    return found


def _without_words(value: Any) -> Any:
    """A number; of anything else how many it has."""
    return value if value is None or isinstance(value, (bool, int, float)) else len(value)


def _of_candidate(candidate: Candidate, order: dict[str, str]) -> dict[str, Any]:
    plan = candidate.plan.to_dict()
    return {
        "plan": {name: value if name in _OWN_WORDS else _without_words(value) for name, value in plan.items()},
        "on": [order.get(device, "another") for device in candidate.plan.devices],
        "fits": candidate.fits,
        "held_back": candidate.held_back,
        "needs_bytes": {order.get(device, "another"): size for device, size in candidate.needs.items()},
        "seconds": candidate.seconds.to_dict() if candidate.seconds else {},
        "corrections": len(candidate.learned),
        "notes": len(candidate.notes),
    }


@dataclass(frozen=True, kw_only=True)
class MoveRequest:
    """What the agent is asked to do.

    Args:
        action: ``"move"`` to the decision's plan (a parked run resumes under it), or ``"park"``: give the devices back and wait.
        decision: what to run then; None to park.
        reason: one sentence with the numbers.
        urgent: whether the run can't stay where it is.
    """

    action: Literal["move", "park"]
    decision: Decision | None
    reason: str
    urgent: bool = False

    def __post_init__(self) -> None:
        assert (self.action == "move") == (self.decision is not None), "a move has a decision, parking has none"
