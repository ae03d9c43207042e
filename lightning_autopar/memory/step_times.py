"""Step times: how long runs' steps took beside what was predicted, and the factor that corrects the next prediction.

Values and arithmetic: it reads no file and knows no run. One module's factor is shared by all its plans, so that measuring one of them
doesn't change their order; a plan's own counts where it differs by more than two runs of it do.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

#: A factor stays within these: beyond is another job, or a machine that somebody else kept busy.
LEAST, MOST = 0.5, 2.0
#: Two runs of the same step differ by as much: what a plan's own factor must differ from the module's by, to count.
NOISE = 0.05
#: So many modules must have run before they say something about another one: about all its plans alike, since a machine that was busy
#: would make the engine that happened to run look slower than those that didn't.
_LEAST_MODULES = 3
#: Of one plan's runs the last ones count.
_LAST = 5
#: Smaller corrections aren't worth a sentence, nor a correction.
_WORTH_TELLING = 0.02


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """One run's.

    Args:
        module: under which the cache keeps the module's residuals.
        shape: of its plan, as :func:`lightning_autopar.memory.residuals.plan_shape` has it.
        devices: what each rank's device was.
        rates: by what it was predicted: :attr:`StepTimes.rates`.
        predicted: seconds, uncorrected.
        measured: seconds, of the slowest rank.
        day: when, as "2026-11-21".
    """

    module: str
    shape: str
    devices: tuple[str, ...]
    rates: str
    predicted: float
    measured: float
    day: str

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured / self.predicted

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> StepTime:
        """The record of such values.

        Raises:
            ValueError: if they aren't those of a record.
        """
        try:
            record = cls(**{**data, "devices": tuple(data["devices"])})
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a record of a run's step time: {error}") from error
        texts = (record.module, record.shape, record.rates, record.day, *record.devices)
        if not all(isinstance(text, str) for text in texts) or not all(_is_time(value) for value in (record.predicted, record.measured)):
            raise ValueError("not a record of a run's step time: its values are of other kinds")
        return record


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """What is known of step times on one machine, for one module.

    Args:
        records: of every module, the newest first.
        module: the one that is planned for.
        rates: by what steps are predicted now: a data sheet, or measurements of some day; records of others say nothing.
    """

    records: tuple[StepTime, ...] = ()
    module: str = ""
    rates: str = "data sheet"

    def factor(self, shape: str, devices: Sequence[str]) -> tuple[float, tuple[str, ...]]:
        """By what to multiply a plan's predicted seconds, and a sentence about it where that is worth one.

        Args:
            shape: of the plan.
            devices: what each rank's device is.
        """
        known = [record for record in self.records if record.rates == self.rates and set(record.devices) == set(devices)]
        if not known:
            return 1.0, ()
        ours = [record for record in known if record.module == self.module]
        own = [record.ratio for record in ours if (record.shape, record.devices) == (shape, tuple(devices))][:_LAST]
        found, because = _shared(ours, lambda record: record.shape), "measured runs of this module"
        if found is None:
            enough = len({record.module for record in known}) >= _LEAST_MODULES
            found, because = (_shared(known, lambda record: record.module) if enough else None), "measured runs of other modules"
        if own and (found is None or abs(statistics.median(own) / found - 1) > NOISE):
            found, because = statistics.median(own), "measured runs of this plan"
        factor = 1.0 if found is None else min(MOST, max(LEAST, found))
        if abs(factor - 1) < _WORTH_TELLING:
            return 1.0, ()
        return factor, (f"time corrected ×{factor:.2f}, by {because}",)


def _shared(records: Sequence[StepTime], key: Callable[[StepTime], str]) -> float | None:
    """The median over what the key tells apart, of each the median of its last runs; None where there is nothing."""
    ratios: dict[str, list[float]] = {}
    for record in records:
        ratios.setdefault(key(record), []).append(record.ratio)
    return statistics.median(statistics.median(each[:_LAST]) for each in ratios.values()) if ratios else None


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
