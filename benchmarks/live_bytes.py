"""Live bytes of torch's CPU allocator over all threads: compiles ``live_bytes.c``, and starts processes with it. Needs a C compiler."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

_SOURCE = Path(__file__).with_suffix(".c")


def compiler() -> str | None:
    """The C compiler, if there is one."""
    return shutil.which("cc") or shutil.which("gcc")


def restarted_with_counter(folder: Path) -> bool:
    """Whether this process counts; if not, the program is run anew in one that does, and its exit code passed on.

    Args:
        folder: for the library.

    Raises:
        ValueError: if there is no C compiler.
    """
    if hasattr(ctypes.CDLL(None), "autopar_live_bytes"):
        return True
    cc = compiler()
    if cc is None:
        raise ValueError("live bytes are counted by a library that must be compiled, but there is neither cc nor gcc; install one")
    library = folder / "live_bytes.so"
    subprocess.run([cc, "-O2", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl"], check=True)
    done = subprocess.run([sys.executable, *sys.argv], env={**os.environ, "LD_PRELOAD": str(library)}, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return False


def live_bytes() -> int:
    """Bytes that are allocated now."""
    return int(_function("autopar_live_bytes")())


def peak_bytes() -> int:
    """The most since :func:`reset_peak`."""
    return int(_function("autopar_peak_bytes")())


def reset_peak() -> None:
    """Begin anew."""
    _function("autopar_reset_peak")()


def _function(name: str) -> ctypes._NamedFuncPointer:
    function = getattr(ctypes.CDLL(None), name)
    function.restype = ctypes.c_long
    return function
