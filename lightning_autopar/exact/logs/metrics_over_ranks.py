"""torchmetrics over ranks that see unequal numbers of samples, none included.

A step's value that the user's code throws away (``self.accuracy(y, target)``) costs no exchange: the batch's states are kept, and exchanged
when the step is over, where the metric was logged with ``on_step``. A value that is trained on keeps its graph: each rank's states lead to
its own samples, and what backward brings to the whole batch's states is added up over the ranks. Knows metrics and a process group, nothing
of logging.
"""

from __future__ import annotations

import ast
import dis
import linecache
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import chain, islice, zip_longest
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum
from torchmetrics.utilities.distributed import gather_all_tensors

#: A process group for tensors on the host, None for the default one, and its size.
Group: TypeAlias = tuple[dist.ProcessGroup | None, int]


#: A metric's states, and how many updates they have seen.
States: TypeAlias = tuple[dict[str, Any], int]
_KINDS = frozenset[type]((Metric, MetricCollection))
_REDUCED = (dim_zero_sum, dim_zero_mean, dim_zero_max, dim_zero_min)
#: The attribute in which a metric keeps its step's arguments for a while.
_INPUTS = "_autopar_inputs"
#: The most items of a container that may hold metrics: a data set has millions of elements.
_LOOKED_AT = 100


def metrics_of(module: nn.Module) -> Iterator[Metric]:
    """A module's metrics, also those in a list or dictionary of it or of its metrics, where torch doesn't find modules."""
    return (metric for _, metric in named_metrics(module))


def named_metrics(module: nn.Module) -> Iterator[tuple[str, Metric]]:
    """The same, each with its name: ``"losses['train']"`` of one in a dictionary."""
    left: list[tuple[str, nn.Module]] = [("", module)]
    seen: set[int] = set()
    while left:
        prefix, root = left.pop()
        for name, child in root.named_modules(prefix=prefix):
            if id(child) in seen:
                continue
            seen.add(id(child))
            if Metric in type(child).__mro__:  # isinstance asks an abstract class, which is slow
                yield name, cast(Metric, child)
            for attribute, value in child.__dict__.items():
                held = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
                found = ((key, each) for key, each in islice(held, _LOOKED_AT) if not _KINDS.isdisjoint(type(each).__mro__))
                left += [(f"{name}.{attribute}[{key!r}]".lstrip("."), each) for key, each in found]


def exchanges_by_itself(metric: Metric) -> bool:
    """Whether the user's code says how a metric's states are exchanged. Where torchmetrics' own classes do so, lists are
    gathered entry by entry (a picture's boxes), of which ranks may have unequally many; :func:`sync_states` sends them as a whole.
    """
    return not str(getattr(type(metric)._sync_dist, "__module__", "")).startswith("torchmetrics.")


def adopt(
    metric: Metric, group: Callable[[], Group], keep: Callable[[Metric, States], bool] = lambda metric, states: False
) -> Callable[[], None]:
    """Prepare one metric; returns what undoes it.

    Args:
        metric: it exchanges its states at each step from now on, unless they are kept.
        group: tells with whom it does so now.
        keep: gets the states of a step whose value is thrown away; says whether it takes them, for :func:`value_of` when they are needed.
    """
    on_step = metric.dist_sync_on_step
    metric.dist_sync_on_step = True
    own_way = exchanges_by_itself(metric)
    replaced = "_sync_dist" not in metric.__dict__

    def _sync_dist(self: Any, dist_sync_fn: Any = gather_all_tensors, process_group: Any = None) -> None:
        among, size = group()
        if own_way or dist_sync_fn is not gather_all_tensors or process_group is not None or self.process_group is not None:
            if size < dist.get_world_size():
                raise RuntimeError(
                    f"the metric {type(self).__name__} has a process group, a dist_sync_fn or a _sync_dist of its own and exchanges its "
                    "states within a step, where not all ranks of a pipeline take part; leave them out, or run without a pipeline "
                    "(allow=['single', 'ddp', 'fsdp'])"
                )
            states = {name: getattr(self, name) for name in self._reductions}
            type(self)._sync_dist(self, dist_sync_fn, process_group=process_group)
            if _has_graph(states):  # torchmetrics keeps this rank's own of them
                _share_gradients(self, states, process_group or self.process_group, on_host=False)
        elif size > 1 and not (is_thrown_away(self) and keep(self, (dict(self._copy_state_dict()), self._update_count))):
            fixed, graph = _agreed(self, among)
            if fixed and size == dist.get_world_size():
                _sync_on_device(self, size, graph)
            else:
                sync_states(self, among, size, graph=graph)

    hooks = [
        metric.register_forward_pre_hook(_note_inputs, with_kwargs=True),
        metric.register_forward_hook(_drop_inputs, always_call=True),
    ]
    if replaced:
        # A bound method of the method's own name: a copy of the metric gets its own, an unpickled one the class's.
        metric.__dict__["_sync_dist"] = types.MethodType(_sync_dist, metric)

    def undo() -> None:
        metric.dist_sync_on_step = on_step
        for hook in hooks:
            hook.remove()
        if replaced:
            del metric.__dict__["_sync_dist"]

    return undo


