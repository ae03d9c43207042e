"""An operation's kind for a roofline: matrix product, attention, one pass over elements, … Knows torch's operators by name; no tensors."""

from __future__ import annotations

from typing import Any

import torch

from lightning_autopar.memory.work.work import WorkKind

_DTYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}


def dtype_name(dtype: torch.dtype) -> str:
    """``"bf16"`` for ``torch.bfloat16``; types that are no floating-point numbers keep torch's name."""
    return _DTYPES.get(dtype) or str(dtype).removeprefix("torch.")


def names_of(text: str) -> tuple[str, ...]:
    """Names with spaces between them."""
    return tuple(text.split())


#: By the operator's name, without the underscore of an operation in place and without ``_backward``.
_TABLE: dict[WorkKind, tuple[str, ...]] = {
    "matmul": names_of(
        "mm addmm bmm baddbmm addbmm mv addmv dot vdot linear matmul mkldnn_linear _int_mm _scaled_mm _grouped_mm _scaled_grouped_mm "
        "_weight_int8pack_mm _weight_int4pack_mm _sparse_semi_structured_mm _addmm_activation"
    ),
    "convolution": names_of(
        "convolution _convolution convolution_overrideable cudnn_convolution cudnn_convolution_transpose mkldnn_convolution "
        "miopen_convolution _slow_conv2d_forward slow_conv3d_forward conv_depthwise3d _conv_depthwise2d conv_tbc"
    ),
    "recurrent": names_of("mkldnn_rnn_layer _cudnn_rnn miopen_rnn"),
    "reduce": names_of(
        "native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional "
        "_native_batch_norm_legit_no_training batch_norm_with_update cudnn_batch_norm miopen_batch_norm batch_norm_stats batch_norm_elemt "
        "_batch_norm_with_update _fused_rms_norm _softmax _log_softmax _masked_softmax _safe_softmax sum nansum mean nanmean var std "
        "var_mean std_mean norm linalg_vector_norm prod logsumexp _logcumsumexp amax amin aminmax argmax argmin max min any all median "
        "nanmedian mode kthvalue topk sort argsort cumsum cumprod cummax cummin histc bincount nll_loss_forward nll_loss "
        "nll_loss2d_forward nll_loss2d mse_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss multi_margin_loss "
        "multilabel_margin_loss multilabel_margin_loss_forward _ctc_loss max_pool2d_with_indices max_pool3d_with_indices avg_pool2d "
        "avg_pool3d adaptive_max_pool2d _adaptive_avg_pool2d _adaptive_avg_pool3d _foreach_norm _foreach_max _cdist_forward _cdist "
        "_pdist_forward unique_dim _unique2 _amp_foreach_non_finite_check_and_unscale equal count_nonzero renorm"
    ),
    "gather": names_of(
        "embedding _embedding_bag _embedding_bag_forward_only index_select index gather take masked_select nonzero grid_sampler_2d "
        "grid_sampler_3d upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact2d upsample_linear1d "
        "upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa im2col"
    ),
    "scatter": names_of(
        "embedding_dense embedding_sparse _embedding_bag_dense index_put _index_put_impl _unsafe_index_put index_add index_copy index_fill "
        "scatter scatter_add scatter_reduce masked_scatter put col2im _embedding_bag_per_sample_weights"
    ),
    "copy": names_of(
        "_to_copy copy clone cat stack hstack vstack contiguous fill zero zeros zeros_like ones ones_like full full_like new_zeros "
        "new_ones new_full scalar_tensor arange range eye linspace repeat repeat_interleave flip roll constant_pad_nd reflection_pad1d "
        "reflection_pad2d replication_pad1d replication_pad2d _foreach_copy _foreach_zero tril triu slice select diagonal slice_scatter "
        "select_scatter diagonal_scatter as_strided_scatter split_with_sizes_copy expand_copy unfold pixel_shuffle pixel_unshuffle "
        "channel_shuffle set_data _local_scalar_dense lift_fresh lift_fresh_copy _reshape_copy new_empty_strided block_diag meshgrid "
        "_pack_padded_sequence tril_indices triu_indices one_hot _cudnn_rnn_flatten_weight value_selecting_reduction"
    ),
}
#: Operators whose backward isn't of their own kind: it writes to places that an index tells.
_SCATTERED_BACK = frozenset(
    names_of(
        "embedding_dense_backward embedding_sparse_backward _embedding_bag_dense_backward index_select_backward "
        "max_pool2d_with_indices_backward max_pool3d_with_indices_backward adaptive_max_pool2d_backward grid_sampler_2d_backward "
        "grid_sampler_3d_backward upsample_nearest1d_backward upsample_nearest2d_backward upsample_bilinear2d_backward "
        "upsample_bicubic2d_backward upsample_trilinear3d_backward upsample_linear1d_backward value_selecting_reduction_backward"
    )
)
#: Operators that make one pass over elements, and lack torch's tag for it.
_POINTWISE_WORDS = ("foreach", "_fused_ad", "_fused_sgd", "_thnn_", "random", "rand", "bernoulli", "normal", "uniform", "exponential")
_POINTWISE = frozenset(
    names_of(
        "native_dropout masked_fill where glu prelu _prelu_kernel gelu relu silu elu hardtanh leaky_relu threshold softplus "
        "log_sigmoid_forward log_sigmoid mish hardswish hardsigmoid binary_cross_entropy_with_logits addr cross complex polar lerp clamp "
        "cauchy geometric log_normal multinomial tanh sigmoid pow _weight_norm_interface _euclidean_dist rrelu_with_noise "
        "_amp_update_scale _local_response_norm hardshrink softshrink celu logit"
    )
)
#: A tag that older versions of torch lack.
_REDUCTION = getattr(torch.Tag, "reduction", None)
_KINDS: dict[str, WorkKind] = {name: kind for kind, names in _TABLE.items() for name in names}


def kind_of(function: Any) -> WorkKind:
    """The kind of an operator."""
    name = function._schema.name.partition("::")[2] if hasattr(function, "_schema") else str(function)
    if "attention" in name:
        return "attention"
    if name in _SCATTERED_BACK:
        return "scatter"
    base = name[:-1] if name.endswith("_") else name
    for ending in ("_backward_data", "_double_backward", "_backward"):
        base = base.removesuffix(ending)
    tags = getattr(function, "tags", ())
    known = _KINDS.get(base)
    if known is not None and not (base in ("max", "min") and torch.Tag.pointwise in tags):
        return known
    if torch.Tag.pointwise in tags or base in _POINTWISE or any(word in base for word in _POINTWISE_WORDS):
        return "pointwise"
    return "reduce" if _REDUCTION is not None and _REDUCTION in tags else "other"
