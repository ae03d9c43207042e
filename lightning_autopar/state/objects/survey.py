"""Finds what a run changed in Python objects in a forked worker, and makes the same changes to the parent's own objects.

A fork leaves every object at its address, so an object from before the fork has the same number on both sides. Objects that can change
(containers, instances, tensors, generators) are surveyed before the fork. Afterwards the worker sends what differs, and names objects from
before by their numbers. So identity, aliases and objects that can't be pickled survive. Knows nothing of Lightning.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import CellType
from typing import Any

from torch import Tensor

from lightning_autopar.exact.absent.absent_tensor import is_absent
from lightning_autopar.memory.trace.first_batch import GENERATORS
from lightning_autopar.state.objects.contents import ATOMS, CONTAINERS, dispensable, fingerprint, get_items, is_array, kind_of, set_items
from lightning_autopar.state.objects.pickles import Pickler, Salvage, ShardFinder, Sink, TooLarge, Unpickler

#: A part (an attribute, a container's items) whose pickle is larger than this isn't brought back; a warning names it.
LIMIT_BYTES = 64 * 1024**2
#: The most items of a container that are surveyed one by one, and the most objects in all.
_MOST_ITEMS, _MOST_NODES = 10_000, 50_000
#: The most of those that functions reach, which may be anything: deeper ones only get a number.
_MOST_REACHED = 10_000

#: The part of a container or a tensor that isn't an attribute.
ITEMS = ""
Part = tuple[int, str]
Fields = Callable[[Any], Mapping[str, Any] | None]


@dataclass(kw_only=True)
class Changes:
    """What differs in a worker.

    Args:
        data: a pickle of the parts to set and of what is sent along.
        parts: those to set, with a digest of each, which is equal where two workers have the same.
        gone: parts that no longer exist.
        kept: parts that can't travel, with the names that a warning calls them.
        unsent: names of what couldn't be sent along.
    """

    data: bytes
    parts: dict[Part, Any] = field(default_factory=dict)
    gone: list[Part] = field(default_factory=list)
    kept: dict[Part, str] = field(default_factory=dict)
    unsent: list[str] = field(default_factory=list)


def merged(workers: list[Changes]) -> tuple[list[set[Part]], list[str]]:
    """The parts for which each worker's version counts, and the names of parts that are lost in all of them. The first worker's version
    counts, unless later ones differ: then the last of those, since its code came further.
    """
    winners: dict[Part, int] = {}
    for number, changes in enumerate(workers):
        for part, digest in changes.parts.items():
            if part not in winners or digest != workers[0].parts.get(part):
                winners[part] = number
    taken = [{part for part, winner in winners.items() if winner == number} for number in range(len(workers))]
    for number, changes in enumerate(workers):
        taken[number].update(part for part in changes.gone if part not in winners)
    lost = {name: None for changes in workers for part, name in changes.kept.items() if part not in winners}
    return taken, [*lost, *(name for changes in workers for name in changes.unsent)]


class Survey:
    """The objects reachable from ``roots``, as they are now.

    Args:
        roots: objects by name, in an order that says by which name each is found.
        fields: the attributes of an object that count; None for all of them.
        references: objects that are to be known, but whose changes don't count.
        reached: what functions reach besides, by name, which may be the same for several. It comes after all that is in ``roots``.
    """

    def __init__(
        self, roots: Mapping[str, Any], *, fields: Fields, references: Iterable[Any] = (), reached: Iterable[tuple[str, Any]] = ()
    ) -> None:
        self._fields = fields
        self._targets: list[Any] = []
        self._paths: list[str] = []
        self._index: dict[int, int] = {}
        self._before: dict[Part, Any] = {}
        self._pending: deque[int] = deque()
        self._most_nodes = _MOST_NODES
        #: The number of the first object that is found only because functions reach it.
        self.first_reached: int | None = None
        for target in references:
            self._know(target, "")
        self._look_through(roots.items())
        #: A digest of what was found where: equal in processes whose numbers mean the same.
        self.signature = self._signature(0)
        self.first_reached = len(self._targets)
        self._most_nodes = self.first_reached + _MOST_REACHED
        self._look_through(reached)
        #: The same of what functions reach.
        self.reached_signature = self._signature(self.first_reached)

    def _look_through(self, roots: Iterable[tuple[str, Any]]) -> None:
        """Give numbers to everything that is found from the roots on, nearest first."""
        for path, target in roots:
            if id(target) not in self._index:
                self._pending.append(self._know(target, path))
        while self._pending:
            number = self._pending.popleft()
            for part, value in self.parts(number).items():
                self._before[number, part] = self._digest(number, part, value, discover=True)

    def begin(self) -> None:
        """In a process forked later: from now on, changes to what functions reach count; workers share the parent's earlier ones."""
        assert self.first_reached is not None, "the survey is complete"
        for number in range(self.first_reached, len(self._targets)):
            for part, value in self.parts(number).items():
                self._before[number, part] = self._digest(number, part, value)

    def _signature(self, first: int) -> bytes:
        found = hashlib.blake2b()
        for target, path in zip(self._targets[first:], self._paths[first:], strict=True):
            found.update(f"{path}\0{type(target).__module__}.{type(target).__qualname__}\n".encode())
        return found.digest()

    def number(self, target: Any) -> int | None:
        """The number of an object from before."""
        return self._index.get(id(target))

    def changes(self, names: Mapping[int, Any], extra: Mapping[str, Any], *, under: tuple[str, ...] | None = None) -> Changes:
        """The changes so far, in the worker.

        Args:
            names: for other objects that both sides have: ``id`` → what :meth:`apply`'s ``resolve`` takes, or a number from before.
            extra: values to send along; those that can't be are named by their keys.
            under: the names of roots that alone are looked at, with what was found in them; and besides what functions reach.
        """
        changes = Changes(data=b"")
        parts: dict[Part, Any] = {}
        differing, changes.gone = self.differing(names, under=under)
        for (number, part), (value, now) in differing.items():
            if _size_bytes(value) <= LIMIT_BYTES and self.travels(payload := self.payload(number, value), names):
                parts[number, part] = payload
                changes.parts[number, part] = now
            elif not dispensable(self._targets[number], part):
                changes.kept[number, part] = self.name(number, part)
        sent = {key: value for key, value in extra.items() if self.travels(value, names)}
        changes.unsent = [key for key in extra if key not in sent]
        sink = Sink(limit_bytes=None)
        # Together, so that an object that two parts share stays one object. Each has been within the limit.
        Pickler(sink, self, names, limited=False).dump((parts, sent))
        changes.data = sink.data()
        return changes

    def apply(self, changes: Changes, resolve: Callable[[Any], Any], lost: list[str], *, only: set[Part] | None = None) -> dict[str, Any]:
        """Repeat a worker's changes here, in the process that the survey was made in; returns what was sent along.

        Args:
            resolve: the object that a name stands for.
            lost: gets the names of those whose pickles can't be read.
            only: the parts that count; None for all of them.
        """
        try:
            parts, sent = Unpickler(changes.data, self._targets, resolve).load()
        except Exception:  # a user's class may raise anything when an object is made anew
            salvage = Salvage(changes.data, self._targets, resolve)
            parts, sent = salvage.load()
            for part in [part for part, value in parts.items() if salvage.spoils(value, self)]:
                del parts[part]
                lost.append(self.name(*part))
            for key in [key for key, value in sent.items() if salvage.spoils(value, self)]:
                del sent[key]
                lost.append(key)
        for number, part in changes.gone:
            if only is None or (number, part) in only:
                vars(self._targets[number]).pop(part, None)
        for (number, part), payload in parts.items():
            if only is not None and (number, part) not in only:
                continue
            target = self._targets[number]
            if part != ITEMS:
                vars(target)[part] = payload
            else:
                set_items(target, payload)
        extra: dict[str, Any] = sent
        return extra

    def shards(self, names: Mapping[int, Any]) -> dict[Part, list[Tensor]]:
        """The parts in which there are shards now, each with these in order; names as in :meth:`changes`."""
        found: dict[Part, list[Tensor]] = {}
        for number in self.numbers():
            for part, value in self.parts(number).items():
                if type(value) in ATOMS:
                    continue
                finder = ShardFinder(self, names)
                try:
                    finder.dump(self.payload(number, value))
                except Exception:  # a user's __reduce__ may raise anything: then the part can't be sent, and neither can its shards
                    continue
                if finder.found:
                    found[number, part] = finder.found
        return found

    # -- for those who carry changes in another way ------------------------------------------------------------------------------------

    def differing(
        self,
        names: Mapping[int, Any],
        *,
        under: tuple[str, ...] | None = None,
        reached: bool = True,
        skip: Callable[[int, str], bool] | None = None,
        lazy: bool = False,
    ) -> tuple[dict[Part, tuple[Any, Any]], list[Part]]:
        """The parts that differ now, each with its value and a digest; and those that no longer exist.

        Args:
            reached: whether to look at what functions reach, besides ``under``.
            skip: which parts aren't looked at.
            lazy: give None for the digest of a part that obviously differs, and count parts as different that are too large to be searched.
        """
        differing: dict[Part, tuple[Any, Any]] = {}
        seen: set[Part] = set()
        looked_at = [number for number in range(len(self._targets)) if under is None or self._is_under(number, under, reached)]
        for number in looked_at:
            for part, value in self.parts(number).items():
                seen.add((number, part))
                if skip is not None and skip(number, part):
                    continue
                before = self._before.get((number, part))
                if lazy and type(value) not in ATOMS and value is not self._targets[number] and (before is None or _is_of_atom(before)):
                    differing[number, part] = (value, None)
                    continue
                now = self._digest(number, part, value, names=names)
                if self.is_reached(number):
                    changed = _is_other(before, now)
                else:
                    changed = before != now or (lazy and _is_unreadable(now) and now[1] == TooLarge.__name__)
                if changed:
                    differing[number, part] = (value, now)
        numbers = set(looked_at)
        gone = [key for key in self._before if key not in seen and key[1] != ITEMS and key[0] in numbers]
        return differing, gone if skip is None else [key for key in gone if not skip(*key)]

    def target(self, number: int) -> Any:
        """The object of a number."""
        return self._targets[number]

    def path(self, number: int) -> str:
        """Where an object was found; empty for one that is only known."""
        return self._paths[number]

    def numbers(self) -> range:
        """All objects' numbers."""
        return range(len(self._targets))

    def had(self, number: int, part: str) -> bool:
        """Whether there was this part before."""
        return (number, part) in self._before

    def digest(self, owner: Any, part: str, value: Any, names: Mapping[int, Any]) -> Any:
        """A value that is equal if the part is, in all processes forked from the survey's; None for a part that can't be searched.

        Args:
            owner: the part's object: its number, or anything else for one that isn't in the survey.
        """
        if isinstance(owner, int):
            found = self._digest(owner, part, value, names=names)
            return None if _is_unreadable(found) else found
        if type(value) in ATOMS:
            return type(value), repr(value)
        sink = Sink(limit_bytes=0)
        try:
            Pickler(sink, self, names, hashing=True).dump(value)
        except Exception:  # a user's __reduce__ may raise anything
            return None
        return sink.digest()

    # -- parts -------------------------------------------------------------------------------------------------------------------------

    def _know(self, target: Any, path: str) -> int:
        self._index[id(target)] = number = len(self._targets)
        self._targets.append(target)
        self._paths.append(path)
        return number

    def _is_under(self, number: int, roots: tuple[str, ...], reached: bool) -> bool:
        return any(is_under(self._paths[number], root) for root in roots) or (reached and self.is_reached(number))

    def is_reached(self, number: int) -> bool:
        """Whether an object was found by what functions reach, and not otherwise."""
        return self.first_reached is not None and number >= self.first_reached

    def name(self, number: int, part: str) -> str:
        """A part's name in warnings."""
        return f"{self._paths[number]}.{part}" if part != ITEMS else self._paths[number]

    def parts(self, number: int) -> dict[str, Any]:
        """The parts of an object that can change, as they are now, by attribute; empty for one that only has a number."""
        target = self._targets[number]
        if not self._paths[number]:
            return {}
        parts: dict[str, Any] = {}
        if type(target) in CONTAINERS or isinstance(target, (Tensor, dict, list, set, CellType, *GENERATORS)) or is_array(target):
            parts[ITEMS] = target
        if type(target) not in CONTAINERS and not isinstance(target, (Tensor, *GENERATORS)):
            fields = self._fields(target)
            parts.update(getattr(target, "__dict__", {}) if fields is None else fields)
        return parts

    def payload(self, number: int, value: Any) -> Any:
        """A part's value for sending: a container's items by value, and everything else as it is."""
        if value is not self._targets[number]:
            return value
        return get_items(value)

    def _digest(self, number: int, part: str, value: Any, *, names: Mapping[int, Any] | None = None, discover: bool = False) -> Any:
        """A value that is equal as long as the part is; it may be equal for different parts that can't be searched."""
        kind = type(value)
        if kind in ATOMS:
            return kind, repr(value)
        if value is self._targets[number]:
            if is_absent(value):
                return type(value).__name__, id(value)  # another stage has its values
            if isinstance(value, Tensor):
                return value.dtype, value.shape, value.requires_grad, fingerprint(value.detach())
            if is_array(value):
                return value.dtype.str, value.shape, fingerprint(value)
        sink = Sink(limit_bytes=0)
        few = value is not self._targets[number] or _length(value) <= _MOST_ITEMS
        path = self.name(number, part) if part or isinstance(value, CellType) else f"{self._paths[number]}[…]"
        pickler = Pickler(sink, self, names or {}, path=path if discover and few else None, hashing=True)
        try:
            pickler.dump(self.payload(number, value))
        except Exception as error:  # a user's __reduce__ may raise anything: up to there it can be compared
            return sink.digest(), type(error).__name__, id(value), _length(value)
        return sink.digest()

    def travels(self, payload: Any, names: Mapping[int, Any]) -> bool:
        """Whether a value can be pickled within the limit; names as in :meth:`changes`."""
        try:
            Pickler(Sink(limit_bytes=LIMIT_BYTES), self, names).dump(payload)
        except Exception:  # as above: any exception means that it can't be pickled
            return False
        return True

    def discover(self, target: Any, path: str) -> int | None:
        """The number of an object seen for the first time; None for one that is pickled as a value."""
        kind = kind_of(target)
        if kind == "value":
            return None
        if kind == "node" and len(self._targets) >= self._most_nodes:
            if self.first_reached is None:
                return None
            kind = "opaque"
        number = self._know(target, path if kind == "node" else "")
        self._pending.append(number)
        return number


def is_under(path: str, root: str) -> bool:
    """Whether something was found inside of what was found at ``root``."""
    return path == root or path.startswith((f"{root}.", f"{root}["))


def _is_of_atom(digest: Any) -> bool:
    """Whether a digest is of a plain value."""
    return type(digest) is tuple and len(digest) == 2 and digest[0] in ATOMS


def _is_unreadable(digest: Any) -> bool:
    """Whether a digest is of a part's beginning only."""
    return type(digest) is tuple and len(digest) == 4 and isinstance(digest[1], str)


def _is_other(before: Any, now: Any) -> bool:
    """Whether something besides the module has changed; parts that can't be searched may be shared by processes, and always count."""
    return bool(before[1:] != now[1:] if _is_unreadable(before) and _is_unreadable(now) else before != now)


def _length(value: Any) -> int:
    """How many items an object has; 0 if unknown: a class has ``__len__`` for its instances, and a user's may raise anything."""
    try:
        return len(value)
    except Exception:
        return 0


def _size_bytes(value: Any) -> int:
    """Of a tensor or an array; 0 of what has to be pickled to know."""
    return int(value.nbytes) if isinstance(value, Tensor) or is_array(value) else 0
