"""A recorded tape → what each part of the step takes, and the step's fullest moments. Data only: no torch, no module, no plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from lightning_autopar.memory.footprint import Moment
from lightning_autopar.memory.tape import KINDS, MARKS, NOTES, Action, Kind, Tape


class Places:
    """Where candidates for blocks lie among those that are kept, and what runs between them.

    Parts are numbered as in :class:`MemoryTracker`: 2 i + 1 is block i, 2 i what runs before it and after block i - 1.

    Args:
        tape: as recorded, with the candidates' indices.
        kept: indices of the candidates that are blocks.
    """

    def __init__(self, tape: Tape, kept: Collection[int]) -> None:
        order = dict.fromkeys(event.storage for event in tape if event.action == "forward" and event.storage in kept)
        #: Place of each block, in the order in which they run, by its index among the candidates.
        self.blocks = {candidate: place for place, candidate in enumerate(order)}

    def part(self, part: int) -> int:
        """The number that a part has among the kept ones; a candidate that isn't kept belongs to the outer part around it."""
        candidate = (part - 1) // 2
        if candidate in self.blocks:
            return 2 * self.blocks[candidate] + (1 if part % 2 else 2)
        return 2 * sum(index < candidate for index in self.blocks)

    def settled(
        self,
        tape: Tape,
        arrived: Collection[int],
        last_uses: Mapping[int, int],
        let_go: Mapping[int, int] | None = None,
        reads: Mapping[int, int] | None = None,
    ) -> Tape:
        """The tape with the marks of the kept parts, and with what was found out later.

        Args:
            arrived: numbers of the storages in which gradients of parameters arrived: they were fixed from the start.
            last_uses: positions on the tape after which forward doesn't use a storage any more, by its number.
            let_go: positions at which the code of blocks dropped what it had made, by the storage's number, in that order.
            reads: positions at which nodes of backward had read for the last time what blocks saved for them, by the storage's number.
        """
        result = Tape(batches=tape.batches, slopes=tape.slopes, draws=tape.draws)
        last: tuple[Action, int] | None = None
        inside = False
        unsaved = self._unsaved(tape, last_uses, let_go or {})
        had_read: dict[int, list[int]] = {}
        for number, position in (reads or {}).items():
            had_read.setdefault(position, []).append(number)
        for position, (action, storage, size_bytes, kind) in enumerate(tape):
            for number in had_read.get(position, ()):
                result.add("read", number)
            for number in unsaved.get(position, ()):
                result.add("unsaved", number)
            if action not in MARKS:
                if action not in NOTES:
                    result.add(action, storage, size_bytes, "fixed" if kind == "temporary" and storage in arrived else kind)
                elif inside or action == "product":
                    result.add(action, storage)
                continue
            if action == "forward":
                inside = storage in self.blocks
                if not inside:
                    continue
            mark = self._mark(action, storage)
            if last is not None and last[0] == "backward" and mark not in (last, ("return", last[1])):
                result.add("return", last[1])  # nothing runs between two blocks
            if mark != last:
                result.add(*mark)
                last = mark
        return result

    def _unsaved(self, tape: Tape, last_uses: Mapping[int, int], let_go: Mapping[int, int]) -> dict[int, list[int]]:
        """Storages that blocks make and leave behind, by the position after which their forward no longer uses them."""
        found: dict[int, list[int]] = {}
        order = {number: place for place, number in enumerate(let_go, 1)}
        made: set[int] | None = None
        for action, storage, _, _ in tape:
            if action == "forward":
                made = set() if storage in self.blocks else None
            elif made is None:
                continue
            elif action == "allocate":
                made.add(storage)
            elif action in ("free", "output"):
                made.discard(storage)
            elif action in MARKS:
                for number in sorted(made & last_uses.keys(), key=lambda number: (order.get(number, 0), number)):
                    found.setdefault(max(last_uses[number], let_go.get(number, 0)), []).append(number)
                made = None
        for number, position in self._dead_ends(tape, last_uses).items():
            found.setdefault(position, []).append(number)
        return found

    def _dead_ends(self, tape: Tape, last_uses: Mapping[int, int]) -> dict[int, int]:
        """Storages that blocks return and that nothing uses afterwards, such as unneeded attention weights, with the position of the mark
        at which Python frees them: ``outputs = block(…)`` holds them until the next block has run.
        """
        found: dict[int, int] = {}
        returned: list[int] = []
        returning: list[int] | None = None
        for position, (action, storage, _, _) in enumerate(tape):
            if action in MARKS:
                if returning is not None or action not in ("forward", "leave"):
                    found.update((number, position) for number in returned)
                    returned = returning or []
                returning = [] if action == "forward" and storage in self.blocks else None
            elif action == "free":
                returned = [number for number in returned if number != storage]
            elif returning is None:
                continue
            elif action == "output" and last_uses.get(storage, position + 1) <= position:
                returning.append(storage)
            elif action == "input":  # it is kept by a later block that is recomputed, used or not
                returned = [number for number in returned if number != storage]
                found.pop(storage, None)
        return found

    def _mark(self, action: Action, index: int) -> tuple[Action, int]:
        if action == "optimizer":
            return action, -1
        if action == "forward":
            return action, self.blocks[index]
        if action == "leave":
            return action, self.part(2 * index + 2) // 2 - 1
        part = self.part(2 * index + (action == "backward"))
        return ("backward" if part % 2 else "return"), part // 2


