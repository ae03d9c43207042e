"""What ElasticReplan remembers between two looks at the devices, and what it concludes from them. It moves nothing.

The watch has three parts, which don't know each other: the latest planning, the share of a core that planning may use, and what a step
usually takes.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from lightning_autopar._lightning import rank_zero_info
from lightning_autopar.devices.inventory import DeviceEvent, Inventory, device_events, usable
from lightning_autopar.planning.move_verdict import (
    MoveHistory,
    Rules,
    TimeScale,
    Verdict,
    decide_move,
    decide_resume,
    must_leave,
    pace_of,
    plan_kind,
    raw_batch_seconds,
    same_plan,
)
from lightning_autopar.planning.plan_bytes import host_bytes
from lightning_autopar.plans import Plan
from lightning_autopar.report.report import Candidate, NothingFits
from lightning_autopar.strategies.preparation.decision import Decision, MoveRequest
from lightning_autopar.text import format_bytes, format_seconds

if TYPE_CHECKING:
    from lightning_autopar.strategies.elastic.run_state import RunState

#: How many plans may be made in a row beyond the share of time, so that a quiet run reacts to a change at once.
_IN_A_ROW = 4
#: A plan's devices count as slowed when a step takes the first factor times its usual time there, until it takes less than the second.
_SLOWED, _SLOW_NO_MORE = 1.5, 1.2
_SLOW_AFTER_SECONDS = 60.0
#: The weight of a look's step in the usual time.
_USUAL_SHARE = 0.1
#: The share of the host's memory whose change is a reason to plan again.
_NOTABLE_HOST_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The latest planning.

    Args:
        decision: what came out; None where nothing fits.
        inventory: the devices that it was made for.
        known_seconds: cached raw seconds of a batch, by plan.
    """

    decision: Decision | None
    inventory: Inventory
    known_seconds: dict[Plan, float] = field(default_factory=dict)

    @property
    def best(self) -> Candidate | None:
        """The best plan; None where nothing fits."""
        return None if self.decision is None else self.decision.candidate

    @property
    def devices(self) -> set[str]:
        """Ids of the best plan's devices."""
        return set() if self.decision is None else set(self.decision.run_plan.plan.devices)

    def stale(self, inventory: Inventory, devices: set[str] | None = None) -> bool:
        """Whether the devices, or the given ones, have changed since, or the host's memory has changed much."""
        events = device_events(self.inventory, inventory)
        if devices is not None:
            return any(event.device in devices for event in events)
        change = abs(inventory.host_free_bytes - self.inventory.host_free_bytes)
        return bool(events) or change > _NOTABLE_HOST_SHARE * inventory.host_total_bytes

    def raw_seconds(self, plan: Plan, *, split_batch: bool) -> float:
        """Predicted seconds of a batch on those devices, computed once."""
        assert self.decision is not None, "only where something fits is anything compared"
        if plan not in self.known_seconds:
            self.known_seconds[plan] = raw_batch_seconds(plan, self.decision.report, split_batch=split_batch)
        return self.known_seconds[plan]


class Steps:
    """The usual seconds of steps under one plan on devices in their present state, and whether steps take longer now."""

    def __init__(self) -> None:
        self._of: object = None
        self._usual = 0.0
        self._looks = 0
        self._turns = 0
        self._turned_at = 0.0
        self._ratio = 1.0

    @property
    def known(self) -> bool:
        """Whether there is anything to compare with."""
        return self._looks > 0

    def slower(self, step_seconds: float | None, of: object, now: float, patience: int) -> float:
        """How many times longer than usual a step takes; 1 unless it has lasted.

        Args:
            step_seconds: of late; None where nothing was measured.
            of: what they belong to: another one has a usual of its own.
            patience: so many looks in a row, over a minute, change the answer: a validation or a checkpoint makes some steps long, too.
        """
        if of != self._of:
            self._of, self._looks, self._turns, self._ratio = of, 0, 0, 1.0
        if step_seconds is None or step_seconds <= 0:
            return self._ratio
        if not self._looks:
            self._usual = step_seconds
        self._looks += 1
        ratio = step_seconds / self._usual
        slow = self._ratio > 1
        turned = ratio < _SLOW_NO_MORE if slow else ratio >= _SLOWED
        if not turned:
            self._turns = 0
        elif not self._turns:
            self._turned_at = now
        self._turns += turned
        if self._turns >= patience and now - self._turned_at >= _SLOW_AFTER_SECONDS:
            self._turns, self._ratio = 0, 1.0 if slow else ratio
        if not slow and not turned:
            self._usual += _USUAL_SHARE * (step_seconds - self._usual)
        return self._ratio


