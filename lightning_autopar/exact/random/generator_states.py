"""The states of the random generators that a training run draws from: captured, compared, restored, made fit for a checkpoint.

A state is a dictionary from a generator's name to its state: ``torch``, ``python``, ``numpy``, ``cuda`` (the current device's, once CUDA is
initialised), and ``own:<path>`` for each generator object that the user gave to the loader, its samplers or its dataset. Knows no loader.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any, TypeAlias, cast

import numpy
import torch

from lightning_autopar.memory.trace.first_batch import GENERATORS

RngState: TypeAlias = dict[str, Any]
_KINDS = frozenset[type](GENERATORS)


def find_generators(places: Iterable[tuple[str, object]]) -> dict[str, Any]:
    """The generator objects that are attributes of ``places``, as ``own:<place>.<attribute>``, each once; not the operating system's, which
    has no state.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for place, owner in places:
        for name, value in getattr(owner, "__dict__", {}).items():
            kinds = type(value).__mro__  # isinstance asks torch's metaclass, which is Python code, for every attribute
            if not _KINDS.isdisjoint(kinds) and random.SystemRandom not in kinds and id(value) not in seen:
                seen.add(id(value))
                found[f"own:{place}.{name}"] = value
    return found


def capture(own: Mapping[str, Any], *, cuda: bool = True) -> RngState:
    """The generators' states now. Most of the time goes to Python's and NumPy's, if they have drawn since they were last captured.

    Args:
        own: generator objects by name.
        cuda: whether the GPU's state is wanted.
    """
    state: RngState = {"torch": torch.get_rng_state(), "python": _state_of(random.getstate), "numpy": _state_of(numpy.random.get_state)}
    if cuda and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    for name, generator in own.items():
        state[name] = get_generator(generator)
    return state


#: Of the process's own generators: memory in which each was captured, with that state, the latest first. A loader that draws from a rank's
#: own stream changes to it and back at each batch.
_SEEN: defaultdict[type, deque[tuple[Any, Any]]] = defaultdict(partial(deque, maxlen=4))


def _state_of(take: Callable[[], Any]) -> Any:
    """What ``take`` returns, a method of the process's own generator. Python and NumPy put a state together from 624 numbers, one by one.
    They are asked again only where the generator's memory is a new one: most steps draw from neither.
    """
    generator = getattr(take, "__self__", None)
    if (before := _memory(generator)) is None:
        return take()
    seen = _SEEN[type(generator)]
    for memory, state in seen:
        if memory == before:
            return state
    state = take()
    if _memory(generator) == before:  # no other thread has drawn meanwhile
        seen.appendleft((before, state))
    return state


def _memory(generator: Any) -> Any:
    """The memory that holds the whole state of a generator; None where that isn't known of its kind."""
    if type(generator) is random.Random and _lie_within():
        return _bytes(generator), vars(generator)["gauss_next"]
    if type(generator) is numpy.random.RandomState and type(bits := generator._bit_generator) is numpy.random.MT19937 and _lie_within():
        return id(bits), _bytes(generator), _bytes(bits)
    return None


@cache
def _lie_within() -> bool:
    """Whether the states of both kinds lie within their objects, as far as ``_bytes`` reads: all numbers, and of NumPy's also the second
    one of a pair of normal draws. The kinds are written in C, and which of their fields lie where is no promise.
    """
    if sys.implementation.name != "cpython":  # elsewhere an object has no address
        return False
    pythons, bits = random.Random(0), numpy.random.MT19937(0)
    numpys: Any = numpy.random.RandomState(bits)
    numpys.standard_normal()
    first = _bytes(numpys)
    numpys.standard_normal()
    numbers = numpy.array(pythons.getstate()[1][:-1], dtype=numpy.uint32).tobytes()
    return numbers in _bytes(pythons) and numpys.get_state()[1].tobytes() in _bytes(bits) and first != _bytes(numpys)


