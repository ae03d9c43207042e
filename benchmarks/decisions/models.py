"""The models of the decision benchmark: small, of the six shapes that people train, without anything random in the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 512


class Trained(pl.LightningModule):
    """A net under AdamW; the loss is a mean over samples, so that every plan trains the same."""

    def __init__(self, net: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.net = net
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Residual(nn.Module):
    """Adds what a branch makes to what enters."""

    def __init__(self, *branch: nn.Module) -> None:
        super().__init__()
        self.branch = nn.Sequential(*branch)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class Attention(nn.Module):
    """Self-attention, causal or not."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A transformer's block, with its norms in front."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.attention = Residual(nn.LayerNorm(width), Attention(width, heads, causal=causal))
        self.feed_forward = Residual(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.feed_forward(self.attention(x))


class Positions(nn.Module):
    """Adds a learnt vector to each place of a sequence."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(length, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.shape[1]]


class Recurrent(nn.Module):
    """One LSTM layer with a norm behind it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.lstm(x)[0])


class Patches(nn.Module):
    """An image as a sequence of patches."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, size, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.cut(x).flatten(2).transpose(1, 2)


class Mean(nn.Module):
    """The mean over a sequence, or over an image."""

    def __init__(self, *dimensions: int) -> None:
        super().__init__()
        self.dimensions = dimensions

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(self.dimensions)


def _next_token(net: nn.Module, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(net(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])


def _same_token(net: nn.Module, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(net(tokens).transpose(1, 2), tokens)


def _reconstruction(net: nn.Module, values: Tensor) -> Tensor:
    return functional.mse_loss(net(values), values)


def _first_class(net: nn.Module, images: Tensor) -> Tensor:
    return functional.cross_entropy(net(images), torch.zeros(len(images), dtype=torch.long, device=images.device))


def _transformer(width: int, depth: int, heads: int, length: int, *, causal: bool) -> nn.Module:
    blocks = (Block(width, heads, causal=causal) for _ in range(depth))
    return nn.Sequential(
        nn.Embedding(VOCABULARY, width), Positions(length, width), *blocks, nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
    )


def _gpt() -> Trained:
    return Trained(_transformer(160, 4, 4, 48, causal=True), _next_token)


def _bert() -> Trained:
    return Trained(_transformer(224, 4, 4, 32, causal=False), _same_token)


def _wide() -> Trained:
    layers = (Residual(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(5))
    return Trained(nn.Sequential(*layers), _reconstruction)


def _resnet(norm: Callable[[], nn.Module]) -> Trained:
    def half() -> tuple[nn.Module, ...]:
        return norm(), nn.ReLU(), nn.Conv2d(48, 48, 3, padding=1)

    blocks = (Residual(*half(), *half()) for _ in range(4))
    return Trained(nn.Sequential(nn.Conv2d(3, 48, 3, padding=1), *blocks, Mean(2, 3), nn.Linear(48, 10)), _first_class)


def _lstm() -> Trained:
    layers = (Recurrent(256) for _ in range(3))
    return Trained(nn.Sequential(nn.Embedding(VOCABULARY, 256), *layers, nn.Linear(256, VOCABULARY)), _next_token)


def _vit() -> Trained:
    blocks = (Block(160, 4, causal=False) for _ in range(4))
    return Trained(
        nn.Sequential(Patches(4, 160), Positions(36, 160), *blocks, nn.LayerNorm(160), Mean(1), nn.Linear(160, 10)), _first_class
    )


@dataclass(frozen=True, kw_only=True)
class Model:
    """How to build a model, and one sample for it."""

    build: Callable[[], Trained]
    sample: Callable[[], Tensor]

    def data(self, samples: int) -> Tensor:
        """So many samples."""
        return torch.stack([self.sample() for _ in range(samples)])


MODELS: dict[str, Model] = {
    "gpt": Model(build=_gpt, sample=lambda: torch.randint(VOCABULARY, (49,))),
    "wide": Model(build=_wide, sample=lambda: torch.randn(1024)),
    "resnet": Model(build=lambda: _resnet(lambda: nn.GroupNorm(8, 48)), sample=lambda: torch.randn(3, 16, 16)),
    # Its blocks mustn't run twice, and its batch not in parts: where the devices' memory is uneven, uneven shares are all there is.
    "resnet-bn": Model(build=lambda: _resnet(lambda: nn.BatchNorm2d(48)), sample=lambda: torch.randn(3, 16, 16)),
    "lstm": Model(build=_lstm, sample=lambda: torch.randint(VOCABULARY, (25,))),
    "bert": Model(build=_bert, sample=lambda: torch.randint(VOCABULARY, (32,))),
    "vit": Model(build=_vit, sample=lambda: torch.randn(3, 24, 24)),
}
