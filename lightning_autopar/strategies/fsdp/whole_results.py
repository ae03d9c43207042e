"""What hooks and callbacks read of a shard, save of it and draw for it is the whole tensor's; and what they compute with both at once.

Without this, each rank would silently have its own shard's. Also what loggers are given.

Hooks compute with shards and whole tensors at once where they hold copies of the weights from before they were sharded. A whole tensor
stays whole: what is written to it is computed from gathered shards. A shard takes its part of what is written to it. In steps torch refuses
such operations, as what a step computes is each rank's own. Knows tensors and loggers; no module, no plan.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import cache, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_autopar._lightning_compat import DummyExperiment
from lightning_autopar._temporary import patched
from lightning_autopar.state.checkpoint import gathered
from lightning_autopar.strategies.base.process_group import in_hook, wait_for_all_ranks

_ATEN = torch.ops.aten
#: Draws into a tensor, whatever it holds.
_FILLS = (
    *(_ATEN.normal_.default, _ATEN.uniform_.default, _ATEN.exponential_.default, _ATEN.cauchy_.default, _ATEN.log_normal_.default),
    *(_ATEN.geometric_.default, _ATEN.random_.default, _ATEN.random_.to, getattr(_ATEN.random_, "from"), _ATEN.bernoulli_.float),
)
_LIKES = (_ATEN.rand_like.default, _ATEN.randn_like.default, _ATEN.randint_like.default, _ATEN.randint_like.low_dtype)

_TENSOR = torch.tensor


def give_whole_results() -> None:
    """Give these operations the whole tensor's results, in this process, permanently. There is no public registry.

    ``.item()``, ``float()``, ``.numpy()``, ``.tolist()`` and pickling of a sharded tensor become collectives: a single rank that calls them
    gets an error. torch 2.13's DTensor dispatches ``_local_scalar_dense`` to the local tensor, refuses ``.numpy()``, and
    ``torch.tensor([norm, …])``, as Lightning's ``grad_norm`` calls it, doesn't ask it at all. What ``logger.experiment`` is given
    (``add_histogram``) a logger reads on rank 0; on the others Lightning's stand-in for it takes part.

    A draw is made whole on each rank, which takes the whole tensor's memory for a moment. torch itself draws shards: on CPUs the same for
    each, on GPUs with offsets that aren't one device's (``OffsetBasedRNGTracker``).
    """
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers[_ATEN._local_scalar_dense.default] = _number
    handlers[_ATEN.bernoulli.default] = _draw_by_values
    handlers.update(dict.fromkeys(_FILLS, _fill))
    handlers.update(dict.fromkeys(_LIKES, _draw_like))
    if torch.tensor is _TENSOR:
        torch.tensor = _tensor_of  # type: ignore[assignment]
    DTensor.numpy, DTensor.tolist = _numpy, _list  # type: ignore[assignment, method-assign]
    DTensor.__reduce_ex__, DTensor.__copy__ = _pickled, _shallow  # type: ignore[method-assign, assignment, attr-defined]
    DummyExperiment.nop = _nothing_logged  # type: ignore[assignment, method-assign]


def _read(shard: DTensor) -> Tensor:
    wait_for_all_ranks("the values of a sharded parameter, or of what was made of one, were read or saved", once=True)
    return gathered(shard.detach())


def _number(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _read(args[0]).item()


def _tensor_of(data: Any, **options: Any) -> Tensor:
    """``torch.tensor``."""
    if isinstance(data, (list, tuple)):
        data = [each.item() if isinstance(each, DTensor) and not each.ndim else each for each in data]
    return _TENSOR(data, **options)


def _numpy(shard: DTensor, **options: Any) -> Any:
    return _read(shard).cpu().numpy(**options)


def _list(shard: DTensor) -> Any:
    return _read(shard).tolist()


def _pickled(shard: DTensor, protocol: Any) -> Any:
    """Pickle the whole tensor, as a file that a hook writes is to hold; elsewhere, as when planning sends a module on, its own rank's."""
    if not in_hook():
        return Tensor.__reduce_ex__(shard, protocol)  # type: ignore[no-untyped-call]  # torch's has no annotations
    whole = _read(shard)
    written: Any = nn.Parameter(whole, shard.requires_grad) if isinstance(shard, nn.Parameter) else whole
    return written.__reduce_ex__(protocol)


