"""Networks of plain torch, written out as users write them."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.memory.job import classification, regression
from benchmarks.zoo.member import ROWS, Member, by_hand


class Encoder(nn.Module):
    """``nn.TransformerEncoder`` with an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(32, 5)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(words), src_key_padding_mask=words == 0).mean(1))


class Translator(nn.Module):
    """``nn.Transformer``, encoder and decoder, with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.transformer = nn.Transformer(32, 4, 2, 3, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        source, target = pair
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        made = self.transformer(self.embedding(source), self.embedding(target), tgt_mask=mask, tgt_is_causal=True)
        return self.head(made).transpose(1, 2)


class Level(nn.Module):
    """Two convolutions with GroupNorm."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.second(F.silu(self.norm(self.first(x)))))


class UNet(nn.Module):
    """Down, up, and across: the way up uses what the way down left in a list."""

    def __init__(self, widths: tuple[int, ...] = (8, 16, 32)) -> None:
        super().__init__()
        self.down = nn.ModuleList(Level(a, b) for a, b in zip((3, *widths), widths, strict=False))
        self.up = nn.ModuleList(Level(a + b, a) for a, b in list(itertools.pairwise(widths))[::-1])
        self.head = nn.Conv2d(widths[0], 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for index, level in enumerate(self.down):
            x = level(F.max_pool2d(x, 2) if index else x)
            kept.append(x)
        kept.pop()
        for level in self.up:
            x = level(torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], 1))
        return self.head(x)


class Mixing(nn.Module):
    """A block of an MLP-Mixer."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, 32), nn.GELU(), nn.Linear(32, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    """MLP-Mixer on pictures of 16 × 16."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.blocks = nn.Sequential(*(Mixing(16, width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.patches(x).flatten(2).transpose(1, 2))).mean(1))


class Residual(nn.Module):
    """A block of a ResNet with GroupNorm."""

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.GroupNorm(4, width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.GroupNorm(4, width)
        same = stride == 1 and inputs == width
        self.down = nn.Identity() if same else nn.Conv2d(inputs, width, 1, stride, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(y)) + self.down(x))


def resnet() -> nn.Module:
    blocks = [Residual(8, 8), Residual(8, 16, 2), Residual(16, 16), Residual(16, 32, 2)]
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5)
    )


class Recurrent(nn.Module):
    """Stacked LSTMs whose states pass by."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 24)
        self.layers = nn.ModuleList(nn.LSTM(24, 24, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(24, 64)

    def forward(self, words: Tensor) -> Tensor:
        x, states = self.embedding(words), []
        for layer in self.layers:
            y, (hidden, _) = layer(x)
            x = x + y
            states.append(hidden[-1])
        return self.head(x + torch.stack(states).sum(0)[:, None]).transpose(1, 2)


class Dense(nn.Module):
    """Each block gets what all blocks before it gave, in a list that grows."""

    def __init__(self, width: int = 12, depth: int = 5) -> None:
        super().__init__()
        self.stem = nn.Linear(16, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width * (index + 1), width), nn.Tanh()) for index in range(depth))
        self.head = nn.Linear(width * (depth + 1), 5)

    def forward(self, x: Tensor) -> Tensor:
        found = [self.stem(x)]
        for block in self.blocks:
            found.append(block(torch.cat(found, 1)))
        return self.head(torch.cat(found, 1))


class Early(nn.Module):
    """Blocks return a tuple and a dict; each has a loss of its own, and a scalar of the module scales them."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.stem, self.scale = nn.Linear(16, width), nn.Parameter(torch.ones(()))
        self.blocks = nn.ModuleList(Exit(width) for _ in range(depth))

    def forward(self, x: Tensor) -> list[Tensor]:
        x, exits = self.stem(x), []
        for block in self.blocks:
            x, found = block(x, scale=self.scale)
            exits.append(found["logits"])
        return exits


class Exit(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.head = nn.Linear(width, width), nn.Linear(width, 5)

    def forward(self, x: Tensor, *, scale: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x = x + scale * torch.tanh(self.mix(x))
        return x, {"logits": self.head(x)}


def all_exits(net: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    losses = [F.cross_entropy(logits, targets) for logits in net(inputs)]
    return torch.stack(losses).mean()


def words() -> tuple[Tensor, Tensor]:
    found = torch.randint(1, 64, (ROWS, 10))
    found[::2, -3:] = 0
    return found, torch.randint(0, 5, (ROWS,))


def translations() -> tuple[tuple[Tensor, Tensor], Tensor]:
    return (torch.randint(0, 64, (ROWS, 9)), torch.randint(0, 64, (ROWS, 7))), torch.randint(0, 64, (ROWS, 7))


def sentences() -> tuple[Tensor, Tensor]:
    found = torch.randint(0, 64, (ROWS, 9))
    return found[:, :-1], found[:, 1:]


def pictures() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, 3, 16, 16), torch.randint(0, 5, (ROWS,))


def noisy() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, 3, 16, 16), torch.randn(ROWS, 3, 16, 16)


def vectors() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, 16), torch.randint(0, 5, (ROWS,))


WRITTEN: list[Member] = [
    by_hand("nn.TransformerEncoder", Encoder, words),
    by_hand("nn.Transformer", Translator, translations),
    by_hand("UNet", UNet, noisy, regression, quick=True),
    by_hand("MLP-Mixer", Mixer, pictures),
    by_hand("ResNet with GroupNorm", resnet, pictures, classification),
    by_hand("LSTM", Recurrent, sentences),
    by_hand("DenseNet of vectors", Dense, vectors),
    by_hand("Early exits", Early, vectors, all_exits),
]