def value_of(metric: Any, states: States | None, synchronise: Callable[[Any], None]) -> Any:
    """The value that a metric's ``forward`` would have on all ranks' batch.

    Args:
        metric: whose own states stay as they are.
        states: of this rank's part of the batch; None where it saw nothing.
        synchronise: turns this rank's states, which the metric then has, into those of all ranks.
    """
    kept = {**metric.__dict__, **{name: getattr(metric, name) for name in metric._defaults}}
    try:
        metric.reset()
        if states is not None:
            metric._update_count = states[1]
            for name, state in states[0].items():
                setattr(metric, name, state)
        synchronise(metric)
        metric._update_count, metric._to_sync, metric._should_unsync = max(1, metric._update_count), False, False
        return metric.compute()
    finally:
        metric.__dict__.update(kept)


def _note_inputs(metric: Metric, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Record a metric's arguments, for :func:`_share_gradients`. No closure: metrics are pickled with their hooks."""
    metric.__dict__[_INPUTS] = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]


def _drop_inputs(metric: Metric, args: tuple[Any, ...], value: Any) -> None:
    metric.__dict__.pop(_INPUTS, None)


def _agreed(metric: Metric, group: dist.ProcessGroup | None) -> tuple[bool, bool]:
    """Whether the states have fixed shapes on all ranks, and whether any rank's have a graph.

    A rank's own states don't show it: if it saw nothing, or nothing that counts, they are initial.
    """
    states = {name: getattr(metric, name) for name in metric._reductions}
    fixed = all(_is_fixed(metric, name, state) for name, state in states.items())
    answers = torch.tensor([fixed, not _has_graph(states)], dtype=torch.uint8)
    dist.all_reduce(answers, op=dist.ReduceOp.MIN, group=group)
    all_fixed, none_has = answers.tolist()
    return bool(all_fixed), not none_has


def sync_states(metric: Metric, group: dist.ProcessGroup | None, size: int = 0, *, graph: bool = False) -> None:
    """``Metric._sync_dist`` for ranks that may have seen unequal numbers of samples: as many as the group has, or all.

    torchmetrics gathers tensor by tensor, which needs equally many of one type on every rank, and lets a rank that saw nothing count as one
    that did. Here each rank's states are sent as a whole, and those of ranks without an update are left out.

    Args:
        size: how many they are; 0 for all.
        graph: whether any rank's states have a graph; then backward runs through it on all of them.
    """
    own = {name: getattr(metric, name) for name in metric._reductions}
    gathered: list[Any] = [None] * (size or dist.get_world_size())
    dist.all_gather_object(gathered, (metric._update_count, {name: _to_host(state) for name, state in own.items()}), group=group)
    if graph:
        gathered[dist.get_rank(group)] = metric._update_count, own
    merge_states(metric, gathered)
    if graph:
        _share_gradients(metric, own, group, on_host=True)


def merge_states(metric: Metric, gathered: Sequence[tuple[int, dict[str, Any]]]) -> None:
    """Set a metric's states to those of all ranks together.

    Args:
        metric: whose reductions say how.
        gathered: of each rank, how many updates its states have seen, and the states.
    """
    reductions: dict[str, Any] = metric._reductions
    updated = [each for each in gathered if each[0] > 0] or gathered
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
            moved = torch.stack([part.to(metric.device) for part in parts])
        if reduction is dim_zero_mean and isinstance(moved, Tensor):
            counts = torch.tensor([count for count, _ in updated], dtype=torch.float64, device=metric.device)
            shape = [-1] + [1] * (moved.dim() - 1)
            moved = (moved * counts.view(shape)).sum(0).div(counts.sum()).to(moved.dtype) if counts.sum() else moved.mean(0)
            setattr(metric, name, moved)
        else:
            setattr(metric, name, reduction(moved) if reduction is not None else moved)


def _is_fixed(metric: Metric, name: str, state: Any) -> bool:
    """Whether a state has one shape on all ranks, and a reduction to which left-out ranks make no difference."""
    default = metric._defaults[name]
    if not isinstance(state, Tensor) or not isinstance(default, Tensor) or state.dtype.is_complex:
        return False
    return state.shape == default.shape and metric._reductions[name] in _REDUCED


