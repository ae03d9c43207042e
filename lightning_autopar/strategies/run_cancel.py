"""Ending a run of this user's from another process, as Ctrl-C in its terminal does: ``cancel()``.

By a signal to the very process that the run has shown, which a number alone may not be any more. Needs the standard library alone (and
psutil, for workers' numbers). Knows no plan and no trainer.
"""

from __future__ import annotations

import math
import os
import signal
import time
from dataclasses import dataclass, replace

from lightning_autopar.memory.processes import ignores, is_stopped, started_ticks
from lightning_autopar.strategies.run_files import RunStatus
from lightning_autopar.strategies.run_folders import is_alive
from lightning_autopar.strategies.run_requests import find, is_here

_POLL_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class Cancelled:
    """What came of it.

    Args:
        run_id: which run was told to end.
        signal: by which signal, such as ``"SIGINT"``.
        outlook: what becomes of the run, in words.
        ended: whether it has ended; None where nobody waited.
        waited_seconds: how long its end was waited for.
    """

    run_id: str
    signal: str
    outlook: str
    ended: bool | None = None
    waited_seconds: float = 0.0

    def __str__(self) -> str:
        if self.ended:
            return f"{self.run_id} has ended by {self.signal}; {self.outlook}"
        told = f"{self.run_id} has been told to end by {self.signal}; {self.outlook}"
        return told if self.ended is None else f"{told}; after {self.waited_seconds:.3g} s it is still there"


def cancel(run: str | int, *, wait_seconds: float | None = None) -> Cancelled:
    """End a run of this user's, be it queued, planning or running: by SIGINT, or by SIGTERM where its process ignores that.

    Args:
        run: its id, the beginning of it if no other run has it, or a pid: of the script or of one of its workers.
        wait_seconds: how long to wait for its end; by default not at all.

    Raises:
        ValueError: if it isn't known which run is meant, it is another user's, it has ended, or can't be ended from here.
    """
    if wait_seconds is not None and not 0 <= wait_seconds < math.inf:
        raise ValueError(f"an end can't be waited for {wait_seconds} s; give a number of seconds from 0 on")
    folder, status = find(str(run).strip())
    if status.external:
        raise ValueError(
            f"{status.run_id} was started by torchrun or Slurm, which would start it anew or leave its other processes behind; end it "
            "there (Ctrl-C, or scancel)"
        )
    if not is_here(status):
        raise ValueError(f"{status.run_id} runs in another container, where its process {status.pid} is to be told; cancel it there")
    number = _tell(status)
    stopped = f"; its process is stopped, and ends when it is let go on (kill -CONT {status.pid})" if is_stopped(status.pid) else ""
    cancelled = Cancelled(run_id=status.run_id, signal=number.name, outlook=_outlook(status, number) + stopped)
    if not wait_seconds:
        return cancelled
    until = time.monotonic() + wait_seconds
    while (alive := is_alive(folder)) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)  # a lock of another process's, of whose end there is no event
    return replace(cancelled, ended=not alive, waited_seconds=wait_seconds)


def _tell(status: RunStatus) -> signal.Signals:
    """Send the signal that ends the run in order, to its process and no other; which one it was.

    Raises:
        ValueError: if the process has ended, or ignores what would end it.
    """
    gone = f"{status.run_id} has just ended"
    try:
        process = os.pidfd_open(status.pid)
    except ProcessLookupError:
        raise ValueError(gone) from None
    try:
        # From here on the number can be nobody else's: the descriptor is the process that had it, be it dead.
        if started_ticks(status.pid) != status.started_ticks:
            raise ValueError(gone)
        for number in (signal.SIGINT, signal.SIGTERM):
            if not ignores(status.pid, number):
                signal.pidfd_send_signal(process, number)
                return number
    except ProcessLookupError:
        raise ValueError(gone) from None
    finally:
        os.close(process)
    raise ValueError(f"{status.run_id} ignores SIGINT and SIGTERM; only 'kill -KILL {status.pid}' ends it, without its last checkpoint")


def _outlook(status: RunStatus, number: signal.Signals) -> str:
    """What becomes of the run and what it wrote."""
    if status.state == "queued":
        return "it leaves the queue, and nothing of it has run"
    if status.state == "planning":
        return "nothing of it has run"
    if not status.elastic:
        return "its callbacks are told as by Ctrl-C, and the checkpoints that it wrote stay"
    if number is signal.SIGTERM:
        return "it saves a snapshot first, and the next start of the same script goes on from there"
    return "the checkpoints that it wrote stay, its snapshots go with it"
