"""A transformer of any published row's dimensions, and the LightningModule that trains it. Knows no file of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rows.layers import Adapted, AdaptedHeads, QuantisedLinear, RMSNorm, attend, rotary_tables, rotate


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Dimensions and manner of a model.

    Args:
        kind: ``"decoder"``, ``"encoder"`` or ``"vit"``.
        act: ``"gelu"``, ``"relu"``, ``"swiglu"``, ``"geglu"``.
        positions: ``"learned"``, ``"rope"``, ``"none"``.
        rotary_share: the part of each head that is rotated.
        norm: ``"layernorm"``, or a style of :class:`RMSNorm`.
        attention: a style of :func:`attend`.
        loss: ``"plain"`` in the logits' own type, ``"wide"`` in fp32 (Hugging Face), ``"chunked"`` over pieces of the sequence in fp32,
            ``"chunked plain"`` the same in the logits' own type.
        chunks: pieces of a chunked loss.
        bias: in the blocks' linear layers.
        dropout: after attention and MLP, and on attention's weights.
        parallel: attention and MLP both read the block's input.
        checkpointing: the blocks recompute in backward, by the model's own choice.
        targets: which linear layers get an adapter: of q, k, v, o, up, gate, down, head.
        rank: of the adapters; 0 for none.
        fused_heads: query, key and value are one layer, and their adapters padded (litgpt).
        wide_adapters: adapters in fp32.
        quantised: the blocks' linear layers are frozen in four bits: ``""``, ``"nf4"`` or ``"nf4-dq"``.
        image: side of the pictures; patch: of a patch; classes: of a classifier.
        train_embeddings: beside the adapters.
        adapter_dropout: on what enters an adapter.
        repeats_heads: shared keys and values are repeated before attention, rather than by its kernel.
    """

    kind: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    length: int
    tied: bool
    act: str = "gelu"
    positions: str = "learned"
    rotary_share: float = 1.0
    norm: str = "layernorm"
    attention: str = "sdpa"
    loss: str = "plain"
    chunks: int = 1
    bias: bool = True
    dropout: float = 0.0
    parallel: bool = False
    checkpointing: bool = False
    targets: tuple[str, ...] = ()
    rank: int = 0
    fused_heads: bool = False
    wide_adapters: bool = False
    quantised: str = ""
    image: int = 0
    patch: int = 0
    classes: int = 2
    train_embeddings: bool = False
    adapter_dropout: float = 0.0
    repeats_heads: bool = False


def _norm(shape: Shape) -> nn.Module:
    return nn.LayerNorm(shape.hidden) if shape.norm == "layernorm" else RMSNorm(shape.hidden, shape.norm)


