"""Runs a module's steps in stages, cut in several ways, beside the whole module: two real steps with the user's optimizer, in one process.

Loss, logged values, every gradient and every weight must agree to one part in a million in single precision, and in double precision where
rounding might explain a larger difference. Meant for a forked child. Knows Lightning modules; nothing of devices, schedules or plans.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.utils._pytree import tree_leaves

from lightning_autopar._lightning import LightningModule, Trainer
from lightning_autopar._lightning import grads as lightning_grads
from lightning_autopar.exact.absent.absent_tensor import MissingValue, lacks_memory
from lightning_autopar.exact.logs.log_rules import recorded_logs
from lightning_autopar.exact.random import generator_states as rng
from lightning_autopar.memory.fakes.fake_copies import fake_copy
from lightning_autopar.memory.trace.bare_step import BareStep
from lightning_autopar.memory.trace.find_blocks import find_blocks
from lightning_autopar.memory.trace.first_batch import mapped
from lightning_autopar.strategies.pipeline.rehearsal.difference import (
    EQUAL,
    Outcome,
    Step,
    difference,
    leftovers_apart,
    of_hook,
    tensor_distance,
)
from lightning_autopar.strategies.pipeline.rehearsal.in_one_process import Precision, Together, rehearse
from lightning_autopar.strategies.pipeline.stages.cut_tensors import Staging, StepRecording, with_loader
from lightning_autopar.strategies.pipeline.stages.possible_cuts import record
from lightning_autopar.strategies.pipeline.stages.stage_module import UnlikeRecordedError
from lightning_autopar.strategies.trials.undo import same_values
from lightning_autopar.text import error_line, users_line

_LOG = logging.getLogger(__name__)

#: The most stages of one trial: each runs all of the step's code up to its own end.
_MOST_STAGES = 8
#: The tolerance in single precision, where the step can't be run in double.
_ROUNDING = 1e-5


class CannotTry(RuntimeError):
    """The whole module's step fails, which says nothing about stages."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """What a hook is called with.

    Args:
        batches: makers of one batch each, for one step after the other.
        rows: samples of the first one.
        loader: the number of their loader, in an evaluation.
        besides: a script for each of the evaluation's other loaders.
    """

    batches: tuple[Callable[[], Any], ...]
    rows: int
    loader: int = 0
    besides: tuple[Script, ...] = ()

    def to(self, dtype: torch.dtype | None) -> Script:
        """The script with floating-point tensors of that type; unchanged if None."""
        if dtype is None:
            return self
        batches = tuple(lambda make=make: _cast(make(), dtype) for make in self.batches)
        return replace(self, batches=batches, besides=tuple(each.to(dtype) for each in self.besides))


class Trial:
    """The whole module beside its stages.

    Args:
        module: built (``configure_model`` has run); it isn't changed.
        trainer: read only; None where there is none.
        scripts: of each hook; ``"training_step"`` first where it is among them.
        fn: what the trainer does: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        blocks: FQNs of those before which a stage may begin; the module's repeated blocks unless given.
    """

    def __init__(
        self,
        module: LightningModule,
        trainer: Trainer | None,
        scripts: Mapping[str, Script],
        fn: str,
        precision: Precision,
        blocks: Sequence[str] = (),
    ) -> None:
        self._original = module, dict(scripts)
        self._blocks = blocks or list(find_blocks(module))
        self._trainer = trainer
        self._fn = fn
        self._precision = precision
        self._start = rng.capture({}, cuda=False)
        self._module: LightningModule = fake_copy(module, None, None, dtype=precision.true)
        self._scripts = {hook: script.to(precision.true) for hook, script in scripts.items()}
        self._staging = Staging()
        self._theirs: dict[str, Outcome] = {}
        self._after: LightningModule = module
        #: Buffers that a training step changes.
        self.counted: tuple[str, ...] = ()
        #: Lists to which a step appends what only the last stage has.
        self.appended: dict[str, None] = {}
        #: Notes of hooks that failed there when the whole module was tried as one stage.
        self._failed: dict[str, None] = {}
        self._double: Trial | None = None

    def run_whole(self) -> str | None:
        """Run the whole module's steps; returns a reason if its optimizer runs a step more than once.

        Raises:
            CannotTry: if they fail.
        """
        try:
            return self._whole()
        except Exception as error:
            where = "".join(f"in {hook}: " for hook in [*self._theirs][-1:] if hook != "training_step")
            raise CannotTry(where + error_line(error)) from error

    @property
    def recordings(self) -> Mapping[str, StepRecording]:
        """What :meth:`record` has recorded, by hook."""
        return self._staging.hooks

    def record(self) -> None:
        """Record each hook.

        Raises:
            CannotTry: if an evaluation fails that comes before any training.
        """

        def of(script: Script, hook: str, written: frozenset[str]) -> StepRecording:
            copy: LightningModule = fake_copy(self._module, None, None)
            rng.restore(self._start, {})
            told: Any = {"rows": script.rows, "loader": script.loader, "context": self._precision.context, "written": written}
            return record(copy, self._trainer, hook, script.batches[0](), self._blocks, **told)

        def one(hook: str, written: frozenset[str]) -> StepRecording:
            script = self._scripts[hook]
            try:
                found = of(script, hook, written)
                for each in script.besides:
                    found = with_loader(found, of(each, hook, written), each.loader)
                return found
            except Exception as error:  # whatever the user's step raises
                if hook == "training_step":
                    raise
                raise CannotTry(f"a pipeline's cuts are recorded before any training, where {hook} fails: {error_line(error)}") from error

        found = recorded_together(list(self._scripts), one)
        self._staging = Staging(hooks=found)

    def narrow(self, blocks: Sequence[str], uncuttable: dict[str, str]) -> str | None:
        """Try cuts until all that are left work; the others go to ``uncuttable``. Returns a reason if no single cut is the cause."""
        alone = False
        while possible := [block for block in blocks[1:] if block not in uncuttable]:
            failed = {cuts: words for cuts in ways_to_cut(possible) if (words := self.compare(cuts)) is not None}
            if not failed:
                return None
            if alone:
                cuts, words = next(iter(failed.items()))
                return f"{words} (cut before {', '.join(repr(cut) for cut in cuts)})"
            for block in possible:
                words = failed[(block,)] if (block,) in failed else self.compare((block,))
                if words is not None:
                    uncuttable[block] = words
            alone = True
        return None

    def compare(self, cuts: tuple[str, ...]) -> str | None:
        """What stages with these cuts change, in a sentence; None where they change nothing."""
        try:
            ours = self._stages(cuts)
        except UnlikeRecordedError as error:
            return f"{error}{users_line(error)}"
        except Exception as error:  # the user's code on a stage, or the error that a value is missing there
            _LOG.debug("the step fails in stages cut before %s", cuts, exc_info=True)
            return f"in stages the step fails ({error_line(error)})"
        if isinstance(ours, str):
            return ours
        found = self._worst(ours)
        if found is None:
            return None
        distance, words = found
        if math.isfinite(distance):  # this may still be rounding
            exact = self._compare_in_double(cuts)
            if exact is None or (math.isinf(exact[0]) and distance <= _ROUNDING):
                return None
            if math.isfinite(exact[0]):
                words = exact[1]
        return words

    def _compare_in_double(self, cuts: tuple[str, ...]) -> tuple[float, str] | None:
        """The difference without single precision's rounding; infinite where the step only runs in single precision."""
        try:
            if self._double is None:
                module, scripts = self._original
                self._double = Trial(module, self._trainer, scripts, self._fn, Precision(true=torch.float64), self._blocks)
                rng.restore(self._start, {})
                self._double._start = self._start
                self._double._whole()
                self._double.record()
            ours = self._double._stages(cuts)
            return (math.inf, ours) if isinstance(ours, str) else self._double._worst(ours)
        except Exception as error:
            _LOG.debug("the step can't be run in double precision", exc_info=True)
            return math.inf, f"in double precision the step fails ({error_line(error)})"

    def _whole(self) -> str | None:
        copy: LightningModule = fake_copy(self._module, None, None)
        rng.restore(self._start, {})
        rehearsal = rehearse(copy, self._trainer, self._fn, self._precision)
        before = _values(copy)
        outputs: list[Any] = []
        call = rehearsal._call

        def noted(*args: Any) -> Any:
            outputs.append(call(*args))
            return outputs[-1]

        rehearsal.__dict__["_call"] = noted
        rng.restore(self._start, {})
        for hook, script in self._scripts.items():
            outcome = self._theirs[hook] = Outcome()
            self._begin(hook, rehearsal)
            for index, batch in enumerate(script.batches):
                outputs.clear()
                with recorded_logs(copy) as logged, norms_aside():
                    if hook == "training_step":
                        rehearsal.training_step(batch(), index)
                    else:
                        with torch.no_grad(), self._precision.context():
                            noted(hook, batch(), 0)
                step = Step(logged=logged)
                outcome.steps.append(step)
                if len(outputs) > 1:
                    name = type(rehearsal.optimizers[0]).__name__
                    return f"the optimizer {name} asks for the step {len(outputs)} times, and a pipeline runs it once"
                if hook == "training_step":
                    step.loss = _loss(outputs[0])
                    step.gradients = {name: _copied(value.grad) for name, value in copy.named_parameters()}
                else:
                    step.returned = outputs[0]
                _end(step, copy, rehearsal, before)
                if hook == "training_step" and index == 0:
                    self.counted = tuple(name for name, value in step.buffers.items() if not same_values(value, before[name]))
            outcome.notes = tuple(rehearsal.notes)
        self._after = copy
        for optimizer in rehearsal.optimizers:
            state = optimizer.state_dict()
            entries = state["state"] if "state" in state else dict.fromkeys(filter(torch.is_tensor, tree_leaves(state)))
            if not all(type(position) is int for position in entries):
                words = "keeps a state that isn't torch's (of each parameter, by its number), so that those of stages can't be put together"
                return f"the optimizer {type(optimizer).__name__} {words}"
        return None

    def _stages(self, cuts: tuple[str, ...]) -> dict[str, Outcome] | str:
        """The results of all stages together; a sentence if what they keep for later hooks differs."""
        rng.restore(self._start, {})
        together = Together(self._module, self._trainer, self._staging, cuts, self._fn, self._precision)
        before = [_values(stage.module, stage.owned.names) for stage in together.stages]
        rng.restore(self._start, {})
        found: dict[str, Outcome] = {}
        for hook, script in self._scripts.items():
            outcome = found[hook] = Outcome()
            for stage in together.stages:
                self._begin(hook, stage.rehearsal)
            for index, batch in enumerate(script.batches):
                step = Step()
                with norms_aside():
                    if hook == "training_step":
                        loss = together.training_step([(batch, 1.0)], index)
                        step.loss = None if loss is None else float(loss.double())
                        step.gradients = _gradients(together)
                    else:
                        step.returned = together.evaluation_step(hook, batch)
                step.logged = dict(together.logged)
                self._collect(step, together, before, self._theirs[hook].steps[index])
                outcome.steps.append(step)
            outcome.notes = tuple(dict.fromkeys(note for stage in together.stages for note in stage.rehearsal.notes))
        left = leftovers_apart(self._module, self._after, [stage.module for stage in together.stages], self._blocks)
        if isinstance(left, str):
            return left
        self.appended.update(dict.fromkeys(left))
        if self._fn == "fit" and (sentence := together.end_epoch()) is not None:
            return sentence
        if not cuts:
            self._failed = together.failed
        elif together.failed:  # such hooks may fail because it's a trial, whole as well
            whole = self._stages(())
            apart = [note for note in together.failed if note not in self._failed]
            return whole if isinstance(whole, str) else of_hook(apart[0]) if apart else found
        return found

    def _collect(self, step: Step, together: Together, before: Sequence[Mapping[str, Tensor]], theirs: Step) -> None:
        """The stages' values after a step, each stage's part."""
        for index, (stage, values) in enumerate(zip(together.stages, before, strict=True)):
            part = Step()
            _end(part, stage.module, stage.rehearsal, values)
            for ours, found in ((step.moved, part.moved), (step.buffers, part.buffers)):
                # A later stage that has a buffer only for code whose shapes it needs doesn't change that buffer.
                counts = {name for name in found if stage.owned.primary[name] == index or name in stage.owned.shared}
                ours.update({name: _further(found[name], ours.get(name), theirs.moved | theirs.buffers, name) for name in counts})
            if not step.settings or _apart(part.settings, theirs.settings):
                step.settings = part.settings
        missing = ({*theirs.moved, *theirs.buffers}) - {*step.moved, *step.buffers}
        assert not missing, f"no stage has {sorted(missing)}"

    def _begin(self, hook: str, rehearsal: BareStep) -> None:
        if self._fn == "fit" and hook != "training_step":
            rehearsal.begin_evaluation()

    def _worst(self, ours: Mapping[str, Outcome]) -> tuple[float, str] | None:
        """The difference of the first hook that has one."""
        for hook, outcome in ours.items():
            found = difference(outcome, self._theirs[hook])
            if found is not None:
                return found if hook == "training_step" else (found[0], f"in {hook}, {found[1]}")
        return None


