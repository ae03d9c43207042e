"""What each part of a step takes by itself, read from its tape, for engines that run parts on other devices or in smaller batches.

Knows the tape alone: no plan, no engine, no torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_autopar.memory.tape import MARKS, Event, Kind, Tape

_SCALED: frozenset[Kind] = frozenset({"input", "activations", "temporary"})
_MADE: frozenset[Kind] = frozenset({"activations", "temporary", "fixed"})
#: The actions that end a forward: a backward begins, or an optimizer steps without a backward.
_TURNS = ("backward", "return", "optimizer")


@dataclass(frozen=True)
class Size:
    """Bytes of tensors: those that grow with the batch (at the whole one), and those that don't; of the latter, what a kernel takes less of
    at a small share of the batch, and what the whole batch would take in proportion to it.
    """

    scaled: int = 0
    fixed: int = 0
    sloping: int = 0
    slope: int = 0

    def at(self, share: float) -> int:
        """Bytes at a share of the batch."""
        return round(self.scaled * share) + self.fixed_at(share)

    def fixed_at(self, share: float) -> int:
        """Those that don't grow, at a share of the batch."""
        return self.fixed - max(0, self.sloping - round(self.slope * share))

    def covers(self, other: Size) -> bool:
        """Whether it is surely as large as another at any share."""
        if self.scaled < other.scaled or self.fixed < other.fixed:
            return False
        return not self.sloping or (
            self.fixed - self.sloping >= other.fixed - other.sloping and self.scaled + self.slope >= other.scaled + other.slope
        )

    def __add__(self, other: Size) -> Size:
        return Size(self.scaled + other.scaled, self.fixed + other.fixed, self.sloping + other.sloping, self.slope + other.slope)

    def __sub__(self, other: Size) -> Size:
        return Size(self.scaled - other.scaled, self.fixed - other.fixed, self.sloping - other.sloping, self.slope - other.slope)


_NOTHING = Size()


@dataclass
class Peaks:
    """The fullest moments of a part; which one is the fullest depends on the share of the batch."""

    sizes: list[Size] = field(default_factory=lambda: [_NOTHING])
    _at: dict[float, int] = field(default_factory=dict, compare=False, repr=False)

    def see(self, size: Size) -> None:
        """Keep a moment unless a fuller one is known."""
        if any(one.covers(size) for one in self.sizes):
            return
        self.sizes = [one for one in self.sizes if not size.covers(one)]
        self.sizes.append(size)
        self._at.clear()

    def at(self, share: float) -> int:
        """Bytes at the fullest of them; cached, as equal parts share their peaks."""
        found = self._at.get(share)
        if found is None:
            found = self._at[share] = max(size.at(share) for size in self.sizes)
        return found


def _both(peaks: Peaks, more: Peaks) -> Peaks:
    """The fullest moments of two; neither is changed."""
    if peaks.sizes == [_NOTHING]:
        return more
    found = Peaks(list(peaks.sizes))
    for size in more.sizes:
        found.see(size)
    return found


def _ways() -> dict[tuple[bool, bool], Peaks]:
    return {(given, lent): Peaks() for given in (False, True) for lent in (False, True)}


class CrossingBytes(NamedTuple):
    """A storage that enters a block: its size, the part that made it, and whether some part keeps it for backward."""

    size: Size
    made: int
    kept: bool


class Drawing(NamedTuple):
    """What is there when a part's forward draws for samples: tensors that it made, the same with those of parts before it that aren't kept
    for backward, and the bytes of the whole batch's draw.
    """

    own: Size
    given: Size
    whole: int


