"""Reading a tensor's memory leaves the tensor as it is: FSDP2 frees and makes whole parameters by resizing their storage."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from lightning_autopar.state import snapshot
from lightning_autopar.state.objects.contents import fingerprint, raw_bytes
from lightning_autopar.state.objects.packing import TensorFile
from lightning_autopar.strategies.pipeline.weights.gathered_weights import _pieces


def _packed(tensor: Tensor) -> Any:
    return TensorFile(io.BytesIO()).storage(tensor.untyped_storage())


@pytest.mark.parametrize("size", [16, 5000])
@pytest.mark.parametrize("read", [fingerprint, _packed, lambda tensor: snapshot._write(io.BytesIO(), "", tensor)])
def test_a_read_tensor_can_still_be_resized(read: Callable[[Tensor], Any], size: int) -> None:
    tensor = torch.arange(float(size))
    read(tensor)
    assert tensor.untyped_storage().resizable()
    tensor.untyped_storage().resize_(0)


def test_it_is_the_tensors_memory() -> None:
    made = raw_bytes(torch.arange(1000) * 3)  # nobody else holds the tensor
    gc.collect()
    junk = [torch.zeros(1000, dtype=torch.int64) for _ in range(8)]
    assert bytes(made) == (torch.arange(1000) * 3).numpy().tobytes()
    assert bytes(raw_bytes(junk[0][:0])) == b""


def test_a_freed_tensor_has_a_fingerprint() -> None:
    whole = torch.ones(100)
    whole.untyped_storage().resize_(0)
    assert fingerprint(whole) == fingerprint(torch.empty(0))


@pytest.mark.parametrize("one", [torch.tensor(5).expand(1, 1), torch.arange(12).view(1, 12)[:, 5]])
def test_a_single_element_has_bytes_whatever_its_stride(one: Tensor) -> None:
    assert fingerprint(one) == fingerprint(torch.tensor([5]))
    assert next(iter(_pieces(one))).tolist() == [5, *[0] * 7]


@pytest.mark.parametrize("kind", ["datetime64[D]", "timedelta64[ns]", [("at", "datetime64[s]"), ("count", "i4")]])
def test_an_array_of_times_has_a_fingerprint(kind: Any) -> None:
    times = numpy.zeros((2, 3), dtype=kind)
    assert fingerprint(times) == fingerprint(times.copy()) != fingerprint(numpy.zeros((2, 4), dtype=kind))
    assert fingerprint(times[:0]) == fingerprint(times[:0].copy())
