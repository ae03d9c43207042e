"""What convolutions, half-precision products and LSTMs allocate inside one operation on a CPU. Knows shapes; no ledger, no module.

Convolutions and products are run once, on few samples, under the profiler. oneDNN has dozens of kernels, and chooses by instruction set,
threads, layout and every size of the operation; which of them copy a tensor to a layout of their own no formula tells. A line through two
numbers of samples gives the batch's bytes, where running the whole batch would take long (``benchmarks/convolutions.py`` says how well).
Products go to oneDNN where the CPU has instructions for them; it packs both matrices into buffers of tens of kilobytes to 1.5 MB a thread.

LSTMs are computed: workspace and scratchpad follow oneDNN's ``src/cpu/rnn/rnn_utils.cpp`` (``set_offsets``) and ``.hpp``
(``set_workspace_sizes``): buffers on pages of 4096 bytes, rows of whole cache lines that aren't multiples of 256 elements. To the byte for
torch 2.13's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from lightning_autopar._temporary import without_noise
from lightning_autopar.memory.allocation_recorder import AllocationRecorder
from lightning_autopar.memory.storages import tensor_bytes

#: The most multiply-adds of a measuring run, and bytes of its tensors: some hundredths of a second, once a shape.
_MOST_OPERATIONS = 1 << 28
_MOST_BYTES = 1 << 28
#: The most multiply-adds of a single sample: above, a run would take tenths of a second, several times, and isn't made.
_TOO_MANY_OPERATIONS = 1 << 32
_TOO_MANY_BYTES = 1 << 30
#: A single image uses other kernels, and so may fewer images than this where only channels are mixed (``use_mkldnn`` of
#: ``ATen/native/Convolution.cpp``). From two on, the bytes lie on a line.
_MANY_ROWS = 16
_FEW_ROWS = 4
#: How many shapes a process caches.
_MOST_KNOWN = 4096


class KernelBytes(NamedTuple):
    """The bytes that a kernel allocates besides its outputs, and frees before it returns.

    Args:
        scaled_bytes: the part that grows with the batch.
        fixed_bytes: the part that doesn't.
        slope_bytes: where a small share of the batch takes less than ``fixed_bytes``: what the whole batch would take in proportion to it.
    """

    scaled_bytes: int
    fixed_bytes: int = 0
    slope_bytes: int = 0


class Rounds(list[list[KernelBytes]]):
    """What a kernel allocates in several blocks: those of a round are held together, and freed when the next round begins.

    Blocks matter to what the allocator reserves: two small ones fit into gaps in which one of both sizes together doesn't.
    """


class CannotMeasure(RuntimeError):
    """Measuring would take too long, or would disturb another profiler that is running."""


_known: dict[object, KernelBytes] = {}


def convolution(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> KernelBytes | None:
    """The temporaries of ``aten.convolution``, besides its output.

    Raises:
        CannotMeasure: while a profiler runs, or if a sample takes long.
    """
    image, weight, transposed = args[0], args[1], args[6]
    return _scratch(torch.ops.aten.convolution.default, args, (0,), _operations(image if transposed else output, weight))


def convolution_backward(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> KernelBytes | None:
    """The temporaries of ``aten.convolution_backward``, besides the gradients that it returns.

    Raises:
        CannotMeasure: while a profiler runs, or if a sample takes long.
    """
    gradient, image, weight, transposed = *args[:3], args[7]
    return _scratch(torch.ops.aten.convolution_backward.default, args, (0, 1), 2 * _operations(image if transposed else gradient, weight))


def unmeasured(args: tuple[Any, ...], output: Any) -> KernelBytes:
    """A guess at either, where it can't be measured: a copy of every input and output, and one more of the largest."""
    sizes = [tensor_bytes(each) for each in (*args, *tree_leaves(output)) if isinstance(each, Tensor)]
    return KernelBytes(sum(sizes) + max(sizes, default=0))


def _operations(met: Tensor, weight: Tensor) -> int:
    """Multiply-adds of a sample: each of its elements on the one side meets the weight of its channel."""
    return met.numel() // max(1, len(met)) * (weight.numel() // max(1, len(weight)))


