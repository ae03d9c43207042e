"""Whether an engine that takes a module apart runs its step right: found out before any worker starts, on the first batch.

Forked ranks take a few real steps with the engine, all on the same batch, which must give what one process gives with whole parameters.
Knows Lightning modules; nothing of devices, of how plans are chosen, nor of what the engine does (``rehearse_fsdp``, ``rehearse_zero``).
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_autopar._fork import ChildFailed, run_forked
from lightning_autopar._lightning_compat import transfer_batch
from lightning_autopar.memory.batch import FirstBatch
from lightning_autopar.memory.fake import fake_copy
from lightning_autopar.memory.rehearsal import Rehearsal
from lightning_autopar.state import rng
from lightning_autopar.state.checkpoint import whole_state_dict

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_LOG = logging.getLogger(__name__)

#: So many steps each: stale parameters show in the step after the one that left them.
STEPS = 3
#: Of all steps on all ranks: about two seconds on a CPU core.
_FLOPS = 4e10
#: Copies are made: of parameters, gradients and optimizer states, on three processes.
_PARAMETER_BYTES = 64 << 20
_TIMEOUT_SECONDS = 60.0
#: The same arithmetic on the same numbers; what is lost or stale is off by as much as a step changes.
_EQUAL = 1e-4
#: How far off parameters begin to see what rounding does to them, in units of their last place; and how much further an engine's rounding,
#: at every operation, may take them.
_NUDGES, _SWINGS = 4, 4.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """What some steps gave."""

    losses: tuple[float, ...]
    weights: dict[str, Tensor]
    notes: tuple[str, ...]


#: Makes the batch anew, since a step may change what it gets.
Batch = Callable[[], Any]
#: Takes the steps with an engine, as one rank of a group that there is; the flag says whether the weights are asked for. A collective.
Steps = Callable[["LightningModule", "Trainer | None", Batch, bool], Run]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What is rehearsed.

    Args:
        steps: takes them.
        where: what goes before a finding: ``"on sharded parameters"``.
        lost: what a difference means, in a few words.
        sentence: a failure's cause in a user's words; gets what the child failed with.
        world_size: how many ranks, 1 or 2.
    """

    steps: Steps
    where: str
    lost: str
    sentence: Callable[[str], str]
    world_size: int = 2


def rehearse(module: LightningModule, trainer: Trainer | None, first: FirstBatch, engine: Engine, *, flops: int = 0) -> str | None:
    """Why the engine can't run the module's training step, in one sentence; None if it can, or if that is too long to try.

    Args:
        module: the user's module, set up; it stays as it is.
        trainer: the trainer that it was passed to, read only.
        first: the first training batch.
        engine: what to try.
        flops: of a step on the whole batch.
    """
    size_bytes = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    count = _samples(first, flops)
    if size_bytes > _PARAMETER_BYTES or count == 0 or dist.is_initialized():  # a process that is in a group can't join another
        return None
    for last in (False, True):
        try:
            return run_forked(_rehearse, module, trainer, first, count, engine, timeout_seconds=_TIMEOUT_SECONDS)
        except ChildFailed as error:
            _LOG.debug("the step can't be rehearsed %s", engine.where, exc_info=True)
            # gloo's threads abort their process where a connection breaks off: once, that says nothing of the module.
            if last or not error.crashed:
                return engine.sentence(error.reason)
    raise AssertionError("the last failure is an answer")


def _samples(first: FirstBatch, flops: int) -> int:
    """How many samples to rehearse with: all, or two of them where a step is long; 0 for no rehearsal."""
    steps = 4 * STEPS  # twice whole, and on two ranks
    if flops * steps <= _FLOPS:
        return max(1, first.batch_size)
    small = min(2, first.batch_size)
    return small if first.samples is not None and flops * steps * small / max(1, first.batch_size) <= _FLOPS else 0


def _rehearse(module: LightningModule, trainer: Trainer | None, first: FirstBatch, count: int, engine: Engine) -> str | None:
    """Rank 0, and the judge: forks rank 1, then compares parts with whole parameters."""
    state = rng.capture({})
    plain = None
    with suppress(Exception):  # what fails with whole parameters says nothing about parts
        plain = _plain_steps(fake_copy(module, None, None), trainer, _batches(module, trainer, first, count))
    if plain is None:
        return None
    rng.restore(state, {})
    swings = _swings(plain, module, trainer, _batches(module, trainer, first, count))  # while the module is whole
    rng.restore(state, {})
    with tempfile.TemporaryDirectory() as folder:
        if engine.world_size > 1:
            reader, writer = os.pipe()
            args = (writer, Path(folder), module, trainer, first, count, engine, state)
            partner = threading.Thread(target=_partner, args=args, daemon=True)
            partner.start()
            os.read(reader, 1)  # rank 1 is forked: from here on threads may be started
        ours = _rank(0, Path(folder), module, trainer, first, count, engine)
    assert ours is not None
    return _difference(plain, ours, engine, swings)


