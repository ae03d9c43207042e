"""A child for each check, of a process that has never run a backward pass, used a GPU or joined a process group.

That is a plain fork where this process is such a one. Where it is not (a notebook that has trained, a script that has asked CUDA for
something, a rank of torchrun's that has run before), a fresh Python is started and kept, and forks the children: objects travel to it by
value, as they are now, and so does the environment. Knows torch, nothing of Lightning and of what is run.
"""

from __future__ import annotations

import atexit
import importlib
import io
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_autopar._fork import ChildFailed, read_message, run_forked, unforkable, write_message
from lightning_autopar._root import for_child
from lightning_autopar.text import error_line

T = TypeVar("T")

#: The most bytes to send: more would take longer than a check is worth.
_MOST_BYTES = 1 << 30
#: How long a fresh Python may take to start: it imports torch and Lightning first.
_START_SECONDS = 120.0
#: torch is imported before this process's path is set, which may hold files with names that torch imports (``cuda``, ``types``).
_START = """
import sys
sys.path[:] = filter(None, sys.path)
try:
    import torch
except ModuleNotFoundError:
    pass
sys.path += {path!r}
from {module} import serve
sys.path[:] = {path!r}
serve()
"""


class CannotTravel(RuntimeError):
    """The objects to check can't be sent to a clean process.

    Args:
        reason: why, as the end of a sentence.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def run_clean(function: Callable[..., T], *args: Any, timeout_seconds: float, meanwhile: Callable[[], None] | None = None) -> T:
    """Call ``function(*args)`` in a child of a clean process and return its result; as :func:`._fork.run_forked`.

    Args:
        function: what to run: a module's function, not a local one, that uses no GPUs.
        args: its arguments. Where this process isn't clean they are pickled; classes and functions of the script or notebook itself by
            value.
        timeout_seconds: end the child after so long.
        meanwhile: what this process does while a child that it has forked runs.

    Raises:
        ChildFailed: as ``run_forked``.
        CannotTravel: if the process isn't clean, and the arguments can't be pickled or read again, with a sentence that says what to do.
    """
    reason = unforkable() or ("this process is in a process group" if dist.is_initialized() else None)
    if reason is None:
        return run_forked(function, *args, timeout_seconds=timeout_seconds, meanwhile=meanwhile)
    try:
        return _kept().run(_pickled((function, args)), function.__module__, timeout_seconds)  # type: ignore[no-any-return]
    except CannotTravel as error:
        raise CannotTravel(
            f"{reason}, and the module, its trainer or its data can't be sent to one that hasn't ({error.reason}); call fit in a fresh "
            "process, in a notebook after the kernel was restarted"
        ) from error


class _Limited(io.BytesIO):
    """A file that refuses to grow beyond the most bytes to send."""

    def write(self, data: Any) -> int:
        if self.tell() + len(memoryview(data).cast("B")) > _MOST_BYTES:
            raise pickle.PicklingError(f"they take more than {_MOST_BYTES >> 20} MiB")
        return super().write(data)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no annotations
    """Pickles tensors as CPU tensors. Objects of this process's group (Lightning leaves a mesh on the module) become None."""

    def reducer_override(self, target: Any) -> Any:
        if isinstance(target, (dist.ProcessGroup, DeviceMesh)):
            return _nothing, ()
        if type(target) is weakref.ref:
            return (weakref.ref, (target(),)) if target() is not None else (_gone, ())
        if isinstance(target, nn.Module) and type(target).__new__ is not nn.Module.__new__:  # which may want arguments
            return object.__new__, (type(target),), target.__getstate__()
        if isinstance(target, Tensor):
            here = target if type(target) is not Tensor or target.device.type in ("cpu", "meta") else target.detach().cpu()
            try:
                return here.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            except Exception:  # another rank has its values: code that needs them there fails with an error
                return _valueless, (tuple(target.shape), target.dtype)
        return super().reducer_override(target)


def _nothing() -> None:
    """Stands for an object that can't be sent."""


def _valueless(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _gone() -> weakref.ref[Any]:
    """Stands for a weak reference whose object is gone."""
    return weakref.ref(type("_Gone", (), {})())


def _pickled(value: Any) -> bytes:
    file = _Limited()
    try:
        _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception as error:  # the user's objects may raise anything
        raise CannotTravel(error_line(error)) from error
    return file.getvalue()


# -- the process that is kept ----------------------------------------------------------------------------------------------------------


class _Kept:
    """The fresh Python. It ends when this process does, which holds the other end of its input."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._started = time.monotonic()
        code = _START.format(path=sys.path, module=__name__)
        self._process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment())

    @property
    def runs(self) -> bool:
        """Whether it can take calls."""
        return self._process.poll() is None

    def run(self, payload: bytes, module: str, timeout_seconds: float) -> Any:
        """Run a pickled call of a module's function there; returns its result."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            try:
                write_message(self._process.stdin.fileno(), True, pickle.dumps((module, timeout_seconds, _environment())))
                write_message(self._process.stdin.fileno(), True, payload)
                late = max(time.monotonic(), self._started + _START_SECONDS) + timeout_seconds + _START_SECONDS
                message = read_message(self._process.stdout.fileno(), late)
            except BaseException:  # after an interrupt, its answer would be read as the next call's
                self.end()
                raise
            if message is None:
                self.end()
                raise ChildFailed("the process that was kept for checks ended without a result", crashed=True)
        succeeded, data = message
        result = pickle.loads(data)
        if succeeded:
            return result
        if isinstance(result, _Unread):
            raise CannotTravel(result.reason)
        raise ChildFailed(*result[:2], crashed=result[2], timed_out=result[3])

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


_process: _Kept | None = None


def _kept() -> _Kept:
    """The one of this process; a forked child doesn't use its parent's."""
    global _process
    if _process is None or _process.pid != os.getpid() or not _process.runs:
        _process = _Kept()
        atexit.register(_process.end)
    return _process


# -- in that process -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Unread:
    """Says that a call couldn't be unpickled there."""

    reason: str


def serve() -> None:
    """The fresh Python's loop: fork a child for each call that comes in, and return its result, until the input ends."""
    answers = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    while (about := read_message(0, None)) is not None and (call := read_message(0, None)) is not None:
        module, timeout_seconds, environment = pickle.loads(about[1])
        if module.startswith(f"{__package__}."):
            importlib.import_module(module)  # imported once, rather than in each child
        try:
            result = run_forked(_call, call[1], environment, timeout_seconds=timeout_seconds)
            write_message(answers, not isinstance(result, _Unread), pickle.dumps(result))
        except ChildFailed as error:
            write_message(answers, False, pickle.dumps((error.reason, error.child_traceback, error.crashed, error.timed_out)))


def _environment() -> dict[str, str]:
    """This process's as it is now, but for GPUs, which checks leave alone."""
    return for_child({**os.environ, "CUDA_VISIBLE_DEVICES": ""})


def _call(payload: bytes, environment: dict[str, str]) -> Any:
    """In the forked child, as unpickling runs the user's code, too."""
    os.environ.clear()
    os.environ.update(environment)
    try:
        function, args = pickle.loads(payload)
    except Exception as error:  # a module that can't be imported there, a class that doesn't unpickle
        return _Unread(reason=error_line(error))
    return function(*args)
