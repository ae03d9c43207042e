"""The plan of one call of ``train``, as TrainingArguments; it passes from the process that planned to those that run.

Values only; knows neither transformers nor how a plan is found.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_autopar import engines
from lightning_autopar.plans import Plan

#: The environment variable in which the processes that run find the settings.
VARIABLE = "AUTOPAR_TRANSFORMERS"


@dataclass(frozen=True, kw_only=True)
class Batch:
    """How a step's batch is made up in the script.

    Args:
        per_device: its ``per_device_train_batch_size``.
        accumulation: its ``gradient_accumulation_steps``.
        replicas: over how many GPUs transformers would replicate the model in the script's one process.
    """

    per_device: int
    accumulation: int
    replicas: int = 1

    @property
    def size(self) -> int:
        """Samples of one optimizer step."""
        return self.per_device * self.accumulation * self.replicas


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is set for one call of ``train``.

    Args:
        number: which of the script's TrainingArguments are changed, counted from 0 as they are made.
        batch: as those have it before.
        checkpointing: whether gradient checkpointing is switched on.
        checkpointed: the field that switches it, which transformers has renamed.
        layers: names of the classes that FSDP shards as units.
        peak_bytes: as predicted, on the fullest device.
        weighed: whether the loss is a mean over each part of a batch, so that parts of different sizes have to be weighed.
    """

    plan: Plan
    number: int
    batch: Batch
    checkpointing: bool
    checkpointed: str
    layers: tuple[str, ...]
    on_cpu: bool
    step_seconds: float
    peak_bytes: int
    weighed: bool = False

    @property
    def per_device(self) -> int:
        """Samples that each process takes at once."""
        return self.batch.size // (self.plan.world_size * self.plan.micro_batches)

    def fields(self) -> dict[str, Any]:
        """The TrainingArguments to set, by name."""
        plan = self.plan
        found: dict[str, Any] = {"per_device_train_batch_size": self.per_device, "gradient_accumulation_steps": plan.micro_batches}
        found |= engines.of(plan).training_arguments(plan, self.layers, {self.checkpointed: True} if self.checkpointing else {})
        return {**found, "use_cpu": True} if self.on_cpu else found

    @property
    def accumulates_in_shards(self) -> bool:
        """Whether gradients are to be reduced after each part of a batch. By default accelerate keeps whole gradients until the last part
        under FSDP2 (``Accelerator.no_sync``), which the prediction doesn't count.
        """
        return "fsdp_config" in self.fields() and self.plan.micro_batches > 1

    def lines(self, given: Mapping[str, Any]) -> list[str]:
        """What runs, and what is changed, a line each.

        Args:
            given: the values of these fields in the script.
        """
        changed = {name: value for name, value in self.fields().items() if name != "use_cpu" and given.get(name) != value}
        lines = [f"  {name}: {given.get(name)!r} → {value!r}" for name, value in changed.items()]
        if self.accumulates_in_shards:
            lines.append("  accelerator_config: sync_each_batch=True in gradient_accumulation_kwargs, so that gradients stay sharded")
        if self.plan.world_size > 1 and not {"fsdp_config", "deepspeed"} & {*self.fields()}:
            lines.append("  DDP's gradient_as_bucket_view: True, so that gradients lie in memory once")
        batch, plan = self.batch, self.plan
        first = f"autopar: transformers' Trainer runs under {plan.title()}; its TrainingArguments "
        first += "are changed:" if lines else "stay as they are:"
        parts = f"{plan.world_size} × {self.per_device} × {plan.micro_batches}"
        if batch.replicas > 1:
            lines.append(
                f"  in one process transformers would replicate the model over {batch.replicas} GPUs, which counts in a step's batch"
            )
        return [first, *lines, f"  a step's batch stays: {batch.size} samples = {parts} (devices × samples of each at once × accumulation)"]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "plan": self.plan.to_dict()}

    def hand_over(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The environment of a process that is to run under these settings."""
        return {**environment, VARIABLE: json.dumps(self.to_dict())}


def handed_over() -> Settings | None:
    """The settings that this process was started with, once: what it starts itself doesn't get them. None where there are none."""
    text = os.environ.pop(VARIABLE, None)
    if text is None:
        return None
    words = json.loads(text)
    made = {"plan": Plan.from_dict(words["plan"]), "batch": Batch(**words["batch"]), "layers": tuple(words["layers"])}
    return Settings(**{**words, **made})
