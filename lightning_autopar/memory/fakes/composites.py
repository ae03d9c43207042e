"""Composite operations that torch runs differently on fake tensors: here they run as on real ones. Knows torch's operations and its
dispatcher.

Where an argument may be a tensor subclass (``areAnyTensorSubclassLike``, ``aten/src/ATen/TensorSubclassLikeUtils.h``), some of torch's
composites write into a new tensor instead of one of their own. On fakes they would take one block more than on real tensors, and free it
elsewhere. This module has those of forward, the tracker those of backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_autopar.memory.fakes.cuda_autocast import temporary_library

_COMPOSITE = "CompositeImplicitAutograd"
_HALF = (torch.float16, torch.bfloat16)


@contextmanager
def composites_as_real() -> Iterator[None]:
    """While open, these operations allocate the same for fakes as for real tensors. It affects the whole process."""
    with temporary_library() as library:
        library.impl("linear", linear, _COMPOSITE)
        library.impl("_scaled_dot_product_attention_math", attention_unfused, _COMPOSITE)
        yield


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``at::native::linear`` (Linear.cpp): the bias is added in place, where it isn't part of the product.

    Args:
        input: any number of dimensions.
        weight: (outputs, inputs).
    """
    if bias is None:
        return torch.matmul(input, weight.t())
    if input.dim() == 2:
        return torch.addmm(bias, input, weight.t())
    if input.is_contiguous():
        flat = input.view(math.prod(input.shape[:-1]), input.size(-1))
        return torch.addmm(bias, flat, weight.t()).view(*input.shape[:-1], weight.size(0))
    return torch.matmul(input, weight.t()).add_(bias)


def attention_unfused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    dropout_mask: Tensor | None = None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:
    """``_scaled_dot_product_attention_math`` (transformers/attention.cpp), with its local variables: each holds its tensor until the end.

    Args:
        query: as for ``torch.nn.functional.scaled_dot_product_attention``; the same for all other arguments of that name.
        attn_mask: added in place to the scores.
        dropout_mask: which weights stay, instead of a draw; for tests of kernels.

    Returns:
        The output and the weights.
    """
    made = query.dtype
    if made in _HALF and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        query, key, value = query.float(), key.float(), value.float()
    scale = query.size(-1) ** -0.5 if scale is None else scale
    root = abs(scale) ** 0.5
    scaled = query * (root if scale >= 0 else -root)
    mask = attn_mask
    if is_causal:
        mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
        mask = additive(mask, query.dtype)
    if enable_gqa and not query.size(-3) == key.size(-3) == value.size(-3):
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    weights = torch.matmul(scaled, key.transpose(-2, -1) * root)
    if mask is not None:
        weights.add_(mask)
    weights = torch._safe_softmax(weights, -1)
    if dropout_p > 0 and dropout_mask is not None:
        weights = weights.masked_fill(dropout_mask.logical_not(), 0.0)
        return torch.matmul(weights, value * (1 / (1 - dropout_p))), weights
    if dropout_p > 0:
        weights = torch.dropout(weights, dropout_p, True)
    given = weights.to(made)
    return torch.matmul(weights, value).to(made), given


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A boolean mask as an additive mask (``convert_boolean_attn_mask``).

    Args:
        mask: of any dtype.
    """
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(float("-inf"), dtype=dtype, device=mask.device))