@dataclass
class PartBytes:
    """The bytes of a part of the step; the fields are those of :class:`LayerFootprint`."""

    activation_bytes: int = 0
    fixed_bytes: int = 0
    input_bytes: int = 0
    input_extra_bytes: int = 0
    output_bytes: int = 0
    forward_peak_bytes: int = 0
    forward_unsaved_bytes: int = 0
    backward_peak_bytes: int = 0
    draw_bytes: tuple[int, ...] = ()


@dataclass
class _Segment:
    """What happens between two marks; keeps its beginning and its fullest moments, by several measures."""

    phase: str
    held: int
    running: bool
    start: tuple[int, ...] = ()
    #: By measure: the most that was seen, and the bytes alive then, by kind; the next two are those of which a small share takes less, and
    #: the last the whole batch's random draw that a share makes then.
    tops: dict[int, tuple[tuple[int, int], tuple[int, ...]]] = field(default_factory=dict)

    def keep(self, place: int, measure: tuple[int, int], live: tuple[int, ...]) -> None:
        """Keep a moment if it is fuller by a measure than the one that is kept."""
        known = self.tops.get(place)
        if known is None or measure > known[0]:
            self.tops[place] = measure, live

    def moments(self) -> list[Moment]:
        """The moments, each once, in no order."""
        found: dict[Moment, None] = {}
        for live, boundary in ((self.start, True), *((top, False) for _, top in self.tops.values())):
            if live:
                by_kind = dict(zip((*KINDS, "sloping", "slope", "draw"), live, strict=True))
                moment = Moment(
                    phase=self.phase,
                    held=self.held,
                    running=self.running,
                    boundary=boundary,
                    gradient_bytes=by_kind["gradients"],
                    activation_bytes=by_kind["activations"],
                    temporary_bytes=by_kind["temporary"],
                    fixed_bytes=by_kind["fixed"],
                    sloping_bytes=by_kind["sloping"],
                    slope_bytes=by_kind["slope"],
                    draw_bytes=by_kind["draw"],
                )
                found[moment] = None
        return list(found)


@dataclass
class Account:
    """What a settled tape says.

    Args:
        parts: by number: 2 i + 1 is block i, 2 i the outer part before it.
        moments: the fullest moments of each segment, and its beginning.
        activation_bytes: the most that is saved when a backward begins; 0 where none does.
    """

    parts: list[PartBytes]
    moments: list[Moment] = field(default_factory=list)
    activation_bytes: int = 0


def account(tape: Tape, blocks: int) -> Account:
    """Read a settled tape once.

    Args:
        tape: with marks of the blocks alone.
    """
    reader = _Reader(blocks)
    for action, storage, size_bytes, kind in tape:
        if action == "allocate":
            assert kind is not None
            reader.allocate(storage, size_bytes, kind, tape.slopes.get(storage, 0))
            if storage in tape.draws:
                reader.draw(sum(tape.draws[storage]))
        elif action == "free":
            reader.free(storage)
        elif action == "become" or action == "resize":
            assert kind is not None
            reader.change(storage, size_bytes, kind)
        elif action == "input":
            reader.enter(storage)
        elif action == "output":
            reader.leave(storage)
        elif action == "unsaved":
            reader.let_go(storage)
        elif action in MARKS:
            reader.mark(action, storage)
    reader.end()
    return reader.account


