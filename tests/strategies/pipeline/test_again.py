"""Pipelines whose blocks run several times in a step, as for two views of a batch: each stage runs all calls of its blocks."""

from __future__ import annotations

import copy
import random
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torchmetrics.classification import BinaryAUROC

from benchmarks.memory.stage_rank import _peak
from lightning_autopar.engines import Check
from lightning_autopar.exact.absent.absent_tensor import is_absent
from lightning_autopar.memory.fakes.fake_copies import as_if_real, drawing_nothing, fake_copy, fake_mode
from lightning_autopar.memory.fakes.shadow_values import ShadowValues
from lightning_autopar.memory.trace.first_batch import FirstBatch
from lightning_autopar.memory.trace.trace import trace
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.pipeline.memory import pipeline_bytes, pipeline_evaluation
from lightning_autopar.strategies.pipeline.rehearsal.stage_probe import check_cuts
from lightning_autopar.strategies.pipeline.stages.cut_tensors import Staging, StepRecording
from lightning_autopar.strategies.pipeline.stages.possible_cuts import record
from tests.strategies.fitted import Fitted, numbers
from tests.strategies.pipeline.chained import Chained, Stacked, assert_parity, blocks_of, cuts_of, recorded
from tests.strategies.pipeline.chained import numbers as rows_of
from tests.strategies.pipeline.test_pipeline import same
from tests.strategies.pipelines import pipeline

HOOKS = ("training_step", "validation_step")
LAYERS = tuple(f"net.{index}" for index in range(5))


class Doubled(BinaryAUROC):
    """Reads a buffer of its own, which all stages have."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((), 2.0))

    def update(self, preds: Tensor, target: Tensor) -> None:
        super().update(preds.sigmoid() * self.scale / 2, target)


class Views(Fitted):
    """Learns from two views of each sample. A validation runs the whole network a second time, for a metric of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = nn.ModuleDict({name: Doubled() for name in ("once", "again")})

    def loss(self, batch: Any) -> Tensor:
        first, second = (self.net(view) for view in (batch[0], batch[0].flip(1)))
        return nn.functional.mse_loss(first, batch[1]) + nn.functional.mse_loss(first, second)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        for name, metric in self.metrics.items():
            metric.update(self.net(batch[0]).flatten(), (batch[1] > 0).long().flatten())
            self.log(name, metric)
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class ValidatesTwice(Views):
    """Trains on one view."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


@pytest.mark.parametrize(
    ("make", "under"),
    [
        (Views, pipeline(("net.2",), schedule="1f1b", micro_batches=3)),
        (Views, pipeline(("net.1", "net.4"), schedule="gpipe", micro_batches=2)),
        pytest.param(
            Views, pipeline(("net.1", "net.2", "net.3"), schedule="interleaved_1f1b", micro_batches=2, ranks=2), marks=pytest.mark.slow
        ),
        (ValidatesTwice, pipeline(("net.3",), schedule="1f1b", micro_batches=2)),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else value.title(),
)
def test_steps_whose_blocks_run_again_are_plain_lightnings(make: Any, under: Plan) -> None:
    """Where all layers may begin a stage; and where the first one's code comes before all blocks, as an embedding's."""
    trainer = same(make, numbers(18), under, blocks=LAYERS if make is Views else LAYERS[1:4])
    assert {"once", "again", "val_loss", "loss_epoch"} <= trainer.callback_metrics.keys()


class Twice(Stacked):
    """Two views, whose norm's statistics each view moves; a table that code between the blocks reads; a value that is logged between."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.full((8,), 2.0))

    def embed(self, x: Tensor) -> Tensor:
        x = self.norm(self.blocks[0](self.stem(x) + self.stem.bias)).relu()
        x = self.blocks[2](self.blocks[1](x) * self.scale)
        self.log("norm", x.norm())
        return self.blocks[3](x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        one, two = self.embed(batch[0]), self.embed(batch[0].flip(0) + 0.1)
        tied = two @ self.stem.weight  # what follows isn't a third view
        return nn.functional.cosine_similarity(one, two).mean() + self.head(one).mean() + tied.square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.embed(batch[0]).mean() + self.embed(batch[0] + 1)


def test_each_stage_runs_all_calls_of_its_blocks() -> None:
    torch.manual_seed(0)
    module = Twice()
    recording = recorded(copy.deepcopy(module))
    assert recording.calls == (0, 1, 2, 3, -1, 0, 1, 2, 3)
    assert [len(recording.crossings[f"blocks.{index}"]) for index in range(4)] == [2, 2, 2, 2]
    assert not recording.uncuttable
    for cuts in (["blocks.1"], ["blocks.1", "blocks.3"], cuts_of(recording)):
        logged = assert_parity(module, cuts=cuts).logged
        assert [stage for stage, values in enumerate(logged) if values] == [recording.stage_of(5, cuts)]
    validation = recorded(copy.deepcopy(module), hook="validation_step")
    found = Chained(copy.deepcopy(module).eval(), Staging(hooks={"validation_step": validation}), cuts_of(validation))
    theirs = copy.deepcopy(module).eval()
    theirs.__dict__["log"] = lambda *_, **__: None
    torch.testing.assert_close(found.evaluate("validation_step", rows_of()), theirs.validation_step(rows_of(), 0))


class Drops(Twice):
    """Blocks before a cut and after it draw."""

    def embed(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = nn.functional.dropout(block(x), 0.1)
        return x


class Reads(Twice):
    """Decides by a value of the first view."""

    def embed(self, x: Tensor) -> Tensor:
        x = super().embed(x)
        return x if x.mean() > 100 else x + 1


class Follows(Twice):
    """The second view goes by the first one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.embed(batch[0] + self.embed(batch[0]).mean()).mean()


class Writes(Twice):
    """Changes what the first view gave before the second one has run."""

    def embed(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.stem(x))
        if not hasattr(self, "first"):
            self.first = x
        else:
            with torch.no_grad():
                self.first.mul_(2)
            del self.first
        for block in self.blocks[1:]:
            x = block(x)
        return x


class Tossed(Twice):
    """Draws from Python's generator."""

    def embed(self, x: Tensor) -> Tensor:
        return super().embed(x * random.random())


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Drops, "both draw random numbers"),
        (Reads, "reads a value of the model's"),
        (Follows, r"'blocks\.0' runs before it and again after it, on what was computed between"),
        (Writes, "written to later"),
        (Tossed, "Python's or NumPy's generator"),
    ],
)
def test_where_calls_can_not_be_told_apart_there_is_no_cut(kind: type[Twice], words: str) -> None:
    torch.manual_seed(0)
    found = recorded(kind())
    assert re.search(words, found.uncuttable["blocks.1"]), found.uncuttable
    if kind is not Tossed and kind is not Reads:
        assert under_fakes(kind()).uncuttable == found.uncuttable


