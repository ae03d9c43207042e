"""Gradients that meet: the traced backward against the profiler's memory events of a real one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_autopar.memory.trace.tape_recorder import MemoryTracker, _current_node, adds_in_place, references_of_one_holder


class Doubled(torch.autograd.Function):
    """Adds two fresh tensors in its own backward, which makes a third."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.add(gradient * 1, gradient * 2)


def shared(h: Tensor) -> Tensor:
    """One gradient for two nodes, one of which gets another gradient first."""
    other = h.detach().requires_grad_() * 2
    own = h * 3
    return (own.cos() + other.cos()).sum() + (own + other).exp().sum()


CASES: dict[str, tuple[Callable[[Tensor], Tensor], list[bool]]] = {
    "two": (lambda h: (h.exp() + h.cos()).sum(), [True]),
    "three": (lambda h: (h.exp() + h.cos() + h.sin()).sum(), [True, True]),
    "residual": (lambda h: (h + h.exp()).cos().sum(), [True]),
    "expanded first": (lambda h: h.exp().sum() + h.sum(), [False]),
    "shared": (shared, [False, True]),
    "transposed": (lambda h: h.t().exp().sum() + h.cos().sum(), [True]),
    "own sum": (lambda h: Doubled.apply(h).exp().sum(), [False]),
}


class Answers(TorchDispatchMode):
    """What is said of each sum in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[bool] = []
        self.on = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.on and func is torch.ops.aten.add.Tensor:
            self.found.append(adds_in_place(func, args, kwargs or {}, _current_node(), made_by_it=False))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", CASES)
def test_sums_that_are_in_place_without_a_mode(name: str) -> None:
    function, expected = CASES[name]
    references_of_one_holder()
    with Answers() as answers:
        loss = function(torch.ones(64, 64, requires_grad=True) * 2)
        answers.on = True
        loss.backward()
    assert answers.found == expected


FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "triangular": lambda h: torch.linalg.cholesky(h @ h.t() + 99 * torch.eye(64)).square().sum(),
    "determinant": lambda h: torch.linalg.slogdet(h + 99 * torch.eye(64))[1],
    "twice one": lambda h: (h * h).exp().sum(),
}


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11
@pytest.mark.parametrize("name", [*CASES, *FORMULAS])
def test_backward_allocates_what_the_real_one_does(name: str) -> None:
    """Allocations of at least a tensor's size in a backward, counted by the profiler and on the tape."""
    function = FORMULAS[name] if name in FORMULAS else CASES[name][0]

    def loss_of() -> Tensor:
        return function(torch.ones(64, 64, requires_grad=True) * 2)

    loss = loss_of()
    with torch.profiler.profile(profile_memory=True) as profile:
        loss.backward()
    events = profile.profiler.kineto_results.events()
    real = sum(event.name() == "[memory]" and event.nbytes() >= 64 * 64 * 4 for event in events)
    tracker = MemoryTracker(batch_size=64)
    with tracker:
        tracker.enter("forward")
        loss = loss_of()
        tracker.record()
        tracker.enter("backward")
        before = len(tracker.tape or ())
        loss.backward()
    traced = [event for event in list(tracker.tape or ())[before:] if event.action == "allocate" and event.size_bytes >= 64 * 64 * 4]
    assert len(traced) == real > 0
