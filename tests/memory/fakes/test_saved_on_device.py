"""What a real device saves for backward against fake tensors: a GPU against CPU fakes treated as CUDA's, and a CPU against plain fakes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_autopar.memory.fakes.as_cuda import as_cuda
from lightning_autopar.memory.fakes.fake_copies import fake_copy, fake_mode
from lightning_autopar.memory.trace.bare_step import default_dtype
from tests.memory.cuda import BF16, FLOAT, FirstOutput, saved_bytes

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
ON_GPU = [pytest.param("cuda", marks=GPU)]


class Attention(nn.Module):
    """Attention with its projections, in one of its ways."""

    def __init__(self, *, heads: int = 4, key_heads: int = 4, mask: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.sizes = [16 * heads, 16 * key_heads, 16 * key_heads]
        self.project, self.out = nn.Linear(64, sum(self.sizes)), nn.Linear(16 * heads, 64)
        self.mask, self.dropout = mask, dropout

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (-1, 16)).transpose(1, 2) for part in self.project(x).split(self.sizes, -1))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril() if self.mask else None
        out = F.scaled_dot_product_attention(
            query, key, value, mask, self.dropout, is_causal=mask is None, enable_gqa=query.size(1) != key.size(1)
        )
        return self.out(out.transpose(1, 2).flatten(2))


class Loss(nn.Module):
    """Losses that autocast treats differently."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 100)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.head(x)
        targets = torch.zeros(scores.shape[:-1], dtype=torch.long, device=x.device)
        return (
            F.cross_entropy(scores.flatten(0, 1), targets.flatten()) + F.mse_loss(scores, scores.detach()) + scores.softmax(-1).pow(2).sum()
        )


SEQUENCE = (4, 40, 64)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.SiLU()), SEQUENCE),
    "attention": (Attention, SEQUENCE),
    "attention, grouped": (lambda: Attention(key_heads=2), SEQUENCE),
    "attention, masked": (lambda: Attention(mask=True), SEQUENCE),
    "losses": (Loss, SEQUENCE),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)), (4, 8, 20, 20)),
}
#: What a CPU does in another way than its fakes say, or not at all.
CUDA_CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dropout": (lambda: nn.Sequential(nn.Linear(64, 96), nn.Dropout(0.1)), SEQUENCE),
    "attention, dropout": (lambda: Attention(dropout=0.1), SEQUENCE),
    "norms": (lambda: nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.RMSNorm(64)), SEQUENCE),
}
RECURRENT: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    name: (lambda name=name: FirstOutput(getattr(nn, name)(64, 128, 2)), (50, 8, 64))  # type: ignore[misc]
    for name in ("LSTM", "GRU", "RNN")
}
PRECISIONS: dict[str, tuple[torch.dtype, bool]] = {"32-true": (FLOAT, False), "bf16-mixed": (FLOAT, True), "bf16-true": (BF16, False)}


def both(case: tuple[Callable[[], nn.Module], tuple[int, ...]], precision: str, device: str) -> tuple[int, int]:
    """Bytes saved by the real device and by fakes; numbers of one or two elements (random states) don't count."""
    make, shape = case
    dtype, mixed = PRECISIONS[precision]
    with default_dtype(dtype):
        module, x = make(), torch.randn(shape)

    def run(module: nn.Module, x: Tensor) -> int:
        x.requires_grad_()
        with torch.autocast(device, dtype=BF16, enabled=mixed, cache_enabled=False):
            return saved_bytes(lambda: module(x * 1), [*module.parameters(), *module.buffers()], at_least=3)

    mode = fake_mode()
    fakes = fake_copy(module, mode, None), fake_copy(x, mode, None)
    real = run(module.to(device), x.to(device).detach())
    with ExitStack() as stack:
        if device == "cuda":
            stack.enter_context(as_cuda({}))
        stack.enter_context(mode)
        return real, run(*fakes)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", CASES)
def test_fakes_save_what_the_device_saves(name: str, precision: str, device: str) -> None:
    real, fake = both(CASES[name], precision, device)
    # Fakes keep a batch norm's statistics in the input's dtype, kernels in float32.
    assert fake == (pytest.approx(real, rel=1e-3) if name == "convolution" else real)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch 2.11, of a norm of 32 bits under autocast
@pytest.mark.parametrize("device", ON_GPU)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", CUDA_CASES)
def test_fakes_save_what_a_gpu_saves(name: str, precision: str, device: str) -> None:
    real, fake = both(CUDA_CASES[name], precision, device)
    assert fake == real


@pytest.mark.not_on_stub("cuDNN's recurrent layers")
@pytest.mark.parametrize("device", ON_GPU)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", RECURRENT)
def test_reserves_are_near_cudnns(name: str, precision: str, device: str) -> None:
    real, fake = both(RECURRENT[name], precision, device)
    assert fake == pytest.approx(real, rel=0.1)
