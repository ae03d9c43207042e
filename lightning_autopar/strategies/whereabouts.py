"""Where a worker is in its code, and whether its GPU comes along: it writes both to a file when the parent asks by a signal.

It does so even from inside of a collective, and costs nothing until somebody asks. The worker's main thread, which does nothing else, reads
the other thread's stack with Python's lock held: ``faulthandler`` reads without it, and crashes where that thread returns from a function
meanwhile. Knows stacks, a GPU's queue and files; ends no process.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

import lightning
import torch

#: Asks for the stack. The last of the real-time signals, which no library and no launcher uses; macOS has none of them.
_ASK = getattr(signal, "SIGRTMAX", signal.SIGUSR2)
#: A frame in a traceback.
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
#: Whose frames are around what the user knows as the collective.
_WRAPPERS = ("c10d_logger.py", "contextlib.py")
#: How a function that does nothing but this is better known.
_NAMES = {"_engine_run_backward": "backward"}
#: Where code lies that is neither the user's nor this package's.
_STRANGERS = (*(os.path.dirname(package.__file__ or "") for package in (torch, lightning)), sysconfig.get_paths()["stdlib"], "<")
#: Whose frames are on the stack while a CUDA graph is captured: then another thread's wait would spoil it.
_CAPTURES = (os.path.join("torch", "cuda", "graphs.py"), "cudagraph_trees.py")


class GpuQueue:
    """How long a GPU has been busy with what it had been given at an earlier look.

    A look starts a thread that waits for the GPU. That thread ends when all that had been enqueued is done; while it lives, nobody looks
    anew. It enqueues nothing itself, as it would wait with Python's lock held where the queue is full.

    Args:
        device: the GPU, or a device that has no queue.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._wait: threading.Thread | None = None
        self._since = 0.0

    def open_seconds(self) -> float:
        """How long ago that was given which isn't done yet; 0 where all of it is, and at the first look."""
        if self._wait is not None and self._wait.is_alive():
            return time.monotonic() - self._since
        if self._device.type == "cuda" and torch.cuda.is_initialized():
            self._wait = threading.Thread(target=self._drain, daemon=True, name="autopar-queue")
            self._since = time.monotonic()
            self._wait.start()
        return 0.0

    def _drain(self) -> None:
        with suppress(RuntimeError):  # the GPU has failed: that ends the run by itself
            torch.cuda.synchronize(self._device)  # all of its streams: an engine may wait in one of its own


def _file(folder: Path, rank: int) -> Path:
    return folder / f"stack{rank}"


def tell_when_asked(folder: Path, rank: int, thread: int, device: torch.device) -> None:
    """In a worker's main thread: from now on write to a file in the folder where a thread is whenever the parent asks.

    Args:
        folder: the generation's.
        rank: the worker's.
        thread: the thread's id.
        device: what it computes on; of a GPU it says as well how long its queue has been open.
    """
    queue = GpuQueue(device)
    path = _file(folder, rank)
    hidden = path.with_suffix(".new")
    file = os.open(hidden, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)

    def tell(number: int, frame: FrameType | None) -> None:
        with suppress(OSError):  # no room in the folder
            os.write(file, f"{where(thread) or ''}\n{open_seconds(queue, thread)}".encode())

    signal.signal(_ASK, tell)
    hidden.rename(path)  # whoever asks before that would end this process by the signal


def where(thread: int) -> str | None:
    """Where a thread of this process is, in words."""
    return _in_words(_frames(thread))


def in_collective(place: str | None) -> bool:
    """Whether a place in words is one of torch's collectives."""
    return place is not None and "distributed_c10d.py" in place.split(",")[0]


def open_seconds(queue: GpuQueue, thread: int) -> float:
    """A look at the queue, unless the thread captures a CUDA graph at this moment; then 0."""
    captures = any(name.endswith(_CAPTURES) for name, _, _ in _frames(thread))
    return 0.0 if captures else queue.open_seconds()


def _frames(thread: int) -> list[tuple[str, str, str]]:
    """File, line and function of each of a thread's frames, the innermost first."""
    frame, frames = sys._current_frames().get(thread), []
    while frame is not None:
        frames.append((frame.f_code.co_filename, str(frame.f_lineno), frame.f_code.co_name))
        frame = frame.f_back
    return frames


def ask(folder: Path, pids: Mapping[int, int]) -> None:
    """In the parent: have workers write anew where they are; they do so within some milliseconds, unless they are stopped.

    Args:
        folder: the generation's.
        pids: the workers' process ids by rank.
    """
    for rank, pid in pids.items():
        with suppress(OSError):  # it has just ended, or isn't so far yet
            os.truncate(_file(folder, rank), 0)
            os.kill(pid, _ASK)


def place(folder: Path, rank: int) -> str | None:
    """In the parent: where a worker was when it was asked, in words; None where it hasn't said."""
    return _answer(folder, rank)[0] or None


def gpu_seconds(folder: Path, rank: int) -> float:
    """In the parent: how long a worker's GPU hadn't done what it had been given, when the worker was asked; see :class:`GpuQueue`."""
    return float(_answer(folder, rank)[1] or 0.0)


def _answer(folder: Path, rank: int) -> tuple[str, str]:
    """What a worker wrote: the place and the seconds, empty where it hasn't written."""
    try:
        words, _, seconds = _file(folder, rank).read_text(encoding="utf-8", errors="replace").partition("\n")
    except OSError:
        return "", ""
    return words, seconds


def raised_at(traceback_text: str) -> str | None:
    """Where an exception was raised, in the same words."""
    return _in_words(list(reversed(_FRAME.findall(traceback_text))))


def _in_words(frames: Sequence[tuple[str, str, str]]) -> str | None:
    """A function of torch's together with who called it, or the function itself.

    Args:
        frames: file, line and function, the innermost first.
    """
    known = [frame for frame in frames if not frame[0].endswith(_WRAPPERS)]
    if not known:
        return None
    callers = [frame for frame in known if not frame[0].startswith(_STRANGERS)]
    words = _frame_in_words(known[0])
    if callers and callers[0] is not known[0]:
        words += f", called by {_frame_in_words(callers[0])}"
    return words


def _frame_in_words(frame: tuple[str, str, str]) -> str:
    name, line, function = frame
    return f"{_NAMES.get(function, function)} ({Path(name).name}:{line})"
