"""CUDA's autocast for tensors on a CPU: its lists of operations in place of the CPU's. Knows torch's dispatcher; no module, no ledger.

The lists are those of ``aten/src/ATen/autocast_mode.h`` (``AT_FORALL_*``, torch 2.13; an older torch has fewer operations on them, and is
asked). What the CPU casts and CUDA doesn't (``cat``,
losses, pooling, …) is found out by asking the dispatcher what is registered for either, so it holds for other versions, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.amp import autocast_mode
from torch.library import Library, fallthrough_kernel
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_autopar._temporary import patched

Policy = Literal["lower", "float32", "float32 by dtype", "float32 by overload", "promote"]


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


#: Inputs are cast to autocast's dtype (``AT_FORALL_LOWER_PRECISION_FP``).
LOWER = _names(
    "_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input "
    "convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot "
    "_thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention "
    "scaled_dot_product_attention"
)
#: Inputs are cast to float32 (``AT_FORALL_FP32``).
FLOAT32 = _names(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar "
    "softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity "
    "poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss "
    "margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits "
    "dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d "
    "upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d "
    "upsample_bicubic2d _upsample_bicubic2d_aa"
)
#: An output dtype that isn't given becomes float32; inputs stay (``AT_FORALL_FP32_SET_OPT_DTYPE``).
FLOAT32_BY_DTYPE = _names(
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord "
    "sum sum.dim_IntList"
)
#: The overload that takes an output dtype is called, with float32 (``AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE``).
FLOAT32_BY_OVERLOAD = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}
#: Inputs are cast to the widest dtype among them (``AT_FORALL_PROMOTE``).
PROMOTE = _names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")

#: CUDA refuses it under autocast (``binary_cross_entropy_banned``); here it runs in float32, as on a CPU, and a note says so.
BANNED = "binary_cross_entropy"

_ALL: dict[str, Policy] = {
    **dict.fromkeys(LOWER, "lower"),
    **dict.fromkeys(FLOAT32, "float32"),
    **dict.fromkeys(FLOAT32_BY_DTYPE, "float32 by dtype"),
    **dict.fromkeys(FLOAT32_BY_OVERLOAD, "float32 by overload"),
    **dict.fromkeys(PROMOTE, "promote"),
    BANNED: "float32",
}
_registered = torch._C._dispatch_has_kernel_for_dispatch_key
#: The operations that this version of torch casts on CUDA: ``rms_norm``, for one, came after 2.11.
POLICIES = {name: policy for name, policy in _ALL.items() if _registered(f"aten::{name}", "AutocastCUDA")}

_KEY = "AutocastCPU"
_NOTE = "autocast casts as on CUDA"


def below_autocast() -> Any:
    """A context in which autocast doesn't see operations, as inside of autocast's own kernels."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def eligible(tensor: Any) -> bool:
    """Whether autocast may cast it (``at::autocast::is_eligible``)."""
    return isinstance(tensor, Tensor) and tensor.device.type == "cpu" and tensor.is_floating_point() and tensor.dtype is not torch.float64


