"""The tape taken apart for a replay: what is there beforehand, then part by part. Knows no plan and no allocator."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_autopar.memory.tape import MARKS, Action, Kind, Tape

#: What doesn't grow with the batch.
_FIXED_KINDS = frozenset(("parameters", "buffers", "optimizer", "gradients", "fixed"))


class Change(NamedTuple):
    """A storage comes, goes, changes, or is kept for backward alone from here on (``"unsaved"``).

    ``grows``: whether its size is in proportion to the batch.
    """

    action: Action
    storage: int
    size_bytes: int
    kind: Kind
    grows: bool


@dataclass(frozen=True)
class Part:
    """What happens between two marks.

    Args:
        mark: the action of the mark before it.
        index: of the block, or of the outer part, as the tape numbers them.
        changes: in order.
        inputs: storages that enter the block, of a ``"forward"``.
        outputs: storages that leave it.
    """

    mark: Action
    index: int
    changes: list[Change] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Script:
    """A step, ready to be played with changes.

    Args:
        before: what is alive when the step begins, in the order in which it was made.
        parts: forward and backward.
        update: what follows: the optimizer's step and the rest.
        heirs: storages that are alive at the end, and which of those from before they take the place of in the next step (a new gradient
            that of the old one).
        replaced: those from before that the step frees.
        storages: a number above every storage's.
    """

    before: list[Change]
    parts: list[Part]
    update: Part
    heirs: dict[int, int]
    replaced: frozenset[int]
    storages: int


def read_script(tape: Tape) -> Script:
    """Take a tape apart."""
    events = list(tape)
    fixed = {event.storage for event in events if event.kind in _FIXED_KINDS}
    before: list[Change] = []
    update = Part("optimizer", -1)
    parts: list[Part] = []
    part: Part | None = None
    alive: dict[int, tuple[Kind, int]] = {}
    freed: dict[int, tuple[Kind, int]] = {}
    there: set[int] = set()
    for action, storage, size_bytes, kind in events:
        if action in MARKS:
            if action == "optimizer":
                part = update
            else:
                part = Part(action, storage)
                parts.append(part)
            continue
        if action == "source":
            continue
        if action == "input" or action == "output":
            assert part is not None, "notes follow marks"
            (part.inputs if action == "input" else part.outputs).append(storage)
            continue
        if action == "free":
            held = alive.pop(storage)
            if storage in there:
                freed[storage] = held
            change = Change(action, storage, 0, held[0], grows=False)
        elif action == "unsaved":
            change = Change(action, storage, 0, alive[storage][0], grows=False)
        else:
            held_kind = kind if kind is not None else alive[storage][0]
            alive[storage] = held_kind, size_bytes if action in ("allocate", "resize") else alive[storage][1]
            change = Change(action, storage, alive[storage][1], held_kind, grows=storage not in fixed)
        if part is None:
            before.append(change)
            there.add(storage)
        else:
            part.changes.append(change)
    vacant: defaultdict[tuple[Kind, int], list[int]] = defaultdict(list)
    for storage, held in reversed(freed.items()):
        vacant[held].append(storage)
    heirs = {storage: vacant[held].pop() for storage, held in alive.items() if storage not in there and vacant.get(held)}
    return Script(before, parts, update, heirs, frozenset(freed), 1 + max((event.storage for event in events), default=0))
