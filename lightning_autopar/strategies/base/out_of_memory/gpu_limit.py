"""How much of a GPU a process may take: its lease, slack beside it, and more once it has asked for more. It never takes memory without
asking.

A run's lease is what its plan is predicted to need with the footprint's margin, and its allocator is capped there. A prediction that is
some per cent too low must not end the run: memory peaks inside the first step, when nothing can be asked for. So each process asks for
slack at once, and gets it where nobody else has that memory promised. After some measured steps it returns the slack that they didn't need;
it keeps the prediction, as a validation or a longer batch may need it. On a device without other runs, the slack is all that the run may
come to need, until its steps are known or another run comes: cuDNN tries kernels, and batches differ in length, in the middle of a step.

Where the allocator comes near its cap, the process asks for more between two steps. Without a grant it takes nothing: the run stays under
its cap, and a step that needs more runs out of memory by itself. Each process asks for itself. Its lease stands beside its run's, and
memory that it has taken counts once (:mod:`lightning_autopar.sharing.ledger`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from lightning_autopar._lightning import rank_zero_info
from lightning_autopar.devices.discover import probe
from lightning_autopar.devices.inventory import Device
from lightning_autopar.sharing.lease_files import LeaseFile
from lightning_autopar.sharing.ledger import Ledger, Room, Shortage, is_leased, open_ledger, owners, room_bytes
from lightning_autopar.sharing.queue import live_places
from lightning_autopar.text import format_bytes

if TYPE_CHECKING:
    from lightning_autopar.strategies.base.run_plan import RunPlan

#: The share promised beyond what is needed or was used; the allocator is predicted to hold as much beyond its tensors
#: (``planning/plan_bytes.py``).
SLACK_SHARE = 0.1
#: More is asked for when less than half of the slack is left.
_LOW_SHARE = SLACK_SHARE / 2
#: By how much a lease grows after the run ran out of memory under it: nobody knows how much it lacked.
_AFTER_SHORTAGE = 0.25
#: Less isn't worth a lease.
_LEAST_BYTES = 2 << 20
#: Steps until a usual one has been seen: the third is the first that begins with the optimizer's state in memory.
_SETTLED_STEPS = 3
#: The same where nobody else is on the device who could want the memory: by then batches of most lengths have been seen.
_SETTLED_STEPS_ALONE = 50
#: If less of a device is taken, nobody is on it, even where the driver names no processes: the driver takes that much itself.
_DRIVERS_BYTES = 1 << 30
_LOOK_SECONDS, _REFUSED_SECONDS = 1.0, 10.0

#: Asks the ledger for this many more bytes.
Ask = Callable[[int], LeaseFile | Shortage | None]


class CudaAllocator:
    """torch's allocator. Its limit is a share of the device's memory by CUDA's count (``CUDACachingAllocator.cpp``, ``setMemoryFraction``).

    Args:
        device: as this process names it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._users_share: float | None = None

    def most_bytes(self) -> int:
        """The most bytes of the device that it has held so far."""
        return int(torch.cuda.max_memory_reserved(self._device))

    def held_bytes(self) -> int:
        """Bytes that tensors take now."""
        return int(torch.cuda.memory_allocated(self._device))

    def free_bytes(self) -> int:
        """Bytes of the device that are free for anybody."""
        return int(torch.cuda.mem_get_info(self._device)[0])

    def cap(self, limit_bytes: int | None) -> None:
        """From now on, hold at most so many bytes of the device; None: no limit. One that the user set, also by
        ``PYTORCH_CUDA_ALLOC_CONF``, is never exceeded.
        """
        if self._users_share is None:
            self._users_share = float(torch.cuda.get_per_process_memory_fraction(self._device))
        total_bytes = torch.cuda.get_device_properties(self._device).total_memory
        share = 1.0 if limit_bytes is None else max(0, limit_bytes) / total_bytes
        torch.cuda.set_per_process_memory_fraction(min(self._users_share, share), self._device)


@dataclass(frozen=True, kw_only=True)
class Lease:
    """What a process may have of a device.

    Args:
        base_bytes: what the ledger promised the run for it: the prediction with its margin.
        most_bytes: the most that it may grow to: the part of the free memory that the user leaves to this run.
        around_bytes: the part of it outside of the allocator: the context, NCCL's buffers.
        alone: whether nobody else is on the device.
    """

    device: str
    base_bytes: int
    most_bytes: int
    around_bytes: int = 0
    alone: bool = False


def target_bytes(lease: Lease, promised_bytes: int, used_bytes: int, *, settled: bool) -> int:
    """The bytes that should be promised, judged by those that are promised and those that are used.

    Args:
        lease: what a process may have.
        promised_bytes: all that is promised now.
        used_bytes: the most that was taken of the device so far, what lies outside of the allocator included.
        settled: whether usual steps have been seen.
    """
    if lease.alone and not settled:
        return max(lease.base_bytes, lease.most_bytes)
    floor = lease.base_bytes if settled else int(lease.base_bytes * (1 + SLACK_SHARE))
    wanted = max(floor, int(used_bytes * (1 + SLACK_SHARE)))
    near = used_bytes * (1 + _LOW_SHARE) > promised_bytes
    if floor <= promised_bytes < wanted and not near:
        return promised_bytes  # at least half of the slack is left
    return max(lease.base_bytes, min(wanted, lease.most_bytes))


