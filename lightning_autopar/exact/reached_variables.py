"""What the user's functions reach besides their own objects: variables that they close over, globals that they name, lists on classes.

``losses = []`` beside the class and ``losses.append(loss)`` in ``training_step`` is how half of all notebooks keep a curve. Such variables
are found here, so that what a run does to them can be followed as the module's attributes are. Knows functions, and nothing of Lightning
but the names of its loaders' hooks.
"""

from __future__ import annotations

import enum
import functools
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_autopar._root import FRAMEWORK, is_installed, package_of

_STANDARD_LIBRARY = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
#: Modules whose classes hold what is put into them.
_DATAS = frozenset({"builtins", "collections", "numpy", "types"})
#: The most functions and classes to look into; a program has some hundreds. And the most items of an attribute.
_MOST_LOOKED_INTO, _MOST_ITEMS = 10_000, 1_000
_DATA = (Dataset, DataLoader)
#: Classes of objects without code of the user's.
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, list, dict, set, tuple, frozenset})


class Variables:
    """The global variables of a module, or a class's own attributes, as attributes of an object.

    Args:
        namespace: the module's own dictionary, which this object shares, or a class's.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.__dict__ = namespace


class _ClassNamespace(dict[str, Any]):
    """A class's own attributes: reads and writes here go to the class, which has no dictionary to share."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind = kind

    def data(self) -> dict[str, Any]:
        """The attributes that aren't code."""
        return {name: value for name, value in vars(self.kind).items() if not name.startswith("__") and _is_data(value)}

    def get(self, name: str, default: Any = None) -> Any:
        return vars(self.kind).get(name, default)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.kind, name, value)

    def pop(self, name: str, default: Any = None) -> Any:
        value = self.get(name, default)
        if name in vars(self.kind):
            delattr(self.kind, name)
        return value


class _CellNamespace(dict[str, Any]):
    """A variable that functions close over, as the one entry of a dictionary."""

    def __init__(self, cell: types.CellType) -> None:
        super().__init__()
        self.cell = cell

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:  # nothing was assigned yet
            return default

    def __setitem__(self, name: str, value: Any) -> None:
        self.cell.cell_contents = value

    def pop(self, name: str, default: Any = None) -> Any:
        value = self.get(name, default)
        del self.cell.cell_contents
        return value


