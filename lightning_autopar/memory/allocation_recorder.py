"""Recorder: what this process's tensors take of the host's memory while it is open, allocation by allocation. Knows nothing of steps.

A CPU device has no counter like ``torch.cuda.max_memory_allocated``. The profiler's memory events stand in
for it. They have three flaws, and this module deals with all of them (torch 2.13, c10/core/CPUAllocator.cpp):

- A thread reports only if it carries the profiler's thread-local state. A tensor whose last reference goes in one of gloo's threads is
  freed unseen, so that a running sum of the events grows with each step of DDP or FSDP. The allocator's own total, which each event
  carries, leaves those out for the same reason, unless ``FLAGS_caffe2_report_cpu_memory_usage`` (declared in CPUAllocator.h) makes every
  thread count.
- What was allocated before isn't known, so that its end isn't seen: whoever opens the recorder says what there is
  (:meth:`AllocationRecorder.note`). An allocation whose begin an earlier recorder saw, and whose end nobody saw, is still in the
  allocator's table. A thread without a profiler that frees something else at that address takes the old size off the total. Only a second
  recording in a process can meet that.

Operations themselves aren't recorded, only allocations: a step under it takes a few per cent longer.

A CPU device's memory is the host's, so what a plan offloads lies in the same allocator. It is told apart by being said: storages that are
noted as the host's, and whatever is allocated while the host works (:meth:`AllocationRecorder.host_works`), count apart from the device's.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import RecordScope, _EventType
from torch.autograd import profiler

log = logging.getLogger(__name__)

_MARK = "autopar::mark"
#: The kind for storages that belong to the host, not the device.
HOST = "host"


@dataclass(kw_only=True)
class _Block:
    """One allocation, from the event that made it to the one that freed it, both by number; −1 if made before the first event."""

    size_bytes: int
    birth: int
    death: float = float("inf")
    noted: dict[str, int] = field(default_factory=dict)  # by kind: the last note's event that said so
    host: bool = False

    def alive(self, index: int) -> bool:
        return self.birth <= index < self.death

    def end_unseen(self, index: float, last: Mapping[str, int]) -> None:
        """Another thread freed it before this event, and before the first note in which it is missing; or nobody freed it."""
        gone = bool(self.noted) and all(noted < last[kind] for kind, noted in self.noted.items())
        self.death = max(self.noted.values()) + 1 if gone else index


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What came of it.

    Args:
        peak_bytes: the most that was allocated at once, with what was noted to be there at the start; without the host's.
        bytes: of that the bytes of each kind that was noted.
        host_bytes: the most that was the host's at once.
    """

    peak_bytes: int
    bytes: Mapping[str, int]
    host_bytes: int = 0


class _Allocations(profiler.profile):
    """The profiler, only for memory events and marks: it records the scope of ``record_function``, not that of every operation. It doesn't
    set torch's global flag of a running profiler, so that it notices another profiler, which would replace this one.
    """

    def _start_trace(self) -> None:
        self.entered = True
        this: Any = self
        enable: Any = profiler._enable_profiler  # its annotation lacks the scopes
        enable(this.config(create_trace_id=False), self.kineto_activities, {RecordScope.USER_SCOPE})


class AllocationRecorder:
    """Counts what is allocated on the CPU between :meth:`start` and :meth:`stop`."""

    def __init__(self) -> None:
        self._profile: Any = None
        self._notes: list[_Note] = []

    @property
    def running(self) -> bool:
        """Whether it is open."""
        return self._profile is not None

    def start(self, **kinds: Mapping[int, int]) -> bool:
        """Begin, with what is there; False if another profiler runs already, which it would disturb.

        Args:
            kinds: as for :meth:`note`.
        """
        assert not self.running
        if torch.autograd._profiler_enabled():
            return False
        self._notes = []
        _count_in_every_thread(True)
        self._profile = _Allocations(profile_memory=True)
        self._profile.__enter__()
        self.note(**kinds)
        return True

    def note(self, **kinds: Mapping[int, int]) -> None:
        """Record what some of the storages hold now.

        Args:
            kinds: of each kind the bytes by storage address, as :func:`lightning_autopar.memory.storages.storage_sizes` gives them. A
                storage that was there before the start counts until the last note that holds it. A storage that is :data:`HOST` once counts
                as the host's all the time, whatever else it is.
        """
        self._mark(kinds)

    def host_works(self, begins: bool) -> None:
        """From this call until one with False, allocations belong to the host; such periods may be nested."""
        self._mark(begins)

    def _mark(self, note: _Note) -> None:
        assert self.running
        with profiler.record_function(_MARK):
            self._notes.append(note)

    def stop(self) -> Recording | None:
        """End it, and compute the peak; takes some µs an allocation. None if another profiler was started meanwhile."""
        notes = self._notes
        profile = self._close()
        return None if profile is None else _worked_out(_events(profile), notes)

    def abandon(self) -> None:
        """End it without a result."""
        if self.running:
            self._close()

    def _close(self) -> Any:
        profile, self._profile, self._notes = self._profile, None, []
        _count_in_every_thread(False)
        if profiler._is_profiler_enabled or not torch.autograd._profiler_enabled():  # the other profiler goes on, or is over
            return None
        profile.__exit__(None, None, None)
        return profile


