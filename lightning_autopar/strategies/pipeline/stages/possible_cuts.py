"""Runs a step once and finds out where it can be cut, and which tensors cross each cut.

The user's hook runs unchanged, on a few samples. Code outside blocks is watched function by function. A tensor crosses a cut if that code
makes it from parameters, blocks' outputs or random draws and uses it after the cut. Meant for a forked child, but leaves the module as it
was. Knows Lightning modules; nothing of devices, plans or processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake

from lightning_autopar._lightning import LightningModule, Trainer
from lightning_autopar.exact.logs.logging_hooks import overridden, reads_batch
from lightning_autopar.exact.random import generator_states as rng
from lightning_autopar.memory.trace.bare_step import STEPS, BareStep
from lightning_autopar.memory.trace.first_batch import copied, tensors_of
from lightning_autopar.strategies.pipeline.stages.block_router import unseen
from lightning_autopar.strategies.pipeline.stages.cut_tensors import StepRecording
from lightning_autopar.strategies.pipeline.stages.module_state import ModuleState, attributes, changes, counters, host_generators
from lightning_autopar.strategies.pipeline.stages.step_recorder import StepRecorder
from lightning_autopar.strategies.pipeline.stages.tainted_tensors import is_marked
from lightning_autopar.strategies.trials.undo import undone

_HOOKS = frozenset(f"_forward_{kind}{suffix}" for kind in ("hooks", "pre_hooks") for suffix in ("", "_with_kwargs", "_always_called"))

#: How many other random numbers are tried where a step takes them from Python or NumPy: one that does something else with a probability of
#: one half is found in all but one case of 64.
_SEEDS = 6


def record(
    module: LightningModule,
    trainer: Trainer | None,
    hook: str,
    batch: Any,
    blocks: Sequence[str],
    *,
    rows: int = 0,
    batch_idx: int = 0,
    loader: int = 0,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    written: frozenset[str] = frozenset(),
) -> StepRecording:
    """Record one run of a hook.

    Args:
        module: the user's module, set up, on the CPU, with real or fake tensors; it is left as it was.
        hook: ``"training_step"``, ``"validation_step"``, ``"test_step"`` or ``"predict_step"``. For training, the caller sets the module's
            mode; for others it is set to evaluation.
        batch: as the hook gets it; copies of it are used.
        blocks: FQNs of the blocks, see :attr:`lightning_autopar.memory.footprint.Footprint.blocks`.
        loader: the number of the batch's loader, in an evaluation.
        context: the precision's forward context (automatic mixed precision).
        written: FQNs of buffers and parameters that another hook of the same run writes to, and this one may read.

    Raises:
        ValueError: if a block has no such name.
        Exception: whatever the user's step raises.
    """
    hidden = unseen(module)
    if hidden is not None:
        return StepRecording(hook=hook, blocks=tuple(blocks), crossings={}, uncuttable=dict.fromkeys(blocks, hidden), rows=rows)
    grad = hook == STEPS["fit"]
    state = rng.capture({})
    with _left_as_it_was(module):
        with undone(module) as effects:
            call = _caller(module, trainer, hook, batch_idx, loader, None)
            first = copied(batch)
            with (
                torch.set_grad_enabled(grad),
                context(),
                changes(module, first) as changed,
                attributes(module) as kept,
                counters(module) as counted,
            ):
                call(first)
        rng.restore(state, {})
        fakes = any(is_fake(parameter) for parameter in module.parameters())
        sources = ModuleState(module, written | frozenset(changed.state) | frozenset(() if fakes else effects.written))

    ended = f"on_{'train' if grad else hook.removesuffix('_step')}_batch_end"
    own = None if trainer is None else next((each for each in overridden(trainer, [ended]) if reads_batch(*each)), None)
    reader = None if own is None else f"{type(own[0]).__name__}.{ended}"

    def recorded(*, again: bool, seed: int | None = None) -> tuple[StepRecording, bool, bool]:
        """The recording of one run, whether blocks ran again in it, and whether it drew from Python's or NumPy's generator, which may begin
        elsewhere.
        """
        if seed is not None:
            rng.restore({name: value for name, value in rng.seeded(seed).items() if name != "torch"}, {})
        with _left_as_it_was(module), undone(module):
            began = host_generators()
            recorder = StepRecorder(module, hook, blocks, sources, again=again)
            call = _caller(module, trainer, hook, batch_idx, loader, recorder.use)
            with torch.set_grad_enabled(grad), context():
                autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
                with recorder.recording():
                    for each in kept:
                        each.put()
                    recorder.finish(call(given := copied(batch)))
                for each in kept:
                    if each.name in recorder.kept and each.is_new():
                        recorder.refuse(f"the step keeps {each.name!r} for the next one, which only some of the stages would have")
                if reader is not None and any(map(is_marked, tensors_of(given))):
                    recorder.refuse(f"the step puts what it computes into its batch, where {reader} wouldn't find it")
        drew = host_generators() != began
        rng.restore(state, {})
        found = recorder.recorded(rows=rows, autocast=autocast, changes_batch=changed.batch, counters=tuple(counted))
        return found, recorder.ran_again, drew

    found, ran_again, drew = recorded(again=False)
    for seed in range(_SEEDS if drew else 0):
        other, *_ = recorded(again=False, seed=seed)
        if (other.calls, other.operations) != (found.calls, found.operations):
            decided = "random numbers of Python's or NumPy's decide what the step computes, so that no two need be alike"
            return replace(found, uncuttable=dict.fromkeys(blocks, decided))
    if ran_again:
        other, *_ = recorded(again=True)
        if other.uncuttable.keys() < found.uncuttable.keys():
            return other
        return replace(found, uncuttable={block: other.uncuttable.get(block, reason) for block, reason in found.uncuttable.items()})
    return found


@contextmanager
def _left_as_it_was(module: LightningModule) -> Iterator[None]:
    """While open, a run may change buffers, gradients and modes; they are restored at the end."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    modes = [(child, child.training) for child in module.modules()]
    hooks = [(each, dict(each)) for child in module.modules() for name, each in vars(child).items() if name in _HOOKS]
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    try:
        yield
    finally:
        for buffer, value in buffers:
            if buffer.shape == value.shape:
                buffer.data.copy_(value)
            else:  # the step has made an empty one larger
                buffer.data = value
        for child, mode in modes:
            child.training = mode
        for registered, before in hooks:
            registered.clear()
            registered.update(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _caller(
    module: LightningModule, trainer: Trainer | None, hook: str, batch_idx: int, loader: int, use: Callable[[Any], None] | None
) -> Callable[[Any], Any]:
    """A function that calls the hook, with stubs where Lightning would use the trainer; ``use`` gets the logged values."""
    stage = next(stage for stage, name in STEPS.items() if name == hook)
    rehearsal = BareStep(module, trainer, stage, autocast_dtype=None, default_dtype=None, enter=lambda phase: None)
    rehearsal.loader = loader
    module.__dict__["configure_model"] = lambda: None  # it is built already
    rehearsal.build()
    if stage in ("validate", "test"):  # where the hooks at an epoch's start make what its steps accumulate into
        rehearsal.begin_evaluation("validation" if stage == "validate" else stage)
    if use is not None:
        note = use
        for child in module.modules():
            if "log_dict" in child.__dict__:
                child.__dict__["log"] = lambda name, value=None, *args, **kwargs: note(value)
                child.__dict__["log_dict"] = lambda dictionary=None, *args, **kwargs: note(dictionary)
    return lambda batch: rehearsal._call(hook, batch, batch_idx)
