"""Moves weights and counters from where they start, so that the first step doesn't hide what later ones compute.

A second network may start as a copy of the first, and a gate or an adapter at zero. At the first weights their terms of a loss are zero,
and a sum of a sum and a mean looks like a sum alone. A projection may be drawn anew after a thousand calls; no first step draws it. A term
may begin at some step: the numbers that a step compares its own with tell at which.
Knows a module's parameters, buffers, attributes and code; nothing of how batches are made.
"""

from __future__ import annotations

import ctypes
import dis
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from inspect import isfunction
from itertools import chain, pairwise
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_autopar._lightning import LightningModule
from lightning_autopar._lightning_compat import transfer_batch
from lightning_autopar._root import NOT_THE_USERS, package_of
from lightning_autopar._temporary import patched
from lightning_autopar.constraints import LOSS, SplitFinding
from lightning_autopar.exact.data.counted_entries import Count
from lightning_autopar.exact.data.rank_share import Dealing, share_of
from lightning_autopar.exact.logs.log_rules import LogComparison, Logged, compare_logs, recorded_in
from lightning_autopar.exact.random.whole_batch_draws import DrawPlan
from lightning_autopar.exact.step.kept_attributes import Place
from lightning_autopar.memory.trace.bare_step import BareStep
from lightning_autopar.memory.trace.first_batch import copied, tensors_of
from lightning_autopar.memory.trace.step_number import LATER, Noted, integers_in, step_number
from lightning_autopar.strategies.trials import undo
from lightning_autopar.strategies.trials.draw_probe import everything
from lightning_autopar.strategies.trials.first_batch_parts import BatchParts
from lightning_autopar.strategies.trials.kept_runs import KeptRuns, Step
from lightning_autopar.strategies.trials.part_weights import LossArguments
from lightning_autopar.strategies.trials.recorded_backward import EQUAL, difference_of
from lightning_autopar.text import error_line

_LOG = logging.getLogger(__name__)
#: By how much a weight is moved at most, as a share of it, and a weight of zero. A term that is the square of what moves has to be seen
#: beside a loss of which 1e-5 count.
_SHARE, _AT_ZERO = 0.25, 0.1
#: How many elements of a parameter are moved, about: it takes few for two networks to differ.
_ELEMENTS = 1 << 15
#: How many later steps are tried at most.
_LATER_STEPS = 12
#: Where counters are set, divisible by the numbers up to 16 and by a million, for what is done every so often; and one less, as some steps
#: count first.
_AHEAD = (720_720_000_000, 720_719_999_999)
#: Up to which a difference may be rounding, where double precision can't tell.
_ROUNDING = 1e-5
#: How long a step and its parts may take on a batch that was changed: so many seconds, and so many times what the batch itself takes. A
#: solver whose steps shrink until an error is small goes on for ever where the error is NaN.
LEAST_SECONDS, _TIMES_AS_LONG = 5.0, 20.0
#: A larger module isn't copied in double precision for each batch of other entries: beside its float32 weights that takes twice as much.
LARGE_BYTES = 256 << 20


@contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """While open, the code of this thread runs for at most so long.

    Raises:
        TimeoutError: in that code, between two of its instructions.
    """
    thread, lock, closed = ctypes.c_ulong(threading.get_ident()), threading.Lock(), False

    def end() -> None:
        with lock:
            if not closed:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(TimeoutError))

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            closed = True
        timer.cancel()
        timer.join()


@contextmanager
def nudged(module: nn.Module) -> Iterator[None]:
    """While open, some elements of every parameter are elsewhere, those without gradients as well; what takes no real numbers stays. None
    changes its sign, as a step may take its root.

    Args:
        module: has its weights back afterwards. The generators of random numbers aren't used.
    """
    generator = torch.Generator().manual_seed(0)
    moved: list[tuple[nn.Parameter, Tensor]] = []
    for parameter in module.parameters():
        real = parameter.is_floating_point() and parameter.device.type == "cpu" and parameter.layout is torch.strided
        if nn.parameter.is_lazy(parameter) or not real or not parameter.numel():
            continue
        part = _part(parameter)
        moved.append((parameter, part.clone()))
        noise = (2 * torch.rand(part.shape, generator=generator) - 1).to(part.dtype)
        part.copy_(torch.where(part == 0, _AT_ZERO * noise.abs(), part * (1 + _SHARE * noise)))
    try:
        yield
    finally:
        for parameter, before in moved:
            _part(parameter).copy_(before)


