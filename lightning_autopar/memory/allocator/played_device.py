"""One device while a step is played on it: what it holds in torch's allocator, by name and category. Knows no plan and no tape.

Requests are noted first and reach the allocator together when they are settled, so that one loop plays all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import chain, count, islice

from lightning_autopar.memory.allocator.caching_allocator import CachingAllocator, Category, OutOfDeviceMemory
from lightning_autopar.memory.allocator.plain_allocator import PlainAllocator

#: The streams that a step's tensors belong to: the computation's; FSDP's for copying shards together; FSDP's for reducing; that on which
#: Lightning wraps a module for DDP.
COMPUTE, GATHER, REDUCE, SETUP = range(4)


class PlayedDevice:
    """The things that a device holds, each under a key of the caller's.

    Attributes:
        held: the number of each thing's allocation, by key, in order; 0 if it takes no bytes. Without things that go together.
        orders: orders that the allocator hasn't got yet (:meth:`~CachingAllocator.play`).
        labels: the categories of these orders.
        goes_on: whether to go on without a limit, asked where there is no room for the first time.
    """

    def __init__(self, allocator: CachingAllocator | PlainAllocator) -> None:
        self.allocator = allocator
        self.held: dict[Hashable, int] = {}
        self.numbers = count(1)
        self.orders: list[int] = []
        self.labels: list[Category] = []
        self.goes_on: Callable[[OutOfDeviceMemory], bool] = lambda error: False
        #: The streams of allocations that aren't the computation's, by number.
        self._elsewhere: dict[int, int] = {}
        #: Allocations of :meth:`hold_all` that must be freed.
        self._together: dict[Hashable, list[int]] = {}

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
        together = [((key, place), -number) for key, numbers in self._together.items() for place, number in enumerate(numbers)]
        there = [(key, number) for key, number in (*self.held.items(), *together) if number]
        order = self.allocator.order([number for _, number in there])
        return tuple(map(tuple, self.allocator.layout())), tuple(key for key, _ in there), order

    def settle(self) -> None:
        """Pass all orders on to the allocator.

        Raises:
            OutOfDeviceMemory: if there is no room.
        """
        orders, self.orders = self.orders, []
        labels, self.labels = self.labels, []
        numbers, categories = iter(orders), iter(labels)
        try:
            self.allocator.play(numbers, categories)
        except OutOfDeviceMemory as error:
            if not isinstance(self.allocator, PlainAllocator) or self.allocator.released or not self.goes_on(error):
                raise
            self.allocator.lift_limit()
            self.allocator.play(chain((error.requested_bytes,), numbers), categories)