@dataclass
class StepPart:
    """One part of the step: part 2i is what runs before block i (and after block i - 1), part 2i + 1 is block i.

    Args:
        inner: made in its forward, and kept until its own backward.
        lent: made in its forward, and kept until the backward of another part, by the number of that part.
        forward: what its forward takes, only tensors that it made.
        forward_given: the same with tensors that parts before it made and that aren't kept for backward.
        again: like ``forward``, until the last tensor that its own backward needs is made: what it takes when it is recomputed.
        backward: what its backward takes, with what its forward kept and gradients being made, without complete gradients. By whether the
            gradient that reaches it, and what other parts have lent it, are counted.
        first: the same with the gradients that it completes.
        backward_again: like ``backward``, after its forward has run again: what that made is freed as soon as its last node has read it.
        first_again: likewise ``first``.
        crossing: of a block: what enters it and was made by another block or between blocks, or before the first one by parameters that
            learn (a position bias), storage by storage: what must be sent where a pipeline is cut here.
        anew: of a block: what else enters it and was made before the first block (masks, rotary embeddings), kept for backward: what must
            be made anew where a pipeline is cut here.
        returns: what its backward leaves for the parts before it: the gradients of its inputs.
        active: whether its backward makes anything.
        drawings: the moments at which its forward draws.
    """

    inner: Size = _NOTHING
    lent: dict[int, Size] = field(default_factory=dict)
    forward: Peaks = field(default_factory=Peaks)
    forward_given: Peaks = field(default_factory=Peaks)
    again: Peaks = field(default_factory=Peaks)
    backward: dict[tuple[bool, bool], Peaks] = field(default_factory=_ways)
    first: dict[tuple[bool, bool], Peaks] = field(default_factory=_ways)
    backward_again: dict[tuple[bool, bool], Peaks] = field(default_factory=_ways)
    first_again: dict[tuple[bool, bool], Peaks] = field(default_factory=_ways)
    crossing: list[CrossingBytes] = field(default_factory=list)
    anew: Size = _NOTHING
    returns: Size = _NOTHING
    active: bool = False
    drawings: list[Drawing] = field(default_factory=list)

    def drawing(self, share: float, drawn: Callable[[int], int], *, given: bool) -> int:
        """The most that its forward holds while it draws; 0 where it doesn't.

        Args:
            drawn: of the whole batch's draw, the bytes that are taken at once.
            given: whether tensors of parts before it count.
        """
        return max([(one.given if given else one.own).at(share) + drawn(one.whole) for one in self.drawings], default=0)


_KNOWN: dict[int, tuple[weakref.ref[Tape], list[StepPart]]] = {}


def parts_of(tape: Tape, blocks: int) -> list[StepPart]:
    """The parts of a step, in the order in which they run; computed once for each tape.

    Returns:
        ``2 * blocks + 1`` of them.
    """
    known = _KNOWN.get(id(tape))
    if known is None or known[0]() is not tape:
        key = id(tape)
        known = weakref.ref(tape, lambda _: _KNOWN.pop(key, None)), _Reader(tape, blocks).parts
        _KNOWN[key] = known
    return known[1]


@dataclass
class _Storage:
    """A storage that the step made."""

    size: Size
    made: int
    freed: int | None = None


