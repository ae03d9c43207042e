"""Computing with shards and whole tensors at once, as hooks do that hold copies of the weights from before they were sharded.

A whole tensor stays whole: what is written to it is computed from gathered shards. A shard takes its part of what is written to it. In
steps torch refuses such operations, as what a step computes is each rank's own. Knows tensors; no module, no plan.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_autopar.state.checkpoint import gathered
from lightning_autopar.strategies.base.process_group import wait_for_all_ranks

#: Torch's own object, which computes operations on shards. It refuses those that have a whole tensor as well, and torch (2.11 to 2.13) has
#: no public way to compute them otherwise. While its ``_allow_implicit_replication`` is set, it calls :func:`_propagated` instead.
_DISPATCHER: Any = DTensor._op_dispatcher
#: Gathered tensors of which hooks have views, until the next step.
_VIEWED: list[Tensor] = []
_COPY, _COPIES = torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default
_PROPAGATE, _TAIL = _DISPATCHER._propagate_op_sharding_dispatch_slow_path, _DISPATCHER._dispatch_fast_path_python_tail


def allow() -> None:
    """From now on they are computed, in this process."""
    warnings.filterwarnings("ignore", message="Found a non-scalar tensor with numel=1 and ndim!=0, we are implicitly creating")
    _DISPATCHER._propagate_op_sharding_dispatch_slow_path = _propagated
    _DISPATCHER._dispatch_fast_path_python_tail = _written
    _DISPATCHER._allow_implicit_replication = True


@contextmanager
def refused() -> Iterator[None]:
    """While open, torch refuses them."""
    before = _DISPATCHER._allow_implicit_replication
    _DISPATCHER._allow_implicit_replication = False
    try:
        yield
    finally:
        _DISPATCHER._allow_implicit_replication = before


def part_of(whole: Tensor, shard: DTensor) -> Tensor:
    """The part of a whole tensor that a shard has."""
    shape, offset = compute_local_shape_and_global_offset(shard.shape, shard.device_mesh, shard.placements)
    for dimension, (start, length) in enumerate(zip(offset, shape, strict=True)):
        if length != whole.shape[dimension]:
            whole = whole.narrow(dimension, min(start, whole.shape[dimension]), length)
    return whole


def _propagated(operation: Any, args: Any, kwargs: Any, *others: Any) -> Any:
    """What torch asks where it doesn't know how an operation's shards are computed yet; the answer for a mixed one is its result."""
    if operation is _COPIES:  # torch has no rule for it
        for target, source in zip(args[0], args[1], strict=True):
            target.copy_(source)
        return None
    written = [
        each
        for argument, value in zip(operation._schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
        for each in tree_leaves(value)
    ]
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    if not any(not isinstance(each, DTensor) and (each.ndim or any(each is target for target in written)) for each in tensors):
        try:
            return _PROPAGATE(operation, args, kwargs, *others)
        except RuntimeError:
            if _DISPATCHER._allow_implicit_replication and operation.is_view:
                return _view_of_whole(operation, args, kwargs)
            raise
    shards = [each for each in tensors if isinstance(each, DTensor)]
    if torch.is_grad_enabled() and any(shard.requires_grad for shard in shards):
        raise RuntimeError(
            f"a hook computes ({operation}) with a parameter, which FSDP2 holds in shards, and a whole tensor while gradients are "
            "recorded; put the hook's computing under torch.no_grad(), or run with allow=['single', 'ddp']"
        )
    _meet()
    if operation is _COPY and isinstance(args[0], DTensor) and args[0].shape == args[1].shape:
        _take(args[0], args[1])
        return args[0]
    wholes = {id(shard): gathered(shard.detach()) for shard in shards}
    whole_args, whole_kwargs = tree_map_only(DTensor, lambda shard: wholes[id(shard)], (args, kwargs))
    result = operation(*whole_args, **whole_kwargs)
    for shard in written:
        if isinstance(shard, DTensor):
            _take(shard, wholes[id(shard)])
    back = {id(wholes[id(shard)]): shard for shard in shards}
    return tree_map_only(Tensor, lambda tensor: back.get(id(tensor), tensor), result)


def _view_of_whole(operation: Any, args: Any, kwargs: Any) -> Any:
    """A view that torch refuses of parts of unequal length (``parameter.flatten()``), of the gathered tensor: for reading alone."""
    _meet()
    shard: DTensor = args[0]
    whole = gathered(shard.detach())
    _VIEWED.append(whole)
    view = operation(whole, *args[1:], **kwargs)
    return DTensor.from_local(view, shard.device_mesh, [Replicate()] * shard.device_mesh.ndim, run_check=False)


def forget_views() -> None:
    """Keep the gathered tensors no longer of which hooks have had views."""
    _VIEWED.clear()


def _refuse_lost(written: Any) -> None:
    places = {whole.untyped_storage().data_ptr() for whole in _VIEWED}
    for each in tree_leaves(written):
        if isinstance(each, DTensor) and each._local_tensor.untyped_storage().data_ptr() in places:
            raise RuntimeError(
                "a hook writes to a view (flatten() or view()) of a parameter that FSDP2 holds in parts of unequal length; write to the "
                "parameter itself, or run with allow=['single', 'ddp']"
            )


@cache
def _meet() -> None:
    """Once is enough to notice a hook that computes on some ranks only."""
    wait_for_all_ranks("a hook computed with a shard and a whole tensor")


def _take(shard: DTensor, whole: Tensor) -> None:
    """Write a rank's part of what must be the same on all ranks."""
    values = torch.view_as_real(whole) if whole.is_complex() else whole
    total = values.detach().sum(dtype=torch.float64).nan_to_num().to(shard.device_mesh.device_type)
    extremes = torch.stack([total, -total])
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    if extremes[0] != -extremes[1]:
        raise RuntimeError(
            f"a hook writes other values to a parameter of shape {tuple(shard.shape)} on each rank (of its own part of the batch?), and "
            "FSDP2 holds one parameter in shards of all ranks; let it write the same on all ranks, or run with allow=['single']"
        )
    shard._local_tensor.copy_(part_of(whole, shard))


def _written(operation: Any, args: Any, *others: Any) -> Any:
    """Torch's own end of an operation, but for those that have written to a whole tensor: it expects a shard."""
    if others[-2] and _VIEWED:
        _refuse_lost(args[0])
    if others[-2] and isinstance(args[0], Tensor) and not isinstance(args[0], DTensor):
        return args[0]
    return _TAIL(operation, args, *others)
