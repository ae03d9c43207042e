"""Torch's functions by what they need of a tensor: what describes it, what reads its values. Data only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _getters(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names if hasattr(Tensor, name)}


def _methods(*names: str) -> set[Any]:
    found = {getattr(Tensor, name) for name in names if hasattr(Tensor, name)}
    return found | {getattr(torch, name) for name in names if hasattr(torch, name) and not name.startswith("_")}


#: What says something of a tensor without its values, and gives no tensor.
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
#: What gives a tensor's values to Python.
READING = frozenset(
    _methods(
        "item", "tolist", "__bool__", "__float__", "__int__", "__index__", "__complex__", "numpy", "__array__", "__contains__", "equal"
    )
    | _methods("is_nonzero", "allclose", "__reduce_ex__", "__dlpack__", "__format__")
)
