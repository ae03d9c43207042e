"""What happened to a run over time, as values, with what every drawing of it asks of them: names, units, and what of much is shown.

Draws nothing; the agent's diary fills it.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_autopar.units import format_seconds

if TYPE_CHECKING:
    from lightning_autopar.planning.picture import Picture

#: More marks or losses can't be read; the rest of the marks is counted in words.
MOST_WORDS, _MOST_POINTS = 14, 4000
#: Of losses whose ends lie further apart, a linear axis shows only the first.
_LOG_RATIO = 50.0
_LINE_CHARACTERS, _DEVICE_CHARACTERS = 150, 12


class DeviceBytes(NamedTuple):
    """Memory of a device at a moment; what is neither is free."""

    ours: int
    others: int
    total: int


class LossPoint(NamedTuple):
    """A loss as it was logged."""

    at_seconds: float
    step: int
    value: float


@dataclass(frozen=True, kw_only=True)
class PlanSpan:
    """A time in which a plan ran, or the run was parked.

    Args:
        start_seconds: since the run began.
        end_seconds: the same.
        title: the plan in words; ``"parked"``.
        devices: it ran on; none while parked.
        predicted_bytes: what was predicted to be taken of each.
    """

    start_seconds: float
    end_seconds: float
    title: str
    devices: tuple[str, ...] = ()
    predicted_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Something that happened.

    Args:
        at_seconds: since the run began.
        kind: in a word: ``"move"``, ``"park"``, ``"resume"``, ``"failure"``, …
        words: why, as a sentence.
    """

    at_seconds: float
    kind: str
    words: str


