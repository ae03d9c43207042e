"""What FSDP2 can't run, or would run wrong, is a sentence before any worker starts."""

from __future__ import annotations

import copy
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import BLOCKS, Fitted, numbers
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from lightning_autopar.memory.batch import FirstBatch
from lightning_autopar.strategies import rehearse
from lightning_autopar.strategies.rehearse_fsdp import rehearse_fsdp, unshardable


class Scalar(Fitted):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))


class Sparse(Fitted):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(17, 8, sparse=True)


class Mixed(Fitted):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))


class Regularised(Fitted):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.1 * self.net[2][0].weight.pow(2).sum()


class Rescaling(Fitted):
    """Changes a whole parameter in its step."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            self.scale.data.mul_(0.5)
        return mse_loss(self.net(batch[0]) * self.scale.sum(), batch[1])


class Crashing(Fitted):
    def on_train_batch_end(self, *_: Any) -> None:
        torch.stack([torch.ones(16, 16), self.net[1][0].weight])


def _first() -> FirstBatch:
    return FirstBatch(batch=next(iter(DataLoader(numbers(), batch_size=8))), batch_size=8)


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (Scalar, "the parameter 'scale' is a scalar"),
        (Sparse, "'table' has sparse gradients"),
        (Mixed, "several dtypes"),
        (Regularised, "uses a block's parameters outside of the block's forward"),
        (Rescaling, "what the step does to whole parameters is lost on shards"),
        (Crashing, "on_train_batch_end was left out, as it failed"),
    ],
)
def test_the_cause_is_named(make: Any, cause: str) -> None:
    sentence = rehearse_fsdp(make(), None, _first(), BLOCKS)
    assert sentence is not None
    assert cause in sentence


def test_what_runs_is_not_refused_and_stays_as_it_was() -> None:
    module = Fitted()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert rehearse_fsdp(module, None, _first(), BLOCKS) is None
    torch.testing.assert_close(dict(module.state_dict()), before, rtol=0, atol=0)
    assert type(module) is Fitted


def test_dropout_draws_the_same_on_shards() -> None:
    class Dropping(Fitted):
        def loss(self, batch: Any) -> Tensor:
            return mse_loss(nn.functional.dropout(self.net(batch[0]), 0.5), batch[1])

    assert rehearse_fsdp(Dropping(), None, _first(), BLOCKS) is None


def test_a_step_that_fails_anyway_says_nothing_about_shards() -> None:
    class Broken(Fitted):
        def loss(self, batch: Any) -> Tensor:
            raise ValueError("broken")

    assert rehearse_fsdp(Broken(), None, _first(), BLOCKS) is None


def test_a_long_step_is_not_rehearsed() -> None:
    assert rehearse_fsdp(Regularised(), None, _first(), BLOCKS, flops=10**15) is None


@pytest.mark.parametrize(("crashes", "passes"), [(1, True), (2, False)])
def test_a_child_that_crashes_is_tried_once_more(crashes: int, passes: bool, tmp_path: Path) -> None:
    class Aborted(Fitted):
        """The rank that judges dies in its first sharded step, so often."""

        def loss(self, batch: Any) -> Tensor:
            if dist.is_initialized() and dist.get_rank() == 0:
                with (tmp_path / "crashes").open("a+") as file:
                    file.seek(0)
                    if len(file.read()) < crashes:
                        file.write("x")
                        file.flush()
                        os.kill(os.getpid(), signal.SIGABRT)
            return super().loss(batch)

    sentence = rehearse_fsdp(Aborted(), None, _first(), BLOCKS)
    assert sentence is None if passes else "SIGABRT" in (sentence or "")


def test_unshardable_passes_an_ordinary_module() -> None:
    assert unshardable(Fitted()) is None


class Shifted(Fitted):
    """Adds to all logits what softmax takes out again: the gradient is rounding, and Adam makes a whole step of it."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))
        self.wide = nn.Linear(1, 7)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + (self.wide(self.net(batch[0])) + self.shift).softmax(-1).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.05, eps=1e-16)


def test_weights_that_go_by_rounding_are_told_from_those_that_do_not() -> None:
    torch.manual_seed(0)
    module, batch = Shifted(), lambda: (torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), torch.ones(8, 1))
    plain = rehearse._plain_steps(copy.deepcopy(module), None, batch)
    swings = rehearse._swings(plain, module, None, batch)
    assert swings["shift"] > 0.05
    assert max(swing for name, swing in swings.items() if name != "shift") < rehearse._EQUAL
    engine: Any = rehearse.Engine(steps=lambda *_: plain, where="here", lost="lost", sentence=str)
    for name, change in (("shift", 0.05), ("wide.weight", 0.001)):
        ours = replace(plain, weights={**plain.weights, name: plain.weights[name] + change})
        assert "has other values" in (rehearse._difference(plain, ours, engine, {}) or "")
        assert (rehearse._difference(plain, ours, engine, swings) is None) == (name == "shift")
