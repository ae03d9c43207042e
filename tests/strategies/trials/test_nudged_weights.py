"""Weights away from where they start, and a loss whose second term is zero there."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_autopar.strategies.trials import nudged_weights
from lightning_autopar.strategies.trials.nudged_weights import nudged
from lightning_autopar.strategies.trials.split_probe import probe_split
from tests.strategies.trials.test_split_probe import Base, first_of, samples


class Follows(Base):
    """A sum over samples and a mean; the mean is zero as long as the second network is a copy of the first."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.follower = copy.deepcopy(self.layer).requires_grad_(False)

    def loss(self, x: Tensor) -> Tensor:
        given = self.layer(x)
        return given.square().sum() + (given - self.follower(x)).square().mean()


class Bounded(Base):
    """Has no loss where a weight leaves the range from 0 to 1, at whose ends they start."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.low, self.high = nn.Parameter(torch.zeros(50)), nn.Parameter(torch.ones(50))

    def loss(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean() * (1 + self.low.sqrt().sum() + (1 - self.high).sqrt().sum())


class Fits(Base):
    """Takes no other weights than its own."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sum = float(self.layer.weight.detach().sum())

    def loss(self, x: Tensor) -> Tensor:
        if float(self.layer.weight.detach().sum()) != self.sum:
            raise RuntimeError("these are other weights")
        return self.layer(x).square().mean()


def test_every_parameter_moves_and_comes_back() -> None:
    module = nn.Module()
    module.layer, module.frozen = nn.Linear(300, 200), nn.Embedding(5, 3).requires_grad_(False)
    module.gate, module.halves = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    module.none, module.index = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.arange(3), requires_grad=False)
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    with nudged(module):
        moved = {name for name, tensor in module.state_dict().items() if not torch.equal(tensor, before[name])}
        assert not any((tensor < 0).any() for tensor in (module.gate, module.halves))
        module.double()
    module.float()
    assert moved == {"layer.weight", "layer.bias", "frozen.weight", "gate", "halves"}
    assert all(torch.equal(tensor, before[name].to(tensor.dtype)) for name, tensor in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_term_that_is_zero_at_the_first_weights_is_seen() -> None:
    finding, _ = probe_split(Follows(), None, first_of(samples()))
    assert finding.difference > 1e-5
    followed = Follows()
    nn.init.normal_(followed.follower.weight)
    assert probe_split(followed, None, first_of(samples()))[0].difference > 1e-5


def test_a_step_that_only_its_own_weights_fit_is_tried_with_them() -> None:
    for module in (Fits(), Bounded()):
        finding, _ = probe_split(module, None, first_of(samples()))
        assert finding.probed
        assert finding.difference <= 1e-5


class Solves(Base):
    """Halves its step until the error is small; of NaN it never is. It gives up long after the test has ended."""

    def loss(self, x: Tensor) -> Tensor:
        for halved in itertools.count() if x.isnan().any() else range(40):
            if halved > 10_000_000 or (x * 0.5**halved).square().mean() < 1e-3:
                break
        return self.layer(x).square().mean()


def test_a_solver_that_never_ends_with_an_entry_that_was_put_into_the_batch_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nudged_weights, "LEAST_SECONDS", 0.1)
    finding, _ = probe_split(Solves(), None, first_of(samples()))
    assert finding.probed
    assert finding.difference <= 1e-5
    assert any("with other entries (a mask's zeros, NaN, other labels)" in note for note in finding.notes), finding.notes
