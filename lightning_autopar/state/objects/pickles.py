"""Pickles in which objects that both processes have are numbers or names, and in which local functions travel by value.

Knows what stands for an object, not who surveyed it; nothing of Lightning.
"""

from __future__ import annotations

import copyreg
import hashlib
import inspect
import io
import marshal
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autopar.state.objects.contents import ATOMS, CONTAINERS, fingerprint, importable

#: The most objects of a part that is searched; a list of millions would cost seconds.
MOST_OBJECTS = 1_000_000
#: Pickled chunks of at least this size are compared by a sum, at the speed of memory.
_CHUNK_BYTES = 1024**2
#: Python pickles objects of these types by their names.
_BY_NAME = (type, types.FunctionType, types.BuiltinFunctionType)


class Known(Protocol):
    """The objects that have numbers."""

    def number(self, target: Any) -> int | None:
        """The number of an object that has one."""

    def discover(self, target: Any, path: str) -> int | None:
        """Give an object a number; None for one that is pickled as a value."""


class TooLarge(pickle.PicklingError):
    """The pickle would be larger than what may be sent."""


class Sink:
    """A file for a pickler: hashes what is written, and keeps it up to a limit."""

    def __init__(self, *, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._hash = hashlib.blake2b()
        self._chunks: list[bytes] = []
        self._size = 0

    def write(self, data: Any) -> int:
        """Take what a pickler writes."""
        size = data.nbytes if isinstance(data, memoryview) else len(data)
        self._size += size
        if self._limit_bytes == 0:
            self._hash.update(data if size < _CHUNK_BYTES else fingerprint(bytearray(0) if not size else memoryview(data).cast("B")))
        elif self._limit_bytes is not None and self._size > self._limit_bytes:
            raise TooLarge(f"more than {self._limit_bytes} bytes")
        elif self._limit_bytes is None:
            self._chunks.append(bytes(data))
        return size

    def digest(self) -> bytes:
        """Of all that was written."""
        return self._hash.digest()

    def data(self) -> bytes:
        """The kept bytes."""
        return b"".join(self._chunks)


class Pickler(pickle.Pickler):
    """Writes numbers and names for objects that both sides have, and local functions by value."""

    def __init__(
        self,
        sink: Any,
        known: Known,
        names: Mapping[int, Any],
        *,
        path: str | None = None,
        hashing: bool = False,
        limited: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(sink, protocol=pickle.HIGHEST_PROTOCOL, **options)
        self._known, self._names, self._path, self._hashing = known, names, path, hashing
        self._left = MOST_OBJECTS if limited else sys.maxsize
        #: Containers that classes have made for their pickles alone, kept so that no other object gets their addresses.
        self._made: dict[int, Any] = {}

    def persistent_id(self, target: Any) -> Any:
        """What stands for an object that isn't written."""
        self._left -= 1
        if self._left < 0:
            raise TooLarge(f"more than {MOST_OBJECTS} objects")
        if type(target) in ATOMS:
            return None
        number = self._known.number(target)
        if number is not None:
            return number
        if id(target) in self._names:
            return self._names[id(target)]
        if id(target) in self._made:
            return None
        return self._known.discover(target, self._path) if self._path is not None else None

    def reducer_override(self, target: Any) -> Any:
        """How to pickle objects that can't be pickled, or whose own pickle doesn't work here."""
        if is_shard(target):
            if not self._hashing:
                raise pickle.PicklingError("a DTensor is a part of what several ranks have")
            return self.reducer_override(target.to_local().detach().requires_grad_(target.requires_grad))
        if self._hashing and type(target) in (Tensor, nn.Parameter) and target.layout == torch.strided and not target.is_meta:
            layout = target.dtype, tuple(target.shape), target.requires_grad, target.device.type
            return fingerprint, (layout, fingerprint(target.detach()))  # never called
        # A result's graph, and hooks that wait for backward, mean nothing in another process.
        if isinstance(target, Tensor) and (
            target.device.type not in ("cpu", "meta") or (target.grad_fn is not None and not target.is_meta)
        ):
            return target.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if type(target) is types.FunctionType and not importable(target) and _globals(_home(target)) is target.__globals__:
            return _function, _parts_of_function(target), target.__dict__ or None
        if type(target) is weakref.ref and target() is not None:
            return weakref.ref, (target(),)
        if type(target) in weakref.ProxyTypes:
            return weakref.proxy, (target.__repr__.__self__,)  # its referent: the only way to get it
        kind: Any = type(target)
        if isinstance(target, Optimizer) and (kind.__getstate__ is Optimizer.__getstate__ or kind.__setstate__ is Optimizer.__setstate__):
            # Its pickle leaves out what its class adds: another optimizer, a count. A scheduler puts a function in the method's place.
            own = {name: value for name, value in vars(target).items() if name != "step" and not name.endswith("_hooks")}
            return _bare, (kind,), own
        anew = isinstance(kind.__new__, types.FunctionType) and _needs_arguments(kind)
        if (anew or self._path is not None) and kind not in copyreg.dispatch_table and not isinstance(target, _BY_NAME):
            reduced = target.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            if self._path is not None:
                held = getattr(target, "__dict__", {})
                theirs = {id(each) for each in (held, *held.values())}
                self._made |= {id(each): each for each in _containers(reduced) if id(each) not in theirs}
            plain = anew and reduced[0] is copyreg.__newobj__ and len(reduced[1]) == 1  # type: ignore[attr-defined]
            return (_bare, *reduced[1:]) if plain else reduced
        return NotImplemented


@cache
def _needs_arguments(kind: Any) -> bool:
    """Whether the class's own ``__new__`` can't be called as pickle does it: with the class alone."""
    try:
        inspect.signature(kind.__new__).bind(kind)
    except TypeError:
        return True
    return False


def _bare(kind: Any) -> Any:
    """An object without its state, as Python itself makes it."""
    return next(base for base in kind.__mro__ if isinstance(vars(base).get("__new__"), types.BuiltinFunctionType)).__new__(kind)


class ShardFinder(Pickler):
    """Pickles to find the shards in a value, and keeps no pickle."""

    def __init__(self, known: Known, names: Mapping[int, Any]) -> None:
        super().__init__(Sink(limit_bytes=0), known, names, hashing=True)
        #: The shards, each once, in the order in which they are met.
        self.found: list[Tensor] = []

    def persistent_id(self, target: Any) -> Any:
        """See :class:`Pickler`; no tensor is read."""
        named = super().persistent_id(target)
        if named is not None or not isinstance(target, Tensor):
            return named
        if is_shard(target) and not any(target is each for each in self.found):
            self.found.append(target)
        return ""


def is_shard(target: Any) -> bool:
    """Whether this is a part of what several ranks have. ``DTensor`` isn't imported here: most runs do without."""
    return isinstance(target, Tensor) and hasattr(target, "device_mesh")


def _containers(reduced: Any) -> Iterator[Any]:
    """Those that lie in the tuples of what an object's ``__reduce_ex__`` gave."""
    if type(reduced) in CONTAINERS:
        yield reduced
    elif type(reduced) is tuple:
        for each in reduced:
            yield from _containers(each)


def _home(target: types.FunctionType) -> str:
    """The module whose names a function sees; ``functools.wraps`` gives it another one's ``__module__``."""
    return str(target.__globals__.get("__name__"))


def _parts_of_function(target: types.FunctionType) -> tuple[Any, ...]:
    """A local function, such as a scheduler's lambda, by value. Both processes run the same interpreter, so its code is sent as it is."""
    cells = tuple(cell.cell_contents for cell in target.__closure__ or ())
    names = target.__module__, target.__qualname__
    return marshal.dumps(target.__code__), _home(target), names, target.__defaults__, target.__kwdefaults__, cells


def _function(
    code: bytes,
    home: str,
    names: tuple[str, str],
    defaults: tuple[Any, ...] | None,
    keywords: dict[str, Any] | None,
    cells: tuple[Any, ...],
) -> types.FunctionType:
    """Undo :func:`_parts_of_function`."""
    namespace = _globals(home)
    assert namespace is not None, home
    closure = tuple(types.CellType(cell) for cell in cells)
    function = types.FunctionType(marshal.loads(code), namespace, names[1].rpartition(".")[2], defaults, closure)
    (function.__module__, function.__qualname__), function.__kwdefaults__ = names, keywords
    return function


def _globals(module: str | None) -> dict[str, Any] | None:
    """A module's names; None where there is no such module."""
    found = sys.modules.get(module or "")
    return None if found is None else vars(found)


class Unpickler(pickle.Unpickler):
    """Reads such pickles, in a process that has the same objects."""

    def __init__(self, data: bytes, targets: list[Any], resolve: Callable[[Any], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._targets, self._resolve = targets, resolve

    def persistent_load(self, name: Any) -> Any:
        """The object that a number or a name stands for."""
        return self._targets[name] if isinstance(name, int) else self._resolve(name)


class Broken:
    """What is in the place of an object that couldn't be made; it takes any items."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignored."""

    def append(self, value: Any) -> None:
        """Ignored."""

    __setstate__ = extend = update = add = append


#: Reads in Python, so that single objects can fail.
_InPython: Any = pickle._Unpickler


class Salvage(_InPython):  # type: ignore[misc]  # any
    """Reads such pickles to their end, though objects in them can't be made: :attr:`broken` has what is left of these."""

    dispatch: ClassVar[dict[int, Any]] = dict(_InPython.dispatch)

    def __init__(self, data: bytes, targets: list[Any], resolve: Callable[[Any], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._targets, self._resolve = targets, resolve
        #: By their ids.
        self.broken: dict[int, Any] = {}

    def persistent_load(self, name: Any) -> Any:
        """As in :class:`Unpickler`."""
        return self._targets[name] if isinstance(name, int) else self._resolve(name)

    def attempt(self, code: int) -> None:
        """Run a step of the pickle that makes or fills an object."""
        taken = {pickle.BUILD[0]: 1, pickle.NEWOBJ_EX[0]: 3}.get(code, 2)
        below, arguments = self.stack[:-taken], self.stack[-taken:]
        try:
            if any(isinstance(each, Broken) for each in arguments):
                raise TypeError("a part of it couldn't be made")
            _InPython.dispatch[code](self)
        except Exception:  # a user's class may raise anything; the part that has it is named
            left = below.pop() if code == pickle.BUILD[0] else Broken()
            self.broken[id(left)] = left
            self.stack[:] = [*below, left]

    def spoils(self, value: Any, known: Known) -> bool:
        """Whether there is such an object in a value."""
        finder = _BrokenFinder(Sink(limit_bytes=0), known, {}, hashing=True)
        finder.broken = self.broken
        try:
            finder.dump(value)
        except Exception:  # half of an object, or such
            return True
        return finder.found


for _code in (pickle.REDUCE, pickle.NEWOBJ, pickle.NEWOBJ_EX, pickle.BUILD, pickle.STACK_GLOBAL):
    Salvage.dispatch[_code[0]] = partial(lambda code, reader: reader.attempt(code), _code[0])


class _BrokenFinder(Pickler):
    """Pickles to find what is broken, and keeps no pickle."""

    broken: Mapping[int, Any] = {}
    found = False

    def persistent_id(self, target: Any) -> Any:
        """See :class:`Pickler`."""
        if id(target) in self.broken:
            self.found = True
            return ""
        return super().persistent_id(target)
