"""What CUDA's kernels take inside of one operation, which the trace can't see. Knows torch's operations; no ledger, no module, no plan.

Read from torch's sources (2.13), named at each; what cuDNN takes is estimated, and told in a sentence. Compare :mod:`.scratch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_autopar.memory.scratch import CPU_HIDDEN, CPU_SCRATCH, HiddenOf, Scratch, ScratchOf
from lightning_autopar.memory.storages import tensor_bytes

aten = torch.ops.aten

_FLOAT = 4
_INDEX = 8


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _flash_backward(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Scratch:
    """``mha_bwd`` (flash_api.cpp): the query's gradient in float32, rows padded to 128 and heads to 32, and one number a row.

    With grouped heads also keys' and values' gradients of every head, before they are summed.
    """
    query, key = args[1], args[2]
    batch, heads, length, width = query.shape
    rows = _up(length, 128)
    size = batch * heads * rows * (_up(width, 32) + 1) * _FLOAT
    if key.size(1) != heads:
        size += 2 * batch * heads * key.size(2) * width * key.element_size()
    return Scratch(size)


#: Wider values don't stay in registers (``kKeepOutputInRF``, mem_eff_attention/kernel_forward.h).
_EFFICIENT_WIDTH = 128


def _efficient_forward(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Scratch | None:
    """``_efficient_attention_forward`` (attention.cu): for wide heads in half precision, the output in float32."""
    made = output[0]
    return Scratch(made.numel() * _FLOAT) if made.size(-1) > _EFFICIENT_WIDTH and made.element_size() < _FLOAT else None


def _efficient_backward(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Scratch:
    """``_efficient_attention_backward`` (attention_backward.cu): a copy of the query in float32, and one number a row.

    In half precision it is the query's gradient, else the product of the output and its gradient.
    """
    query = args[1]
    return Scratch((query.numel() + query.numel() // max(1, query.size(-1))) * _FLOAT)


def _convolution(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Scratch | None:
    """A convolution by cuDNN, of tensors that don't lie channels last: copies of input, weight and output that do, an estimate.

    Its matrix units read channels last (NVIDIA's guide to the performance of convolutional layers, "Tensor layouts"), and torch lets it
    take any workspace (``Conv_v8.cpp``). None for groups of one channel, which torch runs by itself, without scratch.
    """
    image, weight, groups = args[0], args[1], args[8]
    if _without_copy(image, weight, groups):
        return None
    return Scratch(tensor_bytes(image) + tensor_bytes(output), tensor_bytes(weight))


def _convolution_backward(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Scratch | None:
    """As :func:`_convolution`, for the input's gradient and the weight's, one after the other."""
    gradient, image, weight, groups = args[0], args[1], args[2], args[9]
    if _without_copy(image, weight, groups):
        return None
    return Scratch(tensor_bytes(image) + tensor_bytes(gradient), tensor_bytes(weight))


def _without_copy(image: Tensor, weight: Tensor, groups: int) -> bool:
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(image.dim())
    return (groups > 1 and weight.size(1) == 1) or (channels_last is not None and image.is_contiguous(memory_format=channels_last))


#: Up to so many indices a kernel without scratch is taken (``embedding_dense_backward_cuda``, Embedding.cu).
_FEW_INDICES = 3072
#: Rows that a thread sums (``NROWS_PER_THREAD``, EmbeddingBackwardKernel.cu).
_ROWS_A_THREAD = 10


def _embedding_backward(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Scratch | None:
    """``embedding_backward_cuda_kernel``: sorted indices, where they were, what describes runs of equal ones, and sums.

    The sums of runs are in float32, those of long ones in parts.
    """
    gradient, indices = args[0], args[1]
    number = indices.numel()
    if number <= _FEW_INDICES:
        return None
    segments = min(number, output.size(0))
    partial = number // _ROWS_A_THREAD + segments
    width = gradient.size(-1)
    return Scratch(4 * number * indices.element_size() + (5 * segments + partial) * indices.element_size() + partial * width * _FLOAT)


def _index_put(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Scratch | None:
    """``index_put_with_sort_kernel`` (Indexing.cu): a linear index, sorted, and where each was."""
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if not accumulate:
        return None
    shapes = [index.shape for index in args[1] if isinstance(index, Tensor)]
    return Scratch(4 * torch.Size(torch.broadcast_shapes(*shapes)).numel() * _INDEX) if shapes else None


def _sort(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Scratch:
    """``sort_cuda_kernel`` (Sort.cpp): values and indices once more, before and after a pass."""
    return Scratch(tensor_bytes(output[0]) + tensor_bytes(output[1]))


def _fourier(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Scratch:
    """The workspace of cuFFT's plan (``_exec_fft``, SpectralOps.cpp): as much as it makes, an estimate; powers of two may need none."""
    return Scratch(tensor_bytes(output))


def _recurrent(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Scratch:
    """The workspace of cuDNN's recurrent layers, an estimate: one and a half times the weights; and the input, if it lies batch first.

    So it was printed for four layers of 320 (https://github.com/pytorch/pytorch/issues/2895: LSTM 17,730,560 bytes for 12,139,520 of
    weights, GRU 13,169,920 for 9,104,640). The copy of the input is torch's (``_cudnn_rnn``, RNN.cpp).
    """
    weights = sum(tensor_bytes(weight) for weight in args[1])
    return Scratch(tensor_bytes(args[0]) if args[10] else 0, weights * 3 // 2)


def _recurrent_backward(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Scratch:
    """As :func:`_recurrent`; batch first, input and output's gradient are copied."""
    return Scratch(
        tensor_bytes(args[0]) + tensor_bytes(args[6]) if args[14] else 0, sum(tensor_bytes(weight) for weight in args[1]) * 3 // 2
    )


def _statistics(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, tensor: Tensor) -> int | None:
    """CUDA keeps means and deviations in float32, also of half-precision input (layer_norm_kernel.cu, cudnn/BatchNorm.cpp)."""
    return tensor.numel() * _FLOAT if tensor is not output[0] and tensor.element_size() < _FLOAT else None


#: What to tell where such an operation was met.
_ESTIMATES = {
    aten.convolution.default: "cuDNN's workspace is taken to be a copy of a convolution's tensors, unless they lie channels last",
    **dict.fromkeys(
        (aten._fft_r2c.default, aten._fft_c2r.default, aten._fft_c2c.default),
        "cuFFT's workspace is taken to be as large as a transform's output",
    ),
    aten._cudnn_rnn.default: "cuDNN's workspace of recurrent layers is taken to be one and a half times the weights",
}


def cuda_scratch(notes: dict[str, None]) -> Mapping[Any, ScratchOf]:
    """:data:`CUDA_SCRATCH`; ``notes`` gets a sentence for each estimate that is asked for."""

    def telling(found: ScratchOf, sentence: str) -> ScratchOf:
        def tell(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Scratch | None:
            scratch = found(args, kwargs, output)
            if scratch is not None:
                notes[sentence] = None
            return scratch

        return tell

    return {**CUDA_SCRATCH, **{operation: telling(CUDA_SCRATCH[operation], sentence) for operation, sentence in _ESTIMATES.items()}}


#: What is the same on a CPU, as the code around the kernel is: losses before they are reduced, copies of what isn't contiguous
#: (Loss.cpp, SoftMax.cu, layer_norm_kernel.cu, ReduceOps.cpp, attention.cpp).
_SHARED = (
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.logsumexp.default,
    aten._softmax.default,
    aten._log_softmax.default,
    aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default,
    aten._safe_softmax.default,
    aten.native_layer_norm.default,
)
_SHARED_HIDDEN = (aten.mse_loss.default, aten.smooth_l1_loss.default, aten.soft_margin_loss.default, aten.binary_cross_entropy.default)

#: Scratch on CUDA, by operation.
CUDA_SCRATCH: Mapping[Any, ScratchOf] = {
    **{operation: CPU_SCRATCH[operation] for operation in _SHARED},
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_cudnn_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient_forward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.index_put.default: _index_put,
    aten.index_put_.default: _index_put,
    aten._unsafe_index_put.default: _index_put,
    aten.sort.default: _sort,
    aten.sort.stable: _sort,
    aten._fft_r2c.default: _fourier,
    aten._fft_c2r.default: _fourier,
    aten._fft_c2c.default: _fourier,
    aten._cudnn_rnn.default: _recurrent,
    aten._cudnn_rnn_backward.default: _recurrent_backward,
}
#: Outputs on CUDA that are larger than their fakes, by operation.
CUDA_HIDDEN: Mapping[Any, HiddenOf] = {
    **{operation: CPU_HIDDEN[operation] for operation in _SHARED_HIDDEN},
    aten.native_layer_norm.default: _statistics,
    aten.native_batch_norm.default: _statistics,
}
