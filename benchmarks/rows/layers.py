"""Layers that published models are made of, each computing in the manner of the library that was measured. Knows no row."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rows.fused import fused, scaled_sum
from rows.kept_inputs import keep


def _float_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + 1e-5) * weight.float()).to(x.dtype)


class RMSNorm(nn.Module):
    """Root mean square normalisation.

    Args:
        width: features.
        style: ``"float"`` keeps every intermediate in fp32, weight included (litgpt); ``"hf"`` comes back to the input's type before the
            weight (Hugging Face); ``"fused"`` is one kernel that saves its input alone (flash-attn's, torch's, a compiler's).
    """

    def __init__(self, width: int, style: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.style = style

    def forward(self, x: Tensor) -> Tensor:
        if self.style == "fused":
            return fused(_float_norm, x, self.weight)
        if self.style == "float":
            return _float_norm(x, self.weight)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * normed.to(x.dtype)


class _Quantised(torch.autograd.Function):
    """A product with a frozen weight of four bits: it is widened for the product, forwards and backwards, and saved narrow.

    The input is saved, too, though nothing needs it: bitsandbytes does so (``autograd/_functions.py``, ``MatMul4Bit``); torchao's doesn't.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scales: Tensor, rows: int, keeps_input: bool) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(packed, scales, *((x,) if keeps_input else ()))
        ctx.rows = rows
        return F.linear(x, _widened(packed, rows, x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        packed, *_ = ctx.saved_tensors
        return gradient @ _widened(packed, ctx.rows, gradient.dtype), None, None, None, None


def _widened(packed: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros((rows, 2 * packed.numel() // rows), dtype=dtype, device=packed.device)


class QuantisedLinear(nn.Module):
    """A frozen weight of four bits in blocks of 64 (bitsandbytes' nf4, GPTQ's int4), its bias if any as it is.

    Args:
        inputs: features that come in.
        outputs: features that go out.
        bias: whether there is one.
        double: whether the blocks' scales are quantised too: a byte each instead of four.
        keeps_input: whether its input is saved for backward.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool, double: bool = False, keeps_input: bool = True) -> None:
        super().__init__()
        self.rows, self.keeps_input = outputs, keeps_input
        self.packed = nn.Parameter(torch.empty(inputs * outputs // 2, dtype=torch.uint8), requires_grad=False)
        scales = torch.empty(inputs * outputs // 64, dtype=torch.uint8 if double else torch.float32)
        self.register_buffer("scales", scales)
        self.bias = nn.Parameter(torch.zeros(outputs), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Quantised.apply(x, self.packed, self.scales, self.rows, self.keeps_input)
        return y if self.bias is None else y + self.bias


class Adapted(nn.Module):
    """A frozen layer with a low-rank addition (LoRA), as peft and torchtune compute it.

    Args:
        base: the frozen layer.
        inputs: features that come in.
        outputs: features that go out.
        rank: of the addition.
        wide: adapters in fp32 whatever the base's type, as peft keeps them.
        dropout: on what enters the addition.
        merged: whether scaling and sum are one kernel.
    """

    def __init__(
        self,
        base: nn.Module,
        inputs: int,
        outputs: int,
        rank: int,
        *,
        wide: bool = False,
        dropout: float = 0.0,
        merged: bool = False,
    ) -> None:
        super().__init__()
        self.base, self.drop = base, nn.Dropout(dropout)
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        self.wide, self.merged = wide, merged

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        added = self.up(self.down(self.drop(x.to(self.down.weight.dtype))))
        if self.merged:
            return scaled_sum(y, added, 2.0)
        return y + (added * 2.0).to(y.dtype)


class AdaptedHeads(nn.Module):
    """litgpt's query, key and value in one frozen layer, with additions to some of the three that are padded with zeros to the full width.

    Args:
        base: the frozen layer.
        inputs: features that come in.
        widths: outputs of query, key and value.
        on: which of them get an addition.
        rank: of each addition.
        dropout: on what enters them.
    """

    def __init__(
        self, base: nn.Module, inputs: int, widths: tuple[int, int, int], on: tuple[bool, bool, bool], rank: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.base, self.widths, self.on, self.drop = base, widths, on, nn.Dropout(dropout)
        self.down = nn.Linear(inputs, rank * sum(on), bias=False)
        self.up = nn.ModuleList(nn.Linear(rank, width, bias=False) for width, wanted in zip(widths, on, strict=True) if wanted)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        parts = self.down(self.drop(x)).chunk(sum(self.on), -1)
        ups = iter(zip(self.up, parts, strict=True))
        made = []
        for width, wanted in zip(self.widths, self.on, strict=True):
            if wanted:
                up, part = next(ups)
                made.append(up(part))
            else:
                made.append(y.new_zeros(*y.shape[:-1], width))
        return y + torch.cat(made, -1) * 2.0


def rotary_tables(length: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, (length, width)."""
    angles = torch.outer(torch.arange(length, device=device).float(), 1.0 / 10000 ** (torch.arange(0, width, 2, device=device) / width))
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, part: int) -> Tensor:
    """Rotary embedding of the first ``part`` features of each head."""
    turned, rest = x[..., :part], x[..., part:]
    halves = torch.cat((-turned[..., part // 2 :], turned[..., : part // 2]), -1)
    turned = ((turned * cos) + (halves * sin)).to(x.dtype)
    return turned if part == x.shape[-1] else torch.cat((turned, rest), -1)


class _Rotated(torch.autograd.Function):
    """The same in one kernel, which saves the tables alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(cos, sin)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient.clone(), None, None


def rotate_fused(x: Tensor, cos: Tensor, sin: Tensor, part: int) -> Tensor:
    """Rotary embedding in one kernel, as flash-attn's and a compiler's."""
    assert 0 < part <= x.shape[-1]
    turned: Tensor = _Rotated.apply(x, cos, sin)
    return turned


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    style: str,
    causal: bool,
    dropout: float,
    mask: Tensor | None,
    softcap: float = 0.0,
    keeps_scores: bool = False,
) -> Tensor:
    """Attention on (batch, heads, length, width).

    Args:
        style: ``"sdpa"`` torch's own choice of a fused kernel; ``"math"`` scores, softmax and dropout each a tensor; ``"softmax"`` as
            ``"math"``, with scale, mask and softmax in one kernel that saves its output alone (Megatron); ``"flash"`` a fused kernel
            whatever the mask, which it needn't see.
        mask: added to the scores; None for none.
        softcap: scores are bounded by a tanh, which needs them written out (Gemma 2); 0 for none.
        keeps_scores: the softmax of ``"math"`` saves its input, too.
    """
    if style == "flash":
        mask, style = None, "sdpa"
    if k.shape[1] != q.shape[1] and (style != "sdpa" or softcap):
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    if style == "sdpa" and not softcap:
        return F.scaled_dot_product_attention(
            q, k, v, mask, dropout, is_causal=causal and mask is None, enable_gqa=k.shape[1] != q.shape[1]
        )
    scores = q @ k.transpose(-2, -1)
    if style != "softmax":
        scores = scores / math.sqrt(q.shape[-1])
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        if causal:
            blocked = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(blocked, torch.finfo(scores.dtype).min)
        if mask is not None:
            scores = scores + mask
    if softcap:  # in fp32, and back
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    else:
        keeps_scores = keeps_scores and style == "math"
        if keeps_scores and torch.is_autocast_enabled(scores.device.type):
            scores = scores.float()  # what autocast hands to the softmax is its input
        weights = scores.softmax(-1)
        weights = keep(weights, scores) if keeps_scores else weights
    weights = F.dropout(weights, dropout) if dropout else weights
    return weights @ v
