"""Fake tensors treated as CUDA's, the operations that run on them, and what they save."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_autopar.memory.fakes.as_cuda import as_cuda

aten = torch.ops.aten
HALF, BF16, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


class FirstOutput(nn.Module):
    """The first output of a module."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.net(x)[0]
        return output


class Seen(TorchDispatchMode):
    """Remembers which operations ran, and with what."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.calls.append((func, args, output))
        return output

    def names(self) -> list[str]:
        return [func.overloadpacket.__name__ for func, _, _ in self.calls]

    def outputs(self, operation: Any) -> Any:
        return next(output for func, _, output in self.calls if func is operation)


@contextmanager
def on_cuda(notes: dict[str, None] | None = None, *, cudnn_head: int = 0) -> Iterator[Seen]:
    """Fake tensors, treated as CUDA's."""
    with ExitStack() as stack:
        stack.enter_context(as_cuda({} if notes is None else notes, cudnn_head=cudnn_head))
        stack.enter_context(FakeTensorMode())
        yield stack.enter_context(Seen())


def amp(dtype: torch.dtype = BF16, **kwargs: Any) -> torch.autocast:
    return torch.autocast("cuda", dtype=dtype, **kwargs)


FLASH, EFFICIENT, CUDNN, MATH = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "unfused",
)


def kernels(seen: Seen) -> list[str]:
    """The attention kernels that ran."""
    unfused = {"_safe_softmax": MATH, "_softmax": MATH}
    return [unfused.get(name, name) for name in seen.names() if name in (FLASH, EFFICIENT, CUDNN, *unfused)]


def attend(
    width: int = 64,
    dtype: torch.dtype = BF16,
    *,
    heads: tuple[int, int] = (4, 4),
    lengths: tuple[int, int] = (40, 40),
    mask: Any = None,
    value_width: int | None = None,
    cudnn_head: int = 0,
    **kwargs: Any,
) -> tuple[list[str], Seen]:
    with on_cuda(cudnn_head=cudnn_head) as seen:
        query = torch.ones(2, heads[0], lengths[0], width, dtype=dtype, requires_grad=True)
        key = torch.ones(2, heads[1], lengths[1], width, dtype=dtype, requires_grad=True)
        value = torch.ones(2, heads[1], lengths[1], value_width or width, dtype=dtype, requires_grad=True)
        if mask is not None:
            kwargs["attn_mask"] = torch.ones(mask[0], dtype=mask[1])
        output = F.scaled_dot_product_attention(query, key, value, **kwargs)
        assert output.shape == (2, heads[0], lengths[0], value_width or width)
        output.sum().backward()
        assert query.grad is not None
        assert query.grad.shape == query.shape
    return kernels(seen), seen


def saved_bytes(run: Callable[[], Any], without: list[Tensor], *, at_least: int = 0) -> int:
    """Bytes of the storages that a forward saves for backward, those of some tensors and of few elements excepted."""
    known = {tensor.untyped_storage()._cdata for tensor in without}
    found: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.device.type != "meta" and storage._cdata not in known and tensor.numel() >= at_least:
            found.setdefault(storage._cdata, (storage.nbytes(), tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(size for size, _ in found.values())