class Casts:
    """Casts arguments, and caches casts of weights as ``at::autocast::cached_cast`` does. Only a float32 leaf that requires a gradient and
    is cast to autocast's own dtype is cached, if ``cache_enabled`` allows it, and until the outermost ``torch.autocast`` is left.
    """

    def __init__(self) -> None:
        self._known: Any = WeakTensorKeyDictionary()

    def clear(self) -> None:
        """Forget them."""
        self._known = WeakTensorKeyDictionary()

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Cast an argument, or a list of them, to that dtype; values that aren't eligible stay."""
        if isinstance(value, (list, tuple)):
            return [self.cast(item, dtype) for item in value]
        if not eligible(value) or value.dtype is dtype:
            return value
        remembers = (
            dtype is torch.get_autocast_dtype("cpu")
            and value.dtype is torch.float32
            and value.requires_grad
            and value.is_leaf
            and not value._is_view()
            and torch.is_autocast_cache_enabled()
        )
        if not remembers:
            return value.to(dtype)
        if value not in self._known:
            self._known[value] = value.to(dtype)
        return self._known[value]

    def cast_all(self, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> tuple[list[Any], dict[str, Any]]:
        """Cast every argument to that dtype. The last one is cast first, as in torch's wheels (GCC evaluates from right to left)."""
        named = [(name, self.cast(value, dtype)) for name, value in reversed(kwargs.items())]
        placed = [self.cast(value, dtype) for value in reversed(args)]
        return placed[::-1], dict(reversed(named))


@contextmanager
def cuda_autocast(casts: Casts, notes: dict[str, None]) -> Iterator[None]:
    """While open, autocast treats CPU tensors as it would CUDA's; ``torch.autocast("cuda")`` and ``("cpu")`` both act on them.

    It replaces the kernels of the dispatch key AutocastCPU, so it works for every caller of an operation: user code, C++ composites, a
    recomputation inside of backward. ``torch.autocast("cuda")`` would turn itself off where there is no GPU
    (``torch/amp/autocast_mode.py``); so the state of both devices is always set together.

    Args:
        casts: remembers the casts of weights.
        notes: gets a sentence when autocast is first met.
    """
    with ExitStack() as stack:
        library = stack.enter_context(temporary_library())
        ours = set(torch._C._dispatch_get_registrations_for_dispatch_key(_KEY))
        cudas = set(torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"))
        for name in sorted(ours - cudas):
            library.impl(name.removeprefix("aten::"), fallthrough_kernel, _KEY)
        for name, policy in POLICIES.items():
            if f"aten::{name}" in cudas:
                library.impl(name, _kernel(name, policy, casts, notes), _KEY)
        _enter_state(stack, casts)
        yield


@contextmanager
def temporary_library() -> Iterator[Library]:
    """A library of kernels for ``aten``, removed on leaving, when torch's own come back. Torch's warning about overriding is silenced."""
    library = Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            library.impl = _quietly(library.impl)  # type: ignore[method-assign]
        yield library
    finally:
        library._destroy()


def _quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    def quiet(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*args, allow_override=True, **kwargs)  # the default from torch 2.13 on

    return quiet


def _kernel(name: str, policy: Policy, casts: Casts, notes: dict[str, None]) -> Callable[..., Any]:
    """The kernel of one operation (``at::autocast::WrapFunction_``)."""
    packet_name, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, packet_name)
    operation = getattr(packet, overload or "default")

    def lower(*args: Any, **kwargs: Any) -> Any:
        notes[_NOTE] = None
        dtype = torch.get_autocast_dtype("cpu")
        with below_autocast():
            placed, named = casts.cast_all(args, kwargs, dtype)
            return operation(*placed, **named)

    def float32(*args: Any, **kwargs: Any) -> Any:
        notes[_NOTE] = None
        if name == BANNED:
            notes["binary_cross_entropy runs under autocast, which CUDA refuses: use binary_cross_entropy_with_logits"] = None
        dtype = torch.float32
        with below_autocast():
            placed, named = casts.cast_all(args, kwargs, dtype)
            return operation(*placed, **named)

    def by_dtype(*args: Any, **kwargs: Any) -> Any:
        notes[_NOTE] = None
        with below_autocast():
            if not eligible(args[0]):
                return operation(*args, **kwargs)
            given = dict(zip(names, args, strict=False)) | kwargs
            if given.get("dtype") is None:
                given["dtype"] = torch.float32
            positional = [given.pop(key) for key in names if key in given and not keyword_only[key]]
            return operation(*positional, **given)

    def by_overload(*args: Any, **kwargs: Any) -> Any:
        notes[_NOTE] = None
        with below_autocast():
            dtype = torch.float32 if eligible(args[0]) else args[0].dtype
            if not eligible(args[0]):
                return operation(*args, **kwargs)
            return getattr(packet, FLOAT32_BY_OVERLOAD[name])(*_all_arguments(operation, args, kwargs), dtype=dtype)

    def promote(*args: Any, **kwargs: Any) -> Any:
        notes[_NOTE] = None
        found = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if eligible(leaf)]
        wide = any(leaf.dtype is torch.float32 for leaf in found)
        dtype = torch.float32 if wide else torch.get_autocast_dtype("cpu")
        with below_autocast():
            placed, named = casts.cast_all(args, kwargs, dtype)
            return operation(*placed, **named)

    names = [argument.name for argument in operation._schema.arguments]
    keyword_only = {argument.name: argument.kwarg_only for argument in operation._schema.arguments}
    kernels = {
        "lower": lower,
        "float32": float32,
        "float32 by dtype": by_dtype,
        "float32 by overload": by_overload,
        "promote": promote,
    }
    return kernels[policy]


def _all_arguments(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """A call's arguments by position, defaults filled in."""
    schema = operation._schema.arguments
    given = dict(zip((argument.name for argument in schema), args, strict=False)) | kwargs
    return [given.get(argument.name, argument.default_value) for argument in schema]


def _enter_state(stack: ExitStack, casts: Casts) -> None:
    """Keep autocast's states on the CPU and on CUDA equal, and start with CUDA's default dtype."""
    cuda_dtype = torch.get_autocast_dtype("cuda")
    for device in ("cpu", "cuda"):
        stack.callback(torch.set_autocast_dtype, device, torch.get_autocast_dtype(device))
        stack.callback(torch.set_autocast_enabled, device, torch.is_autocast_enabled(device))
    set_dtype, set_enabled, clear = torch.set_autocast_dtype, torch.set_autocast_enabled, torch.clear_autocast_cache
    set_dtype("cpu", cuda_dtype)

    def both_dtypes(device: Any, dtype: Any = None) -> None:
        for known in ("cpu", "cuda") if device in ("cpu", "cuda") else (device,):
            set_dtype(known, dtype)

    def both_enabled(device: Any, enabled: bool | None = None) -> None:
        if enabled is None:  # the older signature, only for CUDA
            device, enabled = "cuda", device
        for known in ("cpu", "cuda") if device in ("cpu", "cuda") else (device,):
            set_enabled(known, enabled)

    def clear_both() -> None:
        clear()
        casts.clear()

    original_init = autocast_mode.autocast.__init__
    original_cast = vars(autocast_mode)["_cast"]

    def init(
        self: Any, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        cuda = device_type == "cuda"
        original_init(self, device_type, dtype=dtype, enabled=enabled and not cuda, cache_enabled=cache_enabled)
        if cuda:
            self._enabled = enabled

    def cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return original_cast(value, "cpu" if device_type == "cuda" else device_type, dtype)

    for owner, name, value in (
        (torch, "set_autocast_dtype", both_dtypes),
        (torch, "set_autocast_enabled", both_enabled),
        (torch, "set_autocast_gpu_dtype", lambda dtype: both_dtypes("cuda", dtype)),
        (torch, "set_autocast_cpu_dtype", lambda dtype: both_dtypes("cpu", dtype)),
        (torch, "set_autocast_cpu_enabled", lambda enabled: both_enabled("cpu", enabled)),
        (torch, "clear_autocast_cache", clear_both),
        (torch.cuda, "is_bf16_supported", lambda *args, **kwargs: True),
        (autocast_mode.autocast, "__init__", init),
        (autocast_mode, "_cast", cast),
    ):
        stack.enter_context(patched(owner, name, value))
