"""What CUDA's kernels take inside of one operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_autopar.memory.kernels.cuda_workspace import CUDA_HIDDEN, CUDA_SCRATCH, cuda_scratch, reduction
from lightning_autopar.memory.kernels.measured_workspace import KernelBytes, Rounds
from tests.memory.cuda import BF16, FLOAT, Seen, aten, attend, on_cuda


def scratch_of(operation: Any, seen: Seen) -> Any:
    return next(CUDA_SCRATCH[func](args, {}, output) for func, args, output in seen.calls if func is operation)


def blocks_of(scratch: Any) -> list[list[int]]:
    """Bytes of the blocks of each round."""
    return [[sum(block[:2]) for block in blocks] for blocks in scratch]


def test_flash_backward_takes_the_querys_gradient_in_float32() -> None:
    """In blocks of their own, as a GPU's allocator has them: copies of output and gradient, a number a row, the gradient itself."""
    _, seen = attend(lengths=(100, 100))
    copies, rows = [2 * 4 * 100 * 64 * 2] * 2, 2 * 4 * 128
    backward = aten._scaled_dot_product_flash_attention_backward.default
    assert blocks_of(scratch_of(backward, seen)) == [[*copies, rows * 4, rows * 64 * 4]]
    _, grouped = attend(lengths=(100, 100), heads=(4, 2), enable_gqa=True)
    assert blocks_of(scratch_of(backward, grouped)) == [[*copies, rows * 4, rows * 64 * 4, *[2 * 4 * 100 * 64 * 2] * 2]]


def test_cudnns_backward_takes_no_more_for_grouped_heads() -> None:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        _, seen = attend(lengths=(100, 100), heads=(4, 2), enable_gqa=True)
    (blocks,) = blocks_of(scratch_of(aten._scaled_dot_product_cudnn_attention_backward.default, seen))
    assert blocks[-1] == 2 * 4 * 100 * (64 + 1) * 4


@pytest.mark.parametrize(("dtype", "width", "expected"), [(BF16, 264, 2 * 4 * 40 * 264 * 4), (BF16, 128, None), (FLOAT, 264, None)])
def test_wide_heads_are_summed_in_float32(dtype: torch.dtype, width: int, expected: int | None) -> None:
    _, seen = attend(width, dtype, mask=((40, 40), dtype))
    taken = scratch_of(aten._scaled_dot_product_efficient_attention.default, seen)
    assert taken == (None if expected is None else KernelBytes(expected))


@pytest.mark.parametrize(
    ("dtype", "heads", "length", "width", "rounds"),
    [
        (FLOAT, 12, 1024, 64, [[12582912, 196608, 196608], [196608, 12595200]]),
        (FLOAT, 8, 300, 72, [[2764800, 38400, 38400], [38400, 6294528]]),
        (BF16, 12, 1024, 64, [[196608, 12595200]]),
        (BF16, 8, 300, 72, [[38400, 6292992]]),
    ],
)
def test_efficient_backward_works_in_whole_blocks(dtype: torch.dtype, heads: int, length: int, width: int, rounds: list[list[int]]) -> None:
    """The sizes are those that torch's own code asked its allocator for, on a stub GPU."""
    query = torch.empty(4, heads, length, width, dtype=dtype, device="meta")
    scratch = CUDA_SCRATCH[aten._scaled_dot_product_efficient_attention_backward.default]
    assert blocks_of(scratch((query, query, query, query), {}, None)) == rounds


@pytest.mark.parametrize(
    ("indices", "blocks"),
    [
        ([((16, 1, 1, 1), torch.int64), ((1, 1, 1, 512), torch.int64)], [65536, 65536]),
        ([((16, 1), torch.int64), ((16, 512), torch.int64)], [65536]),
        ([((16,), torch.int64), ((16,), torch.int64)], None),
        ([((16, 1, 1, 512), torch.int64)], None),
        ([((16,), torch.int32), ((16,), torch.int32)], [128, 128]),
    ],
)
def test_indices_that_lie_differently_are_copied(indices: list[tuple[tuple[int, ...], torch.dtype]], blocks: list[int] | None) -> None:
    """The sizes are those that torch's own code asked its allocator for, on a stub GPU."""
    table = torch.empty(16, 512, device="meta")
    places = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in indices]
    for operation, more in ((aten.index.Tensor, ()), (aten.index_put.default, (table,))):
        found = CUDA_SCRATCH[operation]((table, places, *more), {}, None)
        assert (None if found is None else blocks_of(found)) == (None if blocks is None else [blocks])


