"""A progress bar that begins within an epoch counts on, to the total that the epoch began with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, RichProgressBar, TQDMProgressBar
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar import AutoParallelStrategy, CheckpointMigrate
from lightning_autopar.plans import Plan
from tests.strategies.elastic.test_elastic import Regression, Watch, to
from tests.strategies.modules import QUIET


def _noted(base: type[Any]) -> type[Any]:
    class Noted(base):  # type: ignore[misc]
        """Writes down what the training bar shows after each batch, on rank 0."""

        def __init__(self, notes: Path) -> None:
            super().__init__()
            self.notes = notes

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
            if not trainer.is_global_zero:
                return
            if base is TQDMProgressBar:
                shown = self.train_progress_bar.n, self.train_progress_bar.total
                assert self.train_progress_bar.initial <= batch_idx
            else:
                task = next(task for task in self.progress.tasks if task.id == self.train_progress_bar_id)
                shown = int(task.completed), int(task.total)
            with self.notes.open("a") as file:
                file.write(f"{shown[0]}/{shown[1]}\n")

    return Noted


class Saves(Callback):
    """Saves a checkpoint after the third batch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


def _fit(root: Path, callbacks: list[Callback], allow: list[Any], **options: Any) -> None:
    data = torch.randn(32, 8)
    strategy = AutoParallelStrategy(devices="2xcpu:1GiB", calibrate="off", allow=allow)
    quiet = {
        **QUIET,
        "enable_progress_bar": True,
        "max_epochs": -1,
        "max_steps": 14,
        "default_root_dir": root,
        "enable_checkpointing": False,
    }
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", callbacks=callbacks, **quiet)  # type: ignore[arg-type]
    trainer.fit(Regression(), DataLoader(TensorDataset(data, data.sum(1)), 4), **options)


WHOLE = [f"{batch}/8" for batch in range(1, 9)] + [f"{batch}/6" for batch in range(1, 7)]


@pytest.mark.parametrize(("bar", "engine"), [(TQDMProgressBar, "single"), (RichProgressBar, "ddp")])
def test_a_resumed_epochs_bar(bar: type[Any], engine: str, tmp_path: Path) -> None:
    _fit(tmp_path, [_noted(bar)(tmp_path / "whole"), Saves(tmp_path / "at_3.ckpt")], [engine])
    _fit(tmp_path, [_noted(bar)(tmp_path / "rest")], [engine], ckpt_path=str(tmp_path / "at_3.ckpt"))
    assert (tmp_path / "whole").read_text().split() == WHOLE
    assert (tmp_path / "rest").read_text().split() == WHOLE[3:]


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_a_moved_epochs_bar(bar: type[Any], tmp_path: Path) -> None:
    moves = Watch((1, to(Plan(engine="ddp", devices=("cpu:0", "cpu:1")))))
    _fit(tmp_path, [_noted(bar)(tmp_path / "notes"), CheckpointMigrate(), moves], ["single", "ddp"])
    assert not moves.acts
    assert (tmp_path / "notes").read_text().split() == WHOLE
