"""The plan of one call of ``train``, as TrainingArguments; it passes from the process that planned to those that run.

There each TrainingArguments that the script makes is numbered, and either kept off the GPUs, for planning, or set as planned. Knows the
class that transformers hands it; imports nothing of transformers, and doesn't know how a plan is found.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
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


_ATTRIBUTE = "_autopar_told"
#: Arguments that the plan sets, so that the script may not; each with its description for the message.
_PLANNED = (
    ("fsdp", "how the model is sharded"),
    ("deepspeed", "how the model is partitioned"),
    ("parallelism_config", "how ranks are laid out"),
)


@dataclass(frozen=True, kw_only=True)
class Told:
    """What the script has said in one TrainingArguments.

    Args:
        number: counted from 0, in the order in which they are made.
        batch: per device and accumulation.
        use_cpu: whether the script keeps off the GPUs itself.
    """

    number: int
    batch: Batch
    use_cpu: bool


def told_by(args: Any) -> Told:
    """What the script has said; of arguments that were made before this package watched, what they hold."""
    found: Told | None = vars(args).get(_ATTRIBUTE)
    return found or Told(number=-1, batch=_batch(args), use_cpu=bool(args.use_cpu))


def watch_arguments(kind: Any, settings: Settings | None) -> Callable[[], None]:
    """From now on, each TrainingArguments that is made is numbered, and changed.

    Without settings, none touches a GPU: planning needs none, and this process leaves their memory to those that train. With settings,
    those that were planned for get the plan's values.

    Args:
        settings: the plan's; None to plan.

    Returns:
        what stops it.
    """
    original, count = kind.__post_init__, 0

    @functools.wraps(original)
    def post_init(args: Any) -> None:
        nonlocal count
        told = Told(number=count, batch=_batch(args), use_cpu=bool(args.use_cpu))
        count += 1
        if settings is None:
            _refuse_planned(args)
            _made_for_planning(args, original)
        else:
            _made_to_run(args, original, settings, told)
        vars(args)[_ATTRIBUTE] = told

    kind.__post_init__ = post_init

    def stop() -> None:
        kind.__post_init__ = original

    return stop


def _batch(args: Any) -> Batch:
    return Batch(per_device=args.per_device_train_batch_size, accumulation=args.gradient_accumulation_steps)


def _refuse_planned(args: Any) -> None:
    """Raises: ValueError, if the script sets itself what plans differ in."""
    for name, words in _PLANNED:
        if (value := getattr(args, name, None)) not in (None, False, "", [], {}):
            raise ValueError(
                f"the script sets {name}={value!r} in TrainingArguments, but {words} is what lightning-autopar chooses for transformers' "
                f"Trainer; leave {name} out, or start the script as before, without lightning-autopar"
            )


def _made_for_planning(args: Any, post_init: Callable[[Any], None]) -> None:
    """Make the arguments as for a machine without a GPU, whatever they ask for; afterwards they say again what the script says."""
    withheld = {"use_cpu": True, "fp16": False, "tf32": None}  # transformers refuses the last two without a GPU
    said = {name: getattr(args, name) for name in withheld if hasattr(args, name)}
    for name in said:
        setattr(args, name, withheld[name])
    post_init(args)
    for name, value in said.items():
        setattr(args, name, value)


def _made_to_run(args: Any, post_init: Callable[[Any], None], settings: Settings, told: Told) -> None:
    """Make the arguments, with the plan's values in those that were planned for.

    Raises:
        ValueError: if the script has made others than when it was planned for.
    """
    if settings.on_cpu:
        args.use_cpu = True
    mine = told.number == settings.number
    if mine:
        planned = settings.batch
        if (told.batch.per_device, told.batch.accumulation) != (planned.per_device, planned.accumulation):
            raise ValueError(
                f"the script's TrainingArguments have per_device_train_batch_size={told.batch.per_device} and gradient_accumulation_steps="
                f"{told.batch.accumulation} now, but had {planned.per_device} and {planned.accumulation} when the plan was made; make them "
                "the same each time the script starts"
            )
        for name, value in settings.fields().items():
            setattr(args, name, value)
    post_init(args)
    if mine and settings.accumulates_in_shards:
        args.accelerator_config.gradient_accumulation_kwargs = {
            **(args.accelerator_config.gradient_accumulation_kwargs or {}),
            "sync_each_batch": True,
        }
