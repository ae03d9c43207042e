"""What a module sums up and collects by itself over an epoch: one device's under every plan that splits the batch, or named."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError

from lightning_autopar import AutoParallelStrategy, Plan
from lightning_autopar.strategies.trials.split_probe import probe_split
from tests.strategies.fitted import QUIET
from tests.strategies.trials.test_kept_state import Listening
from tests.strategies.trials.test_split_probe import Base, first_of, samples


class Meter:
    """The average of everybody's training script."""

    def __init__(self) -> None:
        self.total = self.count = self.average = 0.0

    def update(self, value: float, count: int) -> None:
        self.total += value * count
        self.count += count
        self.average = self.total / self.count


class Kept:
    """What is kept of an epoch, in each way that people do it."""

    def begin(self) -> None:
        self.total, self.bad, self.seen, self.worst, self.steps = 0.0, 0, 0, 0.0, 0
        self.close, self.table, self.places = torch.zeros((), dtype=torch.long), np.zeros(2), [0, 0]
        self.means: list[Tensor] = []
        self.errors: list[Any] = []
        self.listed: list[float] = []
        self.outputs: list[dict[str, Tensor]] = []
        self.by_name: defaultdict[str, list[float]] = defaultdict(list)
        self.meter, self.smooth, self.last = Meter(), 0.0, torch.zeros(())
        self.lately: deque[float] = deque(maxlen=2)
        self.replayed: deque[float] = deque(maxlen=12)

    def keep(self, error: Tensor) -> Tensor:
        """Of the errors of a batch's samples, (B,)."""
        loss, bad = error.mean(), error > 1
        self.total += loss.item()
        self.bad += int(bad.sum())
        self.close += (~bad).sum()
        self.seen += len(error)
        self.worst = max(self.worst, error.max().item())
        self.table[0] += float(bad.sum())
        self.places[1] += len(error)
        self.means.append(loss.detach())
        self.errors.append(error.detach().numpy())
        self.listed.extend(error.tolist())
        self.outputs.append({"loss": loss.detach(), "errors": error.detach()})
        self.by_name["loss"].append(loss.item())
        self.lately.append(loss.item())
        self.replayed.extend(error.tolist())
        self.meter.update(loss.item(), len(error))
        self.steps += 1
        self.smooth = 0.9 * self.smooth + 0.1 * loss.item()
        self.last = loss.detach()
        return loss

    def told(self) -> list[float]:
        outputs = torch.cat([output["errors"] for output in self.outputs])
        order = float((outputs * torch.arange(len(outputs))).sum())
        listed = float(np.dot(np.concatenate(self.errors), self.listed))
        sums = [self.total, self.bad, self.seen, self.worst, float(self.close), *self.table.tolist(), *self.places, self.steps]
        means = [float(torch.stack(self.means).mean()), float(self.outputs[-1]["loss"]), sum(self.by_name["loss"]), self.meter.average]
        return [*map(float, sums), *means, order, listed, self.smooth, float(self.last), *self.lately, *self.replayed]


