"""Where the ranks of an elastic generation meet: at one boundary between two batches, without a collective.

Shared memory in which the agent asks for something and each rank counts its boundaries. Knows ranks and counts; knows no process, no
trainer and no snapshot.
"""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass
from typing import Literal

#: What the agent may ask for: a snapshot, after which training goes on, or one after which the workers leave.
Ask = Literal["snapshot", "pause"]
_ASKS: tuple[Ask, ...] = ("snapshot", "pause")
_HOLD, _STOP_AT, _ASK, _NUMBER, _FINAL, _NOTED, _TO_BE_SAVED, _FIRST = range(8)
_COUNT, _DONE, _BATCH_NS, _AT_NS, _STEP, _LEFT, _SAVE_NS, _BYTES, _LOSS, _LOSS_STEP, _CELLS = range(11)
#: Longer than a store takes to become visible to another core, by orders of magnitude.
_SETTLE_SECONDS = 0.01
#: A rank's figure that isn't known.
_UNKNOWN = -1


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How a generation comes along, as its rank 0 sees it.

    Args:
        boundaries: how many boundaries it has come to.
        step: the trainer's global step; -1 before the first boundary.
        batches_left: training batches to go; None where that isn't known.
        batch_seconds: the latest time from one boundary to the next.
        save_seconds: what the latest snapshot took; None before there was one.
        at: when it was at its latest boundary, on the host's monotonic clock; None before the first.
    """

    boundaries: int
    step: int
    batches_left: int | None
    batch_seconds: float | None
    save_seconds: float | None
    at: float | None


class Gate:
    """Counts each rank's boundaries, and holds all ranks at the same one.

    As :class:`lightning_autopar.strategies.brake.Brake`: to stop, the agent first raises *hold*, so that ranks wait at their boundaries.
    A rank whose count was ``n`` when the agent read it can't pass boundary ``n + 1`` any more, so the highest count plus one is a boundary
    that nobody has passed and everybody can reach.

    Args:
        world_size: how many ranks there are.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._cells = memoryview(mmap.mmap(-1, 8 * (_FIRST + _CELLS * world_size))).cast("q")
        for rank in range(world_size):
            for cell in (_BATCH_NS, _AT_NS, _STEP, _LEFT, _SAVE_NS, _LOSS_STEP):
                self._cells[self._place(rank, cell)] = _UNKNOWN

    def _place(self, rank: int, cell: int) -> int:
        return _FIRST + _CELLS * rank + cell

    # -- in a worker -------------------------------------------------------------------------------------------------------------------

    def arrive(self, rank: int, *, step: int, batches_left: int | None, in_window: bool) -> Ask | None:
        """This rank is at a boundary; returns what all ranks are to do here, if anything.

        Args:
            step: the trainer's global step.
            batches_left: training batches to go, None where unknown.
            in_window: whether gradients of earlier batches wait for their step here: then nothing is done before it. The same on all ranks.
        """
        cells, now = self._cells, time.monotonic_ns()
        last = cells[self._place(rank, _AT_NS)]
        if last != _UNKNOWN:
            cells[self._place(rank, _BATCH_NS)] = now - last
        cells[self._place(rank, _AT_NS)] = now
        cells[self._place(rank, _STEP)] = step
        cells[self._place(rank, _LEFT)] = _UNKNOWN if batches_left is None else batches_left
        cells[self._place(rank, _COUNT)] += 1
        if not cells[_HOLD]:
            return None
        while cells[_HOLD] and not cells[_STOP_AT]:
            time.sleep(1e-3)
        reached = cells[_HOLD] and cells[self._place(rank, _COUNT)] >= cells[_STOP_AT]
        if not reached or in_window or abs(cells[self._place(rank, _DONE)]) >= cells[_NUMBER]:
            return None
        return _ASKS[cells[_ASK]]

    @property
    def number(self) -> int:
        """Of the latest request, from 1."""
        return int(self._cells[_NUMBER])

    def answer(self, rank: int, *, done: bool, save_seconds: float) -> None:
        """This rank has done what the latest request asks for, or couldn't; what that took is no part of the next batch's time."""
        self._cells[self._place(rank, _SAVE_NS)] = int(save_seconds * 1e9)
        self._cells[self._place(rank, _AT_NS)] = time.monotonic_ns()
        self._cells[self._place(rank, _DONE)] = self.number if done else -self.number

    def tell_bytes(self, rank: int, used_bytes: int) -> None:
        """What this rank's device holds for this run now."""
        self._cells[self._place(rank, _BYTES)] = used_bytes

    def tell_loss(self, rank: int, step: int, loss: float) -> None:
        """The latest loss that was logged."""
        self._cells[self._place(rank, _LOSS)] = struct.unpack("q", struct.pack("d", loss))[0]
        self._cells[self._place(rank, _LOSS_STEP)] = step

    def count(self, rank: int) -> int:
        """How many boundaries a rank has come to."""
        return int(self._cells[self._place(rank, _COUNT)])

    @property
    def noted(self) -> int:
        """Of which boundary rank 0 has left notes, and where: twice its count, plus 0 or 1; 0 of none yet, -1 if it leaves none."""
        return int(self._cells[_NOTED])

    @noted.setter
    def noted(self, value: int) -> None:
        self._cells[_NOTED] = value

    @property
    def to_be_saved(self) -> bool:
        """Whether a rank has failed, so that another one is to save what it has."""
        return bool(self._cells[_TO_BE_SAVED])

    @property
    def final(self) -> bool:
        """Whether a failure ends the run, so that hooks that belong to one are to be run."""
        return bool(self._cells[_FINAL])

    # -- in the agent ------------------------------------------------------------------------------------------------------------------

    @final.setter
    def final(self, value: bool) -> None:
        self._cells[_FINAL] = int(value)

    def have_saved(self) -> None:
        """A rank has failed: whoever can is to save what it has."""
        self._cells[_TO_BE_SAVED] = 1

    def ask(self, what: Ask) -> int:
        """Ask all ranks for something at their next common boundary; returns the request's number."""
        cells = self._cells
        assert not cells[_HOLD], "one request at a time"
        cells[_STOP_AT] = 0
        cells[_ASK] = _ASKS.index(what)
        cells[_NUMBER] += 1
        cells[_HOLD] = 1
        time.sleep(_SETTLE_SECONDS)
        cells[_STOP_AT] = max(cells[self._place(rank, _COUNT)] for rank in range(self._world_size)) + 1
        return self.number

    def answered(self) -> bool | None:
        """Whether every rank has done the latest request, or couldn't; None as long as one hasn't said. Then ranks aren't held any more."""
        cells = self._cells
        answers = [cells[self._place(rank, _DONE)] for rank in range(self._world_size)]
        if any(abs(answer) != self.number for answer in answers):
            return None
        cells[_HOLD] = 0
        return all(answer > 0 for answer in answers)

    def withdraw(self) -> None:
        """The latest request is void: its ranks have ended."""
        self._cells[_HOLD] = 0

    def pace(self) -> Pace:
        """How the generation comes along."""

        def value(cell: int) -> int:
            return int(self._cells[self._place(0, cell)])

        return Pace(
            boundaries=min(int(self._cells[self._place(rank, _COUNT)]) for rank in range(self._world_size)),
            step=value(_STEP),
            batches_left=None if value(_LEFT) == _UNKNOWN else value(_LEFT),
            batch_seconds=None if value(_BATCH_NS) == _UNKNOWN else value(_BATCH_NS) * 1e-9,
            save_seconds=None if value(_SAVE_NS) == _UNKNOWN else value(_SAVE_NS) * 1e-9,
            at=None if value(_AT_NS) == _UNKNOWN else value(_AT_NS) * 1e-9,
        )

    def furthest_step(self) -> int:
        """Where a rank that failed was: none of the others could go past it, but rank 0 may not have come there. -1 before all of them."""
        return max(int(self._cells[self._place(rank, _STEP)]) for rank in range(self._world_size))

    def used_bytes(self) -> list[int]:
        """What each rank's device holds for this run, as it last said."""
        return [int(self._cells[self._place(rank, _BYTES)]) for rank in range(self._world_size)]

    def loss(self) -> tuple[int, float] | None:
        """Rank 0's latest loss with its step, if there is one."""
        step = int(self._cells[self._place(0, _LOSS_STEP)])
        return None if step == _UNKNOWN else (step, struct.unpack("d", struct.pack("q", self._cells[self._place(0, _LOSS)]))[0])
