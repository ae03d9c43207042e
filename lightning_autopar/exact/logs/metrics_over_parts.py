"""torchmetrics over the parts of a batch that run one after the other, and over a pipeline's stages.

Knows metrics and which code updates them; nothing of logging, nor of how ranks exchange a metric's states.
"""

from __future__ import annotations

import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torchmetrics import Metric, MetricCollection

from lightning_autopar.exact.absent.absent_tensor import hole_of

#: Relative difference up to which the mean of parts equals the whole's value, in single precision; other types round by some units in the
#: last place.
_EQUAL, _ROUNDINGS = 1e-5, 4


class MetricParts:
    """Makes a metric's ``forward`` give the value of a whole batch that runs in parts. The value that it returns on a part, and that is
    logged, is that of the batch so far: on the last part, that of the whole batch. A value that is part of the loss is the part's own, as
    its backward runs before the next part's forward; the batch's value is logged for it. In a pipeline, only the stage whose own code calls
    a metric updates it.
    """

    def __init__(self) -> None:
        #: The value of ``forward`` in the running part, and the value of the batch so far.
        self._given: list[tuple[Tensor, Tensor]] = []
        self._adopted: set[int] = set()
        self._left_out: list[Metric | MetricCollection] = []
        self._running = False
        self._stage: int | None = None
        self._owns: Callable[[], bool] = lambda: True
        self._calls: Counter[int] = Counter()
        #: By metric and call, the value of ``forward`` for the batch; and whether a metric that is composed of others needs theirs.
        self._wholes: dict[tuple[int, int], Any] = {}
        self._asked = False
        #: By stage, metric and call: the states of the batch so far, and how many updates they have seen.
        self._states: dict[tuple[int | None, int, int], tuple[dict[str, Any], int]] = {}
        self._rows = 0
        #: By the same, for a value from which a backward pass began: the mean over the parts so far, and the number of samples.
        self._means: dict[tuple[int | None, int, int], tuple[Tensor, int]] = {}
        self._trained: set[tuple[int | None, int, int]] = set()

    def clear(self) -> None:
        """A batch begins."""
        self._states.clear()
        self._means.clear()

    def of_batch(self, value: object) -> Any:
        """For a value that a metric returned, or that is logged for it, the value of the batch so far; None for any other value."""
        if isinstance(value, Metric):
            return value if id(value) in self._adopted else None
        return next((whole for given, whole in self._given if given is value), None)

    @contextmanager
    def part(self, rows: int, stage: int | None, owns: Callable[[], bool]) -> Iterator[None]:
        """The context of the user's step on a part.

        Args:
            stage: which stage of a pipeline runs it; None where there are none.
            owns: whether the code that runs now is the stage's own.
        """
        self._running, self._rows, self._stage, self._owns = True, rows, stage, owns
        try:
            yield
        finally:
            self._running = False
            # One rank alone has updated them. If others kept the value of an earlier epoch, it alone would ask all for their states.
            for metric in self._left_out:
                metric._computed = None
            self._calls.clear()
            self._wholes.clear()
            self._given.clear()

    @property
    def _foreign(self) -> bool:
        """Whether the code that runs is another stage's."""
        return self._running and not self._owns()

    def adopt(self, metric: Metric) -> Callable[[], None]:
        """Prepare one metric; returns what undoes it. A metric with states and a ``forward`` of its own stays as it is."""
        own = type(metric).forward is Metric.forward
        if "forward" in metric.__dict__ or not (own or not metric._defaults):
            return lambda: None
        on_part = self._forward if own else self._composed

        def forward(this: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._running:
                return type(this).forward(this, *args, **kwargs)
            call = id(this), self._calls[id(this)]
            self._calls[id(this)] += 1
            if self._asked:
                return self._wholes[call]
            value, this._forward_cache = on_part(this, args, kwargs)
            self._wholes[call] = this._forward_cache
            leaves = zip(tree_leaves(value), tree_leaves(this._forward_cache), strict=True)
            self._given += [pair for pair in leaves if isinstance(pair[0], Tensor)]
            return value

        metric.__dict__["forward"] = types.MethodType(forward, metric)
        self._adopted.add(id(metric))

        def undo() -> None:
            del metric.__dict__["forward"]
            self._adopted.discard(id(metric))

        return undo

    def leave_out(self, metric: Metric | MetricCollection) -> Callable[[], None]:
        """Make a metric ignore updates by another stage's code, which may have no values; returns what undoes it. No warning is given that
        a metric was never updated if another rank updates it.
        """
        shadowed = {name: metric.__dict__.get(name) for name in ("update", "forward", "compute")}

        def own(this: Any, name: str, args: Any, kwargs: Any) -> Any:
            call = shadowed[name] or getattr(type(this), name)
            if shadowed[name] is not None and not isinstance(call, types.MethodType):
                return call(*args, **kwargs)  # torchmetrics' own function, which a copy gets anew
            return getattr(call, "__func__", call)(this, *args, **kwargs)

        def update(this: Any, *args: Any, **kwargs: Any) -> Any:
            return None if self._foreign else own(this, "update", args, kwargs)

        def forward(this: Any, *args: Any, **kwargs: Any) -> Any:
            return self._nothing(this) if self._foreign else own(this, "forward", args, kwargs)

        def compute(this: Any, *args: Any, **kwargs: Any) -> Any:
            if self._foreign:
                return self._nothing(this)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The ``compute`` method of metric")
                return own(this, "compute", args, kwargs)

        # Bound methods with the methods' own names: a copy gets its own, an unpickled metric the class's.
        metric.__dict__.update({each.__name__: types.MethodType(each, metric) for each in (update, forward, compute)})
        self._left_out.append(metric)

        def undo() -> None:
            self._left_out = [each for each in self._left_out if each is not metric]
            for name, before in shadowed.items():
                del metric.__dict__[name]
                if before is not None:
                    metric.__dict__[name] = before

        return undo

    def _nothing(self, metric: Metric | MetricCollection) -> Any:
        """Stands for a metric's value in another stage's code."""
        if isinstance(metric, MetricCollection):
            return {name: self._nothing(each) for name, each in metric.items(keep_base=False, copy_state=False)}
        return hole_of((), torch.float32, metric.device, f"the value of a {type(metric).__name__}, which another stage's code computes")

    def _composed(self, metric: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The value of a composed metric on a part, and its value from the others' values of the batch."""
        calls = self._calls.copy()
        value = type(metric).forward(metric, *args, **kwargs)
        after, self._calls, self._asked = self._calls, calls, True
        try:
            with torch.no_grad():
                return value, type(metric).forward(metric, *args, **kwargs)
        finally:
            self._calls, self._asked = after, False

    def _forward(self, metric: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """``Metric._forward_full_state_update`` (torchmetrics 1.x): the value for the step, and that of the batch so far."""
        key = self._stage, id(metric), self._calls[id(metric)]
        metric.update(*args, **kwargs)
        count, states, on_cpu = metric._update_count, metric._copy_state_dict(), metric.compute_on_cpu
        metric._to_sync, metric._should_unsync, metric.compute_on_cpu = metric.dist_sync_on_step, False, False
        metric._enable_grad = True
        metric.reset()
        if key in self._states:
            earlier, metric._update_count = self._states[key]
            for name, state in earlier.items():
                setattr(metric, name, state)
        updates = metric._update_count
        metric.update(*args, **kwargs)
        if metric._update_count == updates and key in self._states:  # the part has no samples: the row in their place doesn't count
            for name, state in earlier.items():
                setattr(metric, name, _without(state, getattr(metric, name)))
        elif metric._update_count > updates:
            self._states[key] = tree_map_only(Tensor, torch.detach, metric._copy_state_dict()), metric._update_count
        value = whole = metric.compute()
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(value)):
            whole = tree_map_only(Tensor, torch.detach, value)
            for name in [name for name, default in metric._defaults.items() if isinstance(default, list)]:
                setattr(metric, name, [])  # after ranks have exchanged it, it is a tensor, which reset() can't clear
            metric.reset()
            metric.update(*args, **kwargs)
            try:
                value = metric.compute()
            except Exception as error:  # the user's metric, which may need more samples than the part has
                value = tree_map_only(
                    Tensor, partial(_Untrainable.apply, f"{type(metric).__name__} has no value of a part ({error})"), value
                )
            else:
                if isinstance(value, Tensor) and value.numel() == 1 and not metric._is_synced:
                    self._check_mean(metric, key, value, whole)
        for name, state in states.items():
            setattr(metric, name, state)
        metric._update_count, metric._is_synced, metric._should_unsync = count, False, True
        metric._to_sync, metric._computed, metric._enable_grad = metric.sync_on_compute, None, False
        metric.compute_on_cpu = on_cpu
        if on_cpu:
            metric._move_list_states_to_cpu()
        return value, whole

    def _check_mean(self, metric: Metric, key: tuple[int | None, int, int], value: Tensor, whole: Tensor) -> None:
        """Raise if the parts' mean isn't the batch's value, though backward has begun from one of them: that was another loss.

        Args:
            whole: of the batch as far as it has come.
        """
        mean, rows = self._means.get(key, (torch.zeros_like(whole, dtype=torch.float64), 0))
        if self._rows:
            mean = (mean * rows + value.detach().double() * self._rows) / (rows + self._rows)
        self._means[key] = mean, rows + self._rows
        equal = max(_EQUAL, _ROUNDINGS * torch.finfo(whole.dtype).eps) if whole.is_floating_point() else _EQUAL
        if rows and self._rows and key in self._trained and not torch.allclose(mean, whole.double(), rtol=equal, atol=equal):
            raise RuntimeError(
                f"the loss uses the value of {type(metric).__name__}, which isn't a mean over samples: for this batch it is "
                f"{float(whole):.6g}, and {float(mean):.6g} as the mean over the batch's parts; take a plan that runs a batch in one "
                "piece (micro_batches=1, no pipeline), whose ranks exchange the metric's states"
            )
        value.register_hook(lambda gradient: self._trained.add(key))


def _without(before: Any, after: Any) -> Any:
    """A state from before an update that doesn't count, with that update's graph, as every rank must run backward."""
    if isinstance(before, list):
        late = [each for each in after[len(before) :] if isinstance(each, Tensor) and each.requires_grad and each.dim()]
        return [*before, *(each[:0] for each in late)]
    if not (isinstance(after, Tensor) and after.requires_grad):
        return before
    return torch.where(torch.zeros_like(after, dtype=torch.bool), after, before)  # whatever its values are: 0 times infinity or NaN isn't 0


class _Untrainable(torch.autograd.Function):
    """A value that may be logged; backward from it raises, and says why it can't be trained on."""

    @staticmethod
    def forward(ctx: Any, reason: str, value: Tensor) -> Tensor:
        ctx.reason = reason
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(f"training_step is trained on a part of a batch, of which {ctx.reason}; take a plan with micro_batches=1")
