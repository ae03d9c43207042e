"""The script's calls of ``train``: planned for in place of training, or trained as transformers does, under the plan's settings.

Knows the modules of transformers by name; imports none of them.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning_autopar._autoload import when_executed
from lightning_autopar.huggingface.settings import Batch, Settings, told_by, watch_arguments

log = logging.getLogger(__name__)


@contextmanager
def trainers_planned(plan: Callable[[Any], None], *, left_out: list[str] | None = None) -> Iterator[None]:
    """While open, a call of ``train`` calls ``plan`` with the Trainer instead. It shall not return: there is nothing to return to.

    Args:
        plan: gets the Trainer.
        left_out: gets the name of each call of ``evaluate`` before that, which isn't made: each of its metrics is NaN, and none is saved.
            By default these calls are made.
    """

    def train(original: Callable[..., Any], trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plan(trainer)
        raise AssertionError("planning ends the script")

    with _watched(None, train, left_out=left_out):
        yield


class _Unknown(dict[str, float]):
    """The metrics of an evaluation that wasn't made."""

    def __missing__(self, name: str) -> float:
        return math.nan


def _instead_of_evaluating(kind: Any, left_out: list[str]) -> None:
    """Have the Trainer's class make no evaluation, and save no metrics of one."""
    save_metrics = kind.save_metrics

    def evaluate(
        trainer: Any, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval", **options: Any
    ) -> _Unknown:
        left_out.append("evaluate")
        log.warning("autopar: planning doesn't run evaluate(); each metric that the script reads from its result is nan")
        return _Unknown({f"{metric_key_prefix}_loss": math.nan})

    def save(trainer: Any, split: str, metrics: Any, *args: Any, **kwargs: Any) -> None:
        if not any(value != value for value in metrics.values()):  # a file may hold those of an earlier run
            save_metrics(trainer, split, metrics, *args, **kwargs)

    kind.evaluate, kind.save_metrics = evaluate, save


@contextmanager
def trainers_set(settings: Settings, ran: list[Settings]) -> Iterator[None]:
    """While open, the Trainer that was planned for trains under the settings.

    Args:
        ran: gets the settings when it begins to train.
    """

    def train(original: Callable[..., Any], trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if told_by(trainer.args).number == settings.number:
            _check(trainer, settings)
            ran.append(settings)
        elif settings.plan.world_size > 1:
            raise ValueError(
                f"this call of train() isn't the one that was planned for: another TrainingArguments was, and {settings.plan.world_size} "
                "processes were started for it, in each of which this one would take a batch of its own; use lightning-autopar run --allow "
                "single for a script that trains several times, or one script for each"
            )
        else:
            log.warning("autopar: this call of train() isn't the one that was planned for; it runs as the script says")
        return original(trainer, *args, **kwargs)

    with _watched(settings, train):
        yield


@contextmanager
def _watched(settings: Settings | None, train: Callable[..., Any], *, left_out: list[str] | None = None) -> Iterator[None]:
    """While open, what the script makes of transformers is watched, from the moment on that it imports it."""
    with ExitStack() as until_the_end:

        def arguments(module: Any) -> None:
            until_the_end.callback(watch_arguments(module.TrainingArguments, settings))

        def trainer(module: Any) -> None:
            kind = module.Trainer
            original = kind.train

            @functools.wraps(original)
            def instead(self: Any, *args: Any, **kwargs: Any) -> Any:
                return train(original, self, args, kwargs)

            for name in ("train", "evaluate", "save_metrics"):
                until_the_end.callback(setattr, kind, name, getattr(kind, name))
            kind.train = instead
            if left_out is not None:
                _instead_of_evaluating(kind, left_out)

        until_the_end.callback(when_executed("transformers.training_args", arguments))
        until_the_end.callback(when_executed("transformers.trainer", trainer))
        yield


def _check(trainer: Any, settings: Settings) -> None:
    """Look whether the settings have come through, and set what TrainingArguments have no field for.

    Raises:
        ValueError: if the script has changed them afterwards.
    """
    args = trainer.args
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if (value := getattr(args, name)) != settings.fields()[name]:
            raise ValueError(
                f"the plan needs {name}={settings.fields()[name]}, but the script has set it to {value} after it made TrainingArguments; "
                "set it where they are made"
            )
    if args.world_size != settings.plan.world_size:
        raise ValueError(f"the plan has {settings.plan.world_size} processes, but transformers sees {args.world_size}; report this")
    if trainer.accelerator.ddp_handler is not None:  # which only DDP reads
        trainer.accelerator.ddp_handler.gradient_as_bucket_view = True
    if settings.plan.world_size > 1 or settings.weighed:
        from lightning_autopar.huggingface.last_batches import shared_out, weighed  # imports torch, which the command line starts without

        if settings.plan.world_size > 1:
            shared_out(trainer)
        if settings.weighed:
            weighed(trainer)
    if settings.batch.accumulation != settings.plan.micro_batches and (samples := _samples(trainer.train_dataset)) is not None:
        trainer.callback_handler.callbacks.insert(0, _epochs_counted(settings.batch, samples, drop_last=args.dataloader_drop_last))


def _samples(dataset: Any) -> int | None:
    """The samples of an epoch; None where the dataset doesn't say."""
    return len(dataset) if hasattr(dataset, "__len__") else None


def _epochs_counted(batch: Batch, samples: int, *, drop_last: bool) -> Any:
    """A callback that makes the epoch that is logged the script's: transformers counts it in parts of a batch."""
    from transformers import TrainerCallback

    at_once = batch.per_device * batch.replicas
    parts = samples // at_once if drop_last else -(-samples // at_once)

    class EpochsCounted(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            before, ours = math.ceil(state.epoch) - 1, len(kwargs["train_dataloader"])
            steps = -(-round((state.epoch - before) * ours) // args.gradient_accumulation_steps)
            state.epoch = before + min(steps * batch.accumulation, parts) / parts

    return EpochsCounted()
