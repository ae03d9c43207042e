"""CPU tensors treated as CUDA's: dropout, normalisation, optimizers, whole blocks counted by hand, and what a footprint tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_autopar.memory.fakes.as_cuda import as_cuda
from lightning_autopar.memory.trace.bare_step import default_dtype
from lightning_autopar.memory.trace.trace import trace
from tests.memory.cuda import BF16, FLOAT, amp, aten, on_cuda, saved_bytes
from tests.memory.measured import Copies, peak_bytes, real_peak_bytes


@pytest.mark.parametrize("run", [lambda x: F.dropout(x, 0.1), nn.Dropout(0.1), lambda x: torch.dropout(x, 0.1, True)])
def test_dropout_keeps_a_boolean_mask(run: Callable[[Tensor], Tensor]) -> None:
    with on_cuda() as seen:
        x = torch.ones(4, 8, requires_grad=True)
        run(x).sum().backward()
    assert seen.outputs(aten.native_dropout.default)[1].dtype is torch.bool
    assert "native_dropout_backward" in seen.names()


@pytest.mark.parametrize("run", [nn.Dropout(0.1).eval(), nn.Dropout(0.0), nn.Dropout1d(0.1), nn.AlphaDropout(0.1)])
def test_other_dropouts_stay(run: nn.Module) -> None:
    with on_cuda() as seen:
        run(torch.ones(4, 8, 8))
    assert "native_dropout" not in seen.names()


@pytest.mark.parametrize(("dtype", "size"), [(FLOAT, 4), (BF16, 2)])
def test_rms_norm_saves_its_input_and_a_number_a_row(dtype: torch.dtype, size: int) -> None:
    with on_cuda():
        x = torch.ones(6, 16, dtype=dtype, requires_grad=True)
        weight = torch.ones(16, dtype=dtype, requires_grad=True)
        assert saved_bytes(lambda: F.rms_norm(x * 1, (16,), weight), [weight]) == 6 * 16 * size + 6 * 4
        F.rms_norm(x, (16,), weight).sum().backward()
        assert weight.grad is not None


def test_rms_norm_of_a_constant_is_computed() -> None:
    x, weight = torch.arange(12.0).reshape(3, 4), torch.arange(4.0)
    expected = F.rms_norm(x, (4,), weight), F.rms_norm(x, (3, 4))
    with as_cuda({}):
        torch.testing.assert_close((F.rms_norm(x, (4,), weight), F.rms_norm(x, (3, 4))), expected)


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({}, "_foreach_addcdiv_"),
        ({"foreach": False}, "addcdiv_"),
        ({"fused": True}, "_fused_adamw_"),
        ({"capturable": True}, "_foreach_addcdiv_"),
    ],
)
def test_optimizers_choose_as_on_cuda(kwargs: dict[str, Any], expected: str) -> None:
    notes: dict[str, None] = {}
    with on_cuda(notes) as seen:
        parameter = nn.Parameter(torch.ones(64, 64))
        parameter.grad = torch.ones(64, 64)
        torch.optim.AdamW([parameter], **kwargs).step()
        nn.utils.clip_grad_norm_([parameter], 1.0)
    assert expected in seen.names()
    assert {"_foreach_norm", "_foreach_mul_"} <= set(seen.names())
    assert any("foreach" in note for note in notes) == expected.startswith("_foreach")


class Stack(LightningModule):
    """Layers that run alike on any device: what differs is the optimizer."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(*[part for _ in range(6) for part in (nn.Linear(192, 192), nn.ReLU())])
        self.kwargs = kwargs

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3, **self.kwargs)


def test_foreach_temporaries_are_those_of_a_real_step() -> None:
    """A CPU's optimizer, forced to run over all parameters at once, against the trace that chooses so by itself."""
    batch = torch.randn(8, 192)
    footprint = trace(Stack(), None, batch, target="cuda")
    assert footprint.traced
    together = real_peak_bytes(Stack(foreach=True), Copies(batch))
    assert peak_bytes(footprint) == pytest.approx(together, rel=0.005)
    one_by_one = real_peak_bytes(Stack(foreach=False), Copies(batch))
    assert together - one_by_one > footprint.parameter_bytes / 2
    assert peak_bytes(trace(Stack(foreach=False), None, batch, target="cuda")) == pytest.approx(one_by_one, rel=0.005)
    assert any("foreach" in assumption for assumption in footprint.assumptions)


