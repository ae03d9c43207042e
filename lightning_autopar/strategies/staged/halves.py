"""Whether a stage's backward can run in two halves, as a zero-bubble schedule has it: the inputs' gradients first, the parameters' later.

The second half starts at the operations where a parameter's path meets that of the stage's inputs (torch 2.13, ``_backward.py``,
``get_param_groups``): parameters whose paths never meet one are left without a gradient, silently. Where a parameter's paths meet theirs in
several blocks (T5's position bias), all between those blocks would run backward again, which other parameters need, too. Operations in
Python (``torch.autograd.Function``) may not run twice, and views can't be detached, as torch does between the halves. Knows autograd's
graph alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.distributed.pipelining._backward import (
    _get_grad_fn_or_grad_acc,
    construct_reverse_graph,
    get_param_groups,
    reverse_closure,
)


def splittable(outputs: Sequence[Tensor], inputs: Sequence[Any], parameters: Iterable[nn.Parameter]) -> bool:
    """Whether torch's halves find every parameter that the whole backward would reach, and run no operation twice.

    Args:
        outputs: of the stage, or its loss.
        inputs: what it received.
        parameters: the stage's.
    """
    outputs = [output for output in outputs if output.requires_grad]
    if any(output._is_view() for output in outputs):
        return False
    roots = _nodes(outputs)
    reverse = construct_reverse_graph(roots)
    if any(isinstance(node, BackwardCFunction) for node in (*roots, *reverse)):
        return False
    starts = _nodes(tensor for tensor in inputs if isinstance(tensor, Tensor) and tensor.requires_grad)
    weights = _nodes(parameter for parameter in parameters if parameter.requires_grad)
    reached = [weight for weight in weights if weight in reverse]  # torch's search makes keys of the others
    groups = get_param_groups(starts, reached, reverse)
    found: set[Any] = set().union(*(group["params"] for group in groups))
    return _apart(groups, starts, reverse) and all(weight in found for weight in reached) and not any(start in roots for start in starts)


def _apart(groups: Sequence[dict[str, Any]], starts: list[Any], reverse: Any) -> bool:
    """Whether no operation is run by the second half of two groups of parameters."""
    ahead, _ = reverse_closure(starts, set(), reverse)
    seen: set[Any] = set()
    for group in groups:
        own = _between(group, ahead, reverse)
        if seen & own:
            return False
        seen |= own
    return True


def _between(group: dict[str, Any], ahead: set[Any], reverse: Any) -> set[Any]:
    """The operations from where a group's paths meet the inputs' to its parameters.

    Where they meet in one place there is no way but the parameters' own; else there may be others, over what lies between the places.
    """
    parameters, meeting = list(group["params"]), set(group["intermediates"])
    if len(meeting) == 1:
        return reverse_closure(parameters, ahead, reverse)[0] | meeting
    above, _ = reverse_closure(parameters, set(), reverse)
    below, waiting = set(meeting), list(meeting)
    while waiting:
        following = {node for node, _ in waiting.pop().next_functions if node is not None and node not in below}
        below |= following
        waiting += following
    return above & below


def _nodes(tensors: Iterable[Tensor]) -> list[Any]:
    """Where each tensor's gradient arrives."""
    return [_get_grad_fn_or_grad_acc(tensor) for tensor in tensors]
