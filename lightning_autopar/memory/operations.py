"""What an operation costs beside memory: FLOPs, bytes moved, random draws. Knows torch's operations; no ledger, no module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


class Cost:
    """FLOPs and bytes moved of a part's forward and backward."""

    __slots__ = ("backward_flops", "backward_moved_bytes", "flops", "moved_bytes")

    def __init__(self) -> None:
        self.flops = self.moved_bytes = self.backward_flops = self.backward_moved_bytes = 0


class Operation:
    """What is known of an operation, whatever it is called with.

    Attributes:
        name: as in ``aten.mm``.
        is_view: its outputs share storage with its inputs, and it moves nothing.
        moves: whether it reads its inputs and writes its outputs.
        picks: whether it reads no more of its first input than it writes.
        flops: (args, kwargs, output) → FLOPs; None where it has none worth counting.
        draws: whether it may draw random numbers.
    """

    __slots__ = ("_function", "draws", "flops", "is_view", "moves", "name", "picks")

    def __init__(self, function: Any) -> None:
        packet = getattr(function, "_overloadpacket", None)
        formula = _FORMULAS.get(packet) or flop_registry.get(packet)
        self._function = function
        self.name = str(packet)
        self.is_view = bool(getattr(function, "is_view", False)) and packet is not aten.lift_fresh
        self.moves = not self.is_view and packet not in _STILL
        self.picks = packet in _PICKS
        self.flops: Callable[[Any, Any, Any], int] | None = None
        if formula is not None:
            self.flops = lambda args, kwargs, output: int(formula(*args, **kwargs, out_val=output))
        self.draws = torch.Tag.nondeterministic_seeded in function.tags

    def has_drawn(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call has drawn random numbers: dropout of probability zero, or out of training, draws none."""
        if not self.draws:
            return False
        schema = self._function._schema
        values = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        if schema.name in ("aten::bernoulli_", "aten::bernoulli"):
            return values.get("p") not in (0, 0.0, 1, 1.0)
        if "attention" in schema.name:
            return bool(values.get("dropout_p", 0.0))
        return values.get("train", values.get("training", True)) is not False


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
    """The scores again, and the gradients of weights, values, keys and queries."""
    batch, heads, length, width = query.shape
    return int(2 * batch * heads * length * key.shape[2] * (3 * width + 2 * value.shape[3]))


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
#: Operations that read a part of their first input.
_PICKS = {aten.embedding, aten.index_select, aten.index, aten.gather, aten.take}
