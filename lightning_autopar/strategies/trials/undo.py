"""Runs a step of a module and undoes its effects on the module: parameters that it wrote, attributes that it set. It also reports them.

Knows modules, and nothing of batches, trainers or engines.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import numpy
import psutil
from torch import Tensor, dtype, nn
from torch._subclasses.fake_tensor import is_fake

from lightning_autopar._root import NOT_THE_USERS, package_of
from lightning_autopar.exact.random import generator_states as rng
from lightning_autopar.exact.step.attribute_rules import MISSING, items_of, refill, rewrite
from lightning_autopar.exact.step.kept_attributes import Place
from lightning_autopar.text import format_bytes

#: Relative difference up to which written values count as equal: rounding of float32 sums taken in another order, and some cancellation.
_EQUAL = 1e-5
#: A trial copies parameters, to see whether the step writes to them: at most into this share of the memory that the host has left.
_HOST_SHARE = 0.5
#: The most objects and bytes in attributes: more objects, or larger tensors, are data rather than what a step keeps.
_MOST_OBJECTS, _TENSOR_BYTES = 10_000, 64 << 20
#: Types of values that nobody can write to; most items of a replay buffer are of these.
_ATOMS = (str, bytes, int, float, bool, type, type(None))
_TORCHS = frozenset(vars(nn.Module()))
#: Packages whose objects aren't put back after a trial. torchmetrics isn't one: a trial changes what a metric keeps.
_LEFT_ALONE = NOT_THE_USERS - {"torchmetrics"}


@dataclass(kw_only=True)
class StepEffects:
    """What a step did.

    Args:
        written: name → new value of each parameter that the step wrote to.
        calls: how often each submodule was called, by name.
        kept: names of attributes and variables that the step changed, or whose contents it changed.
    """

    written: dict[str, Tensor] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    kept: tuple[str, ...] = ()


def put_back(module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Give the module's buffers the values that they had; those that have come since stay.

    Args:
        module: whose buffers a step may have written to.
        buffers: copies of their values, by name.
    """
    for name, buffer in module.named_buffers():
        if name in buffers:
            buffer.data = buffers[name].clone()


