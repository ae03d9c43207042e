"""Blocks of device memory and the lists of those that are free: what the model of torch's allocator is made of. Knows no policy."""

from __future__ import annotations

from bisect import bisect_left, insort


class Block:
    """A piece of a segment: handed out, free, or of an expandable segment a range of addresses without memory behind it.

    Args:
        address: where it begins.
        size_bytes: its size.
        pool: whose it is.
        stream: the stream that it was made for.
        expandable: whether its segment can grow.
        mapped: whether there is memory behind it.
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
        """Shorten it to that size; what follows it there is the new block that comes back."""
        rest = Block(self.address + size_bytes, self.size_bytes - size_bytes, self.pool, self.stream, self.expandable, self.mapped)
        rest.prev = self
        following = self.next
        if following is not None:
            rest.next = following
            following.prev = rest
        self.size_bytes, self.next = size_bytes, rest
        return rest

    def merge(self, other: Block | None) -> None:
        """Take in a neighbour that is free and as mapped as itself, out of the pool's lists, too."""
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
        free: by stream, those that are free, in order of size, then address.
        unmapped: by stream, those without memory behind them, in order of addresses.
        searches: how often a free block was looked for; each block remembers at what count it became free.
    """

    __slots__ = ("free", "heads", "is_small", "searches", "unmapped")

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.heads: dict[int, Block] = {}
        self.free: dict[int, list[tuple[int, int, Block]]] = {}
        self.unmapped: dict[int, list[tuple[int, Block]]] = {}
        self.searches = 0

    def insert(self, block: Block) -> None:
        """Put a block into the list that it belongs to."""
        if block.mapped:
            block.searches = self.searches
            free = self.free.get(block.stream)
            if free is None:
                free = self.free[block.stream] = []
            insort(free, (block.size_bytes, block.address, block))
        else:
            insort(self.unmapped.setdefault(block.stream, []), (block.address, block))

    def remove(self, block: Block) -> None:
        """Take a block out of its list."""
        if block.mapped:
            free = self.free[block.stream]
            del free[bisect_left(free, (block.size_bytes, block.address))]
        else:
            unmapped = self.unmapped[block.stream]
            del unmapped[bisect_left(unmapped, (block.address,))]
