"""While a trial runs a user's hook, nothing that the hook writes reaches a file, a folder or another process.

A hook at an epoch's end often saves what was trained. A trial runs it before the run, on weights that nobody has trained, so what it saved
would stand where the user looks for results. Python's own writes go to memory and are dropped: the hook runs to its end, and the trial sees
which values it reads. Writes by a library in C fail, as the trial sets the process's limit on the size of files to zero.

Two things get through: a library in C that empties a file before it writes, and a connection that the hook found open.

Meant for a forked child, as the limit and the patches hold for the whole process. Knows nothing of stages.
"""

from __future__ import annotations

import builtins
import io
import os
import resource
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from lightning_autopar._temporary import patched

_FILES = ("mkdir", "remove", "unlink", "rmdir", "rename", "replace", "link", "symlink", "truncate", "chmod", "utime")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class _Unkept(io.BytesIO):
    """A file in memory. Archives seek in what they write, which the null device doesn't allow."""

    def __init__(self, path: Any) -> None:
        super().__init__()
        self.name = os.fspath(path)


@contextmanager
def no_writes() -> Iterator[None]:
    """While open, files and folders stay as they are, and no other process is started or connected to."""
    opened, opened_low, saved = io.open, os.open, torch.save

    def open_file(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, int) or not set(mode) & set("wax+"):
            return opened(file, mode, *args, **kwargs)
        return _Unkept(file) if "b" in mode else io.TextIOWrapper(_Unkept(file))

    def open_low(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        return opened_low(os.devnull, os.O_RDWR) if flags & _WRITES else opened_low(path, flags, *args, **kwargs)

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        saved(obj, io.BytesIO(), *args, **kwargs)  # torch opens a path past Python

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ExitStack() as stack:
        for owner, name, instead in (
            (builtins, "open", open_file),
            (io, "open", open_file),
            (os, "open", open_low),
            (torch, "save", save),
            (os, "system", _refuse("start a process")),
            (subprocess, "Popen", _refuse("start a process")),
            (socket.socket, "connect", _refuse("connect to another process")),
            *((os, name, _nothing) for name in _FILES),
        ):
            stack.enter_context(patched(owner, name, instead))
        stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        yield


def _refuse(what: str) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise OSError(f"a trial of the user's hooks may not {what}")

    return refused


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None
