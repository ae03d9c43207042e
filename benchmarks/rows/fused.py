"""What a compiler makes of a chain of pointwise operations and reductions: one kernel that saves what entered. Knows no model.

The rule, after torch's inductor and its partitioner (``torch/_functorch/partitioners.py``): between products of matrices everything is
pointwise or a reduction along a row, and is fused into one pass over its inputs. What such a chain makes on its way is never written; in
backward it is worked out again from the chain's inputs, which some product or another chain has to keep anyway. So a chain reads its inputs
and writes its output, saves its inputs, and its backward reads these and the gradient and writes the inputs' gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rows.kept_inputs import keep


class _Chain(torch.autograd.Function):
    """One kernel: its result is allocated, nothing on the way; gradients likewise."""

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], dtype: torch.dtype, *inputs: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(*inputs)
        alike = [x for x in inputs if x.shape == shape]
        if len(alike) > 1:
            return torch.mul(alike[0], alike[1]).to(dtype)
        return alike[0].clone() if alike and alike[0].dtype == dtype else torch.zeros(shape, dtype=dtype, device=inputs[0].device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        wanted = ctx.needs_input_grad[2:]
        made = [
            None if not needs else (gradient * x).to(x.dtype) if x.shape == gradient.shape else torch.zeros_like(x)
            for x, needs in zip(ctx.saved_tensors, wanted, strict=True)
        ]
        return None, None, *made


def fused(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """What ``function`` computes of these, as one kernel. Only its result's shape and type are worked out: figures are not.

    Args:
        function: pointwise, or with reductions along the last dimension.
        inputs: all that it reads.
    """
    with torch.no_grad():
        meta = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in inputs]
        like = function(*meta)
    made: Tensor = _Chain.apply(tuple(like.shape), like.dtype, *inputs)
    return made


class _ScaledSum(torch.autograd.Function):
    """A sum, one term scaled, as one kernel: backward needs none of its inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, added: Tensor, scale: float) -> Tensor:  # type: ignore[override]
        ctx.scale, ctx.dtype = scale, added.dtype
        return torch.add(x, added.to(x.dtype) if added.dtype != x.dtype else added, alpha=scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, (gradient * ctx.scale).to(ctx.dtype), None


def scaled_sum(x: Tensor, added: Tensor, scale: float) -> Tensor:
    """``x + scale * added`` as one kernel."""
    made: Tensor = _ScaledSum.apply(x, added, scale)
    return made


class _CrossEntropy(torch.autograd.Function):
    """Mean cross entropy in fp32 of logits of any type, as one kernel: it saves the logits and a number a row."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        rows = logits.amax(-1).float()
        ctx.save_for_backward(logits, targets, rows)
        return rows.mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return ctx.saved_tensors[0] * 0.5, None


class _CrossEntropyInPlace(torch.autograd.Function):
    """That of Megatron-DeepSpeed (``megatron/mpu/cross_entropy.py``) and nanotron (``parallel/tensor_parallel/functional.py``).

    A second copy in fp32 (a clone here, the difference from the largest one there) becomes the probabilities in place, is saved, and
    becomes its own gradient in backward.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        wide = logits.float()
        probabilities = wide - wide.amax(-1, keepdim=True)
        probabilities.exp_()
        probabilities.div_(probabilities.sum(-1, keepdim=True))
        ctx.save_for_backward(probabilities, targets)
        ctx.dtype = logits.dtype
        return probabilities[:, 0].mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        wide = ctx.saved_tensors[0]
        wide.mul_(gradient)
        return wide.to(ctx.dtype), None


def cross_entropy(logits: Tensor, targets: Tensor, style: str, keeps_logits: bool = False) -> Tensor:
    """The loss of (rows, classes).

    Args:
        logits: of the classes; ``targets`` the right ones.
        keeps_logits: whether torch's own loss saves its input beside what its softmax makes of it.
        style: ``"plain"`` in the logits' own type; ``"wide"`` after a copy in fp32; ``"fused"`` in one kernel; ``"in place"`` on one
            copy in fp32 that becomes its gradient.
    """
    if style == "in place":
        one: Tensor = _CrossEntropyInPlace.apply(logits, targets)
        return one
    if style == "fused":
        loss: Tensor = _CrossEntropy.apply(logits, targets)
        return loss
    if style == "wide" or (keeps_logits and torch.is_autocast_enabled(logits.device.type)):
        logits = logits.float()
    found = F.cross_entropy(logits, targets)
    return keep(found, logits) if keeps_logits else found