def packed(metric: Metric, states: States) -> Tensor | None:
    """States of fixed shapes as one row of float64, which holds counts exactly up to 2⁵³; None where one of them has no fixed shape.

    Args:
        states: as :func:`adopt` gives them to ``keep``.
    """
    values, count = states
    if not all(_is_fixed(metric, name, values.get(name)) for name in metric._reductions):
        return None
    counted = torch.full((1,), float(count), dtype=torch.float64, device=metric.device)
    row = torch.cat([counted, *(values[name].to(metric.device, torch.float64).reshape(-1) for name in metric._reductions)])
    return row.as_subclass(Tensor)  # a metric may have been given a subclass, with methods of its own


def unpack(metric: Metric, gathered: Tensor) -> None:
    """Set a metric's states to those of several ranks together.

    Args:
        metric: whose states have their shapes and types by now.
        gathered: each rank's :func:`packed`, (ranks, numbers).
    """
    own = {name: getattr(metric, name) for name in metric._reductions}
    counts, *columns = gathered.split([1, *(state.numel() for state in own.values())], dim=1)
    # If no rank has seen anything, all count equally.
    weights = torch.where(counts.sum() > 0, counts, torch.ones_like(counts))
    for (name, state), values in zip(own.items(), columns, strict=True):
        reduction: Any = metric._reductions[name]
        if reduction is dim_zero_mean:
            whole = torch.where(weights > 0, values * weights, 0.0).sum(0) / weights.sum()
        elif reduction is dim_zero_sum:
            whole = torch.where(weights > 0, values, 0.0).sum(0)
        else:
            largest = reduction is dim_zero_max
            whole = torch.where(weights > 0, values, -torch.inf if largest else torch.inf)
            whole = whole.amax(0) if largest else whole.amin(0)
        setattr(metric, name, whole.to(state.dtype).reshape(state.shape).to(state.device))


def _sync_on_device(metric: Metric, world_size: int, graph: bool) -> None:
    """All states of all ranks by one collective, without the host's waiting for the device."""
    own = {name: getattr(metric, name) for name in metric._reductions}
    mine = packed(metric, (own, metric._update_count))
    assert mine is not None, "they are of fixed shapes"
    gathered = mine.new_empty(world_size, mine.numel())
    dist.all_gather(list(gathered.unbind()), mine.detach())
    if graph:
        gathered = torch.stack([mine if rank == dist.get_rank() else row for rank, row in enumerate(gathered.unbind())])
    unpack(metric, gathered)
    if graph:
        _share_gradients(metric, own, None, on_host=False)


def _has_graph(states: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(states))


def _share_gradients(metric: Metric, own: dict[str, Any], group: dist.ProcessGroup | None, *, on_host: bool) -> None:
    """Make backward give a rank's own states the gradients of all ranks' losses with respect to the whole batch's states.

    Args:
        metric: which has the whole batch's states by now.
        own: this rank's. Every rank runs backward with the others, also one whose states don't count or have no graph: its inputs'
            gradients are 0 then.
        group: to add up gradients among.
        on_host: whether they are added up there.
    """
    whole = {name: getattr(metric, name) for name in own}
    leaves, spec = tree_flatten(whole)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    theirs = [leaf for leaf in tree_leaves(own) if isinstance(leaf, Tensor) and leaf.requires_grad]
    theirs = theirs or metric.__dict__.get(_INPUTS) or [torch.zeros((), requires_grad=True)]
    shared = _SharedStates.apply(group, on_host, len(places), *(leaves[place] for place in places), *theirs)  # type: ignore[no-untyped-call]
    for place, state in zip(places, shared, strict=True):
        leaves[place] = state
    for name, state in tree_unflatten(leaves, spec).items():
        setattr(metric, name, state)


