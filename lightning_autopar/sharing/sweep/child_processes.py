"""Processes of a sweep: each leads a group of its own, and none outlives the sweep, however that ends. Knows no plans.

Two things ensure that. The kernel sends the group's leader SIGTERM when this process dies, and :mod:`.orphan_watchdog`, its own process,
ends whole groups when its pipe from here closes.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

_PR_SET_PDEATHSIG = 1
#: How long a run has to save after Ctrl-C; then comes SIGTERM, and after the same time SIGKILL.
GRACE_SECONDS = 15.0
#: Seconds between two looks where the kernel doesn't report a process's end.
_LOOK_SECONDS = 0.1
#: Looked up before any fork.
_prctl = ctypes.CDLL(None).prctl


class Signals:
    """Signals that should end the sweep, noted instead of raised wherever the program happens to be. Made by :func:`noted_signals`."""

    def __init__(self, reader: int) -> None:
        self.number: int | None = None
        self.count = 0
        self.reader = reader

    def note(self, number: int, frame: FrameType | None) -> None:
        """A signal handler."""
        self.number = self.number or number
        self.count += 1


@contextmanager
def noted_signals() -> Iterator[Signals]:
    """While open, SIGINT, SIGTERM and SIGHUP are recorded, and wake up :func:`wait`. For the main thread."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signals = Signals(reader)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, signals.note)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        signal.set_wakeup_fd(wakeup)
        os.close(reader)
        os.close(writer)


@dataclass(kw_only=True)
class Child:
    """A process of the sweep, the leader of its group."""

    process: subprocess.Popen[bytes]
    descriptor: int | None
    started_at: float

    @property
    def pid(self) -> int:
        """Its process id, which is its group's, too."""
        return self.process.pid

    def send(self, number: int) -> None:
        """Send its whole group a signal, as a terminal does."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


class Children:
    """The processes of a sweep. A context manager: on leaving, it ends those that still run.

    Args:
        orphan_seconds: how long a run has to save itself if this process is killed.
    """

    def __init__(self, *, orphan_seconds: float = 10.0) -> None:
        self._orphan_seconds = orphan_seconds
        self._left: dict[int, Child] = {}
        self._watchdog: subprocess.Popen[str] | None = None

    def __enter__(self) -> Children:
        program = [sys.executable, "-I", str(Path(__file__).with_name("orphan_watchdog.py")), str(self._orphan_seconds)]
        self._watchdog = subprocess.Popen(program, stdin=subprocess.PIPE, text=True, start_new_session=True, cwd="/")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end(self._left.values(), grace_seconds=0.0)
        assert self._watchdog is not None
        assert self._watchdog.stdin is not None
        with suppress(BrokenPipeError):
            self._watchdog.stdin.close()
        self._watchdog.wait()

    def start(self, words: Sequence[str], *, cwd: str | Path, env: Mapping[str, str], out: int, err: int) -> Child:
        """Start a process.

        Args:
            out: a descriptor for its standard output.
            err: and for its standard error.

        Raises:
            OSError: if it can't be started.
        """
        parent = os.getpid()

        def follow() -> None:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)

        process = subprocess.Popen(
            list(words), cwd=cwd, env=dict(env), stdin=subprocess.DEVNULL, stdout=out, stderr=err, process_group=0, preexec_fn=follow
        )
        self._tell(f"+{process.pid}")
        child = Child(process=process, descriptor=_descriptor(process.pid), started_at=time.monotonic())
        self._left[process.pid] = child
        return child

    def ended(self, child: Child) -> int | None:
        """A process's exit code, below 0 the signal that ended it; None while it runs."""
        code = child.process.poll()
        if code is not None and child.pid in self._left:
            del self._left[child.pid]
            if child.descriptor is not None:
                os.close(child.descriptor)
            self._tell(f"-{child.pid}")
        return code

    def end(self, children: Iterable[Child], *, grace_seconds: float = GRACE_SECONDS, signals: Signals | None = None) -> None:
        """Interrupt them, and kill those that don't end, at once if the user presses Ctrl-C again."""
        left = [child for child in children if child.process.poll() is None]
        groups = left[:]
        pressed = 0 if signals is None else signals.count
        for number in (signal.SIGINT, signal.SIGTERM):
            for child in left:
                child.send(number)
            until = time.monotonic() + grace_seconds
            while left and time.monotonic() < until and (signals is None or signals.count == pressed):
                wait(left, signals, until - time.monotonic())
                left = [child for child in left if child.process.poll() is None]
        for child in groups:  # also what is left of their groups
            child.send(signal.SIGKILL)
        for child in left:
            child.process.wait()
        for child in groups:
            self.ended(child)

    def _tell(self, line: str) -> None:
        assert self._watchdog is not None, "it has been entered"
        assert self._watchdog.stdin is not None
        with suppress(BrokenPipeError):  # the watchdog was killed; the kernel's signal is left
            self._watchdog.stdin.write(line + "\n")
            self._watchdog.stdin.flush()


def _descriptor(pid: int) -> int | None:
    """The descriptor for :func:`wait`; None where the kernel has none, or a container forbids it."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def wait(children: Collection[Child], signals: Signals | None, seconds: float) -> None:
    """Wait until one of the processes ends, a signal comes, or so much time has passed."""
    running = [child for child in children if child.process.returncode is None]
    descriptors = [child.descriptor for child in running if child.descriptor is not None]
    if len(descriptors) < len(running):
        seconds = min(seconds, _LOOK_SECONDS)
    with suppress(InterruptedError):
        ready, _, _ = select.select([*descriptors, *([signals.reader] if signals is not None else [])], [], [], max(0.0, seconds))
        if signals is not None and signals.reader in ready:
            with suppress(BlockingIOError):
                os.read(signals.reader, 4096)
