"""CUDA's recurrent layers, for tensors on a CPU. Knows torch's operations; nothing of modules or memory.

``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` call ``torch._VF``, where a CPU would run cell by cell; here they call ``_cudnn_rnn``, as on CUDA
(``aten/src/ATen/native/cudnn/RNN.cpp``), whose kernels for fake tensors are completed: torch's keep nothing for backward, and have none.
Where cuDNN is off, and for single cells, torch's own fused cells run (``RNN.cpp``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import _VF, Tensor
from torch.library import Library

from lightning_autopar._temporary import patched
from lightning_autopar.memory.fakes.cuda_autocast import Casts, below_autocast, eligible, temporary_library

aten = torch.ops.aten

#: cuDNN's modes (``cudnnRNNMode_t``).
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
#: A layer keeps so many values for each position, in multiples of the hidden size, see :func:`reserve_elements`.
_KEPT = {0: 1, 1: 1, 2: 5, 3: 6}
_NOTE = "recurrent layers run by cuDNN"
_NATIVE = "cuDNN is off: recurrent layers run by torch's fused cells"
_COMPOSITE = "CompositeImplicitAutograd"


def reserve_bytes(positions: int, hidden: int, layers: int, directions: int, mode: int, element_bytes: int, dropout: float = 0.0) -> int:
    """Bytes that cuDNN's training keeps for backward, beside inputs and outputs (``cudnnGetRNNTempSpaceSizes`` asks the library).

    For each layer: an LSTM's four gates and cells, a GRU's three gates and three products, a plain layer's output; and the outputs passed
    between layers, with dropout also a bit for each. NVIDIA publishes no formula: this is what was kept on an H200 by 15 shapes of each
    kind (``benchmarks/results/kernels_gpu.json``), to 256 bytes, and what was printed for four layers of 320
    (https://github.com/pytorch/pytorch/issues/2895: LSTM 736,000,000 bytes, GRU 864,000,000).

    Args:
        positions: batch times steps; for packed sequences the sum of their lengths.
        hidden: width of the state.
        layers: stacked layers.
        directions: 2 for bidirectional ones.
        mode: cuDNN's number of the kind of layer.
        element_bytes: of an element of the input.
        dropout: between layers.
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
