"""Work: operations of one kind and size, as a roofline needs them. Data only: it knows no device, and not how they were counted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

WorkKind = Literal["matmul", "attention", "convolution", "recurrent", "pointwise", "reduce", "gather", "scatter", "copy", "other"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One kernel, which a part of the step runs ``count`` times. Sizes are of one run, at the traced batch.

    Args:
        kind: ``"matmul"``: a product of two matrices, or of a batch of them; ``"attention"``: a fused kernel, forward or backward;
            ``"reduce"``: norms, softmax, sums, losses, pooling; ``"gather"``: embedding, index; ``"scatter"``: their backward; ``"copy"``:
            casts, clones, concatenations, fills; ``"pointwise"``: one pass over elements, the optimizers' over lists of tensors (foreach,
            fused) too.
        name: the operation's, such as ``"mm"``. A convolution's backward is two products, ``"convolution_backward.input"`` and
            ``".weight"``; attention that leaves later keys out ends in ``".causal"``, a convolution of tensors laid out so in
            ``".channels_last"``.
        dtype: the type in which it computes: ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"fp64"``, ``"int8"``, …
        flops: a multiply-add counts two; of causal attention the whole square counts, of which kernels may leave half out.
        moved_bytes: its inputs and outputs, once for each pass over them.
        fixed_bytes: the part of ``moved_bytes`` that doesn't depend on the batch: parameters, their casts, their gradients.
        shape: matmul: (batch, m, n, k); attention: (batch, heads, query length, key length, width of a head); convolution: (batch, input
            channels, output channels, output positions, kernel positions, groups), of its backward those of its forward; recurrent: (steps,
            batch, width of the input, of the state, layers × directions); else empty.
        growing: which entry of ``shape`` grows with the batch; None where none does.
        drawn: whether it draws random numbers for the samples: a part of the batch draws for the whole batch, and keeps its own.
    """

    kind: WorkKind
    name: str
    dtype: str
    count: int = 1
    flops: int = 0
    moved_bytes: int = 0
    fixed_bytes: int = 0
    shape: tuple[int, ...] = ()
    growing: int | None = None
    drawn: bool = False

    @property
    def grows(self) -> bool:
        """Whether it depends on the batch at all."""
        return self.growing is not None or self.moved_bytes > self.fixed_bytes

    def at(self, share: float) -> Work:
        """The work at another batch, ``share`` times the traced one."""
        if share == 1.0 or not self.grows:
            return self
        shape = self.shape
        if self.growing is not None:
            grown = max(1, round(shape[self.growing] * share))
            shape = (*shape[: self.growing], grown, *shape[self.growing + 1 :])
        return replace(
            self,
            flops=round(self.flops * share),
            moved_bytes=self.fixed_bytes + round((self.moved_bytes - self.fixed_bytes) * share),
            shape=shape,
        )


def flops(works: Iterable[Work]) -> int:
    """Of all runs of some work together."""
    return sum(work.count * work.flops for work in works)


def moved_bytes(works: Iterable[Work]) -> int:
    """Of all runs of some work together."""
    return sum(work.count * work.moved_bytes for work in works)
