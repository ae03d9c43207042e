"""Whether DeepSpeed runs a module's step right under a ZeRO plan: a rehearsal on forked ranks, by the engine that would run the plan.

DeepSpeed doesn't refuse a module that it can't partition: it fails in its hooks, or computes something else. Knows Lightning modules and
the engine; nothing of the devices that there are, nor of how plans are chosen.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from tempfile import gettempdir
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_autopar._lightning import LightningEnvironment, LightningModule, Trainer
from lightning_autopar._temporary import patched
from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.engines import Check
from lightning_autopar.exact.step.shared_network import gradients_asked_for
from lightning_autopar.memory.footprint import Conduct
from lightning_autopar.memory.trace.first_batch import FirstBatch
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.base.run_plan import RunPlan
from lightning_autopar.strategies.trials.engine_rehearsal import STEPS, Batch, Engine, Run, copied, losses_of_backward, rehearse, rehearsed
from lightning_autopar.strategies.zero import deepspeed_compat as doorway
from lightning_autopar.strategies.zero.strategy import ZeroEngine, plugin

#: The rehearsal runs on CPU devices in 32 bits, whatever the plan's devices and the run's precision are.
_DEVICE, _PRECISION = "cpu:1GiB", "32-true"
_DIFFERENTIATES = "the step differentiates by itself (torch.autograd.grad)"


def rehearse_zero(
    module: LightningModule, trainer: Trainer | None, first: FirstBatch, plan: Plan, *, flops: int = 0, conduct: Conduct | None = None
) -> Check:
    """Whether DeepSpeed runs the module's training step, as the plan says, as one process does.

    Args:
        plan: of engine ``"zero"``; its stage, offload and recomputation are tried, on at most two ranks.
    """
    world_size = min(2, plan.world_size)
    name = f"ZeRO-{plan.zero_stage}"
    engine = Engine(
        steps=partial(_steps, replace(plan, devices=tuple(f"cpu:{rank}" for rank in range(world_size)))),
        where=f"under {name}",
        lost=f"what the step does is another thing on partitions of {name}",
        sentence=partial(_sentence, name),
        traced=partial(_traced, plan),
        world_size=world_size,
    )
    return rehearse(module, trainer, first, engine, flops=flops, conduct=conduct)


def _sentence(name: str, reason: str) -> str:
    """The cause of a failure, in words for a user."""
    if _DIFFERENTIATES in reason:
        return f"{_DIFFERENTIATES}, through parameters that {name} frees after each use; ZeRO-2 keeps parameters whole"
    if "'Tensor' object has no attribute 'ds_" in reason:
        return (
            f"the step gives a module tensors in the place of its parameters (as torch.func.functional_call does), which {name} takes for "
            "partitions; ZeRO-2 keeps parameters whole"
        )
    return f"the step fails under {name} ({reason})"


def _traced(plan: Plan, conduct: Conduct) -> str | None:
    """What the traced step does that fails on partitions."""
    if conduct.exchanged and plan.zero_stage == 3:
        return (
            f"the step replaces the parameter {conduct.exchanged[0]!r}, which ZeRO-3 has partitioned, by another one; write to the "
            "parameter instead (with torch.no_grad(): parameter.copy_(...))"
        )
    if conduct.shared:
        return (
            f"the step makes the parameter {conduct.shared[0]!r} share another one's memory (by its .data), but DeepSpeed keeps "
            "them apart; copy the values instead (with torch.no_grad(): parameter.copy_(other))"
        )
    return None


class _Rehearsed(ZeroEngine):
    """The engine without a run: the rehearsal itself decides on groups and on the shares of a batch."""

    def __init__(self, plan: Plan, module: LightningModule) -> None:
        devices = parse_spec(f"{plan.world_size}x{_DEVICE}").devices
        super().__init__(RunPlan(plan=plan, devices=devices))
        environment = LightningEnvironment()
        environment.set_world_size(plan.world_size)
        environment.set_global_rank(dist.get_rank())
        self.cluster_environment = environment
        self.precision_plugin = plugin(_PRECISION, "cpu")
        self.connect(module)
        self.model = module

    def start(self, optimizers: list[Any]) -> None:
        """Partition the module and the optimizer; a collective."""
        doorway.start("gloo")
        self.optimizers = optimizers
        self.init_deepspeed()


def _steps(plan: Plan, module: LightningModule, trainer: Trainer | None, batch: Batch, keep: bool) -> Run:
    """Runs a few training steps under DeepSpeed."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())  # DeepSpeed needs it; this process belongs to the rehearsal
    engine = _Rehearsed(plan, module)
    rehearsal = rehearsed(module, trainer)
    rehearsal.__dict__["_step_optimizer"] = partial(_step, engine)
    rehearsal._trainer.give(
        precision_plugin=engine.precision_plugin,
        strategy=engine,
        precision=_PRECISION,
        default_root_dir=gettempdir(),  # where whole weights are put together
    )
    rehearsal.build()
    engine.start(rehearsal.optimizers)
    step: Any = rehearsal._call

    def call(*args: Any) -> Any:
        with engine.inside(step=True):
            return _through(engine.model, module, partial(step, *args))

    rehearsal.__dict__["_call"] = call
    module.__dict__["backward"] = lambda loss, *args, **kwargs: engine.backward_parts(loss, *args, **kwargs)
    asked = list[Any]()

    def note(gradient: Tensor, of: Any) -> Tensor:
        asked.append(of)
        return gradient

    with losses_of_backward() as losses, gradients_asked_for(note):
        try:
            for index in range(STEPS):
                rehearsal.training_step(batch(), index)
        except RuntimeError as error:
            if asked and plan.zero_stage == 3:
                raise RuntimeError(_DIFFERENTIATES) from error
            raise
    return Run(losses=tuple(losses), weights=copied(engine.lightning_module_state_dict() or {}), notes=tuple(rehearsal.notes))


def _step(engine: ZeroEngine, optimizer: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
    """Runs the optimizer's step as the engine's precision plugin does."""
    result = closure()
    engine.step_parts()
    return result


def _through(outer: Any, module: LightningModule, function: Callable[[], Any]) -> Any:
    """Call the function as if it were the module's ``forward``, so that DeepSpeed's hooks are around it; as Lightning does."""
    own = module.forward  # a method, or what the user has put in its place

    def forward(*args: Any, **kwargs: Any) -> Any:
        with patched(module, "forward", own):  # within the step
            return function()

    with patched(module, "forward", forward):
        return outer()
