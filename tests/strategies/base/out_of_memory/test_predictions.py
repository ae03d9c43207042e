"""A prediction, a test or a validation called by itself gets over a batch that runs out of memory, and gives what plain Lightning gives."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_autopar import AutoParallelStrategy
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.base.engine_mixin import EngineMixin
from tests.strategies.base.out_of_memory.test_rerun import allocate
from tests.strategies.fitted import QUIET, Fitted, numbers, plan

pytestmark = pytest.mark.timeout(60)

SINGLE, DDP = plan("single", ranks=1), plan("ddp")
FSDP = plan("fsdp", shard=("net.1", "net.3"))
PIPELINE = plan("pipeline", cuts=("net.2",), schedule="1f1b", micro_batches=2)


class Predicts(Fitted):
    """Runs out of memory where a step of a rank holds more samples than fit, under a plan of ours.

    Args:
        most: how many samples fit.
        rank: on which rank.
    """

    def __init__(self, most: int, rank: int = 0) -> None:
        super().__init__()
        self.most, self.on = most, rank

    def look(self, batch: Any) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, EngineMixin) and strategy.global_rank == self.on:
            allocate(len(batch[0]), self.most, "an evaluation")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        guesses = self.net(batch[0])
        self.look(batch)
        return {"guesses": guesses, "drawn": torch.rand(len(guesses)), "sure": (guesses[:, 0] > 0, None)}

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("drawn", torch.rand(()))
        self.log("test_loss", self.loss(batch), on_step=True, on_epoch=True)
        self.look(batch)


class Depends(Predicts):
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.look(batch)
        return self.net(batch[0]).softmax(0)


class ReturnsANumber(Predicts):
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.look(batch)
        return self.net(batch[0]).mean()


class Keeps(Predicts):
    """Keeps its outputs, from the second batch on."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.kept: list[Tensor] = []

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.look(batch)
        guesses: Tensor = self.net(batch[0])
        self.kept.append(guesses)
        return guesses


class Sees(pl.Callback):
    """How many samples each batch's output has."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def on_predict_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.rows.append(len(outputs["guesses"]))


def run(make: Callable[[], Any], under: Plan | None, call: str, **options: Any) -> Any:
    """What a call of the trainer returns."""
    pl.seed_everything(3, verbose=False)
    strategy: Any = "auto"
    if under is not None:
        strategy = AutoParallelStrategy(devices=f"{under.world_size}xcpu:2GiB", plan=under, calibrate="off", allow=[under.engine])
    trainer = pl.Trainer(accelerator="cpu", devices="auto" if under else 1, strategy=strategy, **{**QUIET, **options})
    return getattr(trainer, call)(make(), DataLoader(numbers(), batch_size=8))


def same(make: Callable[[], Any], under: Plan, call: str) -> None:
    ours, theirs = run(make, under, call), run(make, None, call)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("under", "rank"), [(SINGLE, 0), (DDP, 1), (FSDP, 1), (PIPELINE, 0)], ids=["single", "ddp", "fsdp", "pipeline"])
def test_a_batch_of_a_prediction_is_run_again_in_more_parts(under: Plan, rank: int) -> None:
    ours, theirs = (run(lambda: Predicts(2, rank), each, "predict") for each in (under, None))
    assert [len(each["guesses"]) for each in ours] == [8, 8, 8, 2]
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close((our["guesses"], our["sure"]), (their["guesses"], their["sure"]), rtol=1e-5, atol=1e-5)
    if under is SINGLE:
        torch.testing.assert_close([each["drawn"] for each in ours], [each["drawn"] for each in theirs], rtol=0, atol=0)


def test_callbacks_see_whole_batches_and_a_line_says_what_happened(caplog: pytest.LogCaptureFixture) -> None:
    sees = Sees()
    with caplog.at_level(logging.WARNING):
        run(lambda: Predicts(3), SINGLE, "predict", callbacks=[sees])
    assert sees.rows == [8, 8, 8, 2]
    assert [each.message.split(", ")[-2] for each in caplog.records if "again" in each.message] == ["in 2 parts", "in 4 parts"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Depends(4), "a sample's prediction depends on the others"),
        (lambda: ReturnsANumber(4), "has no row for each sample"),
        (lambda: Keeps(4), "keeps what it has found in 'kept'"),
        (lambda: Predicts(1), "in parts of one sample each"),
        (lambda: Predicts(0), "1 samples in an evaluation"),
    ],
    ids=["depends", "number", "keeps", "one", "none"],
)
def test_what_parts_may_change_is_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        run(make, SINGLE, "predict")


@pytest.mark.parametrize(
    ("under", "rank"),
    [(SINGLE, 0), (FSDP, 1), pytest.param(PIPELINE, 1, marks=pytest.mark.slow)],
    ids=["single", "fsdp", "pipeline"],
)
def test_a_test_called_by_itself_runs_in_more_parts(under: Plan, rank: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        same(lambda: Predicts(2, rank), under, "test")
    assert under is SINGLE or "test() begins again, with the same samples and the same random numbers, under the plan" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("call", ["test", "predict"])
def test_the_same_under_zero(call: str) -> None:
    pytest.importorskip("deepspeed")
    ours, theirs = (run(lambda: Predicts(2, 1), each, call) for each in (plan("zero", zero_stage=3), None))
    if call == "predict":
        ours, theirs = ([each["guesses"] for each in found] for found in (ours, theirs))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