def _linear(shape: Shape, name: str, inputs: int, outputs: int, bias: bool) -> nn.Module:
    """A linear layer as the row has it: frozen in four bits, with an adapter, or plain."""
    base: nn.Module
    if shape.quantised and name != "head":
        base = QuantisedLinear(inputs, outputs, bias, double=shape.quantised == "nf4-dq")
    else:
        base = nn.Linear(inputs, outputs, bias=bias)
    if not shape.rank or name not in shape.targets:
        return base
    return Adapted(base, inputs, outputs, shape.rank, wide=shape.wide_adapters, dropout=shape.adapter_dropout)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        own, shared = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        widths = (own, shared, shared)
        if shape.fused_heads:
            plain = Shape(**{**shape.__dict__, "rank": 0})
            self.qkv = _linear(plain, "qkv", shape.hidden, sum(widths), shape.bias)
            on = tuple(name in shape.targets for name in ("q", "k", "v"))
            if shape.rank and any(on):
                self.qkv = AdaptedHeads(self.qkv, shape.hidden, widths, on, shape.rank, shape.adapter_dropout)  # type: ignore[arg-type]
        else:
            self.q, self.k, self.v = (
                _linear(shape, name, shape.hidden, width, shape.bias) for name, width in zip(("q", "k", "v"), widths, strict=True)
            )
        self.widths = widths
        self.o = _linear(shape, "o", own, shape.hidden, shape.bias)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> Tensor:
        shape = self.shape
        made = self.qkv(x).split(self.widths, -1) if shape.fused_heads else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (-1, shape.head_dim)).transpose(1, 2) for part in made)
        if tables is not None:
            part = int(shape.head_dim * shape.rotary_share)
            q, k = rotate(q, *tables, part), rotate(k, *tables, part)
        if shape.repeats_heads and k.shape[1] != q.shape[1]:
            k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
        drop = shape.dropout if self.training else 0.0
        y = attend(q, k, v, style=shape.attention, causal=shape.kind == "decoder", dropout=drop, mask=mask)
        return self.o(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.gated = shape.act in ("swiglu", "geglu")
        if self.gated:
            self.gate = _linear(shape, "gate", shape.hidden, shape.ffn, shape.bias)
        self.up = _linear(shape, "up", shape.hidden, shape.ffn, shape.bias)
        self.down = _linear(shape, "down", shape.ffn, shape.hidden, shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            return self.down((F.silu if self.shape.act == "swiglu" else F.gelu)(self.gate(x)) * self.up(x))
        return self.down((F.relu if self.shape.act == "relu" else F.gelu)(self.up(x)))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.norm_1, self.norm_2 = _norm(shape), _norm(shape)
        self.attention, self.mlp = Attention(shape), MLP(shape)
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> Tensor:
        if self.shape.kind == "encoder":  # normalised after the sum, as BERT
            x = self.norm_1(x + self.drop(self.attention(x, tables, mask)))
            return self.norm_2(x + self.drop(self.mlp(x)))
        if self.shape.parallel:
            return self.mlp(self.norm_2(x)) + self.attention(self.norm_1(x), tables, mask) + x
        x = x + self.drop(self.attention(self.norm_1(x), tables, mask))
        return x + self.drop(self.mlp(self.norm_2(x)))


class Transformer(nn.Module):
    """Tokens or pictures to logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        if shape.kind == "vit":
            self.embed = nn.Conv2d(3, shape.hidden, shape.patch, shape.patch)
            self.first = nn.Parameter(torch.zeros(1, 1, shape.hidden))
            self.positions = nn.Parameter(torch.zeros(1, (shape.image // shape.patch) ** 2 + 1, shape.hidden))
        else:
            self.embed = nn.Embedding(shape.vocab, shape.hidden)
            if shape.positions == "learned":
                self.positions = nn.Embedding(shape.length, shape.hidden)
        if shape.kind == "encoder":
            self.norm_in = _norm(shape)
            self.pool = nn.Linear(shape.hidden, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = _norm(shape) if shape.kind != "encoder" else nn.Identity()
        if shape.kind == "decoder":
            self.head = _linear(shape, "head", shape.hidden, shape.vocab, bias=False)
            if shape.tied:
                self.head.weight = self.embed.weight
        else:
            self.head = nn.Linear(shape.hidden, shape.classes)
        self.drop = nn.Dropout(shape.dropout)
        if shape.rank:
            self.requires_grad_(False)
            for layer in self.modules():
                if isinstance(layer, (Adapted, AdaptedHeads)):
                    layer.down.requires_grad_(), layer.up.requires_grad_()
            if shape.train_embeddings:
                self.embed.requires_grad_(), self.head.requires_grad_()

    def hidden(self, x: Tensor) -> Tensor:
        """Through embedding and blocks, before the last normalisation."""
        shape = self.shape
        tables = mask = None
        if shape.kind == "vit":
            h = self.embed(x).flatten(2).transpose(1, 2)
            h = torch.cat((self.first.expand(len(h), -1, -1), h), 1) + self.positions
        else:
            h = self.embed(x)
            if shape.positions == "learned":
                h = h + self.positions(torch.arange(x.shape[1], device=x.device))
            elif shape.positions == "rope":
                tables = rotary_tables(x.shape[1], int(shape.head_dim * shape.rotary_share), h.dtype, x.device)
        if shape.kind == "encoder":
            h = self.norm_in(h)
            mask = torch.zeros(len(x), 1, 1, x.shape[1], dtype=h.dtype, device=x.device)
        h = self.drop(h)
        if shape.checkpointing and self.training and not h.requires_grad:
            h.requires_grad_()  # as enable_input_require_grads, without which frozen blocks pass no gradient
        for block in self.blocks:
            if shape.checkpointing and self.training:
                h = checkpoint(block, h, tables, mask, use_reentrant=False)
            else:
                h = block(h, tables, mask)
        return h

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.hidden(x))
        if self.shape.kind == "encoder":
            h = torch.tanh(self.pool(h[:, 0]))
        elif self.shape.kind == "vit":
            h = h[:, 0]
        return self.head(h)


class Published(pl.LightningModule):
    """Trains a transformer as the row says.

    Args:
        shape: of the model.
        optimizer: makes the optimizer of the trainable parameters.
    """

    def __init__(self, shape: Shape, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__()
        self.net = Transformer(shape)
        self._optimizer = optimizer

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        shape = self.net.shape
        if shape.kind != "decoder":
            return F.cross_entropy(self.net(inputs), targets)
        if not shape.loss.startswith("chunked"):
            logits = self.net(inputs)[:, :-1]
            return F.cross_entropy((logits.float() if shape.loss == "wide" else logits).flatten(0, 1), targets[:, 1:].flatten())
        h = self.net.norm(self.net.hidden(inputs))
        losses = []
        for piece, target in zip(h.chunk(shape.chunks, 1), targets.chunk(shape.chunks, 1), strict=True):
            logits = self.net.head(piece)
            logits = logits.float() if shape.loss == "chunked" else logits
            losses.append(F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum"))
        return torch.stack(losses).sum() / targets.numel()

    def configure_optimizers(self) -> Any:
        return self._optimizer([parameter for parameter in self.parameters() if parameter.requires_grad])
