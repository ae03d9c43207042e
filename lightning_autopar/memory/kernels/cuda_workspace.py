"""What CUDA's kernels allocate inside one operation, where the trace can't see it. Knows torch's operations; no ledger, no module, no plan.

The figures were read from torch's sources (2.13), named at each. cuDNN's workspaces are estimated, and the report says so.
:mod:`.cpu_workspace` is the same for the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_autopar.memory.kernels.cpu_workspace import CPU_HIDDEN, CPU_SCRATCH, HiddenOf, ScratchOf
from lightning_autopar.memory.kernels.measured_workspace import KernelBytes, Rounds
from lightning_autopar.memory.storages import tensor_bytes

aten = torch.ops.aten

_FLOAT = 4
_INDEX = 8


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _copied(tensor: Tensor) -> list[KernelBytes]:
    """The copy that ``contiguous()`` makes, if any."""
    return [] if tensor.is_contiguous() else [KernelBytes(tensor_bytes(tensor))]


def _flash_backward(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Rounds:
    """``mha_bwd`` (flash_api.cpp): one number a row, and the query's gradient in float32, rows padded to 128 and heads to 32.

    With grouped heads also keys' and values' gradients of every head, before they are summed. The output and its gradient are copied unless
    their rows lie one after the other, with heads side by side (``_flash_attention_backward``, attention_backward.cu).
    """
    gradient, query, key, _, made = args[:5]
    batch, heads, length, width = query.shape
    rows = batch * heads * _up(length, 128)
    blocks = [*_copied(gradient.transpose(1, 2)), *_copied(made.transpose(1, 2))]
    blocks += [KernelBytes(rows * _FLOAT), KernelBytes(rows * _up(width, 32) * _FLOAT)]
    if key.size(1) != heads:
        blocks += [KernelBytes(batch * heads * key.size(2) * width * key.element_size())] * 2
    return Rounds([blocks])


def _cudnn_backward(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Rounds:
    """``run_cudnn_SDP_bprop`` (cudnn/MHA.cpp): the query's gradient in float32 and one number a row, the graph's workspace.

    cuDNN's engine may take more. A gradient that isn't laid out as the output is copied.
    """
    gradient, query, made = args[0], args[1], args[4]
    copied = [] if gradient.stride() == made.stride() else [KernelBytes(tensor_bytes(made))]
    return Rounds([[*copied, KernelBytes((query.numel() + query.numel() // max(1, query.size(-1))) * _FLOAT)]])


#: Wider values than this don't stay in registers (``kKeepOutputInRF``, mem_eff_attention/kernel_forward.h).
_EFFICIENT_WIDTH = 128
#: Up to this width a block has 64 queries, above it 128, and in float32 its counters are still one for 64 (kernel_backward.h).
_EFFICIENT_NARROW = 64


def _efficient_forward(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> KernelBytes | None:
    """``_efficient_attention_forward`` (attention.cu): for wide heads in half precision, the output in float32."""
    made = output[0]
    return KernelBytes(made.numel() * _FLOAT) if made.size(-1) > _EFFICIENT_WIDTH and made.element_size() < _FLOAT else None


def _efficient_backward(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Rounds:
    """``_efficient_attention_backward`` (attention_backward.cu): a sum a row, and the kernel's workspace (``workspace_elements_gq``): the
    query's gradient in float32, in whole blocks, with their counters; for wide heads the keys' and values', too. Outside of half precision,
    the sum is made first, from the product of the output and its gradient.
    """
    query, key, half = args[1], args[2], args[1].element_size() < _FLOAT
    batch, heads, length, width = query.shape
    block = _EFFICIENT_NARROW if width <= _EFFICIENT_NARROW else 2 * _EFFICIENT_NARROW
    rows, columns = _up(length, block), _up(width, block)
    counters = 4 * rows // (block if half else _EFFICIENT_NARROW)
    wide = 2 * _up(key.size(2), block) * columns if width > _EFFICIENT_WIDTH else 0
    sums, workspace = KernelBytes(batch * heads * length * _FLOAT), KernelBytes(batch * heads * (rows * columns + counters + wide) * _FLOAT)
    product = [] if half else [[KernelBytes(query.numel() * _FLOAT), sums, sums]]
    return Rounds([*product, [sums, workspace]])


def _safe_softmax(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Rounds:
    """``_safe_softmax`` (transformers/attention.cpp): which scores are masked, a byte each, and which rows are masked completely."""
    scores, dim = args[:2]
    return Rounds([[*_copied(scores), KernelBytes(scores.numel()), KernelBytes(scores.numel() // max(1, scores.size(dim)))]])


def _softmax_backward(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Rounds:
    """``softmax_backward_cuda_out`` (SoftMax.cu): the product of the output and its gradient; and copies."""
    return Rounds([[KernelBytes(tensor_bytes(args[0])), *_copied(args[0]), *_copied(args[1])]])


def _layer_norm_backward(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Rounds:
    """``layer_norm_backward_cuda`` (layer_norm_kernel.cu): the gradient and the input are made contiguous."""
    return Rounds([[*_copied(args[0]), *_copied(args[1])]])


def _convolution(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> KernelBytes | None:
    """A convolution by cuDNN of tensors that aren't channels last: channels-last copies of input, weight and output, an estimate.

    Its matrix units read channels last (NVIDIA's guide to the performance of convolutional layers, "Tensor layouts"), and torch lets it
    take any workspace (``Conv_v8.cpp``). None for kernels of one position, which are matrix products, and for groups of one channel, which
    torch runs by itself. On an H200 this is within 2 % for kernels of 3 in two and three dimensions, in float32 and in half precision.
    """
    image, weight, groups = args[0], args[1], args[8]
    if _without_copy(image, weight, groups):
        return None
    return KernelBytes(tensor_bytes(image) + tensor_bytes(output), tensor_bytes(weight))


def _convolution_backward(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Rounds:
    """Like :func:`_convolution`, for the gradients of input and weight, one after the other; then the bias's gradient is summed.

    cuDNN's kernel for groups of one channel whose tensors lie channels last takes much more.
    """
    gradient, image, weight, groups = args[0], args[1], args[2], args[9]
    rounds = Rounds()
    if not _without_copy(image, weight, groups):
        rounds.append([KernelBytes(tensor_bytes(image) + tensor_bytes(gradient), tensor_bytes(weight))])
    elif groups > 1 and _channels_last(image) and image.shape[2:].numel() >= _WIDE_PLANE:
        rounds.append([KernelBytes(tensor_bytes(image) * _DEPTHWISE_COPIES)])
    if args[10][2]:
        rounds.append([reduction(gradient, [dim for dim in range(gradient.dim()) if dim != 1])])
    return rounds


#: The workspace of a depthwise convolution's backward that is channels last, in inputs: 8.3 with 56 x 56 positions and 8.5 with 28 x 28 on
#: an H200 (kernels of 7), none with 14 x 14 and 7 x 7 (``benchmarks/results/kernels_gpu.json``). Where between it begins isn't known.
_DEPTHWISE_COPIES = 9
_WIDE_PLANE = 20 * 20


def _without_copy(image: Tensor, weight: Tensor, groups: int) -> bool:
    product = groups == 1 and weight.shape[2:].numel() == 1
    return product or (groups > 1 and weight.size(1) == 1) or _channels_last(image)


def _channels_last(image: Tensor) -> bool:
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(image.dim())
    return layout is not None and image.is_contiguous(memory_format=layout)


#: Up to so many indices, a kernel without temporaries is used (``embedding_dense_backward_cuda``, Embedding.cu).
_FEW_INDICES = 3072
#: Rows that a thread sums (``NROWS_PER_THREAD``, EmbeddingBackwardKernel.cu).
_ROWS_A_THREAD = 10


def _embedding_backward(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Rounds | None:
    """``embedding_backward_cuda_kernel``: sorted indices, their places before, how often each occurs, runs of equal ones, and sums.

    The sums of runs are in float32, those of long ones in parts.
    """
    gradient, indices = args[0], args[1]
    number = indices.numel()
    if number <= _FEW_INDICES:
        return None
    index, width = indices.element_size(), gradient.size(-1) * _FLOAT

    def partial(of_indices: int, of_segments: int) -> KernelBytes:
        """Bytes for each index, and for each run, of which there are as many as the table has rows, or as there are indices."""
        if number <= output.size(0):
            return KernelBytes(number * of_segments + of_indices)
        return KernelBytes(of_indices, output.size(0) * of_segments, number * of_segments)

    parts = number // _ROWS_A_THREAD
    blocks = [*[KernelBytes(number * index)] * 3, *[partial(0, index)] * 2, partial(parts * index, index)]
    return Rounds([[*blocks, partial(parts * width, width)]])


def _index(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Rounds | None:
    """``AdvancedIndex`` (TensorAdvancedIndexing.cpp): numbers of fewer bits become 64; and unless all lie alike once they are broadcast,
    those that aren't contiguous then are copied.
    """
    found = [index for index in args[1] if isinstance(index, Tensor) and index.dtype not in (torch.bool, torch.uint8)]
    broadcast = torch.broadcast_tensors(*found)
    alike = len({index.stride() for index in broadcast}) < 2
    copied = [index for index in broadcast if index.element_size() < _INDEX or not (alike or index.is_contiguous())]
    return Rounds([[KernelBytes(index.numel() * _INDEX) for index in copied]]) if copied else None


def _index_put(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Rounds | None:
    """``index_put_with_sort_kernel`` (Indexing.cu): a linear index, the sorted one, and each one's place before."""
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if not accumulate:
        return _index(args, kwargs, output)
    shapes = [index.shape for index in args[1] if isinstance(index, Tensor)]
    return Rounds([[KernelBytes(torch.Size(torch.broadcast_shapes(*shapes)).numel() * _INDEX)] * 4]) if shapes else None


def _sort(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> KernelBytes:
    """``sort_cuda_kernel`` (Sort.cpp): values and indices once more, before and after a pass."""
    return KernelBytes(tensor_bytes(output[0]) + tensor_bytes(output[1]))


def _reduced(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Rounds:
    """A reduction: see :func:`reduction`. A sum of integers and booleans is in 64 bits: the input is cast first (ReduceOps.cpp)."""
    dims = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    cast = not args[0].dtype.is_floating_point and args[0].dtype is not output.dtype
    return Rounds([[*([KernelBytes(args[0].numel() * output.element_size())] if cast else []), reduction(args[0], dims)]])


def _scanned(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> KernelBytes | None:
    """``cumsum`` of integers and booleans: cast first."""
    return KernelBytes(tensor_bytes(output)) if args[0].dtype is not output.dtype else None


def _fourier(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> KernelBytes:
    """The workspace of cuFFT's plan (``_exec_fft``, SpectralOps.cpp): as large as its output, an estimate; powers of two may need none."""
    return KernelBytes(tensor_bytes(output))


#: By cuDNN's mode: the state's widths that the kernels hold for each position and direction, beside a copy of the weights.
_HELD = {0: 5.0, 1: 5.0, 2: 6.0, 3: 5.0}
#: cuDNN takes more for each direction, by no rule that we know: 17 to 19 MiB for states of 512 and 1024, 8 to 120 MiB for other shapes.
_RECURRENT_BYTES = 20 << 20


def _recurrent(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> KernelBytes:
    """The workspace of cuDNN's recurrent layers, an estimate; and the input's copy, if it lies batch first (``_cudnn_rnn``, RNN.cpp).

    NVIDIA publishes no formula. On an H200 (``benchmarks/results/kernels_gpu.json``) a layer took its weights and five (an LSTM six) of the
    state's widths for each position, one more with dropout, one and a half more for each of two directions; and some MiB.
    """
    return _rnn_workspace(args[0], args[1], args[6:14], args[0] if args[10] else None)


def _recurrent_backward(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> KernelBytes:
    """Like :func:`_recurrent`; with the batch first, input and output's gradient are copied, one of them at the fullest moment."""
    return _rnn_workspace(args[0], args[1], args[10:18], max(args[0], args[6], key=tensor_bytes) if args[14] else None)


def _rnn_workspace(data: Tensor, weights: list[Tensor], layout: tuple[Any, ...], copied: Tensor | None) -> KernelBytes:
    """The workspace of a layout: mode, hidden size, projection, layers, batch first, dropout, training, bidirectional."""
    mode, hidden, _, _, _, dropout, _, bidirectional = layout
    values = _HELD[mode] + (1.0 if dropout else 0.0)
    state = data.shape[:-1].numel() * hidden * data.element_size()
    held = round(state * (2 * (values + 1.5) if bidirectional else values))
    fixed = sum(tensor_bytes(weight) for weight in weights) + _RECURRENT_BYTES * (2 if bidirectional else 1)
    return KernelBytes(held + (0 if copied is None else tensor_bytes(copied)), fixed)


def _statistics(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, tensor: Tensor) -> int | None:
    """CUDA keeps means and deviations in float32, also of half-precision input (layer_norm_kernel.cu, cudnn/BatchNorm.cpp)."""
    return tensor.numel() * _FLOAT if tensor is not output[0] and tensor.element_size() < _FLOAT else None


#: The notes for such operations.
_ESTIMATES = {
    aten.convolution.default: "cuDNN's workspace is taken to be as large as a convolution's tensors, unless they are in channels_last",
    **dict.fromkeys(
        (aten._fft_r2c.default, aten._fft_c2r.default, aten._fft_c2c.default),
        "cuFFT's workspace is taken to be as large as a transform's output",
    ),
    aten._cudnn_rnn.default: "cuDNN's workspace of recurrent layers is estimated",
}


def cuda_scratch(notes: dict[str, None]) -> Mapping[Any, ScratchOf]:
    """:data:`CUDA_SCRATCH`; ``notes`` gets a sentence for each estimate that is asked for."""

    def telling(found: ScratchOf, sentence: str) -> ScratchOf:
        def tell(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> KernelBytes | Rounds | None:
            scratch = found(args, kwargs, output)
            if scratch is not None:
                notes[sentence] = None
            return scratch

        return tell

    return {**CUDA_SCRATCH, **{operation: telling(CUDA_SCRATCH[operation], sentence) for operation, sentence in _ESTIMATES.items()}}


#: Operations with the same scratch memory as on a CPU, for losses before they are reduced and copies of what isn't contiguous: the code
#: around the kernel is the same (Loss.cpp, SoftMax.cu, layer_norm_kernel.cu, ReduceOps.cpp, attention.cpp).
_SHARED = (
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.logsumexp.default,
    aten._softmax.default,
    aten._log_softmax.default,
    aten._log_softmax_backward_data.default,
    aten.native_layer_norm.default,
    aten.roll.default,
)
_SHARED_HIDDEN = (aten.mse_loss.default, aten.smooth_l1_loss.default, aten.soft_margin_loss.default, aten.binary_cross_entropy.default)

_REDUCTIONS = (
    ("sum", "default"), ("sum", "dim_IntList"), ("mean", "default"), ("mean", "dim"), ("amax", "default"), ("amin", "default"),
    ("linalg_vector_norm", "default"), ("prod", "default"),
)  # fmt: skip

#: Scratch on CUDA, by operation.
CUDA_SCRATCH: Mapping[Any, ScratchOf] = {
    **{operation: CPU_SCRATCH[operation] for operation in _SHARED},
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    aten._safe_softmax.default: _safe_softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    **dict.fromkeys((getattr(getattr(aten, name), overload) for name, overload in _REDUCTIONS), _reduced),
    aten.cumsum.default: _scanned,
    aten._scaled_dot_product_efficient_attention.default: _efficient_forward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.index.Tensor: _index,
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


_WARP = 32
#: The most threads of a block (``MAX_NUM_THREADS``), and of a multiprocessor.
_BLOCK_THREADS = 512
_PROCESSOR_THREADS = 2048
#: Multiprocessors of an H100: with fewer the buffer of a wide sum is smaller.
_PROCESSORS = 132
_VECTOR = 4
#: The fewest and the most numbers that a thread sums where blocks share an output.
_LEAST_VALUES, _MOST_VALUES = 16, 256


def reduction(tensor: Tensor, dims: Sequence[int]) -> KernelBytes:
    """The buffer of a reduction to float32 or wider, through which blocks of threads pass on their sums (``setReduceConfig`` of
    ``aten/src/ATen/native/cuda/Reduce.cuh``). The gradient of a bias, a sum over all rows, takes several times the bytes of its input where
    there are many rows.

    Args:
        dims: the dimensions that are; none for all of them.
    """
    if tensor.layout is not torch.strided:
        return KernelBytes(0)  # other kernels, of which nothing is known
    reduced = {dim % max(tensor.dim(), 1) for dim in dims} or set(range(tensor.dim()))
    gone = _merged(tensor, [dim for dim in range(tensor.dim()) if dim in reduced])
    kept = _merged(tensor, [dim for dim in range(tensor.dim()) if dim not in reduced])
    inputs, outputs = _numel(gone), _numel(kept)
    if not inputs or not outputs:
        return KernelBytes(0)
    along_input = not kept or bool(gone and gone[0][1] < kept[0][1])
    vector = 1
    if along_input:
        width, height = inputs, outputs
        if gone and gone[0][1] == 1 and inputs >= 128 and len(gone) == 1:
            width //= _VECTOR
    else:
        width, height = outputs, inputs
        if kept[0][1] == 1:
            vector = _vector([kept[0][0], *(stride for _, stride in (*gone, *kept[1:]))])
            width //= vector
    most = _BLOCK_THREADS // vector
    columns, rows = min(_power(width), most), min(_power(height), most)
    block_width = min(columns, _WARP)
    block_height = min(rows, most // block_width)
    block_width = min(columns, most // block_height)
    values = -(-inputs // block_width) if along_input else inputs
    if values < min(block_height * 16, _MOST_VALUES):
        return KernelBytes(0)
    values = -(-values // block_height)
    grid = outputs if along_input else -(-(outputs // vector) // block_width)
    target = _PROCESSORS * (_PROCESSOR_THREADS // (block_width * block_height))
    if values < _MOST_VALUES or grid > target:
        return KernelBytes(0)
    by_grid, by_values = -(-target // grid), -(-values // _LEAST_VALUES)
    blocks = max(min(by_grid, by_values), -(-values // _MOST_VALUES))
    if blocks < 2:
        return KernelBytes(0)
    size = max(4, tensor.element_size()) * outputs * blocks * (1 if along_input else block_width * vector)
    if by_grid >= by_values:
        return KernelBytes(size)
    fixed = size * by_grid // blocks  # of fewer rows, as many blocks
    return KernelBytes(size - fixed, fixed, fixed * by_values // by_grid)


def _merged(tensor: Tensor, dims: Sequence[int]) -> list[tuple[int, int]]:
    """Sizes and strides of these dimensions, the fastest first; adjacent ones are merged."""
    found: list[tuple[int, int]] = []
    for stride, size in sorted((tensor.stride(dim), tensor.size(dim)) for dim in dims if tensor.size(dim) != 1):
        if found and found[-1][0] * found[-1][1] == stride:
            found[-1] = found[-1][0] * size, found[-1][1]
        else:
            found.append((size, stride))
    return found


def _numel(merged: Sequence[tuple[int, int]]) -> int:
    number = 1
    for size, _ in merged:
        number *= size
    return number


def _vector(numbers: Sequence[int]) -> int:
    """The largest of four, two and one that divides all of them."""
    return next(vector for vector in (_VECTOR, 2, 1) if all(number % vector == 0 for number in numbers))


def _power(number: int) -> int:
    """The largest power of two that isn't larger."""
    return 1 << (max(1, number).bit_length() - 1)
