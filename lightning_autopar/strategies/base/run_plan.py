"""What an engine is told before it runs: the plan, what planning found out about the step, and how the run came from plan to plan.

The agent says from which plan to which and why. At which step a change was over only the new workers know;
rank 0 writes it in the run's folder, which outlives them. Knows neither how a plan is found nor how it is executed; calls no logger.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_autopar.devices.inventory import Device, devices_label
from lightning_autopar.exact.data.collate import Loading
from lightning_autopar.exact.data.counted_entries import Count
from lightning_autopar.exact.data.rank_share import KnownTensors
from lightning_autopar.exact.logs.log_rules import LogRules
from lightning_autopar.exact.logs.metrics_of_values import MetricRules
from lightning_autopar.exact.random.whole_batch_draws import DrawPlan
from lightning_autopar.exact.step.attribute_rules import KeptRules
from lightning_autopar.exact.step.shared_network import SharedModules
from lightning_autopar.memory.length_spread import Lengths
from lightning_autopar.plans import Plan
from lightning_autopar.report.report import Candidate

BatchRule = Literal["global", "per_device"]


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What an engine gets: the plan, and what planning found out about the step.

    Args:
        devices: the plan's devices, in rank order.
        batch: ``"global"``: the user's batch is split over the ranks; ``"per_device"``: each rank draws batches of its own, as Lightning
            does.
        draws: what the probe found out about the step's random draws; None where it draws nothing.
        log_rules: how to combine the ranks' logged values into the whole batch's, where the probe found out.
        unweighed: see :class:`.SplitFinding`.
        known: the tensors of batches, by step; without one where planning tried none, or the user lets others be split.
        kept_rules: by step, how to combine the values that ranks keep on the module between steps into those of one device.
        metric_rules: by step, which metrics get a value of their batch rather than its samples.
        data_draws: where the loading of a batch draws random numbers (``"samples"``, ``"collate"``): each rank must then do that work for
            the whole batch, to draw what one process would.
        loadings: what else was found out about loaders, by :func:`.collate.loader_key`.
        from_snapshot: whether ``ckpt_path`` is a snapshot's folder.
        weights_only: as given to the trainer; Lightning 2.6 loses it where a checkpoint is restored after setup (``Trainer._run``).
        large: whether the module is so large that no rank but the first should ever build all of it.
        candidate: the plan with its prediction.
        budgets: bytes that the plan may use of each device, by its id.
        findings: what engines found out about the step, by the engine's name; only that engine reads it.
        elastic: whether the run may go on under another plan, so that every loader's position must be known.
        undivided: why a training batch can't be run again in more parts where memory runs out; None where it can.
        unknown: what isn't known of running it in parts, in words; empty where that is known.
        lengths: how batches vary, and what the plan counts with; None where that isn't known.
        evaluation_parts: into how many parts each batch of a validation or a test is cut, as one ran out of memory.
        shared: the submodules that ranks share by rows, while each has the whole batch; empty where ranks have parts of the batch.
        needs_group: whether the user's code sees the process group, as its step failed without one or wasn't tried.
        at_least: bytes by device id to ask for, whatever is predicted, as the plan ran out of memory before.
    """

    plan: Plan
    devices: tuple[Device, ...]
    batch: BatchRule = "global"
    draws: DrawPlan | None = None
    data_draws: tuple[str, ...] = ()
    loadings: Mapping[str, Loading] = field(default_factory=dict)
    log_rules: LogRules = field(default_factory=dict)
    unweighed: tuple[Count, ...] = ()
    known: Mapping[str, KnownTensors] = field(default_factory=dict)
    kept_rules: KeptRules = field(default_factory=dict)
    metric_rules: MetricRules = field(default_factory=dict)
    large: bool = False
    from_snapshot: bool = False
    weights_only: bool | None = None
    candidate: Candidate | None = None
    budgets: Mapping[str, int] = field(default_factory=dict)
    findings: Mapping[str, Any] = field(default_factory=dict)
    elastic: bool = False
    undivided: str | None = "planning didn't try whether its batches can be run in parts"
    unknown: str = ""
    lengths: Lengths | None = None
    evaluation_parts: int = 1
    shared: SharedModules = field(default_factory=dict)
    needs_group: bool = False
    at_least: Mapping[str, int] = field(default_factory=dict)

    @property
    def data_ranks(self) -> int:
        """Into how many parts ranks split a batch."""
        return 1 if self.shared else self.plan.data_ranks

    @property
    def finding(self) -> Any:
        """What the plan's engine found out; None where it found nothing."""
        return self.findings.get(self.plan.engine)

    @property
    def reserved_bytes(self) -> dict[str, int]:
        """What the plan is predicted to take of each device, by its id; empty where nothing was predicted."""
        return {} if self.candidate is None else {device: held.reserved for device, held in self.candidate.bytes.items()}

    @property
    def needed_bytes(self) -> dict[str, int]:
        """The bytes of each device that the plan needs, by its id: the prediction with its margin; empty where nothing was predicted."""
        if self.candidate is None:
            return {}
        return {device: max(needed, self.at_least.get(device, 0)) for device, needed in self.candidate.needs.items()}

    @property
    def predicted_step_seconds(self) -> float:
        """The predicted seconds of a step; 0 where they weren't predicted."""
        return 0.0 if self.candidate is None or self.candidate.seconds is None else self.candidate.seconds.step

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The plan and its prediction for loggers, under names that no user's hyperparameter has. They name the first plan, once, as some
        loggers refuse one that changes; later plans are logged as numbers (``callbacks/plan_monitor.py``).
        """
        found: dict[str, Any] = {
            "autopar/plan": self.plan.title(),
            "autopar/engine": self.plan.engine,
            "autopar/devices": devices_label(self.devices),
            "autopar/world_size": self.plan.world_size,
        }
        return found | {name: int(value) if name.endswith("_bytes") else value for name, value in self.predictions.items()}

    @property
    def predictions(self) -> dict[str, float]:
        """The predicted seconds of a step and bytes on the fullest device, for loggers; values that aren't predicted are left out."""
        found: dict[str, float] = {}
        if self.predicted_step_seconds:
            found["autopar/predicted_step_seconds"] = self.predicted_step_seconds
        if self.candidate is not None and self.candidate.bytes:
            found["autopar/predicted_peak_bytes"] = float(max(held.allocated for held in self.candidate.bytes.values()))
        return found

    @property
    def torch_devices(self) -> list[torch.device]:
        """The devices as torch names them in this process."""
        return [torch.device("cpu") if device.kind == "cpu" else torch.device("cuda", device.index or 0) for device in self.devices]