@dataclass(frozen=True, kw_only=True)
class MemorySample:
    """The devices' memory at a moment; it holds until the next sample. A device that isn't in it wasn't there."""

    at_seconds: float
    devices: Mapping[str, DeviceBytes]


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """What happened to a run. Times are in seconds since it began.

    Args:
        title: what ran.
        spans: plans and times of being parked, at least one; those between two of them were spent moving.
        marks: moves, parks, failures, with their reasons.
        memory: samples in the order of time.
        losses: in the order of time; after a step that was done again, there are two of it.

    Raises:
        ValueError: if a span ends before it begins, or a time isn't finite.
    """

    title: str = ""
    spans: tuple[PlanSpan, ...] = ()
    marks: tuple[Mark, ...] = ()
    memory: tuple[MemorySample, ...] = ()
    losses: tuple[LossPoint, ...] = ()

    def __post_init__(self) -> None:
        for span in self.spans:
            if not -math.inf < span.start_seconds <= span.end_seconds < math.inf:
                raise ValueError(f"the plan {span.title!r} can't have run from {span.start_seconds} s to {span.end_seconds} s")
        moments = [
            *(mark.at_seconds for mark in self.marks),
            *(each.at_seconds for each in self.memory),
            *(each[0] for each in self.losses),
        ]
        if not all(map(math.isfinite, moments)):
            raise ValueError("a run's history holds a time that isn't finite; times are seconds since the run began")

    def to_html(self) -> str:
        """One HTML page that needs nothing but itself, readable in light and dark.

        Raises:
            ValueError: if no plan ran.
        """
        from lightning_autopar.planning.run_page import run_page

        return str(run_page(self))

    def picture(self) -> Picture:
        """What is drawn on the page, as SVG, which a notebook shows as a cell's last value.

        Raises:
            ValueError: if no plan ran.
        """
        from lightning_autopar.planning.run_page import run_picture

        return run_picture(self)

    def save_picture(self, path: str | Path) -> None:
        """Write :meth:`picture` (``.svg``) or :meth:`to_html` (``.html``) to a file, as its ending says.

        Raises:
            ValueError: if no plan ran, the ending is another one, or the file can't be written.
        """
        from lightning_autopar.planning.picture import save

        save(path, picture=self.picture, page=self.to_html)

    def _repr_html_(self) -> str | None:
        """What a notebook shows; nothing of its own where no plan ran."""
        from lightning_autopar.planning.run_page import run_fragment

        return str(run_fragment(self)) if self.spans else None

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What IPython shows in a terminal, and keeps beside the page in a notebook: a line for the run, and one for each mark."""
        printer.text("\n".join([title_of(self), *mark_lines(self.marks)]))

    def end_seconds(self) -> float:
        """When the last thing in it happened."""
        moments = [*(span.end_seconds for span in self.spans), *(mark.at_seconds for mark in self.marks)]
        return max([*moments, *(sample.at_seconds for sample in self.memory), *(point[0] for point in self.losses)], default=0.0)


def title_of(history: RunHistory) -> str:
    """What ran, for how long, and how often it moved."""
    kinds = [mark.kind for mark in history.marks]
    counts = [f"{kinds.count(kind)} {kind}{'s' if kinds.count(kind) > 1 else ''}" for kind in dict.fromkeys(kinds)]
    scale, unit = time_unit(history.end_seconds())
    return ", ".join([history.title or "a run", f"{history.end_seconds() / scale:.3g} {unit}", *counts])


def time_unit(end_seconds: float) -> tuple[float, str]:
    """Seconds of the unit in which the axis reads well."""
    return (1.0, "seconds") if end_seconds < 300 else (60.0, "minutes") if end_seconds < 3 * 3600 else (3600.0, "hours")


def devices_of(history: RunHistory) -> list[str]:
    """Those with a sample, the ones that the run was on first."""
    sampled = dict.fromkeys(device for sample in history.memory for device in sample.devices)
    used = {device for span in history.spans for device in span.devices}
    return sorted(sampled, key=lambda device: device not in used)


def short_name(device: str) -> str:
    """So much of a UUID as tells the devices of a host apart."""
    return device[:_DEVICE_CHARACTERS] if device.startswith(("GPU-", "MIG-")) else device


def is_steep(values: Sequence[float]) -> bool:
    """Whether a linear axis would show only the first of these losses, which are finite."""
    return min(values) > 0 and max(values) / min(values) > _LOG_RATIO


def thinned(points: Sequence[LossPoint]) -> Sequence[LossPoint]:
    """Of very many points the lowest and the highest of each part, and every one that isn't a number, so that no peak is lost."""
    if len(points) <= _MOST_POINTS:
        return points
    size = math.ceil(2 * len(points) / _MOST_POINTS)
    kept: list[LossPoint] = []
    for first in range(0, len(points), size):
        part = points[first : first + size]
        values = [index for index, point in enumerate(part) if math.isfinite(point.value)]
        chosen = {index for index, point in enumerate(part) if not math.isfinite(point.value)}
        if values:
            chosen |= {min(values, key=lambda index: part[index].value), max(values, key=lambda index: part[index].value)}
        kept += [part[index] for index in sorted(chosen)]
    return kept


def mark_levels(marks: Sequence[Mark], apart_seconds: float, levels: int) -> list[int | None]:
    """How high above the plans each mark's number stands, so that neighbours don't cover each other; None where there is no room.

    Args:
        marks: in the order of time.
        apart_seconds: so far apart two numbers of a level must be.
        levels: how many there are.
    """
    taken = [-math.inf] * levels
    found: list[int | None] = []
    for mark in marks:
        level = next((level for level in range(levels) if mark.at_seconds - taken[level] >= apart_seconds), None)
        if level is not None:
            taken[level] = mark.at_seconds
        found.append(level)
    return found


def mark_lines(marks: Sequence[Mark]) -> list[str]:
    """What the numbers mean, a line or more each."""
    lines = []
    for number, mark in enumerate(marks[:MOST_WORDS], start=1):
        words = f"{number}  at {format_seconds(mark.at_seconds)}, {mark.kind}: {mark.words}"
        lines += textwrap.wrap(words, _LINE_CHARACTERS, subsequent_indent="    ")
    if len(marks) > MOST_WORDS:
        lines.append(f"and {len(marks) - MOST_WORDS} more")
    return lines
