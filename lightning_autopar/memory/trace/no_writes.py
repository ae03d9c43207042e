"""While a trial runs a user's code, nothing that the code writes reaches a file, a folder or another process.

A step or a hook often writes: a line to a log, a picture, what was trained. Planning calls it several times before the run, on weights that
nobody has trained, so what it wrote would stand where the user looks for results. Python's own writes go to memory, where the same trial
can read them again; lines on stderr are dropped, as the run shows them again.

These get through: what a library in C opens by itself, a connection that was open before, what a program does that ``subprocess`` starts,
and files of compilers' caches, which a compiled step needs. :func:`no_effects` also stops the first of them, where the user's code may as
well fail.

Meant for a forked child, as the patches hold for the whole process. Knows nothing of steps.
"""

from __future__ import annotations

import builtins
import io
import os
import resource
import socket
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_autopar._temporary import patched

_FILES = ("mkdir", "remove", "unlink", "rmdir", "rename", "replace", "link", "symlink", "truncate", "chmod", "utime")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
#: Folders of compilers' caches: what sets them, and their names where nothing does.
_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME")
_CACHE_NAMES = ("torchinductor_", ".triton", ".cache", "__pycache__")


class Written(io.BytesIO):
    """A file in memory. Archives seek in what they write, which the null device doesn't allow. Closing it leaves what was written."""

    def __init__(self, path: Any, content: bytes = b"") -> None:
        super().__init__(content)
        self.name = os.fspath(path)
        self._null: int | None = None

    def close(self) -> None:
        """Leaves it as it is."""

    def fileno(self) -> int:
        """For who writes past Python, locks or syncs: the null device."""
        if self._null is None:
            self._null = os.open(os.devnull, os.O_RDWR)
        return self._null


@contextmanager
def no_writes(written: dict[str, Written]) -> Iterator[None]:
    """While open, files and folders stay as they are, and stderr shows nothing.

    Args:
        written: the files that the trial has written, by path; those of now are added.
    """
    temporary: set[str] = set()
    opened, opened_low, connected = io.open, os.open, sqlite3.connect

    def real(path: Any) -> bool:
        """Whether the file is truly written: a device, a compiler's, or one that the ``tempfile`` module made."""
        if isinstance(path, int):
            return True
        where = Path(os.path.abspath(os.fsdecode(path)))
        return (
            (where.exists() and not where.is_file() and not where.is_dir())
            or any(part.startswith(_CACHE_NAMES) for part in where.parts)
            or any(where.is_relative_to(folder) for name in _CACHES if (folder := os.environ.get(name)))
            or any(str(place) in temporary for place in (where, *where.parents))
        )

    def made_by_tempfile(path: Any) -> bool:
        if sys._getframe(2).f_globals.get("__name__") != tempfile.__name__:
            return False
        temporary.add(os.path.abspath(os.fsdecode(path)))
        return True

    def open_file(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        writes = set(mode) & set("wax+")
        if kwargs.get("opener") is not None or (len(args) > 5 and args[5] is not None) or real(file):
            return opened(file, mode, *args, **kwargs)
        known = written.get(os.path.abspath(os.fsdecode(file)))
        if not writes and known is None:
            return opened(file, mode, *args, **kwargs)
        if "x" in mode and (known is not None or os.path.exists(file)):
            raise FileExistsError(file)
        if set(mode) & set("wx"):
            content = b""
        elif known is not None:
            content = known.getvalue()
        elif "r" in mode or os.path.exists(file):
            with opened(file, "rb") as before:
                content = before.read()
        else:
            content = b""
        memory = Written(file, content)
        memory.seek(0, io.SEEK_END if "a" in mode else io.SEEK_SET)
        if writes:
            written[os.path.abspath(os.fsdecode(file))] = memory
        if "b" in mode:
            return memory
        text = dict(zip(("buffering", "encoding", "errors", "newline"), args, strict=False)) | kwargs
        return io.TextIOWrapper(memory, text.get("encoding"), text.get("errors"), text.get("newline"), write_through=True)

    def open_low(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & _WRITES and not made_by_tempfile(path) and not real(path):
            return opened_low(os.devnull, os.O_RDWR)
        return opened_low(path, flags, *args, **kwargs)

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(f, (str, os.PathLike)):
            return saved(obj, f, *args, **kwargs)
        with open_file(f, "wb") as file:  # torch opens a path past Python
            return saved(obj, file, *args, **kwargs)

    def connect(database: Any, *args: Any, **kwargs: Any) -> Any:
        """A copy of a database, in memory."""
        if kwargs.get("uri"):
            return connected(database, *args, **kwargs)
        copy = connected(":memory:", *args, **kwargs)
        if os.path.exists(database):
            with connected(database) as source:
                source.backup(copy)
        return copy

    def touch(original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        where = path
        if (folder := kwargs.get("dir_fd")) is not None:  # as `shutil.rmtree` names files
            where = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fsdecode(path))
        return original(path, *args, **kwargs) if made_by_tempfile(path) or real(where) else None

    saved = torch.save
    with ExitStack() as stack:
        for owner, name, instead in (
            (builtins, "open", open_file),
            (io, "open", open_file),
            (os, "open", open_low),
            (torch, "save", save),
            (sqlite3, "connect", connect),
            (os, "fsync", _nothing),
            (os, "system", lambda command: 0),
            *((os, name, partial(touch, getattr(os, name))) for name in _FILES),
        ):
            stack.enter_context(patched(owner, name, instead))
        stack.enter_context(_no_errors(opened))
        yield


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


@contextmanager
def _no_errors(opened: Callable[..., Any]) -> Iterator[None]:
    """While open, lines on stderr are dropped."""
    before = os.dup(2)
    with opened(os.devnull, "w") as nowhere, patched(sys, "stderr", nowhere):
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)


@contextmanager
def no_effects() -> Iterator[None]:
    """While open, no file grows, and no other process is started or connected to: code that tries to fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ExitStack() as stack:
        for owner, name, what in (
            (os, "system", "start a process"),
            (subprocess, "Popen", "start a process"),
            (socket.socket, "connect", "connect to another process"),
        ):
            stack.enter_context(patched(owner, name, _refuse(what)))
        stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        yield


def _refuse(what: str) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise OSError(f"a trial of the user's hooks may not {what}")

    return refused
