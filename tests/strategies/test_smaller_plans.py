"""A run of several ranks that runs out of memory goes on under a smaller plan, and is plain Lightning's run, where nothing fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_autopar import AutoParallelStrategy, CheckpointMigrate, Plan
from lightning_autopar.strategies.base.mixin import EngineMixin
from lightning_autopar.strategies.elastic.move_requests import MoveRequest
from tests.strategies.base.out_of_memory.test_rerun import Short, allocate
from tests.strategies.fitted import QUIET, numbers, plan

pytestmark = pytest.mark.timeout(120)

FSDP = plan("fsdp", shard=("net.2", "net.4"))
PIPELINE = plan("pipeline", cuts=("net.4",), schedule="1f1b", micro_batches=2)


class Plain(Short):
    """Keeps nothing on itself, so that a pipeline takes it."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        pass


class Slow(Plain):
    """Lasts long enough to be moved."""

    def on_train_batch_end(self, *_: Any) -> None:
        if isinstance(self.trainer.strategy, EngineMixin):
            time.sleep(0.2)


class Hooks(pl.Callback):
    """Writes down a batch's hooks, and the counters."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.calls.append((batch_idx, trainer.global_step))

    def on_before_zero_grad(self, *_: Any) -> None:
        self.calls.append("zero")

    def on_before_backward(self, *_: Any) -> None:
        self.calls.append("backward")

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.calls.append(trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.state_dict())


def fit(make: Callable[[], Any], under: Plan | None, root: Path, *callbacks: pl.Callback, **options: Any) -> tuple[Any, Any]:
    pl.seed_everything(3, verbose=False)
    module, allow = make(), options.pop("allow", None) or (under and [under.engine])
    strategy: Any = "auto"
    if allow:
        strategy = AutoParallelStrategy(devices="2xcpu:2GiB", plan=under, calibrate="off", allow=allow)
    trainer = pl.Trainer(
        accelerator="cpu", devices="auto" if allow else 1, strategy=strategy, max_epochs=2, log_every_n_steps=1,
        default_root_dir=root, callbacks=list(callbacks), **{**QUIET, **options},
    )  # fmt: skip
    trainer.fit(module, DataLoader(numbers(), batch_size=8, shuffle=True), DataLoader(numbers(), batch_size=8))
    return module, trainer


def same(make: Callable[[], Any], under: Plan, root: Path, *callbacks: pl.Callback, hooks: bool = True, **options: Any) -> Any:
    """The run is plain Lightning's; returns its strategy."""
    found: list[Any] = []
    for each in (under, None):
        seen = Hooks()
        module, trainer = fit(make, each, root, *([seen] if hooks else []), *(callbacks if each is not None else ()), **options)
        metrics = {name: value.float() for name, value in trainer.callback_metrics.items()}
        found.append((dict(module.state_dict()), metrics, trainer.global_step, seen.calls, trainer.strategy))
    (ours, our_metrics, our_step, our_calls, strategy), (theirs, their_metrics, their_step, their_calls, _) = found
    torch.testing.assert_close((ours, our_metrics), (theirs, their_metrics), rtol=1e-5, atol=1e-5)
    assert our_step == their_step
    assert our_calls == their_calls
    return strategy


# -- in a step: the batch is run again -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "layer", "rank", "batch"), [("forward", 3, 1, 0), ("forward", 5, 0, 2), ("backward", 1, 1, 2), ("backward", 5, 0, 1)]
)
def test_sharded_ranks_leave_the_step_together(point: str, layer: int, rank: int, batch: int, tmp_path: Path) -> None:
    strategy = same(partial(Short, point, layer, rank, {batch: 2}), FSDP, tmp_path)
    assert strategy.plan.micro_batches == 2


@pytest.mark.parametrize(("point", "layer", "rank"), [("backward", 5, 1), pytest.param("forward", 3, 0, marks=pytest.mark.slow)])
def test_stages_leave_the_step_together(point: str, layer: int, rank: int, tmp_path: Path) -> None:
    strategy = same(partial(Plain, point, layer, rank, {1: 2}), PIPELINE, tmp_path, hooks=False)
    assert strategy.plan.micro_batches == 4


def test_what_is_left_is_halved_as_often_as_it_takes_in_a_window_of_accumulated_batches(tmp_path: Path) -> None:
    strategy = same(partial(Short, "backward", 3, 0, {2: 1}), FSDP, tmp_path, accumulate_grad_batches=2, gradient_clip_val=0.1)
    assert strategy.plan.micro_batches == 4


def test_one_sample_that_is_too_much(tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="1 samples in forward"):
        fit(partial(Short, "forward", 3, 1, {1: 0}), FSDP, tmp_path)


# -- elsewhere -------------------------------------------------------------------------------------------------------------------------


class InOptimizer(Plain):
    """Runs out in the optimizer's step under FSDP2."""

    def __init__(self, step: int) -> None:
        super().__init__("")
        self.at = step

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, EngineMixin) and strategy.run_plan.plan.engine == "fsdp" and self.trainer.global_step == self.at:
            allocate(1, 0, "the optimizer")


def test_what_cant_be_undone_ends_a_run_without_snapshots_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError) as raised:
        fit(partial(InOptimizer, 2), FSDP, tmp_path)
    assert "memory ran out in the optimizer's step; with callbacks=[CheckpointMigrate()]" in "".join(raised.value.__notes__)


def test_a_run_that_has_trained_nothing_begins_again_under_a_smaller_plan(tmp_path: Path) -> None:
    """More micro-batches don't help in the optimizer's step: planning looks for another plan."""
    with pytest.raises(torch.OutOfMemoryError):
        fit(partial(InOptimizer, 0), FSDP, tmp_path)
    ours, trainer = fit(partial(InOptimizer, 0), None, tmp_path, allow=["fsdp", "ddp"])
    theirs, _ = fit(partial(InOptimizer, 0), None, tmp_path)
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=1e-5, atol=1e-5)
    assert trainer.strategy.plan.engine == "ddp"


# -- elastic ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:autopar. a failure at step")
@pytest.mark.parametrize(
    ("under", "rank", "parts"), [(FSDP, 1, 4), pytest.param(PIPELINE, 0, 8, marks=pytest.mark.slow)], ids=["fsdp", "pipeline"]
)
def test_an_elastic_run_goes_back_to_its_snapshot_with_more_micro_batches(under: Plan, rank: int, parts: int, tmp_path: Path) -> None:
    strategy = same(partial(Plain, "backward", 3, rank, {2: 1}), under, tmp_path, CheckpointMigrate(), hooks=False)
    assert [span.title for span in strategy.history.spans][1:] == [
        f"{under.title()}, micro-batches {count}" if under is FSDP else f"pipeline 2 stages, 1f1b ×{count}" for count in (parts // 2, parts)
    ]


class MovesOnce(pl.Callback):
    """Moves the run where planning would, once it has come to a step."""

    interval_seconds = 0.01
    moved = False

    def look(self, run: Any) -> MoveRequest | None:
        if self.moved or run.step is None or run.step < 3:
            return None
        self.moved = True
        return MoveRequest(action="move", decision=run.replan(run.inventory()), reason="the test")


def test_a_move_keeps_the_number_of_parts_that_a_rank_has_found(tmp_path: Path) -> None:
    strategy = same(partial(Slow, "backward", 3, 1, {1: 1}), plan("ddp"), tmp_path, CheckpointMigrate(), MovesOnce(), hooks=False)
    assert [span.title for span in strategy.history.spans] == ["ddp ×2", "ddp ×2, micro-batches 4"]