class _SharedStates(torch.autograd.Function):
    """All ranks' states, the same on each; their gradients are summed over all ranks."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup | None, on_host: bool, count: int, *states: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.on_host = group, on_host
        ctx.nothing = [state.new_zeros(()).expand_as(state) for state in states[count:]]
        return tuple(state.clone() for state in states[:count])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        flat = torch.cat([gradient.reshape(-1).double() for gradient in gradients])
        summed = flat.cpu() if ctx.on_host else flat
        dist.all_reduce(summed, group=ctx.group)
        parts = summed.to(flat.device).split([gradient.numel() for gradient in gradients])
        whole = [part.view(gradient.shape).to(gradient.dtype) for part, gradient in zip(parts, gradients, strict=True)]
        return None, None, None, *whole, *ctx.nothing


def _to_host(state: Any) -> Any:
    return [_to_host(each) for each in state] if isinstance(state, list) else state.detach().cpu() if isinstance(state, Tensor) else state


@contextmanager
def hold_metrics(module: nn.Module) -> Iterator[None]:
    """While open, the module's torchmetrics don't change: updates don't count, though the metrics take part in exchanges. A value that is
    part of the loss still gets its graph, from the row that stands in for this rank's: all ranks run its backward.
    """
    metrics = list(metrics_of(module))
    updates = [metric.__dict__.get("update") for metric in metrics]
    collections = [each for each in module.modules() if isinstance(each, MetricCollection)]
    # A collection finds which of its metrics share states by comparing them after the first update; here there was none.
    groups = [(dict(each._groups), each._groups_checked, each._state_is_copy) for each in collections]
    for metric in metrics:
        metric.__dict__["update"] = partial(_uncounted, metric, metric.update)
    try:
        with warnings.catch_warnings():
            # A metric's forward computes from what its update has seen, which here is nothing.
            warnings.filterwarnings("ignore", message="The ``compute`` method of metric")
            yield
    finally:
        for metric, update in zip(metrics, updates, strict=True):
            del metric.__dict__["update"]
            if update is not None:
                metric.__dict__["update"] = update
        for collection, (before, checked, is_copy) in zip(collections, groups, strict=True):
            collection._groups, collection._groups_checked, collection._state_is_copy = before, checked, is_copy


def _uncounted(metric: Metric, update: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """A metric's ``update`` on a rank whose row belongs to another rank: at most it makes a graph, for the value of a training step."""
    if metric._enable_grad and metric._to_sync and torch.is_grad_enabled():
        count = metric._update_count
        update(*args, **kwargs)
        metric._update_count = count


_FORWARDS = ("forward", "_forward", "_forward_full_state_update", "_forward_reduce_state_update")
_BETWEEN = ("torchmetrics.", "torch.", "lightning_autopar.", "contextlib.", "functools.")


def is_thrown_away(metric: Metric) -> bool:
    """Whether the metric's ``forward`` needs the states, and its caller, also through a collection, discards its value."""
    frame, forward = sys._getframe(2), False
    while f"{frame.f_globals.get('__name__')}.".startswith(_BETWEEN):
        owner = frame.f_locals.get("self")
        if isinstance(owner, Metric) and owner is not metric:
            return False  # another metric is computed from this one's value
        forward |= frame.f_code.co_name in _FORWARDS
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return forward and _drops(frame.f_code, frame.f_lasti) and _calls(frame, metric)


@lru_cache(maxsize=256)
def _drops(code: types.CodeType, place: int) -> bool:
    """Whether the caller there discards the call's result at once."""
    return next((each.opname for each in dis.get_instructions(code) if each.offset > place), "") == "POP_TOP"


def _calls(frame: types.FrameType, metric: Metric) -> bool:
    """Whether the call that runs there is one of the metric, or of a collection with it: ``values.extend(map(self.accuracy, …))`` isn't.

    Judged by the source of the call; without source, the value counts as used, which is safe and costs an exchange.
    """
    names = _called(frame.f_code, frame.f_lasti)
    if names is None:
        return False
    try:
        found: Any = frame.f_locals[names[0]] if names[0] in frame.f_locals else frame.f_globals[names[0]]
        for name in names[1:]:
            found = found[name[0]] if isinstance(name, tuple) else getattr(found, name)
    except (AttributeError, LookupError, TypeError):
        return False
    found = getattr(found, "__self__", found)
    return found is metric or (isinstance(found, MetricCollection) and any(each is metric for each in found.modules()))


@lru_cache(maxsize=256)
def _called(code: types.CodeType, place: int) -> tuple[Any, ...] | None:
    """The called object there, as names: attributes, and keys in tuples; None where the source doesn't show it."""
    first, last, begin, end = next(islice(code.co_positions(), place // 2, None), (None,) * 4)
    if first is None or last is None or begin is None:
        return None
    lines = [line.encode() for line in linecache.getlines(code.co_filename)[first - 1 : last]]
    if not lines:
        return None
    lines[-1] = lines[-1][:end]
    try:
        call = ast.parse(b"(" + b"".join(lines)[begin:] + b")", mode="eval").body
    except (SyntaxError, ValueError):
        return None
    names: list[Any] = []
    node: ast.expr | None = call.func if isinstance(call, ast.Call) else None
    while node is not None:
        if isinstance(node, ast.Name):
            return (node.id, *reversed(names))
        if isinstance(node, ast.Attribute):
            names.append(node.attr)
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            names.append((node.slice.value,))
        else:
            return None
        node = node.value
    return None
