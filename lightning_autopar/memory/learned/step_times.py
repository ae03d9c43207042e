"""How long steps of earlier runs took beside what was predicted, the factors that correct the next prediction, and the file of these
records.

Computing and links are corrected, by the same factors for all plans: a run says as much about plans that never ran as about its own, so
that having run makes no plan look slower or faster. Runs that somebody disturbed aren't kept (:func:`disturbance`). There is one JSON file
for each machine and set of versions.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_autopar.devices.host import machine_key
from lightning_autopar.memory.learned import cache_files

#: The limits of a factor: beyond them it was another job, or others kept the machine busy.
LEAST, MOST = 0.5, 2.0
#: How many modules must have run before they count for another one.
_LEAST_MODULES = 3
#: How many of a plan's last runs are compared; the fastest counts, as a disturbance makes a run slower, never faster.
_LAST = 5
#: The weight that keeps the two factors together: a single run, or runs of one kind, don't show their difference.
_TOGETHER = 0.05
#: Smaller corrections aren't worth a sentence, nor a correction.
_WORTH_TELLING = 0.02
#: A run is kept if its steps differ by no more than this (quartiles over the median), and its threads wait for a core for no larger share
#: of their time than this, beyond what its own ranks take from each other.
_MOST_SPREAD, _MOST_WAITED = 0.3, 0.15
#: A device that others keep busier than this is slower by an unknown amount.
_MOST_BUSY = 0.05


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """One run's.

    Args:
        module: under which the cache keeps the module's residuals.
        shape: of its plan, as :func:`lightning_autopar.memory.learned.corrections.plan_shape` has it.
        devices: what each rank's device was.
        rates: by what it was predicted: :attr:`StepTimes.rates`.
        predicted: seconds, uncorrected.
        links: the part of those that is spent on links, between devices or to the host.
        measured: seconds, of the slowest rank.
        day: when, as "2026-11-21".
    """

    module: str
    shape: str
    devices: tuple[str, ...]
    rates: str
    predicted: float
    links: float
    measured: float
    day: str

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured / self.predicted

    @classmethod
    def from_dict(cls, data: Any) -> StepTime:
        """The record of such values.

        Raises:
            ValueError: if they aren't those of a record.
        """
        record = cache_files.from_json(cls, data)
        if not all(0 < value < math.inf for value in (record.predicted, record.measured)) or not 0 <= record.links <= record.predicted:
            raise ValueError("not a record of a run's step time: its seconds can't be")
        return record


@dataclass(frozen=True, kw_only=True)
class TimeFactors:
    """By what all plans' predicted seconds are to be multiplied.

    Args:
        compute: what devices and their hosts do.
        links: what goes over links, between devices or to the host.
        told: a sentence about it, where it is worth one.
    """

    compute: float = 1.0
    links: float = 1.0
    told: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """What is known of step times on one machine, for one module.

    Args:
        records: of every module, the newest first.
        module: the one that is planned for.
        rates: by what steps are predicted now: a data sheet, or measurements of some day; records with other rates don't count.
    """

    records: tuple[StepTime, ...] = ()
    module: str = ""
    rates: str = "data sheet"

    def factors(self, devices: Collection[str]) -> TimeFactors:
        """The factors for plans on these devices, from this module's runs, or else from several other modules' runs.

        Args:
            devices: what the devices are that are planned for, each name once.
        """
        there = set(devices)
        known = [record for record in self.records if record.rates == self.rates and there.issuperset(record.devices)]
        ours = [record for record in known if record.module == self.module]
        enough = len({record.module for record in known}) >= _LEAST_MODULES
        if not ours and not enough:
            return TimeFactors()
        compute, links = (min(MOST, max(LEAST, factor)) for factor in _fitted(ours or known))
        if max(abs(compute - 1), abs(links - 1)) < _WORTH_TELLING:
            return TimeFactors()
        because = f"by measured runs of {'this module' if ours else 'other modules'}"
        if abs(compute - links) < _WORTH_TELLING:
            words = f"time corrected ×{compute:.2f}, {because}"
        else:
            words = f"time corrected ×{compute:.2f} for computing and ×{links:.2f} for links, {because}"
        return TimeFactors(compute=compute, links=links, told=(words,))


def disturbance(*, spread: float | None, waited: float | None, own_wait: float = 0.0, busy: float = 0.0) -> str | None:
    """Why a run's step time doesn't count for the next run; None where it does. If something isn't known, the time doesn't count.

    Args:
        spread: of the steps' seconds: the middle half's range over the median; None where there were too few steps.
        waited: the share of their time that the run's threads were ready and had no core; None where the system doesn't tell.
        own_wait: the share for which they wait for each other, as there are more of them than cores.
        busy: the share of its busiest device that others used when the run was planned, 0 to 1.
    """
    if spread is None:
        return "it had too few steps"
    if waited is None:
        return "the system doesn't tell whether others kept the machine busy"
    if waited > own_wait + _MOST_WAITED:
        return f"others kept the machine busy: it waited for a core {waited * 100:.0f} % of its time"
    if spread > _MOST_SPREAD:
        return f"its steps took very different times: the middle half of them within {spread * 100:.0f} % of the median"
    if busy > _MOST_BUSY:
        return f"others kept its devices busy: {busy * 100:.0f} %"
    return None


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The figures of one plan's fastest run: predicted seconds of computing and of links over measured ones, and its weight."""

    compute: float
    links: float
    weight: float
    group: object


