"""What hooks and callbacks read of a shard, save of it and draw for it is the whole tensor's.

Without this, each rank would silently have its own shard's. Also what loggers are given. Knows tensors and loggers; no module, no plan.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_autopar._lightning_compat import DummyExperiment
from lightning_autopar.state.checkpoint import gathered
from lightning_autopar.strategies.base.process_group import in_hook, wait_for_all_ranks
from lightning_autopar.strategies.fsdp.mixed_operations import part_of

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
