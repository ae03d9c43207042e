"""Which process a number means: the number may have been given to another process since, and a container has numbers of its own.

It also tells whether this process's numbers are the ones that a GPU's driver uses, which counts as the host does. Needs the standard
library alone; knows no devices and no runs.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path


def started_ticks(pid: int) -> int:
    """When a process began, in the kernel's ticks since the host's start: with its id it identifies a process; 0 if there is none."""
    try:
        return int(_read(pid, "stat").rpartition(b")")[2].split()[19])
    except (IndexError, ValueError):
        return 0


def lives(pid: int, started: int) -> bool:
    """Whether the process that began then is alive; one that this user may not look at counts as that one."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:
        pass
    except (ProcessLookupError, OverflowError):
        return False
    return started_ticks(pid) in (0, started)


@lru_cache(maxsize=1)
def pid_namespace() -> str:
    """The namespace of process ids that this process sees: a container has its own."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def owner_uid(pid: int) -> int | None:
    """The effective user of a process; None where that can't be seen."""
    found = _field(pid, b"Uid")
    return int(found.split()[1]) if found else None


def inner_pid(pid: int) -> int | None:
    """A process's id in its innermost namespace, such as a container's; None where the kernel doesn't say."""
    found = _field(pid, b"NSpid").split()
    return int(found[-1]) if found else None


def ignores(pid: int, number: int) -> bool:
    """Whether a process ignores a signal, as jobs that a shell script has put in the background do with SIGINT."""
    found = _field(pid, b"SigIgn")
    return bool(found) and bool(int(found, 16) >> (number - 1) & 1)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP, Ctrl-Z), so that it does nothing until it is continued."""
    return _field(pid, b"State").startswith((b"T", b"t"))


def _field(pid: int, name: bytes) -> bytes:
    """The kernel's value of that name for a process (proc_pid_status(5)); empty if there is none."""
    for line in _read(pid, "status").splitlines():
        key, _, value = line.partition(b":")
        if key == name:
            return value.strip()
    return b""


def _read(pid: int, name: str) -> bytes:
    try:
        descriptor = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, 16384)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


#: The inode of the host's own process namespace (Linux, include/linux/proc_ns.h: PROC_PID_INIT_INO).
_HOST_NAMESPACE = 0xEFFFFFFC


def is_drivers(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether a process with that id is the driver's, which uses the host's ids; in a container most aren't."""
    try:
        if (proc / "self" / "ns" / "pid").stat().st_ino == _HOST_NAMESPACE:
            return True
        handles = proc / str(pid) / "fd"
        return any(os.readlink(handle).startswith("/dev/nvidia") for handle in handles.iterdir())
    except OSError:  # no Linux, no such process, or somebody else's
        return False
