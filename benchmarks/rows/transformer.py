"""A transformer of any published row's dimensions. Knows no file of rows, no loss and no optimizer."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from rows.fused import fused
from rows.layers import Adapted, AdaptedHeads, QuantisedLinear, RMSNorm, attend, rotary_tables, rotate, rotate_fused
from rows.shape import Shape

Tables = tuple[Tensor, Tensor] | None


def _norm(shape: Shape, width: int | None = None) -> nn.Module:
    width = width or shape.hidden
    return nn.LayerNorm(width) if shape.norm == "layernorm" else RMSNorm(width, shape.norm)


def _linear(shape: Shape, name: str, inputs: int, outputs: int, bias: bool) -> nn.Module:
    """A linear layer as the row has it: frozen in four bits, with an adapter, or plain."""
    base: nn.Module
    if shape.quantised and (name != "head" or shape.quantised_head):
        base = QuantisedLinear(inputs, outputs, bias, double=shape.quantised == "nf4-dq", keeps_input=shape.keeps_input)
    else:
        base = nn.Linear(inputs, outputs, bias=bias)
    if not shape.rank or name not in shape.targets:
        return base
    drop, wide = shape.adapter_dropout, shape.wide_adapters
    return Adapted(base, inputs, outputs, shape.rank, wide=wide, dropout=drop, merged=shape.fused)


class Attention(nn.Module):
    """Attention to the same sequence, or to another one."""

    def __init__(self, shape: Shape, causal: bool) -> None:
        super().__init__()
        self.shape, self.causal = shape, causal
        own, shared = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        widths = (own, shared, shared)
        bias = shape.bias or shape.qkv_bias
        if shape.fused_heads:
            on = tuple(name in shape.targets for name in ("q", "k", "v"))
            if shape.rank and any(on) and shape.padded_adapters:
                plain = dataclasses.replace(shape, rank=0)
                base = _linear(plain, "q", shape.hidden, sum(widths), bias)
                self.qkv: nn.Module = AdaptedHeads(base, shape.hidden, widths, on, shape.rank, shape.adapter_dropout)  # type: ignore[arg-type]
            else:
                self.qkv = _linear(shape, "q", shape.hidden, sum(widths), bias)
        else:
            self.q, self.k, self.v = (
                _linear(shape, name, shape.hidden, width, bias) for name, width in zip(("q", "k", "v"), widths, strict=True)
            )
        self.widths = widths
        self.o = _linear(shape, "o", own, shape.hidden, shape.bias)
        if shape.head_norm:
            self.norm_q, self.norm_k = _norm(shape, shape.head_dim), _norm(shape, shape.head_dim)

    def forward(self, x: Tensor, tables: Tables, mask: Tensor | None, other: Tensor | None = None) -> Tensor:
        shape = self.shape
        if shape.fused_heads:
            made = self.qkv(x).split(self.widths, -1)
        else:
            seen = x if other is None else other
            made = (self.q(x), self.k(seen), self.v(seen))
        q, k, v = (part.unflatten(-1, (-1, shape.head_dim)).transpose(1, 2) for part in made)
        if shape.head_norm:
            q, k = self.norm_q(q), self.norm_k(k)
        if tables is not None:
            part = int(shape.head_dim * shape.rotary_share)
            turn = rotate_fused if shape.fused else rotate
            q, k = turn(q, *tables, part), turn(k, *tables, part)
        if shape.repeats_heads and k.shape[1] != q.shape[1]:
            k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
        drop = shape.dropout if self.training else 0.0
        y = attend(
            q,
            k,
            v,
            style=shape.attention,
            causal=self.causal,
            dropout=drop,
            mask=mask,
            softcap=shape.softcap,
            keeps_scores=shape.keeps_scores,
        )
        return self.o(y.transpose(1, 2).flatten(2))


def _new_gelu(x: Tensor) -> Tensor:
    """transformers' ``NewGELUActivation``, operation by operation."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _erf_gelu(x: Tensor) -> Tensor:
    """BingBertSquad's ``bias_gelu``, operation by operation: backward needs three of its tensors, also where a fuser merges the kernels."""
    return x * 0.5 * (1.0 + torch.erf(x / 1.41421))


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
        act = {"swiglu": F.silu, "geglu": F.gelu, "relu": F.relu}.get(self.shape.act, F.gelu)
        if self.gated and self.shape.fused:
            return self.down(fused(lambda gate, up: act(gate) * up, self.gate(x), self.up(x)))
        if self.gated:
            return self.down(act(self.gate(x)) * self.up(x))
        if not self.shape.fused:
            act = {"new gelu": _new_gelu, "erf gelu": _erf_gelu}.get(self.shape.act, act)
        return self.down(fused(act, self.up(x)) if self.shape.fused else act(self.up(x)))


