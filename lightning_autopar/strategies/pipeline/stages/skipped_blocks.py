"""Blocks that a stage skips: they return absent tensors of the shapes that their results would have. Knows recordings; no stages."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from lightning_autopar.exact.absent.absent_tensor import AbsentMode, MissingValue, hole_of, hole_shaped_like
from lightning_autopar.strategies.pipeline.stages.block_outputs import Place, find, flattened, places, shape_of
from lightning_autopar.strategies.pipeline.stages.cut_tensors import Leaf, Output, StepRecording
from lightning_autopar.strategies.pipeline.stages.tainted_tensors import replaced_forward


class BlockResults:
    """The recorded results of a block: returned as absent tensors where the block is skipped, and numbered where it runs."""

    def __init__(self, block: nn.Module, fqn: str, recording: StepRecording) -> None:
        self._block = weakref.ref(block)
        self._fqn = fqn
        self._what = f"an output of the block {fqn!r}"
        self._recording = recording
        outputs = recording.outputs.get(fqn, ())
        self._output: Output | None = outputs[0] if outputs else None
        self._extras: Sequence[Output] = outputs[1:]
        # Whether its results can be made without running it.
        leaves = outputs[0].leaves if outputs else ()
        told = (leaf.same_as is not None or (not leaf.computed if leaf.shape is None else leaf.like is not None) for leaf in leaves)
        self._alike = bool(outputs) and all(told)
        self._measured: dict[Any, list[Any] | None] = {}
        self._caught: list[Any] = []

    @classmethod
    def of(cls, block: nn.Module, fqn: str, recording: StepRecording) -> BlockResults:
        """The object for a block, with the known shapes of its results."""
        known = _known.setdefault(block, {})
        found = known.get(id(recording))
        if found is None or found._recording is not recording:
            found = known[id(recording)] = cls(block, fqn, recording)
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


_known: weakref.WeakKeyDictionary[nn.Module, dict[int, BlockResults]] = weakref.WeakKeyDictionary()


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
