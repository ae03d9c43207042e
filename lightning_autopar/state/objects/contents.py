"""What kind a Python object is, what it holds, and whether that has changed: what those need who carry its changes.

Knows no survey, no pickle that objects are written into, and nothing of Lightning.
"""

from __future__ import annotations

import copyreg
import ctypes
import hashlib
import pickle
import sys
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.library import CustomOpDef

from lightning_autopar.exact.data.fingerprint import bytes_of
from lightning_autopar.exact.random import generator_states as rng
from lightning_autopar.exact.step.attribute_rules import refill, rewrite
from lightning_autopar.memory.trace.first_batch import GENERATORS

#: Of buffers larger than this, a sample is compared.
_COMPARED_BYTES = 1024**3
_BLOCK_BYTES = 4096

ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented), torch.dtype, torch.device})
CONTAINERS = frozenset({list, dict, set, deque, OrderedDict, defaultdict, Counter})
_VALUES = frozenset({tuple, frozenset, bytearray, torch.Size, torch.UntypedStorage, torch.TypedStorage})
#: Code, although their attributes change as they are first called.
_OPERATORS = (CustomOpDef, OpOverload, OpOverloadPacket)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class written in Python, or one that may as well be


def kind_of(target: Any) -> str:
    """``"node"``: searched for changes. ``"opaque"``: can't be pickled, only numbered. ``"value"``: pickled by value."""
    kind = type(target)
    if kind in _VALUES:
        return "value"
    if kind in CONTAINERS or isinstance(target, GENERATORS) or is_array(target):
        return "node"
    if kind in (Tensor, nn.Parameter):
        return "node" if target.layout == torch.strided and not target.is_meta else "value"
    if isinstance(target, (types.ModuleType, weakref.ref, *weakref.ProxyTypes, *_OPERATORS)):
        return "opaque"
    if isinstance(target, (type, types.FunctionType, types.BuiltinFunctionType)):
        return "value" if importable(target) else "opaque"
    if is_plain(target):
        return "node"
    try:
        target.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    except Exception:  # a user's class may raise anything
        return "opaque"
    return "value"


def is_plain(target: Any) -> bool:
    """Whether the object consists of its ``__dict__`` (and items), judged by its class."""
    kind = type(target)
    return (
        hasattr(target, "__dict__")
        and kind not in copyreg.dispatch_table
        and all(getattr(kind, name, None) is getattr(object, name, None) for name in ("__reduce_ex__", "__reduce__", "__getstate__"))
        and all(base is object or base in CONTAINERS or base.__flags__ & _HEAP_TYPE for base in kind.__mro__)
        and not any(vars(base).get("__slots__") for base in kind.__mro__)
    )


def importable(target: Any) -> bool:
    """Whether a function or class can be pickled by its name."""
    found: Any = sys.modules.get(getattr(target, "__module__", None) or "builtins")
    for name in str(getattr(target, "__qualname__", "")).split("."):
        found = getattr(found, name, None)
    return found is target or isinstance(getattr(target, "__self__", None), (types.ModuleType, type))


def is_array(target: Any) -> bool:
    """Whether it is a numpy array of plain values without gaps."""
    return type(target) is numpy.ndarray and not target.dtype.hasobject and target.flags.c_contiguous


def dispensable(owner: Any, attribute: str) -> bool:
    """Whether a class leaves this attribute out of its own pickles: then the class makes it anew, and it needn't be kept."""
    if getattr(type(owner), "__getstate__", None) is getattr(object, "__getstate__", None):
        return False
    try:
        state = owner.__getstate__()
    except Exception:  # a stranger's
        return False
    return isinstance(state, dict) and state.get(attribute) is None


def get_items(target: Any) -> Any:
    """An object's contents besides its attributes; for a closure's cell the variable's value, empty if none is assigned."""
    if isinstance(target, types.CellType):
        try:
            return (target.cell_contents,)
        except ValueError:
            return ()
    if isinstance(target, Tensor):
        return target.detach().cpu().clone()
    if is_array(target):
        return target.copy()
    if isinstance(target, GENERATORS):
        return rng.get_generator(target)
    return tuple(target.items()) if isinstance(target, dict) else tuple(target)


def set_items(target: Any, items: Any) -> None:
    """Put the result of :func:`get_items` into an object, in place."""
    if isinstance(target, Tensor):
        if target.shape == items.shape and target.dtype == items.dtype:
            rewrite(target, items)
        else:
            target.data = items
    elif is_array(target):
        if target.shape != items.shape:
            target.resize(items.shape, refcheck=False)
        target[...] = items
    elif isinstance(target, GENERATORS):
        rng.set_generator(target, items)
    elif isinstance(target, types.CellType):
        if items:
            target.cell_contents = items[0]
        else:
            del target.cell_contents
    else:
        refill(target, items)


def fingerprint(buffer: Any) -> bytes:
    """A number for the bytes of a tensor, an array or a buffer that differs where they do, at the speed of memory.

    It sums along rows and columns of its words: no accidental change leaves all sums as they were. Of more than ``_COMPARED_BYTES``, every
    n-th block counts.
    """
    if isinstance(buffer, Tensor):
        freed = not buffer.untyped_storage().nbytes()  # as FSDP2 frees whole parameters
        data = torch.empty(0, dtype=torch.uint8) if freed else bytes_of(buffer.contiguous())
        data = data.cpu() if data.device.type != "cpu" else data
    elif isinstance(buffer, numpy.ndarray):
        # Not by memoryview(), which there is none of times.
        data = torch.frombuffer(buffer.reshape(-1).view(numpy.uint8) if buffer.nbytes else bytearray(1), dtype=torch.uint8)
    else:
        data = torch.frombuffer(buffer, dtype=torch.uint8)
    if data.numel() < 2 * _BLOCK_BYTES:
        return hashlib.blake2b(raw_bytes(data)).digest()
    whole = data.numel() // _BLOCK_BYTES * _BLOCK_BYTES
    rest = hashlib.blake2b(raw_bytes(data[whole:]))
    blocks = data[:whole].view(-1, _BLOCK_BYTES)[:: -(-whole // _COMPARED_BYTES)]
    if data.storage_offset() % 8 == 0 and data.data_ptr() % 8 == 0:
        blocks = blocks.view(torch.int64)
    for dim in (0, 1):
        rest.update(raw_bytes(blocks.sum(dim, dtype=torch.int64)))
    return rest.digest()


def raw_bytes(data: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU. ``numpy()`` would have torch refuse to resize its storage from then on
    (``torch/csrc/utils/tensor_numpy.cpp``), and FSDP2 frees and makes whole parameters by that.
    """
    if not data.nbytes:
        return memoryview(b"")
    array = (ctypes.c_ubyte * data.nbytes).from_address(data.data_ptr())
    array.tensor = data  # type: ignore[attr-defined]  # as long as the view is there
    return memoryview(array)
