"""A model of torch's caching allocator on CUDA: how much a process reserves for what it allocates. Knows neither torch nor plans.

The policy is that of ``c10/cuda/CUDACachingAllocator.cpp`` (``DeviceCachingAllocator``: ``malloc``, ``get_free_block``, ``should_split``,
``alloc_block``, ``free_block``, ``try_merge_blocks``, ``release_*``, ``garbage_collect_cached_blocks``, and ``map_block``, ``unmap_block``,
``find_expandable_block`` for expandable segments); the sizes are those of ``c10/core/AllocatorConfig.h``, torch 2.13.

Left out: private pools of CUDA graphs, and ``record_stream``: a freed block is free at once. Addresses of new segments rise; where the
driver would put them isn't known, and decides only between free blocks of equal size. Not yet compared with a GPU's own snapshots.

Blocks of device memory and the lists of those that are free: what the model of torch's allocator is made of. Knows no policy.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Literal, get_args

from lightning_autopar.memory.allocator.options import MIB, AllocatorOptions

Category = Literal["parameters", "gradients", "optimizer", "activations", "temporary", "buffers", "input", "communication", "workspace"]

#: A free block's key is its size, then so many bits of its address: numbers compare faster than pairs.
_ADDRESS_BITS = 64


class Block:
    """A piece of a segment: handed out, free, or, in an expandable segment, a range of addresses without memory.

    Args:
        address: where it begins.
        stream: the stream that it was made for.
        expandable: whether its segment can grow.
        mapped: whether its addresses have memory.
    """

    __slots__ = ("address", "allocated", "expandable", "mapped", "next", "pool", "prev", "searches", "size_bytes", "stream")

    def __init__(self, address: int, size_bytes: int, pool: Pool, stream: int, expandable: bool = False, mapped: bool = True) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.pool = pool
        self.stream = stream
        self.expandable = expandable
        self.mapped = mapped
        self.allocated = False
        self.prev: Block | None = None
        self.next: Block | None = None
        self.searches = 0

    def cut(self, size_bytes: int) -> Block:
        """Shorten it to that size; returns the rest as a new block."""
        rest = Block(self.address + size_bytes, self.size_bytes - size_bytes, self.pool, self.stream, self.expandable, self.mapped)
        rest.prev = self
        following = self.next
        if following is not None:
            rest.next = following
            following.prev = rest
        self.size_bytes, self.next = size_bytes, rest
        return rest

    def merge(self, other: Block | None) -> None:
        """Merge with a free neighbour that is mapped like itself, and remove that from the pool's lists."""
        if other is None or other.allocated or other.mapped != self.mapped:
            return
        pool = self.pool
        pool.remove(other)
        if other is self.prev:
            if other.prev is None:
                pool.heads[other.address] = self
            else:
                other.prev.next = self
            self.address, self.prev = other.address, other.prev
        else:
            self.next = other.next
            if other.next is not None:
                other.next.prev = self
        self.size_bytes += other.size_bytes


class Pool:
    """The blocks for small, or for large requests.

    Args:
        is_small: which of the two.

    Attributes:
        heads: the first block of each segment, by address.
        free: by stream, the keys of those that are free, in order of size, then address.
        blocks: those that are free, by key.
        unmapped: by stream, those without memory, in order of addresses.
        searches: how often a free block was searched; each block stores the count at which it became free.
    """

    __slots__ = ("blocks", "free", "heads", "is_small", "searches", "unmapped")

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.heads: dict[int, Block] = {}
        self.free: defaultdict[int, list[int]] = defaultdict(list)
        self.blocks: dict[int, Block] = {}
        self.unmapped: dict[int, list[tuple[int, Block]]] = {}
        self.searches = 0

    def insert(self, block: Block) -> None:
        """Put a block into its list."""
        if block.mapped:
            block.searches = self.searches
            key = block.size_bytes << _ADDRESS_BITS | block.address
            self.blocks[key] = block
            insort(self.free[block.stream], key)
        else:
            insort(self.unmapped.setdefault(block.stream, []), (block.address, block))

    def remove(self, block: Block) -> None:
        """Take a block out of its list."""
        if block.mapped:
            key = block.size_bytes << _ADDRESS_BITS | block.address
            del self.blocks[key]
            free = self.free[block.stream]
            del free[bisect_left(free, key)]
        else:
            unmapped = self.unmapped[block.stream]
            del unmapped[bisect_left(unmapped, (block.address,))]