class GpuLimit:
    """The cap of one process's allocator, and the leases behind it.

    Args:
        allocator: the one that is capped.
        ask: asks the ledger for more; None where there are no leases, so that the cap never moves.
        clock: in seconds.
        alone: whether nobody else is on the device yet; asked only where nobody was.
    """

    def __init__(
        self,
        lease: Lease,
        allocator: CudaAllocator,
        ask: Ask | None,
        clock: Callable[[], float] = time.monotonic,
        alone: Callable[[], bool] = lambda: True,
    ) -> None:
        self.lease = lease
        self._allocator, self._ask, self._clock, self._alone = allocator, ask, clock, alone
        self._more: list[tuple[int, LeaseFile]] = []
        self._steps = 0
        self._again_at = float("-inf")
        # What this process held on the device before wasn't free memory when the ledger promised the run its part.
        self._before_bytes = allocator.held_bytes()
        self._cap()
        self._adjust(settled=False)

    @property
    def promised_bytes(self) -> int:
        """All that is promised to this process now."""
        return self.lease.base_bytes + sum(size for size, _ in self._more)

    @property
    def limit_bytes(self) -> int:
        """What its allocator may hold."""
        return max(0, self.promised_bytes - self.lease.around_bytes) + self._before_bytes

    def step(self, *, steps: int = 1) -> None:
        """To be called between two batches, after so many more of them."""
        self._steps += steps
        if self._ask is not None and self._clock() >= self._again_at:
            if self.lease.alone and not self._alone():
                self.lease = replace(self.lease, alone=False)
            self._adjust(settled=self._steps > (_SETTLED_STEPS_ALONE if self.lease.alone else _SETTLED_STEPS))

    def release(self) -> None:
        """The run is over: lift the cap, and give back what the ledger added."""
        while self._more:
            self._more.pop()[1].release()
        self._ask = None
        self._allocator.cap(None)

    def lacked_bytes(self) -> int:
        """The bytes that weren't enough, now that the allocator has failed: the run needs more of the device. That is all that was
        promised, if the cap was reached; if others had taken the device's memory first, it is what the allocator had.
        """
        had = self._allocator.most_bytes()
        capped = self._allocator.free_bytes() >= self.limit_bytes - had
        return self.promised_bytes if capped else max(0, had - self._before_bytes) + self.lease.around_bytes

    def _cap(self) -> None:
        self._allocator.cap(self.limit_bytes)

    def _adjust(self, *, settled: bool) -> None:
        if self._ask is None:
            return
        self._again_at = self._clock() + (_LOOK_SECONDS if settled or self.lease.alone else 0.0)
        used_bytes = max(0, self._allocator.most_bytes() - self._before_bytes) + self.lease.around_bytes
        target = target_bytes(self.lease, self.promised_bytes, used_bytes, settled=settled)
        missing_bytes = target - self.promised_bytes
        if missing_bytes >= _LEAST_BYTES:
            self._grow(missing_bytes)
        elif missing_bytes < 0:
            self._shrink(-missing_bytes)

    def _grow(self, missing_bytes: int) -> None:
        assert self._ask is not None, "asked before"
        found = self._ask(missing_bytes)
        if isinstance(found, Shortage) and found.room_bytes >= _LEAST_BYTES:
            missing_bytes = min(missing_bytes, found.room_bytes)
            found = self._ask(missing_bytes)
        if isinstance(found, LeaseFile):
            self._more.append((missing_bytes, found))
            self._cap()
        else:  # others have it
            self._again_at = self._clock() + _REFUSED_SECONDS

    def _shrink(self, spare_bytes: int) -> None:
        """Give back whole leases, after lowering the cap, so that the allocator never takes memory that isn't promised."""
        given = []
        while self._more and self._more[-1][0] <= spare_bytes:
            size, held = self._more.pop()
            spare_bytes -= size
            given.append(held)
        if given:
            self._cap()
        for held in given:
            held.release()