def recorded_together(hooks: Sequence[str], record_one: Callable[[str, frozenset[str]], StepRecording]) -> dict[str, StepRecording]:
    """Record a run's hooks, each of which must know what any of them writes to.

    Args:
        record_one: records a hook, given what the others write to.
    """
    found: dict[str, StepRecording] = {}
    written: frozenset[str] = frozenset()
    known: dict[str, frozenset[str]] = {}
    for hook in hooks:
        found[hook], known[hook] = record_one(hook, written), written
        written |= found[hook].written
    for hook in hooks:
        if written - known[hook] - found[hook].written:
            found[hook] = record_one(hook, written)
    return found


def ways_to_cut(possible: Sequence[str]) -> list[tuple[str, ...]]:
    """Cuts to try: each block begins a stage at least once; two, three and as many stages as make sense, uneven ones among them.

    Args:
        possible: the blocks that may begin a stage, in the order in which they run.
    """
    rounds = -(-len(possible) // (_MOST_STAGES - 1))
    ways = [tuple(possible[start::rounds]) for start in range(rounds)]
    ways.append((possible[len(possible) // 3],))
    if len(possible) > 2:
        ways.append((possible[0], possible[-1]))
    return list(dict.fromkeys(ways))


@contextmanager
def norms_aside() -> Iterator[None]:
    """While open, nothing clips gradients and every norm of them is 1: over several stages the engine takes norms. The functions' code is
    replaced, as their names may have been imported anywhere (``pipeline/weights/clipping_norms`` does the same).
    """
    names = ("_get_total_norm", "clip_grad_norm_", "_clip_grads_with_norm_", "clip_grad_value_")
    exchanged: dict[Any, Any] = {inspect.unwrap(getattr(clip_grad, name)): _one for name in names}
    exchanged[inspect.unwrap(lightning_grads.grad_norm)] = _none
    kept = {function: function.__code__ for function in exchanged}
    for function, other in exchanged.items():
        function.__code__ = other.__code__
    try:
        yield
    finally:
        for function, code in kept.items():
            function.__code__ = code


def _one(*args: Any, **kwargs: Any) -> Any:
    return torch.ones(())


def _none(*args: Any, **kwargs: Any) -> Any:
    return {}


def _end(step: Step, copy: LightningModule, rehearsal: BareStep, before: Mapping[str, Tensor]) -> None:
    parameters = {name for name, _ in copy.named_parameters(remove_duplicate=False)}
    for name, value in _values(copy, before).items():
        if name in parameters:
            step.moved[name] = value.double() - before[name].double()
        else:
            step.buffers[name] = value
    step.settings = [
        {name: float(value) for name, value in group.items() if isinstance(value, (int, float)) and not isinstance(value, bool)}
        for optimizer in rehearsal.optimizers
        for group in optimizer.param_groups
    ]


def _values(module: LightningModule, names: Any = None) -> dict[str, Tensor]:
    """Copies of parameters and buffers, tied ones under each name; all, or those of ``names``."""
    tensors = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}
    wanted = {name: tensor for name, tensor in tensors.items() if names is None or name in names}
    if (lost := next((name for name, tensor in wanted.items() if lacks_memory(tensor)), None)) is not None:
        raise MissingValue(f"the data of {lost!r} is set to a tensor whose values another stage has")
    return {name: tensor.detach().clone() for name, tensor in wanted.items()}


def _further(value: Tensor, other: Tensor | None, theirs: Mapping[str, Tensor], name: str) -> Tensor:
    """The value, of several stages', that is furthest from the right one."""
    if other is None or tensor_distance(value, theirs[name], 0.0) > tensor_distance(other, theirs[name], 0.0):
        return value
    return other


def _gradients(together: Together) -> dict[str, Tensor | None]:
    """Each parameter's gradient, of the first stage that has it; later stages' are the same sum."""
    found: dict[str, Tensor | None] = {}
    for stage in together.stages:
        for name, parameter in stage.module.named_parameters():
            if name in stage.owned.names and name not in found:
                found[name] = _copied(parameter.grad)
    return found


def _apart(ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]]) -> bool:
    """Whether a stage's optimizers have other settings than the whole module's."""
    pairs = [(one.get(name, math.inf), value) for one, other in zip(ours, theirs, strict=True) for name, value in other.items()]
    return any(abs(mine - value) > EQUAL * abs(value) for mine, value in pairs if not math.isnan(value))


def _loss(output: Any) -> float | None:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return None if loss is None else float(loss.detach().double())


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.is_sparse:
        return leaf.detach().to_dense()  # comparisons have no sparse kernels
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    return mapped(batch, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