@dataclass(kw_only=True)
class Budget:
    """What planning may take of a core: a share of the time since the run began, and a few plans beyond it. Over a time T it takes at most
    ``share * T`` and four plans; urgent ones are always allowed, but count.
    """

    began: float = 0.0
    taken_seconds: float = 0.0
    longest_seconds: float = 0.0

    def begin(self, now: float) -> None:
        """The time starts here."""
        self.began = now

    def allows(self, now: float, share: float) -> bool:
        """Whether another planning is allowed that takes as long as the longest so far."""
        return self.taken_seconds + self.longest_seconds <= share * (now - self.began) + _IN_A_ROW * self.longest_seconds

    def spent(self, seconds: float) -> None:
        """Record the seconds of a planning."""
        self.taken_seconds += seconds
        self.longest_seconds = max(self.longest_seconds, seconds)


#: The share of a core for planning while the run is parked, and needs no core itself.
_PARKED_SHARE = 0.05
#: When an urgent move that failed is tried again: after this time, then after twice that and so on, up to the longest.
_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 5.0, 120.0
#: How long a device that the run left is assumed to be still as slow.
_SLOW_SECONDS = 600.0
#: How long the same message isn't repeated.
_SAID_SECONDS = 600.0
#: The most moments of a timeline; beyond it the oldest are dropped.
_MOST_MOMENTS = 10_000


@dataclass(frozen=True, kw_only=True)
class DeviceLook:
    """Something on a run's timeline.

    Args:
        at: Unix time.
        kind: ``"event"``: something happened to the devices; ``"verdict"``: what was decided.
        word: which event, or what was decided.
        device: of an event, the id of its device.
        plan: the title of the plan that ran.
        devices: and its devices.
    """

    at: float
    kind: Literal["event", "verdict"]
    word: str
    text: str
    device: str | None = None
    plan: str = ""
    devices: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