class _Reader:
    """Reads one tape into parts."""

    def __init__(self, tape: Tape, blocks: int) -> None:
        self.parts = [StepPart() for _ in range(2 * blocks + 1)]
        events = list(tape)
        begin = max((index for index, event in enumerate(events) if event.action == "leave" and event.storage == -1), default=len(events))
        turn = next((index for index in range(begin, len(events)) if events[index].action in _TURNS), len(events))
        end = next((index for index in range(turn, len(events)) if events[index].action == "optimizer"), len(events))
        self._slopes, self._draws = tape.slopes, tape.draws
        self._before = {event.storage for event in events[:begin] if event.action == "allocate"}
        self._storages: dict[int, _Storage] = {}
        #: By block, what enters it and was made before the first block.
        self._early: dict[int, list[_Storage]] = {}
        self._peaks: dict[tuple[tuple[int, ...], ...], list[Peaks]] = {}
        self._kept(events[begin:turn], events[turn:end])
        self._forward(events[begin:turn])
        if turn < end:  # A step without gradients ends here.
            self._backward(events[turn:end])
        for number, early in self._early.items():
            self.parts[number].anew = sum((one.size for one in early if one.freed is not None), _NOTHING)

    @staticmethod
    def _number(action: str, storage: int) -> int:
        """The number of the part that begins with a mark."""
        return {"forward": 2 * storage + 1, "leave": 2 * storage + 2, "backward": 2 * storage + 1, "return": 2 * storage}[action]

    def _kept(self, forward: list[Event], backward: list[Event]) -> None:
        """The forward's storages that are alive at its end, and the part in whose backward each one is freed."""
        part = 0
        alive: dict[int, _Storage] = {}
        for action, storage, size_bytes, kind in forward:
            if action in MARKS:
                part = self._number(action, storage)
            elif action == "allocate" and kind in _MADE:
                alive[storage] = self._storages[storage] = _Storage(_size(size_bytes, kind), part)
            elif action == "resize" and storage in alive:
                alive[storage].size = _size(size_bytes, kind)
            elif action == "free":
                alive.pop(storage, None)
        for action, storage, _, _ in backward:
            if action in MARKS:
                part = self._number(action, storage)
            elif action == "free" and storage in alive:
                alive.pop(storage).freed = part
        for rest in alive.values():  # Such as the loss, which the step returns.
            rest.freed = rest.made

    def _forward(self, events: list[Event]) -> None:
        """Peaks of the forward, what is kept, and what crosses where."""
        part = 0
        # Bytes that grow and bytes that don't: of what this part made; of what isn't kept for backward; and of the latter, what earlier
        # parts made.
        own = own_fixed = loose = loose_fixed = given = given_fixed = 0
        seen: list[tuple[int, ...]] = []
        wanted = 0  # so many of these come before backward's last tensor
        alive: dict[int, _Storage] = {}
        for action, storage, _, _ in events:
            if action in MARKS:
                self._see_forward(part, seen, wanted)
                part, seen, wanted = self._number(action, storage), [], 0
                own = own_fixed = 0
                given, given_fixed = loose, loose_fixed
            elif action == "input" and (one := alive.get(storage)) is not None:
                if one.made:
                    self.parts[part].crossing.append(CrossingBytes(one.size, one.made, one.freed is not None))
                else:
                    self._early.setdefault(part, []).append(one)
            elif action == "allocate" and storage in self._storages:
                one = alive[storage] = self._storages[storage]
                scaled, fixed = one.size.scaled, one.size.fixed
                own, own_fixed = own + scaled, own_fixed + fixed
                if one.freed is None:
                    loose, loose_fixed = loose + scaled, loose_fixed + fixed
                slope = self._slopes.get(storage, 0)
                seen.append((own, own_fixed, given, given_fixed, fixed if slope else 0, slope))
                if one.freed == part:
                    wanted = len(seen)
                if storage in self._draws:
                    levels = Size(own, own_fixed), Size(own + given, own_fixed + given_fixed)
                    self.parts[part].drawings.append(Drawing(*levels, sum(self._draws[storage])))
            elif action == "free" and storage in alive:
                one = alive.pop(storage)
                scaled, fixed = one.size.scaled, one.size.fixed
                if one.freed is None:
                    loose, loose_fixed = loose - scaled, loose_fixed - fixed
                if one.made == part:
                    own, own_fixed = own - scaled, own_fixed - fixed
                else:
                    given, given_fixed = given - scaled, given_fixed - fixed
        self._see_forward(part, seen, wanted)
        for one in self._storages.values():
            if one.freed is None:
                continue
            maker = self.parts[one.made]
            if one.freed == one.made:
                maker.inner += one.size
            else:
                maker.lent[one.freed] = maker.lent.get(one.freed, _NOTHING) + one.size

    def _see_forward(self, part: int, seen: list[tuple[int, ...]], wanted: int) -> None:
        """Peaks of a part's forward, by what it had made and was given at each moment, in pairs of bytes that grow and bytes that don't."""
        if not seen:
            return
        known = self._peaks.get(key := ((wanted,), *seen))
        if known is None:  # most parts are alike
            known = self._peaks[key] = [Peaks(), Peaks(), Peaks()]
            for number, (own, own_fixed, given, given_fixed, *sloping) in enumerate(seen):
                known[0].see(Size(own, own_fixed, *sloping))
                known[1].see(Size(own + given, own_fixed + given_fixed, *sloping))
                if number < wanted:
                    known[2].see(Size(own, own_fixed, *sloping))
        one = self.parts[part]
        peaks = (one.forward, one.forward_given, one.again)
        one.forward, one.forward_given, one.again = (_both(before, more) for before, more in zip(peaks, known, strict=True))

    def _see_backward(self, part: int, seen: list[tuple[int, ...]]) -> None:
        """The same for a part's backward: what it holds itself, what was given and lent to it, and complete gradients."""
        if not seen:
            return
        ways = list(self.parts[part].backward)
        known = self._peaks.get(key := tuple(seen))
        if known is None:
            known = self._peaks[key] = [Peaks() for _ in range(4 * len(ways))]
            for own, own_fixed, given, given_fixed, lent, lent_fixed, done, done_fixed, read, read_fixed, *sloping in seen:
                for number, (with_given, with_lent) in enumerate(ways):
                    scaled = own + (given if with_given else 0) + (lent if with_lent else 0)
                    fixed = own_fixed + (given_fixed if with_given else 0) + (lent_fixed if with_lent else 0)
                    sizes = Size(scaled, fixed, *sloping), Size(scaled + done, fixed + done_fixed, *sloping)
                    gone = Size(read, read_fixed)
                    for place, size in enumerate((*sizes, *(size - gone for size in sizes))):
                        known[place * len(ways) + number].see(size)
        one = self.parts[part]
        for place, found in enumerate((one.backward, one.first, one.backward_again, one.first_again)):
            more = known[place * len(ways) : (place + 1) * len(ways)]
            found.update({way: _both(found[way], peaks) for way, peaks in zip(ways, more, strict=True)})

    def _backward(self, events: list[Event]) -> None:
        """Peaks of the backward."""
        part = len(self.parts) - 1
        lent_to = [_NOTHING] * len(self.parts)
        for number, maker in enumerate(self.parts):
            for until, size in maker.lent.items():
                if number <= until:
                    lent_to[until] += size
        # Bytes that grow and bytes that don't.
        own = own_fixed = lent = lent_fixed = running = running_fixed = given = given_fixed = done = done_fixed = 0
        read = read_fixed = 0
        early: set[int] = set()
        made: dict[int, tuple[int, int, int]] = {}  # and the part
        pending, sums = self._pending(events)
        seen: list[tuple[int, ...]] = []
        for action, storage, size_bytes, kind in events:
            if action in MARKS:
                self._see_backward(part, seen)
                self.parts[part].returns = Size(running + given, running_fixed + given_fixed)
                self._cross(part, [Size(scaled, fixed) for scaled, fixed, _ in made.values()])
                part, seen = self._number(action, storage), []
                done = done_fixed = running = running_fixed = read = read_fixed = 0
                early.clear()
                given, given_fixed = sum(one[0] for one in made.values()), sum(one[1] for one in made.values())
                own, own_fixed = self.parts[part].inner.scaled, self.parts[part].inner.fixed
                lent, lent_fixed = lent_to[part].scaled, lent_to[part].fixed
                seen.append((own, own_fixed, given, given_fixed, lent, lent_fixed, 0, 0, 0, 0, 0, 0))
            elif action == "allocate" and (kind in _MADE or kind == "gradients"):
                scaled, fixed = (0, 0) if storage in sums else (size_bytes, 0) if kind in _SCALED else (0, size_bytes)
                if kind == "gradients":
                    done, done_fixed = done + scaled, done_fixed + fixed
                else:
                    made[storage] = scaled, fixed, part
                    running, running_fixed = running + scaled, running_fixed + fixed
                self.parts[part].active = True
                held, held_fixed = own + running, own_fixed + running_fixed
                slope = self._slopes.get(storage, 0)
                sloping = fixed if slope else 0
                seen.append((held, held_fixed, given, given_fixed, lent, lent_fixed, done, done_fixed, read, read_fixed, sloping, slope))
                if storage in pending:
                    del made[storage]
                    running, running_fixed = running - scaled, running_fixed - fixed
                    done, done_fixed = done + scaled, done_fixed + fixed
            elif action == "become" and kind == "gradients" and storage in pending:
                done_fixed += size_bytes
            elif storage in made and (action == "free" or (action == "become" and kind == "gradients")):
                scaled, fixed, maker_part = made.pop(storage)
                if maker_part == part:
                    running, running_fixed = running - scaled, running_fixed - fixed
                else:
                    given, given_fixed = given - scaled, given_fixed - fixed
                if action == "become":
                    done_fixed += size_bytes or scaled + fixed
            elif action == "free":
                if storage in self._storages and (kept := self._storages[storage]).freed == part:
                    if kept.made == part:
                        own, own_fixed = own - kept.size.scaled, own_fixed - kept.size.fixed
                        if storage in early:
                            read, read_fixed = read - kept.size.scaled, read_fixed - kept.size.fixed
                    else:
                        lent, lent_fixed = lent - kept.size.scaled, lent_fixed - kept.size.fixed
            elif action == "read" and storage in self._storages and (kept := self._storages[storage]).freed == kept.made == part:
                early.add(storage)
                read, read_fixed = read + kept.size.scaled, read_fixed + kept.size.fixed
        self._see_backward(part, seen)
        self.parts[part].returns = Size(running + given, running_fixed + given_fixed)

    def _cross(self, part: int, gradients: list[Size]) -> None:
        """What was made before the first block crosses as well where it has a gradient: it depends on parameters that a stage hasn't got.

        Args:
            part: whose backward has just run.
            gradients: those that are there, of its inputs.
        """
        if not part % 2 or part == 1:
            return
        for one in self.parts[part].crossing:
            if one.size in gradients:
                gradients.remove(one.size)
        for early in [*self._early.get(part, ())]:
            if early.size in gradients:
                gradients.remove(early.size)
                self._early[part].remove(early)
                self.parts[part].crossing.append(CrossingBytes(early.size, early.made, early.freed is not None))

    @staticmethod
    def _pending(events: list[Event]) -> tuple[set[int], set[int]]:
        """Gradients of shared parameters, which are held after their part until other parts add to them, and their sums. For parts taken
        separately, each gradient is complete at once, and there is no sum.
        """
        begun: dict[int, int] = {}  # of this part, in order, with their sizes
        waiting: dict[int, int] = {}
        pending: set[int] = set()
        sums: set[int] = set()
        for action, storage, size_bytes, kind in events:
            if action in MARKS:
                waiting |= begun
                begun = {}
            elif action == "allocate" and kind == "fixed":
                begun[storage] = size_bytes
            elif storage in waiting and action in ("free", "become"):
                pending.add(storage)
                if action == "free":
                    sums |= {one for one, size in list(begun.items())[-1:] if size == waiting[storage]}
                del waiting[storage]
            elif action in ("free", "become"):
                begun.pop(storage, None)
        return pending | set(waiting), sums


def _size(size_bytes: int, kind: Kind | None) -> Size:
    return Size(size_bytes, 0) if kind in _SCALED else Size(0, size_bytes)
