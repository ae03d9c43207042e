"""What a training step does with parameters besides calling the modules that hold them. Knows torch; no engine, no plan.

Engines that take a module apart have a parameter whole only while its module runs. Code that uses a parameter elsewhere (a weight in the
loss, an average of another network's weights, a hook) would see a part of it. This module finds such code in the traced step, under fake
tensors, so that a module's size doesn't matter.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from lightning_autopar._lightning import LightningModule
from lightning_autopar._lightning_compat import is_overridden
from lightning_autopar.memory.footprint import Conduct
from lightning_autopar.memory.trace.bare_step import BareStep
from lightning_autopar.memory.trace.find_blocks import find_blocks
from lightning_autopar.memory.work.calls import tensors_in

#: Hooks that Lightning doesn't call as hooks, with what it does in them unless they are overridden.
_DETACH = torch.ops.aten.detach.default
_OVERRIDES = ("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping")
#: Hooks that are called when gradients are complete, often to look at them.
GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step")
_GRADIENT_ACCESS = frozenset(getattr(Tensor.grad, access) for access in ("__get__", "__set__", "__delete__"))


class GradientLooks(TorchFunctionMode):
    """While open, calls ``look`` whenever code in this thread reads or writes a parameter's ``grad``.

    Args:
        look: called with the parameter, before the access.
    """

    def __init__(self, look: Callable[[nn.Parameter], None]) -> None:
        super().__init__()
        self._look = look

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Report the access, then call the function."""
        if func in _GRADIENT_ACCESS and isinstance(args[0], nn.Parameter):
            self._look(args[0])
        return func(*args, **(kwargs or {}))