@pytest.mark.parametrize(
    ("shape", "strides", "dims", "taken"),
    [
        ((4096, 512), (512, 1), [0], 16777216),
        ((4096, 2048), (2048, 1), [0], 67108864),
        ((8192, 2048), (2048, 1), [0], 134217728),
        ((4096, 16000), (16000, 1), [0], 139264000),
        ((3136, 96), (96, 1), [0], 614400),
        ((448, 63, 512), (32256, 512, 1), [0, 1], 115605504),
        ((512, 16, 8, 64), (64, 262144, 32768, 1), [0, 1], 33554432),
        ((32, 512, 14, 14), (100352, 1, 7168, 512), [0, 2, 3], 25690112),
        ((64, 16), (16, 1), [0], 0),
        ((4096, 512), (512, 1), [1], 0),
    ],
)
def test_sums_over_many_rows_take_a_buffer(shape: Any, strides: Any, dims: list[int], taken: int) -> None:
    """A bias's gradient, above all. The sizes are those that torch's own code asked its allocator for, on a stub GPU."""
    assert sum(reduction(torch.empty_strided(shape, strides, device="meta"), dims)[:2]) == taken


@pytest.mark.parametrize("dims", [[], [0], [-1]])
def test_a_sum_over_a_number_takes_nothing(dims: list[int]) -> None:
    """As torchmetrics sums a count that is one number already; and one over a sparse matrix."""
    for tensor in (torch.tensor(2.0), torch.eye(3).to_sparse()):
        assert sum(reduction(tensor, dims)[:2]) == 0


def test_sums_of_booleans_are_cast_first() -> None:
    taken = CUDA_SCRATCH[aten.sum.default]((torch.ones(8, 512, dtype=torch.bool),), {}, torch.ones((), dtype=torch.long))
    assert blocks_of(taken) == [[8 * 512 * 8, 0]]


def test_softmax_backward_multiplies_first() -> None:
    scores = torch.empty(8, 64, 64, device="meta")
    assert blocks_of(CUDA_SCRATCH[aten._softmax_backward_data.default]((scores, scores, -1, FLOAT), {}, scores)) == [[8 * 64 * 64 * 4]]


def test_embeddings_sort_many_indices() -> None:
    with on_cuda() as seen:
        weight = torch.ones(1000, 16, requires_grad=True)
        F.embedding(torch.zeros(4000, dtype=torch.long), weight).sum().backward()
        F.embedding(torch.zeros(3000, dtype=torch.long), weight).sum().backward()
    takes = [CUDA_SCRATCH[func](args, {}, output) for func, args, output in seen.calls if func is aten.embedding_dense_backward.default]
    assert blocks_of(takes[0]) == [[*[4000 * 8] * 3, *[1000 * 8] * 2, 1400 * 8, 1400 * 16 * 4]]
    assert takes[1] is None


