"""Runs the user's optimizer on tensors in host memory: the same object with the same results, by torch's vectorised kernels where it has
them.

It doesn't know which engine offloads, nor how parameters and gradients come to the host.
"""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakSet

import torch
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

#: In these, an element's update depends on its own gradient and state alone, so that any part of a parameter can be updated by itself.
ELEMENTWISE: tuple[type[Optimizer], ...] = (Adadelta, Adagrad, Adam, AdamW, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop, SGD)
#: These have a fused, vectorised kernel on CPUs, one pass over all of a parameter's tensors
#: (``aten/src/ATen/native/cpu/Fused*Kernel.cpp``).
FUSED: tuple[type[Optimizer], ...] = (Adagrad, Adam, AdamW, SGD)

_PREPARED: WeakSet[Optimizer] = WeakSet()


def why_not(kind: type[Optimizer]) -> str | None:
    """Why an optimizer of this class can't update parts of parameters in host memory; None if it can.

    A subclass may have any ``step``, so only torch's own classes are accepted.
    """
    if kind in ELEMENTWISE:
        return None
    names = ", ".join(known.__name__ for known in ELEMENTWISE)
    return (
        f"{kind.__module__}.{kind.__qualname__} isn't known to update each element by itself, which a plan with parts of parameters in "
        f"host memory needs; use one of torch.optim's {names}"
    )


def on_host(optimizer: Optimizer) -> Optimizer:
    """Make the optimizer use torch's fused kernel, from now on, for parameters in host memory; returns the optimizer. The groups' options
    are changed only during a step, so that schedulers and checkpoints see what the user chose. The kernel computes in the parameter's type:
    in fp32 it equals the plain loop to reassociation; in 16 bits it would round less often, so the loop stays there.

    Raises:
        ValueError: if the optimizer can't update parts of parameters.
    """
    if (reason := why_not(type(optimizer))) is not None:
        raise ValueError(reason)
    if optimizer not in _PREPARED:
        _PREPARED.add(optimizer)
        step = _HostStep()
        optimizer.register_step_pre_hook(step.before)
        optimizer.register_step_post_hook(step.after)
    return optimizer


class _HostStep:
    """Sets the options that a step on the host needs before the step, and takes them back after it."""

    def __init__(self) -> None:
        self._kept: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Set them before the step, and again when its closure, in which Lightning runs backward, has made this step's gradients."""
        self._set(optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first argument is the optimizer itself
        if closure is None:
            return args, kwargs

        @functools.wraps(closure)
        def then_set() -> Any:
            result = closure()
            self._set(optimizer)
            return result

        if len(args) > 1:
            return (args[0], then_set, *args[2:]), kwargs
        return args, {**kwargs, "closure": then_set}

    def _set(self, optimizer: Optimizer) -> None:
        """Set the groups to fused, and not to capturable, which torch refuses on the host."""
        self.after()  # left by a step that failed
        for group in optimizer.param_groups:
            options = _options(optimizer, group)
            self._kept.append((group, {name: group[name] for name in options}))
            group.update(options)

    def after(self, *_: Any) -> None:
        """Give the groups back the user's options."""
        for group, options in self._kept:
            group.update(options)
        self._kept.clear()


def _options(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """The options to change in a group for a step on the host; empty where its parameters aren't on the host."""
    if any(parameter.device.type != "cpu" for parameter in group["params"]):
        return {}
    options = {"capturable": False}
    wide = all(parameter.dtype in (torch.float32, torch.float64) for parameter in group["params"])
    if type(optimizer) in FUSED and wide and not group.get("differentiable") and not _begins_in_part(optimizer, group):
        options |= {"fused": True, "foreach": False}
    return {name: value for name, value in options.items() if name in group}


def _begins_in_part(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether only some of a group's parameters have their momentum before this step: SGD's fused kernel needs it for all or none. torch
    2.13, ``sgd.py``, ``_fused_sgd``: a parameter that had no gradient in the steps before lacks it, and the kernel raises a TypeError.
    """
    if not isinstance(optimizer, SGD) or not group["momentum"]:
        return False
    stepped = [parameter for parameter in group["params"] if parameter.grad is not None]
    return len({optimizer.state.get(parameter, {}).get("momentum_buffer") is None for parameter in stepped}) > 1
