"""The attention kernel that CUDA would take, and what each keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from lightning_autopar.memory.cuda_overhead import Target
from lightning_autopar.memory.fakes.fake_copies import CUDNN_HEADS
from lightning_autopar.memory.work.operations import operation
from tests.memory.cuda import BF16, CUDNN, DOUBLE, EFFICIENT, FLASH, FLOAT, HALF, MATH, amp, aten, attend, kernels, on_cuda


@pytest.mark.parametrize(
    ("expected", "arguments"),
    [
        (FLASH, {}),
        (FLASH, {"dtype": HALF, "is_causal": True, "dropout_p": 0.1}),
        (FLASH, {"heads": (8, 2), "enable_gqa": True}),
        (FLASH, {"width": 256}),
        (FLASH, {"width": 20}),
        (EFFICIENT, {"dtype": FLOAT}),
        (EFFICIENT, {"mask": ((2, 1, 40, 40), torch.bool)}),
        (EFFICIENT, {"mask": ((40, 40), BF16)}),
        (EFFICIENT, {"width": 264}),
        (EFFICIENT, {"is_causal": True, "lengths": (32, 40)}),
        (EFFICIENT, {"value_width": 32}),
        (MATH, {"dtype": DOUBLE}),
        (MATH, {"dtype": FLOAT, "width": 18}),
        (MATH, {"width": 20, "mask": ((40, 40), torch.bool)}),
        (MATH, {"dtype": FLOAT, "heads": (8, 2), "enable_gqa": True}),
    ],
)
def test_attention_takes_the_kernel_of_cuda(expected: str, arguments: dict[str, Any]) -> None:
    assert attend(**arguments)[0] == [expected]


@pytest.mark.parametrize(
    ("expected", "target", "arguments"),
    [
        (CUDNN, "sm90", {}),
        (CUDNN, "sm100", {}),
        (FLASH, "cuda", {}),
        (CUDNN, "sm90", {"mask": ((2, 1, 40, 40), torch.bool)}),
        (CUDNN, "sm90", {"heads": (8, 2), "enable_gqa": True}),
        (CUDNN, "sm90", {"is_causal": True, "lengths": (32, 40)}),
        (CUDNN, "sm90", {"width": 256}),
        (FLASH, "sm100", {"width": 256}),
        (FLASH, "sm90", {"width": 20}),
        (FLASH, "sm90", {"dropout_p": 0.1}),
        (CUDNN, "sm90", {"dropout_p": 0.125}),
        (FLASH, "sm90", {"lengths": (1, 1)}),
        (EFFICIENT, "sm90", {"dtype": FLOAT}),
        (EFFICIENT, "sm90", {"dropout_p": 0.2, "mask": ((2, 1, 40, 40), torch.bool)}),
    ],
)
def test_hopper_and_blackwell_ask_cudnn_first(expected: str, target: Target, arguments: dict[str, Any]) -> None:
    """As ``torch._fused_sdp_choice`` answered on stub GPUs of capability 8.0, 9.0 and 10.0, with cuDNN 9.20."""
    assert attend(**arguments, cudnn_head=CUDNN_HEADS.get(target, 0))[0] == [expected]


@pytest.mark.parametrize("target", ["cuda", "sm90"])
@pytest.mark.parametrize("dtype", [BF16, FLOAT])
@pytest.mark.parametrize(
    "mask",
    [
        lambda dtype: torch.zeros(40, 40, 4, dtype=dtype).permute(2, 0, 1)[None],
        lambda dtype: torch.zeros(2, 1, 40, 1, dtype=dtype).expand(2, 1, 40, 40),
        lambda dtype: torch.zeros(2, 1, 40, 1, dtype=torch.bool).expand(2, 1, 40, 40),
    ],
    ids=["a bias with its heads last", "one column for all", "one boolean column for all"],
)
def test_masks_whose_rows_have_gaps_run_unfused(mask: Callable[..., torch.Tensor], dtype: torch.dtype, target: Target) -> None:
    """As ``torch._fused_sdp_choice`` answers on stub GPUs; T5 held more than twice as much on an H200 as by the memory-efficient kernel."""
    with on_cuda(cudnn_head=CUDNN_HEADS.get(target, 0)) as seen:
        query, rows = torch.ones(2, 4, 40, 64, dtype=dtype), mask(dtype)
        F.scaled_dot_product_attention(query, query, query, attn_mask=rows)
        assert kernels(seen) == [MATH]
        F.scaled_dot_product_attention(query, query, query, attn_mask=rows.contiguous())
    assert kernels(seen)[-1] in (EFFICIENT, CUDNN)


def test_cudnn_first_gives_way_to_the_users_order() -> None:
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
        assert attend(cudnn_head=256)[0] == [FLASH]


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        (SDPBackend.MATH, MATH),
        (SDPBackend.EFFICIENT_ATTENTION, EFFICIENT),
        (SDPBackend.CUDNN_ATTENTION, CUDNN),
        (SDPBackend.FLASH_ATTENTION, FLASH),
    ],
)
def test_attention_takes_the_kernel_that_the_user_asks_for(backend: SDPBackend, expected: str) -> None:
    with sdpa_kernel(backend):
        assert attend()[0] == [expected]


@pytest.mark.parametrize(("length", "rounded"), [(64, 64), (40, 64), (33, 64), (31, 32)])
def test_one_number_a_row_is_kept_as_each_kernel_rounds(length: int, rounded: int) -> None:
    _, flash = attend(lengths=(length, length))
    assert flash.outputs(aten._scaled_dot_product_flash_attention.default)[1].shape == (2, 4, length)
    _, efficient = attend(lengths=(length, length), dtype=FLOAT)
    assert efficient.outputs(aten._scaled_dot_product_efficient_attention.default)[1].shape == (2, 4, rounded)


def test_masks_are_padded_to_rows_of_eight_and_not_copied_for_every_head() -> None:
    _, seen = attend(lengths=(41, 41), mask=((2, 1, 41, 41), torch.bool))
    mask = next(args[3] for func, args, _ in seen.calls if func is aten._scaled_dot_product_efficient_attention.default)
    assert mask.shape == (2, 4, 41, 41)
    assert mask.dtype is BF16
    assert mask.untyped_storage().nbytes() == 2 * 2 * 41 * 48


def test_a_learned_mask_gets_its_gradient() -> None:
    with on_cuda() as seen:
        query = torch.ones(2, 4, 40, 64, dtype=BF16)
        bias = torch.zeros(4, 40, 40, dtype=BF16, requires_grad=True)
        F.scaled_dot_product_attention(query, query, query, attn_mask=bias).sum().backward()
    assert kernels(seen) == [EFFICIENT]
    assert bias.grad is not None
    assert bias.grad.shape == bias.shape


def test_heads_are_padded_for_flash() -> None:
    _, seen = attend(width=20)
    query = next(args[0] for func, args, _ in seen.calls if func is aten._scaled_dot_product_flash_attention.default)
    assert query.shape[-1] == 24


@pytest.mark.parametrize(("needs", "expected"), [(False, [EFFICIENT]), (True, [MATH])])
def test_multihead_attention_keeps_weights_only_if_they_are_asked_for(needs: bool, expected: list[str]) -> None:
    with on_cuda() as seen:
        layer = nn.MultiheadAttention(32, 4, batch_first=True)
        x = torch.ones(2, 8, 32)
        layer(x, x, x, need_weights=needs)
    assert kernels(seen) == expected


def test_encoder_layers_train_and_evaluate() -> None:
    with on_cuda() as seen:
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        x = torch.ones(2, 8, 32)
        with amp():
            layer(x).sum().backward()
        assert seen.names().count(FLASH) == 1
        layer.eval()
        with torch.no_grad():
            layer(x)
    assert "_transformer_encoder_layer_fwd" in seen.names()


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("dtype", [BF16, FLOAT])
def test_flops_are_torchs_own_also_of_grouped_heads(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    """Torch 2.13's formulas as the oracle, with keys' heads repeated, as older ones ask for."""
    _, seen = attend(dtype=dtype, heads=heads, lengths=(24, 40), enable_gqa=heads[0] != heads[1])
    full = (2, heads[0], 24, 64), (2, heads[0], 40, 64), (2, heads[0], 40, 64)
    expected = {"attention": sdpa_flop_count(*full), "backward": sdpa_backward_flop_count(full[0], *full)}
    found = {}
    for func, args, output in seen.calls:
        name = func.overloadpacket.__name__
        if "attention" in name and operation(func).flops is not None:
            found[name.rpartition("_")[2]] = operation(func).flops(args, {}, output)
    if dtype is FLOAT and heads[0] != heads[1]:
        assert not found  # unfused
    else:
        assert found == expected
