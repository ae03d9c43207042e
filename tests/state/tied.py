"""The module whose checkpoints are tested; imports nothing of this package, without which they are gone on from, too."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn


class Tied(pl.LightningModule):
    """Tied and frozen weights, a buffer, two groups of parameters, dropout, and a mean over the epoch."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Linear(6, 6, bias=False)
        self.block = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(dropout)) for _ in range(3)))
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.register_buffer("count", torch.zeros(()))
        self.seen: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(self.frozen(x))))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.count += 1

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("train", loss, on_step=True, on_epoch=True)
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
