"""Processes that tests start, and what they are given, so that each doesn't spend its first seconds on imports that nobody uses."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def lean_path(*more: Path) -> str:
    """``PYTHONPATH`` for a process that trains but needs no Hugging Face and no pictures: these folders, then the project's."""
    return os.pathsep.join(map(str, (_HERE / "lean", *more, _HERE.parent)))


@contextmanager
def python(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs this, once it has said a line; killed at the end."""
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            yield process
        finally:
            process.kill()


@contextmanager
def ledger_folder() -> Iterator[Path]:
    """A place for leases that a test's runs share, in memory where there is some."""
    home = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=home, prefix="autopar-leases-test-") as name:
        yield Path(name)
