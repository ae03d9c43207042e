"""A run of several ranks that runs out of memory goes on under a smaller plan, and is plain Lightning's run, where nothing fails."""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_autopar import AutoParallelStrategy, CheckpointMigrate, Plan
from lightning_autopar.state.snapshot_folder import is_snapshot
from lightning_autopar.strategies.base.engine_mixin import EngineMixin
from lightning_autopar.strategies.base.process_group import RENDEZVOUS_FILE
from lightning_autopar.strategies.preparation.decision import MoveRequest
from tests.strategies.base.out_of_memory.test_rerun import Short, allocate
from tests.strategies.fitted import QUIET, numbers, plan

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
    module, allow, epochs = make(), options.pop("allow", None) or (under and [under.engine]), options.pop("epochs", 2)
    resume = options.pop("resume", None)
    strategy: Any = "auto"
    if allow:
        strategy = AutoParallelStrategy(devices="2xcpu:2GiB", plan=under, calibrate="off", allow=allow)
    trainer = pl.Trainer(
        accelerator="cpu", devices="auto" if allow else 1, strategy=strategy, max_epochs=epochs, log_every_n_steps=1,
        default_root_dir=root, callbacks=list(callbacks), **{**QUIET, **options},
    )  # fmt: skip
    trainer.fit(module, DataLoader(numbers(), batch_size=8, shuffle=True), DataLoader(numbers(), batch_size=8), ckpt_path=resume)
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


@pytest.mark.parametrize("validates", [True, False])
def test_an_epochs_last_batch_is_run_again(validates: bool, tmp_path: Path) -> None:
    same(partial(Short, "backward", 1, 1, {2: 2}), FSDP, tmp_path, limit_train_batches=3, limit_val_batches=None if validates else 0)


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


def fails(place: str, under: Plan) -> bool:
    """Whether memory runs out there under this plan, the first of the runs below; DDP's ranks would get over a window's batch alone."""
    return under.engine == ("fsdp" if place == "window" else "ddp") and under.micro_batches == 1


class Elsewhere(Plain):
    """Runs out under its first plan where the batch can't be run again: in the optimizer's step, in validation, in a later batch of a
    window, or in manual optimization.

    Args:
        place: one of these.
        step: at which the trainer's global step; None for the first one after the run has a snapshot.
        rank: on which rank.
        once: a file; if given, memory runs out under any plan, until there is this file.
    """

    def __init__(self, place: str, step: int | None, rank: int = 1, once: Path | None = None) -> None:
        super().__init__("")
        self.place, self.at, self.rank, self.once = place, step, rank, once
        self.automatic_optimization = place != "manual"

    def look(self, place: str) -> None:
        strategy = self.trainer.strategy
        if place != self.place or not isinstance(strategy, EngineMixin):
            return
        if not fails(place, strategy.run_plan.plan) if self.once is None else self.once.exists():
            return
        if self.at is None:
            run = Path(os.environ[RENDEZVOUS_FILE]).parent.parent
            there = any(is_snapshot(each) for each in run.glob("s0*"))
        else:
            there = self.trainer.global_step == self.at
        if strategy.global_rank == self.rank and there:
            if self.once is not None:
                self.once.touch()
            allocate(1, 0, place)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.look("step")
        self.look("window" if batch_idx % 2 else "")
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.look("manual")
            optimizer.step()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.look("optimizer")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("drawn in validation", torch.rand(()))
        super().validation_step(batch, batch_idx)
        self.look("validation")


def written(root: Path) -> list[dict[str, str]]:
    """The rows of the only version of a run's log."""
    [path] = root.rglob("metrics.csv")
    return [dict(row) for row in csv.DictReader(io.StringIO(path.read_text()))]


