"""Treats CPU tensors as CUDA would treat its own, down to the attention kernel that CUDA would pick. Knows torch; nothing of modules or
ledgers.

A step is traced on fake CPU tensors, as fake CUDA tensors need a build of torch for CUDA. What a step keeps depends on the kernels:
autocast's casts, attention, dropout, normalisation, recurrent layers, optimizers. Each choice here follows torch's own sources, named where
it is made, and those that a step met are reported in sentences. Most of it happens in torch's dispatcher, by kernels that are registered
for a while, so that it holds however an operation is called: by user code under any name, from C++, and inside backward, where function
modes are off.

The attention kernel is picked as in ``aten/src/ATen/native/transformers/attention.cpp`` and ``cuda/sdp_utils.cpp`` (torch 2.13), for GPUs
from Ampere on. Older ones have no flash kernel and take the memory-efficient one, which keeps the same. On Hopper and data-centre Blackwell
cuDNN's comes first from cuDNN 9.15.1 on (``check_prefer_cudnn_attention``), which torch's wheels have from 2.10 on.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import _VF, Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.library import Library
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from lightning_autopar._temporary import patched
from lightning_autopar.memory.fakes.composites import additive, attention_unfused
from lightning_autopar.memory.fakes.cuda_autocast import Casts, below_autocast, cuda_autocast, eligible, temporary_library

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)
_MATH, _FLASH, _EFFICIENT, _CUDNN = (int(getattr(SDPBackend, name).value) for name in (
    "MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION",
))  # fmt: skip
#: torch's own order, where the user hasn't set one (``at::Context::sdp_priority_order``).
_ORDER = (_FLASH, _EFFICIENT, _MATH, _CUDNN)
_FLASH_HEAD = 256
#: Of cuDNN, on GPUs on which it comes last.
_CUDNN_HEAD = 128
_NAMES = {
    _MATH: "attention runs unfused (no fused kernel takes it), and keeps its weights",
    _FLASH: "attention runs by the flash kernel (of GPUs from Ampere on)",
    _EFFICIENT: "attention runs by the memory-efficient kernel",
    _CUDNN: "attention runs by cuDNN's kernel",
}


def attention(
    notes: dict[str, None],
    cudnn_head: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` with the kernel that CUDA would choose.

    Args:
        notes: gets a sentence that names the kernel.
        cudnn_head: the widest head of cuDNN's kernel, on a GPU on which torch asks it first; 0 where it comes last.
        query: (batch, heads, length, width); any other number of dimensions goes the unfused way, as on CUDA.
        key: (batch, key heads, key length, width).
        value: (batch, key heads, key length, value width).
        attn_mask: boolean, or to be added; broadcast to (batch, heads, length, key length).
        enable_gqa: whether a key's head may serve several heads of the query.
    """
    kernel = _choose(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, cudnn_head)
    notes[_NAMES[kernel]] = None
    wants_gradient = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    output: Tensor
    if kernel == _FLASH:
        width = query.size(-1)
        scale = width**-0.5 if scale is None else scale
        padded = [F.pad(tensor, (0, -width % 8)) if width % 8 else tensor for tensor in (query, key, value)]
        output = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0]
        return output[..., :width] if width % 8 else output
    if kernel == _CUDNN:
        mask = additive(attn_mask, query.dtype)
        return aten._scaled_dot_product_cudnn_attention(  # type: ignore[no-any-return]
            query, key, value, mask, wants_gradient, dropout_p, is_causal, False, scale=scale
        )[0]
    mask = additive(attn_mask, query.dtype)
    if kernel == _EFFICIENT:
        if mask is not None:
            mask = _aligned(mask).expand(query.size(0), query.size(1), query.size(2), key.size(2))
        return aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
            query, key, value, mask, wants_gradient, dropout_p, is_causal, scale=scale
        )[0]
    return attention_unfused(query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]


def _choose(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, gqa: bool, cudnn_head: int
) -> int:
    """The first kernel in torch's order that takes these (``sdp::select_sdp_backend``)."""
    allowed = {
        _FLASH: torch.backends.cuda.flash_sdp_enabled() and _flash(query, key, value, mask, causal, gqa),
        _EFFICIENT: torch.backends.cuda.mem_efficient_sdp_enabled() and _efficient(query, key, value, mask),
        _CUDNN: torch.backends.cuda.cudnn_sdp_enabled() and _cudnn(query, key, value, mask, dropout, gqa, cudnn_head or _CUDNN_HEAD),
        _MATH: torch.backends.cuda.math_sdp_enabled(),
    }
    order = tuple(getattr(torch._C, "_get_sdp_priority_order", lambda: _ORDER)())
    if cudnn_head and order[: len(_ORDER)] == _ORDER:  # where the user hasn't set another order
        order = (_CUDNN, *order)
    return next((kernel for kernel in order if allowed.get(kernel)), _MATH)