@pytest.mark.parametrize(
    ("kernel", "groups", "channels_last", "expected"),
    [
        (3, 1, False, KernelBytes(2 * (8 + 16) * 36 * 4, 8 * 16 * 9 * 4)),
        (3, 1, True, None),
        (3, 8, False, None),
        (1, 1, False, None),
    ],
)
def test_convolutions_are_told_to_be_estimates(kernel: int, groups: int, channels_last: bool, expected: Any) -> None:
    notes: dict[str, None] = {}
    table = cuda_scratch(notes)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    with on_cuda() as seen:
        image = torch.ones(2, 8, 6, 6).contiguous(memory_format=layout).requires_grad_()
        nn.Conv2d(8, 16, kernel, padding=kernel // 2, groups=groups)(image).sum().backward()
    assert [table[func](args, {}, output) for func, args, output in seen.calls if func is aten.convolution.default] == [expected]
    backward = next(table[func](args, {}, output) for func, args, output in seen.calls if func is aten.convolution_backward.default)
    assert isinstance(backward, Rounds)
    assert backward[:-1] == ([] if expected is None else [[expected]])  # then the bias's gradient is summed
    assert bool(notes) == (expected is not None)


def test_fourier_transforms_are_told_to_be_estimates() -> None:
    notes: dict[str, None] = {}
    table = cuda_scratch(notes)
    with on_cuda() as seen:
        torch.fft.rfft(torch.ones(4, 30))
    func, args, output = next(call for call in seen.calls if call[0] is aten._fft_r2c.default)
    assert table[func](args, {}, output) == KernelBytes(4 * 16 * 8)
    assert any("cuFFT" in note for note in notes)


@pytest.mark.parametrize(
    ("run", "operation", "statistics"),
    [
        (lambda x: F.layer_norm(x, (16,)), aten.native_layer_norm.default, 6),
        (lambda x: F.batch_norm(x, None, None, training=True), aten.native_batch_norm.default, 16),
    ],
)
def test_half_precision_norms_keep_float32_statistics(run: Callable[[Tensor], Tensor], operation: Any, statistics: int) -> None:
    for dtype, expected in ((BF16, [None, 4 * statistics, 4 * statistics]), (FLOAT, [None] * 3)):
        with on_cuda() as seen:
            run(torch.ones(6, 16, dtype=dtype))
        func, args, output = next(call for call in seen.calls if call[0] is operation)
        assert [CUDA_HIDDEN[func](args, {}, output, tensor) for tensor in output] == expected


@pytest.mark.parametrize(
    ("kind", "size", "options", "measured"),
    [
        ("LSTM", (512, 2, 32, 128), {}, 85_983_232),
        ("LSTM", (512, 2, 32, 128), {"batch_first": True}, 94_371_840),
        ("LSTM", (512, 2, 32, 128), {"dropout": 0.2}, 94_371_840),
        ("LSTM", (512, 2, 32, 128), {"bidirectional": True}, 205_520_896),
        ("LSTM", (1024, 2, 8, 256), {}, 134_873_600),
        ("GRU", (512, 2, 32, 128), {}, 73_531_904),
        ("RNN", (1024, 2, 8, 256), {}, 77_398_528),
    ],
)
def test_recurrent_workspace_is_near_what_an_h200_took(kind: str, size: tuple[int, int, int, int], options: Any, measured: int) -> None:
    """benchmarks/results/kernels_gpu.json, float32."""
    width, layers, batch, steps = size
    with on_cuda() as seen:
        layer = getattr(nn, kind)(width, width, layers, **options)
        shape = (batch, steps) if "batch_first" in options else (steps, batch)
        layer(torch.ones(*shape, width, requires_grad=True))[0].sum().backward()
    for operation in (aten._cudnn_rnn.default, aten._cudnn_rnn_backward.default):
        assert sum(scratch_of(operation, seen)) == pytest.approx(measured, rel=0.07)


def test_a_depthwise_backward_of_channels_last_takes_more_on_wide_planes() -> None:
    """On an H200 with 32 images of 96 channels: 304 MiB for inputs of 36.75 with 56 x 56 positions, nothing with 14 x 14."""
    rounds = {}
    for side in (56, 14):
        with on_cuda() as seen:
            image = torch.ones(32, 96, side, side).contiguous(memory_format=torch.channels_last).requires_grad_()
            nn.Conv2d(96, 96, 7, padding=3, groups=96, bias=False)(image).sum().backward()
        rounds[side] = scratch_of(aten.convolution_backward.default, seen)
    assert not rounds[14]
    ((workspace,),) = rounds[56]
    assert 304 * 2**20 <= workspace.scaled_bytes < 1.2 * 304 * 2**20
