"""A batch worked off in parts, one after the other: their gradients add up, and no more than one part's activations are held.

Lightning's step is forward, ``zero_grad`` where a window of accumulated batches begins, backward. All parts run their forward in the place
of the first; all but the last run their backward there, too, and the last one's is Lightning's. So hooks are called once a batch and find
what they would find of the whole one: the loss that Lightning and its hooks see is the whole batch's, and gradients come to light when
backward begins. Knows Lightning's order of a step, a rank's share of a batch and its logging; not which engine runs, nor communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_autopar._lightning import Callback, LightningModule, Trainer
from lightning_autopar._lightning_compat import combined_mode, is_overridden
from lightning_autopar.exact.absent.absent_tensor import is_absent
from lightning_autopar.exact.data.batch_structure import count_rows, take_rows
from lightning_autopar.exact.data.rank_share import BatchShare, Dealing
from lightning_autopar.exact.logs.self_log import GlobalLogging
from lightning_autopar.exact.random import generator_states as rng
from lightning_autopar.exact.random.whole_batch_draws import GlobalDraws
from lightning_autopar.exact.step.users_backward import weighed
from lightning_autopar.plans import Plan

if TYPE_CHECKING:
    from torch.nn import Parameter

#: Runs the user's step, or a backward pass.
Run = Callable[..., Any]
#: Hooks that the precision plugin calls around each backward pass.
_AROUND_BACKWARD = ("on_before_backward", "on_after_backward")


class MicroBatches:
    """Runs a training step in parts.

    Args:
        plan: how many parts a rank's batch has, and how many samples each rank gets of a batch; a rank with fewer samples runs as many
            parts, of which some don't count, since ranks communicate in each.
        logging: brings together what the parts log.
        draws: makes their random draws those of the whole batch; None where the step draws nothing.
        before_last: makes a context around forward and backward of a part that isn't the last one.
        note: called when the forward of the last part is over.
    """

    def __init__(
        self,
        trainer: Trainer,
        plan: Plan,
        logging: GlobalLogging,
        *,
        draws: GlobalDraws | None = None,
        before_last: Callable[[], AbstractContextManager[None]] = nullcontext,
        note: Callable[[Any], None] = lambda point: None,
    ) -> None:
        assert trainer.lightning_module.automatic_optimization or not trainer.training, "planning refuses manual optimization"
        self._trainer = trainer
        self._plan = plan
        self._logging = logging
        self._draws = draws
        self._before_last = before_last
        self._note = note
        self.gradients = PartGradients(trainer)
        #: Into how many parts a batch is cut, where it has as many samples.
        self.number = plan.micro_batches
        #: How many parts the current batch has.
        self.parts = 1
        #: The current batch's part that runs, or ran last.
        self.part: BatchShare | None = None
        self._made: tuple[Any, ...] = ()

    def arrives(self, shares: Sequence[BatchShare]) -> None:
        """A batch arrives, of which this rank has these shares, one of each loader."""
        self.part, self._made = None, shares[0].parts if len(shares) == 1 else ()

    def share(self, batch: Any, samples: int | None) -> BatchShare:
        """A whole batch, as the user's step gets it, as the share of the only rank; ``samples`` as for :func:`whole_share`."""
        if self._made and samples is not None:
            return BatchShare(rows=samples, of=samples, rank=0, world_size=1)
        try:
            return whole_share(batch, samples, several=several_loaders(self._trainer))
        except ValueError as error:
            raise uncut(self._plan, error) from error

    def run(self, step: Run, backward: Run, share: BatchShare, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the parts; returns the whole step's output. Only the last part's backward is left to do.

        Args:
            step: the user's ``training_step``, on the engine's device and in its precision.
            backward: the engine's backward pass of a loss.
            share: the rank's of the batch.
            args: of the step, the batch first.

        Raises:
            ValueError: if the batch can't be cut into samples.
            RuntimeError: if the step returns a loss for some of the parts only.
        """
        self.parts = number = min(self.number, max(1, *self._plan.rows(share.of)))
        parts: list[BatchShare] = []
        losses: list[Any] = []
        extras: list[dict[str, Any]] = []
        goes_back = not self._trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward
        # Looked for in each batch: users give a generator another seed by making another one.
        own = rng.find_generators(self._trainer.lightning_module.named_modules()) if number > 1 else {}
        draws, state = self._draws, rng.capture(own)
        place = 0 if draws is None else draws.place
        for index in range(number):
            last, self.part = index == number - 1, share.part(index, number)
            if index:
                rng.restore(state, own)
                if draws is not None:
                    draws.begin(place)
            try:
                rows = args[0] if number == 1 else self._part(args[0], index, number, share.fed)
            except ValueError as error:
                raise uncut(self._plan, error) from error
            with nullcontext() if last else self._before_last():
                with self._logging.part(self.part, rows, index):
                    output = step(rows, *args[1:], **kwargs)
                    self._logging.note_loss(output)
                del rows  # it may be a copy
                loss = output.get("loss") if isinstance(output, Mapping) else output
                parts.append(self.part)
                losses.append(None if loss is None else loss.detach())
                if (loss is None) != (losses[0] is None):
                    raise RuntimeError(
                        f"training_step returned a loss for some parts of a batch and None for others, which {self._plan.title()!r} can't "
                        "undo; return a loss for every batch, or take a plan with micro_batches=1"
                    )
                if index == 0 and number > 1 and loss is not None and goes_back:
                    self.gradients.begin()
                if not last:
                    extras.append(detached(output) if isinstance(output, Mapping) else {})
                    if loss is not None and goes_back:
                        with self.silent():
                            backward(weighed(loss, self.part.weight / self._trainer.accumulate_grad_batches))
                    del output, loss  # this also frees the part's graph
        if number == 1 or losses[0] is None:
            return output
        self._note("forward")
        if goes_back:
            self.gradients.lay_aside()
        assert self.part is not None
        factor = self.part.weight / share.weight if share.weight else 0.0
        loss = loss if factor or loss is None else weighed(loss, factor)
        value = _mean(losses, [part.fraction() for part in parts], share.fraction())
        whole = _Whole.apply(loss, value, factor, self.gradients.take_up)  # type: ignore[no-untyped-call]
        if not isinstance(output, Mapping):
            return whole
        extras.append(detached(output))
        return {**output, **joined(extras, [part.rows for part in parts]), "loss": whole}

    def _part(self, batch: Any, index: int, number: int, samples: int) -> Any:
        if self._made:  # a rank with fewer parts than others repeats its first, which then doesn't count
            part = self._trainer.precision_plugin.convert_input(self._made[index] if index < len(self._made) else self._made[0])
            return self._trainer.lightning_module.transfer_batch_to_device(part, self._trainer.strategy.root_device, 0)
        return take_part(batch, index, number, samples, several=several_loaders(self._trainer), collates=True)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """While open, the precision plugin doesn't call these hooks, which it calls in each backward pass; a batch has one."""
        trainer: Any = self._trainer
        module, callbacks = trainer.lightning_module, trainer.callbacks
        shadowed = {name: module.__dict__[name] for name in _AROUND_BACKWARD if name in module.__dict__}
        trainer.callbacks = []
        module.__dict__.update(dict.fromkeys(_AROUND_BACKWARD, _nothing))
        try:
            yield
        finally:
            trainer.callbacks = callbacks
            for name in _AROUND_BACKWARD:
                del module.__dict__[name]
            module.__dict__.update(shadowed)


class PartGradients:
    """Keeps the gradients of the parts before the last from being set to None, and from code that looks at an earlier batch's. At the
    beginning of a window, if no hook could see it, earlier gradients are freed after the first part's forward, as in Lightning, so that
    they aren't held besides the parts'. Within a window the parts' gradients are added to the earlier ones at once. Both are held only if
    the user has a hook between forward and backward that could look at gradients.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._parts: dict[Parameter, Tensor] = {}
        self._earlier: dict[Parameter, Tensor] | None = None
        self._apart: dict[Parameter, Tensor | None] = {}
        self._had: set[Parameter] = set()
        self._adds_at_once = False
        self._begun = False
        #: Whether a batch's gradients are always held apart from earlier batches', so that :meth:`give_up` can drop them.
        self.apart = False

    @property
    def beside(self) -> bool:
        """Whether earlier gradients are held besides those of the parts."""
        return self._earlier is not None

    @property
    def watched(self) -> bool:
        """Whether a hook could see gradients when backward begins."""
        return overridden(self._trainer, "on_before_backward")

    def begin(self, apart: Iterable[Parameter] = ()) -> None:
        """The first part's forward is over.

        Args:
            apart: parameters whose gradients of this batch must be known separately when the parts are over.
        """
        self._parts.clear()
        self._earlier, self._begun = None, True
        trainer = self._trainer
        begins = trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0
        watched = overridden(self._trainer, "on_before_zero_grad", "optimizer_zero_grad") if begins else self.watched
        watched = watched or (self.apart and not begins)
        self._adds_at_once = not begins and not watched
        self._apart = {}
        if self._adds_at_once:
            self._had = {parameter for parameter in self._parameters() if parameter.grad is not None}
            for parameter in dict.fromkeys(apart):  # a tied one has several names
                self._apart[parameter], parameter.grad = parameter.grad, None
        else:
            earlier = self._taken()
            self._earlier = earlier if watched else None

    def lay_aside(self, complete: Callable[[dict[Parameter, Tensor]], None] = lambda gradients: None) -> None:
        """All parts but the last have added their gradients: until the last part's backward, show only the earlier batch's gradients.

        Args:
            complete: gets the batch's gradients, at least of the parameters that are held apart, to change them.
        """
        self._begun = False
        if self._adds_at_once:
            batch = {parameter: parameter.grad for parameter in self._apart if parameter.grad is not None}
            complete(batch)
            for parameter, before in self._apart.items():
                gradient = batch.get(parameter)
                parameter.grad = before if gradient is None else gradient if before is None else before.add_(gradient)
            self._apart = {}
        else:
            self._parts = self._taken()
            complete(self._parts)
            self._put_back()

    def take_up(self) -> None:
        """The last part's backward begins. Does nothing more when called again."""
        with torch.no_grad():
            for parameter, gradient in self._parts.items():
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._parts.clear()

    @property
    def mixed(self) -> bool:
        """Whether gradients of the running parts were added to those of earlier batches, so that nobody can tell them apart."""
        return self._begun and self._adds_at_once

    def give_up(self) -> None:
        """The parts failed: drop their gradients, and restore the earlier ones."""
        assert not self.mixed, "asked before"
        if self._begun:
            self._taken()
            self._put_back()
        self._begun = False
        self._parts.clear()

    def forget(self) -> None:
        """The parts had no loss: drop their gradients, and restore the earlier ones."""
        if not self._adds_at_once:
            self._taken()
            self._put_back()
            return
        for parameter in self._parameters():
            if parameter not in self._had:
                parameter.grad = None
        for parameter, before in self._apart.items():
            parameter.grad = before
        self._apart = {}

    def _put_back(self) -> None:
        for parameter, gradient in (self._earlier or {}).items():
            parameter.grad = gradient
        self._earlier = None

    def _parameters(self) -> Iterator[Parameter]:
        """The optimizers' parameters that are here; another stage's parameters may have only an absent tensor as gradient."""
        for optimizer in self._trainer.optimizers:
            for group in optimizer.param_groups:
                yield from (parameter for parameter in group["params"] if not is_absent(parameter))

    def _taken(self) -> dict[Parameter, Tensor]:
        """Take the gradients of the optimizers' parameters, which are then set to None."""
        found = {}
        for parameter in self._parameters():
            if parameter.grad is not None:
                found[parameter], parameter.grad = parameter.grad, None
        return found


def overridden(trainer: Trainer, *hooks: str) -> bool:
    """Whether the module or a callback has one of these hooks."""
    module: LightningModule = trainer.lightning_module
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    users = [callback for callback in callbacks if any(hasattr(Callback, hook) and is_overridden(hook, callback) for hook in hooks)]
    return bool(users) or any(is_overridden(hook, module) for hook in hooks)


class _Whole(torch.autograd.Function):
    """The last part's loss with the value of the whole batch's, and that part's weight in the gradient."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: Tensor, factor: float, begin: Callable[[], None]) -> Tensor:
        ctx.factor, ctx.begin = factor, begin
        return value.reshape(loss.shape).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.begin()
        return gradients[0] * ctx.factor, None, None, None


def several_loaders(trainer: Trainer) -> bool:
    """Whether a training batch holds those of several loaders."""
    combined = trainer.fit_loop._combined_loader
    return combined is not None and len(combined.flattened) > 1 and combined_mode(combined) != "sequential"


def whole_share(batch: Any, samples: int | None = None, *, several: bool = False) -> BatchShare:
    """A whole batch as the share of the only rank.

    Args:
        samples: of how many its loader made it, where that is known.
        several: whether it holds the batches of several loaders.

    Raises:
        ValueError: if it has no samples to count.
    """
    first = next(iter(_children(batch)), batch) if several else batch
    rows = _count(first, None if several else samples)
    return BatchShare(rows=rows, of=rows, rank=0, world_size=1)


def _count(batch: Any, samples: int | None) -> int:
    try:
        rows = count_rows(batch)
    except ValueError:
        if samples is None:
            raise
        rows = None
    return rows if rows is not None and samples in (None, rows) else take_rows(batch, 0, Dealing.even(2), samples=samples, collates=True)[0]


def uncut(plan: Plan, error: ValueError) -> ValueError:
    """The error where a batch can't be cut into parts."""
    return ValueError(f"{plan.title()!r} runs a batch in parts, but {error}; take a plan with micro_batches=1")


def take_part(batch: Any, index: int, number: int, samples: int | None = None, *, several: bool = False, collates: bool = False) -> Any:
    """A part of a rank's batch: every ``number``-th sample from the ``index``-th on, the first one where there is none.

    Args:
        number: how many parts there are.
        samples: how many samples it has, where that is known.
        several: whether it holds the batches of several loaders; then the part has a part of each.
        collates: as for :func:`.batch_structure.take_rows`; of several loaders nothing is collated anew.

    Raises:
        ValueError: if the batch can't be cut into samples.
    """
    dealing = Dealing.even(number)
    if not several:
        return take_rows(batch, index, dealing, samples=samples, collates=collates)[1]
    counts = {count_rows(child) for child in _children(batch) if child is not None}
    if len(counts) > 1 and any(count % number for count in counts):
        raise ValueError(
            f"the batches of several loaders have {', '.join(map(str, sorted(counts)))} samples, whose parts weigh differently"
        )
    parts = [None if child is None else take_rows(child, index, dealing)[1] for child in _children(batch)]
    if isinstance(batch, Mapping):
        return dict(zip(batch, parts, strict=True))
    return parts if isinstance(batch, list) else tuple(parts)


def why_whole(batch: Any, samples: int | None = None, *, several: bool = False, collates: bool = False) -> str | None:
    """Why a batch can't run in parts; None where it can.

    Args:
        batch: the first batch, as the user's step gets it.
        samples: of how many its loader made it, where that is known.
    """
    try:
        take_part(batch, 0, 2, samples, several=several, collates=collates)
    except ValueError as error:
        return f"parts are cut out of the collated batch: {error}"
    return None


def _mean(losses: Sequence[Tensor], weights: Sequence[float], total: float) -> Tensor:
    """The mean, weighted by what adds up to ``total``; without any weight, each value counts equally."""
    counted = [(loss, weight) for loss, weight in zip(losses, weights, strict=True) if weight]
    if not counted or not total:
        counted, total = [(loss, 1.0) for loss in losses], len(losses)
    return torch.stack([loss.reshape(()).double() * (weight / total) for loss, weight in counted]).sum().to(losses[0].dtype)


def joined(extras: Sequence[Mapping[str, Any]], rows: Sequence[int]) -> dict[str, Any]:
    """The step's output besides its loss: tensors with a row a sample and lists with an entry a sample in the batch's order, numbers as
    their mean, also within dictionaries, tuples, lists and dataclasses. Else nothing, and the last part's counts.
    """
    made = {name: _joined([extra.get(name) for extra in extras], rows) for name in extras[-1]} if any(rows) else {}
    return {name: whole for name, whole in made.items() if whole is not None}


def _joined(values: Sequence[Any], rows: Sequence[int]) -> Any:
    """One value of the output; None where parts don't make the whole's."""
    first, last = values[0], values[-1]
    if any(type(value) is not type(first) for value in values):
        return None
    if isinstance(first, Tensor):
        return _joined_tensors(values, rows)
    if isinstance(first, float):
        return float(_mean([torch.tensor(value, dtype=torch.float64) for value in values], rows, sum(rows)))
    if type(first) is dict:
        return {**last, **joined(values, rows)}
    if is_dataclass(first):
        whole = joined([vars(value) for value in values], rows)
        return replace(last, **{each.name: whole[each.name] for each in fields(first) if each.init and each.name in whole})
    if not isinstance(first, (list, tuple)):
        return None
    if _has_rows(values, rows) and not all(_has_rows(each, rows) for each in zip(*values, strict=False)):
        return type(first)(_dealt([None] * sum(rows), values, rows))
    if any(len(value) != len(first) for value in values):
        return None
    made = [_joined(each, rows) for each in zip(*values, strict=True)]
    made = [old if new is None else new for new, old in zip(made, last, strict=True)]
    return type(first)(*made) if hasattr(first, "_fields") else type(first)(made)


def _joined_tensors(values: Sequence[Tensor], rows: Sequence[int]) -> Tensor | None:
    if _has_rows(values, rows):
        whole: Tensor = _dealt(values[0].new_empty((sum(rows), *values[0].shape[1:])), values, rows)
        return whole
    if all(value.numel() == 1 and value.is_floating_point() for value in values):
        return _mean(values, rows, sum(rows)).reshape(values[-1].shape)
    return None


def _has_rows(values: Sequence[Any], rows: Sequence[int]) -> bool:
    """Whether each part's value has an entry for each of its samples; a part without samples was fed one."""
    tensors, lists = (all(isinstance(value, kind) for value in values) for kind in (Tensor, (list, tuple)))
    sized = lists or (tensors and all(value.ndim for value in values))
    return sized and all(len(value) == max(count, 1) for value, count in zip(values, rows, strict=True))


def _dealt(whole: Any, values: Sequence[Any], rows: Sequence[int]) -> Any:
    """The whole batch's entries, of which each part has every ``len(rows)``-th."""
    for index, (value, count) in enumerate(zip(values, rows, strict=True)):
        if count:
            whole[index :: len(rows)] = value
    return whole


def _children(batch: Any) -> list[Any]:
    """The batches of several loaders."""
    return list(batch.values()) if isinstance(batch, Mapping) else list(batch)


def detached(output: Mapping[str, Any]) -> dict[str, Any]:
    """A step's output, without its graph."""
    return {name: value.detach() if isinstance(value, Tensor) else value for name, value in output.items()}


def _nothing(*_: Any, **__: Any) -> None:
    """Stands for a hook that isn't called."""
