"""Hands a module's blocks and its hooks to the stage that is running, and finds which of the user's modules are blocks.

Knows torch and Lightning modules and recordings; nothing of what stages do.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_autopar._lightning import LightningModule
from lightning_autopar.exact.absent.absent_tensor import resolved
from lightning_autopar.memory.fakes.fake_copies import is_compiled
from lightning_autopar.strategies.pipeline.stages.cut_tensors import StepRecording


def opaque_methods(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Methods that aren't looked into: torchmetrics' work, and Lightning's handling of logged values."""
    found = []
    for child in module.modules():
        classes = {base.__name__ for base in type(child).__mro__ if base.__module__.startswith("torchmetrics")}
        if classes & {"Metric", "MetricCollection"}:
            found += [(child, name) for name in ("update", "compute", "forward")]
        elif isinstance(child, LightningModule):
            found += [(child, name) for name in ("log", "log_dict", "print")]
    return found


def unseen(module: nn.Module) -> str | None:
    """Why torch's function mode can't see what a module does, in a sentence; None where it can."""
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule) and next(child.parameters(), None) is not None:
            return f"{name!r} is scripted, and its parameters can't be left out"
        if is_compiled(child):
            return f"{name or type(child).__name__!r} was given to torch.compile, which would compile what tells the stages apart"
    return None


def find_block(module: nn.Module, fqn: str) -> nn.Module:
    """The block of a name.

    Raises:
        ValueError: if there is none.
    """
    try:
        return module.get_submodule(fqn)
    except AttributeError as error:
        raise ValueError(f"the module has no block {fqn!r}; name blocks by their FQNs, as the footprint has them") from error


class Run(Protocol):
    """One run of a stage."""

    def block(self, fqn: str, block: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A block is called."""


class _Routed:
    """A block's ``forward``, set on the instance. A copy of the module has its blocks' own."""

    def __init__(self, router: Router | None, fqn: str, block: nn.Module, forward: Callable[..., Any]) -> None:
        self._router, self._fqn, self._block, self._forward = router, fqn, block, forward
        functools.update_wrapper(self, getattr(forward, "__func__", forward), updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:  # recomputation of one of the stage's blocks
            return self._forward(*resolved(args), **resolved(kwargs))
        if self._router is None or self._router.run is None:
            return self._forward(*args, **kwargs)
        return self._router.run.block(self._fqn, self._block, self._forward, args, kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._forward)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Routed:
        return _Routed(None, self._fqn, copy.deepcopy(self._block, memo), copy.deepcopy(self._forward, memo))


class Router:
    """Passes each block's call to the running stage; outside of a run, blocks work as usual."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._known: set[str] = set()
        self._stages: set[int] = set()
        #: By hook and micro-batch: the numbers that the first counting stage found.
        self._counted: dict[tuple[str, int], dict[tuple[str, str], Any]] = {}
        self.run: Run | None = None
        #: Methods that aren't looked into.
        self.opaque = opaque_methods(module)

    @classmethod
    def of(cls, module: nn.Module) -> Router:
        """The module's router."""
        if module not in _routers:
            _routers[module] = cls(module)
        return _routers[module]

    def add(self, stage: int, recordings: Iterable[StepRecording]) -> None:
        """Replace the blocks' ``forward``, for a stage."""
        self._stages.add(stage)
        module = self._module()
        assert module is not None
        for recording in recordings:
            for fqn in recording.blocks:
                if fqn not in self._known:
                    self._known.add(fqn)
                    block = find_block(module, fqn)
                    block.__dict__["forward"] = _Routed(self, fqn, block, block.forward)

    @contextmanager
    def counting(self, recording: StepRecording, stage: int, chunk: int) -> Iterator[None]:
        """The context of a stage's run: the first stage that changes the step's counters on the module does so once a micro-batch. Later
        stages of the module find the same values as that stage.
        """
        if not recording.counters or len(self._stages) < 2:
            yield
            return
        module = self._module()
        assert module is not None
        if stage == min(self._stages):
            self._counted[recording.hook, chunk] = {}
        counted = self._counted.setdefault((recording.hook, chunk), {})
        now = {(path, name): getattr(module.get_submodule(path), name) for path, name in recording.counters}
        for (path, name), value in counted.items():
            setattr(module.get_submodule(path), name, value)
        try:
            yield
        finally:
            for (path, name), value in now.items():
                owner = module.get_submodule(path)
                if (path, name) in counted:
                    setattr(owner, name, value)
                elif getattr(owner, name) != value:
                    counted[path, name] = value

    @contextmanager
    def around(self, name: str, run: Callable[[Callable[..., Any], Any, Any], Any]) -> Iterator[None]:
        """While open, the module's hook of that name is called by ``run``."""
        module = self._module()
        assert module is not None
        hook, own = getattr(module, name), module.__dict__.get(name)

        @functools.wraps(hook)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return run(hook, args, kwargs)

        module.__dict__[name] = wrapper
        try:
            yield
        finally:
            del module.__dict__[name]
            if own is not None:
                module.__dict__[name] = own

    def named(self, fqns: frozenset[str]) -> list[tuple[nn.Module, str, Tensor]]:
        """Buffers by FQN: the module that has each, its name there, and the buffer."""
        module = self._module()
        assert module is not None
        found = []
        for fqn in sorted(fqns):
            path, _, name = fqn.rpartition(".")
            owner = module.get_submodule(path)
            if owner._buffers.get(name) is not None:
                found.append((owner, name, owner._buffers[name]))
        return found  # type: ignore[return-value]

    def ids(self) -> frozenset[int]:
        """Ids of all parameters and buffers."""
        module = self._module()
        assert module is not None
        return frozenset(map(id, (*module.parameters(), *module.buffers())))


_routers: weakref.WeakKeyDictionary[nn.Module, Router] = weakref.WeakKeyDictionary()
