"""torch's fused optimizer updates on shards: each rank's kernel goes over its own parts. Knows operations; no optimizer and no engine."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

_FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
_OVERLOADS = ("default", "tensor_lr")


def fused_on_shards() -> None:
    """Let the fused updates work on the ranks' own parts of DTensors, in this process, for good.

    They go element by element, and a parameter, its gradient and its states are sharded alike. ``DTensor`` has no rule for ``_fused_sgd_``
    (torch 2.13, ``_ops/_pointwise_ops.py``), and looks at every tensor of the others' lists: some 50 µs a parameter.
    """
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers  # there is no public registry
    for name in _FUSED:
        packet = getattr(torch.ops.aten, name)
        for overload in set(_OVERLOADS) & set(packet.overloads()):
            handlers[getattr(packet, overload)] = _on_own_parts


def _on_own_parts(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    own_args, own_kwargs = tree_map_only(DTensor, lambda tensor: tensor.to_local(), (args, kwargs))
    return operation(*own_args, **own_kwargs)