#: All sizes are rounded to at least this, and to its multiples.
MIN_BLOCK_BYTES = 512
#: The largest request that goes to the pool for small ones,
SMALL_BYTES = MIB
#: whose segments have this size.
SMALL_SEGMENT_BYTES = 2 * MIB
#: From here on a request gets a segment of its own size,
MIN_LARGE_BYTES = 10 * MIB
#: rounded up to a multiple of this.
LARGE_ROUNDING_BYTES = 2 * MIB
#: Pages that an expandable segment has addresses for. torch takes 9/8 of the device's memory; more changes nothing before that is used up.
_ADDRESSABLE_PAGES = 1 << 20


class OutOfDeviceMemory(Exception):
    """What torch would raise as ``torch.OutOfMemoryError``: neither the cache nor the device has room.

    Args:
        requested_bytes: rounded size of what was asked for.
        reserved_bytes: held then, after everything that could be was given back.
    """

    def __init__(self, requested_bytes: int, allocated_bytes: int, reserved_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"{requested_bytes} bytes asked for, {allocated_bytes} allocated and {reserved_bytes} reserved of at most {limit_bytes}"
        )
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        self.limit_bytes = limit_bytes


class CachingAllocator:
    """One device's allocator.

    Args:
        limit_bytes: the most that may be reserved, whether by ``set_per_process_memory_fraction`` or because the device has no more; None:
            no limit.

    Attributes:
        reserved_bytes: held from the device, as ``torch.cuda.memory_reserved`` counts it.
        allocated_bytes: of these handed out, rounded, as ``torch.cuda.memory_allocated`` counts it.
        retries: how often all unused segments had to be released to go on, as ``num_alloc_retries`` counts it.
        released: how many segments were given back to the device, and ranges of expandable ones.
        fullest: bytes by category when most was allocated by orders, as torch counts them.
    """

    def __init__(self, *, limit_bytes: int | None = None, options: AllocatorOptions | None = None) -> None:
        self.options = options or AllocatorOptions()
        self.limit_bytes = limit_bytes
        self.reserved_bytes = 0
        self.allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.retries = self.released = 0
        self.fullest: dict[Category, int] = {}
        self._small = Pool(is_small=True)
        self._large = Pool(is_small=False)
        self._address = 0
        self._collects = limit_bytes is not None and self.options.garbage_collection_threshold > 0
        self._rounds_by_power = any(number > 1 for number in self.options.roundup_power2_divisions)
        #: By number, what orders have taken, with its category.
        self._live: dict[int, tuple[Block, Category]] = {}
        self._settled = 0
        self._by_category: dict[Category, int] = dict.fromkeys(get_args(Category), 0)

    # -- what the caller does --------------------------------------------------------------------------------------------------------------

    def allocate(self, size_bytes: int, stream: int = 0) -> Block:
        """Hand out a block.

        Args:
            size_bytes: asked for; more than 0, as torch allocates nothing for an empty tensor.
            stream: whose cache is used; a block goes back to the stream that it came from.

        Raises:
            OutOfDeviceMemory: if there is no room even after all unused segments were given back.
        """
        assert size_bytes > 0, "an empty tensor has no block"
        size = self.rounded(size_bytes) if self._rounds_by_power else (size_bytes + MIN_BLOCK_BYTES - 1) & -MIN_BLOCK_BYTES
        pool = self._small if size <= SMALL_BYTES else self._large
        block = self._take_free(pool, size, stream) or self._from_device(pool, size, stream)
        self._split(block, size)
        block.allocated = True
        allocated = self.allocated_bytes = self.allocated_bytes + block.size_bytes
        if allocated > self.peak_allocated_bytes:
            self.peak_allocated_bytes = allocated
        return block

    def _from_device(self, pool: Pool, size: int, stream: int) -> Block:
        """A block of new memory, if need be after releasing unused segments (``malloc``)."""
        if self._collects:
            self._collect()
        block = self._new_block(pool, size, stream)
        if block is None and self._release_oversize(pool, size, stream):
            block = self._new_block(pool, size, stream)
        if block is None:
            self.release_cached()
            self.retries += 1
            block = self._new_block(pool, size, stream)
        if block is None:
            assert self.limit_bytes is not None, "without a limit there is always room"
            raise OutOfDeviceMemory(size, self.allocated_bytes, self.reserved_bytes, self.limit_bytes)
        return block

    def free(self, block: Block) -> None:
        """Take a block back into the cache, together with its free neighbours."""
        assert block.allocated, "a block is freed once"
        block.allocated = False
        self.allocated_bytes -= block.size_bytes
        before, after = block.prev, block.next
        if before is not None and not before.allocated:
            block.merge(before)
        if after is not None and not after.allocated:
            block.merge(after)
        block.pool.insert(block)

    def play(self, orders: Iterable[int], labels: Iterable[Category]) -> None:
        """Carry out orders, one after the other.

        Args:
            orders: a number above 0 allocates so many bytes; one below 0 frees the allocation with that number's negative, by the order in
                which they came, from 1 on. A 0 before a number from 0 on enters a stream; before one below 0, that allocation gets another
                category. Each call begins in the computation's stream, 0.
            labels: the categories of the allocations and changes, in order.

        Raises:
            OutOfDeviceMemory: if there is no room.
        """
        by_category, stream, peak_bytes = self._by_category, 0, self.peak_allocated_bytes
        numbers, label = iter(orders), iter(labels)
        try:
            for number in numbers:
                if number > 0:
                    block, category = self.allocate(number, stream), next(label)
                    self._settled += 1
                    self._live[self._settled] = block, category
                    by_category[category] += block.size_bytes
                    continue
                if self.peak_allocated_bytes > peak_bytes:  # looked at before it becomes less
                    peak_bytes = self.peak_allocated_bytes
                    self.fullest = by_category.copy()
                if number < 0:
                    block, category = self._live.pop(-number)
                    by_category[category] -= block.size_bytes
                    self.free(block)
                elif (changed := next(numbers)) < 0:
                    block, before = self._live[-changed]
                    self._live[-changed] = block, (category := next(label))
                    by_category[before] -= block.size_bytes
                    by_category[category] += block.size_bytes
                else:
                    stream = changed
        finally:
            if self.peak_allocated_bytes > peak_bytes:
                self.fullest = by_category.copy()

    def release_cached(self) -> None:
        """Give every unused segment back to the device (``torch.cuda.empty_cache``); of expandable ones every unused page."""
        for pool in (self._large, self._small):
            for keys in list(pool.free.values()):
                for block in [pool.blocks[key] for key in keys]:
                    if block.expandable:
                        self._unmap(block)
                    elif block.prev is None and block.next is None:
                        self._release(block)

    def rounded(self, size_bytes: int) -> int:
        """What a request of this size counts as (``round_size``)."""
        if self._rounds_by_power and size_bytes >= MIN_BLOCK_BYTES:
            divisions = self.options.divisions(size_bytes)
            if divisions > 1 and size_bytes > MIN_BLOCK_BYTES * divisions:
                floor = 1 << (size_bytes.bit_length() - 1)
                step = floor >> (divisions.bit_length() - 1)
                return -(-size_bytes // step) * step
        return -(-size_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES

    def segments(self) -> Iterator[list[Block]]:
        """The blocks of each segment, small ones first, in order of addresses; in an expandable one, also those without memory."""
        for head in (heads[address] for heads in (self._small.heads, self._large.heads) for address in sorted(heads)):
            blocks = []
            block: Block | None = head
            while block is not None:
                blocks.append(block)
                block = block.next
            yield blocks

    def layout(self) -> list[list[tuple[int, int, bool]]]:
        """Of each segment, the streams and sizes of its blocks, and which are handed out. Segments are in the order of their addresses,
        which decides between free blocks of equal size; the addresses themselves decide nothing.
        """
        return [[(block.stream, block.size_bytes, block.allocated) for block in blocks] for blocks in self.segments()]

    # -- free blocks -----------------------------------------------------------------------------------------------------------------------

    def _take_free(self, pool: Pool, size: int, stream: int) -> Block | None:
        """The smallest free block that is large enough (``get_free_block``)."""
        if self._collects:
            pool.searches += 1
        entries = pool.free.get(stream)
        if not entries:
            return None
        index = bisect_left(entries, size << _ADDRESS_BITS)
        if index == len(entries):
            return None
        block = pool.blocks[entries[index]]
        if self.options.expandable_segments:
            # The end of an expandable segment counts as large as it can become.
            while index + 1 < len(entries) and _potential(following := pool.blocks[entries[index + 1]]) < _potential(block):
                index, block = index + 1, following
        most = self.options.max_split_bytes
        if most is not None:
            if size < most <= block.size_bytes:
                return None
            if size >= most and block.size_bytes >= size + self.options.max_non_split_rounding_bytes:
                return None
        return pool.blocks.pop(entries.pop(index))

    def _split(self, block: Block, size: int) -> None:
        """Cut off the part of the block that isn't needed, if that is worth it (``should_split``)."""
        rest = block.size_bytes - size
        if block.pool.is_small or self.options.expandable_segments:
            if rest < MIN_BLOCK_BYTES:
                return
        elif rest <= SMALL_BYTES or (self.options.max_split_bytes is not None and size >= self.options.max_split_bytes):
            return
        block.pool.insert(block.cut(size))

    # -- segments --------------------------------------------------------------------------------------------------------------------------

    def _new_block(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Memory from the device (``alloc_block``, ``get_allocation_size``); None where there is too little."""
        if size <= SMALL_BYTES:
            segment = SMALL_SEGMENT_BYTES
        elif size < MIN_LARGE_BYTES:
            segment = self.options.large_segment_bytes
        else:
            segment = -(-size // LARGE_ROUNDING_BYTES) * LARGE_ROUNDING_BYTES
        if not self._has_room(segment):
            return None
        if self.options.expandable_segments:
            return self._expand(pool, size, stream)
        block = Block(self._address, segment, pool, stream)
        self._address += segment
        pool.heads[block.address] = block
        self._reserve(segment)
        return block

    def _has_room(self, size_bytes: int) -> bool:
        return self.limit_bytes is None or self.reserved_bytes + size_bytes <= self.limit_bytes

    def _reserve(self, size_bytes: int) -> None:
        self.reserved_bytes += size_bytes
        if self.reserved_bytes > self.peak_reserved_bytes:
            self.peak_reserved_bytes = self.reserved_bytes

    def _release(self, block: Block) -> None:
        """Give a whole segment back (``release_block``)."""
        self.released += 1
        block.pool.remove(block)
        del block.pool.heads[block.address]
        self.reserved_bytes -= block.size_bytes

    def _release_oversize(self, pool: Pool, size: int, stream: int) -> bool:
        """Give back unsplittable blocks, but not more than needed (``release_available_cached_blocks``)."""
        most = self.options.max_split_bytes
        if most is None:
            return False
        wanted = max(size, most)
        entries = pool.free.get(stream, [])
        blocks = [pool.blocks[key] for key in entries]
        index = bisect_left(entries, wanted << _ADDRESS_BITS)
        if index < len(blocks) and not blocks[index].expandable:
            self._release(blocks[index])
            return True
        released = 0
        for block in reversed(blocks[:index]):
            if released >= wanted or block.size_bytes < most:
                break
            if not block.expandable:
                released += block.size_bytes
                self._release(block)
        return released >= wanted

    def _collect(self) -> None:
        """Give back unsplit segments that lay unused for longer than the average of them (``garbage_collect_cached_blocks``)."""
        assert self.limit_bytes is not None, "collects only below a limit"
        target = self.reserved_bytes - int(self.options.garbage_collection_threshold * self.limit_bytes)
        if target <= 0:
            return
        unused = [
            block
            for _, keys in sorted(self._large.free.items())
            for block in map(self._large.blocks.__getitem__, keys)
            if block.prev is None and block.next is None and not block.expandable
        ]
        reclaimed = 0
        while reclaimed < target and unused:
            threshold = sum(self._large.searches - block.searches for block in unused) / len(unused)
            old = [block for block in unused if self._large.searches - block.searches >= threshold]
            for block in old:
                reclaimed += block.size_bytes
                self._release(block)
            unused = [block for block in unused if self._large.searches - block.searches < threshold]

    # -- expandable segments ---------------------------------------------------------------------------------------------------------------

    def _expand(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Map pages at the lowest unmapped addresses that have room (``try_allocate_expandable_block``)."""
        candidate = self._find_expandable(pool, size, stream)
        if not candidate.mapped and not self._map(candidate, min(candidate.size_bytes, size)):
            return None
        while candidate.size_bytes < size:
            following = candidate.next
            assert following is not None, "there was room behind it"
            if not self._map(following, min(size - candidate.size_bytes, following.size_bytes)):
                return None
            candidate = following
        candidate.pool.remove(candidate)
        return candidate

    def _find_expandable(self, pool: Pool, size: int, stream: int) -> Block:
        """The lowest run of free and unmapped blocks that is large enough; a new segment where there is none."""
        for _, unmapped in pool.unmapped.get(stream, ()):
            before = unmapped.prev
            first = before if before is not None and not before.allocated else unmapped
            room = 0
            block: Block | None = first
            while room < size and block is not None and not block.allocated:
                room += block.size_bytes
                block = block.next
            if room >= size:
                return first
        page = self._page_bytes(pool)
        segment = Block(-(-self._address // page) * page, page * _ADDRESSABLE_PAGES, pool, stream, expandable=True, mapped=False)
        self._address = segment.address + segment.size_bytes
        pool.heads[segment.address] = segment
        pool.insert(segment)
        return segment

    def _page_bytes(self, pool: Pool) -> int:
        return SMALL_SEGMENT_BYTES if pool.is_small else self.options.large_segment_bytes

    def _map(self, block: Block, size: int) -> bool:
        """Map whole pages at the beginning of an unmapped block, and make it a free one (``map_block``)."""
        page = self._page_bytes(block.pool)
        size = -(-size // page) * page
        if not self._has_room(size):
            return False
        block.pool.remove(block)
        if size < block.size_bytes:
            rest = block.cut(size)
            block.pool.insert(rest)
        block.mapped = True
        block.merge(block.prev)
        block.merge(block.next)
        block.pool.insert(block)
        self._reserve(size)
        return True

    def _unmap(self, block: Block) -> None:
        """Unmap the whole pages of a free block (``unmap_block``)."""
        page = self._page_bytes(block.pool)
        begin = -(-block.address // page) * page
        end = (block.address + block.size_bytes) // page * page
        if begin >= end:
            return
        self.released += 1
        block.pool.remove(block)
        if begin > block.address:
            before = block
            block = block.cut(begin - block.address)
            before.pool.insert(before)
        if end < block.address + block.size_bytes:
            block.pool.insert(block.cut(end - block.address))
        self.reserved_bytes -= block.size_bytes
        block.mapped = False
        block.merge(block.prev)
        block.merge(block.next)
        block.pool.insert(block)


def _potential(block: Block) -> int:
    """Its size, with the unmapped addresses after it."""
    return block.size_bytes + (block.next.size_bytes if block.next is not None and not block.next.mapped else 0)
