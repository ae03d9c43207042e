"""The allocator under a step whose gradients stay: set to zero after the update, as torch did by itself before 2.0. Knows no row.

The first backward puts them where activations have just been, and there they stay; so do the optimizer's states. The next forward has to
find room between them.
"""

from __future__ import annotations

from collections.abc import Hashable

from lightning_autopar.memory.allocator.caching_allocator import CachingAllocator, OutOfDeviceMemory
from lightning_autopar.memory.allocator.played_device import PlayedDevice
from lightning_autopar.memory.allocator.tape_parts import TapeChange, read_script
from lightning_autopar.memory.allocator.tape_player import Player, parts_of
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.plans import Plan

_STEPS = 2


class _Keeping(Player):
    """A rank whose gradients are added to what they were."""

    def keeps(self, change: TapeChange) -> bool:
        """They are there once the first backward has made them."""
        return change.kind != "gradients"

    def complete(self, key: Hashable, change: TapeChange) -> None:
        """The first one stays; a later one is added to it."""
        if self.steps == 0 and self.micro == 0:
            self.machine.become(key, "gradients")
            self.machine.rename(key, ("gradient", key))
        else:
            self.machine.drop(key)

    def clear(self, change: TapeChange) -> None:
        """They stay."""


def played(footprint: Footprint, plan: Plan, *, workspace_bytes: int, limit_bytes: int | None = None) -> CachingAllocator | None:
    """The allocator after a rank's first two steps; None if there is no room for them.

    Args:
        footprint: with its tape.
        plan: of one device, or of ranks that take equal parts.
        workspace_bytes: what libraries take of the allocator beside the tape.
        limit_bytes: the most that may be reserved; None for no limit.
    """
    assert footprint.tape is not None, "the step was traced"
    allocator = CachingAllocator(limit_bytes=limit_bytes)
    machine = PlayedDevice(allocator)
    index = {block.fqn: number for number, block in enumerate(footprint.blocks)}
    rows = max(1, plan.rows(footprint.batch_size)[0]) if footprint.batch_size else 0
    recompute = frozenset(index[fqn] for fqn in plan.recompute)
    rank = _Keeping(machine, read_script(footprint.tape), footprint, parts_of(rows, plan.micro_batches), recompute)
    try:
        rank.start()
        machine.hold("workspace", workspace_bytes, "workspace")
        for _ in range(_STEPS):
            rank.step()
    except OutOfDeviceMemory:
        return None
    return allocator
