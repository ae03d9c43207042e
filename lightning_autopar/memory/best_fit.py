"""The allocator's policy under torch's default settings, played order by order without a call for each. Knows no other settings.

Between :class:`~lightning_autopar.memory.allocator.CachingAllocator` and this there is no difference in what is held: a best fit by size,
then by address; a rest is split off; neighbours that are free become one. But a search for a plan waits for tens of thousands of orders,
so here all of them are in one loop, on integers alone:

- Sizes and addresses count in blocks of 512 bytes. Between two segments an address is left out, so that their blocks are never neighbours.
- Large free blocks lie in lists by size, as a step asks for few different sizes, again and again. Their addresses are negative: the lowest
  one is then the last of its list.
- Small free blocks, few at a time, lie in one list, each a number of its size and its address.
- Blocks find free neighbours by where those begin and end.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from lightning_autopar.memory.allocator import (
    LARGE_ROUNDING_BYTES,
    MIN_BLOCK_BYTES,
    MIN_LARGE_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    OutOfDeviceMemory,
)
from lightning_autopar.memory.allocator_options import AllocatorOptions

#: By how much a block's size is shifted in a small free block's number. Its segments are as many as orders at most.
_SHIFT = 40
_ADDRESS = (1 << _SHIFT) - 1
_ROUND = MIN_BLOCK_BYTES - 1
_BITS = MIN_BLOCK_BYTES.bit_length() - 1
# The allocator's sizes, in blocks.
_SMALL, _SMALL_SEGMENT = SMALL_BYTES >> _BITS, SMALL_SEGMENT_BYTES >> _BITS
_MIN_LARGE, _LARGE_ROUNDING = MIN_LARGE_BYTES >> _BITS, LARGE_ROUNDING_BYTES >> _BITS
_NO_LIMIT = 1 << 62


def is_plain(options: AllocatorOptions) -> bool:
    """Whether these settings are those whose policy this is."""
    return not (
        options.expandable_segments
        or options.max_split_bytes is not None
        or options.garbage_collection_threshold > 0
        or any(number > 1 for number in options.roundup_power2_divisions)
    )


class _Small:
    """A stream's blocks of at most 1 MiB.

    Attributes:
        free: those that are free, as numbers, in order.
        begin: their numbers by where they begin.
        end: the same by where they end.
        segments: where segments begin.
        next: where the next one does.
    """

    __slots__ = ("begin", "end", "free", "next", "segments")

    def __init__(self) -> None:
        self.free: list[int] = []
        self.begin: dict[int, int] = {}
        self.end: dict[int, int] = {}
        self.segments: set[int] = set()
        self.next = 0

    def release(self) -> int:
        """Give unused segments back; how many blocks they come to."""
        unused = [begin for begin in self.segments if self.begin.get(begin, 0) >> _SHIFT == _SMALL_SEGMENT]
        for begin in unused:
            del self.free[bisect_left(self.free, self.begin.pop(begin))]
            del self.end[begin + _SMALL_SEGMENT]
        self.segments.difference_update(unused)
        return len(unused) * _SMALL_SEGMENT


class _Large:
    """A stream's larger blocks.

    Attributes:
        free: where those that are free begin, by size, in order; a list may be empty.
        sizes: of which there are such lists, in order.
        begin: their sizes by where they begin.
        end: where they begin by where they end.
        segments: sizes of segments by where they begin.
        next: where the next one does.
    """

    __slots__ = ("begin", "end", "free", "next", "segments", "sizes")

    def __init__(self) -> None:
        self.free: dict[int, list[int]] = {}
        self.sizes: list[int] = []
        self.begin: dict[int, int] = {}
        self.end: dict[int, int] = {}
        self.segments: dict[int, int] = {}
        self.next = 0

    def release(self) -> int:
        """Give unused segments back; how many blocks they come to."""
        unused = [(begin, size) for begin, size in self.segments.items() if self.begin.get(begin) == size]
        for begin, size in unused:
            self.free[size].remove(begin)
            del self.begin[begin], self.end[begin - size], self.segments[begin]
        return sum(size for _, size in unused)


class BestFit:
    """One device's allocator. Attributes as a :class:`~lightning_autopar.memory.allocator.CachingAllocator`'s.

    Args:
        limit_bytes: the most that may be reserved; None: no limit.
        options: its settings, which must be plain.
    """

    def __init__(self, *, limit_bytes: int | None = None, options: AllocatorOptions | None = None) -> None:
        options = options or AllocatorOptions()
        assert is_plain(options), "other settings have another policy"
        self.limit_bytes = limit_bytes
        self.retries = 0
        self._limit = _NO_LIMIT if limit_bytes is None else limit_bytes >> _BITS
        self._segment = options.large_segment_bytes >> _BITS
        self._allocated = self._most_allocated = self._reserved = self._most_reserved = 0
        self._streams: dict[int, tuple[_Small, _Large]] = {}
        #: By the numbers of what was allocated, where it begins, and how large it is.
        self._blocks: list[tuple[int, int]] = [(0, 0)]

    @property
    def allocated_bytes(self) -> int:
        """Handed out, rounded."""
        return self._allocated << _BITS

    @property
    def reserved_bytes(self) -> int:
        """Held from the device."""
        return self._reserved << _BITS

    @property
    def peak_allocated_bytes(self) -> int:
        """The most that was handed out."""
        return self._most_allocated << _BITS

    @property
    def peak_reserved_bytes(self) -> int:
        """The most that was held."""
        return self._most_reserved << _BITS

    def play(self, orders: Iterable[int]) -> None:
        """Follow orders, of stream 0 to begin with.

        Args:
            orders: a number of bytes to be allocated; or a number below 0 to free what was allocated as so manieth; or 0 and then a stream,
                whose the orders are from there on.

        Raises:
            OutOfDeviceMemory: if there is no room even after all unused segments were given back.
        """
        blocks = self._blocks
        small, large = self._pools(0)
        entries, small_begin, small_end = small.free, small.begin, small.end
        free, sizes, begins, ends = large.free, large.sizes, large.begin, large.end
        allocated, most_allocated = self._allocated, self._most_allocated
        numbers = iter(orders)
        try:
            for number in numbers:
                if number > 0:
                    size = (number + _ROUND) >> _BITS
                    if size > _SMALL:
                        same = free.get(size)
                        if same:
                            begin = same.pop()
                            del begins[begin], ends[begin - size]
                        else:
                            place = bisect_left(sizes, size)
                            while place < len(sizes):
                                found = sizes[place]
                                same = free[found]
                                if same:
                                    begin = same.pop()
                                    del begins[begin]
                                    end = begin - found
                                    break
                                del sizes[place], free[found]
                            else:
                                found = self._segment if size < _MIN_LARGE else -(-size // _LARGE_ROUNDING) * _LARGE_ROUNDING
                                self._reserve(found, size, allocated)
                                begin = large.next
                                end = begin - found
                                large.next = end - 1
                                large.segments[begin] = found
                                ends[end] = begin
                            rest = found - size
                            if rest > _SMALL:
                                beyond = begin - size
                                begins[beyond] = rest
                                ends[end] = beyond
                                same = free.get(rest)
                                if same is None:
                                    free[rest] = [beyond]
                                    insort(sizes, rest)
                                else:
                                    insort(same, beyond)
                            else:
                                del ends[end]
                                size = found
                    else:
                        place = bisect_left(entries, size << _SHIFT)
                        if place < len(entries):
                            number = entries[place]
                            begin = number & _ADDRESS
                            rest = (number >> _SHIFT) - size
                            del small_begin[begin]
                            if rest:
                                beyond = begin + size
                                number = rest << _SHIFT | beyond
                                if rest >= size:  # what stands before it is smaller than that
                                    entries[place] = number
                                else:
                                    del entries[place]
                                    insort(entries, number, 0, place)
                                small_begin[beyond] = small_end[beyond + rest] = number
                            else:
                                del entries[place], small_end[begin + size]
                        else:
                            self._reserve(_SMALL_SEGMENT, size, allocated)
                            begin = small.next
                            small.next = begin + _SMALL_SEGMENT + 1
                            small.segments.add(begin)
                            beyond = begin + size
                            number = _SMALL_SEGMENT - size << _SHIFT | beyond
                            insort(entries, number)
                            small_begin[beyond] = small_end[begin + _SMALL_SEGMENT] = number
                    blocks.append((begin, size))
                    allocated += size
                    if allocated > most_allocated:
                        most_allocated = allocated
                elif number < 0:
                    begin, size = blocks[-number]
                    allocated -= size
                    if size > _SMALL:
                        end = begin - size
                        if end in begins:
                            found = begins.pop(end)
                            same = free[found]
                            del same[bisect_left(same, end)]
                            size += found
                            end -= found
                        if begin in ends:
                            before = ends.pop(begin)
                            found = begins[before]
                            same = free[found]
                            del same[bisect_left(same, before)]
                            begin = before
                            size += found
                        begins[begin] = size
                        ends[end] = begin
                        same = free.get(size)
                        if same is None:
                            free[size] = [begin]
                            insort(sizes, size)
                        else:
                            insort(same, begin)
                    else:
                        end = begin + size
                        place = -1
                        if end in small_begin:
                            number = small_begin.pop(end)
                            place = bisect_left(entries, number)
                            number >>= _SHIFT
                            size += number
                            end += number
                        if begin in small_end:
                            number = small_end.pop(begin)
                            if place >= 0:
                                del entries[place]
                            place = bisect_left(entries, number)
                            begin = number & _ADDRESS
                            size += number >> _SHIFT
                        number = size << _SHIFT | begin
                        if place < 0:
                            insort(entries, number)
                        elif place + 1 == len(entries) or number < entries[place + 1]:
                            entries[place] = number  # it has grown, and is still smaller than the next
                        else:
                            del entries[place]
                            insort(entries, number, place)
                        small_begin[begin] = small_end[end] = number
                else:
                    small, large = self._pools(next(numbers))
                    entries, small_begin, small_end = small.free, small.begin, small.end
                    free, sizes, begins, ends = large.free, large.sizes, large.begin, large.end
        finally:
            self._allocated, self._most_allocated = allocated, most_allocated

    def _pools(self, stream: int) -> tuple[_Small, _Large]:
        """A stream's."""
        pools = self._streams.get(stream)
        if pools is None:
            pools = self._streams[stream] = _Small(), _Large()
        return pools

    def _reserve(self, segment: int, size: int, allocated: int) -> None:
        """Make room for a segment, in which there is to be a block of that size."""
        if self._reserved + segment > self._limit:
            self._reserved -= sum(pool.release() for pools in self._streams.values() for pool in pools)
            self.retries += 1
            if self._reserved + segment > self._limit:
                assert self.limit_bytes is not None, "without a limit there is always room"
                raise OutOfDeviceMemory(size << _BITS, allocated << _BITS, self.reserved_bytes, self.limit_bytes)
        self._reserved += segment
        self._most_reserved = max(self._most_reserved, self._reserved)
