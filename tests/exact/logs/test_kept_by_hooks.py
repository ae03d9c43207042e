"""Which hooks may keep what they get of a batch, judged by their code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_autopar.exact.logs.kept_by_hooks import keeping_hooks, late_hooks
from lightning_autopar.exact.logs.logging_hooks import overridden
from lightning_autopar.strategies.auto import AutoParallelStrategy
from tests.strategies.fitted import QUIET


class Appends(pl.Callback):
    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.seen: list[Any] = [*getattr(self, "seen", []), outputs]


class Hands(pl.Callback):
    """Gives them to a function that keeps them."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.take(batch)

    def take(self, rows: Any) -> None:
        self.kept.append(rows)


class Counts(pl.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, number: int) -> None:
        self.batches = number


class KeepsLoss(pl.Callback):
    """The loss that hooks get is the whole batch's."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.loss = float(outputs["loss"])


class Logs(pl.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.log("mean", outputs["values"].mean())


class Measures(pl.Callback):
    def __init__(self) -> None:
        self.mean = MeanMetric()

    def on_test_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.mean.update(outputs)


class Replaces(pl.Callback):
    """Writes into the batch itself."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        batch[0] = batch[0] * 2


class Queue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(4, 2))

    def push(self, rows: Any) -> None:
        self.rows[: len(rows)] = rows

    def look(self) -> Any:
        return self.rows.sum()


class Queues(pl.Callback):
    """Keeps them in a module that it brings, as an evaluation by neighbours does."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.queues = nn.ModuleDict({"rows": Queue()})

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.queues["rows"].push(outputs["rows"])


class LooksAtQueue(Queues):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.log("kept", pl_module.queues["rows"].look() + outputs["rows"].sum())


class QueuesByHook(Queues):
    """In the step."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        pl_module.layer.register_forward_hook(lambda module, args, output: pl_module.queues["rows"].push(output))

    def on_train_batch_end(self, *_: Any) -> None:
        pass


class Holds(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.queue.push(batch)


def test_hooks_that_a_callback_will_put_on_modules() -> None:
    trainer: Any = SimpleNamespace(lightning_module=BoringModel(), callbacks=[Queues(), QueuesByHook(), pl.callbacks.DeviceStatsMonitor()])
    (said,) = late_hooks(trainer)
    assert said.startswith("the callback QueuesByHook puts hooks on modules (register_forward_hook)")
    trainer = SimpleNamespace(lightning_module=Holds(), callbacks=[])
    assert keeping_hooks(trainer)[0].startswith("the module may keep what on_train_batch_end gets")


@pytest.mark.parametrize(
    ("callback", "hook"),
    [
        (Queues, "on_train_batch_end"),
        (LooksAtQueue, None),
        (Appends, "on_validation_batch_end"),
        (Hands, "on_train_batch_start"),
        (Replaces, None),
        (Counts, None),
        (KeepsLoss, None),
        (Logs, None),
        (Measures, None),
        (pl.callbacks.DeviceStatsMonitor, None),
    ],
)
def test_a_callback_is_judged_by_what_it_does_with_a_batch(callback: Any, hook: str | None) -> None:
    trainer: Any = SimpleNamespace(lightning_module=pl.LightningModule(), callbacks=[callback()])
    said = keeping_hooks(trainer)
    assert [sentence.split(" of a batch")[0] for sentence in said] == (
        [] if hook is None else [f"the callback {callback.__name__} may keep what {hook} gets"]
    )


class Probes(pl.Callback):
    """Trains a network beside the module."""

    def __init__(self, probe: nn.Module) -> None:
        self.probe = probe

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.probe(batch).sum().backward()


class ProbesLate(Probes):
    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.probe = nn.Sequential(nn.Linear(2, 2), nn.Dropout())


class Noises(pl.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        print(float((batch * torch.randn_like(batch)).sum()))


@pytest.mark.parametrize(
    ("callback", "draws"),
    [
        (Probes(nn.Linear(2, 2)), False),
        (Probes(nn.Sequential(nn.Linear(2, 2), nn.Dropout())), True),
        (ProbesLate(nn.Linear(2, 2)), True),
        (Noises(), True),
        (Measures(), False),
    ],
)
def test_what_a_hook_draws_for_samples_is_told(callback: Any, draws: bool) -> None:
    trainer: Any = SimpleNamespace(lightning_module=pl.LightningModule(), callbacks=[callback])
    said = (
        f"the callback {type(callback).__name__} may draw random numbers for what on_train_batch_end gets of a batch: each rank draws for "
    )
    assert keeping_hooks(trainer) == ((f"{said}its own samples",) if draws else ())


class Predicts(pl.LightningModule):
    found: ClassVar[list[Any]] = []

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        found = self.found
        found.append(batch)
        return batch


class Returns(pl.LightningModule):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        rows: list[Any] = []
        for row in batch:
            rows.append(row)
        return rows


@pytest.mark.parametrize(("module", "keeps"), [(Predicts(), True), (Returns(), False)])
def test_a_predictions_step_is_judged_where_it_is_planned_for(module: Any, keeps: bool) -> None:
    trainer: Any = SimpleNamespace(lightning_module=module, callbacks=[])
    said = "the module may keep what predict_step gets of a batch, which on each rank is that of its own batches"
    assert keeping_hooks(trainer, predicting=True) == ((said,) if keeps else ())
    assert keeping_hooks(trainer) == ()


class StopsEarly(pl.callbacks.EarlyStopping):
    """Its hooks are Lightning's own."""


def test_a_hook_that_lightnings_own_callback_was_given_is_the_users() -> None:
    kept: list[float] = []
    given = pl.callbacks.LambdaCallback(on_train_batch_end=lambda trainer, module, outputs, batch, index: kept.append(float(batch.sum())))
    trainer: Any = SimpleNamespace(lightning_module=pl.LightningModule(), callbacks=[given, StopsEarly("loss")])
    (said,) = keeping_hooks(trainer)
    assert said.startswith("the callback LambdaCallback may keep what on_train_batch_end gets of a batch")
    names = ("on_train_batch_end", "on_validation_end")
    assert [(type(each).__name__, hook) for each, hook in overridden(trainer, names)] == [("LambdaCallback", "on_train_batch_end")]


def test_the_modules_own_hook() -> None:
    class Module(pl.LightningModule):
        def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.total = torch.as_tensor(outputs).sum()

    (said,) = keeping_hooks(SimpleNamespace(lightning_module=Module(), callbacks=[]))  # type: ignore[arg-type]
    assert said.startswith("the module may keep what on_test_batch_end gets of a batch, which on each rank")


class Brings(BoringModel):
    """Its callback comes with it."""

    def configure_callbacks(self) -> Any:
        return [Probes(nn.Sequential(nn.Linear(32, 2), nn.Dropout()))]


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_callback_that_the_module_brings_is_told_of() -> None:
    strategy: Any = AutoParallelStrategy(devices="2xcpu:1GiB", allow=["ddp"])
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", limit_train_batches=1, limit_val_batches=0, max_epochs=1, **QUIET)
    with pytest.warns(UserWarning, match="the callback Probes may draw random numbers for what on_train_batch_end gets"):
        trainer.fit(Brings(), DataLoader(RandomDataset(32, 8), 4))
