"""The allocator's model: sequences worked out by hand from torch's sources, and any sequence against a plain reimplementation."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_autopar.memory.allocator.caching_allocator import CachingAllocator, Category, OutOfDeviceMemory
from lightning_autopar.memory.allocator.options import AllocatorOptions, options_from_environment, parse_options
from lightning_autopar.memory.allocator.plain_allocator import PlainAllocator
from tests.work import counted

KIB, MIB = 1 << 10, 1 << 20


# -- by hand -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        # 1 MiB is left over: not more than that is not split off.
        (11 * MIB, 12 * MIB, 12 * MIB),
        (13 * MIB + 1, 14 * MIB, 14 * MIB),
        # 1.5 MiB is left over, and split off.
        (12 * MIB + 512 * KIB, 12 * MIB + 512 * KIB, 14 * MIB),
    ],
)
def test_one_request(size: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(size)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved)
    allocator.free(block)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, reserved)
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (allocated, reserved)
    allocator.release_cached()
    assert allocator.reserved_bytes == 0


def test_best_fit_then_coalescing() -> None:
    allocator = CachingAllocator()
    small = [allocator.allocate(512 * KIB) for _ in range(4)]
    assert allocator.reserved_bytes == 2 * MIB  # they fill one segment
    allocator.free(small[0])
    allocator.free(small[2])
    # A hole of half a MiB on either side of a live block: one whole MiB needs another segment.
    one = allocator.allocate(MIB)
    assert allocator.reserved_bytes == 4 * MIB
    allocator.free(small[1])
    allocator.free(one)
    # 1.5 MiB are free in the first segment, 2 MiB in the second: the smaller hole is taken.
    fitted = allocator.allocate(MIB)
    assert fitted.address == small[0].address or fitted.address < 2 * MIB
    assert allocator.reserved_bytes == 4 * MIB


def test_large_requests_do_not_come_from_the_small_pool() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(MIB))
    allocator.allocate(MIB + 512)
    assert allocator.reserved_bytes == 22 * MIB


def test_streams_do_not_share() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(32 * MIB, stream=0))
    allocator.allocate(32 * MIB, stream=1)
    assert allocator.reserved_bytes == 64 * MIB
    allocator.allocate(32 * MIB, stream=0)
    assert allocator.reserved_bytes == 64 * MIB


def test_a_segment_that_came_back_elsewhere_leaves_the_layout_as_it_was() -> None:
    """Only the order of segments decides anything, not their addresses."""
    allocator = CachingAllocator()
    small, large = allocator.allocate(20 * MIB), allocator.allocate(30 * MIB)
    before = allocator.layout()
    allocator.free(large)
    allocator.release_cached()
    assert allocator.layout() != before
    allocator.allocate(30 * MIB)
    assert allocator.layout() == before
    allocator.free(small)
    allocator.release_cached()
    allocator.allocate(20 * MIB)
    assert sorted(allocator.layout()) == sorted(before) != allocator.layout()


def test_a_failed_request_gives_the_cache_back_and_retries() -> None:
    allocator = CachingAllocator(limit_bytes=64 * MIB)
    allocator.free(allocator.allocate(40 * MIB))
    kept = allocator.allocate(12 * MIB)  # cut from the 40
    assert allocator.reserved_bytes == 40 * MIB
    # 28 are free, but part of a segment that is in use: they can't be given back, and 24 more are all there is.
    with pytest.raises(OutOfDeviceMemory) as caught:
        allocator.allocate(30 * MIB)
    assert (caught.value.requested_bytes, caught.value.limit_bytes) == (30 * MIB, 64 * MIB)
    assert (caught.value.allocated_bytes, caught.value.reserved_bytes) == (12 * MIB, 40 * MIB)
    assert allocator.retries == 1
    allocator.free(kept)
    allocator.allocate(64 * MIB)
    assert (allocator.reserved_bytes, allocator.retries) == (64 * MIB, 2)


def test_oversize_blocks_are_not_split() -> None:
    allocator = CachingAllocator(options=AllocatorOptions(max_split_bytes=32 * MIB), limit_bytes=200 * MIB)
    allocator.free(allocator.allocate(64 * MIB))
    small = allocator.allocate(24 * MIB)  # below the bound: doesn't take the 64
    assert allocator.reserved_bytes == 88 * MIB
    large = allocator.allocate(50 * MIB)  # within 20 MiB of the 64: takes it whole
    assert (allocator.reserved_bytes, large.size_bytes) == (88 * MIB, 64 * MIB)
    allocator.free(large)
    allocator.allocate(44 * MIB)  # not within 20 MiB of it
    assert allocator.reserved_bytes == 132 * MIB
    # Only 68 are left. The free 64 are given back first; as they aren't the 100 asked for, it counts as a retry.
    allocator.allocate(100 * MIB)
    assert (allocator.reserved_bytes, allocator.retries) == (168 * MIB, 1)
    allocator.free(small)


@pytest.mark.parametrize(("size", "reserved"), [(43 * MIB, 84 * MIB), (90 * MIB, 90 * MIB)])
def test_oversize_blocks_are_given_back_as_far_as_needed(size: int, reserved: int) -> None:
    allocator = CachingAllocator(options=AllocatorOptions(max_split_bytes=32 * MIB), limit_bytes=140 * MIB)
    for block in [allocator.allocate(40 * MIB), allocator.allocate(64 * MIB)]:
        allocator.free(block)
    # 43 (44 in a segment): the smallest that is larger, 64, goes, the 40 stay. 90: the largest first, and the 40 as well.
    allocator.allocate(size)
    assert (allocator.reserved_bytes, allocator.retries) == (reserved, 0)


def test_garbage_collection_gives_back_what_lay_unused_longest() -> None:
    allocator = CachingAllocator(options=AllocatorOptions(garbage_collection_threshold=0.5), limit_bytes=100 * MIB)
    old, young = allocator.allocate(30 * MIB), allocator.allocate(24 * MIB)
    allocator.free(old)
    for _ in range(3):  # the old one's age grows with every search
        allocator.free(allocator.allocate(12 * MIB, stream=1))
    allocator.free(young)
    allocator.allocate(40 * MIB, stream=2)  # 66 are reserved, above the 50
    assert allocator.reserved_bytes == 24 * MIB + 12 * MIB + 40 * MIB
    assert allocator.retries == 0


def test_expandable_segments_grow_by_pages() -> None:
    allocator = CachingAllocator(options=AllocatorOptions(expandable_segments=True))
    first, second = allocator.allocate(15 * MIB), allocator.allocate(15 * MIB)
    assert allocator.reserved_bytes == 40 * MIB  # two pages, the second block over the border of both
    assert second.address == first.address + 15 * MIB
    allocator.free(first)
    allocator.allocate(11 * MIB)  # the hole's beginning
    allocator.allocate(12 * MIB)  # neither hole suffices: 10 are there at the end, and a page is mapped for the other 2
    assert allocator.reserved_bytes == 60 * MIB
    allocator.allocate(100)
    assert allocator.reserved_bytes == 62 * MIB


def test_expandable_segments_give_back_pages() -> None:
    allocator = CachingAllocator(options=AllocatorOptions(expandable_segments=True), limit_bytes=100 * MIB)
    blocks = [allocator.allocate(30 * MIB) for _ in range(3)]
    assert allocator.reserved_bytes == 100 * MIB
    allocator.free(blocks[1])
    # From 30 to 60: the page from 40 to 60 is free as a whole. It is unmapped, and mapped again at the end; 10 + 20 suffice for 30.
    other = allocator.allocate(30 * MIB, stream=0)
    assert other.address == blocks[1].address
    allocator.free(other)
    allocator.allocate(18 * MIB, stream=1)
    assert (allocator.reserved_bytes, allocator.retries) == (100 * MIB, 1)


@pytest.mark.parametrize(
    ("divisions", "size", "rounded"),
    [
        # The example in torch's source: 1200 of 4 divisions between 1024 and 2048 is 1280 (there in whatever unit; here in KiB).
        (4, 1200 * KIB, 1280 * KIB),
        (4, 1024 * KIB, 1024 * KIB),
        (4, 1025 * KIB, 1280 * KIB),
        (4, 2000, 2048),  # not above 4 × 512: as without
        (8, 9 * MIB, 9 * MIB),
        (8, 9 * MIB + 1, 10 * MIB),
        (1, 1200 * KIB + 1, 1200 * KIB + 512),
    ],
)
def test_rounding_by_powers_of_two(divisions: int, size: int, rounded: int) -> None:
    allocator = CachingAllocator(options=AllocatorOptions(roundup_power2_divisions=(divisions,) * 16))
    assert allocator.rounded(size) == rounded


# -- options -------------------------------------------------------------------------------------------------------------------------------


def test_options_from_text() -> None:
    text = (
        "max_split_size_mb:40,max_non_split_rounding_mb:30,garbage_collection_threshold:0.5,"
        "roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1],expandable_segments:True,pinned_use_background_threads:True"
    )
    options = parse_options(text)
    assert options.expandable_segments
    assert (options.max_split_bytes, options.max_non_split_rounding_bytes) == (40 * MIB, 30 * MIB)
    assert options.garbage_collection_threshold == 0.5
    # As torch's own test of the same text expects (c10/test/core/AllocatorConfig_test.cpp).
    found = [options.divisions(mebibytes * MIB) for mebibytes in (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)]
    assert found == [8, 8, 2, 4, 2, 4, 1, 1, 1]


def test_options_from_environment() -> None:
    assert options_from_environment({}) == AllocatorOptions()
    both = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "max_split_size_mb:40"}
    assert options_from_environment(both) == AllocatorOptions(expandable_segments=True)
    assert options_from_environment({"PYTORCH_ALLOC_CONF": "roundup_power2_divisions:4"}).divisions(3 * MIB) == 4
    with pytest.raises(ValueError, match="max_split_size_mb:many"):
        options_from_environment({"PYTORCH_ALLOC_CONF": "max_split_size_mb:many"})


# -- any sequence --------------------------------------------------------------------------------------------------------------------------


@dataclass
class Stretch:
    """A range of addresses of one kind: handed out, free, or without memory."""

    begin: int
    end: int
    state: str
    age: int = 0

    @property
    def size(self) -> int:
        return self.end - self.begin


@dataclass
class Segment:
    small: bool
    stream: int
    stretches: list[Stretch] = field(default_factory=list)


class Plain:
    """The same rules over flat lists, everything looked for from the start each time."""

    def __init__(self, limit: int, options: AllocatorOptions) -> None:
        self.limit, self.options = limit, options
        self.all: list[Segment] = []
        self.end = 0
        self.searches = {True: 0, False: 0}

    @property
    def reserved(self) -> int:
        return sum(s.size for segment in self.all for s in segment.stretches if s.state != "unmapped")

    @property
    def allocated(self) -> int:
        return sum(s.size for segment in self.all for s in segment.stretches if s.state == "used")

    def tidy(self, segment: Segment) -> None:
        """Join neighbours of one state, those in use excepted; what is joined counts as free from now on."""
        joined: list[Stretch] = []
        for stretch in segment.stretches:
            if stretch.size == 0:
                continue
            if joined and joined[-1].state == stretch.state != "used":
                joined[-1].end = stretch.end
                joined[-1].age = self.searches[segment.small]
            else:
                joined.append(stretch)
        segment.stretches = joined

    def page(self, small: bool) -> int:
        return 2 * MIB if small else 20 * MIB

    def candidates(self, small: bool, stream: int) -> list[tuple[int, int, Segment, int]]:
        found = []
        for segment in self.all:
            if segment.small == small and segment.stream == stream:
                found += [(s.size, s.begin, segment, i) for i, s in enumerate(segment.stretches) if s.state == "free"]
        return sorted(found, key=lambda entry: entry[:2])

    def allocate(self, size: int, stream: int) -> tuple[Segment, int] | None:
        """The segment and the beginning; None without room."""
        size = max(512, -(-size // 512) * 512)
        small = size <= MIB
        most = self.options.max_split_bytes
        collects = self.options.garbage_collection_threshold > 0
        self.searches[small] += collects
        found = self.fit(small, stream, size)
        if found is None:
            if collects:
                self.collect()
            found = self.fresh(small, stream, size)
            if found is None and most is not None and self.drop_oversize(small, stream, size, most):
                found = self.fresh(small, stream, size)
            if found is None:
                self.drop_unused()
                found = self.fresh(small, stream, size)
            if found is None:
                return None
        segment, index = found
        stretch = segment.stretches[index]
        rest = stretch.size - size
        if self.options.expandable_segments or small:
            split = rest >= 512
        else:
            split = rest > MIB and (most is None or size < most)
        used_end = stretch.begin + size if split else stretch.end
        age = self.searches[small]
        segment.stretches[index : index + 1] = [Stretch(stretch.begin, used_end, "used"), Stretch(used_end, stretch.end, "free", age)]
        segment.stretches = [s for s in segment.stretches if s.size]
        return segment, stretch.begin

    def fit(self, small: bool, stream: int, size: int) -> tuple[Segment, int] | None:
        entries = [entry for entry in self.candidates(small, stream) if entry[0] >= size]
        if not entries:
            return None

        def potential(entry: tuple[int, int, Segment, int]) -> int:
            following = entry[2].stretches[entry[3] + 1 :][:1]
            return entry[0] + (following[0].size if following and following[0].state == "unmapped" else 0)

        chosen = entries[0]
        for entry in entries[1:] if self.options.expandable_segments else []:
            if potential(entry) >= potential(chosen):
                break
            chosen = entry
        most = self.options.max_split_bytes
        if most is not None and (size < most <= chosen[0] or (size >= most and chosen[0] >= size + 20 * MIB)):
            return None
        return chosen[2], chosen[3]

    def fresh(self, small: bool, stream: int, size: int) -> tuple[Segment, int] | None:
        wanted = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if self.reserved + wanted > self.limit:
            return None
        if not self.options.expandable_segments:
            segment = Segment(small, stream, [Stretch(self.end, self.end + wanted, "free", self.searches[small])])
            self.end += wanted
            self.all.append(segment)
            return segment, 0
        page = self.page(small)
        place = self.place(small, stream, size)
        if place is None:
            begin = -(-self.end // page) * page
            self.end = begin + (page << 20)
            self.all.append(Segment(small, stream, [Stretch(begin, self.end, "unmapped")]))
            place = self.all[-1], begin
        segment, begin = place
        while True:
            index = next(i for i, s in enumerate(segment.stretches) if s.begin <= begin < s.end)
            first = segment.stretches[index]
            there = first.size if first.state == "free" else 0
            if there >= size:
                return segment, index
            gap = segment.stretches[index + (first.state == "free")]
            pages = -(-min(gap.size, size - there) // page) * page
            if self.reserved + pages > self.limit:
                return None
            at = segment.stretches.index(gap)
            segment.stretches[at : at + 1] = [
                Stretch(gap.begin, gap.begin + pages, "free"),
                Stretch(gap.begin + pages, gap.end, "unmapped"),
            ]
            self.tidy(segment)

    def place(self, small: bool, stream: int, size: int) -> tuple[Segment, int] | None:
        """Where the lowest run of free and unmapped addresses is, in which unmapped ones come first or second."""
        for segment in self.all:
            if (segment.small, segment.stream) != (small, stream):
                continue
            for index, stretch in enumerate(segment.stretches):
                if stretch.state != "unmapped":
                    continue
                first = index - 1 if index and segment.stretches[index - 1].state == "free" else index
                run = itertools.takewhile(lambda s: s.state != "used", segment.stretches[first:])
                if sum(s.size for s in run) >= size:
                    return segment, segment.stretches[first].begin
        return None

    def free(self, segment: Segment, begin: int) -> None:
        stretch = next(s for s in segment.stretches if s.begin == begin)
        assert stretch.state == "used"
        stretch.state, stretch.age = "free", self.searches[segment.small]
        self.tidy(segment)

    def unused(self) -> list[Segment]:
        return [segment for segment in self.all if len(segment.stretches) == 1 and segment.stretches[0].state == "free"]

    def drop_oversize(self, small: bool, stream: int, size: int, most: int) -> bool:
        whole = [s for s in self.unused() if (s.small, s.stream) == (small, stream)]
        oversize = sorted((s for s in whole if s.stretches[0].size >= most), key=lambda s: (s.stretches[0].size, s.stretches[0].begin))
        wanted = max(size, most)
        if enough := [s for s in oversize if s.stretches[0].size >= wanted]:
            self.all.remove(enough[0])
            return True
        released = 0
        while oversize and released < wanted:
            segment = oversize.pop()
            released += segment.stretches[0].size
            self.all.remove(segment)
        return released >= wanted

    def drop_unused(self) -> None:
        if not self.options.expandable_segments:
            for segment in self.unused():
                self.all.remove(segment)
            return
        for segment in self.all:
            page = self.page(segment.small)
            pieces = []
            for s in segment.stretches:
                begin, end = -(-s.begin // page) * page, s.end // page * page
                if s.state == "free" and begin < end:
                    pieces += [Stretch(s.begin, begin, "free"), Stretch(begin, end, "unmapped"), Stretch(end, s.end, "free")]
                else:
                    pieces.append(s)
            segment.stretches = pieces
            self.tidy(segment)

    def collect(self) -> None:
        target = self.reserved - int(self.options.garbage_collection_threshold * self.limit)
        reclaimed = 0
        while reclaimed < target:
            unused = [segment for segment in self.unused() if not segment.small]
            ages = {id(segment): self.searches[False] - segment.stretches[0].age for segment in unused}
            if not unused:
                return
            for segment in unused:
                if ages[id(segment)] >= sum(ages.values()) / len(ages):
                    reclaimed += segment.stretches[0].size
                    self.all.remove(segment)


SIZES = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(1, 2 * MIB),
    st.integers(MIB, 14 * MIB),
    st.sampled_from([512, MIB - 512, MIB, 10 * MIB - 512, 10 * MIB, 20 * MIB, 33 * MIB, 48 * MIB]),
)
OPTIONS = [
    AllocatorOptions(),
    AllocatorOptions(expandable_segments=True),
    AllocatorOptions(max_split_bytes=24 * MIB),
    AllocatorOptions(garbage_collection_threshold=0.6),
]


@pytest.mark.parametrize("options", OPTIONS, ids=["default", "expandable", "max_split", "garbage"])
@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    limit=st.sampled_from([40 * MIB, 100 * MIB, 4096 * MIB]),
    steps=st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 1), st.integers(0, 10**6)), max_size=60),
)
def test_as_the_plain_reimplementation(options: AllocatorOptions, limit: int, steps: list[tuple[bool, int, int, int]]) -> None:
    allocator, plain = CachingAllocator(limit_bytes=limit, options=options), Plain(limit, options)
    live = []
    for frees, size, stream, which in steps:
        if frees and live:
            block, place = live.pop(which % len(live))
            allocator.free(block)
            plain.free(*place)
        else:
            place = plain.allocate(size, stream)
            if place is None:
                with pytest.raises(OutOfDeviceMemory) as caught:
                    allocator.allocate(size, stream)
                assert (caught.value.allocated_bytes, caught.value.reserved_bytes) == (plain.allocated, plain.reserved)
                continue
            block = allocator.allocate(size, stream)
            assert block.address == place[1]
            live.append((block, place))
        assert (allocator.allocated_bytes, allocator.reserved_bytes) == (plain.allocated, plain.reserved)
        _check(allocator, limit)


ACTIONS = ["allocate", "allocate", "free", "change", "enter"]


def _orders(steps: list[tuple[str, int, int]]) -> Iterator[tuple[list[int], list[Category]]]:
    """Orders that allocate, free, change a category or enter a stream, ten at a time."""
    live: list[int] = []
    made = 0
    for ten in (steps[at : at + 10] for at in range(0, len(steps), 10)):
        orders: list[int] = []
        labels: list[Category] = []
        for action, size, which in ten:
            if action == "enter":
                orders += 0, which % 3
            elif action == "free" and live:
                orders.append(-live.pop(which % len(live)))
            elif action == "change" and live:
                orders += 0, -live[which % len(live)]
                labels.append(get_args(Category)[which % 3])
            else:
                made += 1
                live.append(made)
                orders.append(size)
                labels.append(get_args(Category)[which % 3])
        yield orders, labels


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    limit=st.sampled_from([None, 40 * MIB, 100 * MIB + 100, 4096 * MIB]),
    steps=st.lists(
        st.tuples(st.sampled_from(["allocate", "allocate", "free", "change", "enter"]), SIZES, st.integers(0, 10**6)), max_size=120
    ),
)
def test_the_fast_one_plays_orders_alike(limit: int | None, steps: list[tuple[str, int, int]]) -> None:
    found = []
    for make in (CachingAllocator, PlainAllocator):
        allocator, layouts, refused = make(limit_bytes=limit), [], None
        try:
            for orders, labels in _orders(steps):
                allocator.play(orders, labels)
                layouts.append(sorted(tuple((size, used) for _, size, used in blocks) for blocks in _in_bytes(allocator)))
        except OutOfDeviceMemory as error:
            refused = error.requested_bytes, error.allocated_bytes, error.reserved_bytes, error.limit_bytes
        sizes = allocator.allocated_bytes, allocator.peak_allocated_bytes, allocator.peak_reserved_bytes
        # Before it refuses, the fast one gives nothing back.
        held = () if refused else (allocator.reserved_bytes, allocator.released)
        found.append((sizes, refused, layouts, held, {one: size for one, size in allocator.fullest.items() if size}))
    assert found[0] == found[1]


def test_an_arrangement_is_the_layout_and_where_in_it_each_thing_lies() -> None:
    """Two are equal exactly where both of these are, also where segments have gone back and come again at other addresses."""
    draw, same = random.Random(0), 0
    allocator = PlainAllocator(limit_bytes=40 * MIB)
    live, found, number = dict[int, int](), list[tuple[object, object]](), 0
    for _ in range(400):
        if live and draw.random() < 0.55:
            allocator.play([-live.pop(draw.choice([*live]))], [])
        else:
            try:
                allocator.play([0, draw.randrange(2), draw.choice((KIB, 3 * MIB, 15 * MIB))], ["input"])
            except OutOfDeviceMemory:
                continue
            number += 1
            live[min({*range(len(live) + 1)} - {*live})] = number
        names = sorted(live)
        places = sorted(range(len(names)), key=lambda place: allocator._live[live[names[place]]][0])
        told = allocator.layout(), names, places
        found.append((told, (names, allocator.arrangement([live[name] for name in names]))))
    for one, other in itertools.combinations(found, 2):
        assert (one[0] == other[0]) == (one[1] == other[1])
        same += one[0] == other[0]
    assert allocator.released > 10
    assert same > 100


def _in_bytes(allocator: CachingAllocator | PlainAllocator) -> list[list[tuple[int, int, bool]]]:
    unit = 512 if isinstance(allocator, PlainAllocator) else 1
    return [[(stream, size * unit, used) for stream, size, used in blocks] for blocks in allocator.layout()]


def _check(allocator: CachingAllocator, limit: int) -> None:
    """What holds at any time, whatever the policy."""
    allocated = reserved = 0
    for blocks in allocator.segments():
        for before, after in itertools.pairwise(blocks):
            assert before.address + before.size_bytes == after.address, "a segment is cut without gaps"
            assert before.allocated or after.allocated or before.mapped != after.mapped, "free neighbours are one block"
        allocated += sum(block.size_bytes for block in blocks if block.allocated)
        reserved += sum(block.size_bytes for block in blocks if block.mapped)
        assert all(block.mapped for block in blocks if block.allocated)
        assert all(block.size_bytes % 512 == 0 and block.size_bytes > 0 for block in blocks)
    assert (allocated, reserved) == (allocator.allocated_bytes, allocator.reserved_bytes)
    assert allocated <= reserved <= limit
    assert allocator.peak_allocated_bytes >= allocated
    assert reserved <= allocator.peak_reserved_bytes <= limit


@pytest.mark.parametrize("options", OPTIONS[:2], ids=["default", "expandable"])
def test_an_event_takes_a_few_calls(options: AllocatorOptions) -> None:
    """Among 600 blocks in use."""
    allocator = CachingAllocator(options=options)

    def churn() -> None:
        live = [allocator.allocate(1 + (i * 7919) % (3 * MIB)) for i in range(600)]
        for i in range(9700):
            allocator.free(live[(i * 31) % 600])
            live[(i * 31) % 600] = allocator.allocate(1 + (i * 104729) % (3 * MIB))

    assert counted(churn)[1] < 16 * 20_000
