"""Counts what would make a host wait for its device, without one: tensors on ``meta`` stand for the device's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
#: Their results' sizes or values are for the host to know.
_ASKS = {_aten._local_scalar_dense.default, _aten.nonzero.default, _aten.masked_select.default, _aten.equal.default}
_COPIES = {_aten._to_copy.default, _aten.copy_.default}


class Blocking(TorchDispatchMode):
    """While open, notes copies between host and device that aren't ``non_blocking``, and operations that ask the device for a number."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ASKS and args[0].is_meta:
            self.found.append(str(func))
        if func is _aten.index.Tensor and any(each is not None and each.dtype == torch.bool for each in args[1]):
            self.found.append("a mask as an index")
        if func in _COPIES and not (kwargs.get("non_blocking") or (func is _aten.copy_.default and args[2:3] == (True,))):
            other = args[1] if func is _aten.copy_.default else kwargs.get("device")
            to = (other if isinstance(other, Tensor) else torch.empty(0, device=other or args[0].device)).device
            if to.type != args[0].device.type:
                self.found.append(f"{func} between {args[0].device} and {to}")
        return func(*args, **kwargs)
