"""Whether a run should stay where it is, move, or be parked: the verdict, by prediction. It is told the run's state, and knows no clock and
no trainer.

A run leaves at once where it can't stay: a device is gone or faulty, or the plan's bytes don't fit any more. Otherwise nobody knows how
long a neighbour stays, and the run decides as one decides between renting and buying skis: it moves when staying, since the better plan
appeared, has cost some multiple of the price of moving. That costs at most a fixed multiple of what somebody who knew the future would have
paid (Karlin, Manasse, Rudolph and Sleator, "Competitive snoopy caching", 1988), and it is Lindy's rule: the state of the devices is
expected to last as long again as it has lasted. A run that goes back and forth waits twice as long each time.

Seconds of two plans are compared on one scale. A measured figure is never compared with a bare prediction: predictions are compared with
predictions, each corrected by what this run measured of a plan of that kind, or else of the current one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from lightning_autopar.constraints import Constraints
from lightning_autopar.devices.inventory import Inventory, device_label
from lightning_autopar.memory.learned.corrections import Corrections
from lightning_autopar.planning.plan_cost import Appraiser
from lightning_autopar.plans import Plan
from lightning_autopar.report.report import Candidate, Report
from lightning_autopar.text import format_bytes, format_seconds


@dataclass(frozen=True, kw_only=True)
class TimeScale:
    """Seconds a batch of the current plan and of the best one, both on the scale of the measured ones.

    Args:
        now: of the current plan on the devices as they are.
        then: of the best plan.
        factor: the current plan's measured seconds over its predicted ones.
    """

    now: float
    then: float
    factor: float = 1.0


def plan_kind(plan: Plan, inventory: Inventory) -> tuple[object, ...]:
    """A key that is the same for plans whose predictions miss by the same factor: engine, features, number and name of the devices."""
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


def raw_batch_seconds(plan: Plan, report: Report, *, split_batch: bool = True, residuals: Corrections | None = None) -> float:
    """Predicted seconds of a batch under a plan on a report's devices, not corrected by earlier runs.

    Args:
        plan: its devices are among the report's.
        report: whose footprint, devices and rates count.
        residuals: if given, earlier runs that correct the prediction.
    """
    plain = Constraints(precision=report.precision, residuals=residuals or Corrections(), split_batch=split_batch)
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
) -> TimeScale:
    """Seconds a batch now and under the best plan, both predicted for the same devices and corrected alike.

    The current plan's prediction is multiplied by the factor by which it missed, which gives the measured seconds. The best plan's is
    multiplied by the same factor, unless this run has measured a plan of its kind before; earlier runs' corrections of the two plans
    relative to each other count, too.

    Args:
        report: of the devices as they are now.
        step_seconds: those measured recently under the current plan.
        factors: the factors by which this run's earlier plans missed, by :func:`plan_kind`.
        raw: gives :func:`raw_batch_seconds` of a plan, where it is cached.
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
    return TimeScale(now=now, then=predicted(best) * known, factor=factor)


#: The longest that a run that went back and forth waits before it moves of its own accord, or resumes.
LONGEST_WAIT_SECONDS, LONGEST_PARKED_SECONDS = 3600.0, 600.0
#: After a run stayed so many times as long as it had to wait, one return is forgotten.
_FORGIVEN_AFTER = 4.0
#: The most times that the wait is doubled: the run is over before it would matter.
_MOST_DOUBLINGS = 40
#: A parked run resumes even without headroom, if it has fitted for so many times its patience.
_TIGHT_PATIENCE = 8

Code = Literal[
    "same", "nothing", "unmeasured", "gain", "patience", "wait", "later", "price", "fits", "move", "must", "park", "parked", "resume"
]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """When a run moves of its own accord.

    Args:
        min_gain: the share of a step by which the new plan must be faster.
        price_factor: how many times its price a move must gain.
        patience: at how many successive looks there must be a better plan, or one for a parked run.
        min_seconds: between a move and the next of the run's own accord; each return to earlier devices doubles it.
        headroom: the share of free memory that must be left over when a parked run resumes.
    """

    min_gain: float = 0.05
    price_factor: float = 2.0
    patience: int = 3
    min_seconds: float = 60.0
    headroom: float = 0.1


