"""Workers that will never come along again: stopped from outside, or all waiting for each other. Ends no process.

Every wait of a run has a bound, and somebody who notices:

- A worker that dies: the parent sees it within `LOOK_SECONDS` of `worker_supervisor`, and ends the others after `GRACE_SECONDS`.
- A worker, or a process that it started, that is stopped (SIGSTOP): the parent sees its state, and ends the run after `STOPPED_SECONDS`.
- Workers that all stand still (`Stand`): the parent asks each for its place and for its GPU's count, and ends the run when all have stood
  in collectives, computing nothing, or before GPUs that do nothing of what they were given, for `STOOD_SECONDS`. A GPU may take far longer
  than a batch did (`hung_seconds`).
- A collective that hangs otherwise: the timeout of the process group (30 minutes unless torch or the user's strategy says less), as a rank
  may well validate, or write a checkpoint, for so long.
- An elastic run without a batch for `CheckpointMigrate(hang_seconds=)`: its agent ends the workers. A move waits as long for its snapshot,
  and `agent._READY_SECONDS` for its new workers.
- A worker that failed: `worker._ABORT_SECONDS` for taking leave of its group, `worker_supervisor._HOOKS_SECONDS` for the user's hooks.
- A worker that was killed and doesn't go, since it is in the kernel: `worker_supervisor._KILL_SECONDS`.
- Processes of somebody else's launcher, and reruns of a script: each watches those on its host, and its own GPU (`peer_watch`).
- A wait for others' devices ends when the user says (`AUTOPAR_WAIT`); children that trace or rehearse have time limits where they are made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from lightning_autopar.strategies.processes import stack_dumps

#: A stopped process is tolerated for so long: a user may stop it by mistake, or to look at one rank.
STOPPED_SECONDS = 30.0
#: How long all ranks must stand still, in looks that begin `SEARCH_SECONDS` after the last batch began.
STOOD_SECONDS = 35.0
#: A GPU that others use, too, may take so many times as long as the longest batch took.
PATIENCE = 10
#: How long a GPU may take before that is known. While a rank compiles it may take longer, as others' GPUs wait for what that one will give
#: its own.
FIRST_SECONDS, _KNOWN_BATCHES = 40.0, 3
_COMPILING_SECONDS = 120.0
#: Seconds between two looks at processes' states; without a batch for the second time, looks also search all processes, and read stacks, at
#: the third interval.
LOOK_SECONDS, SEARCH_SECONDS, AGAIN_SECONDS = 1.0, 10.0, 5.0
#: The share of a core that waiting threads and the interpreter take at most; a transfer of data takes more.
_IDLE_SHARE = 0.02


@dataclass(frozen=True, kw_only=True)
class Stall:
    """Why a generation can't go on.

    Args:
        ranks: whose workers are the cause.
    """

    ranks: tuple[int, ...]
    sentence: str


@dataclass(kw_only=True)
class Stand:
    """How long one rank has been seen to stand still. Only time between two looks that found the same counts, and no more than the looks'
    interval: if the looking process was stopped or had no core, the others may have been, too.
    """

    place: str | None = None
    queue: int = 0
    place_seconds: float = 0.0
    gpu_seconds: float = 0.0

    def see(self, place: str | None, queue: int, took_seconds: float) -> None:
        """A look.

        Args:
            place: where the rank is, in words.
            queue: its :meth:`~stack_dumps.GpuQueue.count`.
            took_seconds: since the look before.
        """
        self.place_seconds = self.place_seconds + took_seconds if place is not None and place == self.place else 0.0
        self.gpu_seconds = self.gpu_seconds + took_seconds if queue and queue == self.queue else 0.0
        self.place, self.queue = place, queue

    def before(self, gpu_bound_seconds: float) -> Literal["gpu", "collective", ""]:
        """What the rank has waited for long enough; nothing while its GPU may still work."""
        if self.place_seconds < STOOD_SECONDS:
            return ""
        if self.gpu_seconds:
            bound = max(gpu_bound_seconds, _COMPILING_SECONDS if stack_dumps.compiles(self.place) else 0.0)
            return "gpu" if self.gpu_seconds >= bound else ""
        return "collective" if stack_dumps.in_collective(self.place, gpu=self.queue > 0) else ""


def hung_seconds(longest_batch_seconds: float, batches: int, predicted_seconds: float) -> float:
    """How long a GPU may leave its work undone before it counts as hung.

    Args:
        longest_batch_seconds: from one batch's begin to the next one's.
        batches: how many batches of a rank have begun.
        predicted_seconds: of a step, by the plan; counts until batches show what one takes.
    """
    if batches < _KNOWN_BATCHES:
        return max(FIRST_SECONDS, PATIENCE * longest_batch_seconds, PATIENCE * predicted_seconds)
    return max(STOOD_SECONDS, PATIENCE * longest_batch_seconds)


@dataclass(kw_only=True)
class Stalls:
    """Looks at a generation's workers.

    Args:
        devices: their devices' ids, in rank order.
        predicted_seconds: of a step; 0 where nobody knows.
        clock: in seconds.
    """

    folder: Path
    devices: Sequence[str]
    predicted_seconds: float = 0.0
    clock: Callable[[], float] = time.monotonic
    _looked: float = float("-inf")
    _searched: float = float("-inf")
    _moved: float = float("-inf")
    _longest_seconds: float = 0.0
    _batches: tuple[int, ...] = ()
    _stopped: dict[int, float] = field(default_factory=dict)
    _asked: bool = False
    _asked_for_stands: bool = False
    _seen: float = float("-inf")
    _stands: dict[int, Stand] = field(default_factory=dict)
    _cpu_seconds: float = 0.0
    _idle_seconds: float = 0.0

    def look(self, pids: Mapping[int, int], batches: Sequence[int]) -> Stall | None:
        """Why the workers can't go on, or None; to be called again and again.

        Args:
            pids: process ids of the live workers, by rank.
            batches: how many batches have begun, in rank order.
        """
        now = self.clock()
        if now - self._looked < LOOK_SECONDS:
            return None
        # What this process itself was stopped for doesn't count: then everything may have been.
        took, self._looked = min(now - self._looked, 2 * LOOK_SECONDS), now
        if tuple(batches) != self._batches:
            if self._batches and min(self._batches) > 1:  # the first batch takes longer
                self._longest_seconds = max(self._longest_seconds, now - self._moved)
            self._batches, self._moved, self._asked_for_stands = tuple(batches), now, False
            self._stands.clear()
            self._idle_seconds = 0.0
        search = now - self._moved > SEARCH_SECONDS and now - self._searched > AGAIN_SECONDS
        if search:
            self._searched = now
        for rank, pid in pids.items():
            stopped = _stopped_process(pid, search=search or rank in self._stopped)
            if stopped is None:
                self._stopped.pop(rank, None)
            elif (stall := self._count(rank, pid, stopped, took, pids)) is not None:
                return stall
        if self._stopped:  # nobody answers for a stopped process
            self._asked_for_stands = False
        elif self._asked_for_stands:
            self._asked_for_stands = False
            return self._standstill(pids, now)
        elif search and len(pids) == len(self.devices) > 1:
            self._asked_for_stands = True  # the answers are read at the next look: a machine under load may be slow
            self.ask(pids)
        return None

    def name(self, rank: int) -> str:
        """A rank and its device."""
        return f"rank {rank} on {self.devices[rank]}"

    def ask(self, pids: Mapping[int, int]) -> None:
        """Ask workers to report where they are."""
        stack_dumps.ask(self.folder, pids)

    def places(self, ranks: Sequence[int]) -> str:
        """Where those ranks were when they were asked, as a part of a sentence."""
        found = {rank: stack_dumps.place(self.folder, rank) for rank in ranks}
        return "; ".join(f"{self.name(rank)} waited in {place}" for rank, place in found.items() if place is not None)

    def _count(self, rank: int, pid: int, stopped: int, took: float, pids: Mapping[int, int]) -> Stall | None:
        """Count how long a process of this rank has been stopped."""
        seconds = self._stopped[rank] = self._stopped.get(rank, 0.0) + (took if rank in self._stopped else 0.0)
        others = {each: process for each, process in pids.items() if each != rank}
        if seconds < STOPPED_SECONDS:
            if seconds > STOPPED_SECONDS / 2 and not self._asked:
                self._asked = True
                self.ask(others)
            return None
        whose = "the worker of" if stopped == pid else "what was started by the worker of"
        words = (
            f"{whose} {self.name(rank)}, process {stopped}, has been stopped by a signal (SIGSTOP) for {STOPPED_SECONDS:g} s, after "
            f"{self._batches[rank]} batches had begun there, and the others can't go on without it"
        )
        waited = self.places(list(others))
        return Stall(ranks=(rank,), sentence=f"{words}: {waited}" if waited else words)

    def _standstill(self, pids: Mapping[int, int], now: float) -> Stall | None:
        """Whether no rank makes progress, by their answers; None if one hasn't answered."""
        answers = {rank: answer for rank in pids if (answer := stack_dumps.answer(self.folder, rank)) is not None}
        if len(answers) < len(self.devices):
            return None
        took, self._seen = min(now - self._seen, 2 * (AGAIN_SECONDS + LOOK_SECONDS)), now
        for rank, (place, queue) in answers.items():
            self._stands.setdefault(rank, Stand()).see(place, queue, took)
        before, self._cpu_seconds = self._cpu_seconds, sum(map(_cpu_seconds, pids.values()))
        idle = self._cpu_seconds - before < _IDLE_SHARE * len(pids) * took
        self._idle_seconds = self._idle_seconds + took if idle else 0.0
        bound = hung_seconds(self._longest_seconds, min(self._batches), self.predicted_seconds)
        stood = {rank: stand.before(bound) for rank, stand in self._stands.items()}
        words = f"no rank has begun a batch for {now - self._moved:.0f} s, "
        if not all(stood.values()):
            return None
        if "gpu" in stood.values():
            which = ", ".join(f"{self.name(rank)} for {self._stands[rank].gpu_seconds:.0f} s" for rank in pids if stood[rank] == "gpu")
            words += f"and the GPUs don't do what they were given ({which})"
        elif self._idle_seconds >= STOOD_SECONDS:
            words += "as all of them wait for each other"
        else:
            return None
        return Stall(ranks=tuple(pids), sentence=f"{words}: {self.places(list(pids))}")


def _stopped_process(pid: int, *, search: bool) -> int | None:
    """The id of a process that a signal has stopped: this one or, if children are searched, one that it started."""
    with suppress(psutil.Error):  # it has just ended
        process = psutil.Process(pid)
        family = [process, *(process.children(recursive=True) if search else ())]
        for each in family:
            with suppress(psutil.Error):
                if each.status() == psutil.STATUS_STOPPED:
                    return int(each.pid)
    return None


def _cpu_seconds(pid: int) -> float:
    with suppress(psutil.Error):
        taken = psutil.Process(pid).cpu_times()
        return float(taken.user + taken.system)
    return 0.0
