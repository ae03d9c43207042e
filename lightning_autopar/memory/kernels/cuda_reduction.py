"""The buffer that a reduction on CUDA takes beside its output, through which blocks of threads pass on their sums. Knows no operation's
name.

After ``setReduceConfig`` of ``aten/src/ATen/native/cuda/Reduce.cuh`` (torch 2.13). The gradient of a bias, a sum over all rows, takes
several times the bytes of its input where there are many rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_autopar.memory.kernels.measured import KernelBytes

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
    """The buffer of a reduction to float32 or wider.

    Args:
        tensor: what is reduced.
        dims: the dimensions that are; none for all of them.
    """
    reduced = {dim % tensor.dim() for dim in dims} or set(range(tensor.dim()))
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
    return KernelBytes(0, size) if by_grid < by_values and blocks == by_grid else KernelBytes(size)


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
