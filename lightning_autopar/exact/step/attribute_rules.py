"""How what a step keeps on its module (sums, counts, lists of outputs) grows with the samples: found out on a batch and its parts.

A value has a path: the attribute's name, then keys, positions and names of fields, ``"+"`` for what is appended to a list. Knows numbers,
tensors and what holds them; nothing of modules, ranks or communication.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from operator import is_
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor

from lightning_autopar._root import NOT_THE_USERS, package_of
from lightning_autopar.exact.data.rank_share import BatchShare

Path = tuple[Any, ...]
#: How the parts' values of a path combine into the whole batch's; see :func:`combined`.
PathRules = Mapping[Path, Any]
#: By the step that keeps the values.
KeptRules = Mapping[str, PathRules]

#: Likelier ones first. ``growth``: the amounts that parts add to the value that they all found are summed. ``rows``: a tensor has as many
#: rows to each sample, ``columns``: as many entries of dimension 1, as a recurrent layer's state has; ``items``: a list is extended by as
#: many items.
_RULES = ("same", "mean", "weighed", "growth", "sum", "max", "min", "rows", "columns", "items", "union")
#: The rules of tensors that have their samples in a dimension.
ROW_RULES = frozenset({"rows", "columns"})
#: Relative difference up to which a rule explains a value, in single precision.
_EQUAL = 1e-5
#: Deeper levels, longer lists and larger tensors are data rather than what a step keeps.
_DEEP, _MOST_ITEMS, _TENSOR_BYTES = 5, 10_000, 64 << 20
#: In a list with more items, such as a replay buffer, it is looked whether they have moved up.
_LONG = 100
_BUILTIN = frozenset({dict, OrderedDict, defaultdict, set, list, deque})
#: Stands for a value that is missing, or can't be copied.
MISSING = SimpleNamespace()


@dataclass(frozen=True, kw_only=True)
class Before:
    """A container, a tensor or an object as a step found it.

    Args:
        copy: of what it held; None for a list or a dictionary that only grows, ``MISSING`` if it can't be copied.
        items: these, where the copy is None and they may be dropped: by a full ``deque(maxlen=...)``, or by ``pop(0)``.
    """

    container: Any
    copy: Any
    length: int = 0
    items: tuple[Any, ...] | None = None

    def left(self) -> int:
        """How many of a list's items are still at its beginning, whatever was appended."""
        if self.items is None:
            return self.length if self.length <= len(self.container) else 0
        now = list(self.container)
        tails = (self.items[dropped:] for dropped in range(max(0, self.length - len(now)), self.length + 1))
        return next(len(tail) for tail in tails if all(map(is_, tail, now)))