def under_fakes(module: pl.LightningModule) -> StepRecording:
    """Its recording, as of a step that is too large to run."""
    mode, shadow = fake_mode(), ShadowValues()
    fake, batch = fake_copy(module, mode, shadow), fake_copy(rows_of(), mode, shadow)
    with drawing_nothing(), as_if_real(shadow, "cpu"), mode, shadow:
        return record(fake, None, "training_step", batch, blocks_of(fake))


def test_a_large_step_is_recorded_alike_and_taken_only_if_it_was_tried() -> None:
    assert under_fakes(Twice()) == recorded(Twice())
    assert not under_fakes(Twice()).uncuttable
    conduct = SimpleNamespace(written=(), exchanged=())
    first: Any = SimpleNamespace(
        trainer=SimpleNamespace(precision="32-true", lightning_module=Twice()),
        footprint=SimpleNamespace(flops=10**30, blocks=(), conduct=conduct),
        stage="fit",
        batch=FirstBatch(batch=rows_of(), batch_size=4),
        validation=lambda: None,
    )
    assert check_cuts(first, ("blocks.1",), ("a note",)) == Check(outcome="passed", notes=("a note",))
    found = check_cuts(first, ("blocks.1",), ("a note",), runs_again=True)
    assert "too long to try on the CPU, and its blocks run several times" in str(found.reason)


class Large(Stacked):
    """Two views through two layers that take much more than the head and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256), nn.Tanh()) for _ in range(2))
        del self.stem, self.blocks, self.head

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        one, two = (self.second(self.first(view)) for view in batch)
        return (one - two).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.training_step(batch, batch_idx)


def test_repeated_blocks_that_run_again_are_layers() -> None:
    """So that the planner may cut there; and sharding has no units that it would gather twice."""
    found = trace(Twice(), None, rows_of()).blocks
    assert [block.fqn for block in found] == ["stem", *(f"blocks.{index}" for index in range(4)), "head"]
    assert not any(block.repeated or block.recomputable for block in found)


def test_stages_take_no_more_than_was_predicted() -> None:
    """And more than without their second calls."""
    torch.manual_seed(0)
    module, batch = Large(), (torch.randn(256, 256), torch.randn(256, 256))
    footprint = trace(module, None, batch, validation=batch)
    blocks = [block.fqn for block in footprint.blocks]
    assert blocks == ["first.0", "first.2", "second.0", "second.2"]
    assert (footprint.again, footprint.repeats, footprint.evaluation_repeats) == (tuple((2 * i + 1, 8) for i in range(4)), 2.0, 2.0)
    assert not footprint.also_uses
    once = 2 * 256 * 256 * 512  # each layer's work is that of both of its calls
    assert [block.flops / once for block in footprint.blocks] == pytest.approx([2] * 4, rel=0.01)
    assert [block.backward_flops / once for block in footprint.blocks] == pytest.approx([2, 4, 4, 4], rel=0.01)
    plan = pipeline(("second.0",), micro_batches=1)
    staging = Staging(hooks={hook: recorded(copy.deepcopy(module), batch, hook=hook, blocks=blocks) for hook in HOOKS})
    chained = Chained(module, staging, plan.cuts)
    chained.batch = [batch]
    received: tuple[Tensor, ...] = ()
    for rank, stage in enumerate(chained.stages):
        given = stage.replay(*received)
        given = tuple(each.detach() for each in (given if isinstance(given, tuple) else (given,)))
        parameters = sum(each.nbytes for each in stage.module.parameters() if not is_absent(each))

        def step(stage: Any = stage, received: Any = received, given: Any = given) -> None:
            own = tuple(each.clone().requires_grad_() for each in received)
            found = stage.replay(*own)
            torch.autograd.backward(found, [each.clone() for each in given])

        stage.module.zero_grad()
        taken = parameters + _peak(step)  # with the batch
        predicted = pipeline_bytes(footprint, plan, rank, on_cpu=True)
        assert taken <= predicted.allocated < 2.5 * taken
        without = pipeline_bytes(replace(footprint, again=(), repeats=1.0), plan, rank, on_cpu=True)
        assert (without.allocated < taken) == (rank == 0)

        def validate(stage: Any = stage, received: Any = received) -> None:
            with torch.no_grad():
                stage.replay(*(each.clone() for each in received))

        stage.replay.hook = "validation_step"
        assert _peak(validate) <= sum(pipeline_evaluation(footprint, plan, rank, 1.0))
        stage.replay.hook = "training_step"
        received = given
