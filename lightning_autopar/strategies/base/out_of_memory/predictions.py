"""A batch of a prediction that ran out of memory, run again in more parts, and all that follow as well.

A rank has a prediction's batches whole, so that others notice nothing unless they exchange something within a step; then all of them run as
many parts as the run plan says. Nobody has tried beforehand whether a sample's prediction is the same in a part: so the first batch that
runs in parts shows it, by one of its parts and that part's halves. Its output is made
of the parts' where each entry is a sample's. Knows an engine; not how a plan is found.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_autopar._temporary import patched
from lightning_autopar.exact.data.rank_share import BatchShare
from lightning_autopar.exact.random import generator_states as rng
from lightning_autopar.exact.random.whole_batch_draws import GlobalDraws
from lightning_autopar.exact.step.micro_batches import take_part
from lightning_autopar.strategies.base.out_of_memory.evaluations import Evaluations
from lightning_autopar.strategies.base.out_of_memory.rerun import free_memory, may_run_again, why_in_one
from lightning_autopar.strategies.base.worker_exception import EVALUATED

if TYPE_CHECKING:
    from lightning_autopar.strategies.base.engine_mixin import EngineMixin

#: By which share of the largest value a sample's predictions may differ: as other kernels round; in half precision.
_TOLERANCE, _HALF_TOLERANCE = 2e-3, 5e-2
#: How attributes begin that aren't the user's, but torch's or DeepSpeed's.
_NOT_KEPT = ("_", "ds_", "applied_pre_backward")
#: Not in the words of an exception that says that memory ran out: that would be run again.
_IN_PARTS = "for want of memory a batch of predict_step runs in parts"
_INSTEAD = "take a smaller batch for predict()"


class Predictions(Evaluations):
    """Runs a rank's batches of predictions."""

    def __init__(self, engine: EngineMixin) -> None:
        super().__init__(engine)
        #: Whether a batch has shown that a sample's prediction is the same in a part.
        self._tried = False
        self._own: dict[str, Any] | None = None
        #: Where in its output a list has an entry for each sample.
        self._lists: Container[Any] = ()

    def run(self, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the user's ``predict_step``; returns its output for the whole batch."""
        engine, module = self._engine, self._engine.lightning_module
        engine.running.place = "the prediction"
        if self._own is None:
            self._own = rng.find_generators(module.named_modules())
        own = self._own
        state, kept = rng.capture(own), _kept(module)
        while True:
            try:
                return self._predict(step, args, kwargs, own)
            except Exception as error:  # several classes say that memory ran out; the others are raised
                if not may_run_again(engine, error, partial(self._why_not_predicted, args[0], kept), planned=False):
                    raise
                if not engine.reruns_batches:
                    vars(error)[EVALUATED] = -(-self._whole(args[0]).fed // self.parts)
                    raise
            # Outside of the handler, as the exception holds the failed step's tensors.
            rng.restore(state, own)
            free_memory()
            self._go_on("predict_step", self._whole(args[0]).fed)

    def _predict(self, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], own: Mapping[str, Any]) -> Any:
        if self.parts == 1:
            return step(*args, **kwargs)
        whole = self._whole(args[0])
        number = min(self.parts, whole.fed) if self._engine.reruns_batches else self.parts
        kept = _kept(self._engine.lightning_module)
        with self._draws():
            began = rng.capture(own), 0 if self._engine._draws is None else self._engine._draws.place

            def run(index: int, of: int) -> tuple[Any, int]:
                return self._part(step, args, kwargs, whole.part(index, of), (index, of), (began, own))

            ran = [run(index, number) for index in range(number)]
            halves = [] if self._tried else [run(0, 2 * number), run(number, 2 * number)]
        self._refuse_kept(kept)
        if halves:
            if ran[0][1] < 2:
                raise RuntimeError(
                    f"{_IN_PARTS} of one sample each, so that nothing shows whether a sample's prediction is the same without the others; "
                    f"{_INSTEAD}"
                )
            self._lists = lists_of_samples(*zip(*ran, *halves, strict=True))
            self._compare(ran[0][0], self._put_together(halves))
        return self._put_together(ran)

    def _put_together(self, ran: Sequence[tuple[Any, int]]) -> Any:
        outputs, rows = zip(*ran, strict=True)
        try:
            return whole_output(outputs, rows, self._lists)
        except ValueError as error:
            raise RuntimeError(f"{_IN_PARTS}, and its output can't be made of theirs: {error}; {_INSTEAD}") from None

    def _part(self, step: Any, args: Sequence[Any], kwargs: Any, share: BatchShare, place: tuple[int, int], began: Any) -> tuple[Any, int]:
        """The output of a part of the batch, with the draws that its samples have in the whole one, and how many samples it has."""
        engine, ((state, draw), own) = self._engine, began
        rng.restore(state, own)
        if engine._draws is not None:
            engine._draws.begin(draw)
        samples = take_part(args[0], *place, self._whole(args[0]).fed, collates=True)
        with patched(engine, "_share", share), patched(engine, "_drawing", True):
            return step(samples, *args[1:], **kwargs), share.rows

    def _refuse_kept(self, before: Mapping[str, Any]) -> None:
        """Raises RuntimeError where the parts have left something on the module: nobody knows what the whole batch would have left."""
        changed = self._changed(before)
        if changed is not None:
            raise RuntimeError(f"{_IN_PARTS}, and the step keeps what it has found in {changed!r} of the module; {_INSTEAD}")

    def _changed(self, before: Mapping[str, Any]) -> str | None:
        now = _kept(self._engine.lightning_module)
        return next((name for name in now if before.get(name) != now[name]), None)

    def _compare(self, output: Any, halves: Any) -> None:
        """Raises RuntimeError where a sample's prediction isn't the same in a part."""
        half = "16" in str(self._engine.precision_plugin.precision)
        if not same_output(output, halves, _HALF_TOLERANCE if half else _TOLERANCE):
            raise RuntimeError(f"{_IN_PARTS}, and a sample's prediction depends on the others of its batch; {_INSTEAD}")
        self._tried = True

    @contextmanager
    def _draws(self) -> Iterator[None]:
        """While open, what a part draws is what its samples have in the whole batch."""
        engine = self._engine
        if engine._draws is not None or engine.run_plan.draws is None:
            yield
            return
        with GlobalDraws(engine._share_for_draws, engine.run_plan.draws) as draws, patched(engine, "_draws", draws):
            yield

    def _why_not_predicted(self, batch: Any, kept: Mapping[str, Any]) -> str | None:
        changed = self._changed(kept) if self._engine.reruns_batches else None  # else new processes begin anew
        if changed:
            return f"the failed try has changed {changed!r} of the module"
        return why_in_one(self.parts, partial(self._whole, batch))


def _kept(module: Any) -> dict[str, Any]:
    """What a step may have changed on the module: which objects its attributes are, how long, and how often metrics were updated."""
    found: dict[str, Any] = {
        name: (id(value), _state(value)) for name, value in vars(module).items() if not name.startswith(_NOT_KEPT) and not callable(value)
    }
    found |= {name: child._update_count for name, child in module.named_modules() if isinstance(child, Metric)}
    return found


def _state(value: Any) -> Any:
    if isinstance(value, Tensor):
        return None if value.is_inference() else value._version
    return len(value) if isinstance(value, (list, dict, set)) else value if isinstance(value, (int, float)) else None


#: Of a value in an output: keys, and positions in lists and tuples.
Path = tuple[Any, ...]


def lists_of_samples(outputs: Sequence[Any], rows: Sequence[int], path: Path = ()) -> set[Path]:
    """Where in the outputs a list has an entry for each sample, rather than a fixed number of entries.

    Args:
        outputs: of batches with different numbers of samples.
        path: where in the whole output these are.
    """
    first = outputs[0]
    if not isinstance(first, (Mapping, list, tuple)) or any(type(each) is not type(first) for each in outputs):
        return set()
    if isinstance(first, list) and all(len(each) == max(count, 1) for each, count in zip(outputs, rows, strict=True)):
        return {path}
    return {found for key in _keys(outputs) or () for found in lists_of_samples([each[key] for each in outputs], rows, (*path, key))}


def whole_output(outputs: Sequence[Any], rows: Sequence[int], lists: Container[Path], path: Path = ()) -> Any:
    """The whole batch's output.

    Args:
        outputs: of the parts, which have every ``len(outputs)``-th sample each.
        rows: how many samples each part has; 0 where it was fed one that isn't its own.
        lists: of :func:`lists_of_samples`.

    Raises:
        ValueError: if something in it has no entry for each sample, with a phrase that says what.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        return _tensor(outputs, rows)
    if any(type(each) is not type(first) for each in outputs):
        raise ValueError("the parts return values of different classes")
    if path in lists:
        whole: list[Any] = [None] * sum(rows)
        _deal(whole.__setitem__, outputs, rows)
        return whole
    if first is None or isinstance(first, (str, bytes, bool, int)):
        if any(each != first for each in outputs):
            raise ValueError(f"the parts return different values of the class {type(first).__name__}")
        return first
    if type(first) is not dict and not _is_model_output(first) and not isinstance(first, (list, tuple)):
        raise ValueError(f"nobody knows how parts of the class {type(first).__name__} make up the whole")
    if any(len(each) != len(first) for each in outputs) or (
        isinstance(first, Mapping) and any(set(each) != set(first) for each in outputs)
    ):
        raise ValueError("the parts return different keys, or lists of different lengths")

    def at(name: Any) -> Any:
        return whole_output([each[name] for each in outputs], rows, lists, (*path, name))

    if isinstance(first, Mapping):
        return type(first)(**{name: at(name) for name in first}) if _is_model_output(first) else {name: at(name) for name in first}
    fields = [at(index) for index in range(len(first))]
    return type(first)(*fields) if hasattr(first, "_fields") else type(first)(fields)


def _keys(outputs: Sequence[Any]) -> Sequence[Any] | None:
    """What dictionaries, or positions in sequences, are asked by; None where they differ."""
    found = [list(each) if isinstance(each, Mapping) else list(range(len(each))) for each in outputs]
    return found[0] if all(set(each) == set(found[0]) for each in found) else None


def same_output(one: Any, other: Any, tolerance: float) -> bool:
    """Whether two outputs are the same but for rounding.

    Args:
        tolerance: by which share of the largest value numbers may differ.
    """
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and _close(one, other, tolerance)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return set(one) == set(other) and all(same_output(value, other[name], tolerance) for name, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(same_output(*pair, tolerance) for pair in zip(one, other, strict=True))
    return type(one) is type(other) and bool(one == other)


def _close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    scale = float(torch.nan_to_num(one.detach().float()).abs().max()) if one.numel() else 0.0
    return torch.allclose(one.float(), other.float(), rtol=0.0, atol=tolerance * scale, equal_nan=True)


def _tensor(tensors: Sequence[Any], rows: Sequence[int]) -> Tensor:
    if not all(isinstance(each, Tensor) and each.ndim and len(each) == max(count, 1) for each, count in zip(tensors, rows, strict=True)):
        raise ValueError(f"a tensor of shape {tuple(tensors[0].shape)} has no row for each sample")
    if len({(each.shape[1:], each.dtype) for each in tensors}) > 1:
        raise ValueError("the parts' tensors have different shapes or types")
    whole: Tensor = tensors[0].new_empty((sum(rows), *tensors[0].shape[1:]))
    _deal(whole.__setitem__, tensors, rows)
    return whole


def _deal(place: Callable[[slice, Any], None], parts: Sequence[Any], rows: Sequence[int]) -> None:
    for index, (part, count) in enumerate(zip(parts, rows, strict=True)):
        if count:
            place(slice(index, None, len(parts)), part)


def _is_model_output(value: Any) -> bool:
    """Outputs of transformers are dictionaries with attributes, whose constructors take them by name."""
    return any(each.__name__ == "ModelOutput" for each in type(value).__mro__)
