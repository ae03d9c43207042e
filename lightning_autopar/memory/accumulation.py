"""What autograd writes in place, and does not while a mode looks on. Knows torch's autograd; no ledger, no module."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

aten = torch.ops.aten

#: Operations of autograd's backward formulas on a tensor that the formula has just made: the one that a mode sees, and the one that runs
#: where no mode looks on, which changes that tensor.
_INTO_OWN = {
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.index_add.default: aten.index_add_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.masked_scatter.default: aten.masked_scatter_.default,
    aten.put.default: aten.put_.default,
}
#: The same of single formulas, where others' are out of place for real tensors, too.
_INTO_OWN_BY_NODE = {
    "BinaryCrossEntropyWithLogitsBackward0": {aten.sub.Tensor: aten.sub_.Tensor, aten.mul.Tensor: aten.mul_.Tensor},
    "Atan2Backward0": {aten.masked_fill.Scalar: aten.masked_fill_.Scalar},
}
#: Every operation that :func:`in_place` may answer another for.
WRITES = frozenset({aten.add.Tensor, *_INTO_OWN, *(function for functions in _INTO_OWN_BY_NODE.values() for function in functions)})


def in_place(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], node: Any, *, made_by_it: bool) -> Any:
    """The operation that would have run in backward if no mode had looked on; the same one where there is no other.

    Any mode makes tensors "subclass-like" (``aten/src/ATen/TensorSubclassLikeUtils.h``), for which formulas
    (``torch/csrc/autograd/FunctionsManual.cpp``) and sums of gradients make a new tensor where otherwise they change one of their own.

    Args:
        function: the operation.
        args: its arguments.
        kwargs: its keyword arguments.
        node: autograd's node that runs, or has just run.
        made_by_it: whether that node has made the first argument.
    """
    if function is aten.add.Tensor:
        return aten.add_.Tensor if adds_in_place(function, args, kwargs, node, made_by_it=made_by_it) else function
    if not made_by_it or torch.is_grad_enabled() or isinstance(node, BackwardCFunction):
        return function
    return _INTO_OWN.get(function) or _INTO_OWN_BY_NODE.get(node.name(), {}).get(function, function)


def adds_in_place(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], node: Any, *, made_by_it: bool) -> bool:
    """Whether an operation in backward would have been in place if no mode had looked on: two gradients that meet at one node.

    As ``accumulate`` and ``can_accumulate_inplace`` in torch's ``torch/csrc/autograd/input_buffer.cpp``: the sum goes into the gradient
    that came first if autograd alone holds it, and it is dense. Any mode makes tensors "subclass-like" there, and a third one is made.

    Args:
        function: the operation.
        args: its arguments.
        kwargs: its keyword arguments.
        node: autograd's node that runs, or has just run.
        made_by_it: whether that node has made the first operand. Then the sum is a step of the node's own formula, unless two of its
            outputs go to one place (``x * x``).
    """
    if function is not aten.add.Tensor or kwargs or len(args) != 2 or torch.is_grad_enabled() or isinstance(node, BackwardCFunction):
        return False
    first, second = args
    if made_by_it and len(set(node.next_functions)) == len(node.next_functions):
        return False
    if not isinstance(second, Tensor) or first.shape != second.shape or first.dtype is not second.dtype:
        return False
    if first.layout is not torch.strided or second.layout is not torch.strided:
        return False
    return _references(first) == references_of_one_holder() and _is_dense(first)


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements lie side by side, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _references(tensor: Tensor) -> tuple[int, int]:
    """How often a tensor and its storage are held."""
    return int(tensor._use_count()), int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))  # type: ignore[attr-defined]


class _Watch(TorchDispatchMode):
    """Remembers the references to the first operand of the last sum."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = (0, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.add.Tensor:
            self.found = _references(args[0])
        return func(*args, **kwargs or {})


@functools.cache
def references_of_one_holder() -> tuple[int, int]:
    """The counts where autograd alone holds a gradient: those that the call itself adds depend on the version of torch.

    Found out by a tiny backward pass; so not while an operation is dispatched, nor at import, as a process that forks later must not have
    run autograd before.
    """
    with _disable_current_modes(), torch.enable_grad(), _Watch() as watch:
        shared = torch.ones(2, requires_grad=True) * 2
        torch.autograd.backward([shared * 3, shared * 5], [torch.ones(2), torch.ones(2)])
    found: tuple[int, int] = watch.found
    return found
