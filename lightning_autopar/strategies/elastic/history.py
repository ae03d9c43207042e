"""What happened to an elastic run, as its agent records it: which plans ran, when and why, who else used the devices, and the loss."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lightning_autopar.report.run_history import LossPoint, MemorySample, MemoryUse, PlanSpan, RunHistory, RunMark

if TYPE_CHECKING:
    from lightning_autopar.devices.inventory import Inventory
    from lightning_autopar.strategies.preparation.decision import Decision

PARKED = "parked"
#: The shortest time between samples of memory and loss; and the number of samples at which every other one is dropped.
_SAMPLE_SECONDS, _MOST_SAMPLES = 0.5, 4000


@dataclass(frozen=True, kw_only=True)
class PlanPeriod:
    """The period of one generation, or a period in which the run was parked.

    Args:
        begun: seconds since the run began; ``ended`` likewise, None while it lasts.
        plan: its title; "parked" where there is none.
        devices: what it held.
        reason: why it began.
        pause_seconds: from the last boundary of the generation before to this one's first; None where there was none before.
        predicted_bytes: by device, the bytes that were predicted to be taken.
    """

    begun: float
    ended: float | None = None
    plan: str
    devices: tuple[str, ...]
    reason: str
    pause_seconds: float | None = None
    predicted_bytes: Mapping[str, int]


class HistoryRecorder:
    """Records the history of a run, in its agent's process."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._spans: list[PlanPeriod] = []
        self._marks: list[RunMark] = []
        self._memory: list[MemorySample] = []
        self._losses: list[LossPoint] = []
        self._sampled = float("-inf")
        self._every_seconds = _SAMPLE_SECONDS

    @property
    def spans(self) -> tuple[PlanPeriod, ...]:
        """The periods, in order."""
        return tuple(self._spans)

    def seconds(self) -> float:
        """Since the run began."""
        return time.monotonic() - self._began

    def begin(self, decision: Decision, reason: str) -> None:
        """A generation begins, or goes on."""
        plan, predicted = decision.run_plan.plan, decision.run_plan.reserved_bytes
        kind = "begin" if not self._spans else "resume" if self._spans[-1].plan == PARKED else "move"
        self._enter(
            PlanPeriod(begun=self.seconds(), plan=plan.title(), devices=plan.devices, reason=reason, predicted_bytes=predicted), kind
        )

    def park(self, reason: str) -> None:
        """From here on, no workers run."""
        self._enter(PlanPeriod(begun=self.seconds(), plan=PARKED, devices=(), reason=reason, predicted_bytes={}), "park")

    def _enter(self, span: PlanPeriod, kind: str) -> None:
        self.close(span.begun)
        self._spans.append(span)
        if kind != "begin":
            self._marks.append(RunMark(at_seconds=span.begun, kind=kind, words=span.reason))

    def close(self, at: float | None = None) -> None:
        """The latest period is over, now or at the given time."""
        if self._spans and self._spans[-1].ended is None:
            self._spans[-1] = replace(self._spans[-1], ended=self.seconds() if at is None else at)

    def paused(self, seconds: float) -> None:
        """Keep the pause before the current generation's first boundary, since the last boundary of the generation before."""
        self._spans[-1] = replace(self._spans[-1], pause_seconds=seconds)

    def failed(self, words: str) -> None:
        """Something went wrong."""
        self._marks.append(RunMark(at_seconds=self.seconds(), kind="failure", words=words))

    def is_due(self) -> bool:
        """Whether it is time to sample."""
        return self.seconds() - self._sampled >= self._every_seconds

    def sample(self, inventory: Inventory, ours: Mapping[str, int], loss: tuple[int, float] | None) -> None:
        """Record what is on the devices now, and the latest loss with its step.

        Args:
            inventory: with what this run holds counted as free.
            ours: bytes that this run holds, or was predicted to hold, by device.
            loss: the step and the value; None where nothing was logged.
        """
        self._sampled = now = self.seconds()
        devices = {
            device.id: MemoryUse(ours.get(device.id, 0), max(0, device.total_bytes - device.free_bytes), device.total_bytes)
            for device in inventory.devices
        }
        self._memory.append(MemorySample(at_seconds=now, devices=devices))
        if loss is not None and (not self._losses or self._losses[-1].step != loss[0]):
            self._losses.append(LossPoint(now, *loss))
        if len(self._memory) > _MOST_SAMPLES:
            self._memory, self._losses = self._memory[::2], self._losses[::2]
            self._every_seconds *= 2

    def history(self, title: str) -> RunHistory:
        """The whole history, for a picture."""
        return RunHistory(
            title=title,
            spans=tuple(
                PlanSpan(
                    start_seconds=span.begun,
                    end_seconds=self.seconds() if span.ended is None else span.ended,
                    title=span.plan,
                    devices=span.devices,
                    predicted_bytes=span.predicted_bytes,
                )
                for span in self._spans
            ),
            marks=tuple(self._marks),
            memory=tuple(self._memory),
            losses=tuple(self._losses),
        )