@dataclass(kw_only=True)
class Evidence:
    """What is known of a step: the rules that explain the change of each path in all tried batches and splits."""

    rules: dict[Path, tuple[str, ...]] = field(default_factory=dict)
    #: Paths that the last tried batch didn't change.
    _quiet: set[Path] = field(default_factory=set)
    #: For paths that are always numbers: the values on the whole batch and on the parts.
    _numbers: dict[Path, list[list[float]]] = field(default_factory=dict)
    #: The most bytes that a path's rows had in a batch.
    row_bytes: dict[Path, int] = field(default_factory=dict)

    def settled(self) -> tuple[dict[Path, Any], tuple[Path, ...]]:
        """The likeliest rule for each path, and the paths that no rule explains. Values that are made once, independent of samples, have
        none. A number that is the quotient of two others of its object (an average) has the rule ``("ratio", one, other)``.
        """
        found: dict[Path, Any] = {
            path: rules[0] for path, rules in self.rules.items() if rules and not (rules[0] == "same" and path in self._quiet)
        }
        left = [path for path, rules in self.rules.items() if not rules]
        for path in left:
            beside = [other for other in found if other[:-1] == path[:-1] and isinstance(found[other], str) and other in self._numbers]
            for one, other in permutations(beside, 2):
                if self._is_ratio(path, one, other):
                    found[path] = ("ratio", one[-1], other[-1])
                    break
        return found, tuple(path for path in left if path not in found)

    def _is_ratio(self, path: Path, one: Path, other: Path) -> bool:
        values, above, below = (self._numbers.get(each, []) for each in (path, one, other))
        if not len(values) == len(above) == len(below) > 0:
            return False
        rows = (row for rows in zip(values, above, below, strict=True) for row in zip(*rows, strict=True))
        return all(y and math.isclose(value, x / y, rel_tol=_EQUAL) for value, x, y in rows)

    def see(
        self, before: Mapping[str, Any], whole: Mapping[str, Any], parts: Sequence[Mapping[str, Any]], shares: Sequence[BatchShare]
    ) -> None:
        """Add one batch, run whole and in parts.

        Args:
            before: the attributes that each run found, by :func:`taken`.
            whole: the same after the step on the whole batch.
            parts: after the step on each part.
        """
        for name in whole:
            if all(name in part for part in parts):
                values = [plain(each[name]) for each in (whole, *parts)]
                self._compare((name,), plain(before.get(name, MISSING)), values, shares)

    def _compare(self, path: Path, before: Any, values: list[Any], shares: Sequence[BatchShare]) -> None:
        kinds = {type(value) for value in values}
        kind = kinds.pop() if len(kinds) == 1 else None
        lengths = {len(value) for value in values} if kind in (list, dict, tuple) else set()
        kept = before if kind is not None and isinstance(before, kind) else None
        dropped = [_dropped(value, kept or []) for value in values] if kind is list else []
        if kind is dict and len({tuple(map(repr, value)) for value in values}) == 1:
            for key in values[0]:
                self._compare((*path, key), (kept or {}).get(key, MISSING), [value[key] for value in values], shares)
        elif kind is tuple and len(lengths) == 1:
            for index, items in enumerate(zip(*values, strict=True)):
                self._compare((*path, index), kept[index] if kept and index < len(kept) else MISSING, list(items), shares)
        elif kind is list and kept is not None and lengths == {len(kept)} and not all(dropped):
            for index, items in enumerate(zip(*values, strict=True)):
                self._compare((*path, index), kept[index], list(items), shares)
        elif kind in (list, dict):
            lists = [list(value.items()) if kind is dict else value for value in values]
            old = [] if kept is None else list(kept.items()) if kind is dict else kept
            dropped = dropped or [0 if alike(value[: len(old)], old) else None for value in lists]
            if None in dropped:
                tails = lists  # another list than before
            else:
                tails = [value[len(old) - count :] for value, count in zip(lists, dropped, strict=True) if count is not None]
            if kind is list and len({len(tail) for tail in tails}) == 1:
                for items in zip(*tails, strict=True):
                    self._compare((*path, "+"), MISSING, list(items), shares)
            else:
                self._note((*path, "+"), MISSING, tails, shares)
        else:
            self._note(path, before, values, shares)

    def _note(self, path: Path, before: Any, values: list[Any], shares: Sequence[BatchShare]) -> None:
        whole, *parts = values
        known = self.rules.get(path, _RULES)
        if all(alike(value, before) for value in values):
            self._quiet.add(path)
            explaining = known
            if path not in self.rules:
                return  # as far as is known, the step keeps nothing there
        else:
            self._quiet.discard(path)
            explaining = tuple(rule for rule in known if _explains(rule, before, whole, parts, shares))
        self.rules[path] = explaining
        if ROW_RULES & {*explaining}:
            self.row_bytes[path] = max(self.row_bytes.get(path, 0), whole.nbytes)
        elif all(isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1) for value in values):
            self._numbers.setdefault(path, []).append([float(value) for value in values])


