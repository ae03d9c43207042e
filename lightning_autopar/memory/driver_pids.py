"""Whether a process's number means here what it means to a GPU's driver, which counts as the host does. Knows neither devices nor runs."""

from __future__ import annotations

import os
from pathlib import Path

#: Of the host's own process namespace (Linux, include/linux/proc_ns.h: PROC_PID_INIT_INO).
_HOST_NAMESPACE = 0xEFFFFFFC


def is_drivers(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether a process of that number is the one that the driver means, which counts as the host does; in a container most aren't."""
    try:
        if (proc / "self" / "ns" / "pid").stat().st_ino == _HOST_NAMESPACE:
            return True
        handles = proc / str(pid) / "fd"
        return any(os.readlink(handle).startswith("/dev/nvidia") for handle in handles.iterdir())
    except OSError:  # no Linux, no such process, or somebody else's
        return False
