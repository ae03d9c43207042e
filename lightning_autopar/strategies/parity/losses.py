"""The losses of a step that is tried: noted where backward begins, and compared between a batch's parts and the whole batch.

Knows autograd and shares of a batch; nothing of modules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_autopar._temporary import patched
from lightning_autopar.exact.data.rank_share import BatchShare
from lightning_autopar.exact.step.random_draws import Rows
from lightning_autopar.strategies.parity.draw_probe import Observation


def groups_first_of(observed: Observation) -> bool:
    """Whether draws were assumed to be ordered by group, then by sample; see :class:`.draws.Rows`."""
    return any(isinstance(draw.choice, Rows) and draw.choice.groups_first for draw in observed.draws.draws or ())


def difference_of(observed: Observation, shares: Sequence[BatchShare]) -> float:
    """The largest relative difference between a loss of the whole batch and the parts' mean."""
    if any(len(losses) != len(observed.whole) for losses in observed.parts):
        return math.inf
    largest = 0.0
    for whole, *parts in zip(observed.whole, *observed.parts, strict=True):
        mean = sum(float(part) * share.rows / share.of for part, share in zip(parts, shares, strict=True))
        size = sum(abs(float(part)) * share.rows / share.of for part, share in zip(parts, shares, strict=True))
        difference = abs(mean - float(whole))
        relative = difference / max(abs(float(whole)), size) if difference else 0.0
        if not math.isfinite(relative):
            return math.nan
        largest = max(largest, relative)
    return largest


@contextmanager
def recorded_backward(losses: list[Tensor], parameters: Sequence[Parameter]) -> Iterator[None]:
    """Record what ``backward`` is called on, under manual optimization; Lightning and ``Tensor.backward`` both end there. Afterwards
    gradients are cleared: what the user's own optimizer does with a part's gradients shows nothing, as ranks exchange gradients first.
    """
    original = torch.autograd.backward

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        losses.extend(given)
        result = original(tensors, *args, **kwargs)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()
        return result

    with patched(torch.autograd, "backward", backward):
        yield
