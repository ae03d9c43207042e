"""The protocol between the agent and the workers of a generation: how all ranks meet at one boundary between two batches, without a
collective.

In shared memory the parent writes requests, and each rank counts its boundaries. There are two kinds: at a boundary of any loop all ranks
leave together; at a boundary of training all ranks of an elastic generation write a snapshot. Files in the generation's folder hold what
numbers can't. Knows ranks and counts; no process, no trainer and no snapshot.
"""

from __future__ import annotations

import mmap
import pickle
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Literal

from lightning_autopar._lightning_compat import SIGTERMException
from lightning_autopar.strategies.base.run_plan import PlanChange, PlanChanges
from lightning_autopar.strategies.base.worker_exception import LEFT_BY_ALL

#: The agent may ask for a snapshot after which training goes on, or for one after which the workers leave.
Ask = Literal["snapshot", "pause"]
_ASKS: tuple[Ask, ...] = ("snapshot", "pause")
_INTERRUPTS: tuple[type[BaseException], ...] = (KeyboardInterrupt, SIGTERMException)
#: The shared numbers of all ranks together, and of each rank: first those of any rendezvous, then those of a kind of rendezvous.
_HOLD, _STOP_AT, _ASK, _NUMBER, _FINAL, _WORDS = range(6)
_COUNT, _BATCH_NS, _AT_NS, _DONE, _STEP, _LEFT, _SAVE_NS, _BYTES, _SAMPLES, _CELLS = range(10)
#: By orders of magnitude longer than a write to memory takes to become visible to another core.
_SETTLE_SECONDS = 0.01
#: Stands for a rank's figure that isn't known.
_UNKNOWN = -1


@dataclass(frozen=True, kw_only=True)
class GenerationProgress:
    """The progress of a generation, as its rank 0 sees it.

    Args:
        boundaries: how many boundaries it has come to.
        step: the trainer's global step; -1 before the first boundary.
        batches_left: training batches to go; None where that isn't known.
        batch_seconds: the latest time from one boundary to the next.
        save_seconds: what the latest snapshot took; None before the first.
        at: when it was at its latest boundary, by the host's monotonic clock; None before the first.
    """

    boundaries: int
    step: int
    batches_left: int | None
    batch_seconds: float | None
    save_seconds: float | None
    at: float | None


class _Rendezvous:
    """Counts each rank's boundaries in memory that parent and workers share, and holds all ranks at the same one.

    To stop, the parent first raises *hold*: from then on a rank that comes to a boundary waits there. A rank whose count was ``n`` when the
    parent read it can't pass boundary ``n + 1`` any more, so the highest count plus one is a boundary that nobody has passed and
    everybody can reach: the ranks behind it go on until they are there.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._cells = memoryview(mmap.mmap(-1, 8 * (_WORDS + _CELLS * world_size))).cast("q")
        for rank in range(world_size):
            for cell in (_BATCH_NS, _AT_NS, _STEP, _LEFT, _SAVE_NS):
                self._cells[self._place(rank, cell)] = _UNKNOWN

    def _place(self, rank: int, cell: int) -> int:
        return _WORDS + _CELLS * rank + cell

    def _everyones(self, cell: int) -> list[int]:
        return [int(self._cells[self._place(rank, cell)]) for rank in range(self._world_size)]

    def _come(self, rank: int) -> bool:
        """This rank is at a boundary; it waits for the parent's decision where all stop. Whether that is here, or was earlier."""
        cells, now = self._cells, time.monotonic_ns()
        last = cells[self._place(rank, _AT_NS)]
        if last != _UNKNOWN:
            cells[self._place(rank, _BATCH_NS)] = now - last
        cells[self._place(rank, _AT_NS)] = now
        cells[self._place(rank, _COUNT)] += 1
        while cells[_HOLD]:  # asked once a turn: the parent may raise it at any moment, before it has said where all stop
            if stop_at := cells[_STOP_AT]:
                return bool(cells[self._place(rank, _COUNT)] >= stop_at)
            time.sleep(1e-3)
        return False

    def _hold(self) -> None:
        """Make all ranks stop at the next boundary that all of them can reach."""
        self._cells[_STOP_AT] = 0
        self._cells[_HOLD] = 1
        time.sleep(_SETTLE_SECONDS)
        self._cells[_STOP_AT] = max(self._everyones(_COUNT)) + 1