_INDEX = {kind: place for place, kind in enumerate(KINDS)}
_ACTIVATIONS, _TEMPORARY, _FIXED, _GRADIENTS = (_INDEX[kind] for kind in ("activations", "temporary", "fixed", "gradients"))


@dataclass
class _Storage:
    """One storage that is alive, and the part in whose forward it was made."""

    size_bytes: int
    kind: Kind
    part: int | None


class _Reader:
    """The state of reading a tape."""

    def __init__(self, blocks: int) -> None:
        self.account = Account([PartBytes() for _ in range(2 * blocks + 1)])
        self._live = [0] * len(KINDS)
        self._total = 0
        self._storages: dict[int, _Storage] = {}
        self._part: int | None = None
        self._forward = False
        self._segment: _Segment | None = None
        # Since the last mark: the storages made since that are still alive.
        self._section: dict[int, int] = {}
        self._section_bytes = 0
        self._section_peak_bytes = 0
        self._unsaved_bytes = 0
        self._unsaved_peak_bytes = 0
        self._let_go: set[int] = set()
        # Of the pass, from the beginning of forward to that of backward: storages that enter a part and leave a block, and what is left.
        self._entered: dict[int, tuple[int, _Storage]] = {}
        self._outputs: dict[int, tuple[int, _Storage]] = {}
        self._left: dict[int, tuple[int, _Storage]] = {}

    # -- changes ---------------------------------------------------------------------------------------------------------------------------

    def allocate(self, number: int, size_bytes: int, kind: Kind, slope_bytes: int) -> None:
        self._storages[number] = _Storage(size_bytes, kind, self._part if self._forward else None)
        self._live[_INDEX[kind]] += size_bytes
        self._total += size_bytes
        self._grow(number, size_bytes)
        self._look(size_bytes if slope_bytes else 0, slope_bytes)

    def draw(self, size_bytes: int) -> None:
        """Keep this moment if none is fuller with its draw, or has as large a draw: the smaller the share, the more that alone counts."""
        if self._forward and self._part is not None:
            part = self.account.parts[self._part]
            part.draw_bytes = tuple(sorted({*part.draw_bytes, size_bytes}))
        if self._segment is not None:
            for place, measure in ((8, (self._total + size_bytes, 0)), (9, (size_bytes, self._total))):
                self._segment.keep(place, measure, (*self._live, 0, 0, size_bytes))

    def free(self, number: int) -> None:
        storage = self._storages.pop(number)
        self._live[_INDEX[storage.kind]] -= storage.size_bytes
        self._total -= storage.size_bytes
        self._shrink(number)

    def change(self, number: int, size_bytes: int, kind: Kind) -> None:
        storage = self._storages[number]
        self._live[_INDEX[storage.kind]] -= storage.size_bytes
        self._live[_INDEX[kind]] += size_bytes
        self._total += size_bytes - storage.size_bytes
        storage.size_bytes, storage.kind = size_bytes, kind
        if number in self._section:
            self._shrink(number)
            if kind != "gradients":
                self._grow(number, size_bytes)
        self._look()

    def _grow(self, number: int, size_bytes: int) -> None:
        if self._part is not None:
            self._section[number] = size_bytes
            self._section_bytes += size_bytes
            self._section_peak_bytes = max(self._section_peak_bytes, self._section_bytes)
            self._unsaved_bytes += size_bytes
            self._unsaved_peak_bytes = max(self._unsaved_peak_bytes, self._unsaved_bytes)

    def _shrink(self, number: int) -> None:
        size_bytes = self._section.pop(number, 0)
        self._section_bytes -= size_bytes
        if number not in self._let_go:
            self._unsaved_bytes -= size_bytes

    def _look(self, sloping_bytes: int = 0, slope_bytes: int = 0) -> None:
        """Keep this moment if it is fuller than those kept; beside them, one with something that a small share takes less of."""
        segment = self._segment
        if segment is None:
            return
        live = self._live
        scaled = live[_ACTIVATIONS] + live[_TEMPORARY]
        fixed = live[_GRADIENTS] + live[_FIXED], self._total
        rest = scaled + live[_FIXED]  # replicas hold all gradients at any moment
        for place, measure in enumerate(((self._total, 0), (scaled, 0), fixed, (rest, 0)), 4 if slope_bytes else 0):
            segment.keep(place, measure, (*live, sloping_bytes, slope_bytes, 0))

    # -- notes and marks -------------------------------------------------------------------------------------------------------------------

    def enter(self, number: int) -> None:
        """A storage enters the block whose forward has just begun."""
        assert self._part is not None
        storage = self._storages[number]
        if storage.kind == "activations":
            self._entered.setdefault(number, (self._part, storage))

    def leave(self, number: int) -> None:
        """A storage leaves the block whose forward is about to end."""
        assert self._part is not None
        if number in self._section:
            self._outputs[number] = self._part, self._storages[number]

    def let_go(self, number: int) -> None:
        """If nothing were saved, a storage would be free from here on. It no longer counts as an output: only its block uses it."""
        self._unsaved_bytes -= self._section.get(number, 0)
        self._let_go.add(number)
        self._outputs.pop(number, None)

    def mark(self, action: Action, index: int) -> None:
        self._end_section()
        forward = action in ("forward", "leave")
        if self._forward and (not forward or (action == "leave" and index == -1)):
            self._end_pass(saved=action in ("backward", "return"))
        running = action in ("forward", "backward")
        held = 0 if action == "optimizer" else index + (action == "leave")
        self._forward = forward
        self._part = None if action == "optimizer" else 2 * held + running
        phase = "optimizer" if action == "optimizer" else "forward" if forward else "backward"
        self._segment = _Segment(phase, held, running, start=() if action == "optimizer" else (*self._live, 0, 0, 0))
        self._look()

    def end(self) -> None:
        self._end_section()
        if self._forward:
            self._end_pass(saved=False)

    def _end_section(self) -> None:
        if self._segment is not None:
            self.account.moments += self._segment.moments()
        if self._part is not None:
            part = self.account.parts[self._part]
            if self._forward:
                part.forward_peak_bytes = max(part.forward_peak_bytes, self._section_peak_bytes)
                part.forward_unsaved_bytes = max(part.forward_unsaved_bytes, self._unsaved_peak_bytes if self._part % 2 else 0)
                self._left.update((number, (self._part, self._storages[number])) for number in self._section)
            else:
                part.backward_peak_bytes = max(part.backward_peak_bytes, self._section_peak_bytes)
        self._section, self._section_bytes, self._section_peak_bytes = {}, 0, 0
        self._unsaved_bytes, self._unsaved_peak_bytes, self._let_go = 0, 0, set()

    def _end_pass(self, *, saved: bool) -> None:
        """A forward is over. ``saved``: whether its backward begins, for which everything still alive was saved."""
        found = [PartBytes() for _ in self.account.parts]
        for number, (part, storage) in self._outputs.items():
            found[part].output_bytes += storage.size_bytes
            if storage.kind == "activations":
                self._entered.setdefault(number, (part + 1, storage))
        for number, (part, storage) in self._entered.items():
            found[part].input_bytes += storage.size_bytes
            if saved and number not in self._storages:
                found[part].input_extra_bytes += storage.size_bytes
            if storage.part is not None and storage.part % 2 == 0:
                found[storage.part].output_bytes += storage.size_bytes
        for number, (part, storage) in self._left.items():
            if number not in self._outputs and number not in self._entered and (number in self._storages or not saved):
                found[part].activation_bytes += storage.size_bytes
                found[part].fixed_bytes += storage.size_bytes if storage.kind == "fixed" else 0
        for total, sizes in zip(self.account.parts, found, strict=True):
            for name in ("activation_bytes", "fixed_bytes", "input_bytes", "input_extra_bytes", "output_bytes"):
                setattr(total, name, max(getattr(total, name), getattr(sizes, name)))
        if saved:
            self.account.activation_bytes = max(self.account.activation_bytes, self._live[_ACTIVATIONS] + self._live[_FIXED])
        self._entered, self._outputs, self._left = {}, {}, {}
