"""What a model of the matrix is, and what the models share. Knows of no plan, engine or strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

#: Keyword arguments of the Trainer that a run asks for.
Options = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Member:
    """A model of a package, small and built from its configuration, on synthetic data.

    Args:
        name: the key in every table.
        package: the distribution it comes from.
        about: the row's words in docs/packages.md.
        train: builds everything and trains with a Trainer of the given options, its own or the package's.
    """

    name: str
    package: str
    about: str
    train: Callable[[Options], Any]


def fit(options: Options, module: pl.LightningModule, train: Any = None, val: Any = None, **trainer: Any) -> None:
    """Two epochs of the module, as most scripts do it; ``train`` may be a DataModule."""
    data = {"datamodule": train} if isinstance(train, pl.LightningDataModule) else {"train_dataloaders": train, "val_dataloaders": val}
    pl.Trainer(**{"max_epochs": 2, **options, **trainer}).fit(module, **data)


def images(count: int, size: int = 32, channels: int = 3, classes: int = 4) -> TensorDataset:
    draw = torch.Generator().manual_seed(count)
    return TensorDataset(torch.randn(count, channels, size, size, generator=draw), torch.randint(classes, (count,), generator=draw))


def masks(count: int, size: int = 32, channels: int = 3, classes: int = 3) -> TensorDataset:
    draw = torch.Generator().manual_seed(count)
    pictures = torch.randn(count, channels, size, size, generator=draw)
    return TensorDataset(pictures, torch.randint(classes, (count, size, size), generator=draw))


def loaders(make: Callable[[int], Dataset[Any]], batch: int = 8, train: int = 28, val: int = 12, **options: Any) -> tuple[Any, Any]:
    """Shuffled training data whose last batch is smaller, and data to validate with."""
    return DataLoader(make(train), batch, shuffle=True, **options), DataLoader(make(val), batch, **options)


class Supervised(pl.LightningModule):
    """A network, a loss of what it gives and the target, AdamW: what most people write around somebody else's network."""

    def __init__(self, net: nn.Module, loss: Callable[[Any, Any], Tensor] | None = None, lr: float = 1e-3) -> None:
        super().__init__()
        self.net, self.criterion, self.lr = net, loss or nn.CrossEntropyLoss(), lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.criterion(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.criterion(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)
