"""In each process of a run that a launcher started: notices when another process on this host is stopped or gone, and then ends this one.

No parent of ours could do it: the processes are torchrun's, Slurm's, or reruns of a script. A thread in each looks at the others' states
once a second. A launcher may be quicker, or may never look, and a rank that waits for a lost one in a collective would wait for long. Each
process watches its own GPU as well, and tells the others when that does nothing any more.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import psutil
import torch

from lightning_autopar.strategies.processes import stalled_workers
from lightning_autopar.strategies.processes.stack_dumps import GpuQueue, where

if TYPE_CHECKING:
    from lightning_autopar.strategies.base.engine_mixin import EngineMixin

#: Seconds between two looks.
_LOOK_SECONDS = 1.0
#: When no batch has begun for so long, this process's own GPU is looked at, and from then on this often.
_QUEUE_SECONDS = 5.0
#: By then, a launcher that ends the others when a process has failed has done so.
_GONE_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class _Process:
    rank: int
    host: str
    pid: int
    created: float


@contextmanager
def watch(store: Any, rank: int, devices: Sequence[str], run: int, *, own_device: torch.device, engine: EngineMixin) -> Iterator[None]:
    """While open, this process ends with a message when another one of the run on this host is stopped for long or gone, or all GPUs hang.

    Args:
        store: where the processes meet.
        run: the run's number among these processes' runs.
        own_device: this rank's, as torch names it here.
        engine: whose batches show that this rank makes progress.
    """
    own = psutil.Process()
    here = _Process(rank=rank, host=socket.gethostname(), pid=own.pid, created=own.create_time())
    store.set(f"autopar/process/{run}/{rank}", pickle.dumps(here))
    main, ended, begun = threading.get_ident(), threading.Event(), [0]

    def count() -> None:
        begun[0] += 1

    engine.at_batch.append(count)

    def body() -> None:
        found = [pickle.loads(store.get(f"autopar/process/{run}/{each}")) for each in range(len(devices)) if each != rank]
        near = [process for process in found if process.host == here.host]
        eyes = Watch(processes=near, devices=devices, left=lambda each: bool(store.check([f"autopar/left/{run}/{each}"])))
        queue = GpuQueue(own_device)
        standstill = Standstill(
            rank=rank,
            devices=devices,
            begun=lambda: begun[0],
            look_at=lambda: (where(main), queue.count(main)),
            tell=lambda word: store.set(f"autopar/standstill/{run}/{rank}", word),
            told=lambda each: _told(store, f"autopar/standstill/{run}/{each}"),
            predicted_seconds=engine.run_plan.predicted_step_seconds,
        )
        while not ended.wait(_LOOK_SECONDS):
            lost = eyes.look()
            if lost is not None and not ended.is_set():
                place = where(main)
                _end(f"{lost}, and this rank waited for it{'' if place is None else f' in {place}'}")
            stands = standstill.look()
            if stands is not None and not ended.is_set():
                _end(stands, after_seconds=2 * _LOOK_SECONDS)  # so that each rank reports its own

    threading.Thread(target=body, daemon=True, name="autopar-peers").start()
    try:
        yield
        store.set(f"autopar/left/{run}/{rank}", "")
    finally:
        ended.set()


@dataclass(kw_only=True)
class Watch:
    """Looks at other processes of this host.

    Args:
        devices: of all ranks.
        left: says whether a rank has come to the end of the run.
    """

    processes: Sequence[_Process]
    devices: Sequence[str]
    left: Callable[[int], bool]
    clock: Callable[[], float] = time.monotonic
    _looked: float | None = None
    _lost: dict[int, float] = field(default_factory=dict)

    def look(self) -> str | None:
        """What is wrong with one of them, if it has lasted so long that it won't recover; to be called again and again."""
        now = self.clock()
        # Time for which this process itself was stopped doesn't count: everything may have been stopped then.
        took = 0.0 if self._looked is None else min(now - self._looked, 2 * _LOOK_SECONDS)
        self._looked = now
        for process in self.processes:
            state, bound = _state(process)
            if state is None or (bound == _GONE_SECONDS and self.left(process.rank)):
                self._lost.pop(process.rank, None)
                continue
            self._lost[process.rank] = self._lost.get(process.rank, -took) + took
            if self._lost[process.rank] > bound:
                return f"rank {process.rank} on {self.devices[process.rank]}, process {process.pid}, {state} for {bound:g} s"
        return None


@dataclass(kw_only=True)
class Standstill:
    """Detects that no rank makes progress: each waits at one place, for a GPU that does nothing or in a collective, and has reported that.

    Args:
        devices: of all ranks.
        begun: how many batches have begun here.
        look_at: gives where this process's main thread is, and its GPU's :meth:`~stack_dumps.GpuQueue.count`.
        tell: reports to the others what this rank waits for: "gpu", "collective" or "".
        told: gives what a rank has reported.
        predicted_seconds: of a step; 0 where nobody knows.
    """

    rank: int
    devices: Sequence[str]
    begun: Callable[[], int]
    look_at: Callable[[], tuple[str | None, int]]
    tell: Callable[[str], None]
    told: Callable[[int], str]
    predicted_seconds: float = 0.0
    clock: Callable[[], float] = time.monotonic
    _looked: float = float("-inf")
    _begun: int = -1
    _moved: float = 0.0
    _longest_seconds: float = 0.0
    _stand: stalled_workers.Stand = field(default_factory=stalled_workers.Stand)
    _word: str = ""

    def look(self) -> str | None:
        """The message, once no rank makes progress; to be called again and again."""
        now, begun = self.clock(), self.begun()
        if begun != self._begun:
            self._longest_seconds = max(self._longest_seconds, now - self._moved) if self._begun > 1 else 0.0  # the first takes longer
            self._begun, self._moved, self._stand = begun, now, stalled_workers.Stand()
        if now - max(self._looked, self._moved) < _QUEUE_SECONDS and not self._word:
            return None
        took, self._looked = min(now - self._looked, 2 * _QUEUE_SECONDS), now
        self._stand.see(*self.look_at(), took)
        word = self._stand.before(stalled_workers.hung_seconds(self._longest_seconds, begun, self.predicted_seconds))
        if word != self._word:
            self._word = word
            self.tell(word)
        words = [word if each == self.rank else self.told(each) for each in range(len(self.devices))] if word else [word]
        if not all(words) or "gpu" not in words:
            return None
        hung = ", ".join(f"rank {each} on {self.devices[each]}" for each, its in enumerate(words) if its == "gpu")
        return (
            f"no rank has begun a batch for {now - self._moved:.0f} s, as GPUs don't do what they were given ({hung}), "
            f"and this rank waited in {self._stand.place}"
        )


def _told(store: Any, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _state(process: _Process) -> tuple[str | None, float]:
    """What is wrong with a process, in words, and how long that may last; None where nothing is wrong."""
    with suppress(psutil.Error):
        found = psutil.Process(process.pid)
        if found.create_time() == process.created and (status := found.status()) != psutil.STATUS_ZOMBIE:
            return (
                ("has been stopped by a signal (SIGSTOP)", stalled_workers.STOPPED_SECONDS)
                if status == psutil.STATUS_STOPPED
                else (None, 0.0)
            )
    return "has been gone", _GONE_SECONDS


def _end(words: str, after_seconds: float = 0.0) -> NoReturn:
    """End this process, whatever its threads wait for, so that its launcher sees a failure."""
    sys.stderr.write(f"autopar: {words}; this one ends\n")
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or nobody reads any more
            stream.flush()
    time.sleep(after_seconds)
    os._exit(1)
