"""Operations on shards whose results are those of the whole tensor: a number that is read, and random draws.

Hooks and callbacks of the user's see shards. Without this, each rank would silently read the number of its own shard and draw for it alone.
Knows DTensor's dispatch; no module, no plan.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_leaves

from lightning_autopar._lightning_compat import DummyExperiment

_ATEN = torch.ops.aten
#: Draws into a tensor, whatever it holds.
_FILLS = (
    *(_ATEN.normal_.default, _ATEN.uniform_.default, _ATEN.exponential_.default, _ATEN.cauchy_.default, _ATEN.log_normal_.default),
    *(_ATEN.geometric_.default, _ATEN.random_.default, _ATEN.random_.to, getattr(_ATEN.random_, "from"), _ATEN.bernoulli_.float),
)
_LIKES = (_ATEN.rand_like.default, _ATEN.randn_like.default, _ATEN.randint_like.default, _ATEN.randint_like.low_dtype)

_TENSOR = torch.tensor


def whole_results() -> None:
    """Give these operations the whole tensor's results, in this process, permanently. There is no public registry.

    ``.item()``, ``float()``, ``.numpy()`` and ``.tolist()`` of a sharded tensor become collectives: a single rank that calls them waits for
    the others. torch 2.13's DTensor dispatches ``_local_scalar_dense`` to the local tensor, refuses ``.numpy()``, and
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
    DummyExperiment.nop = _nothing_logged  # type: ignore[assignment, method-assign]


def part_of(whole: Tensor, shard: DTensor) -> Tensor:
    """The part of a whole tensor that a shard has."""
    shape, offset = compute_local_shape_and_global_offset(shard.shape, shard.device_mesh, shard.placements)
    for dimension, (start, length) in enumerate(zip(offset, shape, strict=True)):
        if length != whole.shape[dimension]:
            whole = whole.narrow(dimension, min(start, whole.shape[dimension]), length)
    return whole


def _number(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].detach().full_tensor().item()


def _tensor_of(data: Any, **options: Any) -> Tensor:
    """``torch.tensor``."""
    if isinstance(data, (list, tuple)):
        data = [each.item() if isinstance(each, DTensor) and not each.ndim else each for each in data]
    return _TENSOR(data, **options)


def _whole(shard: DTensor) -> Tensor:
    """The values of all ranks, in host memory. A shard that was copied to the host is gathered on the mesh's devices all the same."""
    there: Any = shard.detach().to(shard.device_mesh.device_type)
    whole: Tensor = there.full_tensor()
    return whole.cpu()


def _numpy(shard: DTensor, **options: Any) -> Any:
    return _whole(shard).numpy(**options)


def _list(shard: DTensor) -> Any:
    return _whole(shard).tolist()


def _nothing_logged(experiment: Any, *args: Any, **options: Any) -> None:
    """What a call of ``logger.experiment`` does on another rank than 0."""
    for value in tree_leaves((args, options)):
        if isinstance(value, DTensor):
            _whole(value)


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