@dataclass(frozen=True, kw_only=True)
class MoveHistory:
    """What a verdict must know about earlier looks and moves.

    Args:
        target: the devices of the better plan that the last looks saw.
        looks: how many successive looks saw a better plan there.
        since: when the first of those looks was.
        moved_at: when the run last moved, was parked or resumed; None before its first move.
        left: the sets of devices that it left.
        returns: how often it moved back to devices that it had left, of its own accord.
        resumes: how often it resumed after being parked.
    """

    target: frozenset[str] = frozenset()
    looks: int = 0
    since: float = 0.0
    moved_at: float | None = None
    left: frozenset[frozenset[str]] = frozenset()
    returns: int = 0
    resumes: int = 0

    def seen(self, target: Collection[str], now: float) -> MoveHistory:
        """The history after a look that saw a better plan on these devices; a look that saw none resets the count."""
        devices = frozenset(target)
        again = bool(devices) and devices == self.target
        looks = self.looks + 1 if again else 1 if devices else 0
        return replace(self, target=devices, looks=looks, since=self.since if again else now)

    def moved(self, before: Plan, after: Plan, now: float, rules: Rules, *, urgent: bool) -> MoveHistory:
        """The history after a move from one plan to another; an urgent move doesn't count as going back and forth."""
        back = not urgent and frozenset(after.devices) in self.left
        returns = min(_MOST_DOUBLINGS, self.forgiven(self.returns, rules, now) + back)
        return MoveHistory(moved_at=now, left=self.left | {frozenset(before.devices)}, returns=returns, resumes=self.resumes)

    def parked(self, before: Plan, now: float, rules: Rules) -> MoveHistory:
        """The history after the run has been parked."""
        returns, resumes = (self.forgiven(count, rules, now) for count in (self.returns, self.resumes))
        return MoveHistory(moved_at=now, left=self.left | {frozenset(before.devices)}, returns=returns, resumes=resumes)

    def resumed(self, now: float) -> MoveHistory:
        """The history after a parked run has resumed."""
        return MoveHistory(moved_at=now, left=self.left, returns=self.returns, resumes=min(_MOST_DOUBLINGS, self.resumes + 1))

    def forgiven(self, count: int, rules: Rules, now: float) -> int:
        """How many returns still count: one fewer each time that the run stayed four times as long as they made it wait."""
        quiet = math.inf if self.moved_at is None else now - self.moved_at
        while count and quiet >= _FORGIVEN_AFTER * rules.min_seconds * 2.0**count:
            quiet -= _FORGIVEN_AFTER * rules.min_seconds * 2.0**count
            count -= 1
        return count

    def waits(self, rules: Rules, now: float) -> float:
        """Seconds until the run may move of its own accord."""
        if self.moved_at is None:
            return 0.0
        longest = max(rules.min_seconds, LONGEST_WAIT_SECONDS)
        wait = min(longest, rules.min_seconds * 2.0 ** self.forgiven(self.returns, rules, now))
        return max(0.0, self.moved_at + wait - now)

    def waits_parked(self, rules: Rules, now: float) -> float:
        """Seconds until a parked run may resume: none the first time."""
        if self.moved_at is None or not self.resumes:
            return 0.0
        wait = min(LONGEST_PARKED_SECONDS, rules.min_seconds * 2.0 ** (self.resumes - 1))
        return max(0.0, self.moved_at + wait - now)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What to do.

    Args:
        action: ``"stay"`` (a parked run: wait), ``"move"`` (a parked run: resume) or ``"park"``.
        code: why, in one word, for code that compares verdicts.
        reason: why, in one sentence with the numbers.
        history: for the next verdict.
        urgent: whether the run can't stay.
        gain_seconds: what the move is expected to save; None where the move isn't made to save time.
    """

    action: Literal["stay", "move", "park"]
    code: Code
    reason: str
    history: MoveHistory
    urgent: bool = False
    gain_seconds: float | None = None


# -- what can't stay -------------------------------------------------------------------------------------------------------------------


def must_leave(
    current: Candidate, inventory: Inventory, *, measured_bytes: Mapping[str, int] | None = None, host_bytes: int = 0
) -> str | None:
    """Why a plan can't stay where it is, in one sentence; None where it can.

    It can't where a device is gone or in error, or has less free for the run than it takes: the larger of the predicted and the measured
    bytes, without the margins with which a plan is chosen. Those margins keep it from moving back and forth.

    Args:
        current: the plan that runs, with its prediction.
        inventory: the devices as they are; what the run holds itself counts as free.
        measured_bytes: the most that each device was seen to hold, by id.
        host_bytes: what the plan's offloading takes of the host's memory.
    """
    there = {device.id: device for device in inventory.devices}
    measured = measured_bytes or {}
    on_cpu = host_bytes
    for device_id in current.plan.devices:
        device = there.get(device_id)
        if device is None:
            return f"the run can no longer use device {device_id}"
        if device.error is not None:
            return f"{device_label(device)} is in error: {device.error}"
    for device_id in current.plan.devices:
        device, need = there[device_id], _taken(current, device_id, measured)
        on_cpu += need if device.kind == "cpu" else 0
        if need > device.free_bytes:
            by = "was measured to take" if measured.get(device_id, 0) >= need else "needs"
            left = format_bytes(device.free_bytes)
            missing = f", {format_bytes(need - device.free_bytes)} too little" if format_bytes(need) == left else ""
            return f"the plan {by} {format_bytes(need)} on {device_label(device)}; only {left} is free for it{missing}"
    if 0 < inventory.host_free_bytes < on_cpu:
        left = format_bytes(inventory.host_free_bytes)
        return f"the plan needs {format_bytes(on_cpu)} of the host's memory; only {left} is free for it"
    return None


def _taken(candidate: Candidate, device_id: str, measured: Mapping[str, int]) -> int:
    size = candidate.bytes.get(device_id)
    predicted = size.reserved if size is not None else candidate.needs.get(device_id, 0)
    return max(predicted, measured.get(device_id, 0))


def fits(candidate: Candidate, inventory: Inventory, *, headroom: float = 0.0) -> bool:
    """Whether a candidate fits the devices as they are now, with this share of the free memory left over."""
    there = {device.id: device for device in inventory.devices}
    if not candidate.fits or any(device not in there or there[device].error is not None for device in candidate.plan.devices):
        return False
    on_cpu = sum(need for device, need in candidate.needs.items() if there[device].kind == "cpu")
    if 0 < inventory.host_free_bytes * (1 - headroom) < on_cpu:
        return False
    return all(need <= there[device].free_bytes * (1 - headroom) for device, need in candidate.needs.items())


def same_plan(a: Plan, b: Plan) -> bool:
    """Whether two plans are the same, whatever the reasons for choosing them."""
    return replace(a, reasons=()) == replace(b, reasons=())


# -- the verdict -----------------------------------------------------------------------------------------------------------------------


def decide_move(
    *,
    now: float,
    current: Plan,
    best: Candidate | None,
    inventory: Inventory,
    rules: Rules,
    history: MoveHistory,
    pace: TimeScale | None = None,
    remaining_steps: float = math.inf,
    move_seconds: float = 0.0,
    must: str | None = None,
) -> Verdict:
    """Stay, move or park, for a run that isn't parked.

    Args:
        now: seconds by a clock that only goes forward.
        best: the best plan for the devices as they are now; None where nothing fits.
        pace: seconds a step now and after the move; None where nothing was measured yet.
        remaining_steps: steps to go; ``inf`` where unknown.
        must: why the run can't stay where it is, by :func:`must_leave`.
    """
    if best is not None and not fits(best, inventory):
        best = None
    if must is not None:
        return _leave(must, now, current, best, history)
    if best is None:
        return Verdict(action="stay", code="nothing", reason="nothing else fits now", history=history.seen((), now))
    title = f"{best.plan.title()} on {', '.join(best.plan.devices)}"
    if same_plan(current, best.plan):
        return Verdict(action="stay", code="same", reason=f"{title} is still the best plan", history=history.seen((), now))
    if pace is None:
        told = f"{title} may be better, but no step was measured yet"
        return Verdict(action="stay", code="unmeasured", reason=told, history=history.seen((), now))
    share = 1 - pace.then / pace.now if pace.now > 0 else 0.0
    each = f"{format_seconds(pace.then)} a step instead of {format_seconds(pace.now)}"
    if share < rules.min_gain or share <= 0:
        told = f"{title} would take {each}, which is less than {rules.min_gain:.0%} faster"
        return Verdict(action="stay", code="gain", reason=told, history=history.seen((), now))
    history = history.seen(best.plan.devices, now)
    lasted = now - history.since
    # The gain is assumed to last for the rest of the run, or for as long as it has lasted.
    horizon = min(remaining_steps * pace.now, lasted)
    gain, price = share * horizon, rules.price_factor * move_seconds
    stay = _Stay(history, gain)
    if remaining_steps * pace.now * share <= price:
        left = f"{format_seconds(remaining_steps * pace.now * share)} over the {remaining_steps:.0f} steps that are left"
        return stay("price", f"{title} would take {each} and save {left}, but a move must save {format_seconds(price)}")
    if history.looks < rules.patience:
        return stay("patience", f"{title} would take {each}, but was better at {history.looks} of {rules.patience} looks in a row")
    if (waits := history.waits(rules, now)) > 0:
        return stay("wait", f"{title} would take {each}, but the run has just moved and stays for another {format_seconds(waits)}")
    if gain <= price:
        so_far = f"staying has cost {format_seconds(gain)} in {format_seconds(lasted)}"
        return stay("price", f"{title} would take {each}; {so_far}, and the run moves once that exceeds {format_seconds(price)}")
    reason = (
        f"{title} takes {each}, {share:.0%} less. That saves {format_seconds(gain)}, if it lasts for another "
        f"{format_seconds(lasted)}, as long as so far, or to the run's end; moving costs {format_seconds(move_seconds)}"
    )
    return Verdict(action="move", code="move", reason=reason, history=history, gain_seconds=gain)


def decide_resume(*, now: float, best: Candidate | None, inventory: Inventory, rules: Rules, history: MoveHistory) -> Verdict:
    """Whether a parked run should resume; arguments as :func:`decide_move`'s."""
    if best is None or not fits(best, inventory):
        return Verdict(action="stay", code="parked", reason="parked: nothing fits yet", history=history.seen((), now))
    title = f"{best.plan.title()} on {', '.join(best.plan.devices)}"
    roomy = fits(best, inventory, headroom=rules.headroom)
    history = history.seen(best.plan.devices, now)
    patience = rules.patience if roomy else _TIGHT_PATIENCE * rules.patience
    if history.looks < patience:
        tight = "" if roomy else f" with less than {rules.headroom:.0%} of it to spare"
        told = f"parked: {title} fits{tight}, at {history.looks} of {patience} looks in a row"
        return Verdict(action="stay", code="patience", reason=told, history=history)
    if (waits := history.waits_parked(rules, now)) > 0:
        told = f"parked: {title} fits, but the run was parked several times and waits for another {format_seconds(waits)}"
        return Verdict(action="stay", code="wait", reason=told, history=history)
    told = f"{title} fits, and has done so for {format_seconds(now - history.since)}"
    return Verdict(action="move", code="resume", reason=told, history=history)


def _leave(must: str, now: float, current: Plan, best: Candidate | None, history: MoveHistory) -> Verdict:
    """Leave at once, for the best plan, or park."""
    if best is None:
        return Verdict(action="park", code="park", reason=f"{must}, and nothing else fits", history=history, urgent=True)
    title = f"{best.plan.title()} on {', '.join(best.plan.devices)}"
    if same_plan(current, best.plan):
        return Verdict(action="stay", code="fits", reason=f"{must}; planned again, {title} fits after all", history=history.seen((), now))
    return Verdict(action="move", code="must", reason=f"{must}; the best that fits is {title}", history=history, urgent=True)


@dataclass(frozen=True)
class _Stay:
    """The verdicts to stay, of one look at a better plan that isn't taken yet."""

    history: MoveHistory
    gain_seconds: float

    def __call__(self, code: Code, reason: str) -> Verdict:
        return Verdict(action="stay", code=code, reason=reason, history=self.history, gain_seconds=self.gain_seconds)
