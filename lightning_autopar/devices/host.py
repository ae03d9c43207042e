"""The host: the memory and cores that this process may use, and the key under which measurements of this machine are kept.

It knows physical limits and cgroups, and nothing of devices or plans. The key is made of processor, cores and software versions. Imports no
torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from lightning_autopar import _root

_ROOT = Path("/")


def host_memory(*, root: Path = _ROOT, physical: tuple[int, int] | None = None) -> tuple[int, int]:
    """Memory of the host in bytes, total and free, as much as this process may use.

    The smallest of physical memory and of the limits of every cgroup, v1 or v2, that the process is in, from its own up to
    the root; cache that the kernel would drop counts as free, as in ``free -m``.

    Args:
        root: where ``/proc`` and ``/sys`` are; another than ``/`` is for tests.
        physical: total and available bytes of the machine; by default what psutil says.
    """
    if physical is None:
        memory = psutil.virtual_memory()
        physical = int(memory.total), int(memory.available)
    total, free = physical
    for limit, used in _memory_limits(root):
        total, free = min(total, limit), min(free, limit - used)
    return total, max(free, 0)


def asked_threads() -> int | None:
    """The user's bound on a process's threads, ``OMP_NUM_THREADS``; None if it isn't set, or isn't a number."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdigit() and int(first) > 0 else None


def host_cores(*, root: Path = _ROOT, available: int | None = None) -> int:
    """Cores that this process may use: those it is allowed to run on, within the cgroups' CPU quotas; at least 1.

    Args:
        available: number of cores that the scheduler allows; by default what the system says.
    """
    if available is None:
        available = len(os.sched_getaffinity(0))
    quotas = [int(cores) for cores in _cpu_quotas(root)]
    return max(1, min([available, *quotas]))


def thread_times() -> dict[str, tuple[int, int]] | None:
    """For each of this process's threads, the nanoseconds that it ran on a core, and those that it was ready to run and had none.

    None where the kernel doesn't count them (``CONFIG_SCHED_INFO``).
    """
    found: dict[str, tuple[int, int]] = {}
    for folder in (_ROOT / "proc" / "self" / "task").glob("*"):
        numbers = (_text(folder / "schedstat") or "").split()  # a thread may have ended
        if len(numbers) == 3:
            found[folder.name] = int(numbers[0]), int(numbers[1])
    return found or None


def waited_share(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> float | None:
    """The share of their time that threads waited for a core between two calls of :func:`thread_times`; None where none of them ran."""
    ran, waited = (sum(now[index] - before.get(thread, (0, 0))[index] for thread, now in after.items()) for index in (0, 1))
    return waited / (ran + waited) if ran + waited > 0 else None


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) of each cgroup with a memory limit; ``used`` without the cache that would be dropped first."""
    for folder in _folders(root, "memory"):
        v2_limits = [number for number in (_number(folder / "memory.max"), _number(folder / "memory.high")) if number is not None]
        if v2_limits:
            yield min(v2_limits), _used(folder, "memory.current", "inactive_file")
        elif (limit := _number(folder / "memory.limit_in_bytes")) is not None:
            # A container doesn't see the groups around its own, but its own shows the narrowest of their limits.
            above = _stat(folder, "hierarchical_memory_limit")
            yield min(limit, above or limit), _used(folder, "memory.usage_in_bytes", "total_inactive_file")


def _used(folder: Path, file: str, reclaimable: str) -> int:
    """Bytes that a cgroup holds and the kernel couldn't take back at once."""
    return max(0, (_number(folder / file) or 0) - (_stat(folder, reclaimable) or 0))


def _stat(folder: Path, wanted: str) -> int | None:
    """A number of a cgroup's ``memory.stat``."""
    for line in (_text(folder / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name == wanted and value.strip().isdigit():
            return int(value)
    return None


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Cores that each cgroup with a quota grants."""
    for folder in _folders(root, "cpu"):
        words = (_text(folder / "cpu.max") or "").split()
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
            yield int(words[0]) / int(words[1])
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota is not None and quota > 0 and period:
            yield quota / period


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's cgroups for a controller, from its own up to the root of each hierarchy.

    In a container the path in ``/proc/self/cgroup`` may be the host's and not exist below the mount; the mount's root is
    then the container's own cgroup, and it is among those given.
    """
    mounts = root / "sys" / "fs" / "cgroup"
    for line in (_text(root / "proc" / "self" / "cgroup") or "0::/").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            hierarchies = [mounts, mounts / "unified"]
        elif controller in controllers.split(","):
            hierarchies = [mounts / name for name in dict.fromkeys((controllers, controller))]
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for hierarchy in hierarchies:
            for depth in range(len(parts), -1, -1):
                folder = hierarchy.joinpath(*parts[:depth])
                if folder.is_dir():
                    yield folder


def _text(path: Path) -> str | None:
    """A file's text; None if it doesn't exist or may not be read, like files of other hierarchies."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _number(path: Path) -> int | None:
    """The number that a file holds; None for ``max`` and where there is none."""
    text = (_text(path) or "").strip()
    return int(text) if text.lstrip("-").isdigit() else None


_FORMAT = 1


def machine_identity(host_threads: int, *, root: Path = _ROOT) -> tuple[str, ...]:
    """What all devices' rates depend on: processor, cores, versions (torch's includes CUDA's), the GPUs' driver.

    Args:
        host_threads: cores that this process may use.
    """
    driver = next(iter(_lines(root / "proc" / "driver" / "nvidia" / "version")), "").strip()
    versions = {"torch": _version("torch"), "lightning": _root.version(), "lightning-autopar": _version("lightning-autopar")}
    return (_processor(root), str(host_threads), *(f"{name} {found}" for name, found in versions.items()), driver)


def machine_key(host_threads: int, *, root: Path = _ROOT) -> str:
    """The same as the name of a file."""
    return hashlib.sha256(json.dumps([_FORMAT, *machine_identity(host_threads, root=root)]).encode()).hexdigest()[:32]


def _processor(root: Path) -> str:
    name = next((line.partition(":")[2].strip() for line in _lines(root / "proc" / "cpuinfo") if line.startswith("model name")), "")
    return name or platform.processor() or platform.machine()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # no such file on this system
        return []


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