def _dropped(value: list[Any], before: list[Any]) -> int | None:
    """How many of the items that a list had were dropped at its beginning when others were appended; None if it is another list. Entries
    that were written in their places, such as counts, may look like that where they were alike; so most places must have changed.
    """
    length = len(before)
    if alike(value[:length], before):
        return 0
    half = min(length // 2, len(value)) if length > _LONG else 0
    by = (count for count in range(1, half + 1) if alike(value[0], before[count]))
    found = next((count for count in by if alike(value[: length - count], before[count:])), None)
    return found if sum(not alike(*pair) for pair in zip(value, before, strict=False)) > half else None


def _explains(rule: str, before: Any, whole: Any, parts: Sequence[Any], shares: Sequence[BatchShare]) -> bool:
    try:
        made = combined(rule, before, parts, shares)
    except (TypeError, ValueError, RuntimeError):  # the rule can't be applied to it
        return False
    scale = max((_largest(value) for value in (whole, *parts)), default=0.0)
    return type(made) is type(whole) and alike(made, whole, _EQUAL * scale)


def combined(rule: str, before: Any, values: Sequence[Any], shares: Sequence[BatchShare]) -> Any:
    """The value that the whole batch would leave, from those that its parts left.

    Args:
        rule: one of those that :class:`Evidence` finds.
        shares: the parts, each with at least one sample.

    Raises:
        TypeError: if the rule can't be applied to such values.
        ValueError: if their shapes don't fit together.
    """
    first = values[0]
    if rule == "same":
        if not all(alike(value, first) for value in values):
            raise ValueError("the parts' values differ")
        return first
    if rule == "columns":
        rows = _in_order([_turned(value) for value in values], shares).transpose(0, 1).contiguous()
        return rows if isinstance(first, Tensor) else rows.numpy()
    if rule in ("rows", "items"):
        if isinstance(first, list) != (rule == "items"):
            raise TypeError("rows are a tensor's, items a list's")
        return _in_order(values, shares)
    if rule == "union":
        if not isinstance(first, (set, frozenset)):
            raise TypeError("no sets")
        return type(first)().union(*values)
    numbers = [_number(value) for value in values]
    if len({number.shape for number in numbers}) > 1:
        raise ValueError("the parts' values have other shapes")
    if rule in ("mean", "weighed"):
        if not numbers[0].is_floating_point():
            raise TypeError("whole numbers have no mean")
        total = sum(share.rows for share in shares)
        weights = [share.rows / total if rule == "mean" else share.fraction() for share in shares]
        made: Any = sum((number.double() * weight for number, weight in zip(numbers, weights, strict=True) if weight), torch.zeros(()))
    elif rule == "growth":
        nothing = before is None or before is MISSING
        found = torch.zeros_like(numbers[0]) if nothing else _number(before).to(numbers[0].device)
        if found.shape != numbers[0].shape and found.dim():
            raise ValueError("the values have other shapes than before")
        made = found + sum(_wide(number) - _wide(found) for number in numbers)
    elif rule == "sum":
        made = sum(_wide(number) for number in numbers)
    else:
        stacked = torch.stack([_wide(number) for number in numbers])
        made = stacked.amax(0) if rule == "max" else stacked.amin(0)
    return _as(first, made)


def _number(value: Any) -> Tensor:
    """Any number or numbers as a tensor.

    Raises:
        TypeError: if it is none.
    """
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, (bool, int, float)):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        return torch.from_numpy(numpy.array(value))
    raise TypeError(f"a {type(value).__name__} is no number")


def _wide(number: Tensor) -> Tensor:
    return number.double() if number.is_floating_point() else number.long()


def _as(like: Any, made: Any) -> Any:
    """The number in the type of another one."""
    if isinstance(like, Tensor):
        return (made if like.is_floating_point() or not made.is_floating_point() else made.round()).to(like.dtype)
    if isinstance(like, (bool, int, float)):
        return type(like)(made.item()) if isinstance(like, float) else type(like)(round(made.item()))
    array = made.numpy()
    return array.astype(like.dtype) if isinstance(like, numpy.ndarray) else like.dtype.type(array)


def _in_order(values: Sequence[Any], shares: Sequence[BatchShare]) -> Any:
    """Rows or items, equally many for each sample, in the order of the batch's samples."""
    first, of = values[0], shares[0].of
    if isinstance(first, list):
        whole: list[Any] = [None] * (of * _each(first, shares[0]))
        for value, share in zip(values, shares, strict=True):
            each = _each(value, share)
            for place, sample in enumerate(share.indices):
                whole[sample * each : (sample + 1) * each] = value[place * each : (place + 1) * each]
        return whole
    rows = [_number(value) for value in values]
    if any(not value.dim() for value in rows):
        raise TypeError("a number has no rows")
    each = _each(rows[0], shares[0])
    made = rows[0].new_empty((of, each, *rows[0].shape[1:]))
    for value, share in zip(rows, shares, strict=True):
        if _each(value, share) != each:
            raise ValueError("samples have different numbers of rows")
        made[torch.tensor(list(share.indices), device=made.device)] = value.to(made.device).unflatten(0, (share.rows, each))
    made = made.flatten(0, 1)
    return made if isinstance(first, Tensor) else made.numpy()


def _turned(value: Any) -> Tensor:
    """A tensor whose columns are rows."""
    number = _number(value)
    if number.dim() < 2:
        raise TypeError("a number or a vector has no columns")
    return number.transpose(0, 1)


