"""Traces a LightningModule's step under fake tensors, which gives its footprint. Knows Lightning modules and torch; nothing of devices or
plans.

Meant for a forked child (``_fork.run_forked``), as it runs the user's code. The module that is passed in isn't changed all the same. A deep
copy gets fake tensors, its own hooks and ``configure_optimizers`` run, and so do two steps, of which the second is counted: the first has
no optimizer state. The Trainer's ``precision`` gives the dtypes. Against the CPU's real peak the error is below 1 % for most architectures.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from lightning_autopar._lightning import LightningModule, Trainer
from lightning_autopar._lightning_compat import is_overridden
from lightning_autopar.memory.cuda_overhead import Target
from lightning_autopar.memory.fakes.fake_copies import UNCOMPILED, as_if_real, drawing_nothing, fake_copy, fake_mode, is_compiled
from lightning_autopar.memory.fakes.shadow_values import ShadowValues
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.kernels.cpu_workspace import CPU_HIDDEN, UNREAD, cpu_scratch
from lightning_autopar.memory.kernels.cuda_workspace import CUDA_HIDDEN, cuda_scratch
from lightning_autopar.memory.storages import tensor_bytes
from lightning_autopar.memory.tape import Kind, Tape
from lightning_autopar.memory.trace.bare_step import NO_GRADIENT, NO_LOSS, BareStep, announced
from lightning_autopar.memory.trace.block_figures import forward_bytes, layers
from lightning_autopar.memory.trace.extra_tensors import fill_history, held_by_callbacks, in_attributes, keep_searching
from lightning_autopar.memory.trace.find_blocks import BlockWatcher, CallCounter, batch_norms, find_blocks, find_layers, tied_groups
from lightning_autopar.memory.trace.first_batch import RAISED, FirstBatch, batch_size_of, tensors_of
from lightning_autopar.memory.trace.guessed_footprint import guess
from lightning_autopar.memory.trace.parameter_use import ConductWatch
from lightning_autopar.memory.trace.tape_recorder import MemoryTracker, Phase
from lightning_autopar.text import error_line


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Types of a step.

    Args:
        autocast: what operations are cast to under autocast; None without it.
        true: what parameters and inputs are made of; None where they stay as they are.
    """

    autocast: torch.dtype | None = None
    true: torch.dtype | None = None


_PRECISIONS = {
    "16-mixed": Precision(autocast=torch.float16),
    "bf16-mixed": Precision(autocast=torch.bfloat16),
    "16-true": Precision(true=torch.float16),
    "bf16-true": Precision(true=torch.bfloat16),
    "32-true": Precision(),
    "64-true": Precision(true=torch.float64),
    "transformer-engine": Precision(true=torch.bfloat16),
    "transformer-engine-float16": Precision(true=torch.float16),
}
_ALIASES = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true", "None": "32-true"}


def precision_of(setting: str | int | None) -> Precision:
    """The types of a setting.

    Raises:
        ValueError: for an unknown one.
    """
    name = _ALIASES.get(str(setting), str(setting))
    if name not in _PRECISIONS:
        raise ValueError(f"unknown precision {setting!r}; use one of {', '.join(_PRECISIONS)}")
    return _PRECISIONS[name]


log = logging.getLogger(__name__)

#: A module up to this size is run for real, once, where fake tensors don't work.
_SMALL_BYTES = 200 << 20
_MARGIN_REAL = 0.1
#: The margin where the temporaries of convolutions couldn't be measured.
_MARGIN_UNREAD = 0.2
#: The least margin for a guess that decides about shapes.
_MARGIN_SHAPED = 0.05
#: A trace that took longer isn't repeated to learn how much its guesses matter.
_AGAIN_SECONDS = 4.0
#: The most batches that manual optimization may take until every optimizer has stepped.
_MOST_BATCHES = 8
#: Optimizers that count steps in tensors on the host (``torch/optim``; ASGD's are on the device), and those tensors' names.
_COUNTS_ON_HOST = tuple(
    getattr(torch.optim, name)
    for name in ("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop")
)
_NUMBERS = ("step", "mu_product")
_RESIDENT: tuple[Kind, ...] = ("parameters", "buffers", "optimizer", "input")


