"""What stage 3 has in the place of torch's linear: the same gradients, and no more saved for them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

pytest.importorskip("deepspeed")

from lightning_autopar.strategies.zero import deepspeed_compat as doorway


@pytest.fixture(scope="module", autouse=True)
def _deepspeed() -> None:
    doorway.import_deepspeed("cpu")


def _run(linear: Any, frozen: bool, autocast: bool, bias: bool) -> tuple[list[Tensor], int]:
    """Output and gradients, and bytes of activations that are saved for them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 8, 16, generator=generator, requires_grad=True)
    weight = nn.Parameter(torch.randn(24, 16, generator=generator), requires_grad=not frozen)
    offset = nn.Parameter(torch.randn(24, generator=generator), requires_grad=not frozen) if bias else None
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.numel() == x.numel():  # no parameter is as large
            saved[tensor.untyped_storage().data_ptr()] = tensor.nbytes
        return tensor

    precision = torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext()
    with precision, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = linear(x * 1.0, weight, offset)
    (output.float() * torch.randn(output.shape, generator=generator)).sum().backward()
    return [output, *(tensor.grad for tensor in (x, weight, offset) if tensor is not None and tensor.grad is not None)], sum(saved.values())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_linear_saves_what_torchs_saves(frozen: bool, autocast: bool, bias: bool) -> None:
    found, saved_bytes = _run(doorway._linear(), frozen, autocast, bias)
    expected, torchs_bytes = _run(functional.linear, frozen, autocast, bias)
    assert saved_bytes == torchs_bytes == (0 if frozen else 4 * 8 * 16 * (2 if autocast else 4))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        # In 16 bits a bias is added before the result is rounded, or after.
        torch.testing.assert_close(one, other, rtol=2e-2 if autocast else 1e-5, atol=1e-1 if autocast else 1e-5)
