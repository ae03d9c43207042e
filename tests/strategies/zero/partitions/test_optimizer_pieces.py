"""The user's optimizer on fragments of its parameters, without DeepSpeed, against the same optimizer on the parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_autopar.state.flat_parts import NUMBERS
from lightning_autopar.strategies.base.host_optimizers import ELEMENTWISE
from lightning_autopar.strategies.zero.partitions.optimizer_pieces import Edits, OptimizerBridge

#: Where this rank's part begins and ends, in the flat tensor of all parameters.
PART = slice(5, 17)


def _parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in ((2, 4), (3,), (), (2, 5))]


def _partition(parameters: list[nn.Parameter]) -> tuple[Tensor, list[tuple[nn.Parameter, int, int, int]]]:
    """As ``zero_deepspeed.partitions`` gives it."""
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    found, start = [], 0
    for parameter in parameters:
        begin, end = max(PART.start - start, 0), min(PART.stop - start, parameter.numel())
        begin = min(begin, parameter.numel())
        place = max(start - PART.start, 0)
        found.append((parameter, place, place + max(0, end - begin), begin))
        start += parameter.numel()
    return flat[PART].clone(), found


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_a_fragment_is_stepped_like_its_parameter(kind: Any) -> None:
    whole = _parameters()
    expected = kind(whole, lr=0.1)
    own = copy.deepcopy(whole)
    users = kind(own, lr=0.1)
    relay = OptimizerBridge(users)
    flat, found = _partition(own)
    relay.attach([(0, flat, found)])
    relay.param_groups[0]["params"] = [flat]
    for step in range(4):
        gradients = [torch.randn(parameter.shape) for parameter in whole]
        without = step % 2  # one parameter in turn has none
        for number, (parameter, gradient) in enumerate(zip(whole, gradients, strict=True)):
            parameter.grad = None if number == without else gradient
        expected.step()
        flat.grad = torch.cat([gradient.flatten() for gradient in gradients])[PART]
        relay.used = {id(parameter) for number, parameter in enumerate(own) if number != without}
        relay.step()
    for piece, parameter in zip(relay.pieces[0], whole, strict=True):
        torch.testing.assert_close(piece.fragment.detach(), piece.cut(parameter.detach()))
        for name, value in users.state[piece.fragment].items():
            theirs = expected.state[parameter][name]
            same_shape = theirs.shape == parameter.shape and name not in NUMBERS
            torch.testing.assert_close(value, piece.cut(theirs) if same_shape else theirs)
    assert [piece.fragment.numel() for piece in relay.pieces[0]] == [3, 3, 1, 5]
    assert users.param_groups[0]["params"] == [piece.fragment for piece in relay.pieces[0]]


def test_groups_without_anything_trained_are_not_deepspeeds() -> None:
    first, second = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.ones(2))
    users = torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=1.0)
    relay = OptimizerBridge(users)
    assert [group["params"] for group in relay.param_groups] == [[second]]
    flat = second.detach().clone()
    relay.attach([(0, flat, [(second, 0, 2, 0)])])
    relay.param_groups[0]["params"] = [flat]
    flat.grad, relay.used = torch.ones(2), {id(second)}
    users.param_groups[1]["lr"] = 0.25  # as a scheduler does
    relay.step()
    assert flat.tolist() == [0.75, 0.75]
    assert users.param_groups[0]["params"] == [first]
    users.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(ValueError, match="was given a group of parameters during the run"):
        relay.step()


def test_copies_follow_what_is_written_between_steps() -> None:
    own = torch.arange(4.0)
    stepped = own.clone()
    edits = Edits([(stepped, own)], [])
    own[1] = 7
    edits.take_over()
    assert stepped.tolist() == [0, 7, 2, 3]
