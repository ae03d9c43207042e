"""Replicas and shards: when a step's gradients and parameters cross the links, and how much of that computing hides.

DDP and FSDP2 are played part by part on two lanes: the device computes, and the links carry one collective after the other. It knows no
pipeline, and not how fast anything is.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from lightning_autopar.devices.inventory import Device, Inventory
from lightning_autopar.memory.allocator.tape_player import BUCKET_BYTES, FIRST_BUCKET_BYTES
from lightning_autopar.memory.work.work import Work
from lightning_autopar.timing.rank_compute import LaneSpan, Layout, RankWork
from lightning_autopar.timing.rates import Collective, Rates


@dataclass(frozen=True)
class Links:
    """How a plan's ranks communicate: groups of devices, and their collectives' seconds.

    Args:
        shards: the ranks that hold one copy of the model together.
        copies: the ranks that hold the same part of it.
    """

    shards: Sequence[Device]
    copies: Sequence[Device]
    inventory: Inventory
    rates: Rates
    _known: dict[tuple[str, int], float] = field(default_factory=dict)

    def over_shards(self, collective: Collective, size_bytes: float) -> float:
        """Seconds of one collective among the ranks that together hold one copy."""
        if len(self.shards) < 2 or size_bytes <= 0:
            return 0.0
        key = collective, round(size_bytes)
        if key not in self._known:
            self._known[key] = self.rates.collective_seconds(collective, key[1], self.shards, self.inventory)
        return self._known[key]

    def over_copies(self, size_bytes: float) -> float:
        """Seconds of one all-reduce among the ranks that hold the same part."""
        if len(self.copies) < 2 or size_bytes <= 0:
            return 0.0
        key = "copies", round(size_bytes)
        if key not in self._known:
            self._known[key] = self.rates.collective_seconds("all_reduce", key[1], self.copies, self.inventory)
        return self._known[key]


@dataclass(frozen=True)
class LaneSeconds:
    """How a step went.

    Args:
        end: when its last collective and its last backward are done; the update follows.
        carried: seconds in which the links were busy.
        copied: seconds of the device's lane for copies into flat buffers and out of them.
    """

    end: float
    carried: float
    copied: float = 0.0


_BUCKETS: dict[int, tuple[weakref.ref[Layout], tuple[tuple[int, int, float], ...]]] = {}


def buckets_of(layout: Layout) -> tuple[tuple[int, int, float], ...]:
    """DDP's buckets in the order in which they fill: the bytes, and when it is full: the layer, and how far into its backward. Gradients
    come in the opposite order of the parameters, evenly over a layer's backward. A bucket is sent when it has reached its size.
    """
    known = _BUCKETS.get(id(layout))
    if known is None or known[0]() is not layout:
        key = id(layout)
        known = weakref.ref(layout, lambda _: _BUCKETS.pop(key, None)), tuple(_fill(layout))
        _BUCKETS[key] = known
    return known[1]


def _fill(layout: Layout) -> list[tuple[int, int, float]]:
    buckets: list[tuple[int, int, float]] = []
    size, most, place = 0, FIRST_BUCKET_BYTES, (0, 1.0)
    for number in range(len(layout.layers) - 1, -1, -1):
        gradients = layout.layers[number].gradients
        total, seen = sum(gradients), 0
        for gradient in reversed(gradients):
            if size and size + gradient > most and size >= most / 2 and gradient >= most:
                # A gradient that alone is as large as a bucket doesn't join the bucket before it.
                buckets.append((size, *place))
                size, most = 0, BUCKET_BYTES
            size, seen = size + gradient, seen + gradient
            place = number, seen / total if total else 1.0
            if size >= most:
                buckets.append((size, *place))
                size, most = 0, BUCKET_BYTES
    if size:
        buckets.append((size, *place))
    return buckets


def play_replicas(layout: Layout, run: RankWork, links: Links, scale: float, events: list[LaneSpan] | None = None) -> LaneSeconds:
    """DDP: each bucket is reduced when the last part's backward has filled it.

    Args:
        scale: a gradient's bytes on the wire over its bytes at rest.
    """
    backwards = run.backwards()
    before = run.copied + run.parts * sum(run.forward) + (run.parts - 1) * sum(backwards)
    done = [0.0] * (len(backwards) + 1)
    for number in range(len(backwards) - 1, -1, -1):
        done[number] = done[number + 1] + backwards[number]
    carried = link = 0.0
    for size, number, far in buckets_of(layout):
        seconds = links.over_copies(size * scale)
        start = max(link, before + done[number + 1] + far * backwards[number])
        link = start + seconds
        carried += seconds
        if events is not None and seconds:
            events.append(LaneSpan("communication", start, link, "communication", "all-reduce"))
    if events is not None:
        note_computing(layout, run, events)
    return LaneSeconds(max(link, before + done[0]), carried)


def note_computing(layout: Layout, run: RankWork, events: list[LaneSpan]) -> None:
    """Record the compute lane of a rank that never waits."""
    clock = run.copied
    if clock:
        events.append(LaneSpan("compute", 0.0, clock, "input", "batch"))
    for _ in range(run.parts):
        for number, seconds in enumerate(run.forward):
            clock = note(events, clock, seconds, "forward", label_of(layout, number))
        for number in range(len(run.backward) - 1, -1, -1):
            clock = note(events, clock, run.again[number], "recompute", label_of(layout, number))
            clock = note(events, clock, run.backwards()[number] - run.again[number], "backward", label_of(layout, number))


def note(events: list[LaneSpan] | None, clock: float, seconds: float, kind: str, label: str, lane: str = "compute") -> float:
    """Record a span that begins now; returns when it ends."""
    if events is not None and seconds > 0:
        events.append(LaneSpan(lane, clock, clock + seconds, kind, label))
    return clock + seconds


def label_of(layout: Layout, number: int) -> str:
    """A layer's name."""
    fqn = layout.layers[number].fqn
    return fqn if fqn is not None else "head" if number == len(layout.layers) - 1 else "between" if number else "embedding"


