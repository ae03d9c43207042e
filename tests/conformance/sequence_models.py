"""Modules over sequences, as users write them, and what all modules of the zoo share. Knows of no plan, engine or strategy."""

from __future__ import annotations

from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Schedule = Literal["step", "epoch", "plateau"]


class Base(pl.LightningModule):
    """What the modules of one project share: the optimizer with its schedule, and how losses are logged."""

    def __init__(self, lr: float = 0.05, schedule: Schedule | None = None, sync_dist: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.schedule = schedule
        self.sync_dist = sync_dist

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def size(self, batch: Any) -> int:
        return len(batch[0])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=self.size(batch), sync_dist=self.sync_dist)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=self.size(batch), sync_dist=self.sync_dist)

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=self.lr, momentum=0.9)

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        if self.schedule == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
        if self.schedule is not None:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.schedule}}
        return optimizer


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(b, t, c)), self.dropout, self.training)
        return x + self.mlp(self.norm2(x))


class GPT(Base):
    """A byte-level GPT with tied embeddings and dropout, AdamW with weight decay on matrices only."""

    def __init__(self, dropout: float = 0.1, checkpointing: bool = False, width: int = 32, layers: int = 2, **kwargs: Any) -> None:
        super().__init__(**{"lr": 3e-3, **kwargs})
        self.save_hyperparameters()
        self.checkpointing = checkpointing
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(16, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, 4, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing and self.training else block(x)
        return self.head(self.norm(x))

    def loss(self, batch: Any) -> Tensor:
        ids = batch[0]
        return F.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0][:, :-1]).argmax(-1)

    def optimizer(self) -> torch.optim.Optimizer:
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        rest = [p for p in self.parameters() if p.ndim < 2]
        return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=self.lr, eps=1e-6)


class EncoderDecoder(Base):
    """A translation model on ``nn.Transformer``; a batch is a dict."""

    def __init__(self, dropout: float = 0.1, checkpointing: bool = False, **kwargs: Any) -> None:
        super().__init__(**{"lr": 2e-2, **kwargs})
        self.save_hyperparameters()
        self.checkpointing = checkpointing
        self.embed = nn.Embedding(20, 16)
        self.transformer = nn.Transformer(16, 2, 2, 2, 32, dropout=dropout, batch_first=True)
        self.head = nn.Linear(16, 20)

    def size(self, batch: Any) -> int:
        return len(batch["source"])

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        memory = self.embed(source)
        if self.checkpointing and self.training:
            memory = checkpoint(self.transformer.encoder, memory, use_reentrant=False)
        else:
            memory = self.transformer.encoder(memory)
        return self.head(self.transformer.decoder(self.embed(target), memory, tgt_mask=mask, tgt_is_causal=True))

    def loss(self, batch: Any) -> Tensor:
        target = batch["target"]
        return F.cross_entropy(self(batch["source"], target[:, :-1]).flatten(0, 1), target[:, 1:].flatten())


class LSTM(Base):
    """A two-layer LSTM over a sequence; the epoch's last batch has one sample."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"lr": 0.1, **kwargs})
        self.save_hyperparameters()
        self.lstm = nn.LSTM(4, 12, num_layers=2, batch_first=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(-1)


class MaskedTokens(Base):
    """A masked-token model whose loss is a mean over the masked tokens, of which each sample has its own number."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.save_hyperparameters()
        self.embed = nn.Embedding(20, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 20)

    def loss(self, batch: Any) -> Tensor:
        ids, labels = batch
        return F.cross_entropy(self.head(self.encoder(self.embed(ids))).flatten(0, 1), labels.flatten(), ignore_index=-100)
