"""A rank's flat part of a tensor, as torch.distributed.checkpoint takes it: in rectangular chunks, so that no rank holds the whole tensor.

ZeRO partitions a tensor's elements in memory order, whatever its shape, while torch.distributed.checkpoint writes and reads rectangles. A
range of elements is a few rectangles: the whole rows, and what is left of the first and the last one. Knows tensors, no plan and no ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

#: The values that torch's optimizers keep once for a parameter; known by name, as a parameter may itself be a number.
NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})


@dataclass(frozen=True, kw_only=True)
class Rectangle:
    """A rectangular part of a tensor, whose elements are contiguous in its memory.

    Args:
        offsets: where it begins, in each dimension.
        sizes: its extent in each dimension.
        start: its first element, in the order of the tensor's memory.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Rectangle]:
    """The fewest boxes that make up the elements from ``start`` to ``stop`` of a contiguous tensor, in order.

    Args:
        shape: the whole tensor's; with n dimensions there are at most 2n - 1 boxes.
        start: the first element.
        stop: the one after the last.

    Raises:
        ValueError: if the tensor has no such elements.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"a tensor of {math.prod(shape)} elements has no range from {start} to {stop}")
    return list(_boxes(tuple(shape), start, stop, (), start)) if start < stop else []


def _boxes(shape: tuple[int, ...], start: int, stop: int, prefix: tuple[int, ...], first: int) -> Iterator[Rectangle]:
    """Within the part of the tensor at ``prefix``, whose shape this is; ``first`` is ``start`` in the whole tensor."""
    ones = (1,) * len(prefix)
    if not shape:
        yield Rectangle(offsets=prefix, sizes=ones, start=first)
        return
    row = math.prod(shape[1:])
    head = -(-start // row)  # the first row that is whole
    tail = stop // row  # the one after the last that is
    if head > tail:  # within one row
        yield from _boxes(shape[1:], start - tail * row, stop - tail * row, (*prefix, tail), first)
        return
    if start < head * row:
        yield from _boxes(shape[1:], start - (head - 1) * row, row, (*prefix, head - 1), first)
    if head < tail:
        offsets = (*prefix, head, *(0 for _ in shape[1:]))
        yield Rectangle(offsets=offsets, sizes=(*ones, tail - head, *shape[1:]), start=first + head * row - start)
    if tail * row < stop:
        yield from _boxes(shape[1:], 0, stop - tail * row, (*prefix, tail), first + tail * row - start)


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatPart:
    """A rank's part of a parameter: a range of its elements.

    Args:
        parameter: the module's; its own values don't matter here.
        shape: the whole parameter's.
        flat: the elements, one-dimensional; none where the rank has none.
        start: the first one's place in the flattened parameter.
    """

    parameter: nn.Parameter
    shape: tuple[int, ...]
    flat: Tensor
    start: int

    def cut(self, whole: Tensor) -> Tensor:
        """Cut the same part out of a whole tensor of the parameter's shape; a view if that is contiguous."""
        return whole.reshape(-1).narrow(0, self.start, self.flat.numel())

    def is_like(self, value: Any) -> bool:
        """Whether a value is the rank's part of a tensor of the parameter's shape, rather than one number for all of it."""
        return isinstance(value, Tensor) and value.shape == self.flat.shape

    def has_all_of(self, name: str, shape: Sequence[int]) -> bool:
        """Whether a whole state of this name and shape has a value for each of the parameter's elements."""
        return tuple(shape) == self.shape and name not in NUMBERS

    def of(self, flat: Tensor) -> Fragment:
        """This rank's part of another tensor of the parameter's shape, for DCP."""
        return Fragment(flat, shape=self.shape, start=self.start)


class Fragment(Tensor):
    """Looks like the whole tensor to DCP and holds a range of its elements; implements DCP's ``_Checkpointable`` protocol.

    DCP needs a subclass of Tensor (torch 2.13, ``checkpoint/utils.py``, ``find_state_dict_object``); computing with it raises.

    Args:
        flat: the elements, one-dimensional; what DCP loads is written into it.
        shape: the whole tensor's.
        start: the first element's place in the whole tensor.
    """

    _flat: Tensor
    _start: int
    _boxes: list[Rectangle]

    @staticmethod
    def __new__(cls, flat: Tensor, *, shape: Sequence[int], start: int) -> Fragment:
        """Without memory of its own."""
        whole: Fragment = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=flat.dtype, device=flat.device)
        assert flat.ndim == 1
        whole._flat, whole._start = flat, start
        whole._boxes = boxes(shape, start, start + flat.numel())
        return whole

    @property
    def flat(self) -> Tensor:
        """The elements."""
        return self._flat

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:  # DCP's names
        """One item a box."""
        properties = TensorProperties(dtype=self._flat.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The places of the boxes in the whole tensor."""
        return [ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes)) for box in self._boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """A box's elements: a view."""
        for box in self._boxes:
            if torch.Size(box.offsets) == index.offset:
                return self._flat.narrow(0, box.start - self._start, math.prod(box.sizes)).view(box.sizes)
        raise ValueError(f"there is no part of {index.fqn!r} at {index.offset} here")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Which part of what."""
        return f"Fragment(elements {self._start} to {self._start + self._flat.numel()} of {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse to compute."""
        raise TypeError(f"{func} can't be computed with a part of a tensor")
