"""A run's memory taken before it is needed, so that strangers' tools see it: between a worker's start and its first batch lie seconds.

Others' programs know nothing of leases. What they look at is what the driver shows, and a run that has only begun shows its context and
then its parameters. So the rest of what it was promised is held in a pool of its own until the first batch comes, and given back then: the
allocator's main pool has none of it, so that nothing is cut up by it. If what comes before the first batch needs more than was thought,
torch takes that from the pool before it fails (``use_on_oom``); it is no reason for a run to end.

Not run on a GPU: written by torch's sources (``torch/cuda/memory.py``, ``aten/src/ATen/cuda/MemPool.cpp``, ``CUDACachingAllocator.cpp``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_autopar.memory.allocator_options import options_from_environment
from lightning_autopar.memory.device_bytes import DeviceBytes
from lightning_autopar.plans import Plan

if TYPE_CHECKING:
    from lightning_autopar.strategies.assignment import Assignment
    from lightning_autopar.strategies.growth import Growth

MIB = 1 << 20
#: Less isn't worth a pool.
_LEAST_BYTES = 256 * MIB
#: In at most so many pieces, none smaller than this: what is taken from one before the first batch keeps all of it from being given back.
_MOST_PIECES, _LEAST_PIECE_BYTES = 64, 32 * MIB
#: The allocator's segments for large tensors are multiples of this (``CUDACachingAllocator.cpp``, ``kRoundLarge``).
_ROUND_BYTES = 2 * MIB
#: A process that has used the device for more has counters that are the user's.
_UNUSED_BYTES = MIB


class Reserve(Protocol):
    """A device's memory, as far as it is taken early."""

    def peak_bytes(self) -> int:
        """The most that tensors took so far, by the counter that users read, too."""

    def held_bytes(self) -> int:
        """What the allocator holds."""

    def free_bytes(self) -> int:
        """What anybody could take of the device."""

    def take(self, sizes: Sequence[int]) -> None:
        """Hold pieces of these sizes, of which no counter is to know.

        Raises:
            RuntimeError: if they can't be had.
        """

    def give_back(self) -> None:
        """Hold them no more, and begin the counters anew."""


class CudaReserve:
    """A GPU's, by torch's allocator.

    Args:
        device: as this process names it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def peak_bytes(self) -> int:
        """See :class:`Reserve`."""
        return int(torch.cuda.max_memory_allocated(self._device))

    def held_bytes(self) -> int:
        """See :class:`Reserve`."""
        return int(torch.cuda.memory_reserved(self._device))

    def free_bytes(self) -> int:
        """See :class:`Reserve`."""
        return int(torch.cuda.mem_get_info(self._device)[0])

    def take(self, sizes: Sequence[int]) -> None:
        """See :class:`Reserve`. A pool keeps what its tensors leave; all of them are there at once, so that none gets another's piece."""
        held: list[torch.Tensor] = []
        missing = None
        try:
            with torch.cuda.device(self._device):
                self._pool = torch.cuda.MemPool(use_on_oom=True)  # a TypeError where torch is older than that
                with torch.cuda.use_mem_pool(self._pool, self._device):
                    for size in sizes:
                        held.append(torch.empty(size, dtype=torch.uint8, device=self._device))
        except (RuntimeError, TypeError) as error:
            missing = str(error)
        held.clear()  # before anything is raised, whose traceback would keep them
        torch.cuda.reset_peak_memory_stats(self._device)
        if missing is not None:
            raise RuntimeError(missing)

    def give_back(self) -> None:
        """See :class:`Reserve`. A pool that is gone gives its memory back to the device (``MemPool::~MemPool``)."""
        self._pool = None
        torch.cuda.reset_peak_memory_stats(self._device)


class Early:
    """Memory that is held until the first batch.

    Args:
        reserve: the device's.
        size_bytes: how much of it; less where less is free.
    """

    def __init__(self, reserve: Reserve, size_bytes: int) -> None:
        self._reserve: Reserve | None = None
        if reserve.peak_bytes() > _UNUSED_BYTES:
            return
        size_bytes = min(size_bytes, reserve.free_bytes())
        if size_bytes < _LEAST_BYTES:
            return
        piece_bytes = max(_LEAST_PIECE_BYTES, size_bytes // _MOST_PIECES // _ROUND_BYTES * _ROUND_BYTES)
        try:
            reserve.take([piece_bytes] * (size_bytes // piece_bytes))
        except RuntimeError as error:  # somebody was faster, or the allocator is one without pools
            reserve.give_back()
            rank_zero_info(f"autopar: the run's memory isn't taken before its first batch: {error}")
            return
        self._reserve = reserve

    @property
    def holds(self) -> bool:
        """Whether anything is held."""
        return self._reserve is not None

    def release(self) -> int:
        """The first batch comes; returns the most that tensors took before, which the counters forget. Again does nothing."""
        if self._reserve is None:
            return 0
        reserve, self._reserve = self._reserve, None
        peak_bytes = reserve.peak_bytes()
        reserve.give_back()
        return peak_bytes


def take_early(
    assignment: Assignment,
    rank: int,
    growth: Growth | None,
    *,
    reserve: Reserve | None = None,
    environment: Mapping[str, str] | None = None,
) -> Early | None:
    """Take what a rank's run was promised of its GPU beyond what it holds before the first batch; None where nothing was promised.

    Args:
        assignment: with the plan's prediction.
        rank: whose.
        growth: what this process may have.
        reserve: the device's memory, unless it is torch's.
        environment: with the allocator's settings; this process's, unless given.
    """
    device = assignment.devices[rank]
    held = None if assignment.candidate is None else assignment.candidate.bytes.get(device.id)
    if growth is None or not growth.is_leased or not isinstance(held, DeviceBytes):
        return None
    if reserve is None:
        if device.kind != "cuda" or options_from_environment(os.environ if environment is None else environment).expandable_segments:
            return None  # whose pools torch keeps in another way
        reserve = CudaReserve(assignment.torch_devices[rank])
    before_bytes = before_first_batch(held, assignment.plan, resumes=assignment.from_snapshot)
    return Early(reserve, growth.limit_bytes - reserve.held_bytes() - before_bytes)


def before_first_batch(held: DeviceBytes, plan: Plan, *, resumes: bool) -> int:
    """What of a prediction is there before the first batch: parameters and buffers, what the engine makes at once, a snapshot's states."""
    found = held.parameters + held.buffers + held.rounding + held.workspace
    if plan.engine in ("ddp", "zero"):  # buckets, and DeepSpeed's own
        found += max(held.gradients, held.parameters)
    if plan.engine == "zero" or resumes:
        found += held.optimizer
    return found + (held.communication if held.occasion == "start" else 0)
