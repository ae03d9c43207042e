"""The traced step says what code does with parameters by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

from lightning_autopar.memory.footprint import Conduct
from lightning_autopar.memory.trace.first_batch import FirstBatch
from lightning_autopar.memory.trace.trace import trace
from lightning_autopar.planning.block_units import shardable
from lightning_autopar.strategies.pipeline.rehearsal.stage_probe import unstaged
from tests.strategies.fitted import BLOCKS, Fitted
from tests.strategies.written import Averaged, Exchanging, FollowedByHook, InPlace, Normed, Penalised, Sharing, Spectral, Tying


def seen(module: Any) -> Conduct:
    footprint = trace(module, None, FirstBatch(batch=(torch.ones(8, 8), torch.ones(8, 1)), batch_size=8))
    assert footprint.traced
    assert footprint.conduct is not None
    return footprint.conduct


class Logging(Fitted):
    """Looks at weights, gradients and the optimizer's state without mixing them with anything; that works on shards."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.add_(parameter, alpha=0.01)
            self.log("size", parameter.norm() * 0.5)


class Hidden(Fitted):
    """Averages into a network that isn't a part of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [Fitted().net.requires_grad_(False)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            for target, online in zip(self.hidden[0].parameters(), self.net.parameters(), strict=True):
                target.lerp_(online, 0.1)
        return super().training_step(batch, batch_idx)


def units(module: Any) -> tuple[str, ...]:
    footprint = trace(module, None, FirstBatch(batch=(torch.ones(8, 8), torch.ones(8, 1)), batch_size=8))
    return shardable(footprint, None)[0]


@pytest.mark.parametrize("make", [Fitted, Logging, Normed])
def test_what_engines_that_take_modules_apart_can_do_leaves_units_as_they_are(make: Callable[[], Any]) -> None:
    assert not any(others for _, others in seen(make()).together)
    assert units(make()) == BLOCKS


class Once(Exchanging):
    """Calls each of its networks once, so that the blocks of both are units."""

    def loss(self, batch: Any) -> Any:
        return mse_loss(self.net(batch[0]), self.target(batch[0]) + batch[1])


def test_networks_of_alike_blocks_that_follow_each_other_are_sharded_alike() -> None:
    assert set(units(Once())) == {*BLOCKS, *(name.replace("net", "target") for name in BLOCKS)}
    assert (("net.1", "target.1"), False) in seen(Once()).together


@pytest.mark.parametrize("make", [Exchanging, InPlace])
def test_blocks_that_follow_what_is_no_unit_are_none_either(make: Callable[[], Any]) -> None:
    assert units(make()) == ()  # the network that learns is called twice


@pytest.mark.parametrize(("make", "left"), [(Penalised, ()), (Hidden, ()), (Spectral, (BLOCKS[0], BLOCKS[2])), (Averaged, ())])
def test_blocks_whose_parameters_are_used_elsewhere_are_no_units(make: Callable[[], Any], left: tuple[str, ...]) -> None:
    assert units(make()) == left


def test_a_hook_that_mixes_a_parameter_with_a_buffer() -> None:
    assert seen(FollowedByHook()) == Conduct(mixed=("net.0.weight", "on_train_batch_end"))


def test_parameters_that_are_exchanged_or_shared() -> None:
    assert seen(Tying()) == Conduct(exchanged=("other.weight",))
    assert seen(Sharing()) == Conduct(written=(("other.weight", "training_step"),), shared=("other.weight",))


def test_parameters_that_are_written_to() -> None:
    assert seen(Fitted()).written == ()
    assert set(dict(seen(Normed()).written)) == {name for name, _ in Normed().named_parameters()}
    for make in (Exchanging, InPlace):
        assert set(dict(seen(make()).written)) == {name for name, _ in make().named_parameters() if name.startswith("target")}


class Failing(Fitted):
    def on_after_backward(self) -> None:
        raise LookupError("there is no such thing in a rehearsal")


class Unlooking(Fitted):
    """Hooks that stand there, as a package's base class has them, and look at nothing yet."""

    def on_after_backward(self) -> None:
        if self.global_step >= 3:
            self.log("gradient", self.net[0].weight.grad.norm())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("size", sum(parameter.norm() for parameter in self.parameters() if parameter.requires_grad))


def test_hooks_that_look_at_gradients() -> None:
    assert seen(Logging()).looked == (("on_before_optimizer_step", "net.0.weight"),)
    assert seen(Failing()).looked == (("on_after_backward", None),)
    assert seen(Unlooking()).looked == ()


def test_stages_that_cannot_be_tried_are_taken_where_nothing_is_written() -> None:
    assert unstaged(seen(Fitted()), "it is too long") is None
    written, untraced = "it writes to the parameter 'target.0.weight' by itself", "it couldn't be traced either"
    for conduct, words in ((seen(InPlace()), written), (None, untraced)):
        assert f"it is too long, and {words}" in str(unstaged(conduct, "it is too long"))
