"""Compares the batch of all stages while the step runs; and lets all ranks agree whether gradients overflowed under half precision's loss
scale.

Every rank of a pipeline loads its batches itself. A dataset that draws from generators which nobody else knows of (NumPy's
``default_rng()``, the system's entropy) would give each rank another crop or mask, and the step would silently combine one stage's inputs
with another stage's targets. Knows batches, a process group and a GradScaler.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class SameBatch:
    """Compares a batch's fingerprint over the ranks of a pipeline.

    Args:
        group: a gloo group of them.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._pair: Tensor | None = None
        self._work: dist.Work | None = None

    def begin(self, number: int) -> None:
        """A step begins; doesn't wait."""
        self._pair = torch.tensor([number, -number])
        self._work = dist.all_reduce(self._pair, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def finish(self) -> None:
        """The step is over.

        Raises:
            RuntimeError: if the ranks had different batches.
        """
        pair, work = self._pair, self._work
        if pair is None or work is None:
            return
        self._pair = self._work = None
        work.wait()
        if int(pair[0]) != -int(pair[1]):
            raise RuntimeError(
                "the stages of the pipeline were given different batches: the dataset, its transforms or the collate function draw from a "
                "generator of their own, which differs from process to process (as numpy.random.default_rng() without a seed does). Draw "
                "from torch's, NumPy's or Python's global generators, seed the generator by the sample's index, or run without a pipeline "
                '(allow=["single", "ddp", "fsdp"])'
            )


def agree_on_overflow(
    scaler: Any, device: torch.device, *, hidden: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Callable[[], None]:
    """Make a GradScaler skip a step, and lower its scale, on all ranks if one finds an infinite gradient; returns what undoes it. Each rank
    looks at its own stages' gradients; if one rank skips a step that another takes, their weights diverge. A rank without gradients, whose
    parameters are frozen, has no answer, which torch reports as an error. Both of the scaler's ways to the answer, its own unscaling and
    that of fused optimizers, use ``_unscale_grads_`` (torch 2.13, ``torch/amp/grad_scaler.py``).

    Args:
        scaler: a ``torch.amp.GradScaler``.
        device: where this rank's gradients are.
        hidden: makes a context in which parameters of other ranks have no gradients.
    """
    original = scaler._unscale_grads_

    def unscale(*args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        with hidden():
            found: dict[torch.device, torch.Tensor] = original(*args, **kwargs)
        if not found:
            found = {device: torch.zeros(1, device=device)}
        for overflowed in found.values():
            dist.all_reduce(overflowed, dist.ReduceOp.MAX)
        return found

    scaler._unscale_grads_ = unscale

    def undo() -> None:
        del scaler._unscale_grads_

    return undo
