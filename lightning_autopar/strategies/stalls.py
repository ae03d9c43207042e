"""Workers that will never come along again: stopped from outside, or all waiting for each other. Ends no process.

Every wait of a run has a bound, and somebody who notices:

- A worker that dies: the parent sees it within `generation.LOOK_SECONDS`, and ends the others after `generation.GRACE_SECONDS`.
- A worker, or a process that it started, that is stopped (SIGSTOP): the parent sees its state, and ends the run after `STOPPED_SECONDS`.
- Workers that all wait in collectives and compute nothing: the parent reads their stacks, and ends the run after `DEADLOCK_SECONDS`.
- GPUs that do nothing any more while their processes live: each worker says when it is asked whether what its GPU had been given is done.
  The run ends when all ranks have stood at one place and no GPU has come along for `HUNG_SECONDS`, and for far longer than a batch takes.
- A collective that hangs otherwise: the timeout of the process group (30 minutes unless torch or the user's strategy says less), as a rank
  may well validate, or write a checkpoint, for so long.
- An elastic run without a batch for `CheckpointMigrate(hang_seconds=)`: its agent ends the workers. A move waits as long for its snapshot,
  and `agent._READY_SECONDS` for its new workers.
- A worker that failed: `worker._ABORT_SECONDS` for taking leave of its group, `generation._HOOKS_SECONDS` for the user's hooks.
- A worker that was killed and doesn't go, since it is in the kernel: `generation._KILL_SECONDS`.
- Processes of somebody else's launcher, and reruns of a script: each watches those on its host, and its own GPU (`peer_watch`).
- A wait for others' devices ends when the user says (`AUTOPAR_WAIT`); children that trace or rehearse have time limits where they are made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from lightning_autopar.strategies import whereabouts

#: A stopped process is let go on for so long: who pauses a run may do so by mistake, or look at one rank.
STOPPED_SECONDS = 30.0
#: Ranks that all wait in collectives without computing have waited for each other for so long.
DEADLOCK_SECONDS = 40.0
#: What a GPU is given is done after milliseconds. Where a batch took seconds, it may take `PATIENCE` times as long as the longest one.
HUNG_SECONDS, PATIENCE = 35.0, 3
#: Between two looks at processes' states, and between two where that takes a search through all processes, or stacks.
_LOOK_SECONDS, _SEARCH_SECONDS = 1.0, 10.0
#: Less than so much of a core: what waiting threads and the interpreter take, and a transfer of data doesn't do with.
_IDLE_SHARE = 0.02


@dataclass(frozen=True, kw_only=True)
class Stall:
    """Why a generation can't go on.

    Args:
        ranks: whose workers are to blame.
        sentence: what is to be told.
    """

    ranks: tuple[int, ...]
    sentence: str


@dataclass(kw_only=True)
class _Waiting:
    """Ranks that waited at the same places, since when, and what their processes had computed until then."""

    places: dict[int, str]
    cpu_seconds: float
    since: float


@dataclass(kw_only=True)
class Stalls:
    """Looks at a generation's workers.

    Args:
        folder: where they write their stacks.
        devices: their devices' ids, in rank order.
        clock: in seconds.
    """

    folder: Path
    devices: Sequence[str]
    clock: Callable[[], float] = time.monotonic
    _looked: float = float("-inf")
    _searched: float = float("-inf")
    _moved: float = float("-inf")
    _longest_seconds: float = 0.0
    _batches: tuple[int, ...] = ()
    _stopped: dict[int, float] = field(default_factory=dict)
    _waiting: _Waiting | None = None
    _asked: bool = False

    def look(self, pids: Mapping[int, int], batches: Sequence[int]) -> Stall | None:
        """Whether the workers can't go on; to be called again and again.

        Args:
            pids: process ids of those that live, by rank.
            batches: how many batches have begun, in rank order.
        """
        now = self.clock()
        if now - self._looked < _LOOK_SECONDS:
            return None
        # What this process itself was stopped for doesn't count: then everything may have been.
        took, self._looked = min(now - self._looked, 2 * _LOOK_SECONDS), now
        if tuple(batches) != self._batches:
            if any(self._batches):
                self._longest_seconds = max(self._longest_seconds, now - self._moved)
            self._batches, self._moved, self._waiting = tuple(batches), now, None
        search = now - self._moved > _SEARCH_SECONDS and now - self._searched > _SEARCH_SECONDS
        if search:
            self._searched = now
        for rank, pid in pids.items():
            stopped = _stopped_process(pid, search=search or rank in self._stopped)
            if stopped is None:
                self._stopped.pop(rank, None)
            elif (stall := self._count(rank, pid, stopped, took, pids)) is not None:
                return stall
        return self._deadlock(pids, now) if search and not self._stopped else None

    def name(self, rank: int) -> str:
        """A rank and its device."""
        return f"rank {rank} on {self.devices[rank]}"

    def ask(self, pids: Mapping[int, int]) -> None:
        """Have workers say where they are."""
        whereabouts.ask(self.folder, pids)

    def places(self, ranks: Sequence[int]) -> str:
        """Where those ranks were when they were asked, as a part of a sentence."""
        found = {rank: whereabouts.place(self.folder, rank) for rank in ranks}
        return "; ".join(f"{self.name(rank)} waited in {place}" for rank, place in found.items() if place is not None)

    def _count(self, rank: int, pid: int, stopped: int, took: float, pids: Mapping[int, int]) -> Stall | None:
        """A process of this rank's is stopped."""
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

    def _deadlock(self, pids: Mapping[int, int], now: float) -> Stall | None:
        """Whether no rank comes along: all are where they were, in collectives without computing, or before a GPU that does nothing."""
        self.ask(pids)
        time.sleep(_LOOK_SECONDS / 10)
        found = {rank: whereabouts.place(self.folder, rank) for rank in pids}
        places = {rank: place for rank, place in found.items() if place is not None}
        gpu_seconds = {rank: whereabouts.gpu_seconds(self.folder, rank) for rank in pids}
        hung = {rank for rank, seconds in gpu_seconds.items() if seconds > max(HUNG_SECONDS, PATIENCE * self._longest_seconds)}
        cpu_seconds = sum(map(_cpu_seconds, pids.values()))
        before = self._waiting
        waits = {rank for rank, place in places.items() if gpu_seconds[rank] or whereabouts.in_collective(place)}
        if len(pids) < 2 or len(waits) < len(self.devices):
            self._waiting = None
        elif before is None or before.places != places:
            self._waiting = _Waiting(places=places, cpu_seconds=cpu_seconds, since=now)
        elif any(gpu_seconds.values()):
            if hung == {rank for rank, seconds in gpu_seconds.items() if seconds}:
                words = f"no rank has begun a batch for {now - self._moved:.0f} s, and the GPUs don't do what they were given"
                which = ", ".join(f"{self.name(rank)} for {gpu_seconds[rank]:.0f} s" for rank in sorted(hung))
                return Stall(ranks=tuple(pids), sentence=f"{words} ({which}): {self.places(list(pids))}")
        elif cpu_seconds - before.cpu_seconds > _IDLE_SHARE * len(pids) * (now - before.since):
            self._waiting = _Waiting(places=places, cpu_seconds=cpu_seconds, since=now)
        elif now - before.since > DEADLOCK_SECONDS - 2 * _SEARCH_SECONDS:
            words = f"no rank has begun a batch for {now - self._moved:.0f} s, as all of them wait for each other"
            return Stall(ranks=tuple(pids), sentence=f"{words}: {self.places(list(pids))}")
        return None


def _stopped_process(pid: int, *, search: bool) -> int | None:
    """The id of a process that a signal has stopped: this one or, where they are to be searched, one that it started."""
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
