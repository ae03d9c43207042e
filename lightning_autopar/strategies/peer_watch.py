"""In each process of a run that a launcher started: sees when another one on this host is stopped or gone, and then ends this one.

There is no parent of ours that could: the processes are torchrun's, Slurm's, or reruns of a script. Each looks at the others' states once a
second, in a thread. A launcher may be quicker, or may never look; what waits for a lost rank in a collective would wait for long.
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
from typing import Any, NoReturn

import psutil

from lightning_autopar.strategies.stalls import STOPPED_SECONDS
from lightning_autopar.strategies.whereabouts import where

#: Between two looks.
_LOOK_SECONDS = 1.0
#: A launcher that ends the others when a process has failed has done so by then.
_GONE_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class _Process:
    """A process as the others find it."""

    rank: int
    host: str
    pid: int
    created: float


@contextmanager
def watch(store: Any, rank: int, devices: Sequence[str], run: int) -> Iterator[None]:
    """While open, this process ends by a sentence when another one of the run on this host is stopped for long, or gone.

    Args:
        store: where the processes meet.
        rank: of this one.
        devices: of the ranks.
        run: its number among these processes' runs.
    """
    own = psutil.Process()
    here = _Process(rank=rank, host=socket.gethostname(), pid=own.pid, created=own.create_time())
    store.set(f"autopar/process/{run}/{rank}", pickle.dumps(here))
    main, ended = threading.get_ident(), threading.Event()

    def body() -> None:
        found = [pickle.loads(store.get(f"autopar/process/{run}/{each}")) for each in range(len(devices)) if each != rank]
        near = [process for process in found if process.host == here.host]
        eyes = Watch(processes=near, devices=devices, left=lambda each: bool(store.check([f"autopar/left/{run}/{each}"])))
        while not ended.wait(_LOOK_SECONDS):
            words = eyes.look()
            if words is not None and not ended.is_set():
                _end(words, where(main))

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
        processes: which.
        devices: of all ranks.
        left: whether a rank has come to the end of the run.
        clock: in seconds.
    """

    processes: Sequence[_Process]
    devices: Sequence[str]
    left: Callable[[int], bool]
    clock: Callable[[], float] = time.monotonic
    _looked: float | None = None
    _lost: dict[int, float] = field(default_factory=dict)

    def look(self) -> str | None:
        """What is wrong with one of them, for so long that it won't come again; to be called again and again."""
        now = self.clock()
        # What this process itself was stopped for doesn't count: then everything may have been.
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


def _state(process: _Process) -> tuple[str | None, float]:
    """What is wrong with it, in words, and how long that may last; None where nothing is."""
    with suppress(psutil.Error):
        found = psutil.Process(process.pid)
        if found.create_time() == process.created and (status := found.status()) != psutil.STATUS_ZOMBIE:
            return ("has been stopped by a signal (SIGSTOP)", STOPPED_SECONDS) if status == psutil.STATUS_STOPPED else (None, 0.0)
    return "has been gone", _GONE_SECONDS


def _end(words: str, place: str | None) -> NoReturn:
    """End this process, whatever its threads wait for: its launcher sees that it failed."""
    waited = "" if place is None else f" in {place}"
    sys.stderr.write(f"autopar: {words}, and this rank waited for it{waited}; this one ends\n")
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or nobody reads any more
            stream.flush()
    os._exit(1)