class StopRendezvous(_Rendezvous):
    """Makes all ranks leave at the same batch, in any loop. Lightning itself (``received_sigterm``) has a flag in each process, which ranks
    read at different times: one rank leaves while another waits for it in a collective, and a checkpoint written then matches no rank's
    state.
    """

    # -- in a worker -------------------------------------------------------------------------------------------------------------------

    def boundary(self, rank: int) -> None:
        """A batch begins on this rank.

        Raises:
            KeyboardInterrupt, SIGTERMException: if all ranks are to leave here.
        """
        if self._come(rank):
            raise _INTERRUPTS[self._cells[_ASK]]

    # -- in the parent -----------------------------------------------------------------------------------------------------------------

    def stop(self, reason: type[BaseException]) -> None:
        """Ask all ranks to leave at the same boundary, by an exception of this class."""
        self._cells[_ASK] = _INTERRUPTS.index(reason)
        self._hold()

    @property
    def stopping(self) -> bool:
        """Whether the ranks have been asked to leave."""
        return bool(self._cells[_HOLD])

    @property
    def begun(self) -> list[int]:
        """How many batches have begun on each rank."""
        return self._everyones(_COUNT)

    @property
    def longest_seconds(self) -> float:
        """Seconds of the longest of the ranks' latest batches: the next boundary may take that long."""
        return max(0, *self._everyones(_BATCH_NS)) * 1e-9


class ShortageRendezvous:
    """Tells all ranks of a generation that one has run out of memory, and whether all can leave the step in which it did."""

    def __init__(self, world_size: int) -> None:
        self._cells = memoryview(mmap.mmap(-1, 8 * (1 + 3 * world_size))).cast("q")
        self._world_size = world_size

    def enter(self, rank: int, pid: int) -> None:
        """This rank begins, in this process."""
        self._cells[1 + self._world_size + rank] = pid

    def peers(self, rank: int) -> list[int]:
        """The process ids of the other ranks."""
        pids = self._cells[1 + self._world_size : 1 + 2 * self._world_size]
        return [pid for each, pid in enumerate(pids) if each != rank and pid]

    @property
    def noted(self) -> bool:
        """Whether some rank has run out of memory."""
        return bool(self._cells[0])

    def look(self) -> None:
        """A batch begins on this rank, or its optimizer's step does.

        Raises:
            RuntimeError: if some rank has run out of memory.
        """
        if self._cells[0]:
            raise RuntimeError(f"another rank lacks memory, {LEFT_BY_ALL}")

    def note(self) -> None:
        """This rank has run out of memory; to be called before its peers can notice by themselves that it is missing."""
        self._cells[0] = 1

    def hear(self, rank: int) -> None:
        """This rank is going to answer: nothing that it waits in keeps it from leaving."""
        self._cells[1 + 2 * self._world_size + rank] = 1

    def answer(self, rank: int, batch: int | None) -> None:
        """Say which batch's step this rank can leave: its number; None where it can't."""
        self._cells[1 + rank] = -1 if batch is None else 1 + batch

    def leave(self, rank: int, batch: int | None, within_seconds: float, *, hear_seconds: float) -> bool:
        """Whether all ranks can leave the same batch's step; waits for their answers.

        Args:
            within_seconds: how long to wait for the answers.
            hear_seconds: how long to wait until each rank has heard of it, see :meth:`hear`.
        """
        self.answer(rank, batch)
        answers, heard = self._cells[1 : 1 + self._world_size], self._cells[1 + 2 * self._world_size :]
        begun = time.monotonic()
        while not all(answers) and -1 not in answers:
            deaf = not all(map(max, answers, heard))
            if time.monotonic() - begun > (hear_seconds if deaf else within_seconds):
                return False
            time.sleep(1e-3)
        return len(set(answers)) == 1 and answers[0] > 0