@contextmanager
def counted_on(buffers: Mapping[str, Tensor], places: Mapping[str, Place], count: int | None, noted: Noted) -> Iterator[bool]:
    """While open, the counters among these stand at ``count``; gives whether there are any.

    Args:
        buffers: some that a step changes, by name.
        places: where attributes are that it changes, by name.
        count: None for where they stand.
        noted: see :func:`step_number`.
    """
    tensors = [buffer for buffer in buffers.values() if buffer.numel() == 1 and buffer.dtype in (torch.int64, torch.float32, torch.float64)]
    before = [buffer.clone() for buffer in tensors]
    numbers = [(space, key, space[key]) for space, key in places.values() if type(space.get(key)) is int]
    for buffer in tensors:
        buffer.fill_(buffer if count is None else count)
    for space, key, number in numbers:
        space[key] = step_number(number if count is None else count, noted)
    try:
        yield bool(tensors or numbers)
    finally:
        for buffer, value in zip(tensors, before, strict=True):
            buffer.copy_(value)
        for space, key, number in numbers:
            space[key] = number


def counters(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Place]]:
    """The buffers and the attributes that the code of a user's module counts up by one, in a step or in a hook, by name."""
    buffers, places = dict[str, Tensor](), dict[str, Place]()
    for prefix, child in module.named_modules():
        for name in chain.from_iterable(_counted(function.__code__) for function in _functions(child)):
            if isinstance(buffer := child._buffers.get(name), Tensor):
                buffers[f"{prefix}.{name}"] = buffer
            elif type(number := getattr(child, name, None)) is int:
                vars(child).setdefault(name, number)  # the class's
                places[f"{prefix}.{name}"] = vars(child), name
    return buffers, places


def compared_with(module: nn.Module, names: Collection[str]) -> Iterator[int]:
    """The integers that code of a user's module may compare counters with, by the functions that name one of these buffers."""
    own = {name.rpartition(".")[2] for name in names}
    for child in module.modules():
        for function in _functions(child):
            if own & set(function.__code__.co_names):
                yield from integers_in(function.__code__, vars(child))


def _functions(module: nn.Module) -> list[FunctionType]:
    """The functions of a user's class, and of its bases that are no framework's."""
    classes = (each for each in type(module).__mro__ if package_of(each) not in NOT_THE_USERS)
    return [function for each in classes for function in vars(each).values() if isfunction(function)]


@cache
def _counted(code: CodeType) -> list[str]:
    """Names of the attributes that a function counts up by one."""
    last, found = list[dis.Instruction](), list[str]()
    for each in dis.get_instructions(code):
        adds = (one.argval == 1 and plus.argrepr in ("+", "+=") for one, plus in pairwise(last))
        if each.opname == "STORE_ATTR" and any(adds):
            found.append(str(each.argval))
        last = [*last[-3:], each]
    return found


def later_draws(
    plan: DrawPlan, buffers: Mapping[str, Tensor], places: Mapping[str, Place], draws: Callable[[], DrawPlan]
) -> tuple[DrawPlan, str]:
    """The plan, with the random draws that a step makes only once its counters have gone far; and what it raises at all of these.

    Args:
        buffers: as for :func:`counted_on`, as ``places``.
        draws: runs the step, as it was run for the plan.
    """
    failures = list[str]()
    for count in _AHEAD if plan.draws is not None else ():
        with counted_on(buffers, places, count, Noted()) as any_counters:
            try:
                plan = with_draws(plan, draws()) if any_counters else plan
            except Exception as error:  # it counts no farther than the items of a list, say
                _LOG.debug("the step can't be tried with counters that have gone far", exc_info=True)
                failures.append(error_line(error))
    return plan, failures[0] if len(failures) == len(_AHEAD) else ""


def with_draws(plan: DrawPlan, seen: DrawPlan) -> DrawPlan:
    """The plan, with those draws of a later step that it lacks."""
    found = {(draw.op, draw.shape) for draw in plan.draws or ()}
    later = [draw for draw in seen.draws or () if (draw.op, draw.shape) not in found]
    return plan if plan.draws is None else replace(plan, draws=(*plan.draws, *later))


