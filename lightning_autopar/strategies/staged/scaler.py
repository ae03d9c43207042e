"""Half precision's loss scale over several ranks: whether gradients have overflowed is for all of them to say. Knows a GradScaler alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist


def agree_on_overflow(
    scaler: Any, device: torch.device, *, hidden: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Callable[[], None]:
    """Have a GradScaler skip a step, and lower its scale, on all ranks where one finds an infinite gradient; returns what undoes it.

    Each rank looks at its own stages' gradients; a step that one leaves out and another takes parts their weights for good. A rank without
    gradients, whose parameters are frozen, has found nothing, which torch takes for a mistake. Both of the scaler's ways to the answer, its
    own unscaling and that of fused optimizers, go through ``_unscale_grads_`` (torch 2.13, ``torch/amp/grad_scaler.py``).

    Args:
        scaler: a ``torch.amp.GradScaler``.
        device: where this rank's gradients are.
        hidden: makes a context in which no parameter has a gradient that isn't here.
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