def _fitted(records: Sequence[StepTime]) -> tuple[float, float]:
    """The factors of computing and of links that bring predictions closest to the measurements. The difference between the two factors is
    at most the one that remains when any one plan's runs (or, with several modules, any one module's) are left out: so a single plan that
    was disturbed unnoticed can't shift the links' factor.
    """
    runs = _runs(records)
    groups = {run.group for run in runs}
    without = [_links_over_compute([run for run in runs if run.group != group]) for group in groups]
    slower = min(without) if min(without) > 1 else max(without) if max(without) < 1 else 1.0
    took = [(run.weight, run.compute + slower * run.links) for run in runs]
    compute = sum(weight * share for weight, share in took) / sum(weight * share * share for weight, share in took)
    return compute, compute * slower


def _runs(records: Sequence[StepTime]) -> list[_Run]:
    """The fastest of each plan's last runs; with several modules, each module counts once."""
    plans: dict[tuple[str, str, tuple[str, ...]], list[StepTime]] = {}
    for record in records:
        plans.setdefault((record.module, record.shape, record.devices), []).append(record)
    of_module = Counter(module for module, *_ in plans)
    found = []
    for plan, each in plans.items():
        fastest = min(each[:_LAST], key=lambda record: record.ratio)
        several = len(of_module) > 1
        found.append(
            _Run(
                compute=(fastest.predicted - fastest.links) / fastest.measured,
                links=fastest.links / fastest.measured,
                weight=1 / of_module[fastest.module] if several else 1.0,
                group=fastest.module if several else plan,
            )
        )
    return found


def _links_over_compute(runs: Sequence[_Run]) -> float:
    """The ratio of the links' factor to computing's, by least squares of relative errors, with a weight that keeps the two together."""
    # The normal equations of sum w (c computing + l links - 1)^2 + together (c - l)^2, in c and l.
    aa = _TOGETHER + sum(run.weight * run.compute**2 for run in runs)
    ab = -_TOGETHER + sum(run.weight * run.compute * run.links for run in runs)
    bb = _TOGETHER + sum(run.weight * run.links**2 for run in runs)
    a, b = sum(run.weight * run.compute for run in runs), sum(run.weight * run.links for run in runs)
    compute, links = a * bb - b * ab, b * aa - a * ab
    if not runs or compute <= 0 or links <= 0:
        return 1.0
    return min(MOST, max(LEAST, links / compute))


_KIND = "step_times"
#: The most records of a module, and of all modules.
_MOST_OF_ONE, _MOST = 16, 512


def load_step_times(host_threads: int) -> tuple[StepTime, ...]:
    """Every record of this machine and these versions, the newest first; none where they can't be read."""
    return cache_files.read_records(_path(host_threads), StepTime.from_dict, "how long earlier runs' steps took")


def add_step_time(host_threads: int, record: StepTime) -> None:
    """Add a record at the front; the oldest of its module, and the oldest of all, are dropped."""
    path = _path(host_threads)
    if path is not None:
        kept = list(_bounded((record, *load_step_times(host_threads))))
        cache_files.write_json(path, {"records": [dataclasses.asdict(each) for each in kept[:_MOST]]})


def _bounded(records: Iterable[StepTime]) -> Iterable[StepTime]:
    counts: dict[str, int] = {}
    for record in records:
        counts[record.module] = counts.get(record.module, 0) + 1
        if counts[record.module] <= _MOST_OF_ONE:
            yield record


def _path(host_threads: int) -> Path | None:
    folder = cache_files.cache_folder(_KIND)
    return None if folder is None else folder / f"{machine_key(host_threads)}.json"