def _bytes(held: object) -> bytes:
    """An object's fields, without the count of its references."""
    begin = object.__basicsize__
    return ctypes.string_at(id(held) + begin, type(held).__basicsize__ - begin)


def restore(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Set the generators that ``state`` names; those that don't exist here (another device, another loader) are left alone."""
    for name, value in state.items():
        if name == "torch":
            torch.set_rng_state(value)
        elif name == "python":
            random.setstate(value)
        elif name == "numpy":
            numpy.random.set_state(_quick(value))
        elif name == "cuda":
            if torch.cuda.is_available():
                torch.cuda.set_rng_state(value)
        elif name in own:
            set_generator(own[name], value)


def _quick(value: Any) -> Any:
    """The state with its numbers in a list: NumPy sets them one by one, and takes fifty times as long to read them from an array."""
    return (value[0], value[1].tolist(), *value[2:]) if isinstance(value, tuple) else value


def changed(before: RngState, after: RngState) -> RngState:
    """The part of ``before`` that isn't the same in ``after``."""
    return {name: value for name, value in before.items() if name in after and not _same(value, after[name])}


def words(name: str) -> str:
    """A generator's name in a state, as users know it."""
    return {"torch": "torch's random numbers", "python": "Python's random", "numpy": "NumPy's random"}.get(name) or repr(
        name.removeprefix("own:").lstrip(".")
    )


def seeded(seed: int) -> RngState:
    """The states of freshly seeded generators, without touching the process's own."""
    generator = torch.Generator()
    generator.manual_seed(seed)
    numpy_state = numpy.random.RandomState(seed % 2**32).get_state()
    return {"torch": generator.get_state(), "python": random.Random(seed).getstate(), "numpy": numpy_state}


class RankSeed:
    """A ``worker_init_fn`` that gives a rank's loader workers seeds of their own, then calls the user's."""

    def __init__(self, rank: int, then: Callable[[int], None] | None) -> None:
        self.rank, self.then = rank, then

    def __call__(self, worker_id: int) -> None:
        """Seed one worker, in its process."""
        restore(seeded((torch.initial_seed() + self.rank * 0x9E3779B97F4A7C15) % 2**63), {})
        if self.then is not None:
            self.then(worker_id)


def to_plain(state: RngState) -> dict[str, Any]:
    """The state as tensors and plain values only, which ``torch.load(weights_only=True)`` reads."""
    return {name: _plain(value) for name, value in state.items()}


def from_plain(data: Mapping[str, Any]) -> RngState:
    """The state from the result of :func:`to_plain`."""
    return {name: _unplain(value) for name, value in data.items()}


def get_generator(generator: Any) -> Any:
    """A generator object's state."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, numpy.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def set_generator(generator: Any, value: Any) -> None:
    """Give a generator object a state from :func:`get_generator`."""
    if isinstance(generator, random.Random):
        generator.setstate(value)
    elif isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = value
    else:
        generator.set_state(value)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, numpy.ndarray):
        return bool(numpy.array_equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[name]) for name, value in one.items())
    if isinstance(one, tuple) and any(isinstance(value, numpy.ndarray) for value in one):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def _plain(value: Any) -> Any:
    """Arrays and long tuples of integers become tensors, with a tag that says how to get back."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, numpy.ndarray):
        return {"array": torch.from_numpy(value.astype(numpy.int64)), "dtype": value.dtype.name}
    if isinstance(value, numpy.generic):
        return value.item()
    if isinstance(value, tuple):
        if len(value) > 16:
            return {"integers": torch.tensor(value, dtype=torch.int64)}
        return {"tuple": [_plain(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": {name: _plain(item) for name, item in value.items()}}
    return value


def _unplain(value: Any) -> Any:
    if isinstance(value, dict):
        if "array" in value:
            return value["array"].numpy().astype(value["dtype"])
        if "integers" in value:
            return tuple(value["integers"].tolist())
        if "tuple" in value:
            return tuple(_unplain(item) for item in value["tuple"])
        return {name: _unplain(item) for name, item in cast(dict[str, Any], value["dict"]).items()}
    return value