def _part(parameter: nn.Parameter) -> Tensor:
    """The first rows, about so many elements."""
    whole = parameter.detach()
    return whole[: max(1, _ELEMENTS * whole.shape[0] // whole.numel())] if whole.ndim else whole


class LaterSteps(KeptRuns):
    """The runs of a module's step, also as a later one."""

    rehearsal: BareStep
    #: The buffers' values before a step; and the names of those that steps count on.
    buffers: dict[str, Tensor]
    counted: tuple[str, ...]
    #: The buffers that each run has changed, and what it has logged.
    moved: list[dict[str, Tensor]]
    logs: list[dict[tuple[str, str], Logged]]

    def __init__(self, module: LightningModule, batches: BatchParts, writes: Collection[str] | None) -> None:
        super().__init__(module, batches, writes)
        #: The number of the steps that run; None for the first ones. And which other numbers decide what steps do.
        self.number: int | None = None
        self.noted = Noted()
        self.hooked: Any = None  # the batch that the hook at its start is to get, if another one than the step
        self.skips = False  # whether a step returned None
        self.too_many = False  # whether there are more of them than can be tried
        self.seconds = 0.0  # what the step takes on the batch

    def losses(self, batch: Any) -> list[Tensor]:
        """Of a step."""
        raise NotImplementedError

    def _stepped(self, hook: str, given: Any, index: int) -> tuple[Any, dict[tuple[str, str], Logged]]:
        """Run the user's step, between the hooks at the batch's start and end; returns its output, and what was logged."""
        logged, hooked = dict[tuple[str, str], Logged](), dict[tuple[str, str], Logged]()
        index += self.earlier
        with recorded_in(self.module, f"on_{self.rehearsal.loop}_batch_start", hooked):
            self.rehearsal.batch_hooks("start", given if self.hooked is None else copied(self.hooked), index)
        with recorded_in(self.module, hook, logged):
            output = self.rehearsal._call(hook, given, index)
        if (end := f"on_{self.rehearsal.loop}_batch_end") in self.rehearsal.hooks:
            left = tree_map_only(Tensor, Tensor.detach, output)
            if hook == "training_step":  # hooks get the whole batch's loss
                left = {**(left if isinstance(left, Mapping) else {}), "loss": torch.tensor(math.nan)}
            with recorded_in(self.module, end, hooked), undo.undone(self.module, self.writes, self.variables):
                self.rehearsal.batch_hooks("end", left, given, index)
        return output, {**logged, **{key: value for key, value in hooked.items() if math.isfinite(value.value)}}

    def apart_from_hook(self, shares: Sequence[Any]) -> str | None:
        """Why parts of a batch can't run one after the other: each would use what the hook at the batch's start keeps of the whole one.
        A hook that changes the batch instead isn't tried.
        """
        name = "on_train_batch_start"
        if name not in self.rehearsal.hooks or not self.module.automatic_optimization:
            return None
        whole = self.batches.part(everything(self.batches.count))
        whole = transfer_batch(self.module, whole) if self.batches.raw else whole
        given = copied(whole)
        with undo.undone(self.module, self.writes, self.variables):
            self.rehearsal.batch_hooks("start", given, 0)
        old, new = tensors_of(whole), tensors_of(given)
        if len(old) != len(new) or not all(map(undo.same_values, old, new)):
            return None
        words = f"training_step uses what {name} keeps of the whole batch"
        try:
            with patched(self, "hooked", whole):
                by = difference_of(self._observed(self.losses, shares), shares)
        except Exception as error:  # the user's step, on a part
            _LOG.debug("the step fails on a part after %s of the whole batch", name, exc_info=True)
            return f"{words}, and fails on a part of it ({error_line(error)})"
        return None if by <= 10 * EQUAL else f"{words}: on parts of it the loss differs by {by:.2g} of it"

    @contextmanager
    def _buffers_noted(self) -> Iterator[None]:
        """While open, an evaluation's step runs; what it has changed of the buffers is noted, and put back."""
        before = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        yield
        alike = ((name, buffer) for name, buffer in self.module.named_buffers() if name in before and buffer.shape == before[name].shape)
        self.moved.append({name: buffer.detach().double() for name, buffer in alike if not undo.same_values(buffer, before[name])})
        undo.put_back(self.module, before)

    def _moved_apart(self, hook: str) -> list[str]:
        """A sentence where that isn't what parts of a batch change."""
        drift = undo.changing_buffers(self.moved)
        return [] if drift is None else [f"{hook} writes to the module's buffers: {drift[1]}"]

    def _with_new_logs(self, found: SplitFinding, shares: Sequence[Any]) -> SplitFinding:
        raise NotImplementedError

    def _without_rounding(self, compare: Callable[[], float]) -> float:
        """A difference without single precision's rounding; infinite where the step only runs in single precision."""
        try:
            with self._in_double():
                return compare()
        except Exception:
            _LOG.debug("the step can't be run in double precision", exc_info=True)
            return math.inf

    def _unrounded(self, difference: float, compare: Callable[[], float]) -> float:
        """A difference without single precision's rounding. For a step that only runs in that, one that may be rounding is none."""
        in_double = self._without_rounding(compare)
        if in_double < math.inf:
            return min(difference, in_double)
        return difference if difference > _ROUNDING else 0.0

    @contextmanager
    def _in_double(self) -> Iterator[None]:
        """While open, the module and its batches are in double precision."""
        with undo.in_double(self.module), patched(self.batches, "double", True), self._from_here():
            yield

    def _logs_compared(self, shares: Sequence[Any]) -> LogComparison:
        rows, weights = [share.rows for share in shares], self.weighing.weights(shares)
        return compare_logs(self.logs[0], self.logs[1:], rows, double=self.batches.double, weights=weights)

    def listen(self, step: Step) -> None:
        """Run the step on the batch and note what it does with the batch's entries."""
        batch = self.batches.part(everything(self.batches.count))
        begun = time.monotonic()
        with LossArguments(batch) as self.weighing.told:
            step(batch)
        self.seconds = time.monotonic() - begun

    def holding(self, found: SplitFinding, step: Step) -> SplitFinding:
        """The finding, with only the rules that hold as well for batches of which not all counts."""

        def compare(shares: Sequence[Any]) -> LogComparison:
            with _ended_after(limit):
                observed = self._observed(step, shares)
            logged = self._logs_compared(shares)
            if not observed.whole or not all(math.isfinite(float(loss)) for loss in observed.whole):
                return logged  # then each part weighs the same
            losses = self.weighing.of_losses(observed, shares, double=self.batches.double)
            return LogComparison(matching={**logged.matching, **losses.matching})

        def in_double(shares: Sequence[Any]) -> LogComparison:
            try:
                if not (large or self.batches.double):
                    double.enter_context(self._in_double())
                found = compare(shares)
                doubled.append(True)
                return found
            except TimeoutError:
                unended.append(1)
                raise
            except Exception:  # the step insists on single precision, or such an entry is no input of it
                if doubled:
                    raise
                double.close()
                return compare(shares)

        large = sum(tensor.nbytes for _, tensor in undo.tensors_of(self.module)) > LARGE_BYTES
        logs, doubled, double, unended = self.logs[:], list[bool](), ExitStack(), list[int]()
        limit = LEAST_SECONDS + _TIMES_AS_LONG * self.seconds
        with self.numbered():
            told = self.weighing.told
            values = sorted({*told.ignored, *told.weighed})
            with double:  # once it runs in double precision it stays so, for all of these
                rules, lost = self.weighing.holding(LogComparison(matching=found.log_rules), in_double, values)
            classes = [count for count in lost.get(LOSS, ()) if count.kind == "differs" and count.ignored in told.weighed]
            if classes:  # weights of classes are there whatever the batch: such ones will come
                with self.weighing.changed(classes[0], []):
                    found = self._weighs_classes(found, classes[0])
        self.logs = logs
        if unended:
            note = (
                "not checked: whether parts of a batch with other entries (a mask's zeros, NaN, other labels) give the same values: with "
                f"{len(unended)} kinds of them the step took more than {limit:.0f} s"
            )
            found = replace(found, notes=(*found.notes, note))
        if found.difference:
            return found
        words = (
            f"the value {key[1]!r} logged in {key[0]} is no mean, root mean square, sum, maximum or minimum over the parts of "
            + "a batch that has "
            + " or ".join(count.left_out for count in counts)
            for key, counts in lost.items()
            if LOSS not in lost  # else such a batch ends the run
        )
        notes, real = (*found.notes, *words), found.log_rules
        return replace(found, log_rules=rules.matching, real_rules=real, unweighed=tuple(lost.get(LOSS, ())), notes=notes)

    def _weighs_classes(self, found: SplitFinding, count: Count) -> SplitFinding:
        """The finding, where parts of a batch with this class differ from it."""
        shares = [share_of(self.batches.count, rank, Dealing.even(2)) for rank in range(2)]
        difference = difference_of(self._observed(self.losses, shares), shares)
        reason = f"it is no mean over the samples, as it weighs classes: a batch with {count.left_out} was tried"
        return replace(found, difference=difference, reason=reason, log_rules={**found.log_rules, LOSS: ()})

    def later(self, seconds: float) -> Iterator[int]:
        """Numbers of later steps that may do something else, as far as they are noted by and by."""
        ends_at, tried = time.monotonic() + seconds, {0}
        buffers, _ = self._counters()
        if self.rehearsal.numbered or buffers:
            self.noted.numbers.update(dict.fromkeys((*LATER, *compared_with(self.module, buffers))))
        while (number := next((each for each in self.noted.numbers if each not in tried), None)) is not None:
            self.too_many = len(tried) > _LATER_STEPS or time.monotonic() > ends_at
            tried.add(number)
            yield number
            if self.too_many:
                return

    def in_later_steps(self, found: SplitFinding, plan: DrawPlan, size: int, seconds: float) -> tuple[SplitFinding, DrawPlan]:
        """With what a split changes in later steps, if steps go by their number: some do something in each n-th one, or from one on."""
        shares = self.weighing.shares(size)
        for number in self.later(seconds):
            if found.difference:
                break
            try:
                with self.numbered(number):
                    for groups_first in (False, True):
                        observed = self._observed(self.losses, shares, groups_first=groups_first)
                        if (difference := difference_of(observed, shares)) <= EQUAL:
                            break
                    else:
                        difference = self._without_rounding(lambda: difference_of(self._observed(self.losses, shares), shares))
                    found = self._with_new_logs(found, shares)
            except Exception as error:  # a number that the step isn't made for
                _LOG.debug("the step can't be tried as number %d", number, exc_info=True)
                note = f"not checked: splitting the batch of step {number:,} ({error_line(error)})"
                found = replace(found, notes=(*found.notes, note))
                continue
            if not math.isfinite(difference):
                note = f"not checked: splitting the batch of step {number:,}, whose loss isn't finite"
                found = replace(found, notes=(*found.notes, note))
            elif difference > EQUAL:
                reason = f"it is no mean over the samples in a later step: the step goes by its number, as in step {number:,}"
                found = replace(found, difference=difference, reason=reason, log_rules={**found.log_rules, LOSS: ()})
            plan = with_draws(plan, observed.draws)
        return found, plan

    def with_later_draws(self, plan: DrawPlan, places: Mapping[str, Place], size: int) -> tuple[DrawPlan, str]:
        """See :func:`later_draws`."""

        def draws() -> DrawPlan:
            with self._from_here():
                return self._observed(self.losses, self.weighing.shares(size)).draws

        return later_draws(plan, {name: buffer for name, buffer in self.module.named_buffers() if name in self.counted}, places, draws)

    @contextmanager
    def numbered(self, number: int | None = None) -> Iterator[None]:
        """While open, steps are those of this number, by default the next one's; at which others they do something else is noted."""
        if self.too_many:
            raise TimeoutError("there are more numbers that the step goes by than can be tried")
        buffers, places = self._counters()
        given = step_number(self.rehearsal.number if number is None else number, self.noted)
        self.rehearsal.give_number(given)
        try:
            with counted_on(buffers, places, number, self.noted), patched(self, "number", given), self._from_here():
                yield
        finally:
            self.rehearsal.give_number(0)

    def _counters(self) -> tuple[dict[str, Tensor], dict[str, Place]]:
        """See :func:`counters`; with the buffers of integers that a step was seen to count on."""
        buffers, places = counters(self.module)
        known = {id(buffer) for buffer in buffers.values()}
        for name in self.counted:
            owner, _, own = name.rpartition(".")
            child = self.module.get_submodule(owner)
            if (
                _functions(child)
                and (buffer := child._buffers[own]) is not None
                and buffer.dtype == torch.int64
                and id(buffer) not in known
            ):
                buffers[name] = buffer
        return buffers, places

    def _from_here(self) -> AbstractContextManager[None]:
        """While open, steps begin with the buffers' present values."""
        return patched(self, "buffers", {name: buffer.clone() for name, buffer in self.module.named_buffers()})
