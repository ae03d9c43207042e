"""What the chaotic runs train: a small module with everything in it that a move could lose, in variants drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import MeanAbsoluteError

WIDTH = 12
BLOCKS = ("net.1", "net.2", "net.3")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One kind of run.

    Args:
        seed: of weights, data and order.
        epochs: how many.
        rows: samples of an epoch, where no limit is given; the last batch is ragged.
        batch_size: the user's.
        accumulate: batches a step.
        workers: of the data loader.
        data: ``map``, ``stream`` (an IterableDataset) or ``two`` (a CombinedLoader).
        limit: training batches an epoch, if not all.
        check_every: batches from one validation to the next.
        ema: whether the user's callback keeps a mean of the weights; then no plan may shard them.
        patience: of early stopping.
    """

    seed: int
    epochs: int = 3
    rows: int = 67
    batch_size: int = 6
    accumulate: int = 1
    workers: int = 0
    data: str = "map"
    limit: int | None = None
    check_every: int = 5
    ema: bool = False
    patience: int = 100

    @property
    def batches(self) -> int:
        """Of an epoch."""
        whole = -(-self.rows // self.batch_size)
        return whole if self.limit is None else min(whole, self.limit)


def draw_variant(seed: int, **fixed: Any) -> Variant:
    """The variant of a seed; what is ``fixed`` isn't drawn."""
    draw = random.Random(seed)
    data = draw.choice(("map", "map", "map", "stream", "two"))
    drawn = {
        "accumulate": draw.choice((1, 2)),
        "data": data,
        "workers": draw.choice((0, 0, 1)),
        "limit": draw.choice((None, None, 10)),
        "check_every": draw.choice((4, 5, 7)),
        "ema": draw.random() < 0.25,
        "patience": draw.choice((100, 100, 3)),
    }
    return Variant(seed=seed, **{**drawn, **fixed})


class Noisy(Dataset[Any]):
    """Samples that are augmented at random as they are loaded."""

    def __init__(self, rows: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(rows, WIDTH, generator=generator)
        self.y = self.x.sum(1) + 0.1 * torch.randn(rows, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.x[index] + 0.1 * torch.randn(WIDTH), self.y[index], index


class Plain(Noisy):
    """The same without augmentation."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.x[index], self.y[index], index


class Stream(IterableDataset[Any]):
    """The same as a stream in an order of its own."""

    def __init__(self, rows: int, seed: int) -> None:
        self.data = Noisy(rows, seed)

    def __iter__(self) -> Iterator[Any]:
        for index in torch.randperm(len(self.data)).tolist():
            yield self.data[index]


class Chaotic(pl.LightningModule):
    """A regression with dropout, a metric, means over the epoch and a schedule by steps."""

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.variant = variant
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3)]
        self.net: Any = nn.Sequential(nn.Linear(WIDTH, 16), *blocks, nn.Linear(16, 1))
        self.error = MeanAbsoluteError()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).squeeze(-1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        losses = [nn.functional.mse_loss(self(x), y) for x, y, _ in parts]
        loss = torch.stack(losses).mean()
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(parts[0][1]))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y, _ = batch
        predicted = self(x)
        self.error(predicted, y)
        self.log("error", self.error, on_epoch=True)
        self.log("val_loss", nn.functional.mse_loss(predicted, y), on_epoch=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class MeanWeights(pl.Callback):
    """A user's own mean of the weights, as plain tensors in a dictionary."""

    def __init__(self) -> None:
        self.mean: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for name, parameter in pl_module.named_parameters():
            now = parameter.detach().clone()
            self.mean[name] = 0.9 * self.mean[name] + 0.1 * now if name in self.mean else now


def loaders(variant: Variant) -> tuple[Any, DataLoader[Any]]:
    """For training and validation."""
    options: dict[str, Any] = {"batch_size": variant.batch_size, "num_workers": variant.workers}
    if variant.data == "stream":
        train: Any = DataLoader(Stream(variant.rows, variant.seed), **options)
    elif variant.data == "two":
        both = {name: DataLoader(Noisy(variant.rows, variant.seed + n), shuffle=True, **options) for n, name in enumerate("ab")}
        train = CombinedLoader(both, "max_size_cycle")
    else:
        train = DataLoader(Noisy(variant.rows, variant.seed), shuffle=True, **options)
    return train, DataLoader(Plain(19, variant.seed + 7), batch_size=6)


def make_trainer(variant: Variant, folder: Path, strategy: Any, callbacks: list[Any], accelerator: str) -> pl.Trainer:
    """With loggers and callbacks as a user has them."""
    own: list[Any] = [
        EarlyStopping("val_loss", patience=variant.patience),
        ModelCheckpoint(folder / "checkpoints", "{epoch}-{step}", monitor="val_loss", save_top_k=2),
        *([MeanWeights()] if variant.ema else []),
    ]
    return pl.Trainer(
        accelerator=accelerator,
        devices=1 if strategy == "auto" else "auto",
        strategy=strategy,
        max_epochs=variant.epochs,
        limit_train_batches=variant.limit,
        val_check_interval=variant.check_every,
        check_val_every_n_epoch=None,
        accumulate_grad_batches=variant.accumulate,
        gradient_clip_val=0.5,
        log_every_n_steps=1,
        logger=CSVLogger(folder, name="csv"),
        callbacks=[*own, *callbacks],
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