class ConductWatch:
    """Watches the operations of some steps for what they do with parameters.

    Args:
        module: the traced copy.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._before = dict(module.named_parameters(remove_duplicate=False))
        self._names = {id(parameter): name for name, parameter in self._before.items()}
        self._places = {name: _storage(parameter) for name, parameter in self._before.items()}
        self._storages = {place: name for name, place in self._places.items()}
        #: Kept, so that no other storage gets the address of one of them.
        self._kept = [parameter.untyped_storage() for parameter in self._before.values() if _has_storage(parameter)]
        self._units = find_blocks(module)
        if not module.automatic_optimization:
            self._units |= dict(_outermost("", module))
        self._units_of: dict[str, list[str]] = {name: [] for name in self._before}
        for unit, child in self._units.items():
            # A class may have a `named_parameters` of its own, of other names and arguments.
            for name, _ in nn.Module.named_parameters(child, remove_duplicate=False):
                self._units_of[f"{unit}.{name}"].append(unit)
        self._optimizers: list[torch.optim.Optimizer] = []
        self._running: Counter[str] = Counter()
        self._where: list[str | None] = [None]
        #: By tensor, the name of the parameter from which it was made, outside of the unit that gathers that parameter.
        self._made: Any = WeakIdKeyDictionary()
        self._together: dict[tuple[str, ...], bool] = {}
        self._mixed: tuple[str, str] | None = None
        self._written: dict[str, str] = {}
        self._now = dict(self._places)
        self._looked: dict[str, str | None] = {}

    def found(self) -> Conduct:
        """What was seen, after the steps."""
        now = dict(self._module.named_parameters(remove_duplicate=False))
        exchanged = tuple(name for name, parameter in self._before.items() if now.get(name) is not parameter)
        places: dict[int, list[str]] = {}
        for name, parameter in now.items():
            places.setdefault(_storage(parameter), []).append(name)
        together = (names for names in places.values() if len({id(now[name]) for name in names}) > 1)
        shared = tuple(name for names in together for name in names if self._places.get(name) != _storage(now[name]))
        return Conduct(
            together=tuple(self._together.items()),
            mixed=self._mixed,
            written=tuple(self._written.items()),
            exchanged=exchanged,
            shared=shared,
            looked=tuple(self._looked.items()),
        )

    @contextmanager
    def watching(self, rehearsal: BareStep) -> Iterator[None]:
        """The context of the traced steps."""
        self._optimizers = rehearsal.optimizers
        call, hook = rehearsal._call, rehearsal._hook
        with ExitStack() as stack:
            for name, child in (*self._units.items(), ("", self._module)):
                stack.callback(child.register_forward_pre_hook(self._counting(name, 1), prepend=True).remove)
                stack.callback(child.register_forward_hook(self._counting(name, -1), always_call=True).remove)
            for optimizer in rehearsal.optimizers:
                stack.callback(optimizer.register_step_pre_hook(lambda *_: self._where.append(None)).remove)
                stack.callback(optimizer.register_step_post_hook(lambda *_: self._where.__delitem__(-1)).remove)
            for name in _OVERRIDES:
                if is_overridden(name, self._module):
                    self._module.__dict__[name] = self._within(name, getattr(self._module, name))
                    stack.callback(self._module.__dict__.pop, name)
            for name in GRADIENT_HOOKS:
                if is_overridden(name, self._module):
                    self._module.__dict__[name] = self._looking(name, getattr(self._module, name))
                    stack.callback(self._module.__dict__.pop, name)
            rehearsal.__dict__["_call"] = lambda name, *args: self._within(name, call)(name, *args)
            rehearsal.__dict__["_hook"] = lambda name, *args: self._within(name, hook)(name, *args)
            stack.callback(rehearsal.__dict__.pop, "_call")
            stack.callback(rehearsal.__dict__.pop, "_hook")
            yield

    def _within(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            depth = len(self._where)
            self._where.append(name)
            self._now = {each: _storage(parameter) for each, parameter in self._before.items()}
            if name != "training_step":
                self._note_states()
            try:
                return function(*args, **kwargs)
            finally:
                del self._where[depth:]
                self._note_moves(name)

        return wrapped

    def _looking(self, hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a hook, to record whether it looks at gradients."""

        def look(parameter: nn.Parameter) -> None:
            self._looked.setdefault(hook, self._names.get(id(parameter), "a parameter"))

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            try:
                with GradientLooks(look):
                    return function(*args, **kwargs)
            except BaseException:
                self._looked.setdefault(hook, None)
                raise

        return wrapped

    def _note_moves(self, where: str) -> None:
        """Record parameters whose ``data`` was exchanged in that hook."""
        for name, parameter in self._before.items():
            if self._now[name] != (place := _storage(parameter)):
                self._now[name] = place
                self._note_write(name, where)

    def _note_write(self, name: str, where: str) -> None:
        """Record a write; of several hooks that write to a parameter, the step counts."""
        if self._written.get(name) != "training_step":
            self._written[name] = where

    def _note_states(self) -> None:
        """Record gradients and optimizer states, which in a hook are shards, too."""
        for name, parameter in self._before.items():
            states = [optimizer.state[parameter] for optimizer in self._optimizers if parameter in optimizer.state]
            for tensor in (parameter.grad, *(value for state in states for value in state.values())):
                if isinstance(tensor, Tensor):
                    self._made[tensor] = name

    def _counting(self, name: str, by: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self._running[name] += by

        return hook

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """An operation has run."""
        where = self._where[-1]
        if where is None or torch._C._current_graph_task_id() != -1:  # in backward
            return
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.is_write:
                    known = (self._names.get(id(each)) or self._storages.get(_storage(each)) for each in tensors_in((value,)))
                    for name in known:
                        if name is not None:
                            self._note_write(name, where)
        inputs = list(tensors_in((*args, *kwargs.values())))
        names = [name for name in map(self._name, inputs) if name is not None]
        if names:
            self._see(func, where, names, inputs, output)

    def _see(self, func: Any, where: str, names: list[str], inputs: list[Tensor], output: Any) -> None:
        """An operation has used these parameters, which may not be whole there."""
        mixed = any(each.numel() != 1 and self._name(each) is None for each in inputs)
        known = {id(each) for each in inputs} | self._names.keys()
        for made in tensors_in((output,)):
            if id(made) not in known:
                self._made[made] = names[0]
        if where == "training_step" and self._module.automatic_optimization:
            learns = torch.is_grad_enabled() and func is not _DETACH and any(each.requires_grad for each in inputs)
            units = tuple(sorted({unit for name in names for unit in self._units_of[name]}))
            self._together[units] = self._together.get(units, False) or mixed or learns
        elif mixed and self._mixed is None:
            self._mixed = names[0], where

    def _name(self, tensor: Tensor) -> str | None:
        """The parameter that a tensor is, or is made of, if an engine would have only shards of it there; None otherwise."""
        name = self._made.get(tensor)
        if name is None:
            name = self._names.get(id(tensor)) or self._storages.get(_storage(tensor))
            if name is None:
                return None
        units = self._units_of[name]
        if self._where[-1] == "training_step" and self._module.automatic_optimization:
            whole = not units or any(self._running[unit] for unit in units)
        else:
            whole = any(self._running[unit] for unit in (*units, ""))
        return None if whole else str(name)


def _outermost(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost submodules that can be called and hold parameters."""
    for name, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _outermost(f"{prefix}{name}.", child)
        elif next(child.parameters(), None) is not None:
            yield f"{prefix}{name}", child


def _storage(tensor: Tensor) -> int:
    """The identity of a tensor's storage; of the tensor itself if it has none."""
    return int(tensor.untyped_storage()._cdata) if _has_storage(tensor) else -id(tensor)


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested
