"""Each TrainingArguments that the script makes: numbered, and either kept off the GPUs, for planning, or set as planned.

Knows the class that transformers hands it; imports nothing of transformers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_autopar.huggingface.settings import Batch, Settings

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