def _swings(plain: Run, module: LightningModule, trainer: Trainer | None, batch: Batch) -> dict[str, float]:
    """By how much rounding alone moves the weights: what one process gives when each parameter begins in its last bits elsewhere.

    A gradient that is nothing but rounding (of a key's bias, which softmax takes out again) becomes a step of full size under Adam.
    """
    copy = fake_copy(module, None, None)
    with torch.no_grad():
        for parameter in copy.parameters():
            if parameter.is_floating_point():
                parameter.mul_(1 + _NUDGES * torch.finfo(parameter.dtype).eps)
    try:
        nudged = _plain_steps(copy, trainer, batch).weights
    except Exception:  # it ran a moment ago: a step that fails now and then
        _LOG.debug("the steps can't be taken from elsewhere", exc_info=True)
        return {}
    return {name: _SWINGS * float((nudged[name] - value).abs().max()) for name, value in plain.weights.items() if value.is_floating_point()}


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
    rank: int, folder: Path, module: LightningModule, trainer: Trainer | None, first: FirstBatch, count: int, engine: Engine
) -> Run | None:
    timeout = timedelta(seconds=_TIMEOUT_SECONDS / 2)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=engine.world_size, timeout=timeout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a library deprecates is no failure, also where warnings are made errors
        run = engine.steps(module, trainer, _batches(module, trainer, first, count), rank == 0)
    dist.barrier()  # rank 1 may leave, and break the connection off, when rank 0 has all that it waits for
    return run if rank == 0 else None


def _batches(module: LightningModule, trainer: Trainer | None, first: FirstBatch, count: int) -> Batch:
    def make() -> Any:
        if first.samples is None or first.collate is None or count == first.batch_size:
            return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, first.batch)
        batch = first.collate(first.samples[:count])
        return batch if trainer is None else transfer_batch(module, batch)

    return make


def _plain_steps(module: LightningModule, trainer: Trainer | None, batch: Batch) -> Run:
    """The same steps in one process, with whole parameters."""
    rehearsal = rehearsed(module, trainer)
    rehearsal.build()
    with losses_of_backward() as losses:
        for index in range(STEPS):
            rehearsal.training_step(batch(), index)
    return Run(losses=tuple(losses), weights=copied(whole_state_dict(module, keep=True)), notes=tuple(rehearsal.notes))


def rehearsed(module: LightningModule, trainer: Trainer | None) -> Rehearsal:
    """The module's training step, to be called as Lightning would."""
    return Rehearsal(module, trainer, "fit", autocast_dtype=None, default_dtype=None, enter=lambda phase: None)


def copied(state_dict: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a state dict, apart from the module."""
    return {name: value.detach().clone() for name, value in state_dict.items() if isinstance(value, Tensor)}


@contextmanager
def losses_of_backward() -> Iterator[list[float]]:
    """While open, what backward passes begin with is noted down."""
    losses: list[float] = []
    original = torch.autograd.backward

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        losses.extend(float(tensor.detach().sum()) for tensor in ([tensors] if isinstance(tensors, Tensor) else tensors))
        return original(tensors, *args, **kwargs)

    torch.autograd.backward = backward
    try:
        yield losses
    finally:
        torch.autograd.backward = original


def _difference(plain: Run, ours: Run, engine: Engine, swings: Mapping[str, float]) -> str | None:
    """What the engine changes, in a sentence; weights by more than they swing."""
    where = engine.where
    failed = Counter(ours.notes) - Counter(plain.notes)
    if failed:
        return f"{where} {next(iter(failed))}"
    if len(plain.losses) != len(ours.losses):
        return f"{where} the step has {len(ours.losses)} losses instead of {len(plain.losses)}"
    for loss, theirs in zip(ours.losses, plain.losses, strict=True):
        if math.isfinite(theirs) and not abs(loss - theirs) <= _EQUAL * max(1.0, abs(theirs)):
            return f"{where} the loss is {loss:.6g} instead of {theirs:.6g}: {engine.lost}"
    for name, theirs_ in plain.weights.items():
        if name not in ours.weights:
            return f"{where} {name!r} is missing from the module's state"
        if theirs_.dtype is torch.bool or not theirs_.numel():
            continue
        weight = ours.weights[name].to(theirs_.dtype)
        if torch.allclose(weight, theirs_, rtol=_EQUAL, atol=_EQUAL, equal_nan=True):
            continue
        if not float((weight - theirs_).abs().max()) <= swings.get(name, 0.0):
            return f"{where} {name!r} has other values after {STEPS} steps: {engine.lost}"
    return None
