"""Whether an engine that takes a module apart runs its step right: found out on the first batch, before any worker starts.

Forked ranks take a few real steps with the engine on the same batch; the result must be that of one process with whole parameters. Knows
Lightning modules; nothing of devices, of how plans are chosen, nor of what the engine does (``fsdp/rehearsal``, ``zero/rehearsal``).
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
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_autopar._fork import ChildFailed, run_forked
from lightning_autopar._lightning import LightningModule, Trainer
from lightning_autopar._lightning_compat import transfer_batch
from lightning_autopar._temporary import patched
from lightning_autopar.engines import PASSED, Check, failed, not_made
from lightning_autopar.memory.footprint import Conduct
from lightning_autopar.memory.trace.bare_step import BareStep
from lightning_autopar.memory.trace.first_batch import FirstBatch
from lightning_autopar.memory.trace.first_batch import copied as copied_batch
from lightning_autopar.state.checkpoint import whole_state_dict
from lightning_autopar.state.pretrained import check_values
from lightning_autopar.strategies.base.process_group import hidden_from_users
from lightning_autopar.text import format_bytes

_LOG = logging.getLogger(__name__)

#: How many steps are compared: stale parameters show in the step after the one that left them.
STEPS = 3
#: The most FLOPs of all steps on all ranks: about two seconds on a CPU core.
_FLOPS = 4e10
#: The most bytes of parameters: three processes hold copies of parameters, gradients and optimizer states.
PARAMETER_BYTES = 64 << 20
TIMEOUT_SECONDS = 60.0
#: The tolerance, for the same arithmetic on the same numbers; a lost or stale value is off by a whole step's change.
_EQUAL = 1e-5
#: By how many units in the last place parameters are changed to see the effect of rounding; and how many times that effect an engine's
#: rounding, at every operation, may have.
_NUDGES, _SWINGS = 4, 4.0
#: Which share of a tensor may differ by more, up to the largest such effect on any tensor: a gradient that is only rounding, in few
#: places, may stay what it was when parameters are nudged.
_STRAYS = 1e-4


@dataclass(frozen=True, kw_only=True)
class Run:
    """The results of some steps, and the state of torch's generator after them."""

    losses: tuple[float, ...]
    weights: dict[str, Tensor]
    notes: tuple[str, ...]
    random: Tensor = field(default_factory=torch.get_rng_state)


@dataclass(frozen=True, kw_only=True)
class Swings:
    """By how much rounding alone changes the results of some steps."""

    losses: tuple[float, ...] = ()
    weights: Mapping[str, float] = field(default_factory=dict)


