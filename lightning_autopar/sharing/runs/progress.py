"""How far a run has come, passed from the process that trains to the one that shows it, in a few numbers of shared memory.

The memory is made before any fork. The process that trains reads a clock at each batch and writes seldom; it never waits. Knows the
trainer's counters; doesn't know who shows them, nor where.
"""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lightning_autopar._lightning import Trainer
from lightning_autopar._lightning_compat import TrainerFn

#: Between two notes.
NOTE_NS = 250_000_000
_AT, _STEP, _STEPS, _BATCH, _LEFT, _ACCUMULATED, _TRAINS, _FIRST = range(8)
#: A figure that isn't known.
_UNKNOWN = -1
#: How many first batches aren't representative of later ones.
_WARM_UP = 3
#: How many notes give a speed.
_WINDOW = 16


@dataclass(frozen=True, kw_only=True)
class Note:
    """A training process's latest record of its progress.

    Args:
        at_ns: when, on the host's monotonic clock.
        step: optimizer steps done; None where nothing is trained.
        steps: of the whole run; None where unknown.
        batch: training batches begun, those before a resumption included.
        batches_left: training batches to go; None where unknown.
        accumulated: batches to a step.
        trains: whether it is in a training epoch, rather than in an evaluation.
    """

    at_ns: int
    step: int | None
    steps: int | None
    batch: int
    batches_left: int | None
    accumulated: int
    trains: bool


class RunProgress:
    """How far a run has come."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._cells = memoryview(mmap.mmap(-1, 8 * (_FIRST + world_size))).cast("q")
        self._next_ns = 0
        self._steps: int | None = None

    # -- in a process that trains ------------------------------------------------------------------------------------------------------

    def at_batch(self, trainer: Trainer, rank: int, device: torch.device, look: Callable[[], None] | None = None) -> None:
        """To be called when a batch of any loop begins: note how far the run is, at most a few times a second.

        Args:
            rank: of this process; rank 0 records the run's progress, the others only what their GPU holds.
            look: called after each note.
        """
        now = time.monotonic_ns()
        if now >= self._next_ns:
            self._next_ns = now + NOTE_NS
            self._note(trainer, rank, device, now)
            if look is not None:
                look()

    def _note(self, trainer: Trainer, rank: int, device: torch.device, now: int) -> None:
        cells = self._cells
        if device.type == "cuda":
            cells[_FIRST + rank] = torch.cuda.memory_reserved(device)
        if rank:
            return
        cells[_AT] = 0  # a reader in between reads nothing
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits and self._steps is None and trainer.training:
            self._steps = _steps(trainer)
        left = batches_left(trainer) if fits else None
        cells[_STEP] = trainer.global_step if fits else _UNKNOWN
        cells[_STEPS] = _UNKNOWN if self._steps is None else self._steps
        cells[_BATCH] = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        cells[_LEFT] = _UNKNOWN if left is None else left
        cells[_ACCUMULATED] = trainer.accumulate_grad_batches
        cells[_TRAINS] = int(fits and bool(trainer.training))
        cells[_AT] = now

    # -- in the one that shows ---------------------------------------------------------------------------------------------------------

    def read(self) -> Note | None:
        """The latest note; None before the first, and while one is written."""
        cells = self._cells
        at_ns = cells[_AT]
        step, steps, batch, left, accumulated, trains = cells[_STEP:_FIRST].tolist()
        if not at_ns or cells[_AT] != at_ns:
            return None
        known = [None if value == _UNKNOWN else value for value in (step, steps, left)]
        return Note(
            at_ns=at_ns, step=known[0], steps=known[1], batch=batch, batches_left=known[2], accumulated=accumulated, trains=bool(trains)
        )

    @property
    def used_bytes(self) -> list[int]:
        """The bytes that each process's GPU holds for it, by its latest record; 0 without one."""
        return self._cells[_FIRST:].tolist()


class RunSpeed:
    """A run's speed, from its records."""

    def __init__(self) -> None:
        self._notes: deque[Note] = deque(maxlen=_WINDOW)
        self._spans: deque[tuple[int, int]] = deque(maxlen=_WINDOW)
        self._first: Note | None = None
        self._begun: int | None = None

    def take(self, note: Note) -> None:
        """Add a record; the same one again is ignored."""
        last = self._notes[-1] if self._notes else None
        if last is not None and note.at_ns == last.at_ns:
            return
        self._notes.append(note)
        self._begun = note.batch if self._begun is None else self._begun
        if note.batch - self._begun < _WARM_UP:
            return
        if self._first is None:
            self._first = note
        elif last is not None and last.trains and note.trains and note.batch > last.batch:
            self._spans.append((note.at_ns - last.at_ns, note.batch - last.batch))

    @property
    def step_seconds(self) -> float | None:
        """Seconds of the latest optimizer steps, without evaluations between them; None before there is a figure."""
        batches = sum(count for _, count in self._spans)
        return sum(span for span, _ in self._spans) * 1e-9 / batches * self._notes[-1].accumulated if batches else None

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the last batch at the speed so far, evaluations included; counted from the latest record. None where unknown."""
        last = self._notes[-1] if self._notes else None
        if last is None or self._first is None or last.batches_left is None or last.batch <= self._first.batch:
            return None
        return last.batches_left * (last.at_ns - self._first.at_ns) * 1e-9 / (last.batch - self._first.batch)


def batches_left(trainer: Trainer) -> int | None:
    """Training batches to go between two batches, by the trainer's limits; None without any."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    an_epoch, done = trainer.num_training_batches, progress.current.ready
    left: list[float] = []
    if trainer.max_steps >= 0:
        left.append((trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches)
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        more = max(0, trainer.max_epochs - trainer.current_epoch - 1)
        left.append(an_epoch - done + (more * an_epoch if more else 0))  # of a stream an_epoch is infinite
    least = min(left, default=float("inf"))
    return None if least == float("inf") else max(0, int(least))


def _steps(trainer: Trainer) -> int | None:
    """Optimizer steps of the whole run at most; None where only the user's code knows, or nobody."""
    module = trainer.lightning_module
    if not module.automatic_optimization:
        return trainer.max_steps if trainer.max_steps >= 0 else None
    an_epoch, found = trainer.num_training_batches, []
    if trainer.max_steps >= 0:
        found.append(trainer.max_steps)
    if trainer.max_epochs is not None and trainer.max_epochs >= 0 and an_epoch != float("inf"):
        found.append(-(-int(an_epoch) // trainer.accumulate_grad_batches) * trainer.max_epochs)
    return min(found, default=None)
