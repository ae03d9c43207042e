"""The user's hooks on parameters (``register_hook``, ``register_post_accumulate_grad_hook``) where a batch is split.

Autograd would call them with the gradient of a part of the batch: once for each part, and on each rank with its own. Here they are called
once, with the whole batch's gradient, when it is complete. Knows autograd's hooks and a module's parameters; nothing of engines or ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter


class OurHook(partial[Any]):
    """A hook of an engine's on a parameter, which autograd goes on calling."""


class GradientHooks:
    """The hooks of one batch's backward passes; false where the user has none.

    Args:
        parameters: of the module, as the optimizer steps them.
    """

    def __init__(self, parameters: Iterable[Parameter] = ()) -> None:
        hooked = [each for each in parameters if each._backward_hooks or getattr(each, "_post_accumulate_grad_hooks", None)]
        self._parameters = [parameter for parameter in hooked if any(_users(hooks) for hooks in _hooks_of(parameter))]
        self._held: list[tuple[Parameter, list[dict[int, Any]]]] = []
        self._earlier: dict[Parameter, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._parameters)

    def hold(self) -> bool:
        """From now on autograd calls none of them. Does nothing more when called again; returns whether there are any."""
        for parameter in () if self._held else self._parameters:
            held = [_users(hooks) for hooks in _hooks_of(parameter)]
            for hooks, users in zip(_hooks_of(parameter), held, strict=True):
                for number in users:
                    del hooks[number]
            self._held.append((parameter, held))
        return bool(self._held)

    def begin(self) -> None:
        """A backward pass begins, or the last one of a batch's parts: its gradients are kept apart from those of earlier batches."""
        self.hold()
        for parameter, _ in self._held:
            if parameter.grad is not None:
                self._earlier[parameter] = parameter.grad.clone()  # it may lie where the next gradient will be reduced
                parameter.grad = None

    @torch.no_grad()
    def call(self) -> None:
        """The gradients are complete: call the hooks with them, and add the earlier gradients."""
        for parameter, (first, later) in self._held:
            gradient, earlier = parameter.grad, self._earlier.pop(parameter, None)
            if gradient is None:
                parameter.grad = earlier
                continue
            for hook in first.values():
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            parameter.grad = gradient if earlier is None else earlier + gradient
            for hook in later.values():
                hook(parameter)
        self.release()

    def release(self) -> None:
        """Let autograd call them again."""
        for parameter, held in self._held:
            for hooks, users in zip(_hooks_of(parameter), held, strict=True):
                hooks.update(users)
        self._held.clear()


def trained(module: Module) -> Iterator[Parameter]:
    """The parameters that are trained now, each once. It is called at each step, and so makes no names, as ``parameters()`` does: those of
    twelve transformer blocks took half a millisecond.
    """
    children, seen = [module], {id(module)}
    for child in children:
        for parameter in child._parameters.values():
            if parameter is not None and parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter
        for below in child._modules.values():
            if below is not None and id(below) not in seen:
                seen.add(id(below))
                children.append(below)


def _hooks_of(parameter: Parameter) -> tuple[dict[int, Any], dict[int, Any]]:
    """Those before a gradient is added to the parameter's, and those after it, by the number that their handles know."""
    first, later = parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)
    return {} if first is None else first, {} if later is None else later  # where there are any, the very dictionaries that autograd reads


def _users(hooks: dict[int, Any]) -> dict[int, Any]:
    return {number: hook for number, hook in hooks.items() if not isinstance(hook, OurHook)}