@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available")
@pytest.mark.parametrize("after", ["snapshot", "nothing"])
@pytest.mark.parametrize("place", ["optimizer", "validation", "window", "manual"])
def test_where_the_batch_cant_be_run_again_the_run_goes_back(
    place: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To its latest snapshot, or to its beginning; and on under a smaller plan. Nothing is logged or counted twice."""
    if after == "snapshot":
        monkeypatch.setattr("lightning_autopar.strategies.elastic.snapshot_schedule.SAVE_SECONDS", 0.0)
    make = partial(Elsewhere, place, None if after == "snapshot" else 4)
    found: list[Any] = []
    for allow in (["fsdp"] if place == "window" else ["fsdp", "ddp"], None):
        root = tmp_path / str(allow is None)
        logger, saves = (
            pl.loggers.CSVLogger(root, flush_logs_every_n_steps=1),
            ModelCheckpoint(root / "kept", save_top_k=-1, save_last=True),
        )
        options: Any = {"accumulate_grad_batches": 2 if place == "window" else 1, "logger": logger, "enable_checkpointing": True}
        if place != "manual":
            options["gradient_clip_val"] = 0.1
        module, trainer = fit(make, None, root, saves, allow=allow, epochs=12 if after == "snapshot" else 3, resume="last", **options)
        kept = sorted(path.name for path in root.rglob("*.ckpt"))
        metrics = {name: value.float() for name, value in trainer.callback_metrics.items()}
        found.append((dict(module.state_dict()), metrics, trainer.global_step, kept, written(root), trainer.strategy))
    (ours, our_metrics, our_step, our_files, our_rows, strategy), (theirs, their_metrics, their_step, their_files, their_rows, _) = found
    torch.testing.assert_close((ours, our_metrics), (theirs, their_metrics), rtol=1e-5, atol=1e-5)
    assert (our_step, our_files) == (their_step, their_files)
    assert [sorted(row) for row in our_rows] == [sorted(row) for row in their_rows]
    for our, their in zip(our_rows, their_rows, strict=True):
        assert {name: float(value or "nan") for name, value in our.items()} == pytest.approx(
            {name: float(value or "nan") for name, value in their.items()}, rel=1e-4, abs=1e-5, nan_ok=True
        )
    assert not fails(place, strategy.plan)


class InValidation(Plain):
    """Runs out in validation, on one rank, where a step has more than one sample."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("drawn in validation", torch.rand(()))
        super().validation_step(batch, batch_idx)
        if isinstance(self.trainer.strategy, EngineMixin) and self.trainer.global_rank == 1 and self.trainer.global_step:
            allocate(len(batch[0]), 1, "validation")


def test_sharded_ranks_all_run_their_validations_in_more_parts(tmp_path: Path) -> None:
    strategy = same(partial(InValidation, ""), FSDP, tmp_path, hooks=False)
    assert strategy.plan == FSDP


def test_the_same_plan_is_tried_again_once_where_none_takes_less(tmp_path: Path) -> None:
    once = tmp_path / "once"
    strategy = same(partial(Elsewhere, "optimizer", 2, once=once), plan("ddp"), tmp_path, hooks=False)
    assert once.exists()
    assert strategy.plan.engine == "ddp"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("place", ["step", "optimizer", "validation"])
def test_zero_goes_back_too(place: str, stage: int, tmp_path: Path) -> None:
    """It can't run a batch in parts, so that new processes run it again whole; validations have no gradients that would be lost."""
    pytest.importorskip("deepspeed")
    make = partial(InValidation, "") if place == "validation" else partial(Elsewhere, place, 2, once=tmp_path / "once")
    same(make, plan("zero", zero_stage=stage), tmp_path, hooks=False)
    assert place == "validation" or (tmp_path / "once").exists()


def test_a_run_that_has_no_smaller_plan_ends_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError) as raised:
        fit(partial(Elsewhere, "optimizer", 2), plan("ddp"), tmp_path)
    assert "no plan that it may use takes less memory" in "".join(raised.value.__notes__)


def test_a_run_that_has_trained_nothing_begins_again_under_a_smaller_plan(tmp_path: Path) -> None:
    """More micro-batches don't help in the optimizer's step: planning looks for another plan."""
    ours, trainer = fit(partial(Elsewhere, "optimizer", 0), None, tmp_path, allow=["fsdp", "ddp"])
    theirs, _ = fit(partial(Elsewhere, "optimizer", 0), None, tmp_path)
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=1e-5, atol=1e-5)
    assert trainer.strategy.plan.engine == "fsdp"


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
