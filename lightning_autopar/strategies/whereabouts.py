"""Where a worker is in its code: it writes that to a file when the parent asks by a signal, even from inside of a collective.

Costs nothing until somebody asks. The worker's main thread, which does nothing else, reads the other thread's stack with Python's lock
held: ``faulthandler`` reads without it, and crashes where that thread returns from a function meanwhile. Knows stacks and files; ends no
process.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import sysconfig
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


def _file(folder: Path, rank: int) -> Path:
    return folder / f"stack{rank}"


def tell_when_asked(folder: Path, rank: int, thread: int) -> None:
    """In a worker's main thread: from now on write to a file in the folder where a thread is whenever the parent asks."""
    path = _file(folder, rank)
    hidden = path.with_suffix(".new")
    file = os.open(hidden, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)

    def tell(number: int, frame: FrameType | None) -> None:
        with suppress(OSError):  # no room in the folder
            os.write(file, (where(thread) or "").encode())

    signal.signal(_ASK, tell)
    hidden.rename(path)  # whoever asks before that would end this process by the signal


def where(thread: int) -> str | None:
    """Where a thread of this process is, in words."""
    frame, frames = sys._current_frames().get(thread), []
    while frame is not None:
        frames.append((frame.f_code.co_filename, str(frame.f_lineno), frame.f_code.co_name))
        frame = frame.f_back
    return _in_words(frames)


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
    try:
        return _file(folder, rank).read_text(encoding="utf-8", errors="replace") or None
    except OSError:
        return None


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
