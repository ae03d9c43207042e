"""Stops all ranks of a generation at the same batch, without a collective. Knows ranks and counts; knows no process and no trainer."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from typing import Any

from lightning_autopar._lightning_compat import SIGTERMException

_INTERRUPTS: tuple[type[BaseException], ...] = (KeyboardInterrupt, SIGTERMException)
_HOLD, _STOP_AT, _REASON, _FIRST = range(4)
#: Longer than a store takes to become visible to another core, by orders of magnitude.
_SETTLE_SECONDS = 0.01


class Brake:
    """Counts each rank's batches in memory that parent and workers share.

    Lightning's own way (``received_sigterm``) is a flag in each process, read at places that ranks reach at different times: one
    rank leaves while another waits for it in a collective, and a checkpoint written then is no rank's truth.

    To stop, the parent first raises *hold*: from then on a rank that comes to a boundary waits there. A rank whose count was ``n`` when the
    parent read it can't pass boundary ``n + 1`` any more, so the highest count plus one is a boundary that nobody has passed and
    everybody can reach: the ranks behind it go on until they are there.

    Args:
        world_size: how many ranks there are.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._cells = memoryview(mmap.mmap(-1, 8 * (_FIRST + 2 * world_size))).cast("q")
        self._last: float | None = None

    # -- in a worker -------------------------------------------------------------------------------------------------------------------

    def boundary(self, rank: int) -> None:
        """A batch begins on this rank.

        Raises:
            KeyboardInterrupt, SIGTERMException: if all ranks are to leave here.
        """
        cells, now = self._cells, time.monotonic()
        if self._last is not None:
            cells[_FIRST + self._world_size + rank] = int((now - self._last) * 1e6)
        self._last = now
        cells[_FIRST + rank] += 1
        if not cells[_HOLD]:
            return
        while not cells[_STOP_AT]:
            time.sleep(1e-3)
        if cells[_FIRST + rank] >= cells[_STOP_AT]:
            raise _INTERRUPTS[cells[_REASON]]

    def watch(self, engine: Any, rank: int) -> None:
        """Make each of an engine's batches a boundary: Lightning calls ``batch_to_device`` once for each, in every loop."""
        original: Callable[..., Any] = engine.batch_to_device

        def batch_to_device(*args: Any, **kwargs: Any) -> Any:
            self.boundary(rank)
            return original(*args, **kwargs)

        engine.batch_to_device = batch_to_device

    # -- in the parent -----------------------------------------------------------------------------------------------------------------

    def pull(self, reason: type[BaseException]) -> None:
        """Ask all ranks to leave at the same boundary, by an exception of this class."""
        cells = self._cells
        cells[_REASON] = _INTERRUPTS.index(reason)
        cells[_HOLD] = 1
        time.sleep(_SETTLE_SECONDS)
        cells[_STOP_AT] = max(cells[_FIRST : _FIRST + self._world_size]) + 1

    @property
    def pulled(self) -> bool:
        """Whether the ranks have been asked to leave."""
        return bool(self._cells[_HOLD])

    @property
    def batches(self) -> int:
        """How many batches have begun, of all ranks together."""
        return sum(self._cells[_FIRST : _FIRST + self._world_size])

    @property
    def longest_seconds(self) -> float:
        """The longest of the ranks' latest batches: how far away a boundary may be."""
        return max(self._cells[_FIRST + self._world_size :]) * 1e-6
