"""Whether FSDP2 can run a module's step, and runs it right: found out before any worker starts, on the first batch.

Two forked ranks take a few real steps on shards, both on the same batch, which must give what one process gives without shards. FSDP2
refuses some modules, and with others what the step does to whole parameters is lost. Knows Lightning modules; nothing of devices or of how
plans are chosen.
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map

from lightning_autopar._fork import ChildFailed, run_forked
from lightning_autopar._lightning_compat import is_overridden, transfer_batch
from lightning_autopar.memory.batch import FirstBatch
from lightning_autopar.memory.fake import fake_copy
from lightning_autopar.memory.rehearsal import Rehearsal
from lightning_autopar.state import rng
from lightning_autopar.state.checkpoint import whole_state_dict
from lightning_autopar.strategies.fsdp import shard
from lightning_autopar.strategies.gathered import Gathered, numbers_of_whole_tensors

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_LOG = logging.getLogger(__name__)

#: Whether a block's parameters are freed between forward and backward, for each step. Stale parameters show in the step after the one
#: that left them.
_RESHARD = (True, False, False)
#: Of all steps on all ranks: about two seconds on a CPU core.
_FLOPS = 4e10
#: Copies are made: of parameters, gradients and optimizer states, on three processes.
_PARAMETER_BYTES = 64 << 20
_TIMEOUT_SECONDS = 60.0
#: The same arithmetic on the same numbers; what is lost or stale is off by as much as a step changes.
_EQUAL = 1e-4
_LOST = "what the step does to whole parameters is lost on shards"


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What some steps gave."""

    losses: tuple[float, ...]
    weights: dict[str, Tensor]
    notes: tuple[str, ...]


def rehearse_fsdp(
    module: LightningModule, trainer: Trainer | None, first: FirstBatch, shard_fqns: Sequence[str], *, flops: int = 0
) -> str | None:
    """Why FSDP2 can't run the module's training step, in one sentence; None if it can, or if that is too long to try.

    Args:
        module: the user's module, set up; it stays as it is.
        trainer: the trainer that it was passed to, read only.
        first: the first training batch.
        shard_fqns: the modules that are sharded as units of their own; see :attr:`lightning_autopar.plans.Plan.shard`.
        flops: of a step on the whole batch.
    """
    refusal = unshardable(module)
    if refusal is not None:
        return refusal
    size_bytes = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    count = _samples(first, flops)
    if size_bytes > _PARAMETER_BYTES or count == 0 or dist.is_initialized():  # a process that is in a group can't join another
        return None
    for last in (False, True):
        try:
            return run_forked(_rehearse, module, trainer, first, count, tuple(shard_fqns), timeout_seconds=_TIMEOUT_SECONDS)
        except ChildFailed as error:
            _LOG.debug("the step can't be rehearsed on shards", exc_info=True)
            # gloo's threads abort their process where a connection breaks off: once, that says nothing of the module.
            if last or not error.crashed:
                return _sentence(error.reason)
    raise AssertionError("the last failure is an answer")


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


def _samples(first: FirstBatch, flops: int) -> int:
    """How many samples to rehearse with: all, or two of them where a step is long; 0 for no rehearsal."""
    steps = 3 * len(_RESHARD)
    if flops * steps <= _FLOPS:
        return max(1, first.batch_size)
    small = min(2, first.batch_size)
    return small if first.samples is not None and flops * steps * small / max(1, first.batch_size) <= _FLOPS else 0


def _rehearse(module: LightningModule, trainer: Trainer | None, first: FirstBatch, count: int, fqns: tuple[str, ...]) -> str | None:
    """Rank 0, and the judge: forks rank 1, then compares shards with whole parameters."""
    state = rng.capture({})
    plain = None
    with suppress(Exception):  # what fails without shards says nothing about them
        plain = _steps(fake_copy(module, None, None), trainer, _batches(module, trainer, first, count), None)
    if plain is None:
        return None
    rng.restore(state, {})
    with tempfile.TemporaryDirectory() as folder:
        reader, writer = os.pipe()
        partner = threading.Thread(target=_partner, args=(writer, Path(folder), module, trainer, first, count, fqns, state), daemon=True)
        partner.start()
        os.read(reader, 1)  # rank 1 is forked: from here on threads may be started
        sharded = _rank(0, Path(folder), module, trainer, first, count, fqns)
    assert sharded is not None
    return _difference(plain, sharded)


def _partner(writer: int, folder: Path, *args: Any) -> None:
    *rest, state = args

    def rank_1() -> None:
        os.write(writer, b"1")
        rng.restore(state, {})
        _rank(1, folder, *rest)

    with suppress(ChildFailed):  # rank 0 fails likewise, and tells of it
        run_forked(rank_1, timeout_seconds=_TIMEOUT_SECONDS)
    os.write(writer, b"1")


