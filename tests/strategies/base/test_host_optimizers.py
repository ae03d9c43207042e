from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import ASGD, LBFGS, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from lightning_autopar.strategies.base.host_optimizers import ELEMENTWISE, FUSED, on_host, why_not

CASES: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (Adam, {}),
    (Adam, {"weight_decay": 0.1, "amsgrad": True}),
    (Adam, {"betas": (0.8, 0.95), "eps": 1e-6, "maximize": True}),
    (Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (AdamW, {"weight_decay": 0.1}),
    (AdamW, {"amsgrad": True, "maximize": True}),
    (AdamW, {"lr": torch.tensor(0.01)}),
    (AdamW, {"foreach": True}),
    (AdamW, {"fused": False}),
    (SGD, {}),
    (SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    (SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    (Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1}),
    (RMSprop, {"momentum": 0.9, "centered": True}),
    (NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    (RAdam, {"weight_decay": 0.1}),
    (Adamax, {}),
    (Adadelta, {}),
    (ASGD, {"t0": 1}),
    (Rprop, {}),
]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Of lengths that vector units divide, and that they don't."""
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(size, dtype=dtype)) for size in (64, 3001, 37, 1)]


def train(weights: list[nn.Parameter], optimizer: Optimizer, steps: int = 12) -> None:
    """Steps on one stream of gradients, with a schedule, and a parameter that now and then has no gradient, as in the first step."""
    generator = torch.Generator().manual_seed(2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    for step in range(steps):
        for weight in weights:
            gradient = torch.randn(weight.shape, generator=generator).to(weight.dtype)
            weight.grad = None if weight.numel() == 37 and step % 3 == 0 else gradient
        optimizer.step()
        schedule.step()


def test_a_step_goes_by_the_gradients_that_its_closure_makes() -> None:
    """As under Lightning: before the closure a parameter's gradient is the last step's, or none."""
    results = []
    for prepare in (on_host, lambda optimizer: optimizer):
        weights = parameters()
        optimizer = prepare(SGD(weights, lr=0.1, momentum=0.9))
        for step in range(4):

            def closure(step: int = step, weights: list[nn.Parameter] = weights, optimizer: Optimizer = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                used = weights if step % 2 else weights[:2]
                loss = torch.stack([weight.square().sum() for weight in used]).sum()
                loss.backward()
                return loss

            optimizer.step(closure=closure)
        results.append(torch.cat([weight.detach() for weight in weights]))
    torch.testing.assert_close(results[0], results[1])


def groups(weights: list[nn.Parameter], kind: type[Optimizer]) -> list[dict[str, Any]]:
    """Two groups with options of their own."""
    second: dict[str, Any] = {"params": weights[2:], "lr": 0.003}
    if "betas" in kind([nn.Parameter(torch.zeros(1))]).defaults:
        second["betas"] = (0.7, 0.9)
    return [{"params": weights[:2]}, second]


def tensors(value: Any) -> list[torch.Tensor]:
    return [part for key in sorted(value, key=str) if isinstance(part := value[key], torch.Tensor)]


@pytest.mark.parametrize(("kind", "options"), CASES, ids=lambda value: value.__name__ if isinstance(value, type) else "-".join(value))
def test_a_step_on_the_host_is_the_plain_step(kind: type[Optimizer], options: dict[str, Any]) -> None:
    plain, hosted = parameters(), parameters()
    options = {"lr": 0.01} | options
    expected = kind(groups(plain, kind), **copy.deepcopy(options))
    optimizer = kind(groups(hosted, kind), **copy.deepcopy(options))
    before = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    shared = optimizer.param_groups
    assert on_host(optimizer) is optimizer
    assert on_host(optimizer) is optimizer  # a second time does nothing
    train(plain, expected)
    train(hosted, optimizer)

    for weight, other in zip(plain, hosted, strict=True):
        torch.testing.assert_close(other, weight, rtol=1e-6, atol=1e-6)
        for mine, theirs in zip(tensors(optimizer.state[other]), tensors(expected.state[weight]), strict=True):
            assert mine.dtype == theirs.dtype
            torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=1e-6)
    assert optimizer.param_groups is shared
    for group, was in zip(optimizer.param_groups, before, strict=True):
        after = {name: value for name, value in group.items() if name in was and name != "lr"}
        assert after == {name: value for name, value in was.items() if name != "lr"}


def calls(optimizer: Optimizer, weights: list[nn.Parameter]) -> set[str]:
    """The names of the operations of one step."""
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    with torch.profiler.profile() as profile:
        optimizer.step()
    return {event.name for event in profile.events()}


@pytest.mark.parametrize("kind", FUSED, ids=lambda kind: kind.__name__)
def test_wide_parameters_are_updated_in_one_pass(kind: type[Optimizer]) -> None:
    weights = parameters()
    optimizer = on_host(kind(weights, lr=0.1))
    assert any(name.startswith("aten::_fused_") for name in calls(optimizer, weights))


def test_narrow_parameters_are_rounded_as_the_plain_loop_rounds_them() -> None:
    plain, hosted = parameters(torch.bfloat16), parameters(torch.bfloat16)
    train(plain, AdamW(plain, lr=0.01))
    train(hosted, on_host(AdamW(hosted, lr=0.01)))
    for weight, other in zip(plain, hosted, strict=True):
        assert torch.equal(weight, other)


def test_what_lies_on_the_device_is_left_to_the_user() -> None:
    weights = [nn.Parameter(torch.ones(3, device="meta"))]
    optimizer = on_host(SGD(weights, lr=0.1, foreach=False))
    assert not any(name.startswith("aten::_fused_") for name in calls(optimizer, weights))


def test_capturable_was_meant_for_the_device() -> None:
    weights = parameters()
    optimizer = on_host(NAdam(weights, lr=0.1, capturable=True))
    calls(optimizer, weights)
    assert optimizer.param_groups[0]["capturable"] is True


def test_a_step_that_failed_leaves_the_users_options_after_the_next() -> None:
    weights = parameters()
    optimizer = on_host(AdamW(weights, lr=0.1))

    def fail() -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(fail)
    calls(optimizer, weights)
    assert optimizer.param_groups[0]["fused"] is None
    assert optimizer.param_groups[0]["foreach"] is None


def test_other_optimizers_are_refused() -> None:
    assert all(why_not(kind) is None for kind in ELEMENTWISE)

    class Mine(AdamW):
        """Whose step could be anything."""

    assert "Mine isn't known to update each element by itself" in (why_not(Mine) or "")
    with pytest.raises(ValueError, match=r"torch.optim.lbfgs.LBFGS isn't known .* use one of torch.optim's"):
        on_host(LBFGS(parameters()))
