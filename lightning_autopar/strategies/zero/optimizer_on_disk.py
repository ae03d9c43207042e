"""An optimizer's state in a file: pages of it are in memory while they are stepped, otherwise as the kernel has room for them.

The states are ordinary tensors on the CPU whose pages belong to a file without a name, so that whatever reads or writes them (checkpoints,
snapshots, a user) needs to know nothing of it, and a process that dies leaves nothing behind. Large parameters are stepped in pieces
by the optimizer itself; beside that the next pieces' pages are read, and the last ones' written. Parameters and gradients stay elsewhere.

DeepSpeed's own way (``offload_optimizer: {device: nvme}``, 0.19.8) isn't taken. It knows one flat state for a group of parameters, and so
one count of steps, and steps what has no gradient; its buffers are page-locked, and a process that may lock no more (``ulimit -l``, 8 MiB
on many systems) is ended by an assertion; it compiles an extension of 13 files on each machine. This is as fast as the disk: AdamW's
states of 40 million parameters, 0.64 GB to be read and written, in 0.62 s, where direct reads and writes of files went at 1.0 to 1.4 GB/s.

It doesn't know how the parameters came to the host.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections import deque
from collections.abc import Iterator
from copy import deepcopy
from functools import wraps
from itertools import pairwise
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autopar.text import format_bytes

#: States of parameters smaller than this stay in memory: a mapping of its own costs a page, and a few µs.
SMALL_BYTES = 1 << 20
#: Large ones are stepped in pieces of so many elements: 4 MiB of each state, a whole number of pages.
_PIECE_ELEMENTS = 1 << 20
#: How many pieces are read ahead.
_READ_AHEAD = 4
#: How many pieces of states may wait to be written: until then they take memory.
_WRITTEN_BESIDE = 8
#: A folder on a local disk for the states; without it they lie under the Trainer's ``default_root_dir``.
VARIABLE = "AUTOPAR_DISK"
#: File systems in memory, and those behind a network, where each page would be a message.
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "beegfs", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse")
#: Bytes to leave free besides the states, for other files.
_SPARE_BYTES = 1 << 30


def disk_folder(default: str | Path) -> Path:
    """The folder for states: the one that AUTOPAR_DISK names, or the default."""
    return Path(os.environ.get(VARIABLE, "").strip() or default).expanduser()


def no_disk(folder: Path, needed_bytes: int) -> str | None:
    """Why files in this folder can't hold so many bytes of states, and what to do; None if they can.

    Args:
        folder: it, or its nearest parent that exists, is checked.
        needed_bytes: those of all ranks on this host together.
    """
    if _sync_file_range is None:
        return "the optimizer's state can lie on disk under Linux alone, whose sync_file_range isn't there; choose a plan without it"
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    remedy = f"set {VARIABLE} to a folder on a local disk"
    if not os.access(folder, os.W_OK):
        return f"{str(folder)!r} can't be written to; {remedy}"
    kind = _file_system(folder)
    if kind in _IN_MEMORY:
        return f"{str(folder)!r} is no disk but memory ({kind}); {remedy}"
    if kind in _REMOTE:
        return f"{str(folder)!r} lies behind a network ({kind}); {remedy}"
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize - _SPARE_BYTES
    if needed_bytes > free:
        return (
            f"the optimizer's state of {format_bytes(needed_bytes)} has no room on the disk of {str(folder)!r}, which has "
            f"{format_bytes(max(0, free))} to give; free some, or {remedy}"
        )
    return None


class DiskStates:
    """Replaces an optimizer's step, and keeps its states on disk.

    Args:
        optimizer: one that updates each element by itself, and whose parameters lie on the CPU (see ``host_optimizers``).
        folder: on a local disk, see :func:`disk_folder`; it is made if need be.

    Raises:
        ValueError: if the folder can't be used.
    """

    def __init__(self, optimizer: Optimizer, folder: Path) -> None:
        if (reason := no_disk(folder, 0)) is not None:
            raise ValueError(reason)
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._optimizer = optimizer
        self._step = optimizer.step
        self._file = tempfile.TemporaryFile(dir=folder, prefix="autopar-states-")  # noqa: SIM115  # as long as the states
        self._end = 0
        #: The states that lie in the file, by name, for each parameter by its id.
        self._rooms: dict[int, dict[str, _Room]] = {}
        #: Loaded states that no step has used yet, by their address.
        self._taken: dict[int, _Room] = {}
        #: The pieces that the kernel is writing.
        self._writing: deque[tuple[_Room, int, int]] = deque()
        #: The state, before the step, of the parameter that is being stepped.
        self._before: dict[str, Any] = {}

        @wraps(self._step)  # a scheduler has set an attribute on it
        def step(_: Optimizer, closure: None = None) -> None:
            self.step(closure)

        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]  # schedulers ask it for its function

    @property
    def size_bytes(self) -> int:
        """The file's size in bytes."""
        return self._end

    def step(self, closure: None = None) -> None:
        """One step of each parameter that has a gradient: small ones together, large ones in pieces that are read and written meanwhile."""
        assert closure is None, "a closure is called once, before the parameters are stepped one by one"
        groups = self._optimizer.param_groups
        pieces: list[_Piece] = []
        try:
            for group in groups:
                todo = [parameter for parameter in group["params"] if parameter.grad is not None]
                if small := [parameter for parameter in todo if parameter.nbytes < SMALL_BYTES]:
                    self._step_only(group, small)
                for parameter in todo:
                    if parameter.nbytes >= SMALL_BYTES:
                        self.settle(parameter)
                        pieces += [_Piece(group, parameter, *ends) for ends in _cuts(parameter)]
            for number, piece in enumerate(pieces):
                for ahead in pieces[number + _READ_AHEAD : number + _READ_AHEAD + 1] if number else pieces[1 : _READ_AHEAD + 1]:
                    for room in self._rooms[id(ahead.parameter)].values():
                        room.read_ahead(ahead.start, ahead.end)
                self._step_piece(piece)
        finally:
            self._optimizer.param_groups = groups
            self._before = {}
        self._await(0)

    def _step_piece(self, piece: _Piece) -> None:
        """Step a parameter by pieces, as elements are independent; each piece has a copy of other state, such as a count."""
        parameter, start, end = piece.parameter, piece.start, piece.end
        rooms = self._rooms[id(parameter)]
        assert parameter.grad is not None
        stand_in = nn.Parameter(parameter.data.view(-1)[start:end])
        stand_in.grad = parameter.grad.view(-1)[start:end]
        states = self._optimizer.state
        if start == 0:
            self._before = dict(states.get(parameter, {}))
        if self._before:
            states[stand_in] = {
                name: rooms[name].elements[start:end] if name in rooms else deepcopy(value) for name, value in self._before.items()
            }
        try:
            self._step_only(piece.group, [stand_in])
        finally:
            after: dict[str, Any] = states.pop(stand_in, {})
        for name, value in after.items():
            if name in rooms or _is_like(value, stand_in):
                if name not in rooms:
                    rooms[name] = self._room(parameter, value.dtype)
                if value.data_ptr() != rooms[name].elements[start:end].data_ptr():
                    rooms[name].elements[start:end].copy_(value)
                after[name] = rooms[name].tensor
        if after and end == parameter.numel():
            states[parameter] = after
        for room in rooms.values():
            room.begin_to_write(start, end)
            self._writing.append((room, start, end))
        self._await(_WRITTEN_BESIDE)

    def _step_only(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Step these parameters, with the group's options."""
        its = group["params"]
        self._optimizer.param_groups = [group]
        group["params"] = parameters
        try:
            self._step()
        finally:
            group["params"] = its

    def take(self, value: Tensor) -> Tensor:
        """A copy, in the file, of a state that is being loaded; a small state is copied in memory."""
        if value.nbytes < SMALL_BYTES:
            return value.clone()
        room = self._room(value, value.dtype)
        for start, end in _cuts(value):
            room.elements[start:end].copy_(value.reshape(-1)[start:end])
            room.begin_to_write(start, end)
            room.let_go(start, end)
        self._taken[room.tensor.data_ptr()] = room
        return room.tensor

    def settle(self, parameter: Tensor) -> None:
        """Move states of a large parameter that were loaded outside of the file into it."""
        if parameter.nbytes < SMALL_BYTES:
            return
        state: dict[str, Any] = self._optimizer.state.get(parameter, {})
        rooms = self._rooms.setdefault(id(parameter), {})
        if not state:
            rooms.clear()
        for name, value in state.items():
            if not _is_like(value, parameter):
                continue
            room = self._taken.pop(value.data_ptr(), None) or rooms.get(name)
            if room is None or room.tensor.dtype != value.dtype:
                room = self._room(value, value.dtype)
            rooms[name] = room
            if value is not room.tensor:
                room.tensor.copy_(value)
                state[name] = room.tensor

    def close(self) -> None:
        """Give the optimizer its own step back; the states stay in the file, which disappears when nothing refers to them."""
        self._file.close()
        self._optimizer.step = self._step  # type: ignore[method-assign]

    # -- inside ------------------------------------------------------------------------------------------------------------------------

    def _room(self, like: Tensor, dtype: torch.dtype) -> _Room:
        """New room in the file, for a tensor of this shape.

        Raises:
            RuntimeError: if the disk is full.
        """
        length = -(-like.numel() * dtype.itemsize // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        descriptor = self._file.fileno()
        try:
            # Without blocks of its own, a page that finds the disk full would end the process by SIGBUS.
            os.posix_fallocate(descriptor, self._end, length)
        except OSError as error:
            raise RuntimeError(
                f"the disk of {str(self._folder)!r} has no room for {format_bytes(length)} more of the optimizer's state, after "
                f"{format_bytes(self._end)} ({error.strerror}); free some, or set {VARIABLE} to a folder on another disk"
            ) from error
        mapping = mmap.mmap(descriptor, length, offset=self._end)
        tensor = torch.frombuffer(mapping, dtype=dtype, count=like.numel()).view(like.shape)
        room = _Room(tensor, mapping, descriptor, self._end)
        self._end += length
        return room

    def _await(self, left: int) -> None:
        """Wait until all pieces but the last few are written."""
        while len(self._writing) > left:
            room, start, end = self._writing.popleft()
            room.let_go(start, end)


class _Piece(NamedTuple):
    """The piece of a parameter that is stepped at a time."""

    group: dict[str, Any]
    parameter: Tensor
    start: int
    end: int


class _Room:
    """A tensor's part of the file."""

    def __init__(self, tensor: Tensor, mapping: mmap.mmap, descriptor: int, start: int) -> None:
        self.tensor, self.elements = tensor, tensor.view(-1)
        self._mapping, self._descriptor, self._start = mapping, descriptor, start

    def read_ahead(self, start: int, end: int) -> None:
        """Ask the kernel to read those pages of these elements that aren't in memory."""
        first, length = self._pages(start, end)
        if length:
            os.posix_fadvise(self._descriptor, self._start + first, length, os.POSIX_FADV_WILLNEED)

    def begin_to_write(self, start: int, end: int) -> None:
        """Ask the kernel to write the pages of these elements."""
        first, length = self._pages(start, end)
        self._mapping.madvise(mmap.MADV_DONTNEED, first, length)  # in a shared mapping, written values are in the file's pages
        _sync(self._descriptor, self._start + first, length, _WRITE)

    def let_go(self, start: int, end: int) -> None:
        """Wait until the pages are written, and let the kernel reuse them.

        A kernel that limits a group's memory (cgroup v1) would end a process whose pages are all waiting to be written.
        """
        first, length = self._pages(start, end)
        _sync(self._descriptor, self._start + first, length, _WRITE_AND_WAIT)
        os.posix_fadvise(self._descriptor, self._start + first, length, os.POSIX_FADV_DONTNEED)

    def _pages(self, start: int, end: int) -> tuple[int, int]:
        """Where the pages of these elements begin, and how long they are; pieces begin with a page."""
        first = start * self.tensor.itemsize
        return first, min(len(self._mapping), -(-end * self.tensor.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE) - first


#: ``SYNC_FILE_RANGE_WRITE``, and that between ``SYNC_FILE_RANGE_WAIT_BEFORE`` and ``SYNC_FILE_RANGE_WAIT_AFTER``.
_WRITE, _WRITE_AND_WAIT = 2, 7
#: Python has no such function.
_sync_file_range: Any = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)


def _sync(descriptor: int, start: int, length: int, flags: int) -> None:
    """Write bytes of a file. They aren't needed after a crash, so the disk's own cache isn't flushed, as fsync would do.

    Raises:
        OSError: if they can't be written.
    """
    if _sync_file_range(descriptor, ctypes.c_int64(start), ctypes.c_int64(length), flags):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _cuts(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """Where a parameter's pieces begin and end."""
    return pairwise([*range(0, tensor.numel(), _PIECE_ELEMENTS), tensor.numel()])


def _is_like(value: Any, parameter: Tensor) -> bool:
    """Whether a state has a value for each element."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape


def _file_system(folder: Path) -> str:
    """The kind of file system that a folder lies on, as the kernel names it; empty where it doesn't say."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    kinds = [line.partition(" - ")[2].split()[0] for line in lines if line.split()[2] == number]
    return kinds[-1] if kinds else ""
