"""torchmetrics over ranks that see unequal numbers of samples, none included, over parts of a batch, and over a pipeline's stages.

Knows metrics and a process group, nothing of logging.
"""

from __future__ import annotations

import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, zip_longest
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_mean
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_autopar.strategies.staged.hole import hole_of

#: A process group for what lies on the host, None for the default one, and how many ranks it has.
Group: TypeAlias = tuple[dist.ProcessGroup | None, int]


def adopt(metric: Metric, group: Callable[[], Group]) -> Callable[[], None]:
    """Prepare one metric; the returned function undoes it.

    Args:
        metric: it exchanges its states at each step from now on.
        group: tells with whom it does so now.
    """
    on_step = metric.dist_sync_on_step
    metric.dist_sync_on_step = True
    replaced = type(metric)._sync_dist is Metric._sync_dist and "_sync_dist" not in metric.__dict__

    def _sync_dist(self: Any, dist_sync_fn: Any = gather_all_tensors, process_group: Any = None) -> None:
        among, size = group()
        if dist_sync_fn is not gather_all_tensors or process_group is not None or self.process_group is not None:
            if size < dist.get_world_size():
                raise RuntimeError(
                    f"the metric {type(self).__name__} has a process group or a dist_sync_fn of its own and exchanges its states within a "
                    "step, which not all ranks of a pipeline come to; leave them out, or run without a pipeline "
                    "(allow=['single', 'ddp', 'fsdp'])"
                )
            Metric._sync_dist(self, dist_sync_fn, process_group=process_group)
        elif size > 1:
            sync_states(self, among, size)

    if replaced:
        # A bound method of the method's own name: a copy of the metric gets its own, an unpickled one the class's.
        metric.__dict__["_sync_dist"] = types.MethodType(_sync_dist, metric)

    def undo() -> None:
        metric.dist_sync_on_step = on_step
        if replaced:
            del metric.__dict__["_sync_dist"]

    return undo


def sync_states(metric: Metric, group: dist.ProcessGroup | None, size: int = 0) -> None:
    """``Metric._sync_dist`` for ranks that may have seen unequal numbers of samples: as many as the group has, or all.

    torchmetrics gathers tensor by tensor, which needs equally many of one type on every rank, and lets a rank that saw nothing count as one
    that did. Here each rank's states travel as a whole, and those of ranks without an update are left out.
    """
    states = {name: _to_host(getattr(metric, name)) for name in metric._reductions}
    gathered: list[Any] = [None] * (size or dist.get_world_size())
    dist.all_gather_object(gathered, (metric._update_count, states), group=group)
    updated = [each for each in gathered if each[0] > 0] or gathered
    reductions: dict[str, Any] = metric._reductions
    for name, reduction in reductions.items():
        parts = [state[name] for _, state in updated]
        own = getattr(metric, name)
        lists = [part if isinstance(part, list) else [part] for part in parts]
        if isinstance(own, list) or any(isinstance(part, list) for part in parts):
            together = [tensor for tensor in chain.from_iterable(zip_longest(*lists)) if tensor is not None]
            moved: Any = [tensor.to(metric.device) if isinstance(tensor, Tensor) else tensor for tensor in together]
            if not moved:
                setattr(metric, name, [])
                continue
        else:
            moved = torch.stack(parts).to(metric.device)
        if reduction is dim_zero_mean and isinstance(moved, Tensor):
            counts = torch.tensor([count for count, _ in updated], dtype=torch.float64, device=metric.device)
            shape = [-1] + [1] * (moved.dim() - 1)
            moved = (moved * counts.view(shape)).sum(0).div(counts.sum()).to(moved.dtype) if counts.sum() else moved.mean(0)
            setattr(metric, name, moved)
        else:
            setattr(metric, name, reduction(moved) if reduction is not None else moved)


def _to_host(state: Any) -> Any:
    return [_to_host(each) for each in state] if isinstance(state, list) else state.detach().cpu() if isinstance(state, Tensor) else state


@contextmanager
def hold_metrics(module: nn.Module) -> Iterator[None]:
    """Leave the module's torchmetrics as they are: an update within counts for nothing, though they take part in what others exchange."""
    metrics = [each for each in module.modules() if isinstance(each, Metric)]
    updates = [metric.__dict__.get("update") for metric in metrics]
    collections = [each for each in module.modules() if isinstance(each, MetricCollection)]
    # Which of a collection's metrics share their states is found out by comparing them after the first update; here there was none.
    groups = [(dict(each._groups), each._groups_checked, each._state_is_copy) for each in collections]
    for metric in metrics:
        metric.__dict__["update"] = _no_update
    try:
        with warnings.catch_warnings():
            # A metric's forward computes on what its update has seen, which here is nothing.
            warnings.filterwarnings("ignore", message="The ``compute`` method of metric")
            yield
    finally:
        for metric, update in zip(metrics, updates, strict=True):
            del metric.__dict__["update"]
            if update is not None:
                metric.__dict__["update"] = update
        for collection, (before, checked, is_copy) in zip(collections, groups, strict=True):
            collection._groups, collection._groups_checked, collection._state_is_copy = before, checked, is_copy


