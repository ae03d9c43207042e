"""What a module logs under pipelines on real ranks is what plain Lightning has of it, on every rank, and so are decisions made by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torchmetrics import MeanAbsoluteError, MeanMetric, MeanSquaredError, Metric, MetricCollection, PearsonCorrCoef

from lightning_autopar.plans import Plan
from tests.strategies.fitted import numbers
from tests.strategies.pipeline.chained import Block
from tests.strategies.pipelines import pipeline, run

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")]
BLOCKS = tuple(f"blocks.{index}" for index in range(4))


class Logging(pl.LightningModule):
    """Logs before, between and after its blocks, in hooks, and by metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 1)
        self.level, self.error, self.epoch = MeanMetric(), MeanSquaredError(), PearsonCorrCoef()
        self.both = MetricCollection({"mae": MeanAbsoluteError(), "mse": MeanSquaredError()}, prefix="set_")
        self.val_error, self.ever = MeanAbsoluteError(), MeanAbsoluteError()

    def setup(self, stage: str) -> None:
        """What was recorded of the steps, in this process, updated the metrics."""
        for metric in self.modules():
            if isinstance(metric, Metric):
                metric.reset()

    def hidden(self, batch: Any, *, logs: bool) -> Tensor:
        x: Tensor = batch[0]
        for index, block in enumerate(self.blocks):
            if logs:
                self.log(f"height_{index}", x.abs().mean(), on_epoch=True, on_step=index == 0)
            x = block(x)
        output: Tensor = self.head(x)
        return output

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("input", batch[0].mean(), prog_bar=True)
        self.level(batch[0].mean(), weight=len(batch[0]))
        self.log("level", self.level, on_step=True, on_epoch=True)
        self.log("rows", float(len(batch[0])), reduce_fx="sum", on_step=True, on_epoch=True)
        given = self.hidden(batch, logs=True)
        loss = nn.functional.mse_loss(given, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log_dict({"largest": given.max(), "first": -given.min()}, reduce_fx="max", on_epoch=True)
        if batch_idx == 2:
            self.log("rare", loss, rank_zero_only=True)
        self.log("error", self.error(given, batch[1]))
        self.log("error_at_end", self.error, on_step=False, on_epoch=True)
        self.log_dict(self.both(given, batch[1]), on_step=True, on_epoch=False)
        self.both.update(given, batch[1])
        self.epoch.update(given[:, 0], batch[1][:, 0])
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("mean_target", batch[1].mean(), on_step=True, on_epoch=True)
        self.log("seen_loss", float(outputs["loss"]))

    def on_train_epoch_end(self) -> None:
        self.log("correlation", self.epoch.compute())
        self.epoch.reset()
        self.log_dict(self.both.compute(), prog_bar=True)
        self.both.reset()
        self.log("number", float(self.current_epoch), reduce_fx="sum")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_input", batch[0].mean())
        given = self.hidden(batch, logs=False)
        self.log("val_loss", nn.functional.mse_loss(given, batch[1]), on_step=True, on_epoch=True, add_dataloader_idx=False)
        self.val_error.update(given, batch[1])
        self.ever.update(given, batch[1])
        self.log("val_error", self.val_error)

    def on_validation_epoch_end(self) -> None:
        self.log("ready", 1.0)
        self.log("ever", self.ever.compute())  # it isn't reset

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """A metric's value of this batch, and of all that came before."""
        given = self.hidden(batch, logs=False)
        return self.val_error(given, batch[1]), self.val_error.compute()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.5)


class Everybody(pl.Callback):
    """Writes what each rank's callbacks and progress bar would see, as it comes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, hook: str, trainer: Any) -> None:
        values = {**trainer.callback_metrics, **{f"bar {name}": value for name, value in trainer.progress_bar_metrics.items()}}
        with (self.folder / f"{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps([hook, {name: float(value) for name, value in values.items()}]) + "\n")

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.write("batch", trainer)

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        self.write("validation", trainer)

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        self.write("end", trainer)


class Lines(Logger):
    """Rank 0's logger."""

    name, version = "lines", 0

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps([step, {name: float(value) for name, value in metrics.items()}]) + "\n")


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def fitted(plan: Plan | None, folder: Path) -> dict[str, Any]:
    """A run that ends early, with all that was seen of it."""
    folder.mkdir()
    stopping = EarlyStopping("val_error", patience=1, min_delta=0.05)
    checkpoint = ModelCheckpoint(folder, "{epoch}-{val_loss:.4f}", monitor="val_loss", save_top_k=2)
    _, losses, trainer, _ = run(
        Logging,
        numbers(21),
        plan,
        blocks=BLOCKS,
        max_epochs=6,
        callbacks=[Everybody(folder), stopping, checkpoint],
        logger=Lines(folder / "logged.jsonl"),
        enable_checkpointing=True,
        accumulate_grad_batches=2,
    )
    return {
        "losses": losses,
        "epochs": trainer.current_epoch,
        "stopped": stopping.stopped_epoch,
        "kept": sorted(path.name for path in folder.glob("*.ckpt")),
        "best": float(checkpoint.best_model_score or 0.0),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "logged": lines(folder / "logged.jsonl"),
        "ranks": [lines(path) for path in sorted(folder.glob("?.jsonl"))],
    }


def close(actual: Any, expected: Any, where: str = "") -> None:
    """Equal, numbers to 1e-5."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for name, value in expected.items():
            close(actual[name], value, f"{where}.{name}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for index, value in enumerate(expected):
            close(actual[index], value, f"{where}[{index}]")
    elif isinstance(expected, (float, Tensor)):
        assert float(actual) == pytest.approx(float(expected), rel=1e-5, abs=1e-5), where
    else:
        assert actual == expected, where


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return fitted(None, tmp_path_factory.mktemp("plain") / "run")


@pytest.mark.parametrize(
    "under",
    [
        pipeline(BLOCKS[2:3], schedule="1f1b", micro_batches=2),
        pipeline(BLOCKS[1:], schedule="interleaved_1f1b", ranks=2, micro_batches=2),
        pipeline(BLOCKS[1:3], schedule="1f1b", micro_batches=3),
    ],
    ids=lambda plan: plan.title(),
)
def test_every_rank_has_what_plain_lightning_logs(under: Plan, plain: dict[str, Any], tmp_path: Path) -> None:
    found = fitted(under, tmp_path / "run")
    assert 0 < plain["stopped"] < 6
    assert len(found["ranks"]) == under.world_size
    for rank, seen in enumerate(found.pop("ranks")):
        close(seen, plain["ranks"][0], f"rank {rank}")
    close(found, {name: value for name, value in plain.items() if name != "ranks"})


@pytest.mark.parametrize(("fn", "hook"), [("validate", "validation_step"), ("test", "test_step"), ("predict", "predict_step")])
def test_evaluation(fn: str, hook: str) -> None:
    options: dict[str, Any] = {"blocks": BLOCKS, "hooks": (hook,), "fn": fn}
    _, _, _, found = run(Logging, numbers(21), pipeline(BLOCKS[2:3]), **options)
    _, _, _, expected = run(Logging, numbers(21), None, **options)
    close(found, expected)
