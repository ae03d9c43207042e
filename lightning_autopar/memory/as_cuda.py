"""Tensors on a CPU, treated as CUDA would treat its own. Knows torch; nothing of modules, ledgers or devices.

A step is traced on fake CPU tensors, as fake CUDA tensors need a build of torch for CUDA. What a step keeps depends on the kernels:
autocast's casts, attention, dropout, normalisation, recurrent layers, optimizers. Each choice here is that of torch's own sources, named
where it is made; those that a step met are told in sentences.

Most of it is done in torch's dispatcher, by kernels that are registered for a while: so it holds in whatever way an operation is called,
from user code under any name, from C++, and inside of backward, where function modes are off.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_autopar.memory.cuda_attention import attention
from lightning_autopar.memory.cuda_autocast import Casts, cuda_autocast, temporary_library
from lightning_autopar.memory.cuda_rnn import cuda_rnn
from lightning_autopar.memory.replaced import replaced

aten = torch.ops.aten

_COMPOSITE = "CompositeImplicitAutograd"


@contextmanager
def as_cuda(notes: dict[str, None], *, cudnn_head: int = 0) -> Iterator[None]:
    """While open, operations on CPU tensors keep and make what they would on CUDA. For fake tensors: few of CUDA's kernels run on a CPU.

    The whole process sees it. Not to be nested.

    Args:
        notes: gets a sentence for every choice that was met.
        cudnn_head: the widest head of cuDNN's attention, where that is asked first; 0 where it comes last.
    """
    casts = Casts()
    with ExitStack() as stack:
        stack.enter_context(cuda_autocast(casts, notes))
        library = stack.enter_context(temporary_library())
        library.impl("scaled_dot_product_attention", lambda *args, **kwargs: attention(notes, cudnn_head, *args, **kwargs), _COMPOSITE)
        library.impl("dropout", _dropout(notes), _COMPOSITE)
        library.impl("softmax.int", _softmax(aten._softmax.default), _COMPOSITE)
        library.impl("log_softmax.int", _softmax(aten._log_softmax.default), _COMPOSITE)
        if hasattr(aten, "_fused_rms_norm_backward"):
            # With a kernel of its own the operation has its derivative, and saves input, weight and one number a row; without, as on a CPU,
            # it is a composite that saves several tensors of the input's size (aten/src/ATen/native/layer_norm.cpp). Fakes never get here.
            library.impl("_fused_rms_norm", _unreachable, "CPU")
        stack.enter_context(cuda_rnn(casts, notes))
        _enter_optimizers(stack, notes)
        yield


def _dropout(notes: dict[str, None]) -> Any:
    """``at::dropout`` with the fused kernel of CUDA: a boolean mask (aten/src/ATen/native/Dropout.cpp, ``is_fused_kernel_acceptable``)."""

    def dropout(input: Tensor, p: float, train: bool) -> Tensor:
        if not train or p == 0 or not input.numel():
            return input
        if p == 1:
            return input * torch.zeros((), dtype=input.dtype, device=input.device)
        notes["dropout keeps a boolean mask"] = None
        output: Tensor = aten.native_dropout(input, p, True)[0]
        return output

    return dropout


def _softmax(kernel: Any) -> Any:
    """``at::softmax`` and the like to float32: CUDA copies no float16 input for it (aten/src/ATen/native/SoftMax.cpp)."""

    def softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        fused = input.dtype is torch.float16 and dtype is torch.float32
        output: Tensor = kernel(input if fused or dtype is None else input.to(dtype), dim, fused)
        return output

    return softmax


def _unreachable(*args: Any) -> Any:
    raise AssertionError("a fused normalisation of CUDA was called with real tensors of a CPU")


def _enter_optimizers(stack: ExitStack, notes: dict[str, None]) -> None:
    """Let torch's optimizers choose as on CUDA, for fake parameters, too.

    By default they take the foreach implementation where every parameter is a plain tensor on CUDA
    (``torch.optim.optimizer._default_to_fused_or_foreach``), at the cost of temporaries of all parameters' size. What the user asked for
    (``foreach=False``, ``fused=True``) stays.
    """
    optimizer = importlib.import_module("torch.optim.optimizer")
    shared = importlib.import_module("torch.utils._foreach_utils")
    for module in (optimizer, shared):
        stack.enter_context(replaced(module, "_foreach_supported_types", [*module._foreach_supported_types, FakeTensor]))
    for name in ("_get_foreach_kernels_supported_devices", "_get_capturable_supported_devices"):
        original = getattr(optimizer, name)

        def with_cpu(*args: Any, _original: Any = original, **kwargs: Any) -> list[str]:
            return [*_original(*args, **kwargs), "cpu"]

        for module in [found for key, found in sys.modules.items() if key.startswith(("torch.optim", "torch.utils._foreach"))]:
            if vars(module).get(name) is original:
                stack.enter_context(replaced(module, name, with_cpu))
    choose = optimizer._default_to_fused_or_foreach

    def chosen(*args: Any, **kwargs: Any) -> tuple[bool, bool]:
        fused, foreach = choose(*args, **kwargs)
        if foreach:
            notes["optimizers run over all parameters at once (foreach)"] = None
        return fused, foreach

    for module in [found for key, found in sys.modules.items() if key.startswith("torch.optim")]:
        if vars(module).get("_default_to_fused_or_foreach") is choose:
            stack.enter_context(replaced(module, "_default_to_fused_or_foreach", chosen))
