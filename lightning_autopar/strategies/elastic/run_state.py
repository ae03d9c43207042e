"""The state of an elastic run: what runs, where, since when, and which devices it may use, as watchers and the agent see it;
and what happened to it, as the agent records it: which plans ran, when and why.

Some devices it avoids: those that somebody asked the run to leave, for some minutes, and memory that the run has run out of. It moves
nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_autopar._lightning import rank_zero_info
from lightning_autopar.devices.inventory import devices_label, usable
from lightning_autopar.report.report import NothingFits
from lightning_autopar.report.run_history import PlanSpan, RunHistory, RunMark
from lightning_autopar.strategies.base.run_plan import PlanChange
from lightning_autopar.strategies.elastic.generation_progress import RunningGeneration
from lightning_autopar.strategies.elastic.kept_leases import Promises
from lightning_autopar.strategies.elastic.snapshot_schedule import COPY_BYTES_PER_SECOND, Saver
from lightning_autopar.strategies.elastic.yielding import Yielding
from lightning_autopar.text import format_bytes

if TYPE_CHECKING:
    from lightning_autopar.devices.inventory import Inventory
    from lightning_autopar.strategies.preparation.decision import Decision


PARKED = "parked"


class HistoryRecorder:
    """Records the history of a run, in its agent's process."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._spans: list[PlanSpan] = []
        self._marks: list[RunMark] = []

    @property
    def spans(self) -> tuple[PlanSpan, ...]:
        """The periods, in order."""
        return tuple(self._spans)

    def seconds(self) -> float:
        """Since the run began."""
        return time.monotonic() - self._began

    def begin(self, decision: Decision, reason: str) -> None:
        """A generation begins, or goes on."""
        plan, predicted = decision.run_plan.plan, decision.run_plan.reserved_bytes
        kind = "begin" if not self._spans else "resume" if self._spans[-1].title == PARKED else "move"
        self._enter(
            PlanSpan(start_seconds=self.seconds(), title=plan.title(), devices=plan.devices, reason=reason, predicted_bytes=predicted), kind
        )

    def park(self, reason: str) -> None:
        """From here on, no workers run."""
        self._enter(PlanSpan(start_seconds=self.seconds(), title=PARKED, reason=reason), "park")

    def _enter(self, span: PlanSpan, kind: str) -> None:
        self.close(span.start_seconds)
        self._spans.append(span)
        if kind != "begin":
            self._marks.append(RunMark(at_seconds=span.start_seconds, kind=kind, words=span.reason))

    def close(self, at: float | None = None) -> None:
        """The latest period is over, now or at the given time."""
        if self._spans and self._spans[-1].end_seconds == math.inf:
            self._spans[-1] = replace(self._spans[-1], end_seconds=self.seconds() if at is None else at)

    def paused(self, seconds: float) -> None:
        """Keep the pause before the current generation's first boundary, since the last boundary of the generation before."""
        self._spans[-1] = replace(self._spans[-1], pause_seconds=seconds)

    def failed(self, words: str) -> None:
        """Something went wrong."""
        self._marks.append(RunMark(at_seconds=self.seconds(), kind="failure", words=words))

    def history(self, title: str) -> RunHistory:
        """The whole history."""
        return RunHistory(
            title=title,
            spans=tuple(replace(span, end_seconds=min(span.end_seconds, self.seconds())) for span in self._spans),
            marks=tuple(self._marks),
        )


#: The share of a device's predicted bytes that plans may still use, after a plan that was predicted to fit ran out of memory.
_LESS = 0.95


class AvoidedDevices:
    """Devices, and memory of devices, that plans of this run must not use."""

    def __init__(self) -> None:
        self._left_until: dict[str, float] = {}
        self._limits: dict[str, int] = {}

    def leave(self, devices: Iterable[str], seconds: float) -> None:
        """No plan uses these devices for so long."""
        until = time.monotonic() + seconds
        self._left_until.update(dict.fromkeys(devices, until))

    def allow_again(self) -> None:
        """Plans may use all devices again."""
        self._left_until.clear()

    def lower(self, reserved_bytes: Mapping[str, int]) -> None:
        """A plan that was predicted to fit ran out of memory: no plan may take as much of its devices again."""
        for device, size in reserved_bytes.items():
            self._limits[device] = int(_LESS * size)
            rank_zero_info(f"autopar: from now on plans may use {format_bytes(self._limits[device])} of {device}")

    def lift(self) -> None:
        """Plans may again use as much memory as before the run ran out of it."""
        if self._limits:
            rank_zero_info("autopar: no plan fits in that, so plans may use as much as before")
        self._limits.clear()

    def without(self, found: Inventory) -> Inventory:
        """The devices, without what plans must not use."""
        now = time.monotonic()
        self._left_until = {device: until for device, until in self._left_until.items() if until > now}
        return found.with_devices(
            replace(device, free_bytes=min(device.free_bytes, self._limits.get(device.id, device.free_bytes)))
            for device in found.devices
            if device.id not in self._left_until
        )


#: Seconds that forking, setup and joining take besides copying the state.
_MOVE_SECONDS = 2.0


