"""The model of torch's allocator for torch's own settings, made to play a step's hundred thousand orders in a tenth of a second.

It hands out the same blocks as :class:`~lightning_autopar.memory.allocator.caching_allocator.CachingAllocator`, which serves all settings
and is what to read first: a test compares the two. Here everything is one loop over numbers and lists, as planning spends most of its time
in it. Sizes and addresses are counted in units of 512 bytes, to which torch rounds them. So a size and an address fit into a number that
Python compares fast. Knows neither torch nor plans.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any, get_args

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
#: A free block's key is its size, then so many bits of its address: with 512 TiB of addresses none is used twice.
_ADDRESS_BITS = 40
#: A block is a list, as Python makes lists faster than objects. It has the block's address, its size, whether it is handed out, its two
#: neighbours in its segment, the free blocks among which it lies when it is free, and its category.
_ADDRESS, _SIZE, _ALLOCATED, _PREV, _NEXT, _CACHE, _CATEGORY = range(7)
#: The free blocks of a stream, for small or for large requests: their keys in order, and the blocks by key.
_Free = tuple[list[int], dict[int, list[Any]]]


class PlainAllocator:
    """One device's allocator. Its attributes are those of :class:`~lightning_autopar.memory.allocator.caching_allocator.CachingAllocator`.

    Args:
        limit_bytes: the most that may be reserved; None: no limit.
        options: settings that :meth:`serves`.

    Attributes:
        gives_back: called before it gives memory back for the first time, with a copy of it and the bytes that are asked for.
    """

    def __init__(self, *, limit_bytes: int | None = None, options: AllocatorOptions | None = None) -> None:
        #: The first block of each segment, and the segments' sizes, by address.
        self._heads: dict[int, list[Any]] = {}
        self._sizes: dict[int, int] = {}
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
        #: By number, what is handed out.
        self._live: dict[int, list[Any]] = {}
        self._settled = 0
        #: By stream.
        self._small: dict[int, _Free] = {}
        self._large: dict[int, _Free] = {}

    def __del__(self) -> None:
        """Parts its blocks, which hold each other: after a search, Python's collector would take as long as for some of its replays."""
        for block in self._heads.values():
            while block is not None:
                following = block[_NEXT]
                block.clear()
                block = following

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
        live, by_category = self._live, self._by_category
        settled, allocated, peak, peaked = self._settled, self._allocated, self._peak_allocated, False
        small, large = self._caches(self._stream)
        label, numbers = iter(labels), iter(orders)
        try:
            for number in numbers:
                if number > 0:
                    size = (number + (MIN_BLOCK_BYTES - 1)) >> _UNIT
                    if size <= _SMALL:
                        cache, spare = small, 0
                    else:
                        cache, spare = large, _SMALL
                    keys, blocks = cache
                    place = bisect_left(keys, size << _ADDRESS_BITS)
                    if place < len(keys):
                        block = blocks.pop(keys[place])
                        del keys[place]
                        block[_ALLOCATED] = True
                    else:
                        self._settled, self._allocated, self._peak_allocated = settled, allocated, peak
                        if peaked:
                            self._fullest, peaked = by_category.copy(), False
                        block = self._new_block(size, cache)
                    got = block[_SIZE]
                    if got - size > spare:
                        following = block[_NEXT]
                        rest = [block[_ADDRESS] + size, got - size, False, block, following, cache, None]
                        if following is not None:
                            following[_PREV] = rest
                        block[_NEXT] = rest
                        block[_SIZE] = got = size
                        key = rest[_SIZE] << _ADDRESS_BITS | rest[_ADDRESS]
                        blocks[key] = rest
                        insort(keys, key)
                    settled += 1
                    live[settled] = block
                    block[_CATEGORY] = category = next(label)
                    by_category[category] += got
                    allocated += got
                    if allocated > peak:
                        peak, peaked = allocated, True
                    continue
                if peaked:  # looked at before it becomes less
                    self._fullest, peaked = by_category.copy(), False
                if number < 0:
                    block = live.pop(-number)
                    size = block[_SIZE]
                    by_category[block[_CATEGORY]] -= size
                    allocated -= size
                    block[_ALLOCATED] = False
                    keys, blocks = block[_CACHE]
                    other = block[_NEXT]
                    if other is not None and not other[_ALLOCATED]:
                        key = other[_SIZE] << _ADDRESS_BITS | other[_ADDRESS]
                        del blocks[key], keys[bisect_left(keys, key)]
                        size += other[_SIZE]
                        following = block[_NEXT] = other[_NEXT]
                        if following is not None:
                            following[_PREV] = block
                    other = block[_PREV]
                    if other is not None and not other[_ALLOCATED]:  # it grows, so that a segment's first block stays the first
                        key = other[_SIZE] << _ADDRESS_BITS | other[_ADDRESS]
                        del blocks[key], keys[bisect_left(keys, key)]
                        size += other[_SIZE]
                        following = other[_NEXT] = block[_NEXT]
                        if following is not None:
                            following[_PREV] = other
                        block = other
                    block[_SIZE] = size
                    key = size << _ADDRESS_BITS | block[_ADDRESS]
                    blocks[key] = block
                    insort(keys, key)
                elif (changed := next(numbers)) < 0:
                    block = live[-changed]
                    by_category[block[_CATEGORY]] -= block[_SIZE]
                    block[_CATEGORY] = category = next(label)
                    by_category[category] += block[_SIZE]
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
        found: list[list[tuple[int, int, bool]]] = []
        caches = {id(cache): number for number, cache in enumerate((*self._small.values(), *self._large.values()))}
        for head in self._heads.values():
            blocks: list[tuple[int, int, bool]] = []
            block = head
            while block is not None:
                blocks.append((caches[id(block[_CACHE])], block[_SIZE], block[_ALLOCATED]))
                block = block[_NEXT]
            found.append(blocks)
        return found

    def arrangement(self, numbers: Sequence[int]) -> tuple[object, ...]:
        """What :meth:`layout` says, and where these allocations lie, which are all. Addresses count without what was given back."""
        caches = *self._small.values(), *self._large.values()
        number_of = {id(cache): number for number, cache in enumerate(caches)}
        free = [block for keys, blocks in caches for block in map(blocks.__getitem__, keys)]
        addresses = [block[_ADDRESS] for block in (*free, *map(self._live.__getitem__, numbers))]
        if self.released:
            heads, sizes = np.array([*self._sizes]), np.array([*self._sizes.values()])
            missing = heads - np.cumsum(sizes) + sizes
            addresses = (np.array(addresses) - missing[np.searchsorted(heads, addresses, "right") - 1]).tolist()
        segments = zip(self._sizes.values(), (number_of[id(head[_CACHE])] for head in self._heads.values()), strict=True)
        return *segments, *(len(keys) for keys, _ in caches), *(block[_SIZE] for block in free), *addresses

    def _twin(self) -> PlainAllocator:
        """Another one in the same state."""
        blocks: dict[int, list[Any]] = {}
        pools = self._small, self._large
        caches: dict[int, _Free] = {id(cache): (cache[0].copy(), {}) for pool in pools for cache in pool.values()}
        for block in self._heads.values():
            before: list[Any] | None = None
            while block is not None:
                address, size, allocated, _, following, cache, category = block
                other = blocks[address] = [address, size, allocated, before, None, caches[id(cache)], category]
                if before is not None:
                    before[_NEXT] = other
                before, block = other, following
        for cache in (cache for pool in pools for cache in pool.values()):
            caches[id(cache)][1].update((key, blocks[block[_ADDRESS]]) for key, block in cache[1].items())
        twin = copy(self)
        twin._small, twin._large = ({stream: caches[id(cache)] for stream, cache in pool.items()} for pool in pools)
        twin._heads = {address: blocks[address] for address in self._heads}
        twin._live = {number: blocks[block[_ADDRESS]] for number, block in self._live.items()}
        twin._sizes, twin._by_category, twin.gives_back = self._sizes.copy(), self._by_category.copy(), None
        return twin

    def _new_block(self, size: int, cache: _Free) -> list[Any]:
        """A segment of new memory, if need be after giving back those that are unused."""
        if size <= _SMALL:
            segment = _SMALL_SEGMENT
        elif size < _MIN_LARGE:
            segment = self._large_segment
        else:
            segment = (size + _LARGE_ROUNDING - 1) & -_LARGE_ROUNDING
        if self._reserved + segment > self._limit:
            caches = (*self._large.values(), *self._small.values())
            unused = [block for _, blocks in caches for block in blocks.values() if block[_PREV] is None and block[_NEXT] is None]
            reserved = self._reserved - sum(block[_SIZE] for block in unused)
            if reserved + segment > self._limit:  # nothing is given back, so that it can go on without a limit
                assert self.limit_bytes is not None, "without a limit there is always room"
                raise OutOfDeviceMemory(size << _UNIT, self.allocated_bytes, reserved << _UNIT, self.limit_bytes)
            if self.gives_back is not None and not self.released:
                self.gives_back(self._twin(), size << _UNIT)
            self._release(unused)
        block = [self._address, segment, True, None, None, cache, None]
        self._heads[self._address], self._sizes[self._address] = block, segment
        self._address += segment
        self._reserved += segment
        self._peak_reserved = max(self._peak_reserved, self._reserved)
        return block

    def _release(self, unused: Iterable[list[Any]]) -> None:
        for block in unused:
            keys, blocks = block[_CACHE]
            key = block[_SIZE] << _ADDRESS_BITS | block[_ADDRESS]
            del blocks[key], keys[bisect_left(keys, key)], self._heads[block[_ADDRESS]], self._sizes[block[_ADDRESS]]
            self._reserved -= block[_SIZE]
            self.released += 1

    def _caches(self, stream: int) -> tuple[_Free, _Free]:
        """The free blocks of a stream, for small and for large requests."""
        return self._small.setdefault(stream, ([], {})), self._large.setdefault(stream, ([], {}))
