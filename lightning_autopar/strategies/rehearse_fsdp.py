"""Whether FSDP2 can run a module's step, and runs it right: a rehearsal on two forked ranks.

FSDP2 refuses some modules, and with others what the step does to whole parameters is lost. Knows Lightning modules; nothing of devices or
of how plans are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from lightning_autopar._lightning_compat import is_overridden
from lightning_autopar.memory.batch import FirstBatch
from lightning_autopar.memory.rehearsal import Rehearsal
from lightning_autopar.state.checkpoint import whole_state_dict
from lightning_autopar.strategies.fsdp import shard
from lightning_autopar.strategies.gathered import Gathered, numbers_of_whole_tensors
from lightning_autopar.strategies.rehearse import STEPS, Batch, Engine, Run, copied, losses_of_backward, rehearse, rehearsed

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

#: Whether a block's parameters are freed between forward and backward, for each step.
_RESHARD = (True, False, False)
assert len(_RESHARD) == STEPS
_OWN_SHARDS = "the module's configure_model shards it already, so that offload and replicas can't be the plan's choice"


def rehearse_fsdp(
    module: LightningModule,
    trainer: Trainer | None,
    first: FirstBatch,
    shard_fqns: Sequence[str],
    *,
    flops: int = 0,
    by_plan: bool = False,
) -> str | None:
    """Why FSDP2 can't run the module's training step, in one sentence; None if it can, or if that is too long to try.

    Args:
        module: the user's module, set up; it stays as it is.
        trainer: the trainer that it was passed to, read only.
        first: the first training batch.
        shard_fqns: the modules that are sharded as units of their own; see :attr:`lightning_autopar.plans.Plan.shard`.
        flops: of a step on the whole batch.
        by_plan: whether it is the plan that says how the module is sharded, and not its ``configure_model``.
    """
    refusal = unshardable(module)
    if refusal is not None:
        return refusal
    engine = Engine(
        steps=partial(_steps, tuple(shard_fqns), by_plan),
        where="on sharded parameters",
        lost="what the step does to whole parameters is lost on shards",
        sentence=_sentence,
    )
    return rehearse(module, trainer, first, engine, flops=flops)


def unshardable(module: nn.Module) -> str | None:
    """What in a module FSDP2 refuses whatever the step does; None if there is nothing."""
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0:
            return f"the parameter {name!r} is a scalar, which FSDP2 can't shard; make it a tensor of one element, torch.ones(1)"
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return f"the parameter {name!r} has a hook of its own (register_hook), which is lost when FSDP2 replaces it by a shard"
    for name, child in module.named_modules():
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse:
            return f"{name!r} has sparse gradients, which FSDP2 can't reduce; build it with sparse=False"
    return None


def _steps(fqns: tuple[str, ...], by_plan: bool, module: LightningModule, trainer: Trainer | None, batch: Batch, keep: bool) -> Run:
    """A few training steps on shards."""
    rehearsal = rehearsed(module, trainer)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    module._device_mesh = mesh
    if is_overridden("configure_model", module):
        module.configure_model()
        module.__dict__["configure_model"] = lambda: None
    if not any(isinstance(child, FSDPModule) for child in module.modules()):
        numbers_of_whole_tensors()
        shard(module, fqns, mesh["data_parallel"], reshard_after_forward=True)
    elif by_plan:
        raise ValueError(_OWN_SHARDS)
    rehearsal.build()
    gathered = Gathered(module, rehearsal.optimizers)
    with losses_of_backward() as losses:
        for index, reshard in enumerate(_RESHARD):
            for name, unit in module.named_modules():
                if isinstance(unit, FSDPModule) and name and fqns:
                    unit.set_reshard_after_forward(reshard, recurse=False)
            _step(rehearsal, gathered, batch(), index)
    return Run(losses=tuple(losses), weights=copied(whole_state_dict(module, keep=keep)), notes=tuple(rehearsal.notes))


def _step(rehearsal: Rehearsal, gathered: Gathered, batch: Any, index: int) -> None:
    """One training step; what lies between forward and backward counts as inside of it."""
    step: Any = rehearsal._call
    backward = rehearsal.module.backward

    def call(*args: Any) -> Any:
        with gathered.inside():
            return step(*args)

    def inside(*args: Any, **kwargs: Any) -> None:
        with gathered.inside():
            backward(*args, **kwargs)

    rehearsal.__dict__["_call"] = call
    rehearsal.module.__dict__["backward"] = inside
    try:
        rehearsal.training_step(batch, index)
    finally:
        rehearsal.__dict__.pop("_call")
        rehearsal.module.__dict__.pop("backward")


def _sentence(reason: str) -> str:
    """The cause in a user's words."""
    if _OWN_SHARDS in reason:
        return _OWN_SHARDS
    if "mixed torch.Tensor and DTensor" in reason:
        return (
            "the step uses a block's parameters outside of the block's forward (a weight in the loss, or a method other than forward), and "
            "FSDP2 gathers them in forward only"
        )
    if "uniform original parameter dtype" in reason:
        return "the parameters of a block have several dtypes, and FSDP2 needs one"
    return f"the step fails on sharded parameters ({reason})"