def _no_update(*_: Any, **__: Any) -> None:
    """What a metric's ``update`` does on a rank whose row belongs to another rank."""


class MetricParts:
    """Makes a metric's ``forward`` speak for a whole batch that is worked off in parts.

    What it gives on a part, and leaves to be logged, is the value of the batch as far as it has come: on the last part that of all of it.
    Of a pipeline's stages, only that whose own code calls a metric has it take in anything.
    """

    def __init__(self) -> None:
        #: What ``forward`` gave in the part that runs.
        self._given: list[Tensor] = []
        self._adopted: set[int] = set()
        self._running = False
        self._stage: int | None = None
        self._owns: Callable[[], bool] = lambda: True
        self._calls: Counter[int] = Counter()
        #: By stage, metric and call: the states of the batch as far as it has come, and how many updates they have seen.
        self._states: dict[tuple[int | None, int, int], tuple[dict[str, Any], int]] = {}

    def clear(self) -> None:
        """A batch begins."""
        self._states.clear()

    def speaks(self, value: object) -> bool:
        """Whether a value, or what a metric leaves to be logged, is that of the batch as far as it has come."""
        return id(value) in self._adopted if isinstance(value, Metric) else any(value is given for given in self._given)

    @contextmanager
    def part(self, stage: int | None, owns: Callable[[], bool]) -> Iterator[None]:
        """Around the user's step on a part.

        Args:
            stage: which stage of a pipeline runs it; None where there are none.
            owns: whether the code that runs now is the stage's own.
        """
        self._running, self._stage, self._owns = True, stage, owns
        try:
            yield
        finally:
            self._running = False
            self._calls.clear()
            self._given.clear()

    @property
    def _foreign(self) -> bool:
        """Whether the code that runs is another stage's."""
        return self._running and not self._owns()

    def adopt(self, metric: Metric) -> Callable[[], None]:
        """Take in one metric; the returned function lets it go. One with a ``forward`` of its own stays as it is."""
        if type(metric).forward is not Metric.forward or "forward" in metric.__dict__:
            return lambda: None

        def forward(this: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._running:
                return Metric.forward(this, *args, **kwargs)
            this._forward_cache = self._forward(this, args, kwargs)
            self._given += [leaf for leaf in tree_leaves(this._forward_cache) if isinstance(leaf, Tensor)]
            return this._forward_cache

        metric.__dict__["forward"] = types.MethodType(forward, metric)
        self._adopted.add(id(metric))

        def undo() -> None:
            del metric.__dict__["forward"]
            self._adopted.discard(id(metric))

        return undo

    def leave_out(self, metric: Metric | MetricCollection) -> Callable[[], None]:
        """Have a metric take in nothing that another stage's code gives it, which may be no value at all; the returned function undoes it.

        A metric that is updated on another rank only is no reason to warn that it was never updated.
        """
        shadowed = {name: metric.__dict__.get(name) for name in ("update", "forward", "compute")}

        def own(this: Any, name: str, args: Any, kwargs: Any) -> Any:
            call = shadowed[name] or getattr(type(this), name)
            if shadowed[name] is not None and not isinstance(call, types.MethodType):
                return call(*args, **kwargs)  # torchmetrics' own, which a copy gets anew
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

        # Bound methods of the methods' own names: a copy gets its own, an unpickled metric the class's.
        metric.__dict__.update({each.__name__: types.MethodType(each, metric) for each in (update, forward, compute)})

        def undo() -> None:
            for name, before in shadowed.items():
                del metric.__dict__[name]
                if before is not None:
                    metric.__dict__[name] = before

        return undo

    def _nothing(self, metric: Metric | MetricCollection) -> Any:
        """Stands for what a metric gives in another stage's code."""
        if isinstance(metric, MetricCollection):
            return {name: self._nothing(each) for name, each in metric.items(keep_base=False, copy_state=False)}
        return hole_of((), torch.float32, metric.device, f"the value of a {type(metric).__name__}, which another stage's code computes")

    def _forward(self, metric: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``Metric._forward_full_state_update`` (torchmetrics 1.x), but that the batch's state goes on with the earlier parts'."""
        key = self._stage, id(metric), self._calls[id(metric)]
        self._calls[id(metric)] += 1
        metric.update(*args, **kwargs)
        count, states, on_cpu = metric._update_count, metric._copy_state_dict(), metric.compute_on_cpu
        metric._to_sync, metric._should_unsync, metric.compute_on_cpu = metric.dist_sync_on_step, False, False
        metric._enable_grad = True
        metric.reset()
        if key in self._states:
            earlier, metric._update_count = self._states[key]
            for name, state in earlier.items():
                setattr(metric, name, state)
        metric.update(*args, **kwargs)
        self._states[key] = torch.utils._pytree.tree_map_only(Tensor, torch.detach, metric._copy_state_dict()), metric._update_count
        value = metric.compute()
        for name, state in states.items():
            setattr(metric, name, state)
        metric._update_count, metric._is_synced, metric._should_unsync = count, False, True
        metric._to_sync, metric._computed, metric._enable_grad = metric.sync_on_compute, None, False
        metric.compute_on_cpu = on_cpu
        if on_cpu:
            metric._move_list_states_to_cpu()
        return value
