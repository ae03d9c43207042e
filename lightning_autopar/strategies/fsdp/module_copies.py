"""Copies of a sharded module that callbacks make (averages of the weights, teachers): modules of its own class whose parameters are shards.

An average of shards is the average's shard: such a copy follows the module without communication. While it is called, its parameters are
whole. Knows modules; no plan, no trainer.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial

from lightning_autopar._lightning import LightningModule
from lightning_autopar.state.checkpoint import gathered
from lightning_autopar.strategies.base.process_group import wait_for_all_ranks

#: The methods of a LightningModule that use its parameters outside ``forward``, which FSDP2 wraps.
STEPS = ("training_step", "validation_step", "test_step", "predict_step")
#: The attributes that ``fully_shard`` leaves on a module begin with one of these.
TRACES = ("__composable_api", "_is_fsdp_managed_module", "_fsdp_use_orig_params")
#: Where a copy that is being called keeps its shards.
_SHARDS = "_shards_of_called_copy"
#: Whose hooks mean nothing in a copy.
_NOT_THE_USERS = ("torch.distributed.", "lightning_autopar.")
_SWAP: Callable[..., None] = torch.utils.swap_tensors
#: Functions that record a module's code. They get a copy without FSDP2's hooks.
_TRACERS: Any = ((torch.jit, "trace"), (torch.jit, "trace_module"), (torch.jit, "script"), (torch.export, "export"), (torch.onnx, "export"))
#: Whether a step or its backward pass runs.
in_step = False
#: The copies so far.
_COPIES = weakref.WeakSet[nn.Module]()


def let_copy(module: nn.Module) -> None:
    """From now on, ``copy.deepcopy`` copies the units of this sharded module, which ``fully_shard`` forbids; ``torch.jit.trace`` and others
    of its kind get a whole copy; and ``to`` goes through where it has nothing to do, for which torch would exchange each shard with itself,
    and refuses to where somebody watches it.
    """
    torch.utils.swap_tensors = _swap_others
    for holder, name in _TRACERS:
        if not hasattr(own := getattr(holder, name), "_of_whole_modules"):
            setattr(holder, name, _of_whole_modules(own))
    for kind in {type(child) for child in module.modules() if isinstance(child, FSDPModule)}:
        kind.__deepcopy__ = _copied  # type: ignore[attr-defined]


def _of_whole_modules(own: Callable[..., Any]) -> Callable[..., Any]:
    def whole(value: Any) -> Any:
        return _whole_copy(value) if isinstance(value, nn.Module) and not in_step else value

    @wraps(own)
    def traced(*args: Any, **kwargs: Any) -> Any:
        return own(*map(whole, args), **{name: whole(value) for name, value in kwargs.items()})

    traced._of_whole_modules = True  # type: ignore[attr-defined]
    return traced


def _whole_copy(module: nn.Module) -> nn.Module:
    """A copy with whole parameters, of its own class and without our hooks; the module itself if it has no shards. A collective."""
    if not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        return module
    wait_for_all_ranks(f"{type(module).__name__} was traced")
    made = copy.deepcopy(module)
    if isinstance(module, LightningModule):
        made.trainer = module.trainer  # type: ignore[assignment]  # torch asks for each property
    wholes: dict[int, nn.Parameter] = {}
    for child in made.modules():
        _strip(child)
        for name, parameter in child._parameters.items():
            if isinstance(parameter, DTensor):
                if id(parameter) not in wholes:
                    wholes[id(parameter)] = nn.Parameter(gathered(parameter).detach(), requires_grad=parameter.requires_grad)
                child._parameters[name] = wholes[id(parameter)]
    return made


def _swap_others(one: Tensor, other: Tensor) -> None:
    if not (
        isinstance(one, DTensor)
        and isinstance(other, DTensor)
        and (one.dtype, one.device) == (other.dtype, other.device)
        and one._local_tensor.is_set_to(other._local_tensor)
    ):
        _SWAP(one, other)


def _copied(unit: Any, memo: dict[int, Any]) -> Any:
    if in_step or any(not isinstance(parameter, DTensor) for parameter in unit.parameters()):
        raise AssertionError("FSDP does not support deepcopy in a step, where parameters are whole now and shards then")
    made: Any = object.__new__(type(unit).__bases__[1])
    memo[id(unit)] = made
    state = {name: value for name, value in unit.__getstate__().items() if not name.startswith(TRACES) and name not in STEPS}
    for name, hooks in state.items():
        if name.endswith("_hooks") and isinstance(hooks, dict):
            state[name] = type(hooks)((key, hook) for key, hook in hooks.items() if not _is_ours(hook))
    if "_device_mesh" in state:
        state["_device_mesh"] = None  # as in a module that nobody has sharded
    made.__setstate__(copy.deepcopy(state, memo))
    made.register_forward_pre_hook(enter, prepend=True)
    made.register_forward_hook(leave, always_call=True)
    _COPIES.add(made)
    return made


class OwnHook:
    """A hook of ours on a module, in the place of which a copy of the module has another one.

    Args:
        module: the one that has it.
    """

    def __init__(self, module: nn.Module, own: Callable[..., Any], of_copy: Callable[..., Any]) -> None:
        self._module, self._own, self._of_copy = module, own, of_copy

    def __call__(self, *args: Any) -> Any:
        """Calls the module's."""
        return self._own(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        _COPIES.add(memo[id(self._module)])
        return self._of_copy


def become_plain() -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    """Leave all copies without anything of FSDP2's or ours, at a run's end. Returns the changed dictionaries, each with what it had."""
    return [change for child in {child for each in _COPIES for child in each.modules()} for change in _strip(child)]


def _strip(child: nn.Module) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    changed: list[tuple[dict[Any, Any], dict[Any, Any]]] = [(vars(child), dict(vars(child)))]
    for name in [name for name in vars(child) if name.startswith(TRACES)]:
        del vars(child)[name]
    for name, hooks in vars(child).items():
        if name.endswith("_hooks") and hooks:
            changed.append((hooks, dict(hooks)))
            for key in [key for key, hook in hooks.items() if _is_ours(hook)]:
                del hooks[key]
    return changed


@contextmanager
def plain_copies() -> Iterator[None]:
    """While open, they are so, as they are pickled for processes in which they are whole."""
    changed = become_plain()
    try:
        yield
    finally:
        for there, before in changed:
            there.clear()
            there.update(before)


def _is_ours(hook: Any) -> bool:
    function = hook.func if isinstance(hook, partial) else getattr(hook, "hook", hook)  # torch wraps hooks before load_state_dict
    return f"{getattr(function, '__module__', '')}.".startswith(_NOT_THE_USERS)


def enter(module: nn.Module, args: Any) -> None:
    """Make a copy's parameters whole, before it is called. A gradient of one is the mean of all ranks', as in the module itself."""
    named = [(child, name, parameter) for child in module.modules() for name, parameter in child._parameters.items()]
    held: list[tuple[nn.Module, str, Any]] = [each for each in named if isinstance(each[2], DTensor)]
    if not held:  # within the call of a larger copy
        return
    wait_for_all_ranks(f"a copy of {type(module).__name__} was called")
    wholes: dict[int, Tensor] = {}
    for child, name, shard in held:
        if id(shard) not in wholes:
            wholes[id(shard)] = gathered(shard, grad_placements=[Partial("avg")] * shard.device_mesh.ndim)
        child._parameters[name] = wholes[id(shard)]  # type: ignore[assignment]
    vars(module)[_SHARDS] = held


def leave(module: nn.Module, args: Any, output: Any) -> None:
    """Put the shards back."""
    for child, name, shard in vars(module).pop(_SHARDS, ()):
        child._parameters[name] = shard