def gpu_limit_for(run_plan: RunPlan, rank: int, *, ledger: Ledger | None = None, allocator: CudaAllocator | None = None) -> GpuLimit | None:
    """The cap of a rank's allocator: by the run's lease; without a lease, by what was free when the plan was made.

    Args:
        ledger: the host's, unless given.
        allocator: torch's on the rank's device, unless given; without one a CPU device has none.

    Returns:
        None where there is nothing to cap.
    """
    device = run_plan.devices[rank]
    if allocator is None:
        if device.kind != "cuda":
            return None
        allocator = CudaAllocator(run_plan.torch_devices[rank])
    needed = run_plan.needed_bytes.get(device.id)
    if needed is not None and is_leased(device):
        try:
            ledger = ledger or open_ledger()
            if ledger is not None and (leader := _leader(ledger, device.id, needed)) is not None:
                watch, lease = _Alone(ledger, device.id, leader), _lease(run_plan, device, needed)
                lease = replace(lease, alone=watch.was(device) and watch())
                return GpuLimit(lease, allocator, _asker(ledger, device.id, leader), alone=watch)
        except (OSError, ValueError) as error:  # the process that planned has logged it, too
            rank_zero_info(f"autopar: the leases of this host can't be read ({error}); the allocator is capped by what was free")
    if device.free_bytes >= device.total_bytes:
        return None
    return GpuLimit(Lease(device=device.id, base_bytes=device.free_bytes, most_bytes=device.free_bytes), allocator, None)


def limit_after_out_of_memory(run_plan: RunPlan) -> dict[str, int]:
    """The bytes to ask for on each device after a plan ran out of memory under its cap; empty where the devices have no more. Only for
    GPUs: a plan on a CPU device isn't capped by its lease.
    """
    found = {}
    for device in run_plan.devices:
        needed = run_plan.needed_bytes.get(device.id)
        if device.kind != "cuda" or needed is None:
            return {}
        wanted = min(int(needed * (1 + _AFTER_SHORTAGE)), _most(run_plan, device))
        if wanted <= needed * (1 + SLACK_SHARE):  # the plan had as much
            return {}
        found[device.id] = wanted
    return found


def shortage_words(run_plan: RunPlan, rank: int, gpu_limit: GpuLimit | None) -> str:
    """One sentence for a run out of memory: what was promised and predicted, what it could still ask for, and what to do."""
    device = run_plan.devices[rank]
    predicted, needed = run_plan.reserved_bytes.get(device.id), run_plan.needed_bytes.get(device.id)
    said = [f"{format_bytes(device.free_bytes)} were free on {device.id} when it was planned"]
    if predicted is not None and needed is not None:
        said.append(f"{format_bytes(predicted)} were predicted ({format_bytes(needed)} with the margin)")
    if gpu_limit is not None:
        said.append(f"{format_bytes(gpu_limit.promised_bytes)} were promised to it, at which its allocator is capped")
    return f"autopar: {'; '.join(said)}. The next start counts with more, unless AUTOPAR_CACHE is off"


def _lease(run_plan: RunPlan, device: Device, needed: int) -> Lease:
    held = None if run_plan.candidate is None else run_plan.candidate.bytes.get(device.id)
    around = 0 if held is None else held.context
    return Lease(device=device.id, base_bytes=needed, most_bytes=_most(run_plan, device), around_bytes=around)


def _most(run_plan: RunPlan, device: Device) -> int:
    """The most bytes of a device that the run may ever have: its budget when it was planned, by the user's limit and margin."""
    return max(run_plan.budgets.get(device.id, device.free_bytes), run_plan.needed_bytes.get(device.id, 0))


def _leader(ledger: Ledger, device: str, needed: int) -> int | None:
    """The process that has the run's lease on the device: this one, or the one that has started it; None where neither has."""
    holders = {lease.pid for lease in ledger.leases() if lease.here and not lease.part_of and lease.bytes.get(device, 0) >= needed}
    return next((pid for pid in (os.getpid(), os.getppid()) if pid in holders), None)


class _Alone:
    """Whether only one run is on a device, and nobody waits for it.

    Args:
        leader: the process that has the run's lease.
    """

    def __init__(self, ledger: Ledger, device: str, leader: int) -> None:
        self._ledger, self._device, self._leader = ledger, device, leader

    def was(self, device: Device) -> bool:
        """Whether the driver showed nobody else when the run was planned."""
        strangers = [process for process in device.processes if not process.own and not owners(process.pid, {self._leader})]
        return device.kind == "cuda" and not strangers and device.total_bytes - device.free_bytes < _DRIVERS_BYTES

    def __call__(self) -> bool:
        """Whether the ledger shows nobody else now."""
        try:
            leases = [lease for lease in self._ledger.leases() if self._device in lease.bytes]
            waits = any(place.wants.get(self._device, 0) for place in live_places(self._ledger.folder))
        except OSError:
            return False
        return not waits and all(lease.here and self._leader in (lease.pid, lease.part_of) for lease in leases)


def _asker(ledger: Ledger, device: str, leader: int) -> Ask:
    """Asks the ledger for more of a device. Memory that this run was promised and hasn't taken yet isn't free."""

    def look() -> Room:
        found = probe()
        return lambda leases: room_bytes(found, leases)

    def ask(more_bytes: int) -> LeaseFile | Shortage | None:
        try:
            return ledger.claim({device: more_bytes}, look, run=f"slack of {leader}", within_seconds=0.1, part_of=leader)
        except (OSError, ValueError):  # a full disk, say: then the run gets no more
            return None

    return ask
