"""A LightningModule's step under fake tensors → Footprint. Knows Lightning modules and torch; nothing of devices, plans or strategies.

Meant for a forked child (``_fork.run_forked``): the user's code runs here. The module that is passed in stays as it is all the same.

Method: a deep copy whose tensors are fake; its own hooks and ``configure_optimizers``; two steps (the first has no optimizer state), the
second one counted. Against the CPU's real peak the error is below 1 % for most architectures; what most kernels take inside of one
operation stays unseen.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_autopar._lightning_compat import is_overridden
from lightning_autopar.memory.batch import FirstBatch, batch_size_of, first_batch, tensors_of
from lightning_autopar.memory.blocks import BlockWatcher, batch_norms, find_blocks, tied_groups
from lightning_autopar.memory.fake import ShadowValues, Target, as_if_real, fake_copy, fake_mode
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.guess import guess
from lightning_autopar.memory.rehearsal import Rehearsal, announced
from lightning_autopar.memory.tracker import MemoryTracker, Phase

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["FirstBatch", "first_batch", "trace"]

log = logging.getLogger(__name__)

#: A module up to this size is run for real, once, where fakes won't do.
_SMALL_BYTES = 200 << 20
_MARGIN_REAL = 0.1
_MARGIN_GUESS = 0.3


@dataclass(frozen=True, kw_only=True)
class _Precision:
    """What a precision setting of the Trainer means to the step."""

    autocast: torch.dtype | None = None
    true: torch.dtype | None = None


_PRECISIONS = {
    "16-mixed": _Precision(autocast=torch.float16),
    "bf16-mixed": _Precision(autocast=torch.bfloat16),
    "16-true": _Precision(true=torch.float16),
    "bf16-true": _Precision(true=torch.bfloat16),
    "32-true": _Precision(),
    "64-true": _Precision(true=torch.float64),
    "transformer-engine": _Precision(true=torch.bfloat16),
    "transformer-engine-float16": _Precision(true=torch.float16),
}
_ALIASES = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true", "None": "32-true"}


def trace(
    module: LightningModule,
    trainer: Trainer | None,
    batch: FirstBatch | Any,
    *,
    stage: str = "fit",
    precision: str | int | None = "32-true",
    target: Target = "cpu",
) -> Footprint:
    """What one step of the module needs, found out without running it.

    Where the step can't be traced, it is run once for real if the module is small, else guessed; the footprint says so.

    Args:
        module: the user's module. It isn't changed.
        trainer: the trainer it was passed to, read only; None if there is none yet.
        batch: what :func:`first_batch` gave, or a batch as the step gets it.
        stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        precision: the Trainer's ``precision``.
        target: the kind of device that will run it; decides between kernels that keep different things (attention, dropout, optimizers).

    Raises:
        ValueError: for an unknown stage or precision.
    """
    name = _ALIASES.get(str(precision), str(precision))
    if name not in _PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}; use one of {', '.join(_PRECISIONS)}")
    if stage not in ("fit", "validate", "test", "predict"):
        raise ValueError(f"unknown stage {stage!r}; use 'fit', 'validate', 'test' or 'predict'")
    first = batch if isinstance(batch, FirstBatch) else FirstBatch(batch=batch, batch_size=batch_size_of(batch))
    tracing = _Tracing(module, trainer, first, stage, _PRECISIONS[name], target)
    try:
        return tracing.measure(fake=True)
    except Exception as error:
        log.debug("the step can't be traced", exc_info=True)
        reason = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
    size_bytes = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    if size_bytes <= _SMALL_BYTES:
        try:
            return tracing.measure(fake=False, note=f"the step can't be traced ({reason}), and was run once for real on the CPU instead")
        except Exception:
            log.debug("the step can't be run on the CPU either", exc_info=True)
    return guess(module, trainer, first, stage=stage, dtype=_PRECISIONS[name].true, reason=reason, margin=_MARGIN_GUESS)


class _Tracing:
    """The arguments of one call of :func:`trace`."""

    def __init__(
        self, module: LightningModule, trainer: Trainer | None, first: FirstBatch, stage: str, precision: _Precision, target: Target
    ) -> None:
        self.module = module
        self.trainer = trainer
        self.first = first
        self.stage = stage
        self.precision = precision
        self.target = target

    def measure(self, *, fake: bool, note: str | None = None) -> Footprint:
        """Two steps, the last one counted; with fake tensors or, where those won't do, real ones."""
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            mode = fake_mode()
            shadow = ShadowValues()
            if fake:
                module = fake_copy(self.module, mode, shadow, dtype=self.precision.true)
                batch = fake_copy(self.first.batch, mode, shadow, dtype=self.precision.true)
                stack.enter_context(as_if_real(shadow, self.target))
                stack.enter_context(mode)
                stack.enter_context(shadow)
            else:
                module = fake_copy(self.module, None, None, dtype=self.precision.true)
                batch = fake_copy(self.first.batch, None, None, dtype=self.precision.true)
            return self._measure(module, batch, shadow, note)

    def _measure(self, module: LightningModule, batch: Any, shadow: ShadowValues, note: str | None) -> Footprint:
        tracker: MemoryTracker | None = None

        def enter(phase: str) -> None:
            if tracker is not None:
                tracker.enter(cast(Phase, phase))

        training = self.stage == "fit"
        rehearsal = Rehearsal(
            module,
            self.trainer,
            self.stage,
            autocast_dtype=self.precision.autocast,
            default_dtype=self.precision.true,
            enter=enter,
        )
        rehearsal.build()
        unfreezing = _unfreeze_later(self.trainer, module)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        parameters = list(module.parameters())
        trainable = [parameter for parameter in parameters if parameter.requires_grad] if training else []
        tracker = MemoryTracker((parameter.shape for parameter in parameters), scratch=self.target == "cpu")
        watcher = BlockWatcher(find_blocks(module), tracker)
        for parameter in parameters:
            tracker.mark(parameter, "parameters")
        for buffer in module.buffers():
            tracker.mark(buffer, "buffers")
        for tensor in tensors_of(batch):
            tracker.mark(tensor, "input")

        reached: set[int] = set()

        def complete(parameter: Tensor) -> None:
            reached.add(id(parameter))
            if parameter.grad is not None:
                tracker.mark(parameter.grad, "gradients")

        hooks = [parameter.register_post_accumulate_grad_hook(complete) for parameter in trainable]
        saved_bytes = 0

        def forward_ends() -> None:
            nonlocal saved_bytes
            watcher.end_forward()
            saved_bytes = max(saved_bytes, tracker.live["activations"] + tracker.live["fixed"])

        steps = [(True, True)]
        if training:
            n = rehearsal.accumulate
            steps += [(True, True)] if n == 1 else [(True, False), (False, True)]
        with ExitStack() as stack:
            stack.enter_context(
                announced(rehearsal.optimizers, automatic=module.automatic_optimization, enter=enter, forward_ends=forward_ends)
            )
            stack.enter_context(tracker)
            for index, (first, last) in enumerate(steps):
                watcher.begin_step()
                if index == (1 if training else 0):
                    saved_bytes = 0
                    tracker.record()
                if training:
                    rehearsal.training_step(batch, index, first=first, last=last)
                    for value in _states(rehearsal.optimizers):
                        tracker.mark(value, "optimizer")
                else:
                    rehearsal.evaluation_step(batch)
        for hook in hooks:
            hook.remove()

        states = {
            id(p): sum(_bytes(v) for v in tree_leaves(dict(o.state.get(p, {}))) if isinstance(v, Tensor))
            for o in rehearsal.optimizers
            for p in parameters
        }
        learns = {id(parameter) for parameter in trainable}

        def bytes_of(parameter: nn.Parameter) -> tuple[int, int, int]:
            size = _bytes(parameter)
            return size, size if id(parameter) in learns else 0, states.get(id(parameter), 0)

        elements = sum(parameter.numel() for parameter in parameters)
        blocks, kept = watcher.blocks(bytes_of, parameters=elements, activation_bytes=saved_bytes)
        moments = tracker.moments(lambda held: sum(index < held for index in kept), kept)
        parameter_bytes = tracker.live["parameters"]
        gradient_bytes = sum(bytes_of(parameter)[1] for parameter in trainable)
        peak_bytes = max((moment.total_bytes for moment in moments), default=0)
        assumptions = [*([note] if note else []), *shadow.guesses, *rehearsal.notes, *unfreezing]
        return Footprint(
            parameters=elements,
            trainable_parameters=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            batch_size=self.first.batch_size,
            parameter_bytes=parameter_bytes,
            gradient_bytes=gradient_bytes,
            optimizer_bytes=tracker.live["optimizer"],
            buffer_bytes=tracker.live["buffers"],
            activation_bytes=saved_bytes,
            temporary_bytes=max(0, peak_bytes - gradient_bytes - saved_bytes),
            input_bytes=tracker.live["input"],
            largest_parameter_bytes=max((_bytes(parameter) for parameter in parameters), default=0),
            flops=tracker.flops // max(1, len(steps) - 1),
            blocks=tuple(blocks),
            tied=tied_groups(module),
            training=training,
            automatic_optimization=module.automatic_optimization,
            optimizers=len(rehearsal.optimizers),
            batch_norm=tuple(batch_norms(module)),
            random_draws=tuple(tracker.random_draws),
            unused_parameters=tuple(names[id(parameter)] for parameter in trainable if id(parameter) not in reached),
            configures_model=is_overridden("configure_model", self.module),
            moments=moments,
            traced=note is None,
            margin=0.0 if note is None else _MARGIN_REAL,
            asks_for_world=rehearsal.asked_for_world,
            assumptions=tuple(assumptions),
        )


def _states(optimizers: list[Any]) -> Iterator[Tensor]:
    """Every tensor in the optimizers' state."""
    for state in itertools.chain.from_iterable(optimizer.state.values() for optimizer in optimizers):
        yield from (value for value in tree_leaves(state) if isinstance(value, Tensor))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _unfreeze_later(trainer: Trainer | None, module: LightningModule) -> list[str]:
    """A sentence for each callback that freezes parameters now and trains them later: the footprint is the later, larger one."""
    callbacks = getattr(trainer, "callbacks", None) or []
    return [
        f"{type(callback).__name__} freezes parameters at first; the footprint is that of training everything it may unfreeze"
        for callback in callbacks
        if isinstance(callback, BaseFinetuning)
    ]
