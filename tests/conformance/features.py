"""What a Trainer can do, each as a small change to a case's run. Knows of no plan, engine or strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger
from torch.optim.swa_utils import get_ema_avg_fn

from tests.conformance.recording import MemoryLogger

#: Since Lightning 2.6; the feature is left out where it is missing.
HAS_WEIGHT_AVERAGING = hasattr(callbacks, "WeightAveraging")


def nothing(root: Path) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A change to a run.

    Args:
        name: the key in every table.
        about: the row's words in docs/features.md.
        cases: the zoo's members that it is tried on.
        trainer: keyword arguments of the Trainer, made for a run that writes under the given folder.
        module: keyword arguments of the module.
        data: keyword arguments of the case's data.
        epochs: how many to train.
        resume: whether the run stops after its first epoch, and a new Trainer goes on from the last checkpoint, as if it hadn't stopped.
        resume_from: a checkpoint that the run begins with.
        after: what is called on the Trainer after fit.
        numbers: how the comparison with plain Lightning measures; see ``harness.TOLERANCES``.
    """

    name: str
    about: str
    cases: tuple[str, ...] = ("gpt", "resnet", "lstm")
    trainer: Callable[[Path], dict[str, Any]] = nothing
    module: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    epochs: int = 2
    resume: bool = False
    resume_from: Path | None = None
    after: tuple[Literal["validate", "predict"], ...] = ()
    numbers: Literal["fp32", "bf16-mixed", "bf16-true"] = "fp32"


def constant(**arguments: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda root: dict(arguments)


def with_callbacks(*build: Callable[[Path], Any], **arguments: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda root: {"callbacks": [make(root) for make in build], **arguments}


def learning_rates(root: Path) -> Any:
    return callbacks.LearningRateMonitor(logging_interval="step")


def best_checkpoint(root: Path) -> Any:
    return callbacks.ModelCheckpoint(root / "checkpoints", filename="{epoch}-{step}", monitor="val_loss", save_top_k=2, save_last=True)


def impatience(root: Path) -> Any:
    # No loss falls by ten in an epoch, so this stops after the second of them.
    return callbacks.EarlyStopping("val_loss", min_delta=10.0, patience=1)


def moving_average(root: Path) -> Any:
    return callbacks.WeightAveraging(avg_fn=get_ema_avg_fn(0.7))


def several_loggers(root: Path) -> dict[str, Any]:
    return {"logger": [CSVLogger(root, name="csv", version=0, flush_logs_every_n_steps=1), MemoryLogger()]}


#: The run as it is: what every member of the zoo is tried with.
PLAIN = Feature(name="plain", about="fit as it is", cases=())

FEATURES: dict[str, Feature] = {
    feature.name: feature
    for feature in (
        # Small enough bounds that every step is clipped.
        Feature(name="clip-norm", about="gradient clipping by norm", trainer=constant(gradient_clip_val=0.1)),
        Feature(
            name="clip-value",
            about="gradient clipping by value",
            trainer=constant(gradient_clip_val=1e-3, gradient_clip_algorithm="value"),
        ),
        # Four batches an epoch in windows of three: the last window has one.
        Feature(name="accumulation", about="gradient accumulation, ragged window", trainer=constant(accumulate_grad_batches=3)),
        # No BatchNorm in eight steps of bf16: it amplifies rounding. See test_batch_norm_in_bf16_is_as_near_to_fp32_as_plain_lightning.
        Feature(
            name="bf16-mixed",
            about="precision bf16-mixed",
            cases=("gpt", "lstm", "nested"),
            trainer=constant(precision="bf16-mixed"),
            numbers="bf16-mixed",
        ),
        Feature(
            name="bf16-true",
            about="precision bf16-true",
            cases=("frozen-backbone", "lstm", "nested"),
            trainer=constant(precision="bf16-true"),
            numbers="bf16-true",
        ),
        Feature(name="schedule-step", about="LR scheduler by step", module={"schedule": "step"}, trainer=with_callbacks(learning_rates)),
        Feature(name="schedule-epoch", about="LR scheduler by epoch", module={"schedule": "epoch"}, trainer=with_callbacks(learning_rates)),
        Feature(
            name="schedule-plateau",
            about="ReduceLROnPlateau on the validation loss",
            module={"schedule": "plateau"},
            trainer=with_callbacks(learning_rates),
            epochs=3,
        ),
        Feature(name="early-stopping", about="EarlyStopping", trainer=with_callbacks(impatience), epochs=5),
        Feature(name="checkpoint", about="ModelCheckpoint with a monitor", trainer=with_callbacks(best_checkpoint)),
        Feature(name="resume", about="resume from last.ckpt", trainer=with_callbacks(best_checkpoint), resume=True),
        Feature(name="mid-epoch-validation", about="validation in mid-epoch", trainer=constant(val_check_interval=0.5)),
        Feature(
            name="weight-averaging",
            about="EMA by WeightAveraging",
            cases=("lstm", "resnet", "nested"),
            trainer=with_callbacks(moving_average),
        ),
        Feature(name="loggers", about="several loggers", cases=("gpt", "vae", "metrics"), trainer=several_loggers),
        Feature(
            name="user-checkpointing",
            about="torch.utils.checkpoint in the module",
            cases=("gpt", "resnet", "encoder-decoder"),
            module={"checkpointing": True},
        ),
        Feature(name="sync-dist", about="log(sync_dist=True)", cases=("gpt", "lstm", "datamodule"), module={"sync_dist": True}),
        Feature(
            name="limits",
            about="limit_train_batches and limit_val_batches",
            trainer=constant(limit_train_batches=3, limit_val_batches=1),
        ),
        Feature(name="workers", about="DataLoader workers", cases=("gpt", "graph", "datamodule"), data={"num_workers": 2}),
        Feature(name="after-fit", about="validate and predict after fit", after=("validate", "predict")),
    )
    if feature.name != "weight-averaging" or HAS_WEIGHT_AVERAGING
}