def _rank(
    rank: int, folder: Path, module: LightningModule, trainer: Trainer | None, first: FirstBatch, count: int, fqns: tuple[str, ...]
) -> _Run | None:
    timeout = timedelta(seconds=_TIMEOUT_SECONDS / 2)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2, timeout=timeout)
    run = _steps(module, trainer, _batches(module, trainer, first, count), fqns, keep=rank == 0)
    dist.barrier()  # rank 1 may leave, and break the connection off, when rank 0 has all that it waits for
    return run if rank == 0 else None


def _batches(module: LightningModule, trainer: Trainer | None, first: FirstBatch, count: int) -> Callable[[], Any]:
    """Makes the batch anew, since a step may change what it gets."""

    def make() -> Any:
        if first.samples is None or first.collate is None or count == first.batch_size:
            return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, first.batch)
        batch = first.collate(first.samples[:count])
        return batch if trainer is None else transfer_batch(module, batch)

    return make


def _steps(
    module: LightningModule, trainer: Trainer | None, batch: Callable[[], Any], fqns: tuple[str, ...] | None, *, keep: bool = True
) -> _Run:
    """A few training steps, on shards if units are named."""
    rehearsal = Rehearsal(module, trainer, "fit", autocast_dtype=None, default_dtype=None, enter=lambda phase: None)
    if fqns is not None:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
        module._device_mesh = mesh
        if is_overridden("configure_model", module):
            module.configure_model()
            module.__dict__["configure_model"] = lambda: None
        if not any(isinstance(child, FSDPModule) for child in module.modules()):
            numbers_of_whole_tensors()
            shard(module, fqns, mesh["data_parallel"], reshard_after_forward=True)
    rehearsal.build()
    gathered = None if fqns is None else Gathered(module, rehearsal.optimizers)
    losses: list[float] = []
    original = torch.autograd.backward

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        losses.extend(float(tensor.detach().sum()) for tensor in ([tensors] if isinstance(tensors, Tensor) else tensors))
        return original(tensors, *args, **kwargs)

    torch.autograd.backward = backward
    try:
        for index, reshard in enumerate(_RESHARD):
            for name, unit in module.named_modules():
                if isinstance(unit, FSDPModule) and name and fqns:
                    unit.set_reshard_after_forward(reshard, recurse=False)
            _step(rehearsal, gathered, batch(), index)
    finally:
        torch.autograd.backward = original
    weights = {name: value.detach().clone() for name, value in whole_state_dict(module, keep=keep).items() if isinstance(value, Tensor)}
    return _Run(losses=tuple(losses), weights=weights, notes=tuple(rehearsal.notes))


def _step(rehearsal: Rehearsal, gathered: Gathered | None, batch: Any, index: int) -> None:
    """One training step; what lies between forward and backward counts as inside of it."""
    if gathered is None:
        rehearsal.training_step(batch, index)
        return
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


def _difference(plain: _Run, sharded: _Run) -> str | None:
    """What shards change, in a sentence."""
    failed = Counter(sharded.notes) - Counter(plain.notes)
    if failed:
        return f"on sharded parameters {next(iter(failed))}"
    if len(plain.losses) != len(sharded.losses):
        return f"on sharded parameters the step has {len(sharded.losses)} losses instead of {len(plain.losses)}"
    for ours, theirs in zip(sharded.losses, plain.losses, strict=True):
        if math.isfinite(theirs) and not abs(ours - theirs) <= _EQUAL * max(1.0, abs(theirs)):
            return f"on sharded parameters the loss is {ours:.6g} instead of {theirs:.6g}: {_LOST}"
    for name, theirs_ in plain.weights.items():
        if name not in sharded.weights:
            return f"on sharded parameters {name!r} is missing from the module's state"
        if theirs_.dtype is torch.bool or not theirs_.numel():
            continue
        ours_ = sharded.weights[name]
        if not torch.allclose(ours_.to(theirs_.dtype), theirs_, rtol=_EQUAL, atol=_EQUAL, equal_nan=True):
            return f"on sharded parameters {name!r} has other values after {len(_RESHARD)} steps: {_LOST}"
    return None


def _sentence(reason: str) -> str:
    """The cause in a user's words."""
    if "mixed torch.Tensor and DTensor" in reason:
        return (
            "the step uses a block's parameters outside of the block's forward (a weight in the loss, or a method other than forward), and "
            "FSDP2 gathers them in forward only"
        )
    if "uniform original parameter dtype" in reason:
        return "the parameters of a block have several dtypes, and FSDP2 needs one"
    return f"the step fails on sharded parameters ({reason})"
