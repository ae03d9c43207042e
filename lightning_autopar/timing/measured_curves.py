"""Curves: measured seconds of single operations by their size, and the file that keeps them, one for each machine and set of versions.

Values and interpolation: it knows no operation and no device, measures nothing and imports no torch. A file that can't be read is left out
with a warning; one that can't be written costs a run nothing.
"""

from __future__ import annotations

import datetime
import logging
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_autopar.devices.host import machine_identity, machine_key
from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.memory.learned.cache_files import cache_folder, from_json, read_json, write_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Seconds of one thing on one subject, at several sizes.

    Args:
        subject: whose it is: :func:`lightning_autopar.timing.measured_rates.device_key` of a device, of a group of them, or ``"host"``.
        thing: what was measured: an operation's name, ``"matmul/64"``, a collective, ``"issue/forward"``, …
        dtype: in which; empty where that means nothing.
        ranks: how many ranks did it at once on this host.
        sizes: ascending: bytes, FLOPs or elements, as the thing has it.
        seconds: of one run at each size.

    Raises:
        ValueError: if sizes and seconds aren't as many positive numbers, in order.
    """

    subject: str
    thing: str
    dtype: str = ""
    ranks: int = 1
    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.seconds):
            raise ValueError(
                f"a curve needs as many seconds as sizes and at least one, but {self.thing!r} has {self.sizes!r}, {self.seconds!r}"
            )
        if any(not _is_positive(value) for value in (*self.sizes, *self.seconds)):
            raise ValueError(f"a curve's values are positive numbers, but {self.thing!r} has {self.sizes!r}, {self.seconds!r}")
        if self.ranks < 1:
            raise ValueError(f"a curve is measured by at least one rank, but {self.thing!r} by {self.ranks!r}")
        if any(a >= b for a, b in zip(self.sizes, self.sizes[1:], strict=False)):
            raise ValueError(f"a curve's sizes ascend, but those of {self.thing!r} are {self.sizes!r}")

    @property
    def key(self) -> tuple[str, str, str]:
        """The curve's key, without the number of ranks."""
        return self.subject, self.thing, self.dtype

    def at(self, size: float) -> float:
        """Seconds at a size: linear between the logarithms; below the smallest size its seconds, beyond the largest its rate.

        Args:
            size: positive, or 0 for the smallest measured one.
        """
        sizes, seconds = self.sizes, self.seconds
        if size <= sizes[0]:
            return seconds[0]
        if size >= sizes[-1]:
            return seconds[-1] * size / sizes[-1]
        index = bisect_right(sizes, size)
        below, above = sizes[index - 1], sizes[index]
        part = math.log(size / below) / math.log(above / below)
        return float(seconds[index - 1] * (seconds[index] / seconds[index - 1]) ** part)

    def line(self, size: float) -> float:
        """As :meth:`at`; beyond the largest size along the line through the last two points, which needn't begin at zero."""
        if size <= self.sizes[-1] or len(self.sizes) == 1:
            return self.at(size)
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.sizes[-1] - self.sizes[-2])
        return self.seconds[-1] + max(0.0, slope) * (size - self.sizes[-1])

    def rate(self, size: float) -> float:
        """Size a second at a size; below the smallest and beyond the largest, their rates."""
        nearest = min(max(size, self.sizes[0]), self.sizes[-1])
        return nearest / self.at(nearest)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Everything that was measured of a machine.

    Args:
        curves: by :attr:`Curve.key`, and of each by the number of ranks.
        day: when the newest of them was measured, as ``"2026-11-21"``; empty where there is none.
        failures: by the name of what couldn't be measured, the day of the attempt.
    """

    curves: Mapping[tuple[str, str, str], Mapping[int, Curve]] = field(default_factory=dict)
    day: str = ""
    took_seconds: float = 0.0
    failures: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.curves)

    def ranks_of(self, subject: str, thing: str) -> tuple[int, ...]:
        """The numbers of ranks at which a thing was measured on a subject, in any dtype."""
        found = {ranks for (whose, what, _), by_ranks in self.curves.items() if (whose, what) == (subject, thing) for ranks in by_ranks}
        return tuple(sorted(found))

    def measured(self, subject: str) -> bool:
        """Whether anything was measured of a subject."""
        return any(whose == subject for whose, _, _ in self.curves)

    def all(self) -> tuple[Curve, ...]:
        """Every curve, in order."""
        return tuple(by_ranks[ranks] for _, by_ranks in sorted(self.curves.items()) for ranks in sorted(by_ranks))

    def with_curves(self, curves: Iterable[Curve], *, day: str, took_seconds: float) -> Calibration:
        """The calibration with these curves in place of those of the same things."""
        merged = {key: dict(by_ranks) for key, by_ranks in self.curves.items()}
        for curve in curves:
            merged.setdefault(curve.key, {})[curve.ranks] = curve
        return replace(self, curves=merged, day=day, took_seconds=took_seconds)

    def with_failures(self, failures: Mapping[str, str]) -> Calibration:
        """The calibration with these failures added."""
        return replace(self, failures={**self.failures, **failures})

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "day": self.day,
            "took_seconds": self.took_seconds,
            "curves": [asdict(curve) for curve in self.all()],
            "failures": dict(self.failures),
        }

    @classmethod
    def from_dict(cls, data: Any) -> Calibration:
        """The calibration of such values.

        Raises:
            ValueError: if they aren't those of a calibration.
        """
        try:
            curves = [from_json(Curve, each) for each in data["curves"]]
            day, took_seconds = data["day"], data["took_seconds"]
            failures = {name: datetime.date.fromisoformat(each).isoformat() for name, each in data.get("failures", {}).items()}
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"not a calibration: {error}") from error
        if not isinstance(day, str) or isinstance(took_seconds, bool) or not isinstance(took_seconds, (int, float)):
            raise ValueError("not a calibration: its values are of other kinds")
        return cls(failures=failures).with_curves(curves, day=day, took_seconds=float(took_seconds))


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0


log = logging.getLogger(__name__)

_KIND = "rates"


def cache_file(inventory: Inventory) -> Path | None:
    """The file of this machine's rates; None if nothing is kept."""
    folder = cache_folder(_KIND)
    return None if folder is None else folder / f"{machine_key(inventory.host_threads)}.json"


def load_calibration(inventory: Inventory) -> Calibration:
    """What was measured on this machine with these versions; empty if nothing was, or it can't be read."""
    path = cache_file(inventory)
    try:
        data = None if path is None else read_json(path)
        if data is None:
            return Calibration()
        if not isinstance(data, dict):
            raise ValueError("it holds no object")
        return Calibration.from_dict(data.get("calibration"))
    except (OSError, ValueError, RecursionError) as error:
        log.warning("autopar: this machine's measured rates are left out: %s can't be read (%s)", path, error)
        return Calibration()


def keep_calibration(inventory: Inventory, calibration: Calibration) -> None:
    """Replace this machine's file."""
    path = cache_file(inventory)
    if path is not None:
        write_json(path, {"machine": machine_identity(inventory.host_threads), "calibration": calibration.to_dict()})
