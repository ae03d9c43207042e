"""What one call of the trainer shows of itself on its host, from planning to its end, whatever kind of run it is.

A failure to show something costs a warning, never the run. Only the process that planned shows anything; of processes that a launcher
started, the first one. Knows decisions and promises; ``status`` knows where it is shown, ``progress`` how far the run has come.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from lightning_autopar._lightning import Trainer, rank_zero_warn
from lightning_autopar.sharing.queue_order import Need
from lightning_autopar.sharing.runs.progress import RunProgress, RunSpeed
from lightning_autopar.sharing.runs.status import SHOW_SECONDS, Request, RunFiles, open_run


class Decided(Protocol):
    """What others on the host are told of a run's decision."""

    @property
    def run_plan(self) -> Any:
        """The plan, with what it takes of each device."""

    @property
    def expected_seconds(self) -> float | None:
        """How long it trains by its prediction; None where nobody knows."""

    @property
    def need(self) -> Need:
        """What must be free for the plan, and how long it trains."""


def _nobody_asked(seconds: float) -> None:
    """Ignores the remaining time; a named function, as a module that is pickled after its run may refer to it."""


class RunDisplay:
    """Shows a run's status to others on its host.

    Args:
        files: the run's; None where there are none.
        leased: what the run was promised by now, by device id.
        expect: called while the run trains, with its remaining seconds by its speed.
    """

    def __init__(
        self,
        files: RunFiles | None,
        leased: Callable[[], Mapping[str, int]],
        expect: Callable[[float], None] = _nobody_asked,
    ) -> None:
        self._files, self._leased, self._expect = files, leased, expect
        self._pid = os.getpid()
        self._progress: RunProgress | None = None
        self._devices: tuple[str, ...] = ()
        self._pace = RunSpeed()
        self._next = 0.0

    @property
    def run_id(self) -> str | None:
        """The run's name on this host; None where it shows nothing."""
        return None if self._files is None else self._files.run_id

    def show(self, **changes: Any) -> None:
        """Show these fields of :class:`~lightning_autopar.sharing.runs.status.RunStatus` from now on; cheap enough for every round.

        A new state begins now, unless ``since`` says when it began.
        """
        if self._files is None or os.getpid() != self._pid:  # a fork by the user's own code
            return
        before = self._files.status
        if changes.get("state", before.state) != before.state:
            changes = {"since": time.time(), **changes}
        self._files.show(replace(before, leased_bytes=dict(self._leased()), **changes))

    def planning(self, **changes: Any) -> None:
        """The run plans (anew)."""
        self.show(state="planning", waits_for="", **changes)

    def queued(
        self, waits_for: str, *, wanted_bytes: Mapping[str, int] | None = None, ends_at: float | None = None, **changes: Any
    ) -> None:
        """The run waits for its turn; to be called every few seconds at least.

        Args:
            waits_for: what for and behind whom.
            wanted_bytes: what it reserves, by device id.
            ends_at: when it may be expected to end, in seconds since the epoch.
            changes: of further fields, such as ``priority``.
        """
        self.show(state="queued", waits_for=waits_for, predicted_bytes=dict(wanted_bytes or {}), ends_at=ends_at, **changes)

    def running(
        self, plan: str, devices: tuple[str, ...], predicted_bytes: Mapping[str, int], seconds: float | None, progress: RunProgress
    ) -> None:
        """The run has begun.

        Args:
            devices: ids, in rank order.
            predicted_bytes: what the plan is predicted to take of each device, by id.
            seconds: how long it trains by its prediction; None where nobody knows.
            progress: where its processes write how far they are; :meth:`look` reads it.
        """
        self._progress, self._devices, self._pace = progress, devices, RunSpeed()
        ends_at = None if seconds is None else time.time() + seconds
        self.show(state="running", plan=plan, devices=devices, predicted_bytes=predicted_bytes, waits_for="", ends_at=ends_at)

    def look(self) -> None:
        """Show how far the run has come; cheap enough for every round of a waiting process."""
        now = time.monotonic()
        if self._files is None or self._progress is None or now < self._next:
            return
        self._next = now + SHOW_SECONDS
        note = self._progress.read()
        if note is None:
            self.show()
            return
        self._pace.take(note)
        left = self._pace.seconds_left
        changes = {}
        if left is not None:
            left = max(0.0, left - (now - note.at_ns * 1e-9))
            changes["ends_at"] = time.time() + left
            self._expect(left)
        used = zip(self._devices, self._progress.used_bytes, strict=True)
        self.show(
            step=note.step,
            steps=note.steps,
            step_seconds=self._pace.step_seconds,
            used_bytes={device: size for device, size in used if size},
            **changes,
        )

    def requests(self) -> list[Request]:
        """The requests of others, each once."""
        return [] if self._files is None else self._files.requests()

    def answer(self, request: Request, words: str) -> None:
        """Answer a request with what is done about it."""
        if self._files is not None:
            self._files.answer(request, words)

    def close(self) -> None:
        """The run is over: show nothing any more."""
        self._files = self._progress = None


@contextmanager
def showing(
    trainer: Trainer,
    leased: Callable[[], Mapping[str, int]] = dict,
    expect: Callable[[float], None] = _nobody_asked,
    *,
    silent: bool = False,
    external: bool = False,
) -> Iterator[RunDisplay]:
    """While open, this process's run is shown on its host, as one that plans.

    Args:
        silent: whether another process shows it.
        external: whether torchrun or Slurm started its processes.
    """
    if silent:
        yield RunDisplay(None, leased)
        return
    opened = open_run()
    try:
        files = opened.__enter__()
    except (ValueError, OSError) as error:
        rank_zero_warn(f"autopar: {error}; the run goes on, and lightning-autopar status doesn't see it")
        yield RunDisplay(None, leased)
        return
    shown = RunDisplay(files, leased, expect)
    try:
        shown.show(task=str(trainer.state.fn.value) if trainer.state.fn is not None else "fit", external=external)
        yield shown
    finally:
        shown.close()
        opened.__exit__(None, None, None)
