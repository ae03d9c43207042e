"""Metrics that a step gives a value of its batch, or a hook what all ranks have alike: they count batches as on one device."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import Accuracy, CatMetric, MaxMetric, MeanMetric, MinMetric, SumMetric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_sum

from lightning_autopar import AutoParallelStrategy
from lightning_autopar.exact.data.rank_share import Dealing, share_of
from lightning_autopar.exact.logs.metrics_of_values import of_samples, rules_of, settled
from lightning_autopar.exact.logs.metrics_over_ranks import named_metrics
from lightning_autopar.memory.trace.first_batch import FirstBatch
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.trials.split_probe import probe_split
from tests.strategies.fitted import QUIET, Fitted, numbers
from tests.strategies.trials.test_split_probe import Base

SHARES = [share_of(8, rank, Dealing.even(3)) for rank in range(3)]  # 3, 3 and 2 samples


def rules(reduction: Any, whole: Any, *parts: Any, before: Any = None) -> tuple[str, ...]:
    return rules_of(reduction, torch.zeros(()) if before is None else before, whole, parts, SHARES)


def test_what_parts_add_makes_what_the_batch_adds() -> None:
    one, mean = torch.tensor(1.0), torch.tensor((3 * 2.0 + 3 * 4.0 + 2 * 5.0) / 8)
    losses = [torch.tensor(value) for value in (2.0, 4.0, 5.0)]
    assert rules(dim_zero_sum, torch.tensor(11.0), *losses) == ("own",)
    assert rules(dim_zero_sum, mean, *losses) == ("mean", "weighed")
    assert rules(dim_zero_sum, mean + 7, *(loss + 7 for loss in losses), before=torch.tensor(7.0)) == ("mean", "weighed")
    assert rules(dim_zero_sum, torch.tensor(1), *[torch.tensor(1)] * 3) == ()  # a whole number has no parts
    assert rules(dim_zero_max, torch.tensor(5.0), *losses) == ("own",)
    assert rules(dim_zero_max, mean, *losses) == ()
    assert rules(dim_zero_cat, [mean], *([loss] for loss in losses), before=[]) == ()
    assert rules(dim_zero_cat, [torch.ones(8)], *([torch.ones(share.rows)] for share in SHARES), before=[]) == ("own",)
    assert rules(dim_zero_sum, one, *[one] * 3) == ("mean", "weighed")


def test_a_sum_and_its_weights_go_by_the_same() -> None:
    assert settled({"mean_value": ("weighed",), "weight": ("mean", "weighed")}) == {"mean_value": "weighed", "weight": "weighed"}
    assert settled({"total": ("own", "mean"), "sum": ("mean",), "max": ()}) == {"total": "own", "sum": "mean", "max": None}


def test_arguments_of_samples_have_rows() -> None:
    assert not of_samples(((torch.tensor(1.0), 2, 0.5), {"weight": 3}))
    assert of_samples(((torch.ones(3),), {}))
    assert of_samples((("a caption",), {}))


def test_metrics_outside_of_modules_have_names() -> None:
    module = nn.Module()
    module.whole, module.parts = MeanMetric(), [MeanMetric(), SumMetric()]
    module.named = {"best": MaxMetric()}  # type: ignore[assignment]
    assert sorted(name for name, _ in named_metrics(module)) == ["named['best']", "parts[0]", "parts[1]", "whole"]


class Keeps(Base):
    """Gives its loss to metrics, and its samples to another."""

    def __init__(self, metric: Any) -> None:
        super().__init__()
        self.metric = metric

    def loss(self, x: Tensor) -> Tensor:
        found = self.layer(x).square().mean()
        self.metric.update(found.detach())
        return found


@pytest.mark.parametrize(
    ("metric", "found"),
    [
        (MeanMetric, {("metric", "mean_value"): "mean", ("metric", "weight"): "mean"}),
        (SumMetric, {("metric", "sum_value"): "mean"}),
    ],
)
def test_planning_finds_metrics_of_the_loss(metric: Any, found: Any) -> None:
    samples = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    finding = probe_split(Keeps(metric()), None, FirstBatch(batch=samples, batch_size=8))[0]
    assert (finding.metric_rules, finding.notes) == ({"training_step": found}, ())


@pytest.mark.parametrize("metric", [MaxMetric, CatMetric])
def test_planning_names_metrics_that_no_part_can_add_to(metric: Any) -> None:
    samples = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    finding = probe_split(Keeps(metric()), None, FirstBatch(batch=samples, batch_size=8))[0]
    assert finding.metric_rules == {}
    assert finding.notes == (
        f"the metric 'metric' ({metric.__name__}) gets from training_step what is no sum over samples: each rank and each part gives it "
        "that of its own",
    )


class Compares(Base):
    """A loss that is no mean over samples, which a metric is given with its graph."""

    def __init__(self, metric: Any, trains: bool) -> None:
        super().__init__()
        self.metric, self.trains = metric, trains

    def loss(self, x: Tensor) -> Tensor:
        given = self.layer(x)
        loss = (given @ given.T).square().mean()
        value: Tensor = self.metric(loss)
        return value if self.trains else loss


@pytest.mark.parametrize("trains", [False, True])
def test_a_loss_goes_by_a_metric_that_leads_to_it(trains: bool) -> None:
    samples = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    found = probe_split(Compares(MeanMetric(), trains), None, FirstBatch(batch=samples, batch_size=8))[0]
    assert ("the loss goes by MeanMetric" in (found.part_reason or "")) == trains


class Metered(Fitted):
    """Metrics as lightning-hydra-template and others have them; of 26 samples the last batch has two."""

    def __init__(self) -> None:
        super().__init__()
        self.train_loss, self.total, self.val_loss, self.best = MeanMetric(), SumMetric(), MeanMetric(), MinMetric()
        self.beside = [MeanMetric()]
        self.right, self.ends, self.seen, self.epochs, self.of_hook = (
            Accuracy("binary"),
            SumMetric(),
            CatMetric(),
            SumMetric(),
            MeanMetric(),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        given = self.net(batch[0])
        loss = nn.functional.mse_loss(given, batch[1])
        self.train_loss(loss)
        self.log("train/loss", self.train_loss, on_step=True, on_epoch=True)
        self.log("value", self.beside[0](loss.detach()))
        self.total.update(loss.detach())
        self.right(given[:, 0] > 0, batch[1][:, 0] > 0)
        self.log("train/acc", self.right, on_step=False, on_epoch=True)
        return {"loss": loss, "largest": given.detach().abs().mean()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ends.update(outputs["loss"])
        self.seen.update(outputs["loss"])
        self.of_hook.update(outputs["largest"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_loss(self.loss(batch))
        self.log("val/loss", self.val_loss)

    def on_validation_epoch_end(self) -> None:
        found = self.val_loss.compute()
        self.best(found)
        self.epochs.update(found)
        self.log_dict({"best": self.best.compute(), "epochs": self.epochs.compute()})

    def on_train_epoch_end(self) -> None:
        metrics = {"total": self.total, "beside": self.beside[0], "ends": self.ends, "of_hook": self.of_hook}
        self.log_dict({name: metric.compute() for name, metric in metrics.items()})
        self.log("batches", float(self.seen.compute().numel()))
        for metric in metrics.values():
            metric.reset()


def trained(strategy: Any, make: type[Fitted] = Metered) -> dict[str, Any]:
    pl.seed_everything(3, verbose=False)
    trainer = pl.Trainer(**QUIET, strategy=strategy, max_epochs=2)  # type: ignore[arg-type]
    trainer.fit(make(), DataLoader(numbers(), batch_size=8, shuffle=True), DataLoader(numbers(11), batch_size=8))
    return {name: value.float() for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize(
    "options",
    [
        {"devices": "2xcpu:1GiB", "allow": ["ddp"], "calibrate": "off"},
        {"devices": "2xcpu:1GiB", "allow": ["fsdp"], "calibrate": "off"},
        {"devices": "1xcpu:1GiB", "plan": Plan(engine="single", devices=("cpu:0",), micro_batches=2)},
    ],
    ids=["ddp", "fsdp", "micro-batches"],
)
def test_metrics_of_losses_are_one_devices(options: Any) -> None:
    torch.testing.assert_close(trained(AutoParallelStrategy(**options)), trained("auto"), rtol=1e-5, atol=1e-6)


class KeepsMuch(Fitted):
    """Keeps more of each batch than ranks put together, and gives it to a metric when the epoch is over."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Tensor] = []
        self.kept = SumMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.rows.append(self.net(batch[0])[:, :1].repeat(1, 600_000))

    def on_validation_epoch_end(self) -> None:
        self.kept.update(torch.cat(self.rows)[:, 0])
        self.log("kept", self.kept.compute())
        self.rows.clear()


@pytest.mark.filterwarnings("ignore:autopar. .*each rank and each part keeps that of its own samples")
def test_what_a_rank_has_of_its_own_samples_counts_when_the_epoch_is_over() -> None:
    options: Any = {"devices": "2xcpu:1GiB", "allow": ["ddp"], "calibrate": "off"}
    ours, theirs = trained(AutoParallelStrategy(**options), KeepsMuch), trained("auto", KeepsMuch)
    torch.testing.assert_close(ours["kept"], theirs["kept"], rtol=1e-5, atol=1e-6)