def trace(
    module: LightningModule,
    trainer: Trainer | None,
    batch: FirstBatch | Any,
    *,
    stage: str = "fit",
    precision: str | int | None = "32-true",
    target: Target = "cpu",
    validation: FirstBatch | Any | None = None,
    crashed: str | None = None,
) -> Footprint:
    """What one step of the module needs, found out without running it.

    Where the step can't be traced, it is run once for real if the module is small, else guessed; the footprint says so.

    Args:
        trainer: the trainer it was passed to, read only; None if there is none yet.
        batch: the result of :func:`first_batch`, or a batch as the step gets it.
        stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        precision: the Trainer's ``precision``.
        target: the kind of device that will run it (:func:`.cuda_overhead.target_of`); decides between kernels that save different tensors
            (attention, dropout, optimizers).
        validation: for ``"fit"``, the first batch of the validation loader, to be traced as well; None where there is no validation.
        crashed: if a process that traced this step has crashed, how it ended. Then the step isn't traced again.

    Raises:
        ValueError: for an unknown stage or precision.
    """
    types = precision_of(precision)
    if stage not in ("fit", "validate", "test", "predict"):
        raise ValueError(f"unknown stage {stage!r}; use 'fit', 'validate', 'test' or 'predict'")
    first = batch if isinstance(batch, FirstBatch) else FirstBatch(batch=batch, batch_size=batch_size_of(batch))
    tracing = _Tracing(module, trainer, first, stage, types, target, validation)
    try:
        if crashed is None:
            return tracing.with_margin()
        reason = crashed
    except RAISED as error:
        log.debug("the step can't be traced", exc_info=True)
        reason = error_line(error)
    if module_bytes(module) <= _SMALL_BYTES:
        try:
            return tracing.measure(fake=False, note=f"the step can't be traced ({reason}), and was run once for real on the CPU instead")
        except RAISED:
            log.debug("the step can't be run on the CPU either", exc_info=True)
    return guess(module, trainer, first, stage=stage, dtype=types.true, reason=reason)


