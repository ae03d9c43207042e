"""How the user's optimizer steps where an engine gives it less than all whole parameters: tried on small stand-ins of them, so that the
module's size doesn't matter.

Torch's optimizers that treat each element by itself need no trial. Knows Lightning modules; nothing of engines, devices or plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autopar._fork import ChildFailed, run_forked
from lightning_autopar._lightning import LightningModule, Trainer
from lightning_autopar._lightning_compat import is_overridden
from lightning_autopar.engines import PASSED, Check, failed, not_made
from lightning_autopar.memory.fakes.fake_copies import as_if_real, drawing_nothing, fake_copy, fake_mode
from lightning_autopar.memory.fakes.shadow_values import ShadowValues
from lightning_autopar.memory.trace.bare_step import BareStep
from lightning_autopar.memory.trace.first_batch import FirstBatch
from lightning_autopar.strategies.base.host_optimizers import ELEMENTWISE
from lightning_autopar.strategies.trials.engine_rehearsal import STEPS, TIMEOUT_SECONDS, Engine, rehearse, rehearsed

#: The most elements of a stand-in's dimension; one more where the parameter's size is odd, so that ranks' shards of it are uneven as well.
_SIZE = 8
#: The most stand-ins of an optimizer: one of each shape in each of its groups.
_STAND_INS = 24
_EQUAL = 1e-5


class StandIns(LightningModule):
    """A module of small parameters, which the user's optimizer updates in place of the large ones. Its loss pulls each somewhere.

    Args:
        optimizer: the user's, of one group or more; its parameters are replaced.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self.optimizer = optimizer
        self.weights = nn.ParameterList()
        self.pulls: list[Tensor] = []
        for group in optimizer.param_groups:
            chosen: dict[tuple[int, ...], nn.Parameter] = {}
            for parameter in group["params"]:
                shape = tuple(min(size, _SIZE + size % 2) for size in parameter.shape)
                if parameter.requires_grad and shape not in chosen and len(self.weights) < _STAND_INS:
                    chosen[shape] = nn.Parameter(torch.randn(shape, generator=random))
                    self.weights.append(chosen[shape])
                    self.pulls.append(torch.randn(shape, generator=random))
            group["params"][:] = chosen.values()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """A loss that is linear in the parameters: it has no least, so that each step's gradients are more than rounding."""
        losses = [(weight * pull).sum() for weight, pull in zip(self.weights, self.pulls, strict=True)]
        return torch.stack(losses).sum() * (1 + batch_idx)

    def configure_optimizers(self) -> Optimizer:
        """The user's."""
        return self.optimizer

    def stepped(self, own: Sequence[int]) -> list[Tensor]:
        """The parameters of these numbers after some steps of an optimizer that has no others; for a forked child, as they change."""
        kept = {id(self.weights[index]) for index in own}
        for group in self.optimizer.param_groups:
            group["params"][:] = [parameter for parameter in group["params"] if id(parameter) in kept]

        def closure(step: int) -> Tensor:
            self.optimizer.zero_grad()
            loss = self.training_step(None, step)
            loss.backward()
            return loss

        for step in range(STEPS):
            self.optimizer.step(partial(closure, step))  # type: ignore[arg-type]  # Lightning's closures return tensors, too
        return [self.weights[index].detach() for index in own]


def stand_ins(module: LightningModule, trainer: Trainer | None) -> list[StandIns]:
    """Of each optimizer that isn't known to treat each element by itself.

    Args:
        module: the user's, set up; meant for a forked child, as it is changed.

    Raises:
        ValueError: if an optimizer holds state before its first step, which says nothing about small parameters.
    """
    if is_overridden("configure_model", module):  # which may build more than a process holds
        mode, shadow = fake_mode(), ShadowValues()
        module = fake_copy(module, mode, shadow)
        with drawing_nothing(), as_if_real(shadow, "cpu"), mode, shadow:
            bare = _built(module, trainer)
    else:
        bare = _built(module, trainer)
    others = [optimizer for optimizer in bare.optimizers if type(optimizer) not in ELEMENTWISE]
    if early := next((optimizer for optimizer in others if optimizer.state), None):
        raise ValueError(f"{type(early).__name__} holds state before its first step")
    return [StandIns(optimizer) for optimizer in others]


def _built(module: LightningModule, trainer: Trainer | None) -> BareStep:
    bare = rehearsed(module, trainer)
    bare.build()
    return bare


def optimizers_run(module: LightningModule, trainer: Trainer | None, engine: Engine) -> Check:
    """Whether an engine steps the stand-ins of each optimizer as one process does; for a process that hasn't run a backward pass.

    Args:
        module: the user's, set up; it stays as it is.
        engine: what to try. Its sentence follows the optimizer's name where the step fails, and ``where`` with ``lost`` where it differs.
    """
    return _forked(_run, module, trainer, engine)


def step_apart(module: LightningModule, trainer: Trainer | None) -> Check:
    """Whether each optimizer steps a parameter as it would if it had no others; otherwise as :func:`optimizers_run`."""
    return _forked(_apart, module, trainer)


def _forked(trial: Callable[..., Check], *args: Any) -> Check:
    try:
        return run_forked(trial, *args, timeout_seconds=2 * TIMEOUT_SECONDS)
    except ChildFailed as error:
        return not_made(f"its optimizer can't be tried on small parameters ({error.reason})")


def _run(module: LightningModule, trainer: Trainer | None, engine: Engine) -> Check:
    for small in stand_ins(module, trainer):
        check = rehearse(small, None, FirstBatch(batch=torch.zeros(1), batch_size=1), engine)
        if check.outcome == "failed":
            differs = check.reason.startswith(engine.where)  # and names a stand-in, of which nobody knows
            return failed(f"the optimizer {_name(small)} " + (f"{engine.where} {engine.lost}" if differs else check.reason))
        if check.outcome == "not made":
            return check
    return PASSED


def _apart(module: LightningModule, trainer: Trainer | None) -> Check:
    for small in stand_ins(module, trainer):
        count = len(small.weights)
        together = run_forked(small.stepped, range(count))
        for number in range(count):
            (alone,) = run_forked(small.stepped, [number])
            if not torch.allclose(alone, together[number], rtol=_EQUAL, atol=_EQUAL, equal_nan=True):
                return failed(f"the optimizer {_name(small)} updates a parameter by the values of others, and no stage has them all")
    return PASSED


def _name(small: StandIns) -> str:
    return type(small.optimizer).__name__
