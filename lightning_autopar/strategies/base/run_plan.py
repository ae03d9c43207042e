"""What an engine is told before it runs: the plan, and what planning found out about the step.

Values only; knows neither how a plan is found nor how it is executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from lightning_autopar.devices.inventory import Device, devices_label
from lightning_autopar.exact.data.collate_trial import Loading
from lightning_autopar.exact.data.counted_entries import Count
from lightning_autopar.exact.data.rank_share import KnownTensors
from lightning_autopar.exact.logs.log_rules import LogRules
from lightning_autopar.exact.step.attribute_rules import KeptRules
from lightning_autopar.exact.step.random_draws import DrawPlan
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
        data_draws: where the loading of a batch draws random numbers (``"samples"``, ``"collate"``): each rank must then do that work for
            the whole batch, to draw what one process would.
        loadings: what else was found out about loaders, by :func:`.collate_trial.loader_key`.
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
        if self.candidate is not None and self.candidate.seconds is not None:
            found["autopar/predicted_step_seconds"] = self.candidate.seconds.step
        if self.candidate is not None and self.candidate.bytes:
            found["autopar/predicted_peak_bytes"] = float(max(held.allocated for held in self.candidate.bytes.values()))
        return found

    @property
    def torch_devices(self) -> list[torch.device]:
        """The devices as torch names them in this process."""
        return [torch.device("cpu") if device.kind == "cpu" else torch.device("cuda", device.index or 0) for device in self.devices]
