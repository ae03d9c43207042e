"""Whether all stages were given the same batch: a number of each rank's, compared while the step runs.

Every rank of a pipeline loads its batches itself. A dataset that draws from generators which nobody else knows of (NumPy's
``default_rng()``, the system's entropy) gives each of them another crop or another mask, and the step would go on with one stage's inputs
and another one's targets, silently. Knows batches and a process group.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

try:
    import numpy
except ImportError:  # torch runs without it
    numpy = None  # type: ignore[assignment]

#: Of a larger tensor so many elements count, evenly spaced: what a random draw changes, it changes in many places.
_ELEMENTS = 1 << 16
_MASK = (1 << 62) - 1


class SameBatch:
    """Compares a batch's number over the ranks of a pipeline.

    Args:
        group: a gloo group of them.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._pair: Tensor | None = None
        self._work: dist.Work | None = None

    def begin(self, number: int) -> None:
        """A step begins; costs no wait."""
        self._pair = torch.tensor([number, -number])
        self._work = dist.all_reduce(self._pair, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def finish(self) -> None:
        """The step is over.

        Raises:
            RuntimeError: if the ranks had different batches.
        """
        pair, work = self._pair, self._work
        if pair is None or work is None:
            return
        self._pair = self._work = None
        work.wait()
        if int(pair[0]) != -int(pair[1]):
            raise RuntimeError(
                "the stages of the pipeline were given different batches: the dataset, its transforms or the collate function draw from a "
                "generator of their own, which differs from process to process (as numpy.random.default_rng() without a seed does). Draw "
                "from torch's, NumPy's or Python's global generators, seed the generator by the sample's index, or run without a pipeline "
                '(allow=["single", "ddp", "fsdp"])'
            )


def fingerprint(batch: Any, _inside: frozenset[int] = frozenset()) -> int:
    """62 bits that differ where batches do, the same in every process for the same batch.

    Floating-point numbers outside of tensors and arrays count nothing: they may be times. What holds itself counts once.
    """
    if isinstance(batch, Tensor):
        return _of_tensor(batch)
    if numpy is not None and isinstance(batch, numpy.ndarray):
        if batch.dtype.kind not in "biufc" or not batch.dtype.isnative:
            return zlib.crc32(repr(batch.shape).encode())
        picked = batch.reshape(-1)[:: -(-batch.size // _ELEMENTS) or 1].copy()
        return _mixed([_of_tensor(torch.from_numpy(picked)), *batch.shape])
    if isinstance(batch, (str, bytes)):
        return zlib.crc32(batch.encode() if isinstance(batch, str) else batch)
    if batch is None or isinstance(batch, (bool, int)):
        return zlib.crc32(repr(batch).encode())
    if id(batch) in _inside or isinstance(batch, type):  # what a class holds is its process's
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
