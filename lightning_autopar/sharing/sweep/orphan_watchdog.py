"""Ends process groups when the process that names them is gone, however it died. A program of its own; standard library alone.

It reads lines from standard input: ``+12345`` names a group to end, ``-12345`` one that is over. At the end of the input it ends the named
groups; the kernel closes the input even where the other side was killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

_LOOK_SECONDS = 0.05


def keep(grace_seconds: float) -> None:
    """Read until the other side is gone, then end the processes that are left.

    Args:
        grace_seconds: between SIGTERM, on which a run may save itself, and SIGKILL.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a signal to the sweep's whole session must not end this process before the runs
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        groups.add(group) if line[0] == "+" else groups.discard(group)
    _send(groups, signal.SIGTERM)
    until = time.monotonic() + grace_seconds
    while (groups := {group for group in groups if _is_there(group)}) and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)  # there is no event for the end of another process's children
    _send(groups, signal.SIGKILL)


def _send(groups: set[int], number: int) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)


def _is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


if __name__ == "__main__":
    keep(float(sys.argv[1]))
