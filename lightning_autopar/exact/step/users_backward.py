"""Backward passes that the user's code begins itself (``loss.backward()``) in manual optimization, past Lightning's ``manual_backward``;
and the closures that it gives to an optimizer there.

Each loss counts by its rank's share of the batch. Where the engine leaves the gradients to this rank, they are averaged over all of them.
Knows autograd and a process group; nothing of engines or trainers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_autopar._temporary import patched
from lightning_autopar.exact.step.gradient_hooks import GradientHooks

#: Called with the parameters to which a backward pass has given gradients.
Done = Callable[[list[Parameter]], None]


@contextmanager
def noticed(weight: Callable[[], float], ours: Callable[[], bool], done: Done, hooks: GradientHooks) -> Iterator[None]:
    """While open, notices backward passes; they are the user's own unless ``ours`` says otherwise.

    Args:
        weight: of a loss now.
        ours: whether the engine runs the backward pass that begins.
        done: called after each of the user's.
        hooks: the user's on parameters, for after that.
    """
    original = torch.autograd.backward

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if ours():
            return original(tensors, *args, **kwargs)
        losses: list[Tensor] = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        reached = parameters_behind(loss.grad_fn for loss in losses)
        if not reached:  # a gradient of something other than the weights
            return original(tensors, *args, **kwargs)
        hooks.begin()
        result = original([weighed(loss, weight()) for loss in losses], *args, **kwargs)
        done(reached)
        hooks.call()
        return result

    with patched(torch.autograd, "backward", backward):
        yield


def of_whole_batch(weight: Callable[[], float]) -> Callable[..., Any]:
    """A hook before an optimizer's step, after which the step's closure returns the whole batch's loss, the same on all ranks. Where an
    optimizer looks at the loss (L-BFGS does), ranks would else take steps of different lengths, or call the closure more or less often.

    Args:
        weight: of this rank's loss now.
    """

    def before(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        closure: Any = kwargs.get("closure", args[1] if len(args) > 1 else None)  # the first argument is the optimizer itself

        def combined() -> Any:
            loss = closure()
            if not isinstance(loss, (Tensor, float)):
                return loss
            whole = torch.as_tensor(loss).detach()
            # A number goes where the process group's collectives run.
            device = next(parameter.device for group in optimizer.param_groups for parameter in group["params"])
            whole = whole.to(device) * weight() if weight() else torch.zeros_like(whole, device=device)
            dist.all_reduce(whole)
            whole /= dist.get_world_size()
            return whole if isinstance(loss, Tensor) else whole.item()

        return (args, kwargs) if closure is None else ((args[0], *args[2:]), {**kwargs, "closure": combined})

    return before


def weighed(loss: Tensor, weight: float) -> Tensor:
    """The loss times its weight. Without any weight its gradients are zeros, whatever it is: a mean over nothing is NaN, as 0 * NaN is."""
    if weight:
        return loss if weight == 1.0 else loss * weight
    for node in nodes_of([loss.grad_fn]):
        # A node before a leaf: leaves are shared with the graphs of other parts.
        if any(hasattr(following, "variable") for following, _ in node.next_functions):
            node.register_hook(_zeros)
    return torch.nan_to_num(loss) * 0.0


def _zeros(inputs: Sequence[Tensor | None], _: Any) -> tuple[Tensor | None, ...]:
    return tuple(None if each is None else torch.zeros_like(each) for each in inputs)


def parameters_behind(starts: Iterable[Any]) -> list[Parameter]:
    """The parameters to which these nodes of autograd's graph hand gradients, in that order."""
    leaves = (getattr(node, "variable", None) for node in nodes_of(starts))
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Parameter)}.values())


def nodes_of(starts: Iterable[Any]) -> Iterator[Any]:
    """The nodes of autograd's graph that backward reaches from these, each once."""
    left: list[Any] = list(starts)
    seen = set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        left += [following for following, _ in node.next_functions]


def average(reached: Iterable[Parameter], parameters: Sequence[Parameter]) -> None:
    """Average the gradients after a backward pass over the ranks; a collective. Gradients from before it are the same on all ranks, and so
    is their mean.

    Args:
        reached: the parameters that this rank's pass led to.
        parameters: the module's, on all ranks alike. What is reached beside these must be so on every rank.
    """
    reached = list(reached)
    known, ids = {id(parameter) for parameter in parameters}, {id(parameter) for parameter in reached}
    device = (*parameters, *reached)[0].device
    used = torch.tensor([id(parameter) in ids for parameter in parameters], dtype=torch.int32, device=device)
    dist.all_reduce(used)  # the samples may decide on which parameters a rank's loss depends
    everyones = [parameter for parameter, count in zip(parameters, used.tolist(), strict=True) if count]
    everyones += [parameter for parameter in reached if id(parameter) not in known]
    for parameter in everyones:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in everyones if parameter.grad is not None]
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        alike = [gradient for gradient in gradients if gradient.dtype == dtype]
        flat = torch.cat([gradient.reshape(-1) for gradient in alike])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for gradient, mean in zip(alike, flat.split([gradient.numel() for gradient in alike]), strict=True):
            gradient.copy_(mean.view_as(gradient))