#: An event: address, bytes (negative where they are freed), the allocator's total after it; None stands for a mark.
_Event = tuple[int, int, int] | None
#: Storages by kind, or whether the host begins to work or ends.
_Note = Mapping[str, Mapping[int, int]] | bool


def _events(profile: Any) -> list[_Event]:
    """Allocations of the CPU and marks, in order."""
    found: list[tuple[int, _Event]] = []

    def collect(nodes: Any) -> None:
        pending = list(nodes)
        while pending:
            node = pending.pop()
            kind, fields = node.typed
            if kind == _EventType.Allocation:
                if fields.device.type == "cpu":
                    found.append((node.start_time_ns, (fields.ptr, fields.alloc_size, fields.total_allocated)))
            elif node.name == _MARK:
                found.append((node.start_time_ns, None))
            pending.extend(node.children)

    collect(profile.kineto_results.experimental_event_tree())
    found.sort(key=lambda each: each[0])
    return _without_maps(event for _, event in found)


def _without_maps(events: Iterable[_Event]) -> list[_Event]:
    """The allocator's events: the end of a memory map also has a total of 0, which the allocator's total wouldn't be."""
    kept: list[_Event] = []
    total: int | None = None
    for event in events:
        if event is not None:
            _, size_bytes, after = event
            if after == 0 and (total is None or total + size_bytes != 0):
                continue
            total = after
        kept.append(event)
    return kept


def _worked_out(events: list[_Event], notes: Sequence[_Note]) -> Recording:
    """The peak over the events, and what was alive then."""
    blocks: list[_Block] = []
    live: dict[int, _Block] = {}
    before: dict[int, _Block] = {}  # by address: what was there at the start
    running: list[int] = []  # the allocator's total after each event, from the first one's on
    last: dict[str, int] = {}  # by kind: the last note's event
    stale = 0
    base: int | None = None
    pending = iter(notes)
    working = 0
    for index, event in enumerate(events):
        if event is None:
            note = next(pending)
            if isinstance(note, bool):
                working += 1 if note else -1
                note = {}
            for kind, sizes in note.items():
                last[kind] = index
                for address, size_bytes in sizes.items():
                    block = live.get(address)
                    if block is None:
                        block = before.setdefault(address, _Block(size_bytes=size_bytes, birth=-1))
                        block.death = index + 1
                    block.noted[kind] = index
                    block.host |= kind == HOST
            running.append(running[-1] if running else 0)
            continue
        address, size_bytes, total_bytes = event
        if base is None:
            base = total_bytes - size_bytes
        if size_bytes > 0:
            if address in live:
                live[address].end_unseen(index, last)
            live[address] = _Block(size_bytes=size_bytes, birth=index, host=working > 0)
            blocks.append(live[address])
        elif address in live:
            live.pop(address).death = index
        else:
            stale -= size_bytes  # left in the allocator's table by an earlier recording: not ours
        running.append(total_bytes - base + stale)
    for block in blocks:
        if block.death == float("inf"):
            block.end_unseen(block.death, last)
    for index, extra_bytes in enumerate(_levels(before.values(), len(events))):
        running[index] += extra_bytes
    host = _levels((block for block in (*before.values(), *blocks) if block.host), len(events))
    running = [total - theirs for total, theirs in zip(running, host, strict=True)]
    peak_bytes = max(running, default=0)
    peak = running.index(peak_bytes) if running else 0
    bytes_by_kind = {kind: 0 for note in notes if not isinstance(note, bool) for kind in note if kind != HOST}
    for block in (*before.values(), *blocks):
        if block.alive(peak) and block.noted and not block.host:
            bytes_by_kind[min(block.noted)] += block.size_bytes
    return Recording(peak_bytes=peak_bytes, bytes=bytes_by_kind, host_bytes=max(host, default=0))


def _levels(blocks: Iterable[_Block], count: int) -> list[int]:
    """The bytes of these blocks after each of so many events."""
    changes = [0] * (count + 1)
    for block in blocks:
        changes[max(0, block.birth)] += block.size_bytes
        changes[int(min(count, block.death))] -= block.size_bytes
    return [*accumulate(changes[:-1])]


def _count_in_every_thread(on: bool) -> None:
    """Make torch's CPU allocator also count allocations of threads without a profiler, or stop that."""
    flag = _flag()
    if flag is not None:
        flag.value = on


@cache
def _flag() -> Any:
    """The flag for that; None where this build of torch doesn't export it, and the total may be too high under gloo."""
    folder = Path(torch.__file__).parent / "lib"
    for path in sorted(folder.glob("libc10.*")):
        try:
            return ctypes.c_bool.in_dll(ctypes.CDLL(str(path)), "FLAGS_caffe2_report_cpu_memory_usage")
        except (OSError, ValueError):
            log.debug("torch's CPU allocator can't be told to count every thread", exc_info=True)
    return None
