"""What oneDNN's LSTM takes and keeps on a CPU. Knows shapes; no ledger, no module.

The layout of the workspace and of the scratchpad is that of oneDNN's ``src/cpu/rnn/rnn_utils.cpp`` (``set_offsets``) and ``.hpp``
(``set_workspace_sizes``): buffers on pages of 4096 bytes, rows of whole cache lines that aren't multiples of 256 elements. To the byte
for torch 2.13's.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lightning_autopar.memory.scratch_convolution import Scratch

aten = torch.ops.aten

_PAGE_BYTES = 4096
_ELEMENT_BYTES = 4
_LINE_ELEMENTS = 64 // _ELEMENT_BYTES


def recurrent_workspace(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, tensor: Tensor) -> int | None:
    """What a layer keeps for backward: true bytes of the last output of ``aten.mkldnn_rnn_layer``, whose fake is empty."""
    if tensor is not output[-1] or tensor.untyped_storage().nbytes() or not _named(args, kwargs).get("train", True):
        return None
    steps, rows, width = (int(size) for size in args[0].shape)
    state = int(output[1].shape[-1])
    row = _row(max(width, state))
    states = 2 * (steps + 1) * rows
    sizes = (
        steps * rows * _row(4 * state),  # gates
        steps * rows * _row(state),
        states * row,  # states of layers
        states * state,  # cells
        states * row,  # gradients of both kinds of states
        states * row,
        states * state,  # gradients of cells
    )
    return _paged(sizes)


def recurrent_forward(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Scratch:
    """Of ``aten.mkldnn_rnn_layer``: both weights packed, the sum of the biases, the scratchpad."""
    steps, rows, width = (int(size) for size in args[0].shape)
    state = int(args[2].shape[1])
    packed = (width + state) * _row(4 * state)
    return Scratch(_scratchpad(steps, rows, state), (packed + 4 * state) * _ELEMENT_BYTES)


def recurrent_backward(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Scratch:
    """Of ``aten.mkldnn_rnn_layer_backward``: weights packed the other way, their gradients, the scratchpad, copies of gradients."""
    steps, rows, width = (int(size) for size in args[0].shape)
    state = int(args[2].shape[1])
    named = _named(args, kwargs, aten.mkldnn_rnn_layer_backward.default)
    copied = 0
    for name in ("grad_output", "grad_hy", "grad_cy"):
        gradient = named.get(name)
        if gradient is None:
            copied += rows * state * _ELEMENT_BYTES  # zeros
        elif not gradient.is_contiguous():
            copied += gradient.numel() * _ELEMENT_BYTES
    packed = 4 * state * (_row(width) + _row(state)) + (width + state) * _row(4 * state)
    return Scratch(_scratchpad(steps, rows, state) + copied, (packed + 4 * state) * _ELEMENT_BYTES)


def _scratchpad(steps: int, rows: int, state: int) -> int:
    """Gates of all steps; of one step states and their gradients."""
    return _paged((steps * rows * _row(4 * state), rows * _row(state), rows * _row(state))) + _PAGE_BYTES


def _paged(elements: tuple[int, ...]) -> int:
    """Bytes of buffers of so many elements one after the other, each on a page of its own."""
    return list(accumulate(elements, lambda offset, size: -(-(offset + size * _ELEMENT_BYTES) // _PAGE_BYTES) * _PAGE_BYTES, initial=0))[-1]


def _row(elements: int) -> int:
    """The leading dimension in oneDNN: whole cache lines, but no multiple of 256 elements (``get_good_ld``)."""
    whole = -(-elements // _LINE_ELEMENTS) * _LINE_ELEMENTS
    return whole + _LINE_ELEMENTS if whole % 256 == 0 else whole


def _named(args: tuple[Any, ...], kwargs: dict[str, Any], function: Any = aten.mkldnn_rnn_layer.default) -> dict[str, Any]:
    return dict(zip((argument.name for argument in function._schema.arguments), args, strict=False)) | kwargs
