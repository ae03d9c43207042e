"""The stub GPUs as a test uses them: what this process has had the runtime do so far, and what becomes of the GPUs while processes run.

What is set holds for all processes with the same ``NULLGPU_STATE``, those that run already as well. GPUs have NVML's numbers; a MIG
instance is ``instance(gpu, number)``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

#: As in src/nullgpu.h, in its order.
COUNTERS = (
    "stream_syncs", "device_syncs", "event_syncs", "blocking_copies", "pageable_copies", "copies", "launches", "mallocs", "frees",
    "host_mallocs", "collectives",
)  # fmt: skip
#: For these the host waits for the GPU.
WAITS = ("stream_syncs", "device_syncs", "event_syncs", "blocking_copies")
KINDS = ("send", "recv", "broadcast", "reduce", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "init")
ACTIONS = ("kill", "stop", "hang", "error")
#: cudaErrorDevicesUnavailable: what a process gets that comes to a GPU which has fallen off its bus.
UNAVAILABLE = 46
LAYOUT = 0x6E673032
GPUS, INSTANCES, OTHERS, FAULTS, SLOTS = 16, 7, 8, 8, 256


class _Other(ctypes.Structure):
    _fields_ = (("pid", ctypes.c_int32), ("pad", ctypes.c_uint32), ("bytes", ctypes.c_uint64))


class _Failing(ctypes.Structure):
    _fields_ = (("from_bytes", ctypes.c_uint64), ("after", ctypes.c_uint32), ("times", ctypes.c_uint32))


class _Unit(ctypes.Structure):
    _fields_ = (
        ("others", _Other * OTHERS), ("failing", _Failing), ("error", ctypes.c_uint32), ("utilization", ctypes.c_uint32),
        ("recovery", ctypes.c_uint32), ("remap_failed", ctypes.c_uint32),
    )  # fmt: skip


class _Fault(ctypes.Structure):
    _fields_ = (
        ("serial", ctypes.c_uint32), ("rank", ctypes.c_int32), ("kind", ctypes.c_int32), ("nth", ctypes.c_uint32),
        ("action", ctypes.c_uint32), ("pad", ctypes.c_uint32), ("seconds", ctypes.c_double),
    )  # fmt: skip


class _Slot(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_int32), ("pad", ctypes.c_uint32), ("started", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64 * (GPUS * (1 + INSTANCES))), ("counters", ctypes.c_uint64 * len(COUNTERS)),
    )  # fmt: skip


class _State(ctypes.Structure):
    _fields_ = (
        ("layout", ctypes.c_uint32), ("ready", ctypes.c_uint32), ("units", _Unit * (GPUS * (1 + INSTANCES))), ("faults", _Fault * FAULTS),
        ("slots", _Slot * SLOTS),
    )  # fmt: skip


@functools.cache
def _mapped(path: str) -> _State:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if os.fstat(file).st_size < ctypes.sizeof(_State):
            os.ftruncate(file, ctypes.sizeof(_State))
        state = _State.from_buffer(mmap.mmap(file, ctypes.sizeof(_State)))
        if state.layout != LAYOUT:
            ctypes.memset(ctypes.addressof(state), 0, ctypes.sizeof(state))
            state.layout = LAYOUT
        return state
    finally:
        os.close(file)


def _state() -> _State:
    return _mapped(os.environ.get("NULLGPU_STATE", f"/dev/shm/nullgpu.{os.getuid()}"))


# -- whether there are any, and what was asked of them --------------------------------------------------------------------------------


@functools.cache
def library() -> ctypes.CDLL | None:
    """The runtime's stub that this process has loaded, or None: torch's CUDA is NVIDIA's, or there is none."""
    import torch

    for path in sorted((Path(torch.__file__).parent / "lib").glob("libcudart.so.*")):
        found = ctypes.CDLL(str(path))
        if hasattr(found, "ng_counted"):
            found.ng_counted.restype = ctypes.c_uint64
            return found
    return None


def on_stub() -> bool:
    """Whether the GPUs that torch sees here are stubs."""
    return bool(os.environ.get("NULLGPU_DEVICES")) and library() is not None