class SnapshotRendezvous(_Rendezvous):
    """Makes all ranks of an elastic generation write a snapshot at the same boundary between two training batches."""

    # -- in a worker -------------------------------------------------------------------------------------------------------------------

    def arrive(self, rank: int, *, step: int, batches_left: int | None, in_window: bool) -> Ask | None:
        """This rank is at a boundary; returns what all ranks must do here, if anything.

        Args:
            batches_left: training batches to go, None where unknown.
            in_window: whether gradients of earlier batches wait for their optimizer's step: then nothing is done here. The same on all
                ranks.
        """
        cells = self._cells
        cells[self._place(rank, _STEP)] = step
        cells[self._place(rank, _LEFT)] = _UNKNOWN if batches_left is None else batches_left
        if not self._come(rank) or in_window or abs(cells[self._place(rank, _DONE)]) >= cells[_NUMBER]:
            return None
        return _ASKS[cells[_ASK]]

    @property
    def number(self) -> int:
        """The number of the latest request, from 1."""
        return int(self._cells[_NUMBER])

    def answer(self, rank: int, *, done: bool, save_seconds: float) -> None:
        """This rank has done what the latest request asks for, or couldn't; the time for it doesn't count in the next batch's."""
        self._cells[self._place(rank, _SAVE_NS)] = int(save_seconds * 1e9)
        self._cells[self._place(rank, _AT_NS)] = time.monotonic_ns()
        self._cells[self._place(rank, _DONE)] = self.number if done else -self.number

    def tell_memory(self, rank: int, used_bytes: int, samples_at_once: int | None) -> None:
        """Report the bytes that this rank's device holds for this run now; and how many samples fit at once, where more didn't."""
        self._cells[self._place(rank, _BYTES)] = used_bytes
        self._cells[self._place(rank, _SAMPLES)] = samples_at_once or 0

    @property
    def final(self) -> bool:
        """Whether a failure ends the run, so that the hooks for exceptions must run."""
        return bool(self._cells[_FINAL])

    # -- in the agent ------------------------------------------------------------------------------------------------------------------

    @final.setter
    def final(self, value: bool) -> None:
        self._cells[_FINAL] = int(value)

    def ask(self, what: Ask) -> int:
        """Request something from all ranks at their next common boundary; returns the request's number."""
        cells = self._cells
        assert not cells[_HOLD], "one request at a time"
        cells[_ASK] = _ASKS.index(what)
        cells[_NUMBER] += 1
        self._hold()
        return self.number

    def answered(self) -> bool | None:
        """Whether every rank could do the latest request; None until all have answered. Then ranks are held no longer."""
        cells = self._cells
        answers = self._everyones(_DONE)
        if any(abs(answer) != self.number for answer in answers):
            return None
        cells[_HOLD] = 0
        return all(answer > 0 for answer in answers)

    def withdraw(self) -> None:
        """Cancel the latest request: its ranks have ended."""
        self._cells[_HOLD] = 0

    def progress(self) -> GenerationProgress:
        """The generation's progress."""

        def value(cell: int) -> int:
            return int(self._cells[self._place(0, cell)])

        return GenerationProgress(
            boundaries=min(self._everyones(_COUNT)),
            step=value(_STEP),
            batches_left=None if value(_LEFT) == _UNKNOWN else value(_LEFT),
            batch_seconds=None if value(_BATCH_NS) == _UNKNOWN else value(_BATCH_NS) * 1e-9,
            save_seconds=None if value(_SAVE_NS) == _UNKNOWN else value(_SAVE_NS) * 1e-9,
            at=None if value(_AT_NS) == _UNKNOWN else value(_AT_NS) * 1e-9,
        )

    def furthest_step(self) -> int:
        """The furthest step of any rank: where a failed one was, which none could pass; rank 0 may be behind. -1 before all."""
        return max(self._everyones(_STEP))

    def used_bytes(self) -> list[int]:
        """The bytes that each rank's device holds for this run, by its last report."""
        return self._everyones(_BYTES)

    def samples_at_once(self) -> int | None:
        """How many samples fit at once on every rank; None where no batch ran out of memory."""
        return min((count for count in self._everyones(_SAMPLES) if count), default=None)


_START, _REQUEST, _REFUSAL = "start.pkl", "request", "refusal"
#: In the run's folder: stands for the run's beginning, as a snapshot's folder does for later.
BEGIN = "begin"


@dataclass(kw_only=True)
class GenerationFiles:
    """Where agent and workers of a generation of an elastic run exchange what isn't in the job.

    Args:
        gate: where its generation's ranks meet.
        begin: set when the generation may begin; then the folder holds what it begins with.
        changes: how the run came to this generation's plan; known in a worker once it begins.
    """

    rendezvous: SnapshotRendezvous
    begin: Event
    folder: Path
    changes: PlanChanges = field(default_factory=PlanChanges)

    # -- in the agent ------------------------------------------------------------------------------------------------------------------

    def let_begin(self, snapshot: Path | None, changes: Sequence[PlanChange] = ()) -> None:
        """Let the generation begin, from a snapshot or as the user's call says; ``changes`` are the plan's changes so far."""
        (self.folder / _START).write_bytes(pickle.dumps((snapshot, tuple(changes))))
        self.begin.set()

    def request(self, target: Path) -> None:
        """Say where the next snapshot goes; to be called before the rendezvous asks for it."""
        (self.folder / _REQUEST).write_text(str(target), encoding="utf-8")

    def refusal(self) -> str:
        """Why the latest snapshot couldn't be written."""
        path = self.folder / _REFUSAL
        return path.read_text(encoding="utf-8") if path.is_file() else "no rank said why"

    # -- in a worker -------------------------------------------------------------------------------------------------------------------

    def beginning(self) -> Path | None:
        """Wait until the generation may begin; returns the snapshot to begin from."""
        self.begin.wait()
        snapshot, changes = pickle.loads((self.folder / _START).read_bytes())
        self.changes = PlanChanges(changes=changes, folder=self.folder.parent)
        return None if snapshot is None else Path(snapshot)

    def target(self) -> Path:
        """Where to write the snapshot that the rendezvous asks for."""
        return Path((self.folder / _REQUEST).read_text(encoding="utf-8"))

    def refuse(self, error: BaseException) -> None:
        """Report why a snapshot couldn't be written. If several ranks do, the last report stays."""
        with suppress(OSError):  # this may be the disk that is full
            (self.folder / _REFUSAL).write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