@contextmanager
def undone(module: nn.Module, writes: Collection[str] | None = None, outside: Mapping[str, Place] | None = None) -> Iterator[StepEffects]:
    """The context of a step: afterwards the module's parameters and the attributes of its submodules, with their contents, are as before.
    Buffers keep what was written to them, but are the same tensors as before.

    Args:
        writes: names of the parameters that the step writes to, where its trace has shown them; if None, all are compared.
        outside: variables that are to be as before, too; see :func:`.kept_attributes.variables`.

    Raises:
        MemoryError: if the host has no room for a copy of these parameters.
    """
    effects = StepEffects()
    parameters = {name: parameter for name, parameter in module.named_parameters() if writes is None or name in writes}
    size_bytes = sum(parameter.nbytes for parameter in parameters.values() if not is_fake(parameter))
    check_room(size_bytes, "a copy of parameters, to see whether the step writes to them,")
    copies = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    versions = {name: parameter._version for name, parameter in parameters.items() if is_fake(parameter)}
    modules = list(module.named_modules())
    attributes = [(child, dict(child.__dict__), dict(child._buffers)) for _, child in modules]
    values = {name: space.get(key, MISSING) for name, (space, key) in (outside or {}).items()}
    put_back = _held_by(module, modules, values)
    # As each part of a batch finds them in a run.
    generators = rng.find_generators(modules)
    drawn = {name: rng.get_generator(generator) for name, generator in generators.items()}

    def count(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            effects.calls[name] += 1

        return hook

    with ExitStack() as hooks:
        for name, child in modules:
            if name:
                hooks.callback(child.register_forward_pre_hook(count(name)).remove)
        try:
            yield effects
        finally:
            replaced = [
                f"{name}.{attribute}".lstrip(".")
                for (name, child), (_, held, buffers) in zip(modules, attributes, strict=True)
                for attribute, value in (*child.__dict__.items(), *child._buffers.items())
                if attribute not in _TORCHS and {**held, **buffers}.get(attribute, effects) is not value
            ]
            for name, (space, key) in (outside or {}).items():
                if space.get(key, MISSING) is not values[name]:
                    replaced.append(name)
                    if values[name] is MISSING:
                        space.pop(key)
                    else:
                        space[key] = values[name]
            for child, held, buffers in attributes:
                child.__dict__.clear()
                child.__dict__.update(held)
                child._buffers.clear()
                child._buffers.update(buffers)
            rng.restore(drawn, generators)
            effects.kept = tuple(dict.fromkeys([*replaced, *(name for name, undo in put_back if undo())]))
            for name, copy in copies.items():
                parameter = parameters[name]
                # A comparison of fake ones is six operations, and can't show what was written where values aren't known.
                unwritten = name in versions and parameter._version == versions[name]
                if parameter.shape == copy.shape and not unwritten and not same_values(parameter.detach(), copy):
                    effects.written[name] = parameter.detach().clone()
                    parameter.data.copy_(copy)


def check_room(size_bytes: int, what: str) -> None:
    """See whether the host has memory for a copy.

    Raises:
        MemoryError: if it takes more than half of what is left.
    """
    if not size_bytes:
        return
    free_bytes = psutil.virtual_memory().available
    if size_bytes > _HOST_SHARE * free_bytes:
        sizes = f"{format_bytes(size_bytes)}, more than half of the {format_bytes(free_bytes)} that the host has left"
        raise MemoryError(f"{what} takes {sizes}")


def _held_by(
    module: nn.Module, modules: Sequence[tuple[str, nn.Module]], outside: Mapping[str, Any]
) -> list[tuple[str, Callable[[], bool]]]:
    """For each container, tensor or object of the user's in an attribute or a variable: its name, and a function that restores the contents
    and says whether they changed.
    """
    undo: list[tuple[str, Callable[[], bool]]] = []
    seen = {id(child) for _, child in modules} | {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    left = list(outside.items())  # attributes first, as items are taken from the end
    left += [
        (f"{name}.{attribute}".lstrip("."), value)
        for name, child in modules
        for attribute, value in child.__dict__.items()
        if attribute not in _TORCHS
    ]
    while left and len(seen) < _MOST_OBJECTS:
        name, value = left.pop()
        if id(value) in seen or isinstance(value, _ATOMS):
            continue
        seen.add(id(value))
        if type(value) is Tensor and value.is_leaf and value.nbytes <= _TENSOR_BYTES:
            undo.append((name, partial(_fill, value, value.detach().clone())))
        elif isinstance(value, numpy.ndarray) and value.nbytes <= _TENSOR_BYTES:
            undo.append((name, partial(_overwrite, value, value.copy())))
        elif isinstance(value, (list, deque, set, dict)) and len(value) <= _MOST_OBJECTS:
            undo.append((name, partial(_refill, value, items_of(value))))
            left += [(name, item) for item in (value.values() if isinstance(value, dict) else value) if type(item) not in _ATOMS]
        elif isinstance(value, tuple):
            left += [(name, item) for item in value if type(item) not in _ATOMS]
        elif hasattr(value, "__dict__") and package_of(type(value)) not in _LEFT_ALONE:
            left.append((name, value.__dict__))
    return undo


def _fill(tensor: Tensor, before: Tensor) -> bool:
    if tensor.shape != before.shape:
        tensor.data = before
    elif same_values(tensor, before):
        return False
    else:
        rewrite(tensor, before)
    return True


def _overwrite(array: Any, before: Any) -> bool:
    changed: bool = array.tobytes() != before.tobytes()
    array[...] = before
    return changed


def _refill(container: Any, before: Any) -> bool:
    now = items_of(container)
    flat: Callable[[Any], Iterator[Any]] = chain.from_iterable if isinstance(container, dict) else iter
    changed = len(now) != len(before) or not all(map(is_, flat(now), flat(before)))
    if changed:
        refill(container, before)
    return changed


def changing_buffers(written: Sequence[Mapping[str, Tensor]]) -> tuple[float, str] | None:
    """By how much something that a step writes (a codebook's averages, say) differs on a part of the batch, and a sentence on it.

    Args:
        written: of the step on the whole batch, then on each part of it.
    """
    names = sorted({name for values in written for name in values})
    for name in names:
        sentence = f"{name!r} depends on the batch, and each rank would keep one of its own"
        values = [each[name].double() if name in each else None for each in written]
        whole = values[0]
        for part in values[1:]:
            if whole is None or part is None or part.shape != whole.shape:
                return 1.0, sentence
            same = (part == whole) | (part.isnan() & whole.isnan())  # infinities and NaNs are the same there
            if bool(same.all()):
                continue
            finite = whole[whole.isfinite()].abs()
            scale = float(finite.max()) if finite.numel() else 0.0
            distance = float((part - whole)[~same].abs().max()) / scale if scale else 1.0
            if not distance <= _EQUAL:
                return distance, sentence
    return None


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same values in the same shape; NaN equals NaN."""
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


def uneven(calls: Sequence[Mapping[str, int]]) -> tuple[str, ...]:
    """The submodules that a step calls more or less often on a part of the batch than on the whole.

    Args:
        calls: of the step on the whole batch, then on each part of it.
    """
    names = {name for counts in calls for name in counts}
    return tuple(sorted(name for name in names if len({counts.get(name, 0) for counts in calls}) > 1))


def tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The module's parameters and buffers, by name."""
    return [*module.named_parameters(), *module.named_buffers()]


@contextmanager
def in_double(module: nn.Module) -> Iterator[None]:
    """While open, the module is in double precision; a MemoryError where the host has no room for that."""
    check_room(8 * sum(tensor.numel() for _, tensor in tensors_of(module)), "the module in double precision")
    types = {name: tensor.dtype for name, tensor in tensors_of(module)}
    # `LightningModule.dtype` is kept apart.
    told = [(vars(child), {key: each for key, each in vars(child).items() if isinstance(each, dtype)}) for child in module.modules()]
    try:
        module.double()
        yield
    finally:
        for name, tensor in tensors_of(module):
            tensor.data = tensor.data.to(types[name])
        for attributes, types_told in told:
            attributes.update(types_told)
