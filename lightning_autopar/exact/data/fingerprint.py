"""A tensor's bytes; and a fingerprint of a batch: the same number in every process for equal batches, and another number for other batches.

Knows batches alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

#: How many elements of a larger tensor count, evenly spaced: a random draw changes many elements, not one.
_ELEMENTS = 1 << 16


_MASK = (1 << 62) - 1


def bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, as a view of it. That is a single element with any stride, too, such as a row's entry or an
    expanded number, which torch's ``view`` would refuse to take for bytes.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def fingerprint(batch: Any, _inside: frozenset[int] = frozenset()) -> int:
    """62 bits that differ where batches do, the same in every process for the same batch.

    Floating-point numbers outside of tensors and arrays don't count: they may be times. An object that contains itself counts once.
    """
    if isinstance(batch, Tensor):
        return _of_tensor(batch)
    if isinstance(batch, numpy.ndarray):
        if batch.dtype.kind not in "biufc" or not batch.dtype.isnative:
            return zlib.crc32(repr(batch.shape).encode())
        picked = batch.reshape(-1)[:: -(-batch.size // _ELEMENTS) or 1].copy()
        return _mixed([_of_tensor(torch.from_numpy(picked)), *batch.shape])
    if isinstance(batch, (str, bytes)):
        return zlib.crc32(batch.encode() if isinstance(batch, str) else batch)
    if batch is None or isinstance(batch, (bool, int)):
        return zlib.crc32(repr(batch).encode())
    if id(batch) in _inside or isinstance(batch, type):  # the attributes of a class are of this process alone
        return 0
    inside = _inside | {id(batch)}
    if isinstance(batch, Mapping):
        return _mixed(fingerprint(part, inside) for item in batch.items() for part in item)
    if isinstance(batch, (list, tuple)):
        return _mixed(fingerprint(item, inside) for item in batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        return _mixed(fingerprint(getattr(batch, field.name), inside) for field in fields(batch))
    state = getattr(batch, "__dict__", None)
    return _mixed(fingerprint(value, inside) for value in state.values()) if state else 0  # a class of the user's own


def _of_tensor(tensor: Tensor) -> int:
    if tensor.layout != torch.strided or tensor.is_quantized or not tensor.numel():
        return zlib.crc32(repr(tuple(tensor.shape)).encode())
    with torch._C.DisableTorchFunctionSubclass():  # a subclass may not let itself be sliced so
        flat = tensor.detach().as_subclass(Tensor).reshape(-1)
    flat = flat[:: -(-flat.numel() // _ELEMENTS)].contiguous().cpu()
    if flat.dtype == torch.bool or flat.element_size() == 1:
        words = flat.view(torch.uint8).to(torch.int64)
    else:
        halves = {2: torch.int16, 4: torch.int32, 8: torch.int64}
        words = (
            (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).view(halves.get(flat.element_size(), torch.int32)).long()
        )
    places = torch.arange(1, words.numel() + 1)
    return _mixed([int((words * (2 * places + 1)).sum()), int(words.sum()), *tensor.shape])


def _mixed(values: Any) -> int:
    state = 0
    for value in values:
        state = (state * 0x9E3779B97F4A7C15 + value + 1) & _MASK
    return state
