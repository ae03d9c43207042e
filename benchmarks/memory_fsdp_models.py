"""The modules that ``memory_fsdp.py`` trains: small, of many shapes, with blocks that are sharded as units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset


class Job(pl.LightningModule):
    """A net under cross entropy."""

    def __init__(self, net: nn.Module, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        super().__init__()
        self.net = net
        self._make = optimizer

    def _loss(self, batch: Any) -> Tensor:
        output = self.net(batch[0])
        logits = output.logits if hasattr(output, "logits") else output
        return F.cross_entropy(logits.flatten(0, -2), batch[1].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self._loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._make([parameter for parameter in self.parameters() if parameter.requires_grad], 1e-3)


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 4, dropout: float = 0.0, rank: int = 0) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))
        if rank:
            for parameter in self.parameters():
                parameter.requires_grad = False
            self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, 3 * width, bias=False)
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        normed = self.norm1(x)
        mixed = self.attention(normed)
        if self.rank:
            mixed = mixed + self.up(self.down(normed))
        q, k, v = mixed.view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width: int = 256, depth: int = 4, *, tied: bool = True, rank: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(Block(width, 4, dropout, rank) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        if rank:
            for part in (self.tokens, self.norm, self.head):
                part.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class ViT(nn.Module):
    def __init__(self, width: int = 192, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.position = nn.Parameter(torch.zeros(1, 64, width))
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.position
        return self.head(self.blocks(x).mean(1))


class Gated(nn.Module):
    """Sizes that no number of ranks divides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.value, self.down = nn.Linear(width, 701), nn.Linear(width, 701), nn.Linear(701, width)
        self.scale, self.few = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(3, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.value(x)) * self.scale + self.few.mean(0)


class Seq2Seq(nn.Module):
    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.tokens = nn.Embedding(500, width)
        self.net = nn.Transformer(width, 4, 2, 2, 4 * width, 0.0, batch_first=True)
        self.head = nn.Linear(width, 500)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        return self.head(self.net(x, x))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 512), *(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(5)), nn.Linear(512, 10))


def _resnet() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    return nn.Sequential(stem, *(Residual(64) for _ in range(3)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def _odd() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 301), *(Gated(301) for _ in range(4)), nn.Linear(301, 10))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1000,
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
            tie_word_embeddings=False,
        )
    )


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForTokenClassification

    return BertForTokenClassification(
        BertConfig(
            vocab_size=1000,
            hidden_size=192,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=768,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=50,
        )
    )


def _tokens(length: int, high: int = 1000, labels: int | None = None) -> Dataset[Any]:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randint(0, high, (64, length), generator=generator), torch.randint(0, labels or high, (64, length), generator=generator)
    )


def _images(size: int) -> Dataset[Any]:
    return TensorDataset(torch.randn(64, 3, size, size), torch.randint(0, 10, (64,)))


def _vectors() -> Dataset[Any]:
    return TensorDataset(torch.randn(640, 128), torch.randint(0, 10, (640,)))


@dataclass(frozen=True)
class Case:
    """One module with its data."""

    net: Callable[[], nn.Module]
    data: Callable[[], Dataset[Any]]
    batch_size: int
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    trainer: tuple[tuple[str, Any], ...] = ()
    #: BatchNorm must not run twice.
    recomputable: bool = True

    def module(self) -> Job:
        """A new one."""
        torch.manual_seed(0)
        return Job(self.net(), self.optimizer)


def _sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr, momentum=0.9)


CASES: dict[str, Case] = {
    "gpt": Case(GPT, lambda: _tokens(64), 4),
    "gpt, long": Case(lambda: GPT(128), lambda: _tokens(256), 8),
    "gpt, untied": Case(lambda: GPT(tied=False), lambda: _tokens(64), 4),
    "gpt, dropout": Case(lambda: GPT(dropout=0.1), lambda: _tokens(64), 4),
    "gpt, low-rank": Case(lambda: GPT(rank=8), lambda: _tokens(64), 4),
    "gpt, sgd, clipped": Case(GPT, lambda: _tokens(64), 4, _sgd, (("gradient_clip_val", 1.0),)),
    "gpt, accumulating": Case(GPT, lambda: _tokens(64), 4, trainer=(("accumulate_grad_batches", 2),)),
    "mlp": Case(_mlp, _vectors, 64),
    "odd": Case(_odd, _vectors, 65),
    "resnet": Case(_resnet, lambda: _images(24), 8, recomputable=False),
    "vit": Case(ViT, lambda: _images(64), 8),
    "seq2seq": Case(Seq2Seq, lambda: _tokens(48, 500), 8),
    "llama": Case(_llama, lambda: _tokens(64), 4),
    "bert": Case(_bert, lambda: _tokens(64, labels=50), 8),
}
