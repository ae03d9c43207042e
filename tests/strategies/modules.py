"""Small LightningModules and Trainers for the tests in this folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar.strategies.auto import AutoParallelStrategy

TWO = "2xcpu:1GiB"
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Regression(pl.LightningModule):
    """A small regression; ``at`` may hold functions to be called at the start of hooks, by the hook's name."""

    def __init__(self, at: dict[str, Callable[[Regression, int], None]] | None = None, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 1))
        self.at = at or {}
        self.pid: int | None = None

    def _call(self, name: str, index: int = -1) -> None:
        if name in self.at:
            self.at[name](self, index)

    def setup(self, stage: str) -> None:
        self.pid = os.getpid()
        self._call("setup")

    def on_fit_start(self) -> None:
        self._call("on_fit_start")

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self._call("training_step", batch_idx)
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._call("validation_step", batch_idx)
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self._call("predict_step", batch_idx)
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class HookCounter(Callback):
    """Appends a line to a file at each ``on_exception``: rank, step, exception class."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        with self.path.open("a") as file:
            file.write(f"{trainer.global_rank} {trainer.global_step} {type(exception).__name__} {type(trainer.strategy).__name__}\n")

    def lines(self) -> list[str]:
        return sorted(self.path.read_text().splitlines()) if self.path.exists() else []


def data(samples: int = 32, seed: int = 0) -> TensorDataset:
    x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1, keepdim=True))


def loader(samples: int = 32, batch_size: int = 8, *, shuffle: bool = False, seed: int = 0, **options: Any) -> DataLoader[Any]:
    return DataLoader(data(samples, seed), batch_size=batch_size, shuffle=shuffle, **options)


def trainer(engine: str, folder: Path, **options: Any) -> pl.Trainer:
    """A Trainer for ``engine`` on two CPU devices; ``"plain"`` for Lightning's own single device."""
    strategy: Any = "auto" if engine == "plain" else AutoParallelStrategy(allow=[engine], devices=TWO)
    values: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "default_root_dir": folder,
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in options.get("callbacks", ())),
        "log_every_n_steps": 1,
        **QUIET,
    }
    values.update(options)
    if values.get("barebones"):
        values = {name: value for name, value in values.items() if name not in (*QUIET, "enable_checkpointing", "log_every_n_steps")}
    return pl.Trainer(strategy=strategy, **values)


def fit(root: Path, module: pl.LightningModule | None = None, **options: Any) -> Any:
    """Trains this module, or a regression, for an epoch on two CPU devices; the options are the strategy's. Returns the trainer."""
    strategy = AutoParallelStrategy(devices=TWO, calibrate="off", **options)
    fitted = pl.Trainer(strategy=strategy, max_epochs=1, default_root_dir=root, accelerator="cpu", enable_checkpointing=False, **QUIET)  # type: ignore[arg-type]
    fitted.fit(module or Regression(), loader(), loader())
    return fitted


def weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().double().flatten() for parameter in module.parameters()])


def on_rank(rank: int, action: Callable[[], None], *, batch_idx: int | None = None) -> Callable[[Regression, int], None]:
    """Do it on one rank of a run of several processes, never while the plan is being made."""

    def act(module: Regression, index: int) -> None:
        if torch.distributed.group.WORLD is not None and module.global_rank == rank and batch_idx in (None, index):
            action()

    return act
