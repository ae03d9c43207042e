"""What a scenario's runs say: which plans were feasible, and how the planner's choice and fixed rules stand beside the best of them.

Values in, values out: it runs nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from decisions.scenarios import Scenario, is_even, key
from lightning_autopar.plans import Plan

#: Of a plan's step times this quantile counts: other people's work on the machine only ever makes a step longer.
QUANTILE = 0.25
GOAL_MEDIAN, GOAL_WORST = 0.95, 0.85


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A plan and what its runs took.

    Args:
        plan: which.
        fits: the planner's word; None where it didn't look at the plan.
        predicted_seconds: of a step, by the planner; None where it didn't look at the plan.
        predicted_bytes: by device id; empty where it didn't look.
        steps: seconds of each measured step, over all rounds.
        peak_bytes: by device id, the largest of all rounds.
        error: why there are no steps.
        skipped: why it wasn't run.
    """

    plan: Plan
    fits: bool | None = None
    predicted_seconds: float | None = None
    predicted_bytes: Mapping[str, int]
    steps: tuple[float, ...] = ()
    peak_bytes: Mapping[str, int]
    error: str | None = None
    skipped: str | None = None

    @property
    def seconds(self) -> float | None:
        """Of a step; None where it wasn't run, or failed."""
        return low_quantile(self.steps) if self.steps else None

    def to_dict(self) -> dict[str, Any]:
        """For the result file."""
        return {
            "title": self.plan.title(),
            "plan": key(self.plan).to_dict(),
            "fits": self.fits,
            "predicted_seconds": self.predicted_seconds,
            "predicted_bytes": dict(self.predicted_bytes),
            "seconds": self.seconds,
            "steps": [round(step, 6) for step in self.steps],
            "peak_bytes": dict(self.peak_bytes),
            "error": self.error,
            "skipped": self.skipped,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Measured:
        """Of a result file."""
        known = ("fits", "predicted_seconds", "predicted_bytes", "peak_bytes", "error", "skipped")
        return cls(plan=Plan.from_dict(data["plan"]), steps=tuple(data["steps"]), **{name: data[name] for name in known})


def low_quantile(steps: Sequence[float]) -> float:
    """The lower quartile, of one step or more."""
    ordered = sorted(steps)
    return ordered[int(QUANTILE * (len(ordered) - 1))]


def within(measured: Measured, budgets: Mapping[str, int]) -> bool:
    """Whether it ran, and no device took more than its budget."""
    ran = measured.seconds is not None and bool(measured.peak_bytes)
    return ran and all(size <= budgets[device] for device, size in measured.peak_bytes.items())


def _single(plan: Plan) -> bool:
    return plan.engine == "single" and not plan.recompute and plan.micro_batches == 1


def _everywhere(engine: str) -> Callable[[Plan, int], bool]:
    """Plainly on all devices, FSDP as Lightning has it: resharding, the batch shared evenly."""

    def wanted(plan: Plan, devices: int) -> bool:
        plain = not plan.recompute and plan.micro_batches == 1 and not plan.shares and plan.replicas == 1
        return plan.engine == engine and plan.world_size == devices and plain and plan.reshard_after_forward is not False

    return wanted


#: Fixed rules: what is tried, in order; the first that fits is taken, and the last in any case. One device is the freest.
RULES: Mapping[str, tuple[str, ...]] = {
    "single, else FSDP": ("single", "fsdp"),
    "single, else DDP, else FSDP": ("single", "ddp", "fsdp"),
    "always DDP": ("ddp",),
    "always FSDP": ("fsdp",),
}


def taken_by(rule: str, plans: Sequence[Measured], devices: int, budgets: Mapping[str, int]) -> Measured:
    """What somebody takes who follows the rule, and knows of each plan it tries whether it fits."""
    tried = []
    for engine in RULES[rule]:
        alone = engine == "single" or devices == 1
        wanted = [one for one in plans if (_single(one.plan) if alone else _everywhere(engine)(one.plan, devices))]
        tried.append(max(wanted, key=lambda one: budgets[one.plan.devices[0]]))
    return next((one for one in tried if within(one, budgets)), tried[-1])


def judge(
    scenario: Scenario,
    plans: Sequence[Measured],
    chosen: Plan | None,
    budgets: Mapping[str, int],
    memory: Mapping[str, int],
    blocks: Sequence[str] = (),
) -> dict[str, Any]:
    """The scenario's line: throughput of the choice, and of each rule, as shares of the best feasible plan's.

    Feasible is what was measured within the budgets. A choice may take some of the margin, as that is what it is for, and it is said;
    one that takes more than the device has, is over budget and has a share of 0, as has one of nothing where something is feasible.

    Args:
        scenario: which.
        plans: all there are, run or not.
        chosen: the planner's; None where it says that nothing fits.
        budgets: bytes that a plan may use, by device id: what the device has, less the margin.
        memory: bytes that the device has.
        blocks: the model's, in order.
    """
    feasible = [one for one in plans if within(one, budgets)]
    best = min(feasible, key=lambda one: one.seconds or 0.0, default=None)
    taken = None if chosen is None else next(one for one in plans if key(one.plan) == key(chosen))

    def share(one: Measured | None) -> float | None:
        if best is None or best.seconds is None:
            return None
        return best.seconds / one.seconds if one is not None and one.seconds and within(one, memory) else 0.0

    def share_of_all(one: Measured | None) -> float | None:
        """Held against every plan that the devices have room for, those included that leave no margin."""
        fastest = min((other.seconds or 0.0 for other in plans if within(other, memory)), default=0.0)
        return fastest / one.seconds if fastest and one is not None and one.seconds and within(one, memory) else None

    devices = len(scenario.inventory.devices)
    rules = {rule: taken_by(rule, plans, devices, memory) for rule in RULES}
    even = [one for one in feasible if is_even(one.plan, blocks)]
    best_even = min(even, key=lambda one: one.seconds or 0.0, default=None)
    return {
        "feasible": len(feasible),
        "best": None if best is None else best.plan.title(),
        "best_seconds": None if best is None else best.seconds,
        "chosen": None if chosen is None else chosen.title(),
        "chosen_seconds": None if taken is None else taken.seconds,
        "share": share(taken),
        "share_of_all": share_of_all(taken),
        "over_budget": taken is not None and taken.seconds is not None and not within(taken, memory),
        "uses_margin": taken is not None and taken.seconds is not None and not within(taken, budgets),
        "failed": None if taken is None else taken.error,
        "rules": {rule: {"plan": one.plan.title(), "fits": within(one, memory), "share": share(one)} for rule, one in rules.items()},
        "best_even": None if best_even is None else best_even.plan.title(),
        "chosen_over_best_even": (
            best_even.seconds / taken.seconds
            if best_even is not None and best_even.seconds and taken is not None and taken.seconds and within(taken, memory)
            else None
        ),
    }


def summary(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Over all scenarios in which some plan is feasible: median and worst share of the planner's choices, and of each rule's."""
    verdicts = [result["verdict"] for result in results.values() if result["verdict"]["share"] is not None]

    def figures(shares: Sequence[float]) -> dict[str, Any]:
        return {"median": statistics.median(shares), "worst": min(shares), "out_of_memory": sum(share == 0 for share in shares)}

    if not verdicts:
        return {"scenarios": 0}
    planner = figures([verdict["share"] for verdict in verdicts])
    uneven = [result["verdict"] for result in results.values() if result["uneven"] and result["verdict"]["share"] is not None]
    against = [verdict["chosen_over_best_even"] for verdict in uneven if verdict["chosen_over_best_even"] is not None]
    return {
        "scenarios": len(verdicts),
        "planner": planner,
        "over_budget": sum(verdict["over_budget"] for verdict in verdicts),
        "use_margin": sum(verdict["uses_margin"] for verdict in verdicts),
        "planner_of_all": figures([verdict["share_of_all"] or 0.0 for verdict in verdicts]),
        "rules": {rule: figures([verdict["rules"][rule]["share"] for verdict in verdicts]) for rule in RULES},
        "uneven": {
            "scenarios": len(uneven),
            "no_even_plan_fits": sum(verdict["best_even"] is None for verdict in uneven),
            "against_best_even": {"median": statistics.median(against), "worst": min(against)} if against else None,
        },
        "goal": {"median": GOAL_MEDIAN, "worst": GOAL_WORST, "over_budget": 0},
        "within": planner["median"] >= GOAL_MEDIAN
        and planner["worst"] >= GOAL_WORST
        and not any(verdict["over_budget"] for verdict in verdicts),
    }
