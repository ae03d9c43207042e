"""A validation's batch that runs out of memory is run again in more parts, and the run is plain Lightning's, where nothing fails."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torchmetrics.classification import BinaryF1Score

from lightning_autopar.exact.random.whole_batch_draws import DrawPlan
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.base.engine_mixin import EngineMixin
from tests.strategies.base.out_of_memory.test_rerun import allocate
from tests.strategies.fitted import Fitted, fit, numbers, plan

pytestmark = pytest.mark.timeout(60)


class Evaluated(Fitted):
    """Runs out of memory at the end of a validation step, under a plan of ours.

    Args:
        rank: on which rank.
        most: how many samples fit.
    """

    def __init__(self, rank: int, most: int) -> None:
        super().__init__()
        self.fails, self.f1, self.seen, self.tried = (rank, most), BinaryF1Score(), list[float](), list[int]()
        self.register_buffer("steps", torch.zeros(()))
        self.net.insert(1, nn.Dropout(0.3))  # draws in training: what comes after a validation must have the same numbers

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        (x, y), (rank, most), strategy = batch, self.fails, self.trainer.strategy
        self.tried.append(len(x))
        guesses = self.net(x)
        self.log("drawn", torch.rand(()))
        self.f1.update((guesses[:, 0] > 0).long(), (y[:, 0] > 0).long())
        self.log("f1", self.f1)
        self.log("val_loss", nn.functional.mse_loss(guesses, y), on_step=True, on_epoch=True)
        self.log("rows", float(len(y)), reduce_fx="sum")
        if isinstance(strategy, EngineMixin) and strategy.global_rank == rank:
            allocate(len(x), most, "validation")
        return {"guesses": guesses}


class Reads(pl.Callback):
    """Sees what a validation step returns."""

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        module.seen.append(float(outputs["guesses"].double().mean()))


def evaluated(make: Any, under: Plan | None, **options: Any) -> tuple[Any, dict[str, Any]]:
    module, _, trainer = fit(make, numbers(), under, draws=DrawPlan(), undivided=None, **options)
    return module, {name: value.float() for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize(
    ("under", "rank"),
    [(plan("single", ranks=1), 0), (plan("ddp"), 1), (plan("single", ranks=1, micro_batches=2), 0), (plan("ddp", micro_batches=2), 0)],
    ids=["single", "ddp", "single-parts", "ddp-parts"],
)
def test_a_batch_is_run_again_in_more_parts(under: Plan, rank: int) -> None:
    module, ours = evaluated(partial(Evaluated, rank, 2), under, callbacks=[Reads()])
    plain, theirs = evaluated(partial(Evaluated, rank, 2), None, callbacks=[Reads()])
    torch.testing.assert_close((dict(module.state_dict()), ours), (dict(plain.state_dict()), theirs), rtol=1e-5, atol=1e-5)
    if under.world_size == 1:
        assert module.seen == pytest.approx(plain.seen, abs=1e-5), "hooks see the whole batch's output"
        assert module.tried[:6] == [8, 4, 2, 2, 2, 2], "the first batch is tried whole, in two parts and in four"
        assert set(module.tried[6:]) <= {1, 2}, "parts stay as small as they had to become"


def test_one_sample_that_is_too_much() -> None:
    with pytest.raises(torch.OutOfMemoryError) as raised:
        evaluated(partial(Evaluated, 0, 0), plan("single", ranks=1))
    assert "one of its 8 samples alone takes more" in "".join(raised.value.__notes__)


class ReturnsAList(Evaluated):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return [super().validation_step(batch, batch_idx)["guesses"]]


def test_an_output_that_nobody_can_put_together_is_refused_where_somebody_reads_it() -> None:
    with pytest.raises(RuntimeError, match="on_validation_batch_end reads what the step returns"):
        evaluated(partial(ReturnsAList, 0, 4), plan("single", ranks=1), callbacks=[Reads()])
    _, ours = evaluated(partial(ReturnsAList, 0, 4), plan("single", ranks=1))
    _, theirs = evaluated(partial(ReturnsAList, 0, 4), None)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


class Counts(Evaluated):
    """Makes its buffer anew, in inference mode, and writes to it."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps = self.steps + batch[0].mean()
        self.steps += batch[0].mean()
        return super().validation_step(batch, batch_idx)


def test_a_buffer_of_inference_mode_is_no_obstacle() -> None:
    """It counts no writes, which the state before a step is told by."""
    module, _ = evaluated(partial(Counts, 0, 99), plan("single", ranks=1))
    plain, _ = evaluated(partial(Counts, 0, 99), None)
    torch.testing.assert_close(dict(module.state_dict()), dict(plain.state_dict()), rtol=1e-5, atol=1e-5)
