"""The losses of a step that is tried: noted where backward begins, and compared between a batch's parts and the whole batch.

Knows autograd, shares of a batch, and who runs backward in a module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_autopar._temporary import patched
from lightning_autopar.exact.data.rank_share import BatchShare
from lightning_autopar.exact.logs.log_rules import weighted
from lightning_autopar.exact.step.random_draws import Rows
from lightning_autopar.exact.step.shared_network import gradients_asked_for
from lightning_autopar.strategies.parity.draw_probe import Observation
from lightning_autopar.strategies.parity.own_functions import Signature, not_linear, own_functions, signature

#: A parameter's gradient that is so small beside all others' is rounding, such as a bias's before a normalization.
_NOTHING = 1e-4


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
    """The backward passes between forward and the optimizers' steps, on the whole batch and then on its parts."""

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self._parameters = list(parameters.values())
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        #: For each backward pass on the whole batch the signs of its gradients.
        self._signs: list[list[Tensor | None]] = []
        #: Whether a step makes gradients of parameters without ``backward``: no engine exchanges these.
        self.differentiates = False
        #: Which gradients there were when the last backward pass was over, and how often they had been written to.
        self._left: list[tuple[int, int]] = []
        #: Backward passes of the step that runs.
        self._passes = 0
        #: Whether each parameter's gradient is compared.
        self.each = False
        #: The user's own functions in the whole batch's graphs.
        self._functions: set[Signature] = set()
        #: By how much a function's gradients for parts of a batch miss the whole batch's, and a sentence on it; 0 if there is none.
        self.missed = (0.0, "")

    def begin(self) -> None:
        """What follows is on the whole batch first."""
        self._signs.clear()
        self._functions.clear()

    @contextmanager
    def recorded(self, losses: list[Tensor]) -> Iterator[None]:
        """Record what ``backward`` is called on (Lightning and ``Tensor.backward`` both end there), and the loss's slope along the signs of
        the whole batch's gradients: a loss that is 0 whatever the batch may have another gradient when split. Afterwards gradients are
        cleared: what the user's own optimizer does with a part's gradients shows nothing, as ranks exchange gradients first.
        """
        original, self._passes = torch.autograd.backward, 0
        known = {id(parameter) for parameter in self._parameters}

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            self._look_at(own_functions(given))
            result = original(tensors, *args, **kwargs)
            losses.extend((*given, *self._slopes(self._passes)))
            self._passes += 1
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.zero_()
            self._left = self._versions()
            return result

        def noted(gradient: Tensor, given: Any) -> Tensor:
            self.differentiates |= id(given) in known
            return gradient

        with patched(torch.autograd, "backward", backward), gradients_asked_for(noted):
            yield

    def touched(self) -> bool:
        """Whether somebody has written to gradients since the last backward pass was over, be it what they were."""
        return self._versions() != self._left

    def _versions(self) -> list[tuple[int, int]]:
        return [(id(parameter.grad), parameter.grad._version) for parameter in self._parameters if parameter.grad is not None]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """An optimizer's step that changes nothing."""
        result = None if closure is None else closure()
        self.differentiates |= not self._passes and any(parameter.grad is not None for parameter in self._parameters)
        return result

    def _look_at(self, functions: Sequence[Any]) -> None:
        """Note the functions of the whole batch's graph; try those of a part's that aren't over samples."""
        if self._passes == len(self._signs):
            self._functions.update(signature(node) for node in functions)
        else:
            self.missed = max(self.missed, not_linear([node for node in functions if signature(node) in self._functions], self._names))

    def _slopes(self, number: int) -> list[Tensor]:
        """Along the signs of the whole batch's gradients: by hand of all parameters together; else of each, where what is next to nothing
        beside the others' counts as nothing.
        """
        gradients = [parameter.grad for parameter in self._parameters]
        if number == len(self._signs):
            self._signs.append([None if each is None else each.sign() for each in gradients])
        pairs = zip(gradients, self._signs[number], strict=True)
        slopes = [(gradient * signs).sum().double() for gradient, signs in pairs if gradient is not None and signs is not None]
        total = torch.stack(slopes).sum() if slopes else torch.zeros(())
        return [slope + _NOTHING * total for slope in slopes] if self.each else [total]
