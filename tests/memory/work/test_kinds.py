"""Kinds of operations, by their operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_autopar.memory.work.operations import dtype_name, kind_of

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (aten.addmm.default, "matmul"),
        (aten.mv.default, "matmul"),
        (aten._scaled_dot_product_flash_attention_backward.default, "attention"),
        (aten.convolution_backward.default, "convolution"),
        (aten._cudnn_rnn.default, "recurrent"),
        (aten.native_layer_norm_backward.default, "reduce"),
        (aten._log_softmax_backward_data.default, "reduce"),
        (aten.max.default, "reduce"),
        (aten.max.other, "pointwise"),
        (aten._foreach_norm.Scalar, "reduce"),
        (aten._foreach_addcdiv_.ScalarList, "pointwise"),
        (aten._fused_adamw_.default, "pointwise"),
        (aten.gelu_backward.default, "pointwise"),
        (aten.rsqrt.default, "pointwise"),
        (aten.bernoulli_.float, "pointwise"),
        (aten.embedding.default, "gather"),
        (aten.embedding_dense_backward.default, "scatter"),
        (aten.max_pool2d_with_indices_backward.default, "scatter"),
        (aten.index_put_.default, "scatter"),
        (aten._to_copy.default, "copy"),
        (aten.copy_.default, "copy"),
        (aten.zero_.default, "copy"),
        (aten.slice_backward.default, "copy"),
        (aten.linalg_qr.default, "other"),
    ],
)
def test_operators_have_kinds(function: Any, kind: str) -> None:
    assert kind_of(function) == kind


def test_types_have_the_fields_names() -> None:
    named = {dtype: dtype_name(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool)}
    assert list(named.values()) == ["fp32", "bf16", "fp16", "fp64", "int8", "bool"]
