"""One device while a step is played on it: what it holds, by name and category, in torch's allocator. Knows no plan and no tape."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal

from lightning_autopar.memory.allocator import CachingAllocator
from lightning_autopar.memory.free_blocks import Block

Category = Literal["parameters", "gradients", "optimizer", "activations", "temporary", "buffers", "input", "communication", "workspace"]
#: The streams that a step's tensors belong to: the computation's; FSDP's for copying shards together; FSDP's for reducing.
COMPUTE, GATHER, REDUCE = range(3)


class Machine:
    """What is held, each thing under a key of the caller's.

    Args:
        allocator: of the device.

    Attributes:
        allocator: as given.
        fullest: bytes by category when most was allocated, as torch counts them.
    """

    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self.fullest: dict[Category, int] = {}
        self._held: dict[Hashable, tuple[Block | None, Category]] = {}
        self._by_category: dict[Category, int] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._held

    def hold(self, key: Hashable, size_bytes: int, category: Category, stream: int = COMPUTE) -> None:
        """Allocate something. Nothing is allocated for 0 bytes.

        Raises:
            OutOfDeviceMemory: if there is no room.
        """
        assert key not in self._held, f"{key} is held already"
        if size_bytes <= 0:
            self._held[key] = None, category
            return
        allocator = self.allocator
        peak_bytes = allocator.peak_allocated_bytes
        block = allocator.allocate(size_bytes, stream)
        self._held[key] = block, category
        self._by_category[category] = self._by_category.get(category, 0) + block.size_bytes
        if allocator.peak_allocated_bytes > peak_bytes:
            self.fullest = self._by_category.copy()

    def drop(self, key: Hashable) -> bool:
        """Free it, if it is held; whether it was."""
        held = self._held.pop(key, None)
        if held is None:
            return False
        block, category = held
        if block is not None:
            self._by_category[category] -= block.size_bytes
            self.allocator.free(block)
        return True

    def become(self, key: Hashable, category: Category) -> None:
        """What is held under the key counts as something else from now on."""
        block, before = self._held[key]
        self._held[key] = block, category
        if block is not None:
            self._by_category[before] -= block.size_bytes
            self._by_category[category] = self._by_category.get(category, 0) + block.size_bytes

    def rename(self, key: Hashable, new: Hashable) -> None:
        """Call it something else."""
        assert new not in self._held, f"{new} is held already"
        self._held[new] = self._held.pop(key)

    def keys(self) -> list[Hashable]:
        """Everything that is held, in the order in which it came."""
        return list(self._held)


class Uncounted(Machine):
    """A machine that doesn't say what kind of thing took the room: for whoever wants to know only whether there is enough."""

    def __init__(self, allocator: CachingAllocator) -> None:
        super().__init__(allocator)
        self._blocks: dict[Hashable, Block | None] = {}
        self._allocate, self._free = allocator.allocate, allocator.free

    def __contains__(self, key: Hashable) -> bool:
        return key in self._blocks

    def hold(self, key: Hashable, size_bytes: int, category: Category, stream: int = COMPUTE) -> None:
        """Allocate something. Nothing is allocated for 0 bytes.

        Raises:
            OutOfDeviceMemory: if there is no room.
        """
        assert key not in self._blocks, f"{key} is held already"
        self._blocks[key] = self._allocate(size_bytes, stream) if size_bytes > 0 else None

    def drop(self, key: Hashable) -> bool:
        """Free it, if it is held; whether it was."""
        if key not in self._blocks:
            return False
        if (block := self._blocks.pop(key)) is not None:
            self._free(block)
        return True

    def become(self, key: Hashable, category: Category) -> None:
        """What is held under the key counts as something else from now on: to no purpose here."""

    def rename(self, key: Hashable, new: Hashable) -> None:
        """Call it something else."""
        assert new not in self._blocks, f"{new} is held already"
        self._blocks[new] = self._blocks.pop(key)

    def keys(self) -> list[Hashable]:
        """Everything that is held, in the order in which it came."""
        return list(self._blocks)