@dataclass(frozen=True, kw_only=True)
class PlanChange:
    """A change from one plan to another, or back to the same plan after a failure.

    Args:
        from_plan: its title; ``to_plan`` likewise.
        from_devices: its devices in short; ``to_devices`` likewise.
        reason: why, in words.
        left_at: when the last batch under the old plan began, by the host's monotonic clock; None where the old plan began no batch.
    """

    from_plan: str
    from_devices: str
    to_plan: str
    to_devices: str
    reason: str
    left_at: float | None


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """The first batch after a change.

    Args:
        number: of the change, from 1.
        step: the trainer's global step at the first batch under the new plan.
        pause_seconds: from the last batch under the old plan to this one; None where the old plan began no batch.
    """

    number: int
    step: int
    pause_seconds: float | None


@dataclass(frozen=True, kw_only=True)
class PlanChanges:
    """All changes of a run up to a generation of workers.

    Args:
        changes: in order; the last one led here.
    """

    changes: tuple[PlanChange, ...] = ()
    folder: Path = field(default_factory=Path)

    @property
    def _path(self) -> Path:
        return self.folder / "arrivals.jsonl"

    def arrivals(self) -> dict[int, Arrival]:
        """The recorded arrivals, by number; a change whose workers ended before their first batch has none."""
        if not self._path.is_file():
            return {}
        found = (Arrival(**json.loads(line)) for line in self._path.read_text(encoding="utf-8").splitlines())
        return {arrival.number: arrival for arrival in found}

    def arrive(self, step: int) -> Arrival:
        """Called by rank 0 at its first batch: the latest change is over."""
        assert self.changes, "there was a change"
        left_at = self.changes[-1].left_at
        pause = None if left_at is None else max(0.0, time.monotonic() - left_at)
        arrival = Arrival(number=len(self.changes), step=step, pause_seconds=pause)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(vars(arrival)) + "\n")
        return arrival

    def words(self, arrival: Arrival) -> str:
        """One change in a sentence."""
        change = self.changes[arrival.number - 1]
        pause = "" if arrival.pause_seconds is None else f" after {arrival.pause_seconds:.3g} s"
        return (
            f"step {arrival.step}: from {change.from_plan} on {change.from_devices} to {change.to_plan} on {change.to_devices}{pause}: "
            f"{change.reason}"
        )
