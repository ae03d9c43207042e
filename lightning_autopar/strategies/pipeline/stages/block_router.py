"""Hands a module's blocks and its hooks to the stage that is running, and finds which of the user's modules are blocks.

Blocks that the stage skips return absent tensors of the shapes that their results would have. Knows torch and Lightning modules and
recordings; nothing of what stages do.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from lightning_autopar._lightning import LightningModule
from lightning_autopar.exact.absent.absent_tensor import AbsentMode, MissingValue, hole_of, hole_shaped_like, resolved
from lightning_autopar.memory.fakes.fake_copies import is_compiled
from lightning_autopar.strategies.pipeline.stages.block_outputs import Place, find, flattened, places, shape_of
from lightning_autopar.strategies.pipeline.stages.cut_tensors import Leaf, Output, StepRecording
from lightning_autopar.strategies.pipeline.stages.tainted_tensors import replaced_forward


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

    def parameter(self, fqn: str) -> Tensor | None:
        """The parameter of that name, which may be absent."""
        module = self._module()
        assert module is not None
        path, _, name = fqn.rpartition(".")
        return module.get_submodule(path)._parameters[name]

    def ids(self) -> frozenset[int]:
        """Ids of all parameters and buffers."""
        module = self._module()
        assert module is not None
        return frozenset(map(id, (*module.parameters(), *module.buffers())))


_routers: weakref.WeakKeyDictionary[nn.Module, Router] = weakref.WeakKeyDictionary()


class BlockResults:
    """The recorded results of a block's call: returned as absent tensors where the block is skipped, and numbered where it runs."""

    def __init__(self, block: nn.Module, fqn: str, recording: StepRecording, call: int) -> None:
        self._block = weakref.ref(block)
        self._fqn = fqn
        self._what = f"an output of the block {fqn!r}"
        self._recording = recording
        outputs = recording.outputs[call]
        self._output: Output | None = outputs[0] if outputs else None
        self._extras: Sequence[Output] = outputs[1:]
        # Whether its results can be made without running it.
        leaves = outputs[0].leaves if outputs else ()
        told = (leaf.same_as is not None or (not leaf.computed if leaf.shape is None else leaf.like is not None) for leaf in leaves)
        self._alike = bool(outputs) and all(told)
        self._measured: dict[Any, list[Any] | None] = {}
        self._caught: list[Any] = []

    @classmethod
    def of(cls, block: nn.Module, fqn: str, recording: StepRecording, call: int) -> BlockResults:
        """The object for a call of a block, with the known shapes of its results."""
        known = _known.setdefault(block, {})
        found = known.get((id(recording), call))
        if found is None or found._recording is not recording:
            found = known[id(recording), call] = cls(block, fqn, recording, call)
        return found

    def left_out(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What the block would return, with absent tensors; hooks and attributes that later code reads get absent tensors, too.

        Args:
            forward: the block's own, for shapes that can't be told otherwise.
        """
        output = self._output
        if output is None:
            raise RuntimeError(f"{self._fqn!r} can't be left out: its result couldn't be recorded")
        given = (args, kwargs)
        device = _device_of(given) or torch.device("cpu")
        autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        measured = None
        if not self._alike or autocast != self._recording.autocast:
            measured = self._measure(forward, args, kwargs, autocast)
        result = self._value(output, given, device, measured)
        self._caught = []
        block = self._block()
        assert block is not None
        for extra in self._extras:
            value = self._value(extra, given, device, None)
            self._caught.append(value)
            module = block.get_submodule(extra.module or "")
            if extra.attribute is not None:
                setattr(module, extra.attribute, value)
                continue
            with replaced_forward(module, lambda *_, value=value, **__: value):
                module()
        return result

    @contextmanager
    def catching(self) -> Iterator[None]:
        """The context of a run of the block: catches what leaves it without being returned."""
        if not self._extras:
            yield
            return
        block = self._block()
        assert block is not None
        self._caught = []
        with ExitStack() as stack:
            for name in dict.fromkeys(extra.module for extra in self._extras if extra.attribute is None):
                module = block.get_submodule(name or "")
                stack.callback(module.register_forward_hook(lambda _, __, output: self._caught.append(output)).remove)
            yield
        for extra in self._extras:
            if extra.attribute is not None:
                self._caught.append(getattr(block.get_submodule(extra.module or ""), extra.attribute))

    def numbered(self, result: Any, args: Any, kwargs: Any) -> Iterator[tuple[int, Tensor]]:
        """The tensors of a result, with or without values, by their numbers.

        Raises:
            RuntimeError: if the result isn't what it was when recorded.
        """
        output = self._output
        if output is None:
            raise RuntimeError(f"what {self._fqn!r} returns couldn't be recorded")
        given = list(places((args, kwargs)))
        if len(self._caught) != len(self._extras):
            raise RuntimeError(f"modules within the block {self._fqn!r} were called otherwise than when it was recorded")
        for each, value in zip((output, *self._extras), (result, *self._caught), strict=True):
            flat, structure = flattened(value, given)
            if structure != each.structure:
                raise RuntimeError(f"the block {self._fqn!r} returns {structure}, but returned {each.structure} when it was recorded")
            for leaf, tensor in zip(each.leaves, flat, strict=True):
                if leaf.index is None:
                    continue
                if not isinstance(tensor, Tensor) or leaf.shape is None or tensor.dim() != len(leaf.shape):
                    raise RuntimeError(f"the block {self._fqn!r} returns other tensors than it did when it was recorded")
                yield leaf.index, tensor
        self._caught = []

    def _value(self, output: Output, given: Any, device: torch.device, measured: Sequence[Any] | None) -> Any:
        """The recorded value, with absent tensors for tensors."""
        leaves: list[Any] = []
        for place, leaf in enumerate(output.leaves):
            if leaf.same_as is not None:
                leaves.append(find(given, leaf.same_as))
            elif leaf.shape is None:
                if leaf.computed and measured is None:
                    raise RuntimeError(f"{self._fqn!r} can't be left out: it returns a number, which it doesn't tell without running")
                leaves.append(measured[place] if leaf.computed and measured is not None else leaf.value)
            else:
                needs = leaf.requires_grad and torch.is_grad_enabled()
                if measured is None and leaf.like is not None:
                    argument: Tensor = find(given, leaf.like)
                    leaves.append(hole_shaped_like(argument, argument.dtype, self._what, needs))
                    continue
                shape, dtype = measured[place] if measured is not None else (shape_of(leaf, given), _dtype(leaf, given))
                leaves.append(hole_of(shape, dtype, device, self._what, needs))
        return tree_unflatten(leaves, output.structure)

    def _measure(self, forward: Callable[..., Any], args: Any, kwargs: Any, autocast: torch.dtype | None) -> list[Any] | None:
        """The results' shapes, types and numbers, found by running the block on absent tensors, and cached. None where it can't run so."""
        key = (autocast, tuple(map(_signature, places((args, kwargs)))))
        if key not in self._measured:
            assert self._output is not None
            self._measured[key] = measure(forward, args, kwargs, self._output.structure)
        return self._measured[key]


def measure(forward: Callable[..., Any], args: Any, kwargs: Any, structure: Any) -> list[Any] | None:
    """The leaves of a block's result, tensors as shape and type. None where it can't run without values, or returns something else."""
    try:
        with AbsentMode(simulated=True), torch.no_grad():
            result = forward(*args, **kwargs)
    except (MissingValue, RuntimeError, NotImplementedError):
        return None  # the recorded relation of shapes is used; it is checked when tensors are received
    flat, found = flattened(result, list(places((args, kwargs))))
    return [(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in flat] if found == structure else None


def computed_from_shapes(forward: Callable[..., Any], args: Any, kwargs: Any, output: Output) -> Output | str:
    """A result with numbers in it, if these depend only on shapes."""
    measured = measure(forward, args, kwargs, output.structure)
    for place, leaf in enumerate(output.leaves):
        if leaf.computed and (measured is None or measured[place] != leaf.value):
            return "it returns a number that depends on values"
    return output


_known: weakref.WeakKeyDictionary[nn.Module, dict[tuple[int, int], BlockResults]] = weakref.WeakKeyDictionary()


def _device_of(value: Any) -> torch.device | None:
    if isinstance(value, Tensor):
        return value.device
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return next((found for item in items if (found := _device_of(item)) is not None), None)


def _dtype(leaf: Leaf, given: Any) -> torch.dtype:
    assert leaf.dtype is not None
    if leaf.dtype_of is None:
        return leaf.dtype
    dtype: torch.dtype = find(given, leaf.dtype_of).dtype
    return dtype


def _signature(placed: tuple[Place, Any]) -> Any:
    place, leaf = placed
    if isinstance(leaf, Tensor):
        return place, tuple(leaf.shape), leaf.dtype
    return place, leaf if isinstance(leaf, (bool, int, float, str)) else type(leaf)