class Reached:
    """What functions reach from ``starts``.

    Args:
        starts: instances of the user's classes, and functions; objects directly in their attributes count, too. Hooks that make loaders,
            and datasets, are left out: what they reach is data.
    """

    def __init__(self, starts: Iterable[Any]) -> None:
        #: The found objects, by their names in warnings: cells and :class:`Variables`.
        self.roots: list[tuple[str, Any]] = []
        self._names: dict[int, tuple[Variables, dict[str, None]]] = {}
        self._classes: set[type] = set()
        self._seen: set[int] = set()
        self._pending: list[Any] = []
        for start in starts:
            if isinstance(start, _DATA):
                continue
            self._look_at(start)
            for value in getattr(start, "__dict__", {}).values():
                self._look_at(value)
                items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
                for item in islice(items, _MOST_ITEMS):
                    self._look_at(item)
        while self._pending and len(self._seen) < _MOST_LOOKED_INTO:
            self._look_into(self._pending.pop(0))
        self.roots.extend((f"global {_module_of(vars(each))}", each) for each, _ in self._names.values())

    def variables(self, target: Variables) -> dict[str, Any]:
        """The variables that the functions name, as they are now."""
        namespace = vars(target)
        if isinstance(namespace, _ClassNamespace):
            return namespace.data()
        return {name: namespace[name] for name in self._names[id(namespace)][1] if name in namespace}

    def places(self) -> dict[str, tuple[dict[str, Any], str]]:
        """The places of the variables that hold data, by their names in sentences: a namespace, of which ``get``, ``[]`` and ``pop`` count,
        and the name in it.
        """
        found: dict[str, tuple[dict[str, Any], str]] = {}
        for title, root in self.roots:
            kind, _, home = title.partition(" ")
            if isinstance(root, types.CellType):
                cell = _CellNamespace(root)
                if is_followed(cell.get(home)):
                    found[_free(title, found)] = (cell, home)
                continue
            prefix = "class attribute " + home + "." if kind == "class" else "global " + ("" if home == "__main__" else home + ".")
            for name, value in self.variables(root).items():
                if is_followed(value):
                    found[_free(prefix + name, found)] = (vars(root), name)
        return found

    def _look_at(self, value: Any) -> None:
        """Record an object with the user's code, to be looked into."""
        if type(value) in _PLAIN or isinstance(value, (Tensor, *_DATA)):
            return
        while isinstance(value, (staticmethod, classmethod, functools.partial, functools.partialmethod, types.MethodType)):
            if isinstance(value, types.MethodType):
                self._note(type(value.__self__))
            value = value.func if isinstance(value, (functools.partial, functools.partialmethod)) else value.__func__
        if isinstance(value, property):
            for function in (value.fget, value.fset, value.fdel):
                self._look_at(function)
        elif isinstance(value, types.FunctionType):
            self._note(value)
        elif not isinstance(value, types.ModuleType):
            self._note(value if isinstance(value, type) else type(value))

    def _note(self, target: Any) -> None:
        if id(target) not in self._seen:
            self._seen.add(id(target))
            self._pending.append(target)

    def _look_into(self, target: Any) -> None:
        if isinstance(target, type):
            for kind in target.__mro__:
                if _is_users(getattr(sys.modules.get(kind.__module__), "__dict__", {"__name__": kind.__module__})):
                    self._look_into_class(kind)
        elif isinstance(target, types.FunctionType):
            users = _is_users(target.__globals__)
            for name, cell in zip(target.__code__.co_freevars, target.__closure__ or (), strict=True):
                if name != "__class__" and id(cell) not in self._seen:
                    self._seen.add(id(cell))
                    self._look_at(_CellNamespace(cell).get(name))
                    if users:
                        self.roots.append((f"variable {name}", cell))
            self._look_at(getattr(target, "__wrapped__", None))  # the function inside of a decorator
            if users:
                self._look_into_globals(target.__globals__, list(dict.fromkeys(names_in(target.__code__))))

    def _look_into_class(self, kind: type) -> None:
        if kind in self._classes or issubclass(kind, enum.Enum):
            return
        self._classes.add(kind)
        for name, value in vars(kind).items():
            if name != "__init__" and not name.endswith("_dataloader"):
                self._look_at(value)
        self.roots.append((f"class {kind.__qualname__}", Variables(_ClassNamespace(kind))))

    def _look_into_globals(self, namespace: dict[str, Any], names: list[str]) -> None:
        """Record which of a module's variables the code names, and which variables of other modules of the user's that it names."""
        _, known = self._names.setdefault(id(namespace), (Variables(namespace), {}))
        for name in names:
            if name in known or name.startswith("__"):
                continue
            known[name] = None
            value = namespace.get(name)
            self._look_at(value)
            if isinstance(value, types.ModuleType) and vars(value) is not namespace and _is_users(vars(value)):
                self._look_into_globals(vars(value), [each for each in names if each in vars(value)])


def names_in(code: types.CodeType) -> Iterator[str]:
    """The names of globals and attributes in code, functions in it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


def _is_data(value: Any) -> bool:
    """Whether a class's attribute is something that instances share and change, rather than code."""
    return not callable(value) and not hasattr(type(value), "__get__") and not isinstance(value, (types.ModuleType, *_DATA))


def is_followed(value: Any) -> bool:
    """Whether a variable's value is one that a step may keep something in: a progress bar or a logger of others' counts for itself."""
    kind = type(value)
    root = package_of(kind)
    home = vars(sys.modules[kind.__module__]) if kind.__module__ in sys.modules else {"__name__": kind.__module__}
    return _is_data(value) and (root in _DATAS or isinstance(value, Tensor) or _is_users(home))


def _free(name: str, taken: Mapping[str, Any]) -> str:
    """The name, with a number if it is taken."""
    return next(each for each in (name, *(f"{name} ({number})" for number in range(2, len(taken) + 3))) if each not in taken)


def _module_of(namespace: Mapping[str, Any]) -> str:
    return str(namespace.get("__name__", "__main__"))


def _is_users(namespace: Mapping[str, Any]) -> bool:
    """Whether a module's code is the user's own, rather than Python's or an installed package's."""
    root = _module_of(namespace).partition(".")[0]
    if root == "__main__":
        return True
    file = namespace.get("__file__") or ""
    library = root in FRAMEWORK or root in sys.stdlib_module_names or root == "builtins"
    return not library and not file.startswith(_STANDARD_LIBRARY) and not is_installed(file)
