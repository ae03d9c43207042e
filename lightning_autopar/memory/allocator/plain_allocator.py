"""The model of torch's allocator for torch's own settings, made to play a step's hundred thousand orders in a tenth of a second.

It hands out the same blocks as :class:`~lightning_autopar.memory.allocator.caching_allocator.CachingAllocator`, which serves all settings
and is what to read first: a test compares the two. Here everything is one loop over numbers and lists, as planning spends most of its time
in it. Sizes and addresses are counted in units of 512 bytes, to which torch rounds them. A block is two addresses, where it begins and
ends. Knows neither torch nor plans.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import get_args

import numpy as np

from lightning_autopar.memory.allocator.caching_allocator import (
    LARGE_ROUNDING_BYTES,
    MIN_BLOCK_BYTES,
    MIN_LARGE_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    Category,
    OutOfDeviceMemory,
)
from lightning_autopar.memory.allocator.options import AllocatorOptions

_UNIT = MIN_BLOCK_BYTES.bit_length() - 1
_SMALL, _SMALL_SEGMENT, _MIN_LARGE, _LARGE_ROUNDING = (
    size >> _UNIT for size in (SMALL_BYTES, SMALL_SEGMENT_BYTES, MIN_LARGE_BYTES, LARGE_ROUNDING_BYTES)
)
#: Between two segments.
_GAP = 1
#: The free blocks of a stream, for small or for large requests: their sizes in order, and by size their addresses in order. Of hundreds of
#: free blocks most have one of a few sizes, so a block is found among few.
_Free = tuple[list[int], dict[int, list[int]]]


class PlainAllocator:
    """One device's allocator. Its attributes are those of :class:`~lightning_autopar.memory.allocator.caching_allocator.CachingAllocator`.

    Args:
        limit_bytes: the most that may be reserved; None: no limit.
        options: settings that :meth:`serves`.

    Attributes:
        gives_back: called before it gives memory back for the first time, with a copy of it and the bytes that are asked for.
    """

    def __init__(self, *, limit_bytes: int | None = None, options: AllocatorOptions | None = None) -> None:
        #: By address, each segment's size and the free blocks to which its own belong. Between segments there is a gap, so that blocks that
        #: touch are of one segment.
        self._segments: dict[int, tuple[int, _Free]] = {}
        #: The ends of free blocks by their addresses, and their addresses by their ends.
        self._ends: dict[int, int] = {}
        self._begins: dict[int, int] = {}
        options = options or AllocatorOptions()
        assert self.serves(options), "settings of torch's own"
        self.limit_bytes = limit_bytes
        self._limit = sys.maxsize if limit_bytes is None else limit_bytes >> _UNIT
        self._large_segment = options.large_segment_bytes >> _UNIT
        self.released = 0
        self.gives_back: Callable[[PlainAllocator, int], None] | None = None
        self._fullest: dict[Category, int] = {}
        self._allocated = self._reserved = self._peak_allocated = self._peak_reserved = 0
        self._by_category: dict[Category, int] = dict.fromkeys(get_args(Category), 0)
        self._address = 0
        self._stream = 0
        #: By number, what is handed out: from where to where, among which free blocks it will be, and its category.
        self._live: dict[int, tuple[int, int, _Free, Category]] = {}
        self._settled = 0
        #: By stream.
        self._small: dict[int, _Free] = {}
        self._large: dict[int, _Free] = {}

    @staticmethod
    def serves(options: AllocatorOptions) -> bool:
        """Whether nothing is set that changes which block is handed out."""
        return options == AllocatorOptions(large_segment_bytes=options.large_segment_bytes, memory_fraction=options.memory_fraction)

    @property
    def allocated_bytes(self) -> int:
        """Handed out, rounded."""
        return self._allocated << _UNIT

    @property
    def reserved_bytes(self) -> int:
        """Held from the device."""
        return self._reserved << _UNIT

    @property
    def peak_allocated_bytes(self) -> int:
        """The most that was handed out."""
        return self._peak_allocated << _UNIT

    @property
    def peak_reserved_bytes(self) -> int:
        """The most that was held."""
        return self._peak_reserved << _UNIT

    @property
    def fullest(self) -> dict[Category, int]:
        """By category when most was handed out."""
        return {category: size << _UNIT for category, size in self._fullest.items()}

    def lift_limit(self) -> None:
        """From now on, hold as much as is asked for. Segments that were given back to the driver before don't return."""
        self.limit_bytes, self._limit = None, sys.maxsize

    def play(self, orders: Iterable[int], labels: Iterable[Category]) -> None:
        """See :meth:`~lightning_autopar.memory.allocator.caching_allocator.CachingAllocator.play`."""
        live, begins, ends, by_category = self._live, self._begins, self._ends, self._by_category
        settled, allocated, peak, peaked = self._settled, self._allocated, self._peak_allocated, False
        small, large = self._caches(self._stream)
        label, numbers = iter(labels), iter(orders)
        try:
            for number in numbers:
                if number > 0:
                    size = (number + (MIN_BLOCK_BYTES - 1)) >> _UNIT
                    if size <= _SMALL:
                        free, spare = small, 0
                    else:
                        free, spare = large, _SMALL
                    sizes, places = free
                    index = bisect_left(sizes, size)
                    if index == len(sizes):
                        self._settled, self._allocated, self._peak_allocated = settled, allocated, peak
                        if peaked:
                            self._fullest, peaked = by_category.copy(), False
                        self._new_segment(size, free)
                        index = len(sizes) - 1
                    found = sizes[index]
                    at = places[found]
                    address = at.pop(0)
                    if not at:
                        del places[found], sizes[index]
                    end = address + found
                    del ends[address]
                    found -= size
                    if found > spare:
                        rest = address + size
                        ends[rest], begins[end] = end, rest
                        if found in places:
                            insort(places[found], rest)
                        else:
                            places[found] = [rest]
                            insort(sizes, found)
                        end = rest
                    else:
                        del begins[end]
                    settled += 1
                    category = next(label)
                    live[settled] = address, end, free, category
                    by_category[category] += end - address
                    allocated += end - address
                    if allocated > peak:
                        peak, peaked = allocated, True
                    continue
                if peaked:  # looked at before it becomes less
                    self._fullest, peaked = by_category.copy(), False
                if number < 0:
                    address, end, free, category = live.pop(-number)
                    by_category[category] -= end - address
                    allocated -= end - address
                    sizes, places = free
                    if end in ends:  # a free block begins there
                        following = ends.pop(end)
                        at = places[following - end]
                        if len(at) > 1:
                            del at[bisect_left(at, end)]
                        else:
                            del places[following - end], sizes[bisect_left(sizes, following - end)]
                        end = following
                    if address in begins:  # one ends there
                        before = begins.pop(address)
                        at = places[address - before]
                        if len(at) > 1:
                            del at[bisect_left(at, before)]
                        else:
                            del places[address - before], sizes[bisect_left(sizes, address - before)]
                        address = before
                    ends[address], begins[end] = end, address
                    size = end - address
                    if size in places:
                        insort(places[size], address)
                    else:
                        places[size] = [address]
                        insort(sizes, size)
                elif (changed := next(numbers)) < 0:
                    address, end, free, category = live[-changed]
                    by_category[category] -= end - address
                    category = next(label)
                    live[-changed] = address, end, free, category
                    by_category[category] += end - address
                else:
                    self._stream = changed
                    small, large = self._caches(changed)
            self._stream = 0  # but one that is refused may go on in the stream where it was
        finally:
            self._settled, self._allocated, self._peak_allocated = settled, allocated, peak
            if peaked:
                self._fullest = by_category.copy()

    def layout(self) -> list[list[tuple[int, int, bool]]]:
        """See :meth:`~lightning_autopar.memory.allocator.caching_allocator.CachingAllocator.layout`; all segments in order of addresses."""
        number_of = {id(free): number for number, free in enumerate((*self._small.values(), *self._large.values()))}
        blocks = {address: (end - address, True) for address, end, _, _ in self._live.values()}
        blocks |= {address: (end - address, False) for address, end in self._ends.items()}
        found: list[list[tuple[int, int, bool]]] = []
        cache = 0
        for address in sorted(blocks):
            if address in self._segments:
                found.append([])
                cache = number_of[id(self._segments[address][1])]
            found[-1].append((cache, *blocks[address]))
        return found

    def arrangement(self, numbers: Sequence[int]) -> tuple[object, ...]:
        """What :meth:`layout` says, and where these allocations lie, which are all. Addresses count without what was given back."""
        caches = *self._small.values(), *self._large.values()
        number_of = {id(free): number for number, free in enumerate(caches)}
        addresses = [address for _, places in caches for _, at in sorted(places.items()) for address in at]
        sizes = [self._ends[address] - address for address in addresses]
        addresses += (self._live[number][0] for number in numbers)
        if self.released:
            heads = np.array([*self._segments])
            room = np.array([size + _GAP for size, _ in self._segments.values()])
            missing = heads - np.cumsum(room) + room
            addresses = (np.array(addresses) - missing[np.searchsorted(heads, addresses, "right") - 1]).tolist()
        segments = ((size, number_of[id(free)]) for size, free in self._segments.values())
        return *segments, *(sum(map(len, places.values())) for _, places in caches), *sizes, *addresses

    def _twin(self) -> PlainAllocator:
        """Another one in the same state."""
        caches = *self._small.values(), *self._large.values()
        copies = {id(free): (free[0].copy(), {size: at.copy() for size, at in free[1].items()}) for free in caches}
        twin = copy(self)
        twin._small, twin._large = ({stream: copies[id(free)] for stream, free in each.items()} for each in (self._small, self._large))
        twin._segments = {address: (size, copies[id(free)]) for address, (size, free) in self._segments.items()}
        twin._live = {number: (begin, end, copies[id(free)], kind) for number, (begin, end, free, kind) in self._live.items()}
        twin._ends, twin._begins, twin._by_category = self._ends.copy(), self._begins.copy(), self._by_category.copy()
        twin.gives_back = None
        return twin

    def _new_segment(self, size: int, free: _Free) -> None:
        """Add a segment of new memory to the free blocks, as the largest of them, if need be after giving back those that are unused."""
        if size <= _SMALL:
            segment = _SMALL_SEGMENT
        elif size < _MIN_LARGE:
            segment = self._large_segment
        else:
            segment = (size + _LARGE_ROUNDING - 1) & -_LARGE_ROUNDING
        if self._reserved + segment > self._limit:
            unused = [address for address, (room, _) in self._segments.items() if self._ends.get(address) == address + room]
            reserved = self._reserved - sum(self._segments[address][0] for address in unused)
            if reserved + segment > self._limit:  # nothing is given back, so that it can go on without a limit
                assert self.limit_bytes is not None, "without a limit there is always room"
                raise OutOfDeviceMemory(size << _UNIT, self.allocated_bytes, reserved << _UNIT, self.limit_bytes)
            if self.gives_back is not None and not self.released:
                self.gives_back(self._twin(), size << _UNIT)
            self._release(unused)
        address, end = self._address, self._address + segment
        self._segments[address] = segment, free
        self._ends[address], self._begins[end] = end, address
        self._address = end + _GAP
        self._reserved += segment
        self._peak_reserved = max(self._peak_reserved, self._reserved)
        sizes, places = free
        sizes.append(segment)
        places[segment] = [address]

    def _release(self, unused: Iterable[int]) -> None:
        for address in unused:
            size, free = self._segments.pop(address)
            sizes, places = free
            places[size].remove(address)
            if not places[size]:
                del places[size], sizes[bisect_left(sizes, size)]
            del self._begins[self._ends.pop(address)]
            self._reserved -= size
            self.released += 1

    def _caches(self, stream: int) -> tuple[_Free, _Free]:
        """The free blocks of a stream, for small and for large requests."""
        return self._small.setdefault(stream, ([], {})), self._large.setdefault(stream, ([], {}))
