"""Which machine this is, as far as speed goes: its processor, its cores, the software. Imports no torch, touches no device."""

from __future__ import annotations

import hashlib
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_ROOT = Path("/")
_FORMAT = 1


def machine_identity(host_threads: int, *, root: Path = _ROOT) -> tuple[str, ...]:
    """What rates depend on, whichever device they are of: processor, cores, versions (torch's names its CUDA), the GPUs' driver.

    Args:
        host_threads: cores that this process may use.
        root: where ``/proc`` is; another than ``/`` reads somebody else's.
    """
    names = ("torch", "lightning", "lightning-autopar")
    return (_processor(root), str(host_threads), *(f"{name} {_version(name)}" for name in names), _driver(root))


def machine_key(host_threads: int, *, root: Path = _ROOT) -> str:
    """The same as the name of a file."""
    return hashlib.sha256(json.dumps([_FORMAT, *machine_identity(host_threads, root=root)]).encode()).hexdigest()[:32]


def _processor(root: Path) -> str:
    name = next((line.partition(":")[2].strip() for line in _lines(root / "proc" / "cpuinfo") if line.startswith("model name")), "")
    return name or platform.processor() or platform.machine()


def _driver(root: Path) -> str:
    """The GPUs' driver, as it says itself; empty where there is none."""
    return next(iter(_lines(root / "proc" / "driver" / "nvidia" / "version")), "").strip()


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