class _Tracing:
    """The arguments of one call of :func:`trace`."""

    def __init__(
        self,
        module: LightningModule,
        trainer: Trainer | None,
        first: FirstBatch,
        stage: str,
        precision: Precision,
        target: Target,
        validation: FirstBatch | Any | None,
    ) -> None:
        self.module = module
        self.trainer = trainer
        self.first = first
        self.stage = stage
        self.precision = precision
        self.target = target
        self.validation = validation.batch if isinstance(validation, FirstBatch) else validation

    def with_margin(self) -> Footprint:
        """The fake step; if it depends on guesses about values, the margin is what other guesses would add. Without the values nobody knows
        how wrong a guess is, but a second trace with every guess made another way shows how much it matters: nothing, for a number that is
        only logged.
        """
        started = time.process_time()
        shadow = ShadowValues()
        footprint = self.measure(fake=True, shadow=shadow)
        if not shadow.guessed:
            return footprint
        margin = _MARGIN_SHAPED if shadow.shaped else 0.0
        if time.process_time() - started < _AGAIN_SECONDS:
            try:
                other = self.measure(fake=True, shadow=ShadowValues(other=True), validated=False)
                margin = max(margin, _whole_bytes(other) / _whole_bytes(footprint) - 1)
            except Exception:  # such values would end the user's own run, too
                log.debug("the step fails where guesses are made another way", exc_info=True)
        elif shadow.branched:
            margin = _MARGIN_SHAPED
        return replace(footprint, margin=max(footprint.margin, margin))

    def measure(self, *, fake: bool, note: str | None = None, shadow: ShadowValues | None = None, validated: bool = True) -> Footprint:
        """Two steps, the last one counted; with fake tensors or, where those won't do, real ones."""
        with ExitStack() as stack:
            stack.enter_context(drawing_nothing())
            mode = fake_mode()
            shadow = ShadowValues() if shadow is None else shadow
            validation = self.validation if validated else None
            if fake:
                module = fake_copy(self.module, mode, shadow, dtype=self.precision.true)
                batch = fake_copy(self.first.batch, mode, shadow, dtype=self.precision.true)
                validation = fake_copy(validation, mode, shadow, dtype=self.precision.true)
                stack.enter_context(as_if_real(shadow, self.target))
                stack.enter_context(mode)
                stack.enter_context(shadow)
            else:
                module = fake_copy(self.module, None, None, dtype=self.precision.true)
                batch = fake_copy(self.first.batch, None, None, dtype=self.precision.true)
                validation = fake_copy(validation, None, None, dtype=self.precision.true)
            return self._measure(module, batch, validation, shadow, note)

    def _tracker(self, module: LightningModule, batch: Any, shadow: ShadowValues, conduct: ConductWatch | None = None) -> MemoryTracker:
        """A tracker that knows what is held before the step."""
        on_cpu = self.target == "cpu"
        tracker = MemoryTracker(
            batch_size=self.first.batch_size,
            scratch=(cpu_scratch if on_cpu else cuda_scratch)(shadow.guesses),
            hidden=CPU_HIDDEN if on_cpu else CUDA_HIDDEN,
            see=None if conduct is None else conduct.see,
        )
        for parameter in module.parameters():
            tracker.mark(parameter, "parameters")
        for buffer in (*module.buffers(), *in_attributes(module)):
            tracker.mark(buffer, "buffers")
        for tensor in tensors_of(batch):
            tracker.mark(tensor, "input")
        return tracker

    def _measure(self, module: LightningModule, batch: Any, validation: Any, shadow: ShadowValues, note: str | None) -> Footprint:
        tracker: MemoryTracker | None = None

        def enter(phase: str) -> None:
            if tracker is not None:
                tracker.enter(cast(Phase, phase))

        training = self.stage == "fit"
        rehearsal = BareStep(
            module,
            self.trainer,
            self.stage,
            autocast_dtype=self.precision.autocast,
            default_dtype=self.precision.true,
            enter=enter,
        )
        rehearsal.build()
        if searching := keep_searching(rehearsal.optimizers):
            rehearsal.notes["LBFGS was taken to go through all iterations, and to keep its whole history"] = None
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        parameters = list(module.parameters())
        trainable = [parameter for parameter in parameters if parameter.requires_grad] if training else []
        conduct = ConductWatch(module) if training else None
        tracker = self._tracker(module, batch, shadow, conduct)
        watcher = BlockWatcher(find_blocks(module), tracker)

        def settle(warm_up: Callable[[], Any]) -> None:
            """Run a step that isn't counted. Where blocks are the smaller part of the module, there are layers beside them."""
            counter = CallCounter(module, lambda: tracker.phase == "forward")
            warm_up()
            counter.remove()
            blocks = watcher.blocks
            own = sum(parameter.numel() for block in blocks.values() for parameter in block.parameters())
            if module.automatic_optimization and (len(blocks) < 2 or 2 * own < sum(parameter.numel() for parameter in parameters)):
                again = watcher.blocks_again
                watcher.watch_layers({**again, **find_layers(module, counter.calls, {*blocks, *again})})

        nested: list[str] = []
        reached: set[int] = set()

        def complete(parameter: Tensor) -> None:
            reached.add(id(parameter))
            if parameter.grad is not None:
                tracker.mark(parameter.grad, "gradients")

        hooks = [parameter.register_post_accumulate_grad_hook(complete) for parameter in trainable]
        with ExitStack() as stack:
            stack.enter_context(announced(rehearsal.optimizers, automatic=module.automatic_optimization, enter=enter, nested=nested.append))
            stack.enter_context(tracker)
            if conduct is not None:
                stack.enter_context(conduct.watching(rehearsal))
            batches = self._train(rehearsal, batch, watcher, tracker, settle) if training else 1
            if not training:
                if len(find_blocks(module)) < 2:  # else one step is enough
                    settle(lambda: rehearsal.evaluation_step(batch))
                watcher.begin_step()
                tracker.record()
                rehearsal.evaluation_step(batch)
        for hook in hooks:
            hook.remove()

        states: dict[int, int] = dict.fromkeys(map(id, parameters), 0)
        for parameter, value in self._states(rehearsal.optimizers):
            if id(parameter) in states:
                states[id(parameter)] += tensor_bytes(value)
        learns = {id(parameter) for parameter in trainable}

        def bytes_of(parameter: nn.Parameter) -> tuple[int, int, int]:
            size = tensor_bytes(parameter)
            return size, size if id(parameter) in learns else 0, states.get(id(parameter), 0)

        updates = 1 if module.automatic_optimization else batches
        found = layers(module, tracker, watcher, bytes_of, batches=batches, updates=updates)
        live = tracker.live
        parameter_bytes, buffer_bytes, optimizer_bytes, input_bytes = (live[kind] for kind in _RESIDENT)
        gradient_bytes = sum(bytes_of(parameter)[1] for parameter in trainable)
        peak_bytes = max((moment.total_bytes for moment in found.moments), default=0)
        held_bytes, changes = held_by_callbacks(self.trainer, module, on_cpu=self.target == "cpu") if training else (0, [])
        normed = tuple(batch_norms(module))  # the evaluation below leaves the module in eval mode, in which no batch norm counts
        evaluated: tuple[int | None, tuple[int, ...], float] = None, (), 1.0
        if training and validation is not None:
            evaluated = self._evaluation_bytes(rehearsal, validation, shadow, watcher, [block.fqn for block in found.blocks])
        if any(is_compiled(part) for part in (*self.module.modules(), *module.modules())):
            changes.append(UNCOMPILED)
        assumptions = [*([note] if note else []), *shadow.guesses, *rehearsal.notes, *changes]
        return Footprint(
            parameters=sum(parameter.numel() for parameter in parameters),
            trainable_parameters=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            batch_size=self.first.batch_size,
            parameter_bytes=parameter_bytes,
            gradient_bytes=gradient_bytes,
            optimizer_bytes=optimizer_bytes,
            buffer_bytes=buffer_bytes + held_bytes,
            activation_bytes=found.activation_bytes,
            temporary_bytes=max(0, peak_bytes - gradient_bytes - found.activation_bytes),
            input_bytes=input_bytes,
            largest_parameter_bytes=max((tensor_bytes(parameter) for parameter in parameters), default=0),
            flops=found.flops,
            moved_bytes=found.moved_bytes,
            optimizer_work=found.optimizer_work,
            blocks=found.blocks,
            outer=found.outer,
            also_uses=found.also_uses,
            holders=found.holders,
            again=found.again,
            repeats=found.repeats,
            tape=found.tape,
            conduct=None if conduct is None else conduct.found(),
            tied=tied_groups(module),
            training=training,
            automatic_optimization=module.automatic_optimization,
            optimizers=len(rehearsal.optimizers),
            optimizer_classes=_torchs_own(rehearsal.optimizers),
            batch_norm=normed,
            random_draws=tuple(tracker.random_draws),
            streams=len(tracker.streams) - 1,
            unused_parameters=tuple(names[id(parameter)] for parameter in trainable if id(parameter) not in reached),
            configures_model=is_overridden("configure_model", self.module),
            moments=found.moments,
            reentrant=next(iter(nested), ""),
            traced=note is None,
            margin=_MARGIN_UNREAD if UNREAD in shadow.guesses else _MARGIN_REAL if note is not None or searching else 0.0,
            asked=rehearsal.asked,
            evaluation_bytes=evaluated[0],
            evaluation_parts=evaluated[1],
            evaluation_repeats=evaluated[2],
            evaluation_failed=training and validation is not None and evaluated[0] is None,
            assumptions=tuple(dict.fromkeys(assumptions)),
        )

    def _train(
        self,
        rehearsal: BareStep,
        batch: Any,
        watcher: BlockWatcher,
        tracker: MemoryTracker,
        settle: Callable[[Callable[[], None]], None],
    ) -> int:
        """Run training steps, first until one had a backward and the optimizers have their state, then counted; returns the number of
        counted ones. A count in which a step returned no loss begins again, with a batch's number that had one.

        Under manual optimization only the module knows when its optimizers step: as many batches as it takes for all of them to have done
        so are one cycle. Where an optimizer steps at some batches' numbers alone (a generator at every fifth), those of the first cycle are
        counted.
        """
        automatic = rehearsal.module.automatic_optimization
        waiting = {id(optimizer) for optimizer in rehearsal.optimizers}

        def stepped(optimizer: Any, *_: Any) -> None:
            waiting.discard(id(optimizer))

        hooks = [optimizer.register_step_post_hook(stepped) for optimizer in rehearsal.optimizers]
        index = 0

        def step(*, first: bool, last: bool) -> None:
            nonlocal index
            watcher.begin_step()
            rehearsal.training_step(batch, index, first=first, last=last)
            self._mark_states(rehearsal, tracker)
            index += 1

        settle(lambda: step(first=True, last=True))
        while (not rehearsal.went_back if automatic else waiting) and index < _MOST_BATCHES:
            step(first=True, last=True)
        if waiting:
            rehearsal.notes[f"an optimizer took no step in {index} batches; its state is unknown"] = None
        fill_history(rehearsal.optimizers)
        self._mark_states(rehearsal, tracker)
        tracker.record()
        if not automatic:
            batches, never = index, frozenset(waiting)
            waiting.update(map(id, rehearsal.optimizers))
            for _ in range(batches):
                step(first=True, last=True)
            if waiting != never:
                tracker.record()
                index = 0
                for _ in range(batches):
                    step(first=True, last=True)
        else:
            # Of an accumulation, run the first batch and the last: those between are like the last one's beginning.
            batches = min(rehearsal.accumulate, 2)
            tries, learning = _MOST_BATCHES if rehearsal.went_back else 1, index - 1
            for again in range(tries):
                if again:
                    tracker.record()
                went_back = list[bool]()
                for position in range(batches):
                    index = learning if again else index
                    step(first=position == 0, last=position == batches - 1)
                    went_back.append(rehearsal.went_back)
                if all(went_back):
                    break
            for note in {NO_LOSS, NO_GRADIENT}.intersection(rehearsal.notes) if any(went_back) else ():
                del rehearsal.notes[note]
                rehearsal.notes[f"{note} for a batch; the footprint is that of a batch that has one with a gradient"] = None
        for hook in hooks:
            hook.remove()
        return batches

    def _mark_states(self, rehearsal: BareStep, tracker: MemoryTracker) -> None:
        for _, value in self._states(rehearsal.optimizers):
            tracker.mark(value, "optimizer")
        if self.target != "cpu":
            for value in _on_host(rehearsal.optimizers):
                tracker.forget(value)

    def _states(self, optimizers: Sequence[Any]) -> Iterator[tuple[Any, Tensor]]:
        """Every tensor in the optimizers' state that is on the device, with its parameter."""
        host = set() if self.target == "cpu" else {id(value) for value in _on_host(optimizers)}
        for parameter, state in itertools.chain.from_iterable(optimizer.state.items() for optimizer in optimizers):
            yield from ((parameter, value) for value in tree_leaves(state) if isinstance(value, Tensor) and id(value) not in host)

    def _evaluation_bytes(
        self, rehearsal: BareStep, batch: Any, shadow: ShadowValues, watcher: BlockWatcher, blocks: Sequence[str]
    ) -> tuple[int | None, tuple[int, ...], float]:
        """The most bytes that a validation step holds besides what is kept from step to step, with its batch; None where it fails. The same
        by parts, if it runs the same blocks as training; and by how much more blocks return in all of their calls than in the first ones.
        """
        try:
            tracker = self._tracker(rehearsal.module, batch, shadow)
            watcher.follow(tracker)
            with tracker:
                rehearsal.begin_evaluation()
                watcher.begin_step()
                tracker.record()
                rehearsal.evaluation_step(batch, "validate")
            assert tracker.tape is not None
            most = _top_bytes(tracker.tape) - tracker.live["parameters"] - tracker.live["buffers"]
            parts = tuple(size + tracker.live["input"] for size in forward_bytes(tracker, watcher, blocks))
            return most, parts, watcher.repeats
        except RAISED as error:
            log.debug("the validation step can't be traced", exc_info=True)
            words = f"the validation step can't be traced ({type(error).__name__}), and is taken to need less than training"
            rehearsal.notes[words] = None
            return None, (), 1.0


