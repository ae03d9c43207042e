"""Whether a tensor's size depends on the batch, told from what it is made of. Knows torch's tensors; keeps no account of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import _get_sequence_nr
from torch.autograd.function import BackwardCFunction

#: Tensors smaller than this can't be told apart by their size.
_TELLING_ELEMENTS = 1024

_current_node: Callable[[], Any] = torch._C._current_autograd_node

_autograd: Any = torch._C._autograd
_saving_hooks: Callable[[bool], Any] = _autograd._top_saved_tensors_default_hooks


class Input(NamedTuple):
    """A tensor that an operation reads.

    Args:
        scaled: whether its size depends on the batch.
        storage_bytes: of its storage.
        storages: numbers of the storages that hold it, where they are known.
    """

    tensor: Tensor
    scaled: bool
    storage_bytes: int
    storages: tuple[int, ...] = ()

    @property
    def expanded(self) -> bool:
        """Whether it has more elements than its storage."""
        return self.tensor.numel() * self.tensor.element_size() > self.storage_bytes


class Dependence:
    """Follows the dependence on the batch from tensor to tensor. In forward, a tensor made from one that depends on the batch depends on
    it, too; a tensor made only from parameters, buffers and constants doesn't, unless it has gained a dimension of the batch's length
    (``cls_token.expand(batch, …)``, ``torch.zeros(batch, …)``).

    In backward, a gradient depends on the batch if its tensor does. Autograd tells which operation's backward runs, and so the sizes of the
    inputs that didn't depend on the batch. If both kinds of input had the same number of elements (a square weight, and as many tokens),
    this decides: the gradient of one factor is made from the other.

    Args:
        batch_size: samples in the batch; 0 where it has none.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._lengths = {batch_size} if batch_size else set()
        self._nodes: dict[int, tuple[set[int], set[int]]] = {}
        self._made = -1
        self._in_function = False

    def add_batch(self, shape: Sequence[int]) -> None:
        """A tensor of the batch has this shape: dimensions that come from flattening it belong to the batch, too."""
        if self._batch_size > 1 and self._batch_size in shape:
            first = shape.index(self._batch_size)
            self._lengths |= set(accumulate(shape[first:], mul))

    def begin_step(self) -> None:
        """Another step: autograd's nodes are new."""
        self._nodes.clear()
        self._made, self._in_function = _get_sequence_nr(), False

    def maker(self) -> int | None:
        """The number of autograd's node for the operation that runs now; None where it has none, as for masks. A node is made just before
        its operation runs. A user's ``autograd.Function`` has one node for all operations of its forward, in which gradients are off.
        """
        number, enabled = _get_sequence_nr(), torch.is_grad_enabled()
        if number != self._made:
            self._made, self._in_function = number, not enabled
        elif enabled or not self._in_function:
            self._in_function = False
            return None
        return number - 1

    def note(self, node: int, inputs: Sequence[Input], output: Tensor | None) -> None:
        """Remember the sizes of a forward operation's inputs for its backward.

        Args:
            node: number of autograd's node for it.
            output: of a view, else None.
        """
        fixed = {
            item.tensor.numel() for item in inputs if not item.scaled and not item.expanded and item.tensor.numel() >= _TELLING_ELEMENTS
        }
        if fixed and (output is None or output.numel() not in fixed):
            known_fixed, known_scaled = self._nodes.setdefault(node, (set(), set()))
            known_fixed |= fixed
            known_scaled |= {item.tensor.numel() for item in inputs if item.scaled}

    def of_forward(self, inputs: Sequence[Input], output: Tensor) -> bool:
        """Whether what a forward operation has made depends on the batch."""
        if any(item.scaled for item in inputs):
            return True
        if self._batch_size == 1:
            return output.dim() > 0 and output.shape[0] == 1 and output.numel() > 1 and not inputs
        had = {length for item in inputs if not item.expanded for length in item.tensor.shape}
        # A length that occurs twice isn't the batch's: masks are square.
        shape = list(output.shape)
        return any(length in self._lengths and length not in had and shape.count(length) == 1 for length in shape)

    def of_backward(self, node: int, inputs: Sequence[Input], output: Tensor, place: int) -> bool:
        """Whether what a backward operation has made depends on the batch.

        Args:
            node: number of autograd's node that runs.
            place: which of the operation's outputs that is.
        """
        if not any(item.scaled for item in inputs):
            return bool(not inputs and self.of_forward(inputs, output))
        fixed, scaled = self._nodes.get(node, _NONE)
        elements = output.numel()
        if elements not in fixed:
            return True
        if elements not in scaled:
            return False
        # Convolutions and normalisations give the input's gradient first.
        return place == 0 and any(not item.scaled and item.tensor.numel() in fixed for item in inputs)


def recomputes() -> bool:
    """Whether a forward runs again inside of backward (``torch.utils.checkpoint``), so that sizes follow from inputs as in forward.

    Gradients are on then, and what is saved passes through hooks; or a node of Python runs it, where checkpointing is reentrant.
    """
    return torch.is_grad_enabled() and (_saving_hooks(False) is not None or isinstance(_current_node(), BackwardCFunction))


def may_hook_saving() -> bool:
    """Whether hooks may be put on what is saved for backward: there are no others, and they aren't disabled."""
    return _saving_hooks(False) is None and bool(_autograd._saved_tensors_hooks_is_enabled())


_NONE: tuple[set[int], set[int]] = (set(), set())
