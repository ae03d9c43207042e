"""The networks: each takes `features` (samples × FEATURES, or samples × PIXELS³, or token ids) and gives samples × OUTPUTS."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

FEATURES, WIDTH, OUTPUTS, TOKENS, LENGTH, PIXELS = 6, 16, 4, 11, 7, 8
#: Networks of token ids, and of pictures; the others take vectors.
OF_TOKENS = ("attention", "lstm", "shared", "tied", "frozen", "odd-buffers", "lazy-buffer")
OF_PICTURES = ("conv",)


class Block(nn.Module):
    """A residual block."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.dropout = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


def _ends(middle: list[nn.Module]) -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), *middle, nn.Linear(WIDTH, OUTPUTS))


class Tokens(nn.Module):
    """An embedding, something in the middle, a mean over the tokens that are there, a head."""

    def __init__(self, kind: str, dropout: float) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(TOKENS, WIDTH, padding_idx=0)
        blocks: list[nn.Module] = [Block(dropout) for _ in range(3)]
        if kind == "attention":
            layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout, batch_first=True)
            blocks = [nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)]
        elif kind == "shared":
            blocks = [blocks[0], blocks[1], blocks[0]]
        self.blocks = nn.ModuleList(blocks)
        self.memory = nn.LSTM(WIDTH, WIDTH, batch_first=True) if kind == "lstm" else None
        self.head = nn.Linear(WIDTH, TOKENS if kind == "tied" else OUTPUTS, bias=False)
        if kind == "tied":
            self.head.weight = self.embedding.weight
        elif kind == "frozen":
            self.embedding.requires_grad_(False)
            self.blocks[0].requires_grad_(False)
        elif kind == "odd-buffers":
            self.register_buffer("nothing", torch.empty(0, 3))
            self.register_buffer("unknown", torch.full((2,), torch.nan))
            self.unused = nn.Linear(2, 2)
        elif kind == "lazy-buffer":
            self.register_buffer("scale", None)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        if self.kind == "lazy-buffer":
            if self.scale is None:
                self.scale = x.new_full((WIDTH,), 0.5)
            x = x * self.scale
        for block in self.blocks:
            x = block(x)
        if self.memory is not None:
            x = self.memory(x)[0]
        there = (ids != 0).unsqueeze(-1)
        x = self.head((x * there).sum(1) / there.sum(1).clamp(min=1))
        return x[:, :OUTPUTS]


class Unlike(nn.Module):
    """No two of its layers are alike, and the activation is one module that stands twice."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.activation = nn.SiLU()
        self.first, self.second, self.third = nn.Linear(FEATURES, 24), nn.Linear(24, 12, bias=False), nn.Linear(12, OUTPUTS)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.first(x))
        return self.third(self.dropout(self.activation(self.second(x))))


def make(kind: str, dropout: float) -> Any:
    """The network of that kind."""
    if kind in OF_TOKENS:
        return Tokens(kind, dropout)
    if kind == "unlike":
        return Unlike(dropout)
    if kind == "conv":
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, stride=2), nn.GroupNorm(2, 8),
            nn.ReLU(), nn.Dropout(dropout), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, OUTPUTS),
        )  # fmt: skip
    if kind == "batch-norm":
        normed = (lambda: nn.Linear(WIDTH, WIDTH), lambda: nn.BatchNorm1d(WIDTH), nn.ReLU, lambda: nn.Dropout(dropout))
        return _ends([layer() for _ in range(2) for layer in normed])
    if kind == "residual":
        return _ends([Block(dropout) for _ in range(4)])
    return _ends([layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout))])
