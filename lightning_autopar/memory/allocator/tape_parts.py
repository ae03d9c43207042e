"""The tape taken apart for a replay: what is there beforehand, then part by part. Knows no plan and no allocator."""

from __future__ import annotations

import weakref
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_autopar.memory.tape import MARKS, Action, Kind, Tape

#: The kinds that don't grow with the batch.
_FIXED_KINDS = frozenset(("parameters", "buffers", "optimizer", "gradients", "fixed"))


class TapeChange(NamedTuple):
    """A storage is allocated, freed or changed; from here on only backward (``"unsaved"``), or a node that has read it (``"read"``), keeps
    it; or a thread multiplies (``"product"``).

    ``grows``: whether its size is in proportion to the batch.
    """

    action: Action
    storage: int
    size_bytes: int
    kind: Kind
    grows: bool


@dataclass(frozen=True)
class TapePart:
    """What happens between two marks.

    Args:
        mark: the action of the mark before it.
        index: of the block, or of the outer part, as the tape numbers them.
        inputs: storages that enter the block, of a ``"forward"``.
        outputs: storages that leave it.
        unused: those that leave it and that nothing uses afterwards.
        let_go: such storages of earlier blocks, which Python frees when the part is over.
    """

    mark: Action
    index: int
    changes: list[TapeChange] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    unused: list[int] = field(default_factory=list)
    let_go: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class TapeParts:
    """A step's tape, split into parts that can be played with changes.

    Args:
        before: what is alive when the step begins, in the order in which it was made.
        parts: forward and backward.
        update: what follows: the optimizer's step and the rest.
        heirs: storages that are alive at the end, each with the one from before that it replaces in the next step (a new gradient replaces
            the old one).
        replaced: those from before that the step frees.
        storages: a number above every storage's.
    """

    before: list[TapeChange]
    parts: list[TapePart]
    update: TapePart
    heirs: dict[int, int]
    replaced: frozenset[int]
    storages: int


_KNOWN: dict[int, tuple[weakref.ref[Tape], TapeParts]] = {}


def script_of(tape: Tape) -> TapeParts:
    """A tape's parts; computed once for each tape."""
    key = id(tape)
    known = _KNOWN.get(key)
    if known is None or known[0]() is not tape:
        known = _KNOWN[key] = weakref.ref(tape, lambda _: _KNOWN.pop(key, None)), read_script(tape)
    return known[1]


def read_script(tape: Tape) -> TapeParts:
    """Split a tape into parts."""
    events = list(tape.rows())
    fixed = {storage for _, storage, _, kind in events if kind in _FIXED_KINDS}
    before: list[TapeChange] = []
    update = TapePart("optimizer", -1)
    parts: list[TapePart] = []
    part: TapePart | None = None
    alive: dict[int, tuple[Kind, int]] = {}
    freed: dict[int, tuple[Kind, int]] = {}
    there: set[int] = set()
    left: dict[int, TapePart] = {}
    # The changes of the part that is read.
    changes = before
    for action, storage, size_bytes, kind in events:
        if action == "allocate":
            assert kind is not None, "a storage is of some kind"
            alive[storage] = kind, size_bytes
            changes.append(TapeChange(action, storage, size_bytes, kind, storage not in fixed))
            if part is None:
                there.add(storage)
        elif action == "free":
            held = alive.pop(storage)
            if storage in there:
                freed[storage] = held
            changes.append(TapeChange(action, storage, 0, held[0], False))
        elif action in MARKS:
            part = update if action == "optimizer" else TapePart(action, storage)
            changes = part.changes
            if action != "optimizer":
                parts.append(part)
        elif action == "unsaved" and storage in left:
            assert part is not None, "notes follow marks"
            left[storage].unused.append(storage)
            part.let_go.append(storage)
        elif action == "unsaved" or action == "read":
            changes.append(TapeChange(action, storage, 0, alive[storage][0], False))
        elif action == "product":
            changes.append(TapeChange(action, storage, 0, "fixed", False))
        elif action == "input" or action == "output":
            assert part is not None, "notes follow marks"
            (part.inputs if action == "input" else part.outputs).append(storage)
            if action == "output":
                left[storage] = part
        else:
            held_kind = kind if kind is not None else alive[storage][0]
            alive[storage] = held_kind, size_bytes if action == "resize" else alive[storage][1]
            changes.append(TapeChange(action, storage, alive[storage][1], held_kind, storage not in fixed))
            if part is None:
                there.add(storage)
    vacant: defaultdict[tuple[Kind, int], list[int]] = defaultdict(list)
    for storage, held in reversed(freed.items()):
        vacant[held].append(storage)
    heirs = {storage: vacant[held].pop() for storage, held in alive.items() if storage not in there and vacant.get(held)}
    return TapeParts(before, parts, update, heirs, frozenset(freed), 1 + max(tape.storages, default=0))