def _dense(query: Tensor, key: Tensor, value: Tensor, *, gqa: bool) -> bool:
    """What every fused kernel needs: four dimensions, one batch size, matching heads, nothing empty, rows without gaps."""
    tensors = (query, key, value)
    if any(tensor.is_nested or tensor.dim() != 4 or not tensor.numel() for tensor in tensors):
        return False
    heads = [tensor.size(1) for tensor in tensors]
    match = heads[0] == heads[1] == heads[2] or (gqa and heads[1] == heads[2] and heads[0] % heads[1] == 0)
    rows = all(tensor.stride(-1) == 1 or tensor.size(-1) == 1 for tensor in tensors)
    return match and rows and query.size(0) == key.size(0) == value.size(0) and query.dtype == key.dtype == value.dtype


def _flash(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, gqa: bool) -> bool:
    """``sdp::can_use_flash_attention``. Not checked: backward for widths over 192 on compute capabilities 8.6, 8.9 and 12."""
    if mask is not None or query.dtype not in _HALF or not _dense(query, key, value, gqa=gqa):
        return False
    square = query.size(2) == key.size(2)
    return (square or not causal) and query.size(3) == key.size(3) == value.size(3) <= _FLASH_HEAD


def _efficient(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """``sdp::can_use_mem_efficient_attention``; without grouped heads, which it takes from torch 2.14 on (pytorch#191085)."""
    if query.dtype not in (*_HALF, torch.float32) or not _dense(query, key, value, gqa=False) or _has_gaps(mask):
        return False
    alignment = 8 if query.dtype in _HALF else 4
    return query.size(3) == key.size(3) and query.size(3) % alignment == 0 and value.size(3) % alignment == 0


def _cudnn(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, gqa: bool, most: int) -> bool:
    """``sdp::can_use_cudnn_attention``: no mask that learns, and a dropout of whole sixteenths."""
    if query.dtype not in _HALF or not _dense(query, key, value, gqa=gqa) or (dropout * 16) % 1:
        return False
    if _has_gaps(mask) or (mask is not None and mask.requires_grad):
        return False
    return all(tensor.size(3) <= most and tensor.size(3) % 8 == 0 for tensor in (query, value)) and key.size(2) > 1


def _has_gaps(mask: Tensor | None) -> bool:
    """Whether a row's entries don't lie one after the other (``check_last_dim_stride_equals_1_dense``): T5's bias has its heads there, and
    an expanded mask the same entry for all.
    """
    return mask is not None and mask.stride(-1) != 1


def _aligned(mask: Tensor) -> Tensor:
    """The mask with rows whose length in memory is a multiple of eight (``preprocess_mask``, ``pad_bias``)."""
    aligned: Any = mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1])
    if aligned:
        return mask
    length = mask.size(-1)
    return F.pad(mask, (0, 8 - length % 8))[..., :length]


_COMPOSITE = "CompositeImplicitAutograd"


@contextmanager
def as_cuda(notes: dict[str, None], *, cudnn_head: int = 0) -> Iterator[None]:
    """While open, operations on CPU tensors save and allocate what they would on CUDA. Only for fake tensors: few of CUDA's kernels run on
    a CPU. It affects the whole process, and must not be nested.

    Args:
        notes: gets a sentence for every choice that was met.
        cudnn_head: the widest head of cuDNN's attention, where that is asked first; 0 where it comes last.
    """
    casts = Casts()
    with ExitStack() as stack:
        stack.enter_context(cuda_autocast(casts, notes))
        library = stack.enter_context(temporary_library())
        library.impl("scaled_dot_product_attention", lambda *args, **kwargs: attention(notes, cudnn_head, *args, **kwargs), _COMPOSITE)
        library.impl("dropout", _dropout(notes), _COMPOSITE)
        library.impl("softmax.int", _softmax(aten._softmax.default), _COMPOSITE)
        library.impl("log_softmax.int", _softmax(aten._log_softmax.default), _COMPOSITE)
        if hasattr(aten, "_fused_rms_norm_backward"):
            # On CUDA the operation has its own kernel and derivative, and saves input, weight and one number a row; on a CPU it is a
            # composite that saves several tensors of the input's size (aten/src/ATen/native/layer_norm.cpp). Fakes never get here.
            library.impl("_fused_rms_norm", _rms_norm, "CPU")
        stack.enter_context(cuda_rnn(casts, notes))
        _enter_optimizers(stack, notes)
        yield


