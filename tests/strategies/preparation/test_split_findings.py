"""How the values that an evaluation logs combine, by the batches that planning looks at."""

from __future__ import annotations

import os
import random
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_autopar.constraints import LOSS, Constraints, SplitFinding
from lightning_autopar.exact.data.counted_entries import Count
from lightning_autopar.exact.logs.metrics_of_values import APART
from lightning_autopar.memory.footprint import Conduct, Footprint
from lightning_autopar.memory.trace.first_batch import FirstBatch
from lightning_autopar.memory.trace.trace import trace
from lightning_autopar.planning.refusals import split_refusal
from lightning_autopar.strategies.preparation import split_findings
from lightning_autopar.strategies.preparation.split_findings import EarlySplits, split_of, with_evaluation


class Summing(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        values, mask = batch
        return (self.layer(values).squeeze(1) * mask).square().sum() / mask.sum()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("squares", self.layer(batch).square().sum())


ONE, MORE = (FirstBatch(batch=torch.rand(count, 3), batch_size=count, loaders=(DataLoader([0], batch_size=None),)) for count in (1, 4))


@pytest.mark.parametrize(("batches", "size", "told"), [((ONE, MORE), None, "rule"), ((ONE,), None, "note"), ((ONE,), 1, "")])
def test_where_the_first_batch_has_one_sample_another_one_tells(batches: tuple[FirstBatch, ...], size: int | None, told: str) -> None:
    for batch in batches:
        object.__setattr__(batch, "loaders", (DataLoader([0], batch_size=size),))
    module, trainer = Summing(), pl.Trainer(accelerator="cpu", logger=False)
    module.trainer = trainer
    found = with_evaluation(SplitFinding(), module, trainer, batches, [], "fit", quick=True)
    assert found.log_rules.get(("validation_step", "squares")) == (("sum",) if told == "rule" else None)
    assert [note.partition(":")[0] for note in found.notes] == ["not checked"] * (told == "note")


class Classifying(Summing):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        values, labels = batch
        scores = self.layer(values) * torch.tensor([2.0, 0.1, -1.0])
        self.log("loss", nn.functional.cross_entropy(scores, labels))
        self.log("accuracy", (scores.argmax(1) == labels).float().mean())


def test_a_later_batch_adds_no_count_where_what_the_first_one_shows_explains_it() -> None:
    """Halves of the first batch have as many labels other than 0, and the last batch has no 0: either count explains both."""
    module, trainer = Classifying(), pl.Trainer(accelerator="cpu", logger=False)
    module.trainer = trainer
    labels = ([0, 2, 2, 0, 0, 0, 2, 1], [2, 1, 2, 0, 2, 0, 2, 0], [2, 1, 1])
    loaders = (DataLoader([0], batch_size=8),)
    batches = [FirstBatch(batch=[torch.rand(len(each), 3), torch.tensor(each)], batch_size=len(each), loaders=loaders) for each in labels]
    labelled = Count(path=(1,), kind="differs", ignored=-100)
    module.layer.bias.data.fill_(
        1.0
    )  # all samples are taken for class 0, of which the last batch has none: more counts explain its accuracy
    found = with_evaluation(SplitFinding(log_rules={LOSS: (labelled,)}), module, trainer, batches, [], "fit", quick=True)
    assert found.log_rules["validation_step", "loss"] == (labelled,)


class Dying(Summing):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        os._exit(3)


def test_what_a_validation_keeps_that_cannot_be_tried_counts_on_each_rank() -> None:
    """Nobody knows whether ranks put it together, so that a hook's metric may get a rank's own."""
    module, trainer = Dying(), pl.Trainer(accelerator="cpu", logger=False)
    module.trainer = trainer
    found = with_evaluation(SplitFinding(), module, trainer, [MORE], [], "fit", quick=True)
    assert [note.partition(":")[0] for note in found.notes] == ["not checked"]
    assert APART in found.metric_rules["validation_step"]


class Resampling(Summing):
    def __init__(self, *draws: str) -> None:
        super().__init__()
        self.draws, self.metric = draws, torchmetrics.MeanMetric()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        values = self.layer(batch + torch.rand_like(batch)).squeeze(1)  # every rank has its rows of such noise
        if "class" in self.draws:  # drawn among two classes: as many draws as there are samples, and the same choice
            values = values + torch.multinomial(torch.ones(2), len(batch), replacement=True)
        if "sample" in self.draws:
            values = values[torch.multinomial(torch.ones(len(batch)), len(batch), replacement=True)]
        if "count" in self.draws:
            values = values.repeat_interleave(torch.poisson(torch.ones(len(batch))).long(), 0)
        if "python" in self.draws:
            values = values + torch.tensor([random.random() for _ in batch])
        self.metric.update(values)  # logged when the epoch is over, by a hook


@pytest.mark.parametrize(
    ("draws", "told"),
    [
        ((), ""),
        (("class",), ""),
        (("sample", "count"), "a choice among the samples (multinomial), poisson"),
        (("python",), "Python's random"),
    ],
)
def test_draws_of_a_validation_that_no_rank_can_make_are_told_of(draws: tuple[str, ...], told: str) -> None:
    """A metric's bootstrap samples, say: nothing that the step logs shows them."""
    module, trainer = Resampling(*draws), pl.Trainer(accelerator="cpu", logger=False)
    module.trainer = trainer
    batch = FirstBatch(batch=torch.rand(6, 3), batch_size=6, loaders=(DataLoader([0], batch_size=6),))
    found = with_evaluation(SplitFinding(), module, trainer, [batch], [], "fit", quick=True)
    words = f"each rank draws its own random numbers in validation_step for {told}; one device draws others"
    assert found.rank_notes == (words,) * bool(told)
    refusal = split_refusal(Constraints(split=found, exact=True), ranks=True)
    assert refusal == (f"exact=True, and {words}" if told else None)
    assert split_refusal(Constraints(split=found, exact=True)) is None, "one device validates whole batches"


@pytest.fixture(scope="module")
def masked() -> tuple[pl.Trainer, Footprint, list[FirstBatch]]:
    """A trainer of a loss over a mask's entries, its footprint, and batches of which the mask keeps all, and some."""
    module, trainer, batches = Summing(), pl.Trainer(accelerator="cpu", logger=False), list[FirstBatch]()
    trainer.strategy.connect(module)
    for left_out in (0, 3):
        data = [[torch.rand(3), torch.tensor(float(number >= left_out))] for number in range(8)]
        batches.append(FirstBatch(batch=torch.utils.data.default_collate(data), batch_size=8, samples=data))
    return trainer, trace(module, None, batches[0]), batches


def test_a_probe_beside_the_trace_finds_what_one_after_it_does(masked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, footprint, (batch, _) = masked
    told: dict[str, Any] = {"despite": (), "routes": True}
    after = split_of(trainer.lightning_module, trainer, batch, footprint=footprint, **told)
    with ExitStack() as children:
        early = EarlySplits(children, trainer, told)
        early.begin([batch])
        monkeypatch.setattr(split_findings, "run_forked", None)  # it isn't made again
        beside = split_of(trainer.lightning_module, trainer, batch, footprint=footprint, early=early, **told)
    assert beside == after
    assert Count(path=(1,), kind="sum") in beside[0].log_rules[LOSS]


@pytest.mark.parametrize(
    ("told", "other", "known"),
    [
        ({"conduct": Conduct(written=(("layer.weight", "training_step"),))}, False, ()),
        ({"conduct": None}, False, ()),
        ({"flops": 10**11}, False, ()),
        ({}, False, (Count(path=(7,), kind="sum"),)),
        ({}, True, (Count(path=(1,), kind="sum"),)),
    ],
    ids=["writes to a parameter", "not traced", "long", "known of others and not counted here", "known of others and uneven here"],
)
def test_a_probe_beside_the_trace_is_made_again_where_that_shows_something_else(
    told: dict[str, Any], other: bool, known: tuple[Count, ...], masked: Any
) -> None:
    trainer, footprint, batches = masked
    with ExitStack() as children:
        early = EarlySplits(children, trainer, {"despite": (), "routes": False})
        early.begin([batches[other]])
        assert early._begun
        assert early.found(batches[other], replace(footprint, **told), known) is None
        early.begin([batches[other]])
        assert early.found(batches[other], footprint, () if other else [Count(path=(1,), kind="sum")]) is not None


@pytest.mark.parametrize("limit", ["EARLY_BYTES", "EARLY_NUMBERS"])
def test_a_large_step_is_traced_first(limit: str, masked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_findings, limit, 8)
    trainer, _, batches = masked
    with ExitStack() as children:
        early = EarlySplits(children, trainer, {})
        early.begin(batches)
        assert not early._begun
