"""Autograd functions of the user's own whose backward isn't linear in the gradient that comes in.

Engines add up the gradients of a batch's parts. That gives the whole batch's gradient because torch's own backward formulas are linear. A
function that clamps the gradient of a parameter, or passes it on by its sign, sees a part's gradient and not their sum. Numbers drawn at
random show it: at the first weights, or in a gradient that the optimizer scales anew, the difference may be too small to see.

Knows autograd's graph; nothing of modules, batches or engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_autopar.exact.random import generator_states as rng
from lightning_autopar.exact.step.users_backward import nodes_of, parameters_behind

#: The function and the shapes of the gradients that come in: without the batch's samples among them, a part has those of the whole batch.
Signature = tuple[type, tuple[tuple[int, ...], ...]]
#: A relative difference that isn't rounding.
_EQUAL = 1e-4
#: How large gradients are tried: a function may clamp only those that training seldom has.
_SIZES = (1.0, 1e3)


def own_functions(tensors: Iterable[Tensor | None], since: int = 0) -> list[Any]:
    """The nodes of the tensors' graph that belong to a function written in Python, our own left out.

    Args:
        since: the first number of a node; those with smaller ones are older.
    """
    nodes = nodes_of([tensor.grad_fn for tensor in tensors if tensor is not None])
    found = [node for node in nodes if isinstance(node, torch.autograd.function.BackwardCFunction) and node._sequence_nr() >= since]
    return [node for node in found if not _function(node).__module__.startswith("lightning_autopar.")]


def next_node() -> int:
    """The number of a node of autograd's graph that is made now; later ones have larger numbers."""
    with torch.enable_grad():
        node: Any = torch.zeros((), requires_grad=True).clone().grad_fn
    return int(node._sequence_nr())


def signature(node: Any) -> Signature:
    """What a node of the whole batch's graph and the same one of a part's have in common, if it isn't over samples."""
    return _function(node), tuple(tuple(each.shape) for each in node._input_metadata)


def name_of(node: Any) -> str:
    """The function that a node belongs to, with its module."""
    function = _function(node)
    return f"{function.__module__}.{function.__qualname__}"


def not_linear(nodes: Sequence[Any], names: Mapping[int, str]) -> tuple[float, str]:
    """By how much the parts' gradients may miss the whole one's, relative to it, at the first of these nodes whose function isn't linear,
    and a sentence on that function; 0 if all are linear. Their graph must not have been freed.

    Args:
        names: of parameters, by id.

    Raises:
        Exception: what a function's backward raises.
    """
    state = rng.capture({})
    try:
        for node in nodes:
            missed = max(_missed(node, size, state) for size in _SIZES)
            if missed > _EQUAL:
                return missed, _sentence(node, names)
        return 0.0, ""
    finally:
        rng.restore(state, {})


def _missed(node: Any, size: float, state: rng.RngState) -> float:
    """By how much the gradient that goes out for a sum differs from the sum of those for its terms, at most."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> list[Tensor | None]:
        return [_drawn(each, size, generator) for each in node._input_metadata]

    def out(given: list[Tensor | None]) -> list[Tensor | None]:
        rng.restore(state, {})
        found = node.apply(*(None if each is None else each.clone() for each in given))
        return list(found) if isinstance(found, tuple) else [found]

    one, other = draw(), draw()
    both = [None if left is None or right is None else left + right for left, right in zip(one, other, strict=True)]
    with torch.no_grad():
        triples = zip(out(one), out(other), out(both), strict=True)
    missed = [0.0]
    for left, right, whole in triples:
        if left is None or right is None or whole is None or not whole.numel():
            continue
        scale = float((left.abs() + right.abs()).max())
        distance = float((whole - left - right).abs().max())
        missed.append(distance / scale if scale else distance)
    return max(missed)


def _drawn(metadata: Any, size: float, generator: torch.Generator) -> Tensor | None:
    dtype = metadata.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return None
    return size * torch.randn(tuple(metadata.shape), generator=generator, dtype=torch.float64).to(dtype)


def _function(node: Any) -> type:
    return type(node)._forward_cls  # type: ignore[no-any-return]


def _sentence(node: Any, names: Mapping[int, str]) -> str:
    behind = next((names[id(each)] for each in parameters_behind([node]) if id(each) in names), "")
    of = f" of {behind!r}" if behind else ""
    return (
        f"its gradient isn't the sum of its parts' gradients: the backward of {name_of(node)}, which makes that{of}, "
        "isn't linear in the gradient that it gets"
    )
