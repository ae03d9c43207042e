"""The losses of a step that is tried: noted where backward begins, and compared between a batch's parts and the whole batch.

Knows autograd and shares of a batch; nothing of modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_autopar._temporary import patched
from lightning_autopar.exact.data.rank_share import BatchShare
from lightning_autopar.exact.logs.log_rules import weighted
from lightning_autopar.exact.step.random_draws import Rows
from lightning_autopar.strategies.parity.draw_probe import Observation


def groups_first_of(observed: Observation) -> bool:
    """Whether draws were assumed to be ordered by group, then by sample; see :class:`.draws.Rows`."""
    return any(isinstance(draw.choice, Rows) and draw.choice.groups_first for draw in observed.draws.draws or ())


def difference_of(observed: Observation, shares: Sequence[BatchShare]) -> float:
    """The largest relative difference between a loss of the whole batch and what its parts' make, by what each weighs."""
    if any(len(losses) != len(observed.whole) for losses in observed.parts):
        return math.inf
    largest = 0.0
    weights = [share.fraction() for share in shares]
    for whole, *parts in zip(observed.whole, *observed.parts, strict=True):
        values = [float(part) for part in parts]
        size = weighted([abs(value) for value in values], weights)
        difference = abs(weighted(values, weights) - float(whole))
        relative = difference / max(abs(float(whole)), size) if difference else 0.0
        if not math.isfinite(relative):
            return math.nan
        largest = max(largest, relative)
    return largest


class Backwards:
    """What manual optimization does between forward and the optimizers' steps, on the whole batch and then on its parts."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = parameters
        #: For each backward pass on the whole batch the signs of its gradients.
        self._signs: list[list[Tensor | None]] = []
        #: Whether a step calls ``torch.autograd.grad`` for parameters: no engine exchanges what that returns.
        self.differentiates = False

    def begin(self) -> None:
        """What follows is on the whole batch first."""
        self._signs.clear()

    @contextmanager
    def recorded(self, losses: list[Tensor]) -> Iterator[None]:
        """Record what ``backward`` is called on (Lightning and ``Tensor.backward`` both end there), and the loss's slope along the signs of
        the whole batch's gradients: a loss that is 0 whatever the batch may have another gradient when split. Afterwards gradients are
        cleared: what the user's own optimizer does with a part's gradients shows nothing, as ranks exchange gradients first.
        """
        original, differentiate, passes = torch.autograd.backward, torch.autograd.grad, 0
        known = {id(parameter) for parameter in self._parameters}

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal passes
            given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            result = original(tensors, *args, **kwargs)
            losses.extend((*given, self._slope(passes)))
            passes += 1
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.zero_()
            return result

        def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            given = [inputs] if isinstance(inputs, Tensor) else list(inputs)
            self.differentiates |= any(id(each) in known for each in given)
            return differentiate(outputs, given, *args, **kwargs)

        with patched(torch.autograd, "backward", backward), patched(torch.autograd, "grad", grad):
            yield

    def _slope(self, number: int) -> Tensor:
        gradients = [parameter.grad for parameter in self._parameters]
        if number == len(self._signs):
            self._signs.append([None if each is None else each.sign() for each in gradients])
        pairs = zip(gradients, self._signs[number], strict=True)
        slopes = [(gradient * signs).sum().double() for gradient, signs in pairs if gradient is not None and signs is not None]
        return torch.stack(slopes).sum() if slopes else torch.zeros(())


def call_closure(closure: Callable[[], Any] | None = None) -> Any:
    """An optimizer's step that changes nothing."""
    return None if closure is None else closure()
