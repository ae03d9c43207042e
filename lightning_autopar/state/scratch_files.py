"""Tensors whose pages belong to a file without a name, in which a rank puts together what it writes, without holding it in memory.

The kernel writes such pages out and reads them back when memory is short, so they count against no budget. They are released as soon as
they have been written or read. Knows tensors and files; no plan, no ranks.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

#: Tensors smaller than this lie in ordinary memory: a mapping of its own costs a page, and a few µs.
SMALL_BYTES = 1024**2
#: How much of the file may be in memory while it is read, before its pages are handed back.
_WINDOW_BYTES = 32 * 1024**2

#: The mappings that tensors of this process lie in.
_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


class ScratchFile:
    """A file in which tensors lie; it is removed with the last of them.

    Args:
        folder: one with room for it, on a disk. None: the system's folder for such files.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        local = folder is not None and Path(folder).is_dir() and os.access(folder, os.W_OK)
        self._file = tempfile.TemporaryFile(dir=folder if local else None)  # noqa: SIM115  # closed on leaving
        self._end = 0

    def tensor(self, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor on the CPU; in ordinary memory where it is small, or the disk has no room."""
        return self._made(shape, dtype)[0]

    def keep(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy of the values, to read and write like ordinary memory: a process's writes after a fork are its own. Pages without writes
        since then are the file's, and shared by all processes.
        """
        room, place = self._made(values.shape, dtype)
        room.copy_(values)
        if place is None:
            return room
        start, length = place
        own = mmap.mmap(self._file.fileno(), length, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=start)
        return torch.frombuffer(own, dtype=dtype, count=values.numel()).view(values.shape)

    def _made(self, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> tuple[Tensor, tuple[int, int] | None]:
        """A tensor, and where in the file it begins and how long its pages are, if it is there."""
        count = torch.Size(shape).numel()
        size = count * dtype.itemsize
        if size < SMALL_BYTES:
            return torch.empty(shape, dtype=dtype), None
        start, length = self._end, -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            # Without blocks of its own, a page that finds the disk full would end the process by SIGBUS.
            os.posix_fallocate(self._file.fileno(), start, length)
            mapping = mmap.mmap(self._file.fileno(), length, offset=start)
        except OSError:
            return torch.empty(shape, dtype=dtype), None
        self._end += length
        _mappings.add(mapping)
        return torch.frombuffer(mapping, dtype=dtype, count=count).view(shape), (start, length)  # the tensor holds the mapping

    def close(self) -> None:
        """Make no more tensors; existing ones stay."""
        self._file.close()

    def __enter__(self) -> ScratchFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def hand_back_pages() -> None:
    """Drop the pages of all such tensors; they are read again from the page cache, or the disk, when they are used."""
    for mapping in list(_mappings):
        mapping.madvise(mmap.MADV_DONTNEED)  # in a shared mapping, what was written stays in the file


def hand_back_freed() -> None:
    """Return freed memory to the system: a heap keeps it, up to a third of a process that has moved large tensors."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
        trim(0)


def save_without_copies(checkpoint: dict[str, Any], path: str | Path) -> None:
    """``torch.save`` into a file that exists whole or not at all, without a copy in memory.

    Lightning's own (``lightning.fabric.utilities.cloud_io._atomic_save``, 2.6) builds the file in memory first, and copies it there.

    Args:
        checkpoint: anything that can be pickled.
        path: a local file's; its folder is made if need be.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as file:
            torch.save(checkpoint, cast(Any, _Writer(file)))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


class _Writer:
    """A file that hands pages back while a scratch file's tensors are written into it."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._since = 0

    def write(self, data: Any) -> int:
        written: int = self._file.write(data)
        self._since += written
        if self._since >= _WINDOW_BYTES:
            self._since = 0
            hand_back_pages()
        return written

    def flush(self) -> None:
        self._file.flush()


@contextmanager
def parameters_in(scratch: ScratchFile) -> Iterator[None]:
    """While open, each parameter that is put into a module of this process moves into the scratch.

    So a module larger than memory can be built layer by layer: a layer's initial weights go there. A layer that registers a parameter first
    and fills it afterwards (as torch's own do) fills it there.
    """
    moved = 0

    def move(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
        nonlocal moved
        if type(parameter) is torch.nn.Parameter and parameter.device.type == "cpu" and parameter.nbytes >= SMALL_BYTES:
            room = scratch.tensor(parameter.shape, parameter.dtype)
            room.copy_(parameter.detach())
            parameter.data = room
            moved += room.nbytes
            if moved >= _WINDOW_BYTES:
                moved = 0
                hand_back_pages()

    handle = torch.nn.modules.module.register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        handle.remove()
        hand_back_pages()
