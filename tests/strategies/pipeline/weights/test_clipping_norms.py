"""Norms over all stages: the number that one device gives, on every rank; and an error for whoever reads a gradient that isn't there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from lightning_autopar.exact.absent.absent_tensor import MissingValue, is_absent
from lightning_autopar.strategies.pipeline.weights.clipping_norms import StageGradients
from tests.ranks import run_ranks
from tests.strategies.pipeline.by_hand import KEPT, hollow, net, pipeline


def backward(module: Any, scale: float = 1.0) -> None:
    tokens = torch.tensor([0, 3, 3, 7, 9])
    (scale * nn.functional.cross_entropy(module(tokens), tokens)).backward()


def staged(rank: int, scale: float = 1.0, optimizer: Any = None) -> tuple[Any, StageGradients]:
    """A module in stages with one device's gradients."""
    whole, module = net(), net()
    backward(whole, scale)
    hollow(module, KEPT[rank])
    gradients = StageGradients(module, pipeline(), [] if optimizer is None else [optimizer(module)])
    for (_, parameter), (_, other) in zip(module.named_parameters(), whole.named_parameters(), strict=True):
        if not is_absent(parameter):
            parameter.grad = other.grad
    gradients.show()
    return module, gradients


def own(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.grad for name, each in module.named_parameters() if not is_absent(each) and each.grad is not None}


WAYS: dict[str, Any] = {
    "clip": lambda module: clip_grad_norm_(module.parameters(), 0.1),
    "clip by attribute": lambda module: torch.nn.utils.clip_grad_norm_(list(module.parameters()), 0.1, foreach=False),
    "clip foreach": lambda module: clip_grad_norm_(module.parameters(), 0.1, foreach=True),
    "inf": lambda module: clip_grad_norm_(module.parameters(), 0.01, norm_type=float("inf"), error_if_nonfinite=True),
    "one-norm": lambda module: clip_grad_norm_(module.parameters(), 0.1, 1),
    "one block": lambda module: clip_grad_norm_(module.blocks[1].parameters(), 0.01),
    "one parameter": lambda module: clip_grad_norm_(module.head.weight, 0.01),
    "what has none": lambda module: clip_grad_norm_([module.unused], 1.0),
    "total": lambda module: get_total_norm([each.grad for each in module.parameters() if each.grad is not None]),
    "in two": lambda module: clip_grads_with_norm_(module.parameters(), 0.1, get_total_norm([module.scale.grad, module.head.weight.grad])),
    "by value": lambda module: clip_grad_value_(module.parameters(), 0.01),
    "lightning": lambda module: grad_norm(module, 2),
    "lightning, part": lambda module: grad_norm(module.blocks, "inf", "."),
}


def asked(rank: int, world_size: int, ways: list[str]) -> Any:
    results = []
    for way in ways:
        module, gradients = staged(rank)
        results.append((WAYS[way](module), own(module)))
        gradients.close()
    return results


def test_norms_are_one_devices() -> None:
    ranks = run_ranks(asked, 3, list(WAYS))
    for number, way in enumerate(WAYS):
        module = net()
        backward(module)
        expected = WAYS[way](module)
        for results in ranks:
            norm, gradients = results[number]
            torch.testing.assert_close(norm, expected, rtol=0, atol=0, msg=lambda text, way=way: f"{way}: {text}")
            assert gradients
            for name, gradient in gradients.items():
                assert torch.equal(gradient, module.get_parameter(name).grad), (way, name)


def totals(rank: int, world_size: int, scales: list[float], late: bool) -> list[Any]:
    """Totals of gradients that were found and of parameters, with an unused parameter among them that only one rank has."""
    found = []
    for scale in scales:
        module, gradients = staged(rank, scale)
        if late:
            clip_grad_norm_(module.parameters(), 1e9)
            if not is_absent(module.unused):
                module.unused.grad = torch.full((3,), scale)
        found += [clip_grad_norm_(module.parameters(), 1e9), WAYS["total"](module)]
        gradients.close()
    return found


@pytest.mark.parametrize("late", [False, True])
def test_a_parameter_without_a_gradient_leaves_the_total_as_it_is_and_counts_later(late: bool) -> None:
    scales = [0.1 * number for number in range(1, 41)]
    expected = []
    for scale in scales:
        module = net()
        backward(module, scale)
        if late:
            module.unused.grad = torch.full((3,), scale)
        expected += [clip_grad_norm_(module.parameters(), 1e9), WAYS["total"](module)]
    for found in run_ranks(totals, 3, scales, late):
        # A late one may change the last bit: the frozen ones' norms, 0 each, are among the numbers then.
        torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=3e-7 if late else 0, atol=0)