def _torchs_own(optimizers: Sequence[Any]) -> tuple[str, ...]:
    """The names of the optimizers' classes; empty where one isn't torch's."""
    kinds = [type(optimizer) for optimizer in optimizers]
    own = all(kind.__module__.startswith("torch.optim") and getattr(torch.optim, kind.__name__, None) is kind for kind in kinds)
    return tuple(kind.__name__ for kind in kinds) if own else ()


def _on_host(optimizers: Sequence[Any]) -> Iterator[Tensor]:
    """Numbers in the state of torch's optimizers that are in the host's memory, unless those are fused or capturable."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(optimizer, _COUNTS_ON_HOST) and not group.get("fused") and not group.get("capturable"):
                states = [optimizer.state[parameter] for parameter in group["params"] if parameter in optimizer.state]
                yield from (state[name] for state in states for name in _NUMBERS if isinstance(state.get(name), Tensor))


def _top_bytes(tape: Tape) -> int:
    """The most that is alive at any moment of a tape."""
    sizes: dict[int, int] = {}
    level = top = 0
    for event in tape:
        if event.action in ("allocate", "free", "resize"):
            level += event.size_bytes - sizes.get(event.storage, 0)
            sizes[event.storage] = event.size_bytes
            top = max(top, level)
    return top


def module_bytes(module: nn.Module) -> int:
    """Bytes of its parameters, without those that have no shape yet."""
    return sum(tensor_bytes(parameter) for parameter in module.parameters() if not is_lazy(parameter))


def _whole_bytes(footprint: Footprint) -> int:
    """The bytes of a step at its peak on one device."""
    resident = footprint.parameter_bytes + footprint.optimizer_bytes + footprint.buffer_bytes + footprint.input_bytes
    return max(1, resident + max((moment.total_bytes for moment in footprint.moments), default=0))
