"""torchmetrics as a loss, or as a part of one: weights, losses and logged values are plain Lightning's under every engine."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics.detection.mean_ap import MeanAveragePrecision

from lightning_autopar.exact.logs.metrics_over_ranks import metrics_of
from lightning_autopar.memory.trace.first_batch import FirstBatch
from lightning_autopar.strategies.trials.split_probe import probe_evaluation, probe_split
from tests.strategies.fitted import BLOCKS, Fitted, assert_same, numbers, plan
from tests.strategies.pipelines import pipeline
from tests.strategies.pipelines import run as run_stages


class Squares(torchmetrics.Metric):
    """A mean of squares over the values that count."""

    is_differentiable, full_state_update = True, False
    root = masked = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", default=torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", default=torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, prediction: Tensor, target: Tensor) -> None:
        counts = (target > -1).to(prediction) if self.masked else torch.ones_like(prediction)
        self.total = self.total + (counts * (prediction - target) ** 2).sum()
        self.count = self.count + counts.sum()

    def compute(self) -> Tensor:
        mean = self.total / self.count.clamp(min=1)
        return mean.sqrt() if self.root else mean


class Root(Squares):
    root = True


class Masked(Squares):
    masked = True


class Kept(Squares):
    """Keeps what it sees, as metrics of ranks do."""

    full_state_update = True

    def __init__(self) -> None:
        torchmetrics.Metric.__init__(self)
        self.add_state("errors", default=[], dist_reduce_fx="cat")

    def update(self, prediction: Tensor, target: Tensor) -> None:
        self.errors.append((prediction - target) ** 2)

    def compute(self) -> Tensor:
        return torchmetrics.utilities.dim_zero_cat(self.errors).mean()


class Large(Kept):
    """Keeps large errors alone, of which a rank may have none: then its list is empty, and leads to no parameter."""

    def update(self, prediction: Tensor, target: Tensor) -> None:
        errors = (prediction - target) ** 2
        if (errors > 4.0).any():
            self.errors.append(errors[errors > 4.0])

    def compute(self) -> Tensor:
        return super().compute() if len(self.errors) else torch.zeros((), requires_grad=True)


class LargeSum(Squares):  # the same by states that may stay as they begin
    def update(self, prediction: Tensor, target: Tensor) -> None:
        if ((prediction - target) ** 2 > 4.0).any():
            self.total = self.total + ((prediction - target) ** 2).clamp(min=4.0).sum() - 4.0 * len(target)
        self.count = self.count + len(target)


class OwnWay(Squares):
    """Exchanges its states by a method of its own."""

    def _sync_dist(self, *args: Any, **kwargs: Any) -> None:
        super()._sync_dist(*args, **kwargs)


class Listed(torchmetrics.Metric):
    """Several with weights, in a list, where torch finds no modules."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = [(0.5, Squares()), (2.0, Kept())]
        self.metrics = [metric for _, metric in self.listed]

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        return torch.stack([weight * metric(prediction, target) for weight, metric in self.listed]).sum()

    def update(self, prediction: Tensor, target: Tensor) -> None:
        for metric in self.metrics:
            metric.update(prediction, target)

    def compute(self) -> Tensor:
        return torch.stack([weight * metric.compute() for weight, metric in self.listed]).sum()

    def reset(self) -> None:
        for metric in getattr(self, "metrics", ()):
            metric.reset()


