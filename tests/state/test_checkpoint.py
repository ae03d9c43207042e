"""Checkpoints of every engine: ordinary files that every engine and plain Lightning go on from, at any batch."""

from __future__ import annotations

import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar import AutoParallelStrategy
from lightning_autopar.state.checkpoint import KEY

ENGINES = ("single", "ddp", "fsdp")
#: Batches an epoch and epochs.
BATCHES, EPOCHS = 5, 3


class Tied(pl.LightningModule):
    """Tied and frozen weights, a buffer, two groups of parameters, dropout, and a mean over the epoch."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Linear(6, 6, bias=False)
        self.block = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(dropout), nn.Linear(12, 6))
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.register_buffer("count", torch.zeros(()))
        self.seen: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(self.frozen(x))))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        self.count += 1
        loss = nn.functional.mse_loss(self(x), y)
        self.log("train", loss, on_step=True, on_epoch=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        decay = [p for p in self.parameters() if p.dim() > 1 and p.requires_grad]
        rest = [p for p in self.parameters() if p.dim() == 1 and p.requires_grad]
        optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], 1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9), "interval": "step"}]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weight = checkpoint["state_dict"].get("embed.weight")  # whole on the rank that writes
        checkpoint["mine"] = None if weight is None else (type(weight).__name__, tuple(weight.shape))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = {"mine": checkpoint.get("mine"), "type": type(checkpoint["state_dict"]["embed.weight"]).__name__}


def data() -> dict[str, Any]:
    x = torch.randn(4 * BATCHES - 1, 6, generator=torch.Generator().manual_seed(2))  # the last batch is smaller
    dataset = TensorDataset(x, x.flip(1))
    return {"train_dataloaders": DataLoader(dataset, batch_size=4, shuffle=True), "val_dataloaders": DataLoader(dataset, batch_size=7)}


def strategy(engine: str) -> dict[str, Any]:
    if engine == "plain":
        return {"strategy": "auto", "devices": 1}
    return {"strategy": AutoParallelStrategy(allow=[engine], devices="2xcpu:1GiB")}


def fit(engine: str, root: Path, *, ckpt_path: Any = None, module: Any = None, weights_only: Any = None, **options: Any) -> tuple[Any, Any]:
    pl.seed_everything(11, verbose=False)
    net = module or Tied()
    options = {"max_epochs": EPOCHS, "callbacks": [], "enable_checkpointing": bool(options.get("callbacks")), **options}
    trainer = pl.Trainer(
        accelerator="cpu",
        default_root_dir=root,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **strategy(engine),
        **options,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(net, **data(), ckpt_path=ckpt_path, weights_only=weights_only)
    return trainer, net


def outcome(trainer: Any, net: Any) -> dict[str, Any]:
    return {**net.state_dict(), **{f"metric {name}": value for name, value in trainer.callback_metrics.items() if name != "train_step"}}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@cache
def whole() -> dict[str, Any]:
    """The uninterrupted run of plain Lightning."""
    return outcome(*fit("plain", Path(mkdtemp(prefix="autopar-test-"))))


@cache
def steps(engine: str) -> Path:
    """A folder with a checkpoint after each training step."""
    root = Path(mkdtemp(prefix="autopar-test-"))
    every = ModelCheckpoint(root, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    fit(engine, root, callbacks=[every], max_epochs=2)
    return root


@cache
def epochs(engine: str) -> Path:
    """A checkpoint at the end of the first epoch, after its validation."""
    root = Path(mkdtemp(prefix="autopar-test-"))
    every = ModelCheckpoint(root, filename="{epoch}", every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True)
    fit(engine, root, callbacks=[every], max_epochs=2)
    return root / "epoch=0.ckpt"


@pytest.mark.parametrize("reader", ENGINES)
@pytest.mark.parametrize("writer", ENGINES)
@pytest.mark.parametrize("step", [3, 5, 8])
def test_going_on_in_the_middle_of_an_epoch_is_the_uninterrupted_run(step: int, writer: str, reader: str, tmp_path: Path) -> None:
    trainer, net = fit(reader, tmp_path, ckpt_path=steps(writer) / f"step={step}.ckpt")
    assert trainer.global_step == EPOCHS * BATCHES
    assert_same(whole(), outcome(trainer, net))
    assert net.seen["mine"] == ("Tensor", (6, 6))
    assert net.seen["type"] == "Tensor"
