"""What may be done with absent tensors: which functions need only a tensor's description and which read its values, and when values may be
absent.

It walks through the arguments of torch's operators and describes them in words. It also says whether code in this process may, for now,
compute with absent tensors and write them into real ones. Knows tensors only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to the leaves of containers that the dispatcher knows."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind(map_leaves(item, function) for item in value)
    if isinstance(value, (tuple, list)):
        items = [map_leaves(item, function) for item in value]
        return kind(*items) if hasattr(kind, "_fields") else tuple(items) if isinstance(value, tuple) else items
    if kind is dict:
        return {name: map_leaves(item, function) for name, item in value.items()}
    return function(value)


def leaves_of(value: Any) -> Iterator[Any]:
    """The leaves of containers."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves_of(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from leaves_of(item)
    else:
        yield value


def indices_for_masks(args: Any) -> Any:
    """The index with positions, whose number is known, in place of real masks."""
    indices: list[Any] = []
    for index in args[1]:
        if isinstance(index, Tensor) and type(index) is Tensor and index.dtype in (torch.bool, torch.uint8):
            with _disable_current_modes():
                indices.extend(index.nonzero().unbind(1))
        else:
            indices.append(index)
    return (args[0], indices, *args[2:])


def title(func: Any) -> str:
    """A function's name, quoted."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = str(getattr(func.__self__, "__name__", name))
    return f"{name!r}"


class Rules:
    """This process's rules: whether computing with absent tensors is an error, and which real tensors must never become absent."""

    strict = False
    hollowing = False
    kept: Callable[[], frozenset[int]] = frozenset
    simulated = False


RULES = Rules()


def set_strict(value: bool) -> bool:
    """Set whether operations on absent tensors are errors; returns the setting before."""
    before, RULES.strict = RULES.strict, value
    return before


@contextmanager
def recording_absence(kept: Callable[[], frozenset[int]] = frozenset) -> Iterator[None]:
    """While open, a real tensor becomes absent when values of absent tensors are written to it; at other times that is an error.

    Args:
        kept: gives the ids of tensors that don't become absent: writes to these, or to a parameter, are dropped.
    """
    before = RULES.hollowing, RULES.kept
    RULES.hollowing, RULES.kept = True, kept
    try:
        yield
    finally:
        RULES.hollowing, RULES.kept = before


def _getters(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names if hasattr(Tensor, name)}


def _methods(*names: str) -> set[Any]:
    found = {getattr(Tensor, name) for name in names if hasattr(Tensor, name)}
    return found | {getattr(torch, name) for name in names if hasattr(torch, name) and not name.startswith("_")}


#: Functions that need no values, and return no tensor.
DESCRIBING = frozenset(
    _getters(
        *("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad", "names", "itemsize", "nbytes", "_version"),
        *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_mps", "is_xpu", "is_mkldnn", "is_nested", "is_sparse_csr"),
        *("grad_fn", "output_nr", "_backward_hooks", "_base", "name", "retains_grad", "is_vulkan", "is_ipu", "is_xla", "is_ort", "is_mtia"),
    )
    | _methods(
        *("size", "dim", "numel", "nelement", "ndimension", "stride", "storage_offset", "is_floating_point", "is_complex", "is_signed"),
        *("is_contiguous", "element_size", "get_device", "__len__", "__hash__", "has_names", "is_same_size", "is_inference", "is_shared"),
        *("is_pinned", "is_conj", "is_neg", "result_type", "can_cast", "is_tensor", "_is_view", "dim_order"),
    )
)
#: Functions that give a tensor's values to Python.
READING = frozenset(
    _methods(
        "item", "tolist", "__bool__", "__float__", "__int__", "__index__", "__complex__", "numpy", "__array__", "__contains__", "equal"
    )
    | _methods("is_nonzero", "allclose", "__reduce_ex__", "__dlpack__", "__format__")
)
