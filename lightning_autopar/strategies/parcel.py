"""What a parcel is: a pickle of changed objects with the places where they were found, and a file beside it with their tensors and arrays.

Who packs it (:mod:`packing`) and who unpacks it (:mod:`unpacking`) agree on it here. Knows nothing of Lightning.
"""

from __future__ import annotations

import pickle
from collections import defaultdict, deque
from typing import Any

import torch
from torch import Tensor, nn

from lightning_autopar.strategies.contents import CONTAINERS, is_plain

#: Smaller arrays stay in the pickle.
_SMALL_BYTES = 16 * 1024
_ALIGNMENT = 64
_COPIED_BYTES = 64 * 1024**2

#: Where a new object was found: in what (a survey's number, a name, or -1 less another new object's key), in which part, by which keys.
Place = tuple[Any, str, tuple[Any, ...]]
Owner = int | tuple[Any, ...]
#: What stands in the pickle for an object that is found or made in its own way.
DEVICE, STORAGE, TENSOR, NODE, GENERATOR, OWN, MOVED = "device", "storage", "tensor", "node", "generator", "own", "moved"


class Bin:
    """The file beside a pickle; without one, only the sizes are summed up.

    Args:
        file: opened for writing.
    """

    def __init__(self, file: Any | None) -> None:
        self._file = file
        self._known: dict[int, tuple[int, int]] = {}
        self._held: list[Any] = []
        self.size_bytes = 0
        self.buffers: list[tuple[int, int]] = []

    def storage(self, storage: torch.UntypedStorage) -> tuple[int, int]:
        """Where it lies, and its size."""
        if storage._cdata not in self._known:
            self._held.append(storage)  # else its address may be another one's soon
            start, size_bytes = self._begin(), storage.nbytes()
            if self._file is not None and size_bytes:
                data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                for piece in data.split(_COPIED_BYTES):
                    self._file.write(memoryview(piece.cpu().numpy()))
            self.size_bytes += size_bytes
            self._known[storage._cdata] = start, size_bytes
        return self._known[storage._cdata]

    def buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether a buffer is to stay in the pickle, as pickle's protocol 5 asks."""
        with buffer.raw() as view:
            if view.nbytes < _SMALL_BYTES:
                return True
            start = self._begin()
            if self._file is not None:
                self._file.write(view)
            self.size_bytes += view.nbytes
            self.buffers.append((start, view.nbytes))
            return False

    def _begin(self) -> int:
        gap = -self.size_bytes % _ALIGNMENT
        if self._file is not None:
            self._file.write(b"\0" * gap)
        self.size_bytes += gap
        return self.size_bytes


def is_node(target: Any) -> bool:
    """Whether an object is its ``__dict__``, and items if it has any."""
    return type(target) not in CONTAINERS and not isinstance(target, (Tensor, torch.Generator, type)) and is_plain(target)


def is_common(tensor: Tensor) -> bool:
    """Whether a tensor is dtype, sizes and strides over a storage, and no more."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and not (tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def maker_of(target: Any) -> Any:
    """What a container needs to be made of besides its items."""
    if isinstance(target, deque):
        return target.maxlen
    return target.default_factory if isinstance(target, defaultdict) else None


def type_name(kind: type) -> str:
    """By which a class is known in both processes."""
    return f"{kind.__module__}.{kind.__qualname__}"