def _each(value: Any, share: BatchShare) -> int:
    """How many of its rows belong to one sample."""
    if not len(value) or len(value) % share.rows:
        raise ValueError("the rows are no multiple of the samples")
    return len(value) // share.rows


def _largest(value: Any) -> float:
    if isinstance(value, (list, tuple)):
        return max((_largest(each) for each in value), default=0.0)
    if isinstance(value, (int, float)):  # by far the most: those of a replay buffer
        return abs(float(value)) if math.isfinite(value) else 0.0
    try:
        number = _number(value)
    except TypeError:
        return 0.0
    finite = number[number.isfinite()] if number.is_floating_point() else number
    return float(finite.abs().max()) if finite.numel() else 0.0


def alike(one: Any, other: Any, within: float = 0.0) -> bool:
    """Whether two values are the same, numbers up to a tolerance."""
    if one is other:
        return True
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(alike(a, b, within) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(value, other[key], within) for key, value in one.items())
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return type(one) is type(other) and (one == other or abs(one - other) <= within or (one != one and other != other))
    try:
        a, b = _number(one), _number(other)
    except TypeError:
        return type(one) is type(other) and isinstance(one, (str, bytes, set, frozenset, type(None))) and one == other
    if a.shape != b.shape or type(one) is not type(other):
        return False
    a, b = a.double(), b.double()
    return bool(((a - b).abs() <= within).logical_or(a == b).logical_or(a.isnan() & b.isnan()).all())


def taken(value: Any, path: Path = (), rules: PathRules | None = None) -> Any:
    """A value that a step may change, with a copy of what it holds.

    Args:
        rules: where they are known; of lists to which items are appended, the items themselves aren't copied.
    """
    if isinstance(value, (bool, int, float, str, bytes, type(None), numpy.generic)):
        return value
    if type(value) is Tensor and value.nbytes <= _TENSOR_BYTES:
        return Before(container=value, copy=value.detach().clone())
    if isinstance(value, (numpy.ndarray, set, frozenset)):
        return Before(container=value, copy=value.copy())
    if isinstance(value, (list, deque, dict)) and rules is not None and _grows(path, rules) and not _changes_in_place(path, rules):
        noted = tuple(value) if not isinstance(value, dict) and len(value) <= _MOST_ITEMS else None
        return Before(container=value, copy=None, length=len(value), items=noted)
    copy: Any = MISSING
    length = tuple.__len__(value) if isinstance(value, tuple) else len(value) if isinstance(value, (list, deque, dict)) else 0
    if len(path) > _DEEP or length > _MOST_ITEMS:  # a user's tuple may refuse to tell its own
        pass
    elif isinstance(value, (list, deque, tuple)):
        items = [taken(each, (*path, index), rules) for index, each in enumerate(value)]
        copy = tuple(items) if isinstance(value, tuple) else items
    elif isinstance(value, dict) or is_users(value):
        fields = value if isinstance(value, dict) else vars(value)
        copy = {key: taken(each, (*path, key), rules) for key, each in fields.items()}
    return Before(container=value, copy=copy, length=length)


def rewrite(tensor: Tensor, copy: Tensor) -> None:
    """Give a tensor the values of its copy. Entries of an expanded tensor are the same ones in memory, and are written once."""
    for dim, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride == 0 and size > 1:
            tensor, copy = tensor.narrow(dim, 0, 1), copy.narrow(dim, 0, 1)
    tensor.data.copy_(copy)


def items_of(container: Any) -> list[Any]:
    """What a container has, by Python's own methods; of a dictionary the pairs."""
    kind = _builtin(container)
    return [*(kind.items(container) if issubclass(kind, dict) else kind.__iter__(container))]


def refill(container: Any, items: Any) -> None:
    """Give a container these items, by Python's own methods: a subclass may have others, or none that work."""
    kind = _builtin(container)
    kind.clear(container)
    (kind.update if issubclass(kind, (dict, set)) else kind.extend)(container, items)


def _builtin(container: Any) -> Any:
    kind = type(container)
    return kind if kind in _BUILTIN else next(base for base in kind.__mro__ if base in _BUILTIN)


def plain(value: Any) -> Any:
    """The copied value of :func:`taken`."""
    copy = value.copy if isinstance(value, Before) else value
    if isinstance(copy, dict):
        return {key: plain(each) for key, each in copy.items()}
    return type(copy)(plain(each) for each in copy) if isinstance(copy, (list, tuple)) else copy


