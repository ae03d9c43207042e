"""How a snapshot's tensors lie in files: as in memory, so that a rank writes them directly and reads them in place.

torch.distributed.checkpoint plans who writes and reads what. Its own file format (``torch.save`` for each tensor) costs one more copy when
reading. Files of snapshots that nobody needs any more are written over, as the kernel would take longer to find and clear new pages than
the copy itself takes. Knows tensors and files, no trainer.
"""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

#: A tensor begins at a multiple of this: of every dtype's size, and of a cache line.
_ALIGNED_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class FileRange:
    """Where something lies.

    Args:
        file: its name, in the snapshot's folder.
        offset_bytes: where it begins.
        size_bytes: what it takes.
        dtype: of a tensor that lies there as in memory; None for what ``torch.save`` wrote, or for bytes.
        shape: of such a tensor.
    """

    file: str
    offset_bytes: int
    size_bytes: int
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()


class PlainWriter(FileSystemWriter):
    """Writes one file a rank.

    Args:
        path: the folder, which needn't exist yet.
        spare: a folder of files to write over; it needn't exist.
    """

    def __init__(self, path: Path, spare: Path) -> None:
        super().__init__(path)
        self._spare = spare

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part; when this returns, the file is on the disk, if it isn't in memory."""
        name = f"{plan.storage_data.prefix}0.distcp"
        results = []
        size_bytes = sum(_tensor_bytes(item) for item in plan.items)
        with _open(Path(self.path) / name, self._spare, size_bytes) as file:
            for item in plan.items:
                data = planner.resolve_data(item)
                assert isinstance(data, Tensor) == (item.type != WriteItemType.BYTE_IO), "a tensor is no bytes"
                place = _write(file, name, data)
                results.append(WriteResult(index=item.index, size_in_bytes=place.size_bytes, storage_data=place))
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


class PlainReader(FileSystemReader):
    """Reads what :class:`PlainWriter` wrote, each tensor from the file's own pages to its place.

    Args:
        path: the folder.
    """

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's part."""
        mapped: dict[str, mmap.mmap] = {}
        for item in plan.items:
            place: FileRange = self.storage_data[item.storage_index]
            if place.file not in mapped and place.size_bytes:
                mapped[place.file] = _map(Path(self.path) / place.file)
            data = mapped[place.file] if place.size_bytes else b""
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(_bytes(data, place)))
                continue
            tensor = _tensor(data, place)
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                tensor = tensor.narrow(dim, offset, length)
            target = planner.resolve_tensor(item).detach()
            assert target.shape == tensor.shape, f"{item.dest_index} has the shape {tuple(target.shape)}, not {tuple(tensor.shape)}"
            target.copy_(tensor)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


@contextmanager
def _open(path: Path, spare: Path, size_bytes: int) -> Iterator[BinaryIO]:
    """Open a file for writing, by this name: the spare one whose size is nearest, or a new one."""

    def distance(file: Path) -> int:
        with suppress(FileNotFoundError):
            return abs(file.stat().st_size - size_bytes)
        return size_bytes

    mode = "wb"
    for file in sorted(spare.iterdir(), key=distance) if spare.is_dir() else []:
        with suppress(FileNotFoundError):  # another rank took it
            file.replace(path)
            mode = "r+b"
            break
    with path.open(mode) as stream:
        yield stream  # type: ignore[misc]  # either mode gives a writer of bytes


def _tensor_bytes(item: Any) -> int:
    if item.tensor_data is None:
        return 0
    return int(item.tensor_data.size.numel() * item.tensor_data.properties.dtype.itemsize)


def _write(file: BinaryIO, name: str, data: Tensor | io.BytesIO) -> FileRange:
    """Write the next value; returns its place."""
    offset_bytes = -(-file.tell() // _ALIGNED_BYTES) * _ALIGNED_BYTES
    file.seek(offset_bytes)
    if isinstance(data, io.BytesIO):
        return FileRange(file=name, offset_bytes=offset_bytes, size_bytes=file.write(data.getbuffer()))
    tensor = data.detach()
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_quantized:
        torch.save(tensor.cpu(), file)
        return FileRange(file=name, offset_bytes=offset_bytes, size_bytes=file.tell() - offset_bytes)
    plain = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    size_bytes = file.write(plain.reshape(-1).view(torch.uint8).numpy().data)
    return FileRange(file=name, offset_bytes=offset_bytes, size_bytes=size_bytes, dtype=tensor.dtype, shape=tuple(tensor.shape))


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _bytes(data: Any, place: FileRange) -> bytes:
    return bytes(data[place.offset_bytes : place.offset_bytes + place.size_bytes])


def _tensor(data: Any, place: FileRange) -> Tensor:
    """The tensor in the file's own pages, which must not be written to."""
    if place.dtype is None:
        loaded: Tensor = torch.load(io.BytesIO(_bytes(data, place)), map_location="cpu", weights_only=True)
        return loaded
    if not place.size_bytes:
        return torch.empty(place.shape, dtype=place.dtype)
    count = place.size_bytes // place.dtype.itemsize
    return torch.frombuffer(data, dtype=place.dtype, count=count, offset=place.offset_bytes).view(place.shape)
