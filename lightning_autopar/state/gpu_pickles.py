"""Pickles whose GPU tensors come out on the reader's own device.

torch's own pickles name the GPU by its number, and the reader puts the tensors there, which may be a GPU that another rank uses or that the
parent process must not touch. Knows tensors and pickles; no trainer and no run.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor

_DEVICE, _STORAGE = "device", "storage"
_HOST = ("cpu", "meta")


def dumps(value: Any) -> bytes:
    """The pickle of an object; tensors on a GPU are copied to the host, those that share a storage share it again."""
    sink = io.BytesIO()
    _Pickler(sink, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return sink.getvalue()


def loads(data: bytes, device: torch.device) -> Any:
    """The object again.

    Args:
        data: of :func:`dumps`.
        device: the device for tensors that lay on a GPU, and for a ``torch.device``. Tensors on the host stay there.
    """
    return _Unpickler(io.BytesIO(data), device).load()


class _Pickler(pickle.Pickler):
    def __init__(self, sink: Any, **options: Any) -> None:
        super().__init__(sink, **options)
        self._copies: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}

    def persistent_id(self, target: Any) -> Any:
        """What stands for a device, and for a storage on one."""
        if type(target) is torch.device:  # a device without a number means each process's own already
            return None if target.type in _HOST or target.index is None else (_DEVICE,)
        storage = target._untyped_storage if isinstance(target, torch.TypedStorage) else target
        if not isinstance(storage, torch.UntypedStorage) or storage.device.type in _HOST:
            return None
        if storage._cdata not in self._copies:  # the original is kept, too: otherwise another one could get its address
            self._copies[storage._cdata] = storage, torch.empty(0, dtype=torch.uint8).set_(storage.cpu())
        return _STORAGE, self._copies[storage._cdata][1], None if storage is target else target.dtype


class _Unpickler(pickle.Unpickler):
    def __init__(self, source: Any, device: torch.device) -> None:
        super().__init__(source)
        self._device = device
        self._moved: dict[int, tuple[Tensor, torch.UntypedStorage]] = {}

    def persistent_load(self, name: Any) -> Any:
        """The device, or the storage on it."""
        if name[0] == _DEVICE:
            return self._device
        _, copy, dtype = name
        if id(copy) not in self._moved:
            self._moved[id(copy)] = copy, copy.to(self._device).untyped_storage()
        storage = self._moved[id(copy)][1]
        return storage if dtype is None else torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
