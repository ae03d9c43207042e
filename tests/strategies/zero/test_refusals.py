"""What ZeRO can't keep the promise for: each by a sentence, and nothing of the ordinary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint, RichProgressBar, StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from lightning_autopar._lightning_compat import TrainerFn
from lightning_autopar.memory.footprint import Conduct
from lightning_autopar.memory.trace.parameter_use import GRADIENT_HOOKS
from lightning_autopar.strategies.base.host_optimizers import ELEMENTWISE
from lightning_autopar.strategies.preparation.trainer_options import exclusions
from lightning_autopar.strategies.zero.refusals import unpartitioned_module, unpartitioned_optimizer, unseen_gradients
from tests.strategies.modules import Regression


def sentence(module: LightningModule | None = None, **arguments: Any) -> str | None:
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_model_summary=False, **arguments)
    trainer.strategy._lightning_module = Regression() if module is None else module
    trainer.state.fn = TrainerFn.FITTING
    return exclusions(trainer).get("zero")


def overriding(name: str) -> LightningModule:
    """A module with one hook more."""

    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(kind, self), name)(*args, **kwargs)

    kind: Any = type("Hooked", (Regression,), {name: hook})
    module: LightningModule = kind()
    return module


class Watches(Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pass


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"callbacks": [ModelCheckpoint()]},
        {"callbacks": [RichProgressBar()]},
        {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2},
        {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
    ],
)
def test_the_ordinary_is_not_refused(arguments: dict[str, Any]) -> None:
    assert sentence(**arguments) is None


class Own(MixedPrecision):
    pass


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"precision": "64-true"}, "precision '64-true' isn't plain Lightning's"),
        ({"precision": "16-true"}, "precision '16-true' isn't plain Lightning's"),
        ({"plugins": [Own("bf16-mixed", "cpu")]}, "the precision plugin Own"),
        ({"callbacks": [StochasticWeightAveraging(0.1)]}, "StochasticWeightAveraging works on whole parameters"),
        ({"callbacks": [GradientAccumulationScheduler({1: 2})]}, "refuses the callback GradientAccumulationScheduler"),
        ({"callbacks": [Watches()]}, "the callback Watches has on_before_optimizer_step"),
    ],
)
def test_what_of_a_trainer_is_refused(arguments: dict[str, Any], words: str) -> None:
    assert words in (sentence(**arguments) or "")


@pytest.mark.parametrize("name", ["configure_gradient_clipping", "backward", "optimizer_step", "optimizer_zero_grad"])
def test_a_modules_hooks_on_gradients_are_refused(name: str) -> None:
    found = sentence(overriding(name)) or ""
    assert found.startswith(f"the module overrides {name}, and ")
    assert "DeepSpeed" in found


@pytest.mark.parametrize("name", GRADIENT_HOOKS)
def test_a_modules_hooks_that_may_look_at_gradients_are_refused_where_they_do_or_nobody_knows(name: str) -> None:
    module = overriding(name)
    assert sentence(module) is None
    assert unseen_gradients(module, Conduct()) is None
    assert f"the module's {name} looks at the gradient of 'net.0.weight'" in (
        unseen_gradients(module, Conduct(looked=((name, "net.0.weight"),))) or ""
    )
    for untold in (None, Conduct(looked=((name, None),))):
        assert f"the module overrides {name}, and whether it looks at gradients isn't known" in (unseen_gradients(module, untold) or "")
    assert unseen_gradients(Regression(), None) is None


def hooked() -> nn.Module:
    module = nn.Linear(2, 2)
    module.weight.register_hook(lambda gradient: gradient)
    return module


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: nn.Linear(2, 2).double(), "'weight' is float64"),
        (lambda: nn.Linear(2, 2, dtype=torch.complex64), "'weight' is complex64"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()), "'1.weight' is bfloat16, and at precision '32-true'"),
        (lambda: nn.Embedding(3, 2, sparse=True), "sparse gradients"),
        (lambda: nn.LazyLinear(2), "gets its shape in the first step"),
        (lambda: torch.compile(nn.Linear(2, 2), backend="eager"), "is compiled"),
        (hooked, "'weight' has a hook of its own"),
    ],
)
def test_what_of_a_module_is_refused(build: Callable[[], nn.Module], words: str) -> None:
    assert words in (unpartitioned_module(build(), "32-true") or "")


def test_a_frozen_table_has_no_gradients() -> None:
    assert unpartitioned_module(nn.Embedding(3, 2, sparse=True).requires_grad_(False), "32-true") is None


def test_true_16_bits_make_one_dtype_of_all_parameters() -> None:
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    assert unpartitioned_module(mixed, "bf16-true") is None
    assert unpartitioned_module(nn.Linear(2, 2), "32-true") is None


class Mine(torch.optim.AdamW):
    pass


def watched(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (torch.optim.LBFGS, "torch.optim.lbfgs.LBFGS isn't known to step each element by itself"),
        (torch.optim.Adafactor, "Adafactor isn't known"),
        (Mine, "Mine isn't known"),
        (watched, "has hooks of its own around its step"),
        (lambda parameters: torch.optim.Adam(parameters, differentiable=True), "is differentiable"),
        (lambda parameters: torch.optim.SGD([*parameters, nn.Parameter(torch.ones(1))]), "has parameters that aren't the module's"),
    ],
)
def test_what_of_an_optimizer_is_refused(build: Callable[[Any], torch.optim.Optimizer], words: str) -> None:
    module = Regression()
    assert words in (unpartitioned_optimizer(module, [build(list(module.parameters()))]) or "")


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_a_part_of_a_parameter_steps_as_the_whole_does(kind: Callable[..., torch.optim.Optimizer]) -> None:
    """What the refusals rest on: the optimizers that aren't refused treat each element by itself."""
    torch.manual_seed(0)
    whole = nn.Parameter(torch.randn(6, 4))
    parts = [nn.Parameter(part.clone()) for part in whole.detach().flatten().split(9)]
    optimizers = [kind([whole]), kind(parts)]
    for _ in range(4):
        whole.grad = torch.randn(6, 4)
        for part, gradient in zip(parts, whole.grad.flatten().split(9), strict=True):
            part.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(torch.cat([part.detach() for part in parts]), whole.detach().flatten(), rtol=1e-6, atol=1e-6)