#: Makes the batch anew, since a step may change its batch.
Batch = Callable[[], Any]
#: Runs the steps with an engine, as one rank of an existing group; the flag says whether to return the weights. A collective.
Steps = Callable[["LightningModule", "Trainer | None", Batch, bool], Run]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What is rehearsed.

    Args:
        steps: takes them.
        where: the words before a finding: ``"on sharded parameters"``.
        lost: what a difference means, in a few words.
        sentence: gives a failure's cause in words for a user, from the child's failure.
        traced: gives why it can't run the step, by what the traced step does to parameters; None where it can. Used for steps that are too
            large to be tried.
        world_size: how many ranks, 1 or 2.
    """

    steps: Steps
    where: str
    lost: str
    sentence: Callable[[str], str]
    traced: Callable[[Conduct], str | None]
    world_size: int = 2


def rehearse(
    module: LightningModule, trainer: Trainer | None, first: FirstBatch, engine: Engine, *, flops: int = 0, conduct: Conduct | None = None
) -> Check:
    """Whether the engine runs the module's training step as one process does.

    A module or a step that is too large to be tried on a CPU is judged by what the traced step does to parameters: an engine differs from
    one process in nothing else. For a process that hasn't run a backward pass: it forks each part of the rehearsal before it runs one
    itself.

    Args:
        module: the user's module, set up; it stays as it is.
        flops: of a step on the whole batch.
        conduct: what the traced step does with parameters by themselves; None where it wasn't traced.
    """
    count = _samples(first, flops)
    large = _too_large(module) or (None if count else f"a step of {flops:.1e} floating-point operations is too long to try on the CPU")
    if large is not None:
        return by_trace(conduct, engine.traced, large)
    if dist.is_initialized():
        return not_made("the process that would try it is in a process group already")
    for last in (False, True):
        try:
            return run_forked(_rehearse, module, trainer, first, count, engine, timeout_seconds=TIMEOUT_SECONDS)
        except ChildFailed as error:
            _LOG.debug("the step can't be rehearsed %s", engine.where, exc_info=True)
            if error.timed_out:
                return not_made(f"it takes more than {TIMEOUT_SECONDS:.0f} s on the CPU")
            # gloo's threads abort their process when a connection breaks: if that happens once, it isn't the module's fault.
            if last or not error.crashed:
                return failed(engine.sentence(error.reason))
    raise AssertionError("the last failure is an answer")


def by_trace(conduct: Conduct | None, refusal: Callable[[Conduct], str | None], large: str) -> Check:
    """The check of a module or step that is too large to be tried.

    Args:
        refusal: as an engine's ``traced``.
        large: why it is too large, as the end of a sentence.
    """
    if conduct is None:
        return not_made(f"{large}, and it couldn't be traced either")
    reason = refusal(conduct)
    return PASSED if reason is None else failed(reason)


def _too_large(module: nn.Module) -> str | None:
    size_bytes = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    if size_bytes <= PARAMETER_BYTES:
        return None
    return f"{format_bytes(size_bytes)} of parameters are more than the {format_bytes(PARAMETER_BYTES)} that are tried"


def _samples(first: FirstBatch, flops: int) -> int:
    """The number of samples to rehearse with: all, or two if a step is long; 0 for no rehearsal."""
    steps = 4 * STEPS  # run twice with whole parameters, and on two ranks
    if flops * steps <= _FLOPS:
        return max(1, first.batch_size)
    small = min(2, first.batch_size)
    return small if first.samples is not None and flops * steps * small / max(1, first.batch_size) <= _FLOPS else 0


def _rehearse(module: LightningModule, trainer: Trainer | None, first: FirstBatch, count: int, engine: Engine) -> Check:
    """Rank 0, which also compares: it lets a child run the steps with whole parameters, forks rank 1, then compares the engine's steps with
    those. Children draw the same numbers, as they are forked in the same state.
    """
    torch.set_num_threads(max(1, torch.get_num_threads() // engine.world_size))  # the ranks compute at once
    batch = _batches(module, trainer, first, count)
    try:
        plain = run_forked(_plain_steps, module, trainer, batch)
    except ChildFailed as error:  # which says nothing about the engine
        return not_made(f"the step fails on the CPU with whole parameters, too ({error.reason})")
    swings = _Swinging(plain, module, trainer, batch)
    with tempfile.TemporaryDirectory() as folder:
        if engine.world_size > 1:
            reader, writer = os.pipe()
            args = (writer, Path(folder), module, trainer, first, count, engine)
            partner = threading.Thread(target=_partner, args=args, daemon=True)
            partner.start()
            os.read(reader, 1)  # rank 1 is forked: from here on threads may be started
        ours = _rank(0, Path(folder), module, trainer, first, count, engine)
    assert ours is not None
    difference = _difference(plain, ours, engine, Swings())
    if swings.found(wanted=difference is not None):
        difference = _difference(plain, ours, engine, swings.swings)
    return PASSED if difference is None else failed(difference)


class _Swinging:
    """By how much rounding alone changes losses and weights: one process runs the steps again with each parameter changed in its last bits.
    A gradient that is only rounding (of a key's bias, which softmax cancels) becomes a step of full size under Adam.

    That process is forked now, before this one runs a backward pass, and waits until it is known whether anything differs at all.
    """

    def __init__(self, plain: Run, module: LightningModule, trainer: Trainer | None, batch: Batch) -> None:
        self.swings = Swings()
        self._plain = plain
        self._reader, self._writer = os.pipe()
        self._forked, tell = os.pipe()
        self._thread = threading.Thread(target=self._run, args=(tell, module, trainer, batch), daemon=True)
        self._thread.start()
        os.read(self._forked, 1)

    def found(self, *, wanted: bool) -> bool:
        """Let it run the steps, or end; returns whether :attr:`swings` holds what it found."""
        os.write(self._writer, b"1" if wanted else b"0")
        self._thread.join()
        for descriptor in (self._reader, self._writer, self._forked):
            os.close(descriptor)
        return wanted

    def _run(self, tell: int, module: LightningModule, trainer: Trainer | None, batch: Batch) -> None:
        def nudged() -> Run | None:
            os.close(self._writer)  # so that it ends with its parent
            os.write(tell, b"1")
            return _nudged_steps(module, trainer, batch) if os.read(self._reader, 1) == b"1" else None

        try:
            run = run_forked(nudged)
        except ChildFailed:  # it ran a moment ago: a step that fails sometimes gets no tolerance for rounding
            _LOG.debug("the steps can't be taken from elsewhere", exc_info=True)
            run = None
        os.write(tell, b"1")  # also where the child ended before it could
        os.close(tell)
        if run is not None:
            plain = self._plain
            self.swings = Swings(
                losses=tuple(_SWINGS * abs(one - other) for one, other in zip(run.losses, plain.losses, strict=False)),
                weights={
                    name: _SWINGS * float((run.weights[name] - value).abs().max())
                    for name, value in plain.weights.items()
                    if value.is_floating_point() and value.numel()
                },
            )


def _partner(writer: int, folder: Path, *args: Any) -> None:
    def rank_1() -> None:
        os.write(writer, b"1")
        _rank(1, folder, *args)

    with suppress(ChildFailed):  # rank 0 fails likewise, and tells of it
        run_forked(rank_1, timeout_seconds=TIMEOUT_SECONDS)
    os.write(writer, b"1")


def _rank(
    rank: int, folder: Path, module: LightningModule, trainer: Trainer | None, first: FirstBatch, count: int, engine: Engine
) -> Run | None:
    timeout = timedelta(seconds=TIMEOUT_SECONDS / 2)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=engine.world_size, timeout=timeout)
    with warnings.catch_warnings(), hidden_from_users():
        warnings.simplefilter("ignore")  # a library's deprecation is no failure, even where warnings are errors
        run = engine.steps(module, trainer, _batches(module, trainer, first, count), rank == 0)
    dist.barrier()  # rank 1 may leave, and break the connection, once rank 0 has everything that it waits for
    return run if rank == 0 else None


def _batches(module: LightningModule, trainer: Trainer | None, first: FirstBatch, count: int) -> Batch:
    def make() -> Any:
        if first.samples is None or first.collate is None or count == first.batch_size:
            return copied_batch(first.batch)
        batch = first.collate(first.samples[:count])
        return batch if trainer is None else transfer_batch(module, batch)

    return make


def _plain_steps(module: LightningModule, trainer: Trainer | None, batch: Batch) -> Run:
    """Run the steps in one process, with whole parameters; the module is changed."""
    with warnings.catch_warnings(), losses_of_backward() as losses:
        warnings.simplefilter("ignore")  # as for the ranks
        rehearsal = rehearsed(module, trainer)
        rehearsal.build()
        check_values(module)
        for index in range(STEPS):
            rehearsal.training_step(batch(), index)
    return Run(losses=tuple(losses), weights=copied(whole_state_dict(module, keep=True)), notes=tuple(rehearsal.notes))


def _nudged_steps(module: LightningModule, trainer: Trainer | None, batch: Batch) -> Run:
    """Run them with parameters that differ in their last bits."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.mul_(1 + _NUDGES * torch.finfo(parameter.dtype).eps)
    return _plain_steps(module, trainer, batch)


def rehearsed(module: LightningModule, trainer: Trainer | None) -> BareStep:
    """The module's training step, called as Lightning would call it."""
    return BareStep(module, trainer, "fit", autocast_dtype=None, default_dtype=None, enter=lambda phase: None)


def copied(state_dict: dict[str, Any]) -> dict[str, Tensor]:
    """Copies of the tensors of a state dict."""
    return {name: value.detach().clone() for name, value in state_dict.items() if isinstance(value, Tensor)}


@contextmanager
def losses_of_backward() -> Iterator[list[float]]:
    """While open, the losses of backward passes are recorded."""
    losses: list[float] = []
    original = torch.autograd.backward

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        losses.extend(float(tensor.detach().sum()) for tensor in ([tensors] if isinstance(tensors, Tensor) else tensors))
        return original(tensors, *args, **kwargs)

    with patched(torch.autograd, "backward", backward):
        yield losses


def _difference(plain: Run, ours: Run, engine: Engine, swings: Swings) -> str | None:
    """What the engine changes by more than rounding would, in a sentence."""
    where, lost = engine.where, engine.lost
    if not torch.equal(ours.random, plain.random):  # transformers' layerdrop asks whether its module is FSDP's
        lost = "the step draws other random numbers there"
    failed = Counter(ours.notes) - Counter(plain.notes)
    if failed:
        return f"{where} {next(iter(failed))}"
    if len(plain.losses) != len(ours.losses):
        return f"{where} the step has {len(ours.losses)} losses instead of {len(plain.losses)}"
    for loss, theirs, swing in zip_longest(ours.losses, plain.losses, swings.losses[: len(plain.losses)], fillvalue=0.0):
        if math.isfinite(theirs) and not abs(loss - theirs) <= max(_EQUAL * max(1.0, abs(theirs)), swing):
            return f"{where} the loss is {loss:.6g} instead of {theirs:.6g}: {lost}"
    for name, theirs_ in plain.weights.items():
        if name not in ours.weights:
            return f"{where} {name!r} is missing from the module's state"
        if theirs_.dtype is torch.bool or not theirs_.numel():
            continue
        weight = ours.weights[name].to(theirs_.dtype)
        if torch.allclose(weight, theirs_, rtol=_EQUAL, atol=_EQUAL, equal_nan=True):
            continue
        off = (weight - theirs_).abs().nan_to_num(math.inf)
        beyond = int((off > max(_EQUAL, swings.weights.get(name, 0.0))).sum())
        if beyond > _STRAYS * off.numel() or (beyond and float(off.max()) > max(swings.weights.values(), default=0.0)):
            return f"{where} {name!r} has other values after {STEPS} steps: {lost}"
    return None
