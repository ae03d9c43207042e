"""ElasticReplan: watches the devices while a run goes on, and says when another plan is worth moving to. It doesn't move anything.

No ``from __future__ import annotations`` here: jsonargparse reads the annotations as objects.
"""

import time
import weakref
from typing import TYPE_CHECKING

from lightning_autopar._lightning import Callback, pl, rank_zero_info
from lightning_autopar.callbacks.device_watch import DeviceLook, Watch
from lightning_autopar.planning.move_verdict import Rules
from lightning_autopar.strategies.base.engine_mixin import EngineMixin
from lightning_autopar.strategies.preparation.decision import MoveRequest
from lightning_autopar.text import is_number

if TYPE_CHECKING:
    from lightning_autopar.strategies.elastic.run_state import RunState


class ElasticReplan(Callback):
    """Watches the devices during ``fit``, and moves the run to a better plan, or off a device on which it can't stay.

    A run whose device is gone, in error, or too full for it leaves at once, to the best plan that fits; where none does it is parked, and
    resumes by itself. It moves of its own accord where that gains more than it costs. Decisions are logged with their reasons, and kept
    with what happened to the devices in ``timeline``. It needs ``Trainer(strategy="autopar")``; under another strategy it only warns.

    Args:
        interval_seconds: How often to look at the devices.
        min_gain: The share of a step's time that another plan must save for the run to move to it of its own accord.
        patience: At how many looks in a row there must be a better plan.
        min_seconds_between_moves: The least time from a move to the next one of the run's own accord; it doubles each time that the run
            goes back to where it was.
        price_factor: How many times its price a move must be expected to save.
        max_overhead: The share of time that planning again may take of a core.

    Raises:
        ValueError: if an argument isn't allowed, with the value, the bound and the remedy.
    """

    def __init__(
        self,
        interval_seconds: float = 5.0,
        min_gain: float = 0.05,
        patience: int = 3,
        min_seconds_between_moves: float = 60.0,
        price_factor: float = 2.0,
        max_overhead: float = 0.005,
    ) -> None:
        _check("interval_seconds", interval_seconds, least=0.01, most=3600, example="5 to look every five seconds")
        _check("min_gain", min_gain, least=0, most=0.99, example="0.05 for five per cent")
        _check("min_seconds_between_moves", min_seconds_between_moves, least=0, most=86400, example="60 for a minute")
        _check("price_factor", price_factor, least=1, most=1000, example="2 for moves that save twice what they cost")
        _check("max_overhead", max_overhead, least=1e-6, most=1, example="0.005 for half a per cent")
        if isinstance(patience, bool) or not isinstance(patience, int) or not 1 <= patience <= 1000:
            raise ValueError(f"patience={patience!r} must be a whole number from 1 to 1000; choose 3 to believe what three looks see")
        self.interval_seconds = float(interval_seconds)
        self.max_overhead = float(max_overhead)
        self.rules = Rules(
            min_gain=float(min_gain),
            price_factor=float(price_factor),
            patience=patience,
            min_seconds=float(min_seconds_between_moves),
        )
        self._said_where = False

    @property
    def timeline(self) -> list[DeviceLook]:
        """What happened to the devices, and what was decided, from the first run under the agent on; only in the main process."""
        return self._watch.timeline

    @property
    def _watch(self) -> Watch:
        """What was seen. It isn't kept in this object, whose attributes are sent between the run's processes."""
        return _WATCHES.setdefault(self, Watch())

    def look(self, run: "RunState", now: float | None = None) -> MoveRequest | None:
        """Look at the devices; returns what the agent should do, None to go on. The agent calls it, in the main process.

        Args:
            run: the run's state; another object means another run.
            now: as ``time.monotonic`` counts; the present unless given.

        Raises:
            ValueError: if the file that ``AUTOPAR_NEIGHBOURS`` names is malformed.
        """
        watch = self._watch
        if watch.run is None or watch.run() is not run:
            watch = _WATCHES[self] = Watch(timeline=watch.timeline, run=run)
        return watch.look(run, time.monotonic() if now is None else now, self.rules, self.max_overhead)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn if nothing will ever call :meth:`look`."""
        if isinstance(trainer.strategy, EngineMixin) or self._said_where:
            return
        self._said_where = True
        name = type(trainer.strategy).__name__
        rank_zero_info(f"ElasticReplan: there is no plan to change, as the strategy is {name}; use Trainer(strategy='autopar')")


def _check(name: str, value: float, *, least: float, most: float, example: str) -> None:
    """A number within its bounds.

    Raises:
        ValueError: if it isn't, with the value, the bounds and an example.
    """
    if not is_number(value) or not least <= value <= most:
        raise ValueError(f"{name}={value!r} must be a number from {least:g} to {most:g}; choose {example}")


#: What each callback has seen in this process.
_WATCHES: weakref.WeakKeyDictionary[ElasticReplan, Watch] = weakref.WeakKeyDictionary()
