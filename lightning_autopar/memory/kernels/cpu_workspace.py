"""What the CPU's kernels allocate inside one operation, where the trace can't see it. Knows torch's operations; no ledger, no module, no
plan.

The tracker asks two tables by operation: what a kernel takes while it runs, and how large an output is whose fake is empty or too small.
The figures were read from the profiler's memory events of torch 2.13 and from the kernels' sources in ``ATen/native``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_autopar.memory.kernels.measured_workspace import (
    CannotMeasure,
    KernelBytes,
    Rounds,
    convolution,
    convolution_backward,
    half_product_bytes,
    recurrent_backward,
    recurrent_forward,
    recurrent_workspace,
    unmeasured,
)
from lightning_autopar.memory.storages import tensor_bytes

aten = torch.ops.aten

#: (args, kwargs, output) of a call → its temporaries; None for none.
ScratchOf = Callable[[tuple[Any, ...], dict[str, Any], Any], KernelBytes | Rounds | None]
_CpuScratchOf = Callable[[tuple[Any, ...], dict[str, Any], Any], KernelBytes | None]
#: (args, kwargs, output, one tensor of the output) of a call → true bytes of that tensor's storage; None where its fake has the right size.
HiddenOf = Callable[[tuple[Any, ...], dict[str, Any], Any, Tensor], int | None]

#: ``copy_transpose_valid`` of ``Copy.cpp``: matrices are transposed in tiles of so many elements.
_TILE_ELEMENTS = 60 * 60


def _copied(tensor: Tensor | None) -> int:
    """Bytes of the copy that ``contiguous()`` makes."""
    if tensor is None or tensor.layout is not torch.strided or tensor.is_contiguous():
        return 0
    return tensor_bytes(tensor)


def _tile(tensor: Tensor) -> int:
    """Bytes of the buffer through which ``contiguous()`` transposes a matrix."""
    transposed = tensor.dim() == 2 and not tensor.is_contiguous() and tensor.t().is_contiguous()
    return _TILE_ELEMENTS * tensor.element_size() if transposed and tensor.numel() >= _TILE_ELEMENTS else 0


def _some(size_bytes: int, fixed_bytes: int = 0) -> KernelBytes | None:
    return KernelBytes(size_bytes, fixed_bytes) if size_bytes or fixed_bytes else None


def _contiguous(*places: int) -> _CpuScratchOf:
    """A kernel that needs those arguments contiguous."""

    def scratch(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> KernelBytes | None:
        return _some(sum(_copied(args[place]) for place in places), max(_tile(args[place]) for place in places))

    return scratch


# -- normalisation -------------------------------------------------------------------------------------------------------------------------


def _layer_norm_backward(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> KernelBytes | None:
    """``layer_norm_kernel.cpp``: each thread sums the weight's and the bias's gradients by itself."""
    sums = 2 * torch.get_num_threads() * math.prod(args[2]) * args[1].element_size()
    return _some(_copied(args[0]) + _copied(args[1]), max(_tile(args[0]), _tile(args[1]), sums if args[5] is not None else 0))


def _batch_norm(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> KernelBytes | None:
    """New running statistics, while the old ones are still held."""
    return KernelBytes(0, 2 * tensor_bytes(args[3])) if args[3] is not None and args[5] else None


def _batch_norm_backward(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> KernelBytes | None:
    """``Normalization.cpp``: where gradient and input are laid out alike, a second tensor for the input's gradient."""
    return KernelBytes(tensor_bytes(args[1])) if args[0].stride() == args[1].stride() else None


