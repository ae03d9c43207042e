"""What old versions of torch save for backward beside what today's do. Knows no model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Keeping(torch.autograd.Function):
    """What an operation made, with what entered it saved as well."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, entered: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(entered)
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, None


def keep(made: Tensor, entered: Tensor) -> Tensor:
    """``made``, whose graph holds on to ``entered`` until backward."""
    kept: Tensor = _Keeping.apply(made, entered)
    return kept