class Metrical(Fitted):
    """Its loss is a metric, which is logged by itself and as a value."""

    make: Any = Squares

    def __init__(self) -> None:
        super().__init__()
        self.measure = self.make()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.measure(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("measure", self.measure, on_step=True, on_epoch=True)
        return loss


class Part(Metrical):
    """A metric is one term of several, and a factor of another."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        prediction = self.net(batch[0])
        measured = self.measure(prediction, batch[1])
        absolute = (prediction - batch[1]).abs().mean()
        loss = absolute + 0.5 * measured + 0.1 * measured * absolute
        self.log("loss", absolute, on_step=True, on_epoch=True)
        self.log("measured", measured)
        return loss


class Rooted(Metrical):
    make = Root


class OfLarge(Metrical):
    make = Large


class PartOfLarge(Part):
    make = LargeSum


class Missing(Metrical):
    make = Masked


class Keeping(Metrical):
    make = Kept


class InItsWay(Metrical):
    make = OwnWay


class Composed(Metrical):
    make = staticmethod(lambda: Squares() + 0.5 * torchmetrics.MeanAbsoluteError())  # type: ignore[assignment]


class Together(Metrical):
    make = Listed

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.measure(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class Collected(Metrical):
    """A collection, of which one is trained on and the others are logged."""

    make = staticmethod(
        lambda: torchmetrics.MetricCollection({"squares": Squares(), "absolute": torchmetrics.MeanAbsoluteError(), "root": Root()})
    )  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        prediction = self.net(batch[0])
        values = self.measure(prediction, batch[1])
        self.log_dict(values)
        self.log("loss", values["squares"], on_step=True, on_epoch=True)
        return values["squares"]


ALL = (Metrical, Part, Rooted, Missing, Keeping, OfLarge, PartOfLarge, Composed, Together, Collected)


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("under", [plan("ddp", ranks=3), plan("fsdp", shard=BLOCKS)], ids=["ddp", "fsdp"])
def test_ranks_train_on_the_whole_batch(make: Any, under: Any) -> None:
    """Of three ranks one has none of the last batch's two samples."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The ``compute`` method of metric")
        assert_same(make, numbers(), under)


@pytest.mark.parametrize("make", [Part, Missing])
@pytest.mark.parametrize("stage", [2, 3])
def test_partitions_train_on_a_metric(make: Any, stage: int) -> None:
    pytest.importorskip("deepspeed")
    assert_same(make, numbers(), plan("zero", zero_stage=stage))


def test_ranks_train_on_a_metric_that_exchanges_in_its_own_way() -> None:
    assert_same(InItsWay, numbers(24), plan("ddp"))


@pytest.mark.parametrize("make", [Metrical, Keeping, Composed, Together, Collected])
@pytest.mark.parametrize("under", [plan("single", ranks=1, micro_batches=3), plan("ddp", micro_batches=2)], ids=["single", "ddp"])
def test_parts_train_on_their_own_value(make: Any, under: Any) -> None:
    assert_same(make, numbers(), under)


def test_parts_that_are_no_mean_stop_the_run() -> None:
    """As many values count in each part of some batches, and other numbers in another."""
    with pytest.raises(
        RuntimeError, match=r"the value of Masked, which isn't a mean over samples: for this batch it is [\d.]+, and [\d.]+ as"
    ):
        assert_same(Missing, numbers(), plan("single", ranks=1, micro_batches=2))


class LoggedRoot(Metrical):
    """What isn't trained on needn't be a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.root, self.r2 = Root(), torchmetrics.R2Score()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        prediction = self.net(batch[0])
        self.log("root", self.root(prediction, batch[1]))
        self.log("r2", self.r2(prediction, batch[1]))
        loss = self.measure(prediction, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


def test_what_is_only_logged_of_parts_is_the_batchs() -> None:
    """A part of one sample has no R² of its own."""
    assert_same(LoggedRoot, numbers(27), plan("single", ranks=1, micro_batches=2))


class TrainedR2(Metrical):
    make = torchmetrics.R2Score


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_what_a_part_has_no_value_of_is_not_trained_on() -> None:
    with pytest.raises(RuntimeError, match="trained on a part of a batch, of which R2Score has no value of a part"):
        assert_same(TrainedR2, numbers(3), plan("single", ranks=1, micro_batches=2))


@pytest.mark.parametrize("make", [Rooted, Missing])
def test_no_mean_is_exact_over_ranks_and_refused_for_parts(make: Any) -> None:
    first = FirstBatch(batch=next(iter(DataLoader(numbers(), 8))), batch_size=8)
    finding, _ = probe_split(make(), None, first)
    assert (finding.splittable, finding.difference, finding.reason, finding.notes) == (True, 0.0, None, ())
    assert f"the loss goes by {make.make.__name__}, which is no mean over the samples" in str(finding.part_reason)
    finding, _ = probe_split(Metrical(), None, first)
    assert (finding.difference, finding.part_reason) == (0.0, None)


@pytest.mark.parametrize(("make", "parts"), [(Metrical, 2), (Composed, 2), (Collected, 2), (Rooted, 1), (Missing, 1)])
def test_stages_train_on_a_metric(make: Any, parts: int) -> None:
    """What is no mean over the samples goes through the stages in one piece."""
    ours, losses, trainer, _ = run_stages(make, numbers(), pipeline(["net.2"], micro_batches=parts), blocks=BLOCKS)
    theirs, expected, plain, _ = run_stages(make, numbers(), None, blocks=BLOCKS)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dict(trainer.callback_metrics), dict(plain.callback_metrics), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=1e-5, atol=1e-5)


class Boxes(MeanAveragePrecision):
    """An entry for each sample, unequally many on the ranks, under torchmetrics' own exchange; without the library that it needs."""

    iou_type = ("bbox",)

    def __init__(self) -> None:
        torchmetrics.Metric.__init__(self)
        self.add_state("detection_box", default=[], dist_reduce_fx=None)

    def update(self, boxes: Tensor) -> None:  # type: ignore[override]
        self.detection_box += boxes.unbind()

    def compute(self) -> Tensor:  # type: ignore[override]
        return torch.stack(self.detection_box).pow(2).mean()


class Detecting(Fitted):
    def __init__(self) -> None:
        super().__init__()
        self.boxes = Boxes()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.boxes.update(self.net(batch[0]))

    def on_validation_epoch_end(self) -> None:
        self.log("boxes", self.boxes.compute())
        self.boxes.reset()


def test_entries_of_unequally_many_samples_are_exchanged() -> None:
    """Of the last batch's three samples one rank has two; of a pipeline's ranks one has all entries."""
    assert_same(Detecting, numbers(27), plan("ddp"))
    _, _, trainer, _ = run_stages(Detecting, numbers(27), pipeline(["net.2"]), blocks=BLOCKS)
    _, _, plain, _ = run_stages(Detecting, numbers(27), None, blocks=BLOCKS)
    torch.testing.assert_close(dict(trainer.callback_metrics), dict(plain.callback_metrics), rtol=1e-5, atol=1e-5)


class Beside(Squares):
    """Keeps its sums beside its states."""

    seen, size = 0, 0.0

    def update(self, prediction: Tensor, target: Tensor) -> None:
        self.seen += len(prediction)
        self.size += prediction.square().sum().item()

    def compute(self) -> Tensor:
        return torch.tensor(self.size / self.seen)

    def reset(self) -> None:
        super().reset()
        self.seen, self.size = 0, 0.0


class Besides(Fitted):
    def __init__(self) -> None:
        super().__init__()
        self.beside = Beside()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.beside.update(self.net(batch[0]), batch[1])

    def on_validation_epoch_end(self) -> None:
        self.log("beside", self.beside.compute())
        self.beside.reset()


def test_what_a_metric_keeps_beside_its_states_is_the_whole_batchs() -> None:
    first = FirstBatch(batch=next(iter(DataLoader(numbers(), 8))), batch_size=8)
    rules = probe_evaluation(Besides(), None, first, "validation_step").kept_rules
    assert_same(Besides, numbers(27), plan("ddp"), kept_rules=rules)


def test_metrics_are_found_in_lists() -> None:
    assert {type(metric) for metric in metrics_of(Together())} == {Listed, Squares, Kept}