class Watch:
    """What is known of a run from one look to the next."""

    def __init__(self, timeline: list[DeviceLook] | None = None, run: RunState | None = None) -> None:
        self.timeline: list[DeviceLook] = [] if timeline is None else timeline
        self.run = None if run is None else weakref.ref(run)
        self._history = MoveHistory()
        self._plan: Plan | None = None
        self._moved_at: float | None = None
        self._was_parked = False
        self._before: Inventory | None = None
        self._answer: Answer | None = None
        self._factors: dict[tuple[object, ...], float] = {}
        self._asked_move: MoveRequest | None = None
        self._quiet_looks = 0
        self._budget = Budget()
        self._said: dict[tuple[object, ...], float] = {}
        self._refused = 0
        self._again_at = -math.inf
        self._steps = Steps()
        self._slowed: dict[str, tuple[float, float]] = {}
        self._rules, self._max_overhead = Rules(), 0.0

    def look(self, run: RunState, now: float, rules: Rules, max_overhead: float) -> MoveRequest | None:
        """Like :meth:`lightning_autopar.callbacks.elastic_replan.ElasticReplan.look`, by its rules."""
        self._rules, self._max_overhead = rules, max_overhead
        self._notice(run, now)
        inventory = self._felt(run, _without_own_work(run.inventory(), run), now)
        events = self._events(run, inventory)
        self._quiet_looks = 0 if events else self._quiet_looks + 1
        if run.parked:
            verdict, decision = self._parked(run, inventory, now)
        else:
            verdict, decision = self._running(run, inventory, now)
        self._history = verdict.history
        self._tell(run, verdict, decision, now)
        self._asked_move = None
        if verdict.action == "move":
            assert decision is not None, "a move goes somewhere"
            self._asked_move = MoveRequest(action="move", decision=decision, reason=verdict.reason, urgent=verdict.urgent)
        elif verdict.action == "park":
            self._asked_move = MoveRequest(action="park", decision=None, reason=verdict.reason, urgent=True)
        return self._asked_move

    def _felt(self, run: RunState, inventory: Inventory, now: float) -> Inventory:
        """The inventory with slowed devices if the run's steps take longer than usual, for any reason. It isn't known which of a plan's
        devices causes it, so all of them are slowed. Devices that the run left count as slowed for a while.
        """
        plan = run.decision.run_plan.plan
        if not run.parked:
            pace = tuple((device.slowdown, device.utilization) for device in inventory.devices if device.id in plan.devices)
            slower = self._steps.slower(run.step_seconds, (plan.devices, pace, run.moved_at), now, self._rules.patience)
            for device in plan.devices:
                if slower > 1:
                    self._slowed[device] = slower, now
                elif self._steps.known:
                    self._slowed.pop(device, None)
        self._slowed = {device: (ratio, at) for device, (ratio, at) in self._slowed.items() if now - at < _SLOW_SECONDS}
        if not self._slowed:
            return inventory
        devices = tuple(
            replace(device, slowdown=device.slowdown * self._slowed[device.id][0]) if device.id in self._slowed else device
            for device in inventory.devices
        )
        return replace(inventory, devices=devices)

    def _notice(self, run: RunState, now: float) -> None:
        """Record what has happened to the run since the last look."""
        plan, asked_move = run.decision.run_plan.plan, self._asked_move
        if self._plan is None:
            self._moved_at, self._was_parked = run.moved_at, run.parked
            self._budget.begin(now)
        elif run.moved_at != self._moved_at or not same_plan(plan, self._plan):
            at = now if run.moved_at is None else run.moved_at
            if run.parked:
                self._history = self._history.parked(self._plan, at, self._rules)
            elif self._was_parked:
                self._history = self._history.resumed(at)
            else:
                # A move that others asked for, or a failure forced, doesn't count as going back and forth.
                urgent = asked_move is None or asked_move.urgent
                self._history = self._history.moved(self._plan, plan, at, self._rules, urgent=urgent)
            self._moved_at, self._was_parked = run.moved_at, run.parked
            self._refused, self._again_at = 0, -math.inf
            self._said.clear()
        elif asked_move is not None and asked_move.urgent:
            self._refused += 1
            wait = min(_LONGEST_RETRY_SECONDS, _RETRY_SECONDS * 2.0 ** (self._refused - 1)) if self._refused > 1 else 0.0
            self._again_at = now + wait
        elif asked_move is not None:
            # The move wasn't done; at once it would fail again.
            self._history = replace(self._history, looks=0, since=now, moved_at=now)
        if self._plan is None or not same_plan(plan, self._plan):
            self._answer = Answer(decision=run.decision, inventory=_without_own_work(run.decision.report.inventory, run))
        self._plan = plan

    def _events(self, run: RunState, inventory: Inventory) -> tuple[DeviceEvent, ...]:
        """Report what has happened since the last look."""
        plan = run.decision.run_plan.plan
        before = _without_own_work(self._before or run.decision.report.inventory, run)
        events = device_events(before, inventory, plan.devices)
        self._before = inventory
        for event in events:
            self._add(run, "event", event.kind, event.text, event.device)
        return events

    def _running(self, run: RunState, inventory: Inventory, now: float) -> tuple[Verdict, Decision | None]:
        answer = self._answer
        assert answer is not None, "the first look took it from the run"
        current = self._current(run, answer)
        must = must_leave(current, inventory, measured_bytes=run.measured_bytes, host_bytes=_on_host(run.decision, current))
        left = usable(inventory)
        concerned = answer.devices | set(current.plan.devices)
        if must is not None and now < self._again_at:
            told = f"{must}; the run tried to leave {self._refused} times, and tries again in {format_seconds(self._again_at - now)}"
            return Verdict(action="stay", code="later", reason=told, history=self._history, urgent=True), None
        if must is not None:
            answer = self._replan(run, left)
        elif answer.stale(left):
            if self._budget.allows(now, self._max_overhead):
                answer = self._replan(run, left)
            elif answer.stale(left, concerned):
                told = "the devices have changed; planning again waits, so that it takes only a small share of the run's time"
                return Verdict(action="stay", code="later", reason=told, history=self._history.seen((), now)), None
        decision, best = answer.decision, answer.best
        pace = None if must is not None or best is None else self._pace(run, best, answer)
        verdict = decide_move(
            now=now,
            current=current.plan,
            best=best,
            inventory=left,
            rules=self._rules,
            history=self._history,
            pace=pace,
            remaining_steps=run.remaining_steps,
            move_seconds=run.move_seconds,
            must=must,
        )
        return verdict, decision

    def _parked(self, run: RunState, inventory: Inventory, now: float) -> tuple[Verdict, Decision | None]:
        left, answer = usable(inventory), self._answer
        if (answer is None or answer.stale(left)) and self._budget.allows(now, _PARKED_SHARE):
            answer = self._replan(run, left)
        best = None if answer is None else answer.best
        verdict = decide_resume(now=now, best=best, inventory=left, rules=self._rules, history=self._history)
        return verdict, None if answer is None else answer.decision

    def _replan(self, run: RunState, inventory: Inventory) -> Answer:
        """Plan for these devices, and record the seconds that it took."""
        began = time.perf_counter()
        decision = None
        if inventory.devices:
            try:
                decision = run.replan(_as_measured(inventory, run.decision.candidate, run.measured_bytes))
            except NothingFits:
                decision = None
            except ValueError as error:  # a pinned plan whose device isn't there, say: for now there is none
                self._add(run, "verdict", "refused", f"planning again found no plan: {error}", None)
        self._budget.spent(time.perf_counter() - began)
        self._answer = Answer(decision=decision, inventory=inventory)
        return self._answer

    @staticmethod
    def _current(run: RunState, answer: Answer) -> Candidate:
        """The running plan with its latest prediction."""
        best = answer.best
        return best if best is not None and same_plan(best.plan, run.decision.run_plan.plan) else run.decision.candidate

    def _pace(self, run: RunState, best: Candidate, answer: Answer) -> TimeScale | None:
        """Seconds a batch now and under the best plan; None where nothing was measured."""
        assert answer.decision is not None, "there is a best plan"
        plan, report, step_seconds = run.decision.run_plan.plan, answer.decision.report, run.step_seconds
        there = {device.id for device in report.inventory.devices}
        if step_seconds is None or not there.issuperset(plan.devices):
            return None
        split = run.decision.run_plan.batch == "global"
        raw = partial(answer.raw_seconds, split_batch=split)
        pace = pace_of(plan, best.plan, report, step_seconds, factors=self._factors, split_batch=split, raw=raw)
        if self._quiet_looks >= self._rules.patience:
            # A measurement right after a change is still from before it.
            self._factors[plan_kind(plan, report.inventory)] = pace.factor
        return pace

    # -- what is told ------------------------------------------------------------------------------------------------------------------

    def _tell(self, run: RunState, verdict: Verdict, decision: Decision | None, now: float) -> None:
        """Log a verdict with its reason: once, and again when it changes."""
        target = () if decision is None or verdict.code in ("same", "nothing") else decision.run_plan.plan.devices
        key = (verdict.action, verdict.code, target)
        if verdict.action == "stay" and now - self._said.get(key, -math.inf) < _SAID_SECONDS:
            return
        first = not self._said
        self._said[key] = now
        if verdict.code == "same" and first:
            return  # so it was planned
        word = "resume" if verdict.code == "resume" else verdict.action
        self._add(run, "verdict", word, verdict.reason, None)

    def _add(self, run: RunState, kind: Literal["event", "verdict"], word: str, text: str, device: str | None) -> None:
        plan = run.decision.run_plan.plan
        devices = () if run.parked else plan.devices
        moment = DeviceLook(at=time.time(), kind=kind, word=word, text=text, device=device, plan=plan.title(), devices=devices)
        self.timeline.append(moment)
        del self.timeline[:-_MOST_MOMENTS]
        if word not in ("move", "park", "resume"):  # the agent logs what it does
            rank_zero_info(f"autopar: {text}")


