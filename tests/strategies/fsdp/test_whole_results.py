"""Hooks that compute with shards of unequal length, and loggers that are given what comes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_only
from torch.nn.utils import parameters_to_vector

from tests.strategies.fitted import BLOCKS, Fitted, fit, numbers, plan

THREE = plan("fsdp", ranks=3, shard=BLOCKS)  # which divide no dimension of 8


class Keeping(DummyLogger):
    """A logger that reads what rank 0 gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[float] = []

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows += [float(value) for value in metrics.values()]


class Watch(Callback):
    """Gives a logger the weights' norms by itself."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        trainer.logger.log_metrics({name: parameter.detach().norm() for name, parameter in pl_module.named_parameters()})


def test_a_logger_that_a_callback_calls_is_given_whole_tensors() -> None:
    """Rank 0 had waited for the others for ever, as Lightning lets it alone run a logger's ``log_metrics``."""
    rows = []
    for under in (plan("fsdp", shard=BLOCKS), None):
        logger = Keeping()
        fit(Fitted, numbers(), under, logger=logger, callbacks=[Watch()], limit_val_batches=0, max_epochs=1)
        rows.append(logger.rows)
    ours, theirs = rows
    assert len(theirs) >= 4 * len(list(Fitted().parameters()))
    assert ours == pytest.approx(theirs, rel=1e-5)


class Vector(Fitted):
    """Puts all parameters into one vector, with gradients recorded and without."""

    def on_train_epoch_end(self) -> None:
        self.norm = parameters_to_vector(self.parameters()).norm().item()
        self.largest = float(torch.cat([parameter.detach().view(-1) for parameter in self.parameters()]).max())


def test_a_vector_of_shards_is_that_of_the_whole_parameters() -> None:
    """torch refuses to flatten parts of unequal length, which had ended the run after its first epoch."""
    (ours, _, _), (theirs, _, _) = (fit(Vector, numbers(), under, limit_val_batches=0, max_epochs=1) for under in (THREE, None))
    assert (ours.norm, ours.largest) == pytest.approx((theirs.norm, theirs.largest), rel=1e-5)


class Writing(Fitted):
    """Writes to a view of a parameter."""

    @torch.no_grad()
    def on_train_epoch_end(self) -> None:
        self.net[0].weight.view(-1)[:3].zero_()


def test_what_a_view_would_lose_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match=r"a hook writes to a view .* of a parameter that FSDP2 holds in parts"):
        fit(Writing, numbers(), THREE, limit_val_batches=0, max_epochs=1)