class Keeper(pl.LightningModule, Kept):
    """Keeps on itself what it logs of a training epoch, and in an object what it logs of a validation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.history: list[list[float]] = []
        self.validated = Kept()

    def error(self, batch: list[Tensor]) -> Tensor:
        return (self.net(batch[0]) - batch[1]).square().mean(1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.keep(self.error(batch))

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.validated.keep(self.error(batch))

    def on_train_epoch_start(self) -> None:
        self.begin()

    def on_validation_epoch_start(self) -> None:
        self.validated.begin()

    def on_train_epoch_end(self) -> None:
        self.end(self, "train")

    def on_validation_epoch_end(self) -> None:
        self.end(self.validated, "val")

    def end(self, kept: Kept, prefix: str) -> None:
        self.history.append(kept.told())
        self.log_dict({f"{prefix}_{index}": value for index, value in enumerate(kept.told())})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05)


def fit(make: Any, strategy: Any) -> tuple[Any, Any]:
    pl.seed_everything(5, verbose=False)
    x = torch.randn(19, 4)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    module = make()
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=2, num_sanity_val_steps=0, **QUIET)
    trainer.fit(module, DataLoader(data, batch_size=5, shuffle=True), DataLoader(data, batch_size=4))
    return module, trainer


CPUS = ("cpu:0", "cpu:1")
PLANS = {
    "ddp": {"allow": ["ddp"]},
    "fsdp": {"allow": ["fsdp"]},
    "zero": {"allow": ["zero"]},
    "parts": {"plan": Plan(engine="single", devices=CPUS[:1], micro_batches=2)},
    "ddp in parts": {"plan": Plan(engine="ddp", devices=CPUS, micro_batches=2)},
}


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("name", list(PLANS))
def test_what_is_kept_over_an_epoch_is_one_devices(name: str) -> None:
    theirs, their_trainer = fit(Keeper, "auto")
    ours, trainer = fit(Keeper, AutoParallelStrategy(devices="2xcpu:1GiB", **PLANS[name]))  # type: ignore[arg-type]
    assert trainer.strategy.plan.engine != "single" or name == "parts"
    assert not [note for note in trainer.strategy.report.best_candidate.notes if "Keeper" in note]
    torch.testing.assert_close(torch.tensor(ours.history), torch.tensor(theirs.history), rtol=1e-5, atol=1e-5)
    theirs_logged = {name: float(value) for name, value in their_trainer.callback_metrics.items()}
    assert {name: float(value) for name, value in trainer.callback_metrics.items()} == pytest.approx(theirs_logged, abs=1e-5, rel=1e-5)
    assert (ours.steps, float(ours.last)) == (theirs.steps, pytest.approx(float(theirs.last), abs=1e-5))


class Defaults(pl.LightningModule):
    """Sums its losses up in an attribute that only the class has at first, and makes a buffer in its first step."""

    total = 0.0

    def __init__(self, *, metric: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.metric: Any = MeanSquaredError() if metric else nn.functional.mse_loss
        self.sums: list[float] = []
        self.register_buffer("scale", None)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.scale is None:
            self.scale = torch.full((4,), 0.5)
        loss: Tensor = self.metric(self.layer(batch[0] * self.scale), batch[1])
        self.total += float(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.sums.append(self.total)
        self.total = 0.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05)


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:You passed in a `val_dataloader`")
@pytest.mark.parametrize(("name", "metric"), [("ddp", False), ("ddp", True), ("parts", False), ("parts", True)])
def test_a_default_of_the_class_is_an_attribute_as_well(name: str, metric: bool) -> None:
    """A metric's value is the whole batch's on each rank, and a part's own in each part: one rule must explain both."""
    theirs, _ = fit(lambda: Defaults(metric=metric), "auto")
    ours, _ = fit(lambda: Defaults(metric=metric), AutoParallelStrategy(devices="2xcpu:1GiB", **PLANS[name]))  # type: ignore[arg-type]
    assert ours.sums == pytest.approx(theirs.sums, rel=1e-5)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


class Rootmean(Base):
    """Keeps what no rule explains, beside a count."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[float] = []
        self.least, self.count = float("inf"), 0

    def loss(self, x: Tensor) -> Tensor:
        loss = (self.layer(x) - x).square().mean()
        self.errors.append(loss.sqrt().item())
        self.least = min(self.least, loss.item())
        self.count += len(x)
        return loss


def test_what_no_rule_explains_is_named() -> None:
    torch.manual_seed(0)
    finding, _ = probe_split(Rootmean(), None, first_of(samples()))
    assert finding.splittable
    assert finding.kept_rules == {"training_step": {("count",): "growth"}}
    assert [note.split(",")[0] for note in finding.notes] == ["Rootmean.least", "Rootmean.errors"]


class OnlyRoots(Base):
    """Keeps nothing but what no rule explains."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[float] = []

    def loss(self, x: Tensor) -> Tensor:
        loss = (self.layer(x) - x).square().mean()
        self.errors.append(loss.sqrt().item())
        return loss


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_module_of_which_no_rule_explains_anything_is_planned_for() -> None:
    torch.manual_seed(0)
    finding, _ = probe_split(OnlyRoots(), None, first_of(samples()))
    assert finding.kept_rules == {}
    trainer = pl.Trainer(strategy=AutoParallelStrategy(devices="2xcpu:1GiB", allow=["ddp", "pipeline"]), max_steps=1, **QUIET)
    with pytest.warns(UserWarning, match=r"OnlyRoots\.errors, which training_step changes, is no sum"):
        trainer.fit(OnlyRoots(), DataLoader(samples(), 4))  # type: ignore[arg-type]


class Cached(Base):
    """Makes a mask once, and counts its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None
        self.length, self.count = 0, 0

    def loss(self, x: Tensor) -> Tensor:
        if self.length < x.shape[1]:
            self.mask, self.length = torch.ones(x.shape[1]), x.shape[1]
        self.count += 1
        return (self.layer(x) * self.mask - x).square().mean()


def test_what_is_made_once_is_nothing_that_is_kept() -> None:
    finding, _ = probe_split(Cached(), None, first_of(samples()))
    assert (finding.notes, finding.kept_rules) == ((), {"training_step": {("count",): "same"}})


def test_a_metric_and_a_list_of_outputs_are_nothing_to_tell_of() -> None:
    finding, _ = probe_split(Listening(), None, first_of(samples()))
    assert (finding.notes, finding.reason, finding.part_reason) == ((), None, None)
    assert finding.kept_rules == {"training_step": {("outputs", "+"): "rows"}}
