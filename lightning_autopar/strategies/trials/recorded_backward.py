"""The losses of a step that is tried: noted where backward begins, and compared between a batch's parts and the whole batch.

A gradient is looked at as soon as autograd has it, and let go: all of a large model's gradients would be as large as the model itself.
Knows autograd, shares of a batch, and who runs backward in a module.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_autopar._temporary import patched
from lightning_autopar.exact.data.rank_share import BatchShare
from lightning_autopar.exact.logs.log_rules import weighted
from lightning_autopar.exact.random.whole_batch_draws import Rows
from lightning_autopar.exact.step.gradient_hooks import OurHook
from lightning_autopar.exact.step.shared_network import gradients_asked_for
from lightning_autopar.strategies.trials.draw_probe import Observation
from lightning_autopar.strategies.trials.own_functions import Signature, not_linear, own_functions, signature

#: Relative difference of losses that count as equal: rounding of float32 sums taken in another order. A term of the loss may be small now,
#: as a teacher's that began as a copy, and grow.
EQUAL = 1e-6
#: A parameter's gradient that is so small beside all others' is rounding, such as a bias's before a normalization.
_NOTHING = 1e-4
#: So many of a gradient's elements are looked at at once.
_ELEMENTS = 1 << 16


def groups_first_of(observed: Observation) -> bool:
    """Whether draws were assumed to be ordered by group, then by sample; see :class:`.whole_batch_draws.Rows`."""
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


class OwnStepError(RuntimeError):
    """Under automatic optimization the user's step has made gradients, and steps an optimizer on them: no engine exchanges these."""


class Backwards:
    """The backward passes between forward and the optimizers' steps, on the whole batch and then on its parts.

    Args:
        parameters: the module's, by name.
        automatic: whether Lightning runs backward, and then the optimizer's step.
    """

    def __init__(self, parameters: Mapping[str, Parameter], *, automatic: bool) -> None:
        self._automatic = automatic
        self._parameters = list(parameters.values())
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        #: For each backward pass on the whole batch the signs of its gradients, by the parameter's place and by how often it had one before
        #: in this pass: a node's own backward pass may give it another.
        self._signs: list[dict[tuple[int, int], _Signs]] = []
        #: The same of the pass that runs, and the slopes along them, by the parameter's place.
        self._new_signs: dict[tuple[int, int], _Signs] = {}
        self._slopes: dict[int, Tensor] = {}
        self._given: Counter[int] = Counter()
        self._looks = False
        #: Whether nobody looks at gradients once a backward pass is over; else they are zeros then.
        self.unseen = False
        #: Whether a step makes gradients of parameters without ``backward``: no engine exchanges these. A gradient with a graph of its own
        #: is for a loss (an inner loop's), unless the step writes gradients by itself, too.
        self.differentiates = self._asks = False
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
            with self._seen():
                result = original(tensors, *args, **kwargs)
            losses.extend((*given, *self._taken()))
            self._left = self._versions()
            return result

        def noted(gradient: Tensor, given: Any) -> Tensor:
            self._asks |= id(given) in known
            self.differentiates |= id(given) in known and not gradient.requires_grad
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
        if not self._passes and any(parameter.grad is not None for parameter in self._parameters):
            if self._automatic:
                raise OwnStepError("an optimizer steps within the training step")
            self.differentiates = True
        self.differentiates |= self._asks and self.touched()
        return result

    def _look_at(self, functions: Sequence[Any]) -> None:
        """Note the functions of the whole batch's graph; try those of a part's that aren't over samples."""
        if self._on_whole:
            self._functions.update(signature(node) for node in functions)
        else:
            self.missed = max(self.missed, not_linear([node for node in functions if signature(node) in self._functions], self._names))

    @contextmanager
    def _seen(self) -> Iterator[None]:
        """The context of a backward pass: each gradient's slope is taken when it is complete."""
        looks = self._looks  # this pass is within another one
        with patched(self, "_looks", True), ExitStack() as hooks:
            for index, parameter in enumerate(self._parameters if not looks else ()):
                if parameter.requires_grad and parameter.is_leaf:
                    hooks.callback(parameter.register_post_accumulate_grad_hook(OurHook(self._see, index)).remove)
            yield

    def _see(self, index: int, parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient, place = parameter.grad.detach(), (index, self._given[index])
        self._given[index] += 1
        if self._on_whole:
            self._new_signs[place] = _Signs(gradient)
        signs = self._new_signs.get(place) if self._on_whole else self._signs[self._passes].get(place)
        if signs is not None:
            self._slopes[index] = self._slopes.get(index, 0.0) + signs.slope(gradient)
        if self.unseen:
            parameter.grad = None
        else:
            parameter.grad.zero_()

    @property
    def _on_whole(self) -> bool:
        return self._passes == len(self._signs)

    def _taken(self) -> list[Tensor]:
        """Of the pass that is over the slopes along the signs of the whole batch's gradients: by hand of all parameters together; else of
        each, where what is next to nothing beside the others' counts as nothing.
        """
        if self._on_whole:
            self._signs.append(self._new_signs)
        places = sorted({index for index, _ in self._signs[self._passes]})
        nothing = torch.zeros((), dtype=torch.float64)
        slopes = [self._slopes.get(index, nothing) for index in places]
        self._passes += 1
        self._new_signs, self._slopes = {}, {}
        self._given.clear()
        total = torch.stack(slopes).sum() if slopes else nothing
        return [slope + _NOTHING * total for slope in slopes] if self.each else [total]


class _Signs:
    """Where a gradient is positive, in a bit an element."""

    def __init__(self, gradient: Tensor) -> None:
        self._bits = [numpy.packbits((piece > 0).numpy()) for piece in _pieces(gradient)]

    def slope(self, gradient: Tensor) -> Tensor:
        """Along these signs; another gradient of the same shape."""
        total = torch.zeros((), dtype=torch.float64)  # a sum in float32 may be rounded by more than counts as a difference
        for bits, piece in zip(self._bits, _pieces(gradient), strict=True):
            signs = torch.from_numpy(numpy.unpackbits(bits, count=piece.numel())).to(piece.dtype)
            total += signs.mul_(2).sub_(1).mul_(piece).sum(dtype=torch.float64)  # a fifth of the time that `torch.where` takes
        return total


def _pieces(gradient: Tensor) -> Sequence[Tensor]:
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return torch.split(dense.reshape(-1), _ELEMENTS)