def _on_host(decision: Decision, current: Candidate) -> int:
    """What a plan's offloading takes of this host's memory."""
    if not current.plan.offload:
        return 0
    on_cpu = decision.run_plan.devices[0].kind == "cpu"
    held = host_bytes(decision.report.footprint, current.plan, precision=decision.report.precision, on_cpu=on_cpu)
    return held.offload + held.pinned


def _as_measured(inventory: Inventory, candidate: Candidate, measured: Mapping[str, int]) -> Inventory:
    """The inventory with as much less free as the running plan took more than predicted: planning itself only knows its predictions."""
    beyond = {
        device: measured.get(device, 0) - size.reserved
        for device, size in candidate.bytes.items()
        if measured.get(device, 0) > size.reserved
    }
    if not beyond:
        return inventory
    devices = tuple(replace(device, free_bytes=max(0, device.free_bytes - beyond.get(device.id, 0))) for device in inventory.devices)
    told = ", ".join(f"{format_bytes(size)} of {device}" for device, size in beyond.items())
    note = f"this run takes more memory than predicted; new plans reserve the difference: {told}"
    return replace(inventory, devices=devices, notes=(*inventory.notes, note))


def _without_own_work(inventory: Inventory, run: RunState) -> Inventory:
    """The inventory without the run's own work on its devices. The utilisation of the run's GPUs is mostly its own, and the driver doesn't
    tell whose it is: others' utilisation is known only from when the plan was made.
    """
    if run.parked:
        return inventory
    planned = {device.id: device.utilization for device in run.decision.report.inventory.devices}
    own = set(run.decision.run_plan.plan.devices)
    devices = tuple(
        replace(device, utilization=planned.get(device.id)) if device.id in own and device.kind == "cuda" else device
        for device in inventory.devices
    )
    return replace(inventory, devices=devices)
