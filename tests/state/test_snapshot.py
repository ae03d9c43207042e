"""Snapshots: saved under each engine, gone on from under each other, as if nothing had happened."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_autopar.state.snapshot import save_snapshot
from lightning_autopar.state.snapshot_folder import is_snapshot
from tests.state.test_checkpoint import (
    BATCHES,
    ENGINES,
    EPOCHS,
    PIPELINE_PAIRS,
    STAGED,
    Tied,
    assert_same,
    data,
    fit,
    outcome,
    scratch,
    strategy,
    whole,
)


class Snapshots(pl.Callback):
    """Saves after some steps."""

    def __init__(self, root: Path, steps: tuple[int, ...]) -> None:
        self.root, self.steps = root, steps

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step in self.steps:
            save_snapshot(trainer, self.root / f"step-{trainer.global_step}")


@cache
def saved(engine: str) -> Path:
    root = scratch()
    trainer, net = fit(engine, root, callbacks=[Snapshots(root, (3, 5, 8))], enable_checkpointing=False)
    assert_same(whole(), outcome(trainer, net))  # saving changes nothing
    return root


@pytest.mark.parametrize(
    ("step", "writer", "reader"),
    [(step, writer, reader) for step in (3, 5) for writer in ENGINES for reader in ENGINES]
    + [(5 if writer == reader else 3, writer, reader) for writer, reader in PIPELINE_PAIRS],
)
def test_going_on_from_a_snapshot_is_the_uninterrupted_run(step: int, writer: str, reader: str, tmp_path: Path) -> None:
    trainer, net = fit(reader, tmp_path, ckpt_path=saved(writer) / f"step-{step}")
    assert trainer.global_step == EPOCHS * BATCHES
    assert_same(whole(), outcome(trainer, net))
    assert net.head.weight is net.embed.weight


@pytest.mark.parametrize("reader", STAGED)
def test_a_snapshots_weights_can_be_validated(reader: str, tmp_path: Path) -> None:
    trainer, net = fit("single", tmp_path, ckpt_path=saved("fsdp") / "step-8", max_steps=8)
    expected = trainer.validate(net, data()["val_dataloaders"], verbose=False)
    other, again = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, **strategy(reader)), Tied()
    assert other.validate(again, data()["val_dataloaders"], ckpt_path=saved("fsdp") / "step-8", verbose=False) == [
        {"val": pytest.approx(expected[0]["val"], rel=1e-5)}
    ]


def test_only_a_finished_snapshot_is_one(tmp_path: Path) -> None:
    assert is_snapshot(saved("ddp") / "step-3")
    assert is_snapshot(str(saved("single") / "step-3"))
    for path in (None, "best", tmp_path, tmp_path / "missing"):
        assert not is_snapshot(path)
    (tmp_path / "tensors").mkdir()
    (tmp_path / "rest.pkl.part").write_bytes(b"")
    assert not is_snapshot(tmp_path)


class Two(Tied):
    """Two optimizers under manual optimization, one of them without state."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__(dropout)
        self.head = torch.nn.Linear(6, 6, bias=False)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(torch.nn.functional.mse_loss(self(batch[0]), batch[1]))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.embed.parameters(), 1e-2), torch.optim.AdamW(self.block.parameters(), 1e-2)]


@pytest.mark.parametrize(("writer", "reader"), [("ddp", "fsdp"), ("fsdp", "single"), ("single", "ddp")])
def test_two_optimizers_go_on(writer: str, reader: str, tmp_path: Path) -> None:
    def module() -> Two:
        pl.seed_everything(11, verbose=False)
        return Two()

    expected = outcome(*fit("plain", tmp_path, module=module()))
    fit(writer, tmp_path, module=module(), callbacks=[Snapshots(tmp_path, (6,))], enable_checkpointing=False)
    assert is_snapshot(tmp_path / "step-6")
    assert_same(expected, outcome(*fit(reader, tmp_path, module=module(), ckpt_path=tmp_path / "step-6")))
