"""One device while a step is played on it: what it holds in torch's allocator, by name and category. Knows no plan and no tape.

Requests are noted first and reach the allocator together when they are settled, so that one loop plays all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count, islice

import numpy as np

from lightning_autopar.memory.allocator.caching_allocator import CachingAllocator, Category, OutOfDeviceMemory
from lightning_autopar.memory.allocator.plain_allocator import PlainAllocator

#: The streams that a step's tensors belong to: the computation's; FSDP's for copying shards together; FSDP's for reducing; that on which
#: Lightning wraps a module for DDP.
COMPUTE, GATHER, REDUCE, SETUP = range(4)


@dataclass
class _Passage:
    """What is ordered from one time to another at which the same is held.

    Args:
        kinds: what is held in other streams, what takes no bytes, and how many things go together, by key.
        begin: the numbers of the allocations before, by key; of things that go together likewise.
        first: the first number that is given meanwhile.
        orders: what is ordered meanwhile.
        labels: the categories of these orders.
        end: the numbers of all allocations afterwards; None as long as it isn't over.
        made: how many allocations are ordered.
    """

    kinds: tuple[object, ...]
    begin: tuple[dict[Hashable, int], dict[Hashable, list[int]]]
    first: int
    orders: list[int] = field(default_factory=list)
    labels: list[Category] = field(default_factory=list)
    end: list[int] | None = None
    made: int = 0


class PlayedDevice:
    """The things that a device holds, each under a key of the caller's.

    Attributes:
        held: the number of each thing's allocation, by key, in order; 0 if it takes no bytes. Without things that go together.
        orders: orders that the allocator hasn't got yet (:meth:`~CachingAllocator.play`).
        labels: the categories of these orders.
        goes_on: says whether to go on without a limit where there is no room; None: it never does.
        forks: whether an allocator that gives memory back for the first time is kept as it was before, so that it can go on from there.
        fork: that one, and the orders that it hasn't got.
    """

    def __init__(self, allocator: CachingAllocator | PlainAllocator) -> None:
        self.allocator = allocator
        self.held: dict[Hashable, int] = {}
        self.numbers = count(1)
        self.orders: list[int] = []
        self.labels: list[Category] = []
        self.goes_on: Callable[[OutOfDeviceMemory], bool] | None = None
        #: The streams of allocations that aren't the computation's, by number.
        self._elsewhere: dict[int, int] = {}
        #: Allocations of :meth:`hold_all` that must be freed.
        self._together: dict[Hashable, list[int]] = {}
        self.forks = False
        self.fork: tuple[PlainAllocator, list[tuple[Iterable[int], Iterable[Category]]]] | None = None
        self._passage: _Passage | None = None

    def __contains__(self, key: Hashable) -> bool:
        return key in self.held

    def hold(self, key: Hashable, size_bytes: int, category: Category, stream: int = COMPUTE) -> None:
        """Allocate something. Nothing is allocated for 0 bytes."""
        assert key not in self.held, f"{key} is held already"
        if size_bytes <= 0:
            self.held[key] = 0
            return
        number = self.held[key] = next(self.numbers)
        if stream == COMPUTE:
            self.orders.append(size_bytes)
        else:
            self._elsewhere[number] = stream
            self.orders += 0, stream, size_bytes, 0, COMPUTE
        self.labels.append(category)

    def drop(self, key: Hashable) -> bool:
        """Free it, if it is held; returns whether it was. It goes back to the stream that it was allocated on."""
        number = self.held.pop(key, None)
        if number is None:
            return False
        if number in self._elsewhere:
            self.orders += 0, self._elsewhere.pop(number), -number, 0, COMPUTE
        elif number:
            self.orders.append(-number)
        return True

    def hold_all(self, key: Hashable, sizes_bytes: Sequence[int], category: Category) -> None:
        """Allocate things that go together, one after the other."""
        assert key not in self._together, f"{key} are held already"
        there = [size_bytes for size_bytes in sizes_bytes if size_bytes > 0]
        self._together[key] = [-number for number in islice(self.numbers, len(there))]
        self.orders += there
        self.labels += [category] * len(there)

    def drop_all(self, key: Hashable) -> None:
        """Free them in the order in which they came, if they are held."""
        self.orders += self._together.pop(key, ())

    def become(self, key: Hashable, category: Category) -> None:
        """From now on, the thing under the key counts in another category."""
        if self.held[key]:
            self.orders += 0, -self.held[key]
            self.labels.append(category)

    def rename(self, key: Hashable, new: Hashable) -> None:
        """Change a thing's key."""
        assert new not in self.held, f"{new} is held already"
        self.held[new] = self.held.pop(key)

    def keys(self) -> list[Hashable]:
        """Everything that is held, in the order in which it came."""
        return list(self.held)

    def layout(self) -> tuple[object, ...] | None:
        """All that decides where the next orders' memory comes from: the allocator's blocks, and which thing lies in which. None where the
        allocator's settings look at more than that.
        """
        if not isinstance(self.allocator, PlainAllocator):
            return None
        keys = [key for key, number in self.held.items() if number]
        together = [(key, len(numbers)) for key, numbers in self._together.items()]
        return *keys, *together, self.allocator.arrangement(list(filter(None, self._numbers(self.held, self._together))))

    def _numbers(self, held: Iterable[Hashable], together: Iterable[Hashable]) -> list[int]:
        """The numbers of the allocations under these keys."""
        return [*map(self.held.__getitem__, held), *(-number for key in together for number in self._together[key])]

    def repeats(self) -> bool:
        """Whether the same is held as when this was asked before. If so, what was ordered since then is ordered once more."""
        streams = {key: self._elsewhere[number] for key, number in self.held.items() if number in self._elsewhere}
        nothing = {key for key, number in self.held.items() if not number}
        kinds = streams, nothing, {key: len(numbers) for key, numbers in self._together.items()}
        following = next(self.numbers)
        self.numbers = count(following)
        before = self._passage
        if before is None or before.kinds != kinds or before.begin[0].keys() != self.held.keys():
            self._passage = _Passage(kinds, (self.held.copy(), self._together.copy()), following)
            return False
        if before.end is None:
            before.end, before.made = self._numbers(self.held, self._together), following - before.first
        # The number that each allocation had then → the one that it has now.
        held, together = before.begin
        now = np.arange(before.first + before.made) + (following - before.first)
        now[[*held.values(), *(-number for numbers in together.values() for number in numbers)]] = self._numbers(held, together)
        now[0] = 0
        orders, end = np.array(before.orders), now[before.end].tolist()
        orders[orders < 0] = -now[-orders[orders < 0]]
        self.orders, self.labels, self.numbers = orders.tolist(), before.labels, count(following + before.made)
        self.held, rest = dict(zip(self.held, end, strict=False)), iter(end[len(self.held) :])
        self._together = {key: [-number for number in islice(rest, len(numbers))] for key, numbers in self._together.items()}
        self._elsewhere = {self.held[key]: stream for key, stream in streams.items()}
        return True

    def settle(self) -> None:
        """Pass all orders on to the allocator.

        Raises:
            OutOfDeviceMemory: if there is no room.
        """
        orders, self.orders = self.orders, []
        labels, self.labels = self.labels, []
        if self._passage is not None and self._passage.end is None:
            self._passage.orders += orders
            self._passage.labels += labels
        numbers, categories = iter(orders), iter(labels)
        allocator, fork = self.allocator, self.fork
        if fork is not None:
            fork[1].append((iter(orders), iter(labels)))
        elif self.forks and isinstance(allocator, PlainAllocator):
            allocator.gives_back = partial(self._keep, numbers, categories)
        try:
            allocator.play(numbers, categories)
        except OutOfDeviceMemory as error:
            if not isinstance(allocator, PlainAllocator) or self.goes_on is None or (allocator.released and self.fork is None):
                raise
            if not self.goes_on(error):
                raise
            unlimited, left = self.fork or (allocator, [(chain((error.requested_bytes,), numbers), categories)])
            self.allocator, self.fork = unlimited, None
            unlimited.lift_limit()
            for waiting in left:
                unlimited.play(*waiting)
        finally:
            if isinstance(allocator, PlainAllocator):
                allocator.gives_back = None

    def _keep(self, numbers: Iterable[int], categories: Iterable[Category], allocator: PlainAllocator, requested_bytes: int) -> None:
        """Note an allocator that is about to give memory back for the first time, and the orders from the refused one on."""
        self.fork = allocator, [(chain((requested_bytes,), copy(numbers)), copy(categories))]