def _group_norm_backward(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> KernelBytes | None:
    return KernelBytes(2 * args[5] * args[6] * args[1].element_size() + _copied(args[0]) + _copied(args[1]))


# -- attention and softmax -----------------------------------------------------------------------------------------------------------------


def _safe_softmax(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> KernelBytes | None:
    """Which rows are masked completely: a byte an element, then one a row."""
    scores = args[0]
    return KernelBytes(scores.numel() + scores.numel() // max(1, scores.shape[args[1]]) + _copied(scores))


def _rows_at_once(rows: int) -> int:
    """``FlashAttentionKernel.cpp``: queries that a thread takes at once."""
    return 256 if rows >= 768 else 64 if rows >= 192 else 32


def _flash(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> KernelBytes | None:
    """``cpu_flash_attention``: for each thread scores, their maxima and sums, and the output, in at least 32 bits."""
    query, key = args[0], args[1]
    rows, columns, width = min(_rows_at_once(query.shape[2]), query.shape[2]), min(512, key.shape[2]), query.shape[3]
    size = max(4, query.element_size())
    reduced = rows * columns * query.element_size() if query.element_size() < 4 else 0
    return KernelBytes(0, torch.get_num_threads() * (rows * (columns + 2 + width) * size + reduced))


def _flash_backward(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> KernelBytes | None:
    """``cpu_flash_attention_backward``: for each thread scores and their gradient, and a sum a row."""
    query, key = args[1], args[2]
    rows, columns = min(_rows_at_once(query.shape[2]), query.shape[2]), min(512, key.shape[2])
    size = max(4, query.element_size())
    reduced = 2 * rows * columns * query.element_size() if query.element_size() < 4 else 0
    return KernelBytes(_copied_rows(args[0]), torch.get_num_threads() * (2 * rows * columns * size + rows * size + reduced))


def _copied_rows(tensor: Tensor) -> int:
    """The copy of a gradient (batch, heads, length, width) that isn't laid out as (batch, length, heads, width)."""
    _, heads, length, width = tensor.shape
    dense = length * heads * width, width, heads * width, 1
    alike = all(size == 1 or stride == wanted for size, stride, wanted in zip(tensor.shape, tensor.stride(), dense, strict=True))
    return 0 if alike else tensor_bytes(tensor)


# -- losses --------------------------------------------------------------------------------------------------------------------------------


def _loss(elements: int) -> _CpuScratchOf:
    """A loss before it is reduced, and its intermediate values: so many tensors of the input's size."""

    def scratch(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> KernelBytes | None:
        return KernelBytes(elements * tensor_bytes(args[0])) if output.numel() < args[0].numel() else None

    return scratch


def _reduced_loss(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, tensor: Tensor) -> int | None:
    """``Loss.cpp``: the loss's storage is made for all elements, and only then reduced to one; it stays as large."""
    return tensor_bytes(args[0]) if tensor.numel() < args[0].numel() else None


def _log_sum_exp(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> KernelBytes | None:
    return KernelBytes(tensor_bytes(args[0]) + 2 * tensor_bytes(output))


# -- images --------------------------------------------------------------------------------------------------------------------------------


def _upsample(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> KernelBytes | None:
    """``UpSampleKernel.cpp``: images of several channels are interpolated channels last, and copied there and back."""
    image = args[0]
    return KernelBytes(tensor_bytes(image) + tensor_bytes(output)) if image.is_contiguous() and image.shape[1] > 1 else None


def _upsample_backward(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> KernelBytes | None:
    gradient = args[0]
    if gradient.is_contiguous():
        return None
    dense = gradient.is_contiguous(memory_format=torch.channels_last)
    return _some((0 if dense else tensor_bytes(gradient)) + (tensor_bytes(output) if gradient.stride(1) == 1 else 0))


def _roll(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> KernelBytes | None:
    """One dimension after the other."""
    return _some(min(len(args[1]) - 1, 2) * tensor_bytes(output))


# -- the rest ------------------------------------------------------------------------------------------------------------------------------


def _gelu_backward(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> KernelBytes | None:
    """With oneDNN, where the input is contiguous: copies of both if the gradient isn't."""
    copied = args[1].is_contiguous() and not args[0].is_contiguous()
    return KernelBytes(tensor_bytes(args[0]) + tensor_bytes(args[1])) if copied else None


def _sort(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> KernelBytes | None:
    values, indices = output
    dimensions = values.shape
    return _some(max(dimensions, default=0) * indices.element_size() if len(dimensions) else 0)


def _cast(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> KernelBytes | None:
    """A reduction whose input is of another type: ``sum`` of booleans, say."""
    return _some(args[0].numel() * output.element_size() if args[0].dtype is not output.dtype else 0)


def _promoted(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> KernelBytes | None:
    """``TensorIterator.cpp`` on a CPU: operands of another type than the common one are cast first."""
    operands = [value for value in args if isinstance(value, Tensor) and value.dim()]
    if not operands:
        return None
    common = output.dtype if output.dtype.is_floating_point or output.dtype.is_complex else operands[0].dtype
    if all(operand.dtype is common for operand in operands):
        return None  # torch.promote_types is an operation, and slow where a mode looks on
    for operand in operands:
        common = torch.promote_types(common, operand.dtype)
    cast = sum(operand.numel() * common.itemsize for operand in operands if operand.dtype is not common)
    return _some(cast)


def _where(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> KernelBytes | None:
    return _promoted(args[1:], kwargs, output)


def _matrix(tensor: Tensor) -> int:
    """Bytes of the copy of a matrix whose layout BLAS can't read."""
    if tensor.layout is not torch.strided:
        return 0
    rows, columns = tensor.shape[-2:]
    along, across = tensor.stride(-1), tensor.stride(-2)
    readable = (along == 1 and across >= max(1, columns)) or (across == 1 and along >= max(1, rows))
    return 0 if readable or min(rows, columns) < 1 else rows * columns * tensor.element_size()


def _product(first: int) -> _CpuScratchOf:
    """The copies of a product's matrices; ``place`` is that of the first one."""

    def scratch(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> KernelBytes | None:
        return _some(_matrix(args[first]) + _matrix(args[first + 1]))

    return scratch


def _overloads(*names: str) -> Iterator[Any]:
    """Every variant of operations, in place and out of place."""
    for name in names:
        for variant in (name, f"{name}_"):
            packet = getattr(aten, variant, None)
            for overload in packet.overloads() if packet is not None else ():
                if "out" not in overload:
                    yield getattr(packet, overload)


_POINTWISE = (
    "add", "sub", "mul", "div", "rsub", "pow", "eq", "ne", "lt", "le", "gt", "ge", "maximum", "minimum", "fmod", "remainder", "atan2",
    "bitwise_and", "bitwise_or", "logical_and", "logical_or", "addcmul", "addcdiv", "sqrt", "rsqrt", "exp", "log", "sin", "cos", "sigmoid",
    "tanh", "reciprocal",
)  # fmt: skip

#: Scratch on a CPU, by operation.
CPU_SCRATCH: Mapping[Any, _CpuScratchOf] = {
    **dict.fromkeys(_overloads(*_POINTWISE), _promoted),
    aten.where.self: _where,
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
    aten.mkldnn_rnn_layer.default: recurrent_forward,
    aten.mkldnn_rnn_layer_backward.default: recurrent_backward,
    aten._log_softmax.default: _contiguous(0),
    aten._softmax.default: _contiguous(0),
    aten._log_softmax_backward_data.default: _contiguous(0, 1),
    aten._softmax_backward_data.default: _contiguous(0, 1),
    aten._safe_softmax.default: _safe_softmax,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _flash,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _flash_backward,
    aten.native_layer_norm.default: _contiguous(0),
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.embedding.default: _contiguous(1),
    aten.embedding_dense_backward.default: _contiguous(0, 1),
    aten.gelu_backward.default: _gelu_backward,
    aten.mse_loss.default: _loss(1),
    aten.smooth_l1_loss.default: _loss(1),
    aten.huber_loss.default: _loss(1),
    aten.binary_cross_entropy.default: _loss(1),
    aten.binary_cross_entropy_with_logits.default: _loss(2),
    aten.logsumexp.default: _log_sum_exp,
    aten.upsample_bilinear2d.default: _upsample,
    aten.upsample_nearest2d.default: _upsample,
    aten.upsample_bilinear2d_backward.default: _upsample_backward,
    aten.upsample_nearest2d_backward.default: _upsample_backward,
    aten.roll.default: _roll,
    aten.sort.default: _sort,
    aten.sort.stable: _sort,
    aten.sum.default: _cast,
    aten.sum.dim_IntList: _cast,
    aten.cumsum.default: _cast,
    aten.prod.default: _cast,
    aten.mm.default: _product(0),
    aten.addmm.default: _product(1),
    aten.bmm.default: _product(0),
    aten.baddbmm.default: _product(1),
}
#: The note where the temporaries of convolutions couldn't be measured.
UNREAD = "the temporary memory of convolutions is a guess: they are too large to be tried, or a profiler is running"
_MEASURED = (aten.convolution.default, aten.convolution_backward.default)
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


def cpu_scratch(notes: dict[str, None]) -> Mapping[Any, ScratchOf]:
    """:data:`CPU_SCRATCH`; ``notes`` gets :data:`UNREAD` where a convolution is met that can't be run to measure it."""

    def telling(found: _CpuScratchOf) -> _CpuScratchOf:
        def tell(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> KernelBytes | None:
            try:
                return found(args, kwargs, output)
            except CannotMeasure:
                notes[UNREAD] = None
                return unmeasured(args, output)

        return tell

    def packing(operation: Any, found: _CpuScratchOf) -> _CpuScratchOf:
        def packed(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> KernelBytes | None:
            copies = found(args, kwargs, output) or KernelBytes(0)
            try:
                return _some(copies.scaled_bytes, copies.fixed_bytes + half_product_bytes(operation, args))
            except CannotMeasure:  # a few buffers
                return copies

        return packed

    measured = {operation: telling(CPU_SCRATCH[operation]) for operation in _MEASURED}
    return {**CPU_SCRATCH, **measured, **{operation: packing(operation, CPU_SCRATCH[operation]) for operation in _PRODUCTS}}


#: Outputs on a CPU that are larger than their fakes, by operation.
CPU_HIDDEN: Mapping[Any, HiddenOf] = {
    aten.mkldnn_rnn_layer.default: recurrent_workspace,
    aten.mse_loss.default: _reduced_loss,
    aten.smooth_l1_loss.default: _reduced_loss,
    aten.soft_margin_loss.default: _reduced_loss,
    aten.binary_cross_entropy.default: _reduced_loss,
}
