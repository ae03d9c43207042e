from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_autopar.exact.step.recompute import recomputed


class Counts(nn.Module):
    """Moves a buffer of its own in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mask", torch.eye(8))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.calls += 1
        return self.linear(x) @ self.mask * scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.GELU()), Counts()])
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x), scale=2.0)


def step(net: Net) -> dict[str, Tensor]:
    torch.manual_seed(1)
    net.zero_grad()
    x = torch.randn(16, 8)
    net(x).square().mean().backward()
    return {name: parameter.grad.clone() for name, parameter in net.named_parameters() if parameter.grad is not None} | {
        f"buffer {name}": buffer.clone() for name, buffer in net.named_buffers()
    }


BLOCKS = ("blocks.0", "blocks.1")


def test_gradients_and_buffers_are_the_same_to_the_bit() -> None:
    plain, recomputing = Net(), Net()
    recomputing.load_state_dict(plain.state_dict())
    keys = list(recomputing.state_dict())
    with recomputed(recomputing, BLOCKS):
        assert list(recomputing.state_dict()) == keys
        for _ in range(2):
            expected, found = step(plain), step(recomputing)
            assert expected.keys() == found.keys()
            for name, value in expected.items():
                assert torch.equal(found[name], value), name
    assert found["buffer blocks.1.calls"] == 2


class Decays(nn.Module):
    """What it gives depends on a buffer that each forward moves, in place or by another one."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.linear, self.in_place = nn.Linear(8, 8), in_place
        self.register_buffer("level", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            level = x.detach().abs().mean(0)
            if self.in_place:
                self.level.mul_(0.5).add_(level)
            else:
                self.level = self.level * 0.5 + level
        return torch.tanh(self.linear(x)) * self.level.clone()


@pytest.mark.parametrize("in_place", [True, False])
def test_backward_finds_buffers_as_forward_did(in_place: bool) -> None:
    """Under a pipeline other micro-batches run between the two."""
    torch.manual_seed(0)
    net, batches = nn.Sequential(nn.Linear(8, 8), Decays(in_place)), torch.randn(3, 4, 8)

    def gradients(names: tuple[str, ...]) -> list[Tensor]:
        net.zero_grad()
        net[1].level = torch.ones(8)
        with recomputed(net, names):
            for _ in range(2):
                losses = [net(batch).square().sum() for batch in batches]
                for loss in losses:
                    loss.backward()
        return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None] + [net[1].level]

    for found, expected in zip(gradients(("1",)), gradients(()), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_forward_runs_twice_in_training_and_once_without_gradients() -> None:
    net, calls = Net(), []
    net.blocks[0][0].register_forward_hook(lambda *_: calls.append(1))
    with recomputed(net, BLOCKS):
        step(net)
        assert len(calls) == 2
        with torch.no_grad():
            net(torch.randn(4, 8))
        assert len(calls) == 3
    step(net)
    assert len(calls) == 4


def test_forward_is_as_before_afterwards() -> None:
    net = Net()
    users = lambda x, *, scale: x  # noqa: E731
    net.blocks[1].forward = users
    with pytest.raises(RuntimeError, match="inside"), recomputed(net, BLOCKS):
        raise RuntimeError("inside")
    assert "forward" not in vars(net.blocks[0])
    assert vars(net.blocks[1])["forward"] is users


def test_a_copy_made_meanwhile_runs_on_its_own_weights() -> None:
    net = Net().eval()
    with recomputed(net, BLOCKS):
        twin = copy.deepcopy(net)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        assert twin(torch.randn(4, 8)).abs().sum() == 0


@pytest.mark.parametrize("fqn", ["blocks.7", "blocks.0.nothing", "head"])
def test_a_missing_block_is_named(fqn: str) -> None:
    with pytest.raises(ValueError, match=rf"'{fqn}', but the module has no such block; plan again"), recomputed(Net(), (fqn,)):
        pass