def _dropout(notes: dict[str, None]) -> Any:
    """``at::dropout`` with the fused kernel of CUDA: a boolean mask (aten/src/ATen/native/Dropout.cpp, ``is_fused_kernel_acceptable``)."""

    def dropout(input: Tensor, p: float, train: bool) -> Tensor:
        if not train or p == 0 or not input.numel():
            return input
        if p == 1:
            return input * torch.zeros((), dtype=input.dtype, device=input.device)
        notes["dropout keeps a boolean mask"] = None
        output: Tensor = aten.native_dropout(input, p, True)[0]
        return output

    return dropout


def _softmax(kernel: Any) -> Any:
    """``at::softmax`` and the like to float32: CUDA copies no float16 input for it (aten/src/ATen/native/SoftMax.cpp)."""

    def softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        fused = input.dtype is torch.float16 and dtype is torch.float32
        output: Tensor = kernel(input if fused or dtype is None else input.to(dtype), dim, fused)
        return output

    return softmax


def _rms_norm(input: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    """``aten::_fused_rms_norm`` of real tensors, such as a constant of the step's: the output, and one number a row."""
    dims = list(range(-len(normalized_shape), 0))
    rows = torch.rsqrt(input.pow(2).mean(dims, keepdim=True) + (torch.finfo(input.dtype).eps if eps is None else eps))
    output = input * rows
    return output if weight is None else output * weight, rows


def _enter_optimizers(stack: ExitStack, notes: dict[str, None]) -> None:
    """Make torch's optimizers choose their implementation as on CUDA, also for fake parameters.

    By default they take the foreach implementation where every parameter is a plain tensor on CUDA
    (``torch.optim.optimizer._default_to_fused_or_foreach``), at the cost of temporaries of all parameters' size. What the user asked for
    (``foreach=False``, ``fused=True``) stays.
    """
    optimizer = importlib.import_module("torch.optim.optimizer")
    shared = importlib.import_module("torch.utils._foreach_utils")
    for module in (optimizer, shared):
        stack.enter_context(patched(module, "_foreach_supported_types", [*module._foreach_supported_types, FakeTensor]))
    for name in ("_get_foreach_kernels_supported_devices", "_get_capturable_supported_devices"):
        original = getattr(optimizer, name)

        def with_cpu(*args: Any, _original: Any = original, **kwargs: Any) -> list[str]:
            return [*_original(*args, **kwargs), "cpu"]

        for module in [found for key, found in sys.modules.items() if key.startswith(("torch.optim", "torch.utils._foreach"))]:
            if vars(module).get(name) is original:
                stack.enter_context(patched(module, name, with_cpu))
    choose = optimizer._default_to_fused_or_foreach

    def chosen(*args: Any, **kwargs: Any) -> tuple[bool, bool]:
        fused, foreach = choose(*args, **kwargs)
        if foreach:
            notes["optimizers run over all parameters at once (foreach)"] = None
        return fused, foreach

    for module in [found for key, found in sys.modules.items() if key.startswith("torch.optim")]:
        if vars(module).get("_default_to_fused_or_foreach") is choose:
            stack.enter_context(patched(module, "_default_to_fused_or_foreach", chosen))


# -- recurrent layers --------------------------------------------------------------------------------------------------------------------
# ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` call ``torch._VF``, where a CPU would run cell by cell; here they call ``_cudnn_rnn``, as on CUDA
# (``aten/src/ATen/native/cudnn/RNN.cpp``), whose kernels for fake tensors are completed: torch's keep nothing for backward, and have none.
# Where cuDNN is off, and for single cells, torch's own fused cells run (``RNN.cpp``).

#: cuDNN's modes (``cudnnRNNMode_t``).
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
#: A layer keeps so many values for each position, in multiples of the hidden size, see :func:`reserve_bytes`.
_KEPT = {0: 1, 1: 1, 2: 5, 3: 6}
_NOTE = "recurrent layers run by cuDNN"
_NATIVE = "cuDNN is off: recurrent layers run by torch's fused cells"


def reserve_bytes(positions: int, hidden: int, layers: int, directions: int, mode: int, element_bytes: int, dropout: float = 0.0) -> int:
    """Bytes that cuDNN's training keeps for backward, beside inputs and outputs (``cudnnGetRNNTempSpaceSizes`` asks the library).

    For each layer: an LSTM's four gates and cells, a GRU's three gates and three products, a plain layer's output; and the outputs passed
    between layers, with dropout also a bit for each. NVIDIA publishes no formula: this is what was kept on an H200 by 15 shapes of each
    kind (``benchmarks/results/kernels_gpu.json``), to 256 bytes, and what was printed for four layers of 320
    (https://github.com/pytorch/pytorch/issues/2895: LSTM 736,000,000 bytes, GRU 864,000,000).

    Args:
        positions: batch times steps; for packed sequences the sum of their lengths.
        hidden: width of the state.
        directions: 2 for bidirectional ones.
        mode: cuDNN's number of the kind of layer.
        element_bytes: of an element of the input.
    """
    bits = (layers - 1) * positions * hidden * directions if dropout else 0
    return (layers * _KEPT[mode] + layers - 1) * positions * hidden * directions * element_bytes + bits // 8


@contextmanager
def cuda_rnn(casts: Casts, notes: dict[str, None]) -> Iterator[None]:
    """While open, recurrent layers of CPU tensors run as cuDNN would run them."""
    with ExitStack() as stack:
        library: Library = stack.enter_context(temporary_library())
        library.impl("_cudnn_rnn", _forward_meta, "Meta")
        library.impl("_cudnn_rnn_backward", _backward_meta, "Meta")
        library.impl("_thnn_fused_gru_cell", _gru_cell_meta, "Meta")
        library.impl("_thnn_fused_gru_cell_backward", _gru_cell_backward_meta, "Meta")
        library.impl("lstm_cell", _lstm_cell, _COMPOSITE)
        library.impl("gru_cell", _gru_cell, _COMPOSITE)
        for name in _MODES:
            stack.enter_context(patched(_VF, name, _layer(name, getattr(_VF, name), casts, notes)))
        yield


def _layer(name: str, original: Callable[..., Any], casts: Casts, notes: dict[str, None]) -> Callable[..., Any]:
    def layer(*args: Any) -> Any:
        packed = isinstance(args[3], (list, tuple))
        if packed:
            data, sizes, state, weights, bias, layers, dropout, train, bidirectional = args
            batch_first = False
        else:
            data, state, weights, bias, layers, dropout, train, bidirectional, batch_first = args
            sizes = None
        if not torch.backends.cudnn.enabled:
            notes[_NATIVE] = None
            if packed or name not in _CELLS:
                return original(*args)
            return _unrolled(_CELLS[name], *args)
        notes[_NOTE] = None
        lstm = name == "lstm"
        hidden, cell = state if lstm else (state, None)
        projection = hidden.size(-1) if lstm and cell is not None and hidden.size(-1) != cell.size(-1) else 0
        width = cell.size(-1) if lstm and cell is not None else hidden.size(-1)
        weights = list(weights)
        # The flat buffer of which the module's weights are views; a view of the first one stands for it, as it costs nothing. Modules in
        # bfloat16 have none (``RNNBase.flatten_parameters``): the operation makes and keeps one at each call.
        buffer = None if weights[0].dtype is torch.bfloat16 else weights[0].detach().view(-1)
        if torch.is_autocast_enabled("cpu") and eligible(data):
            dtype = torch.get_autocast_dtype("cpu")
            # New views of a new buffer, made in a way that autograd sees (``_cudnn_rnn_cast_reflatten``).
            data, hidden, cell = (casts.cast(tensor, dtype) for tensor in (data, hidden, cell))
            weights = [weight.to(dtype) for weight in weights]
            buffer = weights[0].detach().view(-1)
        elif sizes is None and not data.is_contiguous():
            data = data.contiguous()
        with below_autocast():
            output, last, last_cell, _, _ = aten._cudnn_rnn(
                data,
                weights,
                (4 if bias else 2) + (1 if projection else 0),
                buffer,
                hidden.contiguous(),
                None if cell is None else cell.contiguous(),
                _MODES[name],
                width,
                projection,
                layers,
                batch_first,
                dropout,
                train,
                bidirectional,
                [] if sizes is None else [1] * sizes.size(0),  # the kernels for fakes don't read them
                None,
            )
        return (output, last, last_cell) if lstm else (output, last)

    return layer


def _unrolled(
    cell: Callable[..., Any], data: Tensor, state: Any, weights: list[Tensor], bias: bool, layers: int, dropout: float, train: bool,
    bidirectional: bool, batch_first: bool,
) -> Any:  # fmt: skip
    """The layers step by step with fused cells (``FullLayer`` and ``apply_layer_stack`` in aten/src/ATen/native/RNN.cpp)."""
    steps = data.transpose(0, 1) if batch_first else data
    directions = 2 if bidirectional else 1
    lstm = isinstance(state, (list, tuple))
    per_cell = len(weights) // (layers * directions)
    finals: list[Any] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            own = [*weights[index * per_cell : (index + 1) * per_cell], None, None][: 5 if per_cell % 2 else 4]
            hidden: Any = [part[index] for part in state] if lstm else state[index]
            made = []
            for step in steps.flip(0) if direction else steps:
                hidden = cell(step, hidden, *own)
                made.append(hidden[0] if lstm else hidden)
            outputs.append(torch.stack(made[::-1] if direction else made))
            finals.append(hidden)
        steps = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout and train and layer < layers - 1:
            steps = torch.dropout(steps, dropout, True)
    output = steps.transpose(0, 1) if batch_first else steps
    if not lstm:
        return output, torch.stack(finals)
    return output, torch.stack([final[0] for final in finals]), torch.stack([final[1] for final in finals])


def _lstm_cell(
    input: Tensor, hx: list[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``at::lstm_cell`` on CUDA: gates by two products, the rest fused."""
    hidden, cell, _ = aten._thnn_fused_lstm_cell(torch.matmul(input, w_ih.t()), torch.matmul(hx[0], w_hh.t()), hx[1], b_ih, b_hh)
    return hidden, cell


def _gru_cell(input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None) -> Tensor:
    """``at::gru_cell`` on CUDA."""
    hidden: Tensor = aten._thnn_fused_gru_cell(torch.matmul(input, w_ih.t()), torch.matmul(hx, w_hh.t()), hx, b_ih, b_hh)[0]
    return hidden


_CELLS: dict[str, Callable[..., Any]] = {"lstm": _lstm_cell, "gru": _gru_cell}


def _gru_cell_meta(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, input_bias: Tensor | None = None, hidden_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Shapes of the state and of the five gates and products kept (``_thnn_fused_gru_cell_cuda``, RNN.cu)."""
    return torch.empty_like(hx), hx.new_empty((hx.size(0), 5 * hx.size(1)))


def _gru_cell_backward_meta(gradient: Tensor, kept: Tensor, has_bias: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    width = gradient.size(1)
    gates = [gradient.new_empty((gradient.size(0), 3 * width)) for _ in range(2)]
    biases = [gradient.new_empty(3 * width) if has_bias else None for _ in range(2)]
    return gates[0], gates[1], torch.empty_like(gradient), biases[0], biases[1]


def _forward_meta(
    input: Tensor, weight: list[Tensor], stride: int, buffer: Tensor | None, hx: Tensor, cx: Tensor | None, mode: int, hidden: int,
    projection: int, layers: int, batch_first: bool, dropout: float, train: bool, bidirectional: bool, sizes: list[int],
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Shapes of the results of ``_cudnn_rnn``: output, last states, reserve and weights."""
    directions = 2 if bidirectional else 1
    width = projection or hidden
    output = input.new_empty((*input.shape[:-1], width * directions))
    batch = hx.size(1)
    last_cell = input.new_empty((layers * directions, batch, hidden)) if cx is not None else input.new_empty(0)
    positions = input.shape[0] if sizes else input.shape[0] * input.shape[1]
    kept = reserve_bytes(positions, hidden, layers, directions, mode, input.element_size(), dropout) if train else 0
    reserve = input.new_empty(kept, dtype=torch.uint8)
    flat = input.new_empty(sum(part.numel() for part in weight)) if buffer is None else buffer
    return output, hx.new_empty(hx.shape), last_cell, reserve, flat


def _backward_meta(
    input: Tensor, weight: list[Tensor], stride: int, buffer: Tensor, hx: Tensor, cx: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Shapes of the gradients of input, states and weights."""
    cell = torch.empty_like(cx) if cx is not None else hx.new_empty(0)
    return torch.empty_like(input), torch.empty_like(hx), cell, [torch.empty_like(part) for part in weight]
