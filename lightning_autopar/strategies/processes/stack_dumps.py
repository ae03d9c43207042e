"""Where a worker is in its code, and whether its GPU makes progress: it writes both to a file when the parent sends it a signal.

This works even inside a collective, and costs nothing until somebody asks. The worker's main thread, which does nothing else, reads the
other thread's stack while it holds Python's lock: ``faulthandler`` reads without the lock, and crashes where that thread returns from a
function meanwhile. Knows stacks, a GPU's queue and files; ends no process.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import sysconfig
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

import torch

from lightning_autopar._lightning import fabric, pl

#: The signal that asks for the stack: the last real-time signal, which no library and no launcher uses.
_ASK = signal.SIGRTMAX
#: A frame in a traceback.
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
#: Names of functions whose frames surround the collective that the user knows.
_WRAPPERS = ("c10d_logger.py", "contextlib.py", os.path.join("torch", "_ops.py"))
#: Where ranks wait for each other: in torch's collectives, and in those of shards. A backward pass that sends gradients may wait as well.
_WAITS, _BACKWARD = ("(distributed_c10d.py:", "(_functional_collectives.py:"), "backward (graph.py:"
#: Better-known names of functions that do only one thing.
_NAMES = {"_engine_run_backward": "backward"}
#: Folders of code that is neither the user's nor this package's.
_STRANGERS = (*(os.path.dirname(package.__file__ or "") for package in (torch, pl, fabric)), sysconfig.get_paths()["stdlib"], "<")
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
#: Modules whose functions are on a stack while code is compiled, not while it runs; and what is said of a place then.
_COMPILERS = tuple(
    os.path.join(*path.split("/"))
    for path in (
        "torch/_dynamo/convert_frame.py",
        "torch/_inductor/compile_fx.py",
        "torch/utils/cpp_extension.py",
        "triton/compiler/compiler.py",
    )
)
_COMPILES = ", while code is compiled"
#: Functions that are on the stack while a CUDA graph is captured, which another thread's wait would spoil.
_CAPTURES = (os.path.join("torch", "cuda", "graphs.py"), "cudagraph_trees.py")


class GpuQueue:
    """Whether a GPU does its queued work. A look starts a thread that waits for the GPU. That thread ends when all work that was queued is
    done; while it lives, no new look begins. It queues nothing itself: with a full queue it would wait with Python's lock held.

    Args:
        device: the GPU, or a device that has no queue.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._wait: threading.Thread | None = None
        self._looks = 0

    def count(self, thread: int) -> int:
        """A number that grows from look to look while the GPU does its queued work, and stays the same while it doesn't. It isn't a time: a
        process that was stopped, or had no core for an hour, comes to the same number as one that wasn't.

        Returns:
            0 where nothing is known: there is no GPU, it isn't in use yet, or a CUDA graph is being captured.
        """
        if self._device.type != "cuda" or not torch.cuda.is_initialized() or self._captures(thread):
            return 0
        if self._wait is None or not self._wait.is_alive():
            wait = threading.Thread(target=self._drain, daemon=True, name="autopar-queue")
            try:
                wait.start()
            except RuntimeError:  # the system has no room for a thread
                return 0
            self._wait = wait
            self._looks += 1
        return self._looks

    def _captures(self, thread: int) -> bool:
        """Whether a CUDA graph is being captured, which another thread's wait would spoil."""
        if any(name.endswith(_CAPTURES) for name, _, _ in _frames(thread)):
            return True
        stream = torch.cuda.graph.default_capture_stream  # ``with torch.cuda.graph(...)`` leaves no frame of its own
        if stream is None:
            return False
        with torch.cuda.stream(stream):
            return bool(torch.cuda.is_current_stream_capturing())

    def _drain(self) -> None:
        with suppress(RuntimeError):  # the GPU has failed, which ends the run by itself
            torch.cuda.synchronize(self._device)  # all of its streams: an engine may wait in one of its own


def _file(folder: Path, rank: int) -> Path:
    return folder / f"stack{rank}"