def _scratch(function: Any, args: tuple[Any, ...], batched: Sequence[int], operations_a_row: int) -> KernelBytes | None:
    """A convolution's temporaries.

    Args:
        batched: which of them have a row a sample.
        operations_a_row: multiply-adds of one sample.
    """
    rows = len(args[batched[0]])
    if not rows or not all(each.numel() for each in args if isinstance(each, Tensor)):
        return None
    key = function, torch.get_num_threads(), tuple(_told(each) for each in args)
    found = _known.get(key)
    if found is None:
        found = _measured(function, args, batched, operations_a_row)
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = found
    return found if sum(found) else None


def _measured(function: Any, args: tuple[Any, ...], batched: Sequence[int], operations_a_row: int) -> KernelBytes:
    """Measure by running it, on all samples or on as many as don't take long."""
    rows = len(args[batched[0]])
    bytes_a_row = sum(tensor_bytes(args[place]) for place in batched) // rows
    if operations_a_row > _TOO_MANY_OPERATIONS or bytes_a_row > _TOO_MANY_BYTES:
        raise CannotMeasure("a sample takes too long")
    affordable = min(_MOST_OPERATIONS // max(1, operations_a_row), _MOST_BYTES // max(1, bytes_a_row))
    pointwise = max(args[batched[-1] + 1].shape[2:]) == 1
    least = max(_FEW_ROWS, 2 * torch.get_num_threads(), _MANY_ROWS if pointwise else 0)
    many = max(_FEW_ROWS, min(rows, max(least, affordable)))
    taken = {count: _run(function, args, batched, count) for count in {rows if rows <= many else many, many, many // 2}}
    slope = max(0.0, (taken[many] - taken[many // 2]) / (many - many // 2))
    whole = taken.get(rows, taken[many] + round(slope * (rows - many)))
    scaled = min(whole, round(slope * rows))
    return KernelBytes(scaled, whole - scaled)


def _run(function: Any, args: tuple[Any, ...], batched: Sequence[int], rows: int) -> int:
    """Measure it on so many samples. Values don't matter; active modes are left, which would make fakes or count it."""
    with _disable_current_modes():
        real = [_like(each, rows if place in batched else None) if isinstance(each, Tensor) else each for place, each in enumerate(args)]
    return taken_beside(function, real)


def taken_beside(function: Any, args: Sequence[Any]) -> int:
    """Bytes that an operation takes at its fullest moment besides its result, measured by running it.

    Args:
        args: its arguments, real ones on the CPU.

    Raises:
        CannotMeasure: while a profiler runs.
    """
    with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        recorder = AllocationRecorder()
        with without_noise():
            if not recorder.start():
                raise CannotMeasure("a profiler runs in this process")
            output = function(*args)
            recording = recorder.stop()
    assert recording is not None, "nobody begins to profile meanwhile"
    made = {leaf.untyped_storage()._cdata: leaf.untyped_storage().nbytes() for leaf in tree_leaves(output) if isinstance(leaf, Tensor)}
    return max(0, recording.peak_bytes - sum(made.values()))


def _like(tensor: Tensor, rows: int | None) -> Tensor:
    """Zeros with the same layout, and so many rows."""
    shape = (*tensor.shape,) if rows is None else (rows, *tensor.shape[1:])
    stride = tensor.stride()
    elements = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return torch.zeros(elements, dtype=tensor.dtype).as_strided(shape, stride)


def _told(value: Any) -> object:
    """The properties of an argument that decide on the kernel."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    return tuple(value) if isinstance(value, list) else value


aten = torch.ops.aten

_PAGE_BYTES = 4096
_ELEMENT_BYTES = 4
_LINE_ELEMENTS = 64 // _ELEMENT_BYTES


def recurrent_workspace(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, tensor: Tensor) -> int | None:
    """The bytes that a layer keeps for backward: those of the last output of ``aten.mkldnn_rnn_layer``, whose fake is empty."""
    if tensor is not output[-1] or tensor.untyped_storage().nbytes() or not _named(args, kwargs).get("train", True):
        return None
    steps, rows, width = (int(size) for size in args[0].shape)
    state = int(output[1].shape[-1])
    row = _row(max(width, state))
    states = 2 * (steps + 1) * rows
    sizes = (
        steps * rows * _row(4 * state),  # gates
        steps * rows * _row(state),
        states * row,  # states of layers
        states * state,  # cells
        states * row,  # gradients of both kinds of states
        states * row,
        states * state,  # gradients of cells
    )
    return _paged(sizes)


def recurrent_forward(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> KernelBytes:
    """Of ``aten.mkldnn_rnn_layer``: both weights packed, the sum of the biases, the scratchpad."""
    steps, rows, width = (int(size) for size in args[0].shape)
    state = int(args[2].shape[1])
    packed = (width + state) * _row(4 * state)
    return KernelBytes(_scratchpad(steps, rows, state), (packed + 4 * state) * _ELEMENT_BYTES)


def recurrent_backward(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> KernelBytes:
    """Of ``aten.mkldnn_rnn_layer_backward``: weights packed the other way, their gradients, the scratchpad, copies of gradients."""
    steps, rows, width = (int(size) for size in args[0].shape)
    state = int(args[2].shape[1])
    named = _named(args, kwargs, aten.mkldnn_rnn_layer_backward.default)
    copied = 0
    for name in ("grad_output", "grad_hy", "grad_cy"):
        gradient = named.get(name)
        if gradient is None:
            copied += rows * state * _ELEMENT_BYTES  # zeros
        elif not gradient.is_contiguous():
            copied += gradient.numel() * _ELEMENT_BYTES
    packed = 4 * state * (_row(width) + _row(state)) + (width + state) * _row(4 * state)
    return KernelBytes(_scratchpad(steps, rows, state) + copied, (packed + 4 * state) * _ELEMENT_BYTES)


def _scratchpad(steps: int, rows: int, state: int) -> int:
    """Gates of all steps, and one step's states and their gradients."""
    return _paged((steps * rows * _row(4 * state), rows * _row(state), rows * _row(state))) + _PAGE_BYTES


def _paged(elements: tuple[int, ...]) -> int:
    """Bytes of buffers of so many elements one after the other, each on a page of its own."""
    return list(accumulate(elements, lambda offset, size: -(-(offset + size * _ELEMENT_BYTES) // _PAGE_BYTES) * _PAGE_BYTES, initial=0))[-1]


def _row(elements: int) -> int:
    """The leading dimension in oneDNN: whole cache lines, but no multiple of 256 elements (``get_good_ld``)."""
    whole = -(-elements // _LINE_ELEMENTS) * _LINE_ELEMENTS
    return whole + _LINE_ELEMENTS if whole % 256 == 0 else whole


def _named(args: tuple[Any, ...], kwargs: dict[str, Any], function: Any = aten.mkldnn_rnn_layer.default) -> dict[str, Any]:
    return dict(zip((argument.name for argument in function._schema.arguments), args, strict=False)) | kwargs


#: Larger matrices are packed in pieces no larger than this.
_MOST_ROWS = 1024
_HALVES = (torch.bfloat16, torch.float16)


def half_product_bytes(function: Any, args: tuple[Any, ...]) -> int:
    """The temporaries of a product like ``aten.mm`` or ``aten.addmm``, with fake or real matrices; 0 for other dtypes.

    Raises:
        CannotMeasure: while a profiler runs.
    """
    matrices = [each for each in args if isinstance(each, Tensor)]
    if matrices[-1].dtype not in _HALVES or not all(each.numel() for each in matrices):
        return 0
    threads = torch.get_num_threads()

    def few(shape: torch.Size) -> tuple[int, ...]:
        return (*(min(count, 2 * threads) for count in shape[:-2]), *(min(size, _MOST_ROWS) for size in shape[-2:]))

    told = tuple((few(each.shape), each.dim() > 1 and each.stride(-1) != 1) for each in matrices)
    return _asked(function, matrices[-1].dtype, threads, told)


@lru_cache(maxsize=1024)
def _asked(function: Any, dtype: torch.dtype, threads: int, told: tuple[tuple[tuple[int, ...], bool], ...]) -> int:
    with _disable_current_modes():
        real = [
            torch.zeros((*shape[:-2], shape[-1], shape[-2]), dtype=dtype).mT if turned else torch.zeros(shape, dtype=dtype)
            for shape, turned in told
        ]
    return taken_beside(function, real)
