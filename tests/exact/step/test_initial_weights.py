"""Draws of a module that is built in host memory: the device's numbers, and its generator goes on from them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, nn

from lightning_autopar.exact.step.initial_weights import drawn_on, random_states, set_random_states
from tests.fresh import fresh

CPU = torch.device("cpu")


def build() -> list[Tensor]:
    """What a module's weights are drawn by: in place, from nothing, by another tensor, and by torch's own layers."""
    layers = nn.Sequential(nn.Linear(5, 7), nn.Embedding(3, 4), nn.MultiheadAttention(8, 2))
    orders = [torch.randperm(9), torch.randint(4, (6,))]
    others = [torch.randn(3, 2), torch.rand(4, 3).t(), torch.bernoulli(torch.full((6,), 0.5)), torch.normal(0.0, 1.0, (3,))]
    return [*(parameter.detach() for parameter in layers.parameters()), *orders, *others, nn.init.trunc_normal_(torch.empty(4, 2).t())]


def test_on_a_cpu_device_nothing_changes() -> None:
    torch.manual_seed(5)
    expected = build()
    torch.manual_seed(5)
    with drawn_on(CPU):
        found = build()
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_another_ranks_draws_go_on() -> None:
    torch.manual_seed(5)
    states = random_states(CPU)
    expected = torch.rand(3)
    set_random_states(states, CPU)
    assert torch.equal(torch.rand(3), expected)


def on_the_device() -> tuple[list[Tensor], list[Tensor]]:
    return _built(lambda: torch.device("cuda"))


def in_host_memory() -> tuple[list[Tensor], list[Tensor]]:
    found = _built(lambda: drawn_on(torch.device("cuda", 0)))
    assert {tensor.device for tensor in found[0]} == {CPU}
    return found


def _built(inside: Callable[[], AbstractContextManager[object]]) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(5)
    with inside():
        found = build()
    states = random_states(torch.device("cuda", 0))
    set_random_states(states, torch.device("cuda", 0))
    assert torch.equal(random_states(torch.device("cuda", 0))[1], states[1])
    return [tensor.cpu() for tensor in found], states


@pytest.mark.gpu
def test_the_devices_numbers_are_drawn() -> None:
    expected, states_expected = fresh(on_the_device)
    found, states = fresh(in_host_memory)
    for mine, devices in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, devices, rtol=0, atol=1e-6)
    assert all(torch.equal(*pair) for pair in zip(states, states_expected, strict=True))


def own_generator() -> list[Tensor]:
    with drawn_on(torch.device("cuda", 0)):
        return [
            torch.rand(3, generator=torch.Generator().manual_seed(2)),
            torch.empty(3).normal_(generator=torch.Generator().manual_seed(2)),
        ]


@pytest.mark.gpu
def test_a_generator_of_the_users_own_is_used() -> None:
    first, second = fresh(own_generator)
    assert torch.equal(first, torch.rand(3, generator=torch.Generator().manual_seed(2)))
    assert torch.equal(second, torch.empty(3).normal_(generator=torch.Generator().manual_seed(2)))
