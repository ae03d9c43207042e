"""Signals to a process that a launcher started: noted when they come, and acted on at a boundary between two batches.

Knows signals and the trainer's own handlers, which it replaces; no snapshot and no other rank.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from lightning_autopar._lightning import Trainer, rank_zero_warn
from lightning_autopar.strategies.elastic.restart.store_rendezvous import Word

#: If a process that was told to leave comes to no boundary for so long, and for three batches, it waits for a rank that is gone.
_PATIENCE_SECONDS = 20.0
_BATCHES = 3


class Signals:
    """Handles SIGTERM and the signal that asks for a snapshot, while a run goes on.

    Lightning's own handlers aren't set meanwhile: the one for SIGTERM starts collectives on a rank that may be in the middle of others, and
    ends the run by an exception; the one for Slurm's requeue signal saves wherever the process is (``_SignalConnector``, Lightning issue
    #21406). As in Lightning, the user's own handler of SIGTERM is called too, and one for the other signal is called alone.

    Args:
        save: the signal that asks for a snapshot.
    """

    def __init__(self, trainer: Trainer, save: int) -> None:
        self._connector: Any = trainer._signal_connector
        self._words: dict[int, Word] = {int(signal.SIGTERM): "leave", int(save): "save"}
        self._before: dict[int, Any] = {}
        self._came: dict[int, int] = {}
        self._taken: dict[int, int] = {}
        self._armed = False
        self._held = False
        self._at = time.monotonic()
        self._batch_seconds = 0.0
        self._leave = threading.Event()
        self._pipe: tuple[int, int] | None = None
        self._wakeup_before = -1

    def __enter__(self) -> Signals:
        if threading.current_thread() is not threading.main_thread():
            rank_zero_warn("autopar: fit isn't called from the main thread, so that signals can't ask this run to leave with a snapshot")
            return self
        self._connector.register_signal_handlers = lambda: setattr(self._connector, "received_sigterm", False)
        for number, word in self._words.items():
            before = signal.getsignal(number)
            if word == "save" and before not in (signal.SIG_DFL, None):
                continue
            self._before[number] = before
            signal.signal(number, self._note)
        self._listen()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        vars(self._connector).pop("register_signal_handlers", None)
        for number, before in self._before.items():
            signal.signal(number, before)
        if self._pipe is not None:
            signal.set_wakeup_fd(self._wakeup_before)
            os.close(self._pipe[1])  # ends the thread, which closes the other end of the pipe

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._armed and self._words[number] == "leave" and not callable(self._before[number]):
            signal.signal(number, signal.SIG_DFL)  # there is nothing to save yet
            os.kill(os.getpid(), number)
            return
        self._came[number] = self._came.get(number, 0) + 1
        if self._words[number] == "leave":
            self._leave.set()
        if callable(before := self._before.get(number)):
            before(number, frame)

    # -- what the run asks -------------------------------------------------------------------------------------------------------------

    def arm(self) -> None:
        """This process is at a boundary: from the first one on there is something to save."""
        now = time.monotonic()
        if self._armed:
            self._batch_seconds = max(self._batch_seconds, now - self._at)
        self._at, self._armed = now, True

    def words(self) -> list[Word]:
        """The requests by signals that weren't returned yet."""
        found = [self._words[number] for number, count in self._came.items() if count > self._taken.get(number, 0)]
        self._taken = dict(self._came)
        return found

    def told(self, word: Word) -> bool:
        """Whether a signal has asked for this."""
        return any(self._words[number] == word for number in self._came)

    def wait_for_leave(self, seconds: float) -> None:
        """Wait until this process is told to leave, at most so many seconds."""
        self._leave.wait(seconds)

    def hold(self) -> None:
        """A snapshot is being written: until it is, only a kill ends this process."""
        self._held = True

    def release(self) -> None:
        """The snapshot is written."""
        self._held, self._at = False, time.monotonic()

    # -- a process that can't come to a boundary any more ------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Let a thread see signals at once: a Python handler doesn't run while the main thread waits in a collective."""
        pipe = os.pipe()
        os.set_blocking(pipe[1], False)
        self._wakeup_before = signal.set_wakeup_fd(pipe[1], warn_on_full_buffer=False)
        if self._wakeup_before != -1:  # somebody else listens, such as an event loop
            signal.set_wakeup_fd(self._wakeup_before)
            os.close(pipe[0])
            os.close(pipe[1])
            return
        self._pipe = pipe
        threading.Thread(target=self._watch, args=(pipe[0],), daemon=True, name="autopar-signals").start()

    def _watch(self, pipe: int) -> None:
        while (numbers := os.read(pipe, 64)) and int(signal.SIGTERM) not in numbers:
            pass
        closed, told_at = not numbers, time.monotonic()
        while not closed:
            os.set_blocking(pipe, False)
            with suppress(BlockingIOError):
                closed = not os.read(pipe, 64)
            patience = max(_PATIENCE_SECONDS, _BATCHES * self._batch_seconds)
            if not closed and self._armed and not self._held and time.monotonic() - max(self._at, told_at) > patience:
                sys.stderr.write(
                    f"autopar: told to leave, but no batch has ended for {patience:.0f} s: another rank is gone; this one ends\n"
                )
                sys.stderr.flush()
                os._exit(128 + signal.SIGTERM)
            threading.Event().wait(0.5)
        os.close(pipe)