def counters(pid: int | None = None) -> dict[str, int]:
    """What a process that lives has done so far, by the runtime's own count; by default this one.

    Of another process that is counted from its first use of a GPU on, with what it had done before.
    """
    if pid is not None:
        slot = next((slot for slot in _state().slots if slot.pid == pid), None)
        return dict(zip(COUNTERS, slot.counters if slot is not None else [0] * len(COUNTERS), strict=True))
    found = library()
    if found is None:
        raise RuntimeError("only the stub counts what the runtime does: set NULLGPU_DEVICES in its environment")
    return {name: int(found.ng_counted(number)) for number, name in enumerate(COUNTERS)}


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Empty until the block ends; then what was done in it, and ``waits``, how often the host waited."""
    before = counters()
    done: dict[str, int] = {}
    yield done
    after = counters()
    done.update({name: after[name] - before[name] for name in COUNTERS})
    done["waits"] = sum(done[name] for name in WAITS)


# -- what becomes of them ----------------------------------------------------------------------------------------------------------------


def instance(gpu: int, number: int) -> int:
    """The number by which the functions here know a MIG instance."""
    return GPUS + gpu * INSTANCES + number


def occupy(gpu: int, used_bytes: int, *, pid: int = 1) -> None:
    """Another process has so much of a GPU, to NVML and everybody who allocates; 0 bytes: it is gone."""
    others = _state().units[gpu].others
    place = next((other for other in others if other.pid == pid), None) or next((other for other in others if other.pid == 0), None)
    if place is None:
        raise ValueError(f"GPU {gpu} has {OTHERS} other processes, the most that the state has room for")
    place.bytes = used_bytes
    place.pid = pid if used_bytes else 0


@contextlib.contextmanager
def occupied(gpu: int, used_bytes: int, *, pid: int = 1) -> Iterator[None]:
    occupy(gpu, used_bytes, pid=pid)
    try:
        yield
    finally:
        occupy(gpu, 0, pid=pid)


def utilize(gpu: int, percent: int) -> None:
    """What NVML says of how much of the last seconds a GPU computed."""
    _state().units[gpu].utilization = percent


def lose(gpu: int, error: int = UNAVAILABLE) -> None:
    """A GPU vanishes: NVML says that it is lost, every call of CUDA's fails with that error, and its collectives never end."""
    _state().units[gpu].error = error


def ail(gpu: int, *, recovery: int = 0, remap_failed: bool = False) -> None:
    """NVML can still read a GPU, and says what is wrong with it: the recovery action it needs, or a broken row of its memory."""
    unit = _state().units[gpu]
    unit.recovery, unit.remap_failed = recovery, int(remap_failed)


def fail_allocations(gpu: int, *, after: int = 0, times: int = 2, from_bytes: int = 0) -> None:
    """Allocations of at least so many bytes fail: after that many, that many times. torch asks twice before it gives up."""
    failing = _state().units[gpu].failing
    failing.times = 0
    failing.from_bytes, failing.after = from_bytes, after
    failing.times = times


def fault(action: str, *, rank: int = -1, kind: str | None = None, nth: int = 1, seconds: float = 0.0, number: int = 0) -> None:
    """At the n-th collective of a kind, counted from now by each process, what becomes of the process whose rank that is.

    "kill" and "stop" are signals to the process itself. "hang" stops its GPU alone, for so many seconds or for ever. "error": as when a
    peer's connection breaks, of which NCCL's watchdog tells.

    Args:
        action: one of :data:`ACTIONS`.
        rank: in the communicator; by default any.
        kind: one of :data:`KINDS`; by default any.
        nth: which, from one on.
        seconds: how long it hangs.
        number: which of the eight faults that there can be at once.
    """
    entry = _state().faults[number]
    serial = entry.serial + 1 or 1
    entry.serial = 0
    entry.rank, entry.kind = rank, -1 if kind is None else KINDS.index(kind)
    entry.nth, entry.action, entry.seconds = nth, ACTIONS.index(action), seconds
    # Above what it was, lest a process take it for the one that it has met.
    entry.serial = serial if serial > 1 else int.from_bytes(os.urandom(3), "little") + 2


def reset() -> None:
    """All is well again: nobody else is there, nothing is lost and nothing fails."""
    state = _state()
    ctypes.memset(ctypes.addressof(state.units), 0, ctypes.sizeof(state.units))
    for entry in state.faults:
        entry.serial = 0