def tell_when_asked(folder: Path, rank: int, thread: int, device: torch.device) -> None:
    """In a worker's main thread: from now on, whenever the parent asks, write to a file in the folder where a thread is.

    Args:
        device: what it computes on; for a GPU it also writes :meth:`GpuQueue.count`.
    """
    queue = GpuQueue(device)
    path = _file(folder, rank)
    hidden = path.with_suffix(".new")
    file = os.open(hidden, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)

    def tell(number: int, frame: FrameType | None) -> None:
        with suppress(OSError):  # no room in the folder
            os.write(file, f"{where(thread) or ''}\n{queue.count(thread)}\n".encode())

    signal.signal(_ASK, tell)
    hidden.rename(path)  # before that, the asking signal would end this process


def where(thread: int) -> str | None:
    """Where a thread of this process is, in words; and whether one compiles: autograd's threads do, too."""
    words = _in_words(_frames(thread))
    return f"{words}{_COMPILES}" if words is not None and any(map(_compiles, sys._current_frames())) else words


def _compiles(thread: int) -> bool:
    return any(name.endswith(_COMPILERS) for name, _, _ in _frames(thread))


def compiles(place: str | None) -> bool:
    """Whether code was compiled in the process of a place in words."""
    return place is not None and place.endswith(_COMPILES)


def in_collective(place: str | None, *, gpu: bool = False) -> bool:
    """Whether a place in words may be one of torch's collectives. On a ``gpu`` no backward pass is: it waits for what it has queued."""
    waits = _WAITS if gpu else (*_WAITS, _BACKWARD)
    return place is not None and any(wait in place.split(",")[0] for wait in waits)


def _frames(thread: int) -> list[tuple[str, str, str]]:
    """File, line and function of each of a thread's frames, the innermost first."""
    frame, frames = sys._current_frames().get(thread), []
    while frame is not None:
        frames.append((frame.f_code.co_filename, str(frame.f_lineno), frame.f_code.co_name))
        frame = frame.f_back
    return frames


def ask(folder: Path, pids: Mapping[int, int]) -> None:
    """In the parent: ask workers to write anew where they are; they do so within some milliseconds, unless they are stopped.

    Args:
        pids: the workers' process ids by rank.
    """
    for rank, pid in pids.items():
        with suppress(OSError):  # it has just ended, or hasn't started yet
            os.truncate(_file(folder, rank), 0)
            os.kill(pid, _ASK)


def answer(folder: Path, rank: int) -> tuple[str | None, int] | None:
    """In the parent: where a worker was, in words, and its :meth:`GpuQueue.count`; None where it hasn't answered yet."""
    try:
        words, queue, _ = _file(folder, rank).read_text(encoding="utf-8", errors="replace").split("\n")
    except (OSError, ValueError):
        return None
    return words or None, int(queue)


def place(folder: Path, rank: int) -> str | None:
    """In the parent: where a worker was when it was asked, in words; None where it hasn't answered."""
    found = answer(folder, rank)
    return None if found is None else found[0]


def raised_at(traceback_text: str) -> str | None:
    """Where an exception was raised, in the same form."""
    return _in_words(list(reversed(_FRAME.findall(traceback_text))))


def _in_words(frames: Sequence[tuple[str, str, str]]) -> str | None:
    """A place in words: a function of torch's with its caller, or the function itself; and the user's line, where that is another one.

    Args:
        frames: file, line and function, the innermost first.
    """
    known = [frame for frame in frames if not frame[0].endswith(_WRAPPERS)]
    if not known:
        return None
    callers = [frame for frame in known if not frame[0].startswith(_STRANGERS)]
    words = _frame_in_words(known[0])
    users = [frame for frame in callers if not frame[0].startswith(_OURS)]
    for each in dict.fromkeys((*callers[:1], *users[:1])):
        words += f", called by {_frame_in_words(each)}" if each is not known[0] else ""
    return words


def _frame_in_words(frame: tuple[str, str, str]) -> str:
    name, line, function = frame
    return f"{_NAMES.get(function, function)} ({Path(name).name}:{line})"
