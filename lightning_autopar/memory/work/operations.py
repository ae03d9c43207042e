"""What is known of an operation whatever it is called with: kind, FLOPs, arguments that it reads, random draws. Knows torch's operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

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


aten = torch.ops.aten


class Operation:
    """What is known of an operation for all arguments.

    Attributes:
        name: as in ``aten.mm``.
        short_name: as in ``mm``.
        kind: for a roofline.
        is_view: its outputs share storage with its inputs, and it moves nothing.
        moves: whether it reads its inputs and writes its outputs.
        unread: names of arguments whose elements it doesn't read.
        picks: names of arguments of which it reads only as much as it writes, or as there are targets.
        touches: whether it writes its first argument only in some places, which other arguments name.
        writes: names of arguments that it writes and doesn't give back.
        again: by the name of an argument, how often more it passes over as many elements.
        flops: (args, kwargs, output) → FLOPs; None where it has none worth counting.
        draws: whether it may draw random numbers.
    """

    __slots__ = (
        "_function",
        "again",
        "draws",
        "flops",
        "is_view",
        "kind",
        "moves",
        "name",
        "picks",
        "short_name",
        "touches",
        "unread",
        "writes",
    )

    def __init__(self, function: Any) -> None:
        packet = getattr(function, "_overloadpacket", None)
        formula = _FORMULAS.get(packet) or flop_registry.get(packet)
        schema = function._schema
        self._function = function
        self.name = str(packet)
        short: str = schema.name.partition("::")[2]
        self.short_name = short
        self.kind: WorkKind = kind_of(function)
        self.is_view = bool(getattr(function, "is_view", False)) and packet is not aten.lift_fresh
        self.moves = not self.is_view and packet not in _STILL and not schema.name.startswith("profiler::")
        self.unread: frozenset[str] = _UNREAD.get(short, _FILLED if short in _FILLS or short.endswith("_like") else frozenset())
        self.picks: frozenset[str] = _PICKS.get(short, frozenset())
        self.touches = short in _TOUCHES
        written = [argument.name for argument in schema.arguments if argument.alias_info is not None and argument.alias_info.is_write]
        self.writes = frozenset(written) if not schema.returns else frozenset()
        self.again: dict[str, int] = _AGAIN.get(short, {})
        self.flops: Callable[[Any, Any, Any], int] | None = None
        if formula is not None:
            self.flops = lambda args, kwargs, output: int(formula(*args, **kwargs, out_val=output))
        self.draws = torch.Tag.nondeterministic_seeded in function.tags

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, in order."""
        return dict(zip((argument.name for argument in self._function._schema.arguments), args, strict=False)) | kwargs

    def has_drawn(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call has drawn random numbers: dropout with probability zero, or outside of training, draws none."""
        if not self.draws:
            return False
        schema = self._function._schema
        values = self.named(args, kwargs)
        if schema.name in ("aten::bernoulli_", "aten::bernoulli"):
            return values.get("p") not in (0, 0.0, 1, 1.0)
        if "attention" in schema.name:
            return bool(values.get("dropout_p", 0.0))
        if "dropout" in values and "train" in values:  # a recurrent layer's kernel, which may have none
            return bool(values["dropout"] and values["train"])
        return values.get("train", values.get("training", True)) is not False

    def drawn_bytes(self, output: Tensor) -> tuple[int, ...]:
        """The bytes of the tensors through which an output of this size is drawn: a mask as integers of four bytes; on CUDA dropout's
        input, mask and output.

        Fused attention's dropout is drawn inside its kernel.
        """
        if self.kind == "attention":
            return ()
        size = output.element_size()
        of_each = {"bernoulli_": (4,), "native_dropout": (size, 1, size)}.get(self.short_name, (size,))
        return tuple(output.numel() * each for each in of_each)


_known: dict[Any, Operation] = {}


def operation(function: Any) -> Operation:
    """What is known of an operator; looked up once."""
    found = _known.get(function)
    if found is None:
        found = _known[function] = Operation(function)
    return found


def _attention(query: Any, key: Any, value: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    """Scores, and the values' sum. The formula of torch before 2.13 may refuse grouped heads (``torch/utils/flop_counter.py``)."""
    batch, heads, length, width = query.shape
    return int(2 * batch * heads * length * key.shape[2] * (width + value.shape[3]))


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    """FLOPs of the scores again, and of the gradients of weights, values, keys and queries."""
    batch, heads, length, width = query.shape
    return int(2 * batch * heads * length * key.shape[2] * (3 * width + 2 * value.shape[3]))


def _product(first: Any, second: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    """Matrix or vector times vector."""
    return 2 * int(first.numel())


def _added_product(start: Any, first: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    return 2 * int(first.numel())


def _convolution(
    input: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, *_: Any, out_val: Any = None, **__: Any
) -> int:
    """A multiply-add for each element of the weight at every position: of the output, or of the input where that is the smaller one."""
    over = input if transposed else out_val
    return int(2 * over.shape[0] * math.prod(over.shape[2:]) * weight.numel())


def _convolution_backward(
    gradient: Any, input: Any, weight: Any, sizes: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, *rest: Any, **_: Any
) -> int:
    """As much as forward for the input's gradient, and for the weight's; torch's own formula leaves groups out for the weight's."""
    products = sum(rest[-1][:2])
    return int(products) * _convolution(input, weight, None, stride, padding, dilation, transposed, out_val=gradient)


def _recurrent(input: Any, *rest: Any, out_val: Any = None, **_: Any) -> int:
    """A recurrent layer: each position is multiplied with every matrix of the weights."""
    weights = rest[0] if isinstance(rest[0], (list, tuple)) else rest[:2]
    positions = input.numel() // input.shape[-1]
    return int(2 * positions * sum(weight.numel() for weight in weights if weight.dim() == 2))


def _recurrent_backward(*args: Any, **kwargs: Any) -> int:
    return 2 * _recurrent(*args, **kwargs)


#: Operations that torch's own table leaves out, or takes too narrowly.
_FORMULAS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        (
            aten._scaled_dot_product_flash_attention,
            aten._scaled_dot_product_efficient_attention,
            aten._scaled_dot_product_cudnn_attention,
            aten._scaled_dot_product_flash_attention_for_cpu,
        ),
        _attention,
    ),
    **dict.fromkeys(
        (
            aten._scaled_dot_product_flash_attention_backward,
            aten._scaled_dot_product_efficient_attention_backward,
            aten._scaled_dot_product_cudnn_attention_backward,
            aten._scaled_dot_product_flash_attention_for_cpu_backward,
        ),
        _attention_backward,
    ),
    **dict.fromkeys((aten.mv, aten.dot, aten.vdot), _product),
    aten.addmv: _added_product,
    **dict.fromkeys((aten.convolution, aten._convolution), _convolution),
    aten.convolution_backward: _convolution_backward,
    aten.mkldnn_rnn_layer: _recurrent,
    aten.mkldnn_rnn_layer_backward: _recurrent_backward,
    aten._cudnn_rnn: _recurrent,
    aten._cudnn_rnn_backward: _recurrent_backward,
}
#: Operations that allocate or rename, and touch no element.
_STILL = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    aten._unsafe_view,
    aten.lift_fresh,
    aten.detach,
    aten.detach_,
    aten.alias,
}
#: Arguments of which an operation reads only as much as it writes; of losses, as there are targets.
_PICKS = {
    "embedding": frozenset({"weight"}),
    "_embedding_bag": frozenset({"weight"}),
    **dict.fromkeys(("index_select", "index", "gather", "take", "nll_loss_forward", "nll_loss2d_forward"), frozenset({"self"})),
}
_FILLED = frozenset({"self"})
#: Operations that write their first argument without reading it, or use only its shape; so do those whose names end in ``_like``.
_FILLS = frozenset(
    names_of(
        "copy_ fill_ zero_ _foreach_zero_ _foreach_copy_ normal_ uniform_ bernoulli_ random_ exponential_ log_normal_ geometric_ cauchy_ "
        "new_zeros new_ones new_full"
    )
)
_UNREAD = {
    "nll_loss_backward": frozenset({"self"}),
    "nll_loss2d_backward": frozenset({"self"}),
    "max_pool2d_with_indices_backward": frozenset({"self"}),
    "max_pool3d_with_indices_backward": frozenset({"self"}),
    "_cudnn_rnn": frozenset({"weight_buf"}),  # the weights once more
    "_cudnn_rnn_backward": frozenset({"weight_buf"}),
}
#: Operations with several passes, in which a later pass doesn't find in a cache what an earlier one has read.
_AGAIN: dict[str, dict[str, int]] = {
    # Statistics first, over the whole batch, then the normalisation; backward the sums first (aten/src/ATen/native/cuda/Normalization.cuh).
    "native_batch_norm": {"input": 1},
    "_native_batch_norm_legit": {"input": 1},
    "cudnn_batch_norm": {"input": 1},
    "native_batch_norm_backward": {"grad_out": 1, "input": 1},
    "cudnn_batch_norm_backward": {"grad_output": 1, "input": 1},
    # Zeros everywhere, then a sum or a copy where the gradient goes.
    "embedding_dense_backward": {"grad_output": 2},
    "select_backward": {"grad_output": 1},
    "slice_backward": {"grad_output": 1},
    # A softmax; which rows are all minus infinity; zeros in their place (aten/src/ATen/native/transformers/attention.cpp).
    "_safe_softmax": {"self": 3},
}
#: Operations in place that write where an index says.
_TOUCHES = frozenset(names_of("index_put_ _index_put_impl_ index_add_ index_copy_ index_fill_ scatter_ scatter_add_ scatter_reduce_ put_"))
