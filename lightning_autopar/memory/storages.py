"""Storages: where tensors really lie, and how many bytes they take. It doesn't know what the tensors are for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def storages(tensor: Tensor) -> Iterator[UntypedStorage]:
    """The storages of a tensor: for a DTensor this rank's part, for a sparse one indices and values, for a wrapper all that it wraps, and
    none for a lazy module's parameter without a shape.
    """
    if is_traceable_wrapper_subclass(tensor):  # a DTensor, torchao's quantised ones, a collective's result that is still on its way
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        for part in parts:
            if isinstance(part, Tensor):  # torch 2.13's DTensor names its mesh as well
                yield from storages(part)
    elif tensor.layout == torch.strided and not is_lazy(tensor):
        yield tensor.untyped_storage()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        for part in (tensor.crow_indices(), tensor.col_indices(), tensor.values()):
            yield part.untyped_storage()
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        for part in (tensor.ccol_indices(), tensor.row_indices(), tensor.values()):
            yield part.untyped_storage()
    elif tensor.layout == torch.sparse_coo:
        for part in (tensor._indices(), tensor._values()):
            yield part.untyped_storage()


def seen_storages(tensor: Tensor) -> Iterable[UntypedStorage]:
    """The same for an argument or result of an operation; fast for a fake tensor."""
    if type(tensor) is FakeTensor and tensor.layout is torch.strided:
        return (tensor.untyped_storage(),)
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return ()  # operations see tensors of vmap and grad unwrapped
    return storages(tensor)


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of its elements, wherever they lie."""
    return tensor.numel() * tensor.element_size()


def storage_sizes(tensors: Iterable[Tensor], device: torch.device) -> dict[int, int]:
    """Bytes of the tensors' storages on one device by their address, each storage once.

    Args:
        tensors: of any kind; those on other devices and on the meta device count nothing.
        device: of a GPU with or without its index.
    """
    sizes: dict[int, int] = {}
    with torch._C.DisableTorchFunctionSubclass():  # an engine may watch uses of parameters, and this isn't one
        for tensor in tensors:
            for storage in storages(tensor):
                same = storage.device.type == device.type and device.index in (None, storage.device.index)
                if same and storage.nbytes():
                    sizes[storage.data_ptr()] = storage.nbytes()
    return sizes