BATCH, LENGTH = 4, 128
#: Of flash's random numbers: two numbers, and an unused one.
SEEDS = 24


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_gpt2_block_saves_what_was_counted(precision: str) -> None:
    """What CUDA saves in a block of GPT-2: bytes an element of the residual stream, then what doesn't grow with the width."""
    modeling = pytest.importorskip("transformers.models.gpt2.modeling_gpt2")
    width, heads = 192, 3
    mixed = precision == "bf16-mixed"
    tokens = BATCH * LENGTH
    stream = 4 if mixed else 2
    by_operation = {
        "ln_1: input": stream,
        "c_attn: input": 2,
        "attention: query, key, value": 6,
        "attention: output, c_proj's input": 2,
        "resid_dropout: mask": 1,
        "ln_2: input": stream,
        "c_fc: input": 2,
        "gelu: 0.5 x": 4 * 2,
        "gelu: input of the power": 4 * stream,
        "gelu: tanh": 4 * stream,
        "gelu: 1 + tanh": 4 * stream,
        "mlp.c_proj: input": 4 * 2,
        "mlp.dropout: mask": 1,
    }
    rows = 4 * tokens * 4 + tokens * heads * 4  # two norms' statistics, attention's row sums
    rows -= 0 if mixed else 4 * tokens * 2  # fakes of statistics are in bfloat16 (CUDA_HIDDEN corrects the ledger)
    weights = 2 * (3 + 1 + 4 + 4) * width * width if mixed else 0  # autocast's casts
    with on_cuda():
        with default_dtype(FLOAT if mixed else BF16):
            config = modeling.GPT2Config(n_embd=width, n_head=heads, attn_implementation="sdpa")
            block = modeling.GPT2Block(config, layer_idx=0)
            x = torch.ones(BATCH, LENGTH, width, requires_grad=True)
        with amp(enabled=mixed, cache_enabled=False):
            found = saved_bytes(lambda: block(x * 1), list(block.parameters()))
    assert found == sum(by_operation.values()) * tokens * width + rows + weights + SEEDS


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_llama_block_saves_what_was_counted(precision: str) -> None:
    """The same of Llama's block, with a quarter of the heads for keys and values; its norms aren't torch's."""
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    width, heads, groups, inner = 256, 8, 2, 704
    mixed = precision == "bf16-mixed"
    tokens = BATCH * LENGTH
    share, wide = groups / heads, inner / width
    copies = 3 if mixed else 1  # autocast casts the normalised input for each of the three products
    by_operation = {
        "input_layernorm: input in float32": 4,
        "input_layernorm: normalised": 4 if mixed else 2,
        "q_proj, k_proj, v_proj: input": 2 * copies,
        "attention: query": 2,
        "attention: keys and values": 2 * 2 * share,
        "attention: output, o_proj's input": 2,
        "post_attention_layernorm: input in float32": 4,
        "post_attention_layernorm: normalised": 4 if mixed else 2,
        "gate_proj, up_proj: input": 2 * (2 if mixed else 1),
        "gate_proj: output": 2 * wide,
        "silu: output": 2 * wide,
        "up_proj: output": 2 * wide,
        "down_proj: input": 2 * wide,
    }
    rows = 2 * tokens * 4 + tokens * heads * 4
    tables = 2 * LENGTH * (width // heads) * (4 if mixed else 2)
    weights = 2 * (2 * width * width + 2 * width * width * share + 3 * width * inner) if mixed else 0
    with on_cuda():
        with default_dtype(FLOAT if mixed else BF16):
            config = modeling.LlamaConfig(
                hidden_size=width,
                intermediate_size=inner,
                num_attention_heads=heads,
                num_key_value_heads=groups,
                attn_implementation="sdpa",
            )
            block = modeling.LlamaDecoderLayer(config, 0)
            positions = modeling.LlamaRotaryEmbedding(config)
            x = torch.ones(BATCH, LENGTH, width, requires_grad=True)
        with amp(enabled=mixed, cache_enabled=False):
            angles = positions(x, torch.arange(LENGTH)[None])
            found = saved_bytes(lambda: block(x * 1, position_embeddings=angles), list(block.parameters()))
    assert found == sum(by_operation.values()) * tokens * width + rows + tables + weights + SEEDS


class Plain(LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.net(batch)
        return (output[0] if isinstance(output, tuple) else output).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, foreach=False)


@pytest.mark.parametrize(
    ("net", "batch", "words"),
    [
        (nn.Linear(8, 8), (4, 8), []),
        (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), (4, 8), ["dropout"]),
        (nn.Conv2d(3, 4, 3), (2, 3, 8, 8), ["cuDNN's workspace"]),
        (nn.LSTM(8, 8, batch_first=True), (2, 5, 8), ["recurrent layers run by cuDNN", "recurrent layers is estimated"]),
        (nn.TransformerEncoderLayer(8, 1, 16, 0.0, batch_first=True), (2, 5, 8), ["memory-efficient"]),
    ],
)
def test_only_choices_that_were_met_are_told(net: nn.Module, batch: tuple[int, ...], words: list[str]) -> None:
    footprint = trace(Plain(net), None, torch.randn(batch), target="cuda")
    assert footprint.traced
    assert len(footprint.assumptions) == len(words)
    for word in words:
        assert any(word in assumption for assumption in footprint.assumptions)
    assert not trace(Plain(net), None, torch.randn(batch), target="cpu").assumptions