class Block(nn.Module):
    """One layer.

    Args:
        shape: of the model.
        causal: whether a position sees only those before it.
        crossed: whether it attends to an encoder's output, too.
    """

    def __init__(self, shape: Shape, causal: bool = False, crossed: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.norm_1, self.norm_2 = _norm(shape), _norm(shape)
        self.attention, self.mlp = Attention(shape, causal), MLP(shape)
        self.drop = nn.Dropout(shape.dropout)
        if crossed:
            self.norm_3, self.cross = _norm(shape), Attention(shape, False)
        if shape.sandwich:
            self.norm_out_1, self.norm_out_2 = _norm(shape), _norm(shape)
        self.crossed, self.post = crossed, shape.kind == "encoder" or (shape.kind == "encoder-decoder" and shape.norm == "layernorm")

    def forward(self, x: Tensor, tables: Tables, mask: Tensor | None, other: Tensor | None = None) -> Tensor:
        if self.post:  # normalised after the sum, as BERT
            x = self.norm_1(x + self.drop(self.attention(x, tables, mask)))
            if self.crossed:
                x = self.norm_3(x + self.drop(self.cross(x, None, None, other)))
            return self.norm_2(x + self.drop(self.mlp(x)))
        if self.shape.parallel:
            return self.mlp(self.norm_2(x)) + self.attention(self.norm_1(x), tables, mask) + x
        if self.shape.sandwich:
            x = x + self.norm_out_1(self.attention(self.norm_1(x), tables, mask))
            return x + self.norm_out_2(self.mlp(self.norm_2(x)))
        x = x + self.drop(self.attention(self.norm_1(x), tables, mask))
        if self.crossed:
            x = x + self.drop(self.cross(self.norm_3(x), None, None, other))
        return x + self.drop(self.mlp(self.norm_2(x)))


def _contexts(shape: Shape) -> Any:
    """torchtitan's selective checkpointing by operation: attention and every other product of matrices are kept, all else is recomputed.

    A compiler keeps of these what backward needs: not the block's last product, whose sum with the block's input nobody reads again.
    Without one it is kept, too. Products by kernels of their own, of which the policy doesn't know, are recomputed (``"attention"``).
    """
    seen = {False: 0, True: 0}
    last = (1 if shape.fused_heads else 3) + 1 + (3 if shape.act in ("swiglu", "geglu") else 2)

    def policy(ctx: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operation is torch.ops.aten.mm.default:
            seen[ctx.is_recompute] += 1
            number = seen[ctx.is_recompute]
            kept = number % 2 and shape.recompute == "operations" and not (shape.fused and number == last)
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
        name = str(operation)
        kept = "attention" in name and "backward" not in name
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[arg-type]


def masked_tokens(length: int) -> int:
    """How many of a sample's tokens BERT is asked for in pre-training."""
    return max(1, length * 5 // 32)


class Transformer(nn.Module):
    """Tokens or pictures to what the head makes of them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        if shape.kind == "vit":
            self.embed: nn.Module = nn.Conv2d(3, shape.hidden, shape.patch, shape.patch)
            self.first = nn.Parameter(torch.zeros(1, 1, shape.hidden))
            self.positions: Any = nn.Parameter(torch.zeros(1, (shape.image // shape.patch) ** 2 + 1, shape.hidden))
        else:
            self.embed = nn.Embedding(shape.vocab, shape.hidden)
            if shape.positions == "learned":
                self.positions = nn.Embedding(shape.length, shape.hidden)
        if shape.kind == "encoder" or shape.embedding_norm:
            self.norm_in = _norm(shape)
        if shape.kind == "encoder" and shape.task != "span":
            self.pool = nn.Linear(shape.hidden, shape.hidden)
        if shape.kind == "encoder" and shape.task == "masked":
            self.transform, self.norm_head = nn.Linear(shape.hidden, shape.hidden), _norm(shape)
        crossed = shape.kind == "encoder-decoder"
        if crossed:
            self.encoder = nn.ModuleList(Block(shape) for _ in range(shape.encoder_layers))
            self.norm_encoder = _norm(shape)
        causal = shape.kind in ("decoder", "encoder-decoder")
        self.blocks = nn.ModuleList(Block(shape, causal, crossed) for _ in range(shape.layers))
        self.norm = _norm(shape) if shape.kind != "encoder" else nn.Identity()
        if causal or shape.task == "masked":
            self.head = _linear(shape, "head", shape.hidden, shape.vocab, bias=False)
            if shape.tied and isinstance(self.head, nn.Linear):
                self.head.weight = self.embed.weight  # type: ignore[assignment]
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
                # peft trains copies (``modules_to_save``), and keeps the originals beside them.
                self.kept = nn.ParameterList(
                    nn.Parameter(torch.empty(shape.vocab, shape.hidden), requires_grad=False) for _ in (self.embed, self.head)
                )

    def _run(self, index: int, block: nn.Module, h: Tensor, *others: Tensor | Tables) -> Tensor:
        """One block, by the model's own choice of what is recomputed."""
        how = self.shape.recompute
        if not self.training or how == "none" or (how == "every 2nd" and index % 2):
            return block(h, *others)  # type: ignore[no-any-return]
        if how in ("operations", "attention"):
            return checkpoint(block, h, *others, use_reentrant=False, context_fn=partial(_contexts, self.shape))  # type: ignore[no-any-return]
        return checkpoint(block, h, *others, use_reentrant=False)  # type: ignore[no-any-return]

    def _embedded(self, x: Tensor) -> Tensor:
        shape = self.shape
        if shape.kind == "vit":
            h = self.embed(x).flatten(2).transpose(1, 2)
            return torch.cat((self.first.expand(len(h), -1, -1), h), 1) + self.positions
        h = self.embed(x)
        if shape.positions == "learned":
            h = h + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.norm_in(h) if hasattr(self, "norm_in") else h

    def hidden(self, x: Tensor) -> Tensor:
        """Through embedding and blocks, before the last normalisation."""
        shape = self.shape
        tables: Tables = None
        mask = None
        h = self._embedded(x)
        if shape.positions == "rope":
            tables = rotary_tables(x.shape[1], int(shape.head_dim * shape.rotary_share), h.dtype, x.device)
        if shape.kind == "encoder":
            mask = torch.zeros(len(x), 1, 1, x.shape[1], dtype=h.dtype, device=x.device)
        elif shape.positions == "alibi":
            mask = torch.zeros(1, shape.heads, 1, x.shape[1], dtype=h.dtype, device=x.device)
        h = self.drop(h)
        if shape.recompute != "none" and self.training and not h.requires_grad:
            h.requires_grad_()  # as enable_input_require_grads, without which frozen blocks pass no gradient
        other = None
        if shape.kind == "encoder-decoder":
            other = h
            for index, block in enumerate(self.encoder):
                other = self._run(index, block, other, tables, mask)
            other, h = self.norm_encoder(other), self.drop(self._embedded(x))
        for index, block in enumerate(self.blocks):
            h = self._run(index, block, h, tables, mask, *(() if other is None else (other,)))
        return h

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.hidden(x))
        if self.shape.kind == "encoder" and self.shape.task == "classes":
            h = torch.tanh(self.pool(h[:, 0]))
        elif self.shape.kind == "encoder" and self.shape.task == "masked":
            # Of 128 tokens 20 are asked for, of 512 80: as BERT's data are made, and as its code gathers them before the head.
            h = self.norm_head(F.gelu(self.transform(h[:, : masked_tokens(self.shape.length)])))
        elif self.shape.kind == "vit":
            h = h[:, 0]
        y: Tensor = self.head(h)
        return y