def restored(value: Any) -> Any:
    """The value that was given to :func:`taken`, with its contents restored."""
    if not isinstance(value, Before) or value.copy is MISSING:
        return value.container if isinstance(value, Before) else value
    container, copy = value.container, value.copy
    if isinstance(container, Tensor):
        rewrite(container, copy)
    elif isinstance(container, (list, deque, dict)) and copy is None:
        _put_tail(container, value.length, []) if value.items is None else refill(container, value.items)
    elif isinstance(container, (list, deque)):
        items = [restored(each) for each in copy]
        refill(container, items)
    elif isinstance(container, tuple):
        for each in copy:
            restored(each)
    elif isinstance(container, set):
        refill(container, copy)
    elif isinstance(copy, dict):
        fields = {key: restored(each) for key, each in copy.items()}
        held = container if isinstance(container, dict) else vars(container)
        refill(held, fields)
    elif not isinstance(container, frozenset):
        container[...] = copy
    return container


def _grows(path: Path, rules: PathRules) -> bool:
    return any(rule[: len(path) + 1] == (*path, "+") for rule in rules)


def _changes_in_place(path: Path, rules: PathRules) -> bool:
    """Whether items that a list has already are changed, too: lists that the first batch put into it, to which later ones append."""
    return any(rule[: len(path)] == path and isinstance((*rule, "+")[len(path)], int) for rule in rules)


def is_users(value: Any) -> bool:
    """Whether it is an object of a class of the user's, whose fields a step may change."""
    if isinstance(value, (torch.nn.Module, type)) or not hasattr(value, "__dict__"):
        return False
    return package_of(type(value)) not in NOT_THE_USERS


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The place of a value that a step has changed.

    Args:
        before: what was there, by :func:`taken`.
        value: what the step left.
    """

    path: Path
    before: Any
    value: Any
    put: Callable[[Any], None]


def slots(path: Path, before: Any, value: Any, rules: PathRules, put: Callable[[Any], None]) -> Iterator[Slot]:
    """The places under a path that have rules, in an order that all parts of a batch have.

    Args:
        before: the same before the step, by :func:`taken`.
        value: as the step left it.
    """
    if path in rules:
        yield Slot(path=path, before=before, value=value, put=put)
        return
    if not any(rule[: len(path)] == path for rule in rules):
        return
    old = before.copy if isinstance(before, Before) else None
    if isinstance(value, (list, deque, dict)):
        grown = _grows(path, rules)
        length = before.left() if grown and isinstance(before, Before) and before.container is value else 0
        if rules.get((*path, "+")) == "items":
            yield Slot(path=(*path, "+"), before=MISSING, value=_tail(value, length), put=partial(_put_tail, value, length))
        elif isinstance(value, dict):
            for key in list(value):
                known = old.get(key, MISSING) if isinstance(old, dict) else MISSING
                yield from slots((*path, key), known, value[key], rules, partial(value.__setitem__, key))
        else:
            for index in range(0 if _changes_in_place(path, rules) else length, len(value)):
                new = grown and index >= length
                known = old[index] if isinstance(old, list) and index < len(old) and not new else MISSING
                yield from slots((*path, "+" if new else index), known, value[index], rules, partial(value.__setitem__, index))
    elif isinstance(value, tuple):
        items = list(value)

        def put_item(index: int, new: Any) -> None:
            items[index] = new
            put(type(value)(*items) if hasattr(value, "_fields") else type(value)(items))

        for index, each in enumerate(value):
            known = old[index] if isinstance(old, tuple) and index < len(old) else MISSING
            yield from slots((*path, index), known, each, rules, partial(put_item, index))
    elif is_users(value):
        for name, each in list(vars(value).items()):
            known = old.get(name, MISSING) if isinstance(old, dict) else MISSING
            yield from slots((*path, name), known, each, rules, partial(setattr, value, name))


def _tail(value: Any, length: int) -> list[Any]:
    return list(value.items())[length:] if isinstance(value, dict) else list(value)[length:]


def _put_tail(value: Any, length: int, new: list[Any]) -> None:
    if isinstance(value, list):
        value[length:] = new
        return
    kept = _tail(value, 0)[:length]
    value.clear()
    (value.update if isinstance(value, dict) else value.extend)([*kept, *new])
