"""CUDA's recurrent layers: sizes that cuDNN printed, and what a layer keeps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_autopar.memory.fakes.as_cuda import as_cuda, reserve_bytes
from lightning_autopar.memory.fakes.fake_copies import ShadowValues, fake_copy, fake_mode
from tests.memory.cuda import BF16, FLOAT, Seen, amp, aten, on_cuda


@pytest.mark.parametrize(("mode", "printed"), [(2, 736_000_000), (3, 864_000_000)])
def test_reserve_is_what_cudnn_printed(mode: int, printed: int) -> None:
    """https://github.com/pytorch/pytorch/issues/2895: four layers of 320, float32; 25,000 positions explain both kinds at once."""
    assert reserve_bytes(25_000, 320, 4, 1, mode, 4) == printed


@pytest.mark.parametrize(
    ("layout", "mode", "size", "dropout", "measured"),
    [
        ((4096, 512, 2, 1), 2, 4, 0.0, 92_274_944),
        ((4096, 512, 2, 1), 2, 2, 0.2, 46_399_744),
        ((6400, 320, 4, 1), 2, 4, 0.2, 189_184_256),
        ((4096, 512, 2, 2), 2, 4, 0.0, 184_549_632),
        ((4096, 512, 2, 1), 3, 4, 0.2, 109_314_304),
        ((4096, 512, 2, 1), 1, 2, 0.0, 12_583_168),
        ((7680, 128, 3, 1), 1, 2, 0.2, 10_076_416),
    ],
)
def test_reserve_is_what_an_h200_kept(layout: tuple[int, int, int, int], mode: int, size: int, dropout: float, measured: int) -> None:
    """To 256 bytes (benchmarks/results/kernels_gpu.json)."""
    assert measured - reserve_bytes(*layout, mode, size, dropout) == 256


@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("precision", ["32", "bf16-mixed"])
def test_recurrent_layers_run_by_cudnn(name: str, packed: bool, precision: str) -> None:
    notes: dict[str, None] = {}
    mode, shadow = fake_mode(), ShadowValues()
    sizes = fake_copy(torch.tensor([4] * 5 + [2] * 3), mode, shadow)
    with as_cuda(notes), mode, shadow, Seen() as seen:
        layer = getattr(nn, name)(16, 32, 2, batch_first=not packed, bidirectional=True)
        positions = 26 if packed else 40
        data = nn.utils.rnn.PackedSequence(torch.ones(positions, 16), sizes) if packed else torch.ones(4, 10, 16)
        with amp(enabled=precision == "bf16-mixed"):
            output = layer(data)[0]
        output = output.data if packed else output
        size = 2 if precision == "bf16-mixed" else 4
        assert output.shape[-1] == 64
        assert output.element_size() == size
        output.sum().backward()
        assert all(parameter.grad is not None and parameter.grad.dtype is FLOAT for parameter in layer.parameters())
    reserve = seen.outputs(aten._cudnn_rnn.default)[3]
    kept = {"LSTM": 5, "GRU": 6, "RNN": 1}[name]
    assert reserve.untyped_storage().nbytes() == (2 * kept + 1) * positions * 32 * 2 * size
    assert any("cuDNN" in note for note in notes)


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_without_cudnn_layers_run_by_fused_cells(name: str) -> None:
    with torch.backends.cudnn.flags(enabled=False), on_cuda() as seen:
        layer = getattr(nn, name)(16, 32, 2, dropout=0.1, bidirectional=True, dtype=BF16)
        output, _ = layer(torch.ones(5, 4, 16, dtype=BF16))
        assert output.shape == (5, 4, 64)
        output.sum().backward()
    assert seen.names().count(f"_thnn_fused_{name.lower()}_cell") == 5 * 4
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_bfloat16_layers_make_a_flat_copy_of_their_weights() -> None:
    """torch flattens no weights of bfloat16 (``RNNBase.flatten_parameters``): an H200 held a copy from each forward to its backward."""
    flat = {}
    for dtype in (BF16, torch.float16):
        with on_cuda() as seen:
            nn.LSTM(16, 32, 2, dtype=dtype)(torch.ones(5, 4, 16, dtype=dtype))[0].sum().backward()
        flat[dtype] = seen.outputs(aten._cudnn_rnn.default)[4].untyped_storage().nbytes()
    assert flat[BF16] == 2 * sum(part.numel() for part in nn.LSTM(16, 32, 2).parameters()) > flat[torch.float16]
