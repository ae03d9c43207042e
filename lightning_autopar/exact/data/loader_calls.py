"""What of the module a loader calls to make a batch, as one that plays a game does: seen in the first batch, or named by its code.

A replay buffer may be filled at random at first, and by the network later: then only the code tells. Knows loaders, modules and functions;
nothing of engines.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch import Tensor, nn

from lightning_autopar._lightning import LightningModule, Trainer
from lightning_autopar.exact.logs.logging_hooks import is_quiet, reached
from lightning_autopar.exact.reached_variables import names_in
from lightning_autopar.memory.trace.first_batch import FirstBatch

#: The methods by which datasets and samplers make what they give.
_MAKING = ("__iter__", "__next__", "__getitem__", "__getitems__")
#: The most objects that are looked at, and the most items of each.
_MOST_OBJECTS, _MOST_ITEMS = 5_000, 100
_HELD_BY_ALL = (nn.Module, Trainer, Tensor, types.ModuleType, str, bytes, int, float)


def called_by_loaders(batches: Iterable[FirstBatch | None], module: LightningModule) -> str | None:
    """What the loaders of these batches call of the module, as ``"calls 'net'"``; None where nothing says that they call any of it."""
    given = [batch for batch in batches if batch is not None]
    for batch in given:
        if batch.calls:
            return f"calls {batch.calls!r}"
    named = _named([loader for batch in given for loader in batch.loaders], module)
    return None if named is None else f"may call {named}"


def _named(loaders: Iterable[Any], module: LightningModule) -> str | None:
    """The network that the loaders' code names, in words."""
    starts = [each for loader in loaders for each in _makers(loader)]
    names, whole = _held([*starts, *(owner for _, owner in _functions(starts))], module)
    if not names and not whole:
        return None
    within = {part for name, _ in module.named_modules() for part in name.split(".")}
    own = {function.__code__ for kind in type(module).__mro__ for function in vars(kind).values() if inspect.isfunction(function)}
    for code, _, _ in reached(_functions(starts), module, is_quiet):
        found = code and _called(code, names, within, {*whole, *(code.co_varnames[:1] if code in own else ())})
        if found:
            return found
    return None


def _makers(loader: Any) -> Iterator[Any]:
    """The objects and functions that make its batches."""
    found = (getattr(loader, name, None) for name in ("dataset", "sampler", "batch_sampler", "collate_fn"))
    yield from (each for each in (loader, *found) if each is not None)


def _functions(starts: Iterable[Any]) -> list[tuple[Any, Any]]:
    """The user's functions among the makers, each with the object whose attributes it sees."""
    found: list[tuple[Any, Any]] = []
    for each in starts:
        while isinstance(each, functools.partial):
            each = each.func
        if isinstance(each, (types.FunctionType, types.MethodType)):
            found.append((each, getattr(each, "__self__", each)))
        else:
            made = (inspect.getattr_static(type(each), name, None) for name in (*_MAKING, "__call__"))
            found += [(function, each) for function in made if inspect.isfunction(function)]
    return [(function, owner) for function, owner in found if not is_quiet(function)]


def _held(starts: Iterable[Any], module: LightningModule) -> tuple[set[str], set[str]]:
    """The names under which objects hold a part of the module with parameters, and those under which they hold all of it."""
    parts = {id(child) for child in module.modules() if child is not module and next(child.parameters(), None) is not None}
    children = {name for name, child in module.named_children() if id(child) in parts}
    names, whole, seen = set[str](), set[str](), set[int]()
    left = deque(("", each) for each in starts)
    while left and len(seen) < _MOST_OBJECTS:
        name, each = left.popleft()
        if each is module:
            whole.add(name)
            names |= children
        elif id(each) in parts:
            names.add(name)
        elif id(each) not in seen and not isinstance(each, _HELD_BY_ALL):
            seen.add(id(each))
            left.extend(_contents(name, each))
    return names, whole


def _contents(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, each by the name under which code reaches it."""
    if isinstance(value, dict):
        yield from ((name, each) for each in islice(value.values(), _MOST_ITEMS))
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from ((name, each) for each in islice(value, _MOST_ITEMS))
    elif isinstance(value, types.MethodType):
        yield from (("", value.__self__), (name, value.__func__))  # the function is what has the name
    elif isinstance(value, functools.partial):
        yield from ((name, each) for each in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, types.FunctionType):
        if not is_quiet(value):
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            yield from ((variable, cell.cell_contents) for variable, cell in cells if cell != types.CellType())  # an empty one raises
            yield from ((variable, value.__globals__[variable]) for variable in names_in(value.__code__) if variable in value.__globals__)
    elif not isinstance(value, type):
        yield from getattr(value, "__dict__", {}).items()
        methods = (each for kind in type(value).__mro__ for each in vars(kind).values())
        yield from ((name, each) for each in methods if inspect.isfunction(each))


def _called(code: types.CodeType, names: set[str], within: set[str], whole: set[str]) -> str | None:
    """What code calls, or hands on, of what has one of these names: a part of the module, or all of it where that is called.

    Args:
        within: the names of all submodules, which code may call by way of a part; another attribute may be a setting.
    """
    steps = [each for each in dis.get_instructions(code) if each.opname != "CACHE"]
    for place, (before, step, after) in enumerate(zip([*steps[:1], *steps], steps, [*steps[1:], *steps[-1:]], strict=False), 1):
        if not isinstance(step.argval, str) or not step.opname.startswith("LOAD") or step.opname in ("LOAD_CONST", "LOAD_CLOSURE"):
            continue
        if step.argval in names:
            last = next(
                (each for each in steps[place:] if each.opname != "LOAD_ATTR" or _is_call(each) or each.argval not in within), after
            )
            if last.opname != "LOAD_ATTR" or _is_call(last):
                return repr(step.argval)
        if step.argval in whole and (_is_call(step) or "PUSH_NULL" in (before.opname, after.opname)):
            return "the module"
    inner = (_called(each, names, within, whole) for each in code.co_consts if isinstance(each, types.CodeType))
    return next(filter(None, inner), None)


def _is_call(step: dis.Instruction) -> bool:
    """Whether what it loads is called, as Python prepares it."""
    return step.opname == "LOAD_METHOD" or "NULL" in step.argrepr
