"""Train from a YAML file: python main.py fit --config config.yaml. Nothing here knows of autopar; the file does.

On a machine without GPUs, on two shares of it:

    AUTOPAR_DEVICES=2xcpu:2GiB python main.py fit --config config.yaml
"""

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    """A residual network over feature vectors.

    Args:
        width: Of each block.
        blocks: How many there are.
        learning_rate: AdamW's.
        dropout: The share of features that a block drops.
    """

    def __init__(self, width: int = 256, blocks: int = 4, learning_rate: float = 2e-3, dropout: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.first = nn.Linear(32, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout)) for _ in range(blocks)
        )
        self.last = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)

    def training_step(self, batch: list[Tensor], batch_index: int) -> Tensor:
        x, label = batch
        loss = nn.functional.cross_entropy(self(x), label)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_index: int) -> None:
        x, label = batch
        self.log("val_accuracy", (self(x).argmax(-1) == label).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])


class Quadrants(L.LightningDataModule):
    """Points whose class is the quadrant that two of their sums lie in.

    Args:
        samples: How many points to train on.
        batch_size: Points a step, over all devices.
    """

    def __init__(self, samples: int = 16384, batch_size: int = 512) -> None:
        super().__init__()
        self.samples, self.batch_size = samples, batch_size

    def setup(self, stage: str) -> None:
        points = torch.randn(self.samples + 512, 32, generator=torch.Generator().manual_seed(0))
        label = (points[:, :16].sum(1) > 0).long() * 2 + (points[:, 16:].sum(1) > 0).long()
        self.train = TensorDataset(points[:-512], label[:-512])
        self.validation = TensorDataset(points[-512:], label[-512:])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.validation, batch_size=self.batch_size)


if __name__ == "__main__":
    LightningCLI(Classifier, Quadrants)
