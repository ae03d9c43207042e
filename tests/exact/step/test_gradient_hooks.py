"""The user's hooks on parameters, and hooks that look at gradients, get the whole batch's gradient, in whatever parts it was run."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from lightning_autopar.exact.step.gradient_hooks import GradientHooks, trained
from tests.strategies.fitted import BLOCKS, Fitted, assert_same, numbers, plan

DDP, PARTS, BOTH = plan("ddp", ranks=3), plan("single", ranks=1, micro_batches=2), plan("ddp", micro_batches=2)


class Clamped(Fitted):
    """What a hook does with a gradient isn't linear in it; another one notes every call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def on_fit_start(self) -> None:
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        self.net[0].weight.register_hook(self.count)

    def count(self, gradient: Any) -> None:
        self.calls += float(gradient.abs().max()) * 100


class Twice(Clamped):
    """Two backward passes of manual optimization, the second one past Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.net(batch[0]).abs().mean().backward()
        optimizer.step()
        self.log("loss", loss, on_step=True, on_epoch=True)


class Late(Fitted):
    """A hook for some of the steps."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 1:
            self.handle = self.net[1][0].weight.register_hook(lambda gradient: gradient / gradient.norm())
        if self.global_step == 3:
            self.handle.remove()


class Afterwards(Fitted):
    """Changes gradients where they have been added to the parameter's."""

    def on_fit_start(self) -> None:
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.shrink)

    def shrink(self, parameter: Any) -> None:
        parameter.grad.clamp_(-0.02, 0.02)


class Looks(Fitted):
    """Looks at gradients in the middle of a window of accumulated batches, and changes them."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad.clamp_(-0.02, 0.02)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        gradient = self.net[0].weight.grad
        self.log("before", 0.0 if gradient is None else gradient.norm())


@pytest.mark.parametrize(
    ("make", "under", "options"),
    [
        (Clamped, DDP, {}),
        (Clamped, PARTS, {"accumulate_grad_batches": 2}),
        (Clamped, BOTH, {"accumulate_grad_batches": 2}),
        (Clamped, plan("fsdp", shard=BLOCKS), {}),
        (Twice, DDP, {}),
        (Late, DDP, {}),
        (Late, BOTH, {}),
        (Afterwards, DDP, {"accumulate_grad_batches": 2}),
        (Looks, DDP, {"accumulate_grad_batches": 2}),
        (Looks, plan("fsdp", shard=BLOCKS), {"accumulate_grad_batches": 2}),
    ],
    ids=lambda value: getattr(value, "__name__", None) or (value.title() if hasattr(value, "title") else ""),
)
def test_gradients_are_the_whole_batchs(make: Any, under: Any, options: dict[str, Any]) -> None:
    assert_same(make, numbers(27), under, **options)


def test_a_parameter_without_hooks_costs_a_step_no_call() -> None:
    def calls(count: int) -> int:
        parameters, seen = [torch.nn.Parameter(torch.zeros(1)) for _ in range(count)], list[Any]()
        sys.setprofile(lambda frame, event, _: seen.append(frame) if event == "call" else None)
        try:
            GradientHooks(parameters)
        finally:
            sys.setprofile(None)
        return len(seen)

    assert calls(100) == calls(1)


def test_trained_parameters_are_found_without_a_call_of_modules_code() -> None:
    """Each step looks for them; torch's own walk makes a name for each module on each level."""
    network = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)) for _ in range(4)))
    network[1][0].weight = network[0][0].weight
    network[2][0].bias.requires_grad_(False)
    network[3].of = network[0]
    network[0][0].register_parameter("none", None)
    network.absent = None
    seen: list[Any] = []
    sys.setprofile(lambda frame, event, _: seen.append(frame.f_code.co_name) if event == "call" else None)
    try:
        found = list(trained(network))
    finally:
        sys.setprofile(None)
    assert set(seen) == {"trained"}
    assert len(found) == len({*map(id, found)}) == 14
    assert {*map(id, found)} == {id(each) for each in network.parameters() if each.requires_grad}