class RunState:
    """A run as its agent and watchers see it now. Its figures are current: each is read anew at every look.

    Args:
        inventory: the devices as they are now, with what the run holds itself counted as free.
        replan: the best plan for an inventory, and for the most samples that fit at once, where that is known.
        state_bytes: of parameters, buffers and optimizer states.
        promises: of memory, which change with the plan; those of the first decision exist already.
        preempt: decides what the run does for runs that wait.
    """

    def __init__(
        self,
        *,
        decision: Decision,
        inventory: Callable[[RunningGeneration | None], Inventory],
        replan: Callable[[Inventory, int | None], Decision],
        state_bytes: int,
        saver: Saver,
        promises: Promises,
        preempt: Yielding,
    ) -> None:
        self._probe, self._plan, self._state_bytes = inventory, replan, state_bytes
        self._saver, self._promises, self._preempt = saver, promises, preempt
        #: The decision that runs now; for a parked run, the one that ran last.
        self.decision = decision
        self.recorder = HistoryRecorder()
        #: Whether the run waits without a device.
        self.parked = False
        #: Whether it stays parked until somebody asks it to go on.
        self.paused_by_user = False
        #: When the run last moved, was parked or resumed, as ``time.monotonic`` counts; None before its first move.
        self.moved_at: float | None = None
        #: Whether the next generation is being prepared.
        self.moving = False
        self._run: RunningGeneration | None = None
        self._avoided = AvoidedDevices()
        #: How many samples a rank can run at once, after more ran out of memory; None before that.
        self.samples_at_once: int | None = None
        self._pauses: list[float] = []
        self._left_at: float | None = None
        self._changes: list[PlanChange] = []

    @property
    def step_seconds(self) -> float | None:
        """Recently measured seconds a batch; a parked run has the last generation's; None before there is a figure."""
        return None if self._run is None else self._run.step_seconds

    @property
    def remaining_steps(self) -> float:
        """Batches to go; ``inf`` where nobody knows."""
        left = None if self._run is None else self._run.elastic.rendezvous.progress().batches_left
        return float("inf") if left is None else float(left)

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters, buffers and optimizer state."""
        return self._state_bytes

    @property
    def move_seconds(self) -> float:
        """Predicted seconds that a move costs the run: its pause, and the slowdown while it is prepared. Measured on the moves so far, or
        estimated by the bytes of the state.
        """
        if self._pauses:
            return max(self._pauses)
        return _MOVE_SECONDS + 2 * self._state_bytes / COPY_BYTES_PER_SECOND

    @property
    def measured_bytes(self) -> dict[str, int]:
        """The most bytes that each device of the plan was seen to hold, by its id; empty before they are known."""
        if self._run is None:
            return {}
        used = self._run.elastic.rendezvous.used_bytes()
        return {device: size for device, size in zip(self.decision.run_plan.plan.devices, used, strict=True) if size}

    def inventory(self) -> Inventory:
        """The devices that the run may use, as they are now, without what the runs wait for that come before this one; what the run itself
        holds of devices and host counts as free.
        """
        return self._preempt.leave_room(self._allowed(), None if self.parked else self._promises.held_bytes)

    def _allowed(self) -> Inventory:
        """The devices as they are now, without those that the run was asked to leave, and without memory that plans must not use."""
        return self._avoided.without(self._probe(self._run))

    def replan(self, inventory: Inventory) -> Decision:
        """The best plan for these devices, found in 0.1 to 1 s.

        Raises:
            NothingFits: if no plan fits.
        """
        there = usable(inventory)
        if not there.devices:
            raise NothingFits(replace(self.decision.report, inventory=there, candidates=(), best_index=None))
        found = None if self._run is None else self._run.elastic.rendezvous.samples_at_once()
        known = [each for each in (self.samples_at_once, found) if each is not None]
        self.samples_at_once = min(known, default=None)
        return self._plan(there, self.samples_at_once)

    @property
    def has_snapshot(self) -> bool:
        """Whether a generation that is forked now begins from a snapshot."""
        return self._saver.latest is not None or self.moving

    @property
    def step(self) -> int | None:
        """The last known global step of the trainer."""
        step = -1 if self._run is None else self._run.elastic.rendezvous.progress().step
        if step >= 0:
            return step
        return None if self._saver.latest is None else self._saver.latest.step

    def leave(self, devices: Sequence[str], seconds: float) -> None:
        """Don't use these devices for so long; a run on them moves at the next look."""
        self._avoided.leave(devices, seconds)

    def allow_again(self) -> None:
        """Plans may use all devices again, and a run that was asked to park may go on."""
        self._avoided.allow_again()
        self.paused_by_user = False

    def _changes_to(self, decision: Decision, reason: str) -> tuple[PlanChange, ...]:
        before, after = self.decision.run_plan, decision.run_plan
        self._changes.append(
            PlanChange(
                from_plan=before.plan.title(),
                from_devices=devices_label(before.devices),
                to_plan=after.plan.title(),
                to_devices=devices_label(after.devices),
                reason=reason,
                left_at=self._left_at,
            )
        )
        return tuple(self._changes)