def refused(rank: int, world_size: int) -> list[str]:
    module, gradients = staged(rank, float("inf"))
    found = []
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(module.parameters(), 1.0, error_if_nonfinite=True)
    assert not clip_grad_norm_(module.parameters(), 1.0).isfinite()
    gradients.close()
    module, gradients = staged(rank)
    for ask in (
        lambda: float(torch.stack([each.grad.norm() for each in module.parameters() if each.grad is not None]).norm()),
        lambda: sum(each.grad.pow(2).sum().item() for each in module.parameters() if each.grad is not None),
        lambda: get_total_norm([each.grad.detach() for each in module.parameters() if each.grad is not None]),
        lambda: get_total_norm([module.scale.grad, torch.ones(3)]),
        lambda: clip_grad_norm_([module.scale, nn.Parameter(torch.ones(3))], 1.0),
    ):
        with pytest.raises(MissingValue) as caught:
            ask()
        found.append(str(caught.value))
    ours = [module.blocks[1][0].weight, module.scale] if rank == 2 else [module.blocks[1][0].weight]
    with pytest.raises(RuntimeError, match="'scale' was asked for on 1 of 3 ranks"):
        clip_grad_norm_(ours, 1.0)
    assert float(get_total_norm([torch.ones(4)])) == 2.0, "of other tensors it is torch's own"
    assert float(clip_grad_norm_([nn.Parameter(torch.ones(4))], 1.0)) == 0.0
    gradients.close()
    return found


def test_a_norm_of_a_part_is_an_error() -> None:
    for found in run_ranks(refused, 3):
        assert "the gradient of the parameter" in found[0] + found[1]
        assert all("the gradient of the parameter" in words or "other tensors" in words for words in found)


def stepped(rank: int, world_size: int, closure: bool) -> list[bool]:
    made: list[Any] = []

    def optimizer_of(module: Any) -> Any:
        made.append(torch.optim.SGD(module.parameters(), 0.1, momentum=0.9))
        return made[0]

    module, gradients = staged(rank, optimizer=optimizer_of)
    optimizer = made[0]
    absent_tensors = [each for each in module.parameters() if is_absent(each) and each.requires_grad]
    seen = [all(is_absent(each.grad) for each in absent_tensors)]
    if closure:

        def clip() -> float:
            seen.append(all(is_absent(each.grad) for each in absent_tensors))
            return float(clip_grad_norm_(module.parameters(), 0.1))

        assert optimizer.step(clip) > 0.1
    else:
        clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
    seen.append(all(is_absent(each.grad) for each in absent_tensors))
    with gradients.hidden():
        seen.append(all(each.grad is None for each in absent_tensors))
    optimizer.zero_grad()
    seen.append(all(each.grad is None for each in module.parameters()))
    whole = net()
    backward(whole)
    clip_grad_norm_(whole.parameters(), 0.1)
    torch.optim.SGD(whole.parameters(), 0.1, momentum=0.9).step()
    for name, parameter in module.named_parameters():
        if not is_absent(parameter):
            assert torch.equal(parameter, whole.get_parameter(name)), name
    gradients.close()
    return seen


@pytest.mark.parametrize("closure", [False, True])
def test_optimizers_pass_over_holes_and_hooks_find_them(closure: bool) -> None:
    assert run_ranks(stepped, 3, closure) == [[True] * (5 if closure else 4)] * 3


def scaled(rank: int, world_size: int) -> str:
    made: list[Any] = []

    def optimizer_of(module: Any) -> Any:
        made.append(torch.optim.SGD(module.parameters(), 0.1))
        return made[0]

    module, gradients = staged(rank, optimizer=optimizer_of)
    factor = module.blocks[1][0].weight.grad.norm() * module.blocks[2][0].weight.grad.norm()
    assert is_absent(factor)
    before = module.scale.detach().clone()

    def scale_and_step() -> None:
        for each in module.parameters():
            if each.grad is not None:
                each.grad.mul_(factor)
        made[0].step()

    with pytest.raises(MissingValue) as caught:
        scale_and_step()
    assert torch.equal(module.scale, before)
    gradients.close()
    return str(caught.value)


def test_gradients_scaled_by_what_isnt_there_are_no_step() -> None:
    for words in run_ranks(scaled, 3):
        assert "blocks.1" in words or "blocks.2" in words or "another stage" in words


def test_everything_is_as_before_afterwards() -> None:
    assert run_ranks(left, 3) == [True] * 3


def left(rank: int, world_size: int) -> bool:
    codes = [each.__code__ for each in (grad_norm, clip_grad_norm_.__wrapped__, get_total_norm.__wrapped__)]
    _, gradients = staged(rank)
    changed = [each.__code__ for each in (grad_norm, clip_grad_norm_.__wrapped__, get_total_norm.__wrapped__)]
    gradients.close()
    after = [each.__code__ for each in (grad_norm, clip_grad_norm_.__wrapped__, get_total_norm.__wrapped__)]
    return after == codes and all(one is not other for one, other in zip(codes, changed, strict=True))


def moved(rank: int, world_size: int) -> list[str]:
    """As after a fit that ended with gradients, on GPUs."""
    module = net()
    hollow(module, KEPT[rank], device=torch.device("cuda", 0))
    gradients = StageGradients(module, pipeline())
    gradients.show()
    assert any(parameter.grad is not None for parameter in module.parameters())
    gradients.close()
    module.cpu()
    return sorted({parameter.device.type for parameter in module.parameters()})


def test_a_module_can_be_moved_when_the_run_is_over() -> None:
    assert run_ranks(moved, 3) == [["cpu"]] * 3