def _shallow(shard: DTensor) -> Any:
    """``copy.copy``, which would pickle."""
    function, arguments = Tensor.__reduce_ex__(shard, 4)  # type: ignore[no-untyped-call]
    return function(*arguments)


def _nothing_logged(experiment: Any, *args: Any, **options: Any) -> None:
    """What a call of ``logger.experiment`` does on another rank than 0."""
    for value in tree_leaves((args, options)):
        if isinstance(value, DTensor):
            _read(value)


def whole_for_loggers(loggers: Iterable[Any]) -> None:
    """Give the methods of these loggers that rank 0 alone runs (Lightning's ``rank_zero_only``) whole tensors for shards, in this process,
    permanently: reading a shard there is a collective, for which rank 0 would wait for ever.
    """
    for kind in {type(logger) for logger in loggers}:
        for name in dir(kind):
            method = inspect.getattr_static(kind, name)
            if inspect.isfunction(method) and hasattr(method, "__wrapped__") and not hasattr(method, "_gives_wholes"):
                setattr(kind, name, _given_wholes(method))


def _given_wholes(method: Any) -> Any:
    @wraps(method)
    def whole(*args: Any, **options: Any) -> Any:
        if any(isinstance(each, DTensor) for each in tree_leaves((args, options))):
            wait_for_all_ranks(f"a logger's {method.__name__} was given a parameter or what is computed from one")
            args, options = tree_map_only(DTensor, lambda shard: gathered(shard.detach()), (args, options))
        return method(*args, **options)

    whole._gives_wholes = True  # type: ignore[attr-defined]
    return whole


def _fill(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    shard: DTensor = args[0]
    shard._local_tensor.copy_(part_of(operation(_empty(shard), *args[1:], **kwargs), shard))
    return shard


def _draw_like(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    return _shard(operation(_empty(args[0]), *args[1:], **kwargs), args[0])


def _draw_by_values(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    return _shard(operation(args[0].detach().full_tensor(), *args[1:], **kwargs), args[0])


def _empty(shard: DTensor) -> Tensor:
    """A tensor like the whole one, on the device that the shard is on."""
    return torch.empty_strided(shard.shape, shard.stride(), dtype=shard.dtype, device=shard._local_tensor.device)


def _shard(whole: Tensor, like: DTensor) -> DTensor:
    placements = [Replicate() if placement.is_partial() else placement for placement in like.placements]
    part = part_of(whole, like).clone()  # else it would hold the whole one's memory
    return DTensor.from_local(part, like.device_mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


#: Torch's own object, which computes operations on shards. It refuses those that have a whole tensor as well, and torch (2.11 to 2.13) has
#: no public way to compute them otherwise. While its ``_allow_implicit_replication`` is set, it calls :func:`_propagated` instead.
_DISPATCHER: Any = DTensor._op_dispatcher
#: Gathered tensors of which hooks have views, until the next step.
_VIEWED: list[Tensor] = []
_COPY, _COPIES = torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default
_PROPAGATE, _TAIL = _DISPATCHER._propagate_op_sharding_dispatch_slow_path, _DISPATCHER._dispatch_fast_path_python_tail


def allow_mixed() -> None:
    """From now on operations on shards and whole tensors at once are computed, in this process."""
    warnings.filterwarnings("ignore", message="Found a non-scalar tensor with numel=1 and ndim!=0, we are implicitly creating")
    _DISPATCHER._propagate_op_sharding_dispatch_slow_path = _propagated
    _DISPATCHER._dispatch_fast_path_python_tail = _written
    _DISPATCHER._allow_implicit_replication = True


def mixed_refused() -> AbstractContextManager[None]:
    """While open, torch refuses them."""
    return patched(_DISPATCHER, "_allow_implicit_replication", False)


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
