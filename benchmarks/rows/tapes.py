"""The tape of a model of many blocks, from those of two models of few. Knows tapes; no footprint and no module.

Blocks are alike, so one of the middle is played again and again: its forward behind itself, its backward before itself, with storages of
its own. What enters a repeated block is what left the one before it. In what runs outside of blocks (parameters and states that are there
from the start, the optimizer) the taller of the two models has a run of events for its additional block, which is repeated likewise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import SequenceMatcher

from lightning_autopar.memory.tape import MARKS, NOTES, Event, Kind, Tape

#: Which block is repeated: neither the first nor the last one.
_REPEATED = 2


@dataclass
class _Segments:
    """A tape by what runs: the parts outside of blocks, and what belongs to each block."""

    before: list[Event] = field(default_factory=list)
    forward: dict[int, list[Event]] = field(default_factory=dict)
    between: list[Event] = field(default_factory=list)
    backward: dict[int, list[Event]] = field(default_factory=dict)
    after: list[Event] = field(default_factory=list)

    @classmethod
    def of(cls, tape: Tape, blocks: int) -> _Segments:
        """A plain step's: marks as the tape's documentation lists them.

        Raises:
            ValueError: for a step in another order.
        """
        found = cls()
        here = found.before
        order = iter([("leave", -1), *((action, i) for i in range(blocks) for action in ("forward", "leave")), ("return", blocks)])
        back = iter([*((action, i) for i in reversed(range(blocks)) for action in ("backward", "return")), ("optimizer", -1)])
        for event in tape:
            if event.action in MARKS:
                mark = event.action, event.storage
                if mark != next(order, None) and mark != next(back, None):
                    raise ValueError(f"the step has {mark} where a plain one hasn't")
                if event.action == "forward":
                    here = found.forward[event.storage] = []
                elif event.action == "backward":
                    here = found.backward[event.storage] = []
                elif event.action == "leave" and event.storage == blocks - 1:
                    here = found.between
                elif event.action == "optimizer":
                    here = found.after
            here.append(event)
        if len(found.forward) != blocks or len(found.backward) != blocks:
            raise ValueError("not every block has a forward and a backward")
        return found


def taller_tape(few: Tape, fewer: Tape, blocks: int, layers: int) -> Tape:
    """The tape of a model of so many blocks.

    Args:
        few: of a model of ``blocks`` blocks, fewer: of one of one block less.
        blocks: at least four.
        layers: how many blocks the tape shall have.

    Raises:
        ValueError: if the two don't tell how a further block goes.
    """
    many, some = _Segments.of(few, blocks), _Segments.of(fewer, blocks - 1)
    more = layers - blocks
    again = _REPEATED
    names = _Names(few, fewer, many, again, more)
    found: list[Event] = names.outside(many.before, some.before)
    for index in range(blocks):
        found += names.moved(many.forward[index], index)
        if index == again:
            for copy in range(1, more + 1):
                found += names.copied(many.forward[again], copy)
    found += names.outside(many.between, some.between)
    for index in reversed(range(blocks)):
        if index == again:
            for copy in range(more, 0, -1):
                found += names.copied(many.backward[again], copy)
        found += names.moved(many.backward[index], index)
    found += names.outside(many.after, some.after)
    tape = Tape(batches=few.batches)
    alive: set[int] = set()
    for event in found:
        if event.action == "allocate":
            alive.add(event.storage)
        elif event.action == "free":
            if event.storage not in alive:
                raise ValueError("a storage would be freed that isn't there")
            alive.discard(event.storage)
        elif event.action not in MARKS and event.action not in NOTES and event.storage not in alive:
            raise ValueError("a storage would be changed that isn't there")
        tape.add(event.action, event.storage, event.size_bytes, event.kind)
    return tape


class _Names:
    """Who is who: storages of copies, by the storage that they are copies of.

    Args:
        tape: that is stretched; ``many``: the same in segments.
        other: the tape of a model of one block less.
        again: index of the block that is repeated.
        more: how often.
    """

    def __init__(self, tape: Tape, other: Tape, many: _Segments, again: int, more: int) -> None:
        self.again, self.more, self.blocks = again, more, len(many.forward)
        self.next = 1 + max((event.storage for event in tape), default=0)
        self.sizes = _sizes(tape)
        self.other_sizes = _sizes(other)
        self.copies: dict[tuple[int, int], int] = {}
        self.own = frozenset(_made(many.forward[again]) + _made(many.backward[again]))
        # What the neighbours made, by what the repeated block makes in the same place.
        self.before = _counterparts(many.forward[again - 1], many.forward[again])
        self.behind = _counterparts(many.backward[again + 1], many.backward[again])
        self.there: dict[int, tuple[Kind | None, int]] = {}  # what copies made
        self.others: dict[int, tuple[Kind | None, int]] = {}  # what else is there

    def copy(self, storage: int, number: int) -> int:
        """The storage that copy ``number`` of the repeated block has in the place of this one of its own; number 0 is the block itself."""
        if number == 0:
            return storage
        key = storage, number
        if key not in self.copies:
            self.copies[key] = self.next
            self.next += 1
        return self.copies[key]

    def copied(self, events: list[Event], number: int) -> list[Event]:
        """The repeated block's events, as its copy has them."""
        found = []
        for event in events:
            storage = event.storage
            if event.action in MARKS:
                storage += number
            elif storage in self.own:
                storage = self.copy(storage, number)
            elif storage in self.before:  # what the block before it made is made by the copy before this one
                storage = self.copy(self.before[storage], number - 1)
            elif storage in self.behind:
                storage = self.copy(self.behind[storage], number + 1) if number < self.more else storage
            elif event.action == "free":
                storage = self._spare(event)
            elif event.action not in NOTES:
                raise ValueError("a repeated block would change what all blocks share")
            found.append(self._seen(event._replace(storage=storage)))
        return found

    def moved(self, events: list[Event], index: int) -> list[Event]:
        """Another block's events at its new place, or the repeated block's own: some of the neighbours are copies now."""
        behind = index > self.again
        found = []
        for event in events:
            storage = event.storage
            if event.action in MARKS:
                storage += self.more if behind else 0
            elif behind and storage in self.own:
                storage = self.copy(storage, self.more)
            elif index == self.again and storage in self.behind and self.more:
                storage = self.copy(self.behind[storage], 1)
            found.append(self._seen(event._replace(storage=storage)))
        return found

    def outside(self, events: list[Event], fewer: list[Event]) -> list[Event]:
        """What runs outside of blocks: the run that the taller model has beyond the other is there as often as it has further blocks."""

        def tokens(events: list[Event], sizes: dict[int, int]) -> list[tuple[object, ...]]:
            return [(event.action, event.kind, None if event.action in MARKS else sizes[event.storage]) for event in events]

        found = []
        matched = SequenceMatcher(None, tokens(fewer, self.other_sizes), tokens(events, self.sizes), autojunk=False)
        for what, _, _, begin, end in matched.get_opcodes():
            if what in ("delete", "replace"):
                raise ValueError("what runs outside of blocks differs by more than a block's part")
            found += [self._placed(event) for event in events[begin:end]]
            if what == "insert":
                for _ in range(self.more):
                    found += [self._further(event) for event in events[begin:end]]
        return found

    def _placed(self, event: Event) -> Event:
        if event.action == "free" and event.storage not in self.others:
            # It went with the first copy: that of the last one is what is left.
            copy = self.copies.get((event.storage, self.more))
            return self._seen(event._replace(storage=copy if copy in self.there else self._spare(event)))
        if event.action not in MARKS:
            return self._seen(event)
        last = (event.action == "leave" and event.storage == self.blocks - 1) or (event.action == "return" and event.storage == self.blocks)
        return event._replace(storage=event.storage + self.more) if last else event

    def _further(self, event: Event) -> Event:
        """An event of a repeated run: a new storage, or one of those that copies made."""
        if event.action == "allocate":
            event = event._replace(storage=self.next)
            self.next += 1
        elif event.action == "free":
            event = event._replace(storage=self._spare(event))
        else:
            raise ValueError(f"a repeated run would {event.action} something")
        return self._seen(event)

    def _spare(self, event: Event) -> int:
        """Of what copies made and is still there, the last one that is like what this event frees."""
        wanted = event.kind, self.sizes[event.storage]
        for storage in reversed(self.there):
            if self.there[storage] == wanted:
                return storage
        # A run that ends before what it made is freed: its first copy frees that.
        for storage in reversed(self.others):
            if self.others[storage] == wanted:
                return storage
        raise ValueError("nothing is there for a repeated run to free")

    def _seen(self, event: Event) -> Event:
        """Keep account of what is there."""
        if event.action in MARKS or event.action in NOTES:
            return event
        held = self.others if event.storage in self.sizes else self.there
        if event.action == "free":
            held.pop(event.storage, None)
            return event
        kind, size = held.get(event.storage, (None, 0))
        held[event.storage] = event.kind if event.kind is not None else kind, event.size_bytes if event.action != "become" else size
        return event


def _sizes(tape: Tape) -> dict[int, int]:
    """Of each storage the last size."""
    return {event.storage: event.size_bytes for event in tape if event.action in ("allocate", "resize")}


def _made(events: list[Event]) -> list[int]:
    """Storages that are allocated there, in order."""
    return [event.storage for event in events if event.action == "allocate"]


def _counterparts(theirs: list[Event], own: list[Event]) -> dict[int, int]:
    """Of each storage that a neighbour makes the one that the block itself makes in its place.

    Raises:
        ValueError: if the two blocks don't make the same.
    """
    made = [[(event.kind, event.size_bytes) for event in events if event.action == "allocate"] for events in (theirs, own)]
    if made[0] != made[1]:
        raise ValueError("two blocks make different storages")
    return dict(zip(_made(theirs), _made(own), strict=True))