@dataclass(frozen=True)
class UnitSeconds:
    """What is gathered and reduced together, in seconds.

    Args:
        gather: of an all-gather.
        unpack: of copying it out of its flat buffer.
        reduce: of a reduce-scatter, and an all-reduce among the copies of the model.
        fetch: of a shard from the host's memory, where parameters lie there.
        store: of a shard's gradients to it.
    """

    gather: float
    unpack: float
    reduce: float
    fetch: float = 0.0
    store: float = 0.0


def play_shards(
    layout: Layout,
    run: RankWork,
    units: Sequence[UnitSeconds | None],
    root: UnitSeconds,
    *,
    again: bool,
    training: bool,
    events: list[LaneSpan] | None = None,
) -> LaneSeconds:
    """FSDP2, and ZeRO-3, which works alike: each unit's parameters are gathered while the unit before computes, and its gradients are
    reduced afterwards.

    As torch 2.13 does it (``_fully_shard/_fsdp_param_group.py``): the next unit's all-gather begins when this unit's parameters have been
    copied out of their buffer; in backward that of the unit before it does. Links carry one collective after the other.

    Args:
        run: the rank's own work; all its parts gather and reduce.
        units: of each layer, its own or None where the root has its parameters.
        root: the rest, which stays gathered from the beginning of forward to the end of backward.
        again: whether backward gathers a second time.
        training: whether there is a backward.
    """
    player = _Lanes(layout, run, units, root, again, training, events)
    clock = run.copied
    ends = []
    for _ in range(run.parts):
        clock = player.part(clock)
        ends.append(clock)
        if events is None and len(ends) == 3 and run.parts > 3:  # each further part is like the third
            left = run.parts - 3
            clock += left * (ends[2] - ends[1])
            player.carried *= run.parts / 3
            player.unpacked *= run.parts / 3
            break
    return LaneSeconds(clock, player.carried, player.unpacked)


class _Lanes:
    """The state of a sharded step: when the links are free, and how long they were busy."""

    def __init__(
        self,
        layout: Layout,
        run: RankWork,
        units: Sequence[UnitSeconds | None],
        root: UnitSeconds,
        again: bool,
        training: bool,
        events: list[LaneSpan] | None,
    ) -> None:
        self.layout, self.run, self.units, self.root = layout, run, units, root
        self.again, self.training, self.events = again, training, events
        self.link = self.carried = self.unpacked = 0.0
        self._forwards, self._backwards = run.forward, run.backwards()

    def carry(self, ready: float, seconds: float, what: str, number: int | None) -> float:
        """Run one collective, when it is ready and the links are free; returns when it is done."""
        start = max(self.link, ready)
        self.link = start + seconds
        self.carried += seconds
        if self.events is not None:
            note(self.events, start, seconds, "communication", f"{what} {self._label(number)}", "communication")
        return self.link

    def unpack(self, clock: float, unit: UnitSeconds, number: int | None) -> float:
        """Copy a unit out of its buffer."""
        self.unpacked += unit.unpack
        if self.events is not None:
            note(self.events, clock, unit.unpack, "communication", f"copy out {self._label(number)}")
        return clock + unit.unpack

    def gather(self, number: int | None, clock: float) -> float:
        """Gather a unit, if there is one; returns when it is done."""
        if number is None:
            return clock
        unit = self.units[number]
        assert unit is not None
        return self.carry(clock, unit.fetch + unit.gather, "gather", number)

    def _label(self, number: int | None) -> str:
        return "root" if number is None else label_of(self.layout, number)

    def part(self, clock: float) -> float:
        """Play forward and backward of one part of the batch; returns when its gradients are reduced."""
        own = [number for number, unit in enumerate(self.units) if unit is not None]
        following = dict(pairwise(own))
        clock = self.carry(clock, self.root.fetch + self.root.gather, "gather", None)
        clock = self.unpack(clock, self.root, None)
        gathered = self.gather(own[0] if own else None, clock)  # when the next unit is
        for number, seconds in enumerate(self._forwards):
            unit = self.units[number]
            if unit is not None:
                clock = self.unpack(max(clock, gathered), unit, number)
                gathered = self.gather(following.get(number), clock)
            if self.events is not None:
                note(self.events, clock, seconds, "forward", self._label(number))
            clock += seconds
        if not self.training:
            return clock
        before = {later: earlier for earlier, later in following.items()}
        if self.again and own:
            gathered = self.gather(own[-1], clock)
        for number in range(len(self._backwards) - 1, -1, -1):
            unit, again = self.units[number], self.run.again[number]
            if unit is not None and self.again:
                clock = self.unpack(max(clock, gathered), unit, number)
                gathered = self.gather(before.get(number), clock)
            backward = self._backwards[number] - again
            if self.events is not None:
                note(self.events, clock, again, "recompute", self._label(number))
                note(self.events, clock + again, backward, "backward", self._label(number))
            clock = clock + again + backward
            if unit is not None:
                self.carry(clock, unit.reduce + unit.store, "reduce", number)
        self.carry(clock, self.root.reduce + self.root.store, "reduce", None)
        return max(clock, self.link)


def copy_seconds(rates: Rates, device: Device, size_bytes: float) -> float:
    """Seconds of reading and writing on the device."""
    if size_bytes <= 0:
        return 0.0
    return rates.work_seconds(device, Work(kind="copy", name="copy_", dtype="fp32", moved_bytes=round(size_bytes), fixed_bytes=0))
