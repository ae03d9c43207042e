"""What happened to a run over time: as values, and as an HTML page or a picture of its loss, each device's memory, its plans and its moves.

The agent's recorder fills the values. The page knows only what a :class:`lightning_autopar.report.run_history.RunHistory` says.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lightning_autopar.report.page.drawing import Figure, Row, axis
from lightning_autopar.report.page.markup import Html, element, fragment, page, rect, share, text
from lightning_autopar.report.page.style import PLANS
from lightning_autopar.report.page.svg_file import Picture, picture_of
from lightning_autopar.text import format_bytes, format_seconds

#: The most marks and losses that can be read; further marks are only counted.
MOST_WORDS, _MOST_POINTS = 14, 4000
#: If losses differ by a larger factor, a linear axis shows only the first ones.
_LOG_RATIO = 50.0
_LINE_CHARACTERS, _DEVICE_CHARACTERS = 150, 12


class MemoryUse(NamedTuple):
    """Memory of a device at a moment: this run's and others'; the rest is free."""

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
        end_seconds: the same; infinite while it lasts.
        title: the plan in words; ``"parked"``.
        devices: it ran on; none while parked.
        predicted_bytes: what was predicted to be taken of each.
        reason: why it began.
        pause_seconds: from the last batch before it to its first; None where there was none before.
    """

    start_seconds: float
    end_seconds: float = math.inf
    title: str
    devices: tuple[str, ...] = ()
    predicted_bytes: Mapping[str, int] = field(default_factory=dict)
    reason: str = ""
    pause_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunMark:
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
    """The devices' memory at a moment, valid until the next sample. A device that isn't in it was missing."""

    at_seconds: float
    devices: Mapping[str, MemoryUse]


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """What happened to a run. Times are in seconds since it began.

    Args:
        title: what ran.
        spans: plans and times of being parked, at least one; those between two of them were spent moving.
        marks: moves, parks, failures, with their reasons.
        memory: samples in the order of time.
        losses: in the order of time; a step that was repeated has two.

    Raises:
        ValueError: if a span ends before it begins, or a time isn't finite.
    """

    title: str = ""
    spans: tuple[PlanSpan, ...] = ()
    marks: tuple[RunMark, ...] = ()
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
        """One HTML page without external files, readable in light and dark.

        Raises:
            ValueError: if no plan ran.
        """
        return str(page(f"{self.title or 'a run'} · lightning-autopar", _body(self)))

    def picture(self) -> Picture:
        """The page's drawings as SVG, which a notebook shows as a cell's last value.

        Raises:
            ValueError: if no plan ran.
        """
        return run_picture(self)

    def save_picture(self, path: str | Path) -> None:
        """Write :meth:`picture` (``.svg``) or :meth:`to_html` (``.html``) to a file, as its ending says.

        Raises:
            ValueError: if no plan ran, the ending is another one, or the file can't be written.
        """
        from lightning_autopar.report.page.svg_file import save

        save(path, picture=self.picture, page=self.to_html)

    def _repr_html_(self) -> str | None:
        """For a notebook; None where no plan ran."""
        return str(fragment(_body(self))) if self.spans else None

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """For IPython in a terminal, and stored with the page in a notebook: a line for the run, and one for each mark."""
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
    """The seconds of the axis' unit."""
    return (1.0, "seconds") if end_seconds < 300 else (60.0, "minutes") if end_seconds < 3 * 3600 else (3600.0, "hours")


def devices_of(history: RunHistory) -> list[str]:
    """The devices with a sample, those of the run first."""
    sampled = dict.fromkeys(device for sample in history.memory for device in sample.devices)
    used = {device for span in history.spans for device in span.devices}
    return sorted(sampled, key=lambda device: device not in used)


def short_name(device: str) -> str:
    """The part of a UUID that tells a host's devices apart."""
    return device[:_DEVICE_CHARACTERS] if device.startswith(("GPU-", "MIG-")) else device


def thinned(points: Sequence[LossPoint]) -> Sequence[LossPoint]:
    """If there are very many points, the lowest and the highest of each part, and all that aren't numbers, so that no peak is lost."""
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


def mark_levels(marks: Sequence[RunMark], apart_seconds: float, levels: int) -> list[int | None]:
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


def mark_lines(marks: Sequence[RunMark]) -> list[str]:
    """The marks' texts with their numbers, one or more lines each."""
    lines = []
    for number, mark in enumerate(marks[:MOST_WORDS], start=1):
        words = f"{number}  at {format_seconds(mark.at_seconds)}, {mark.kind}: {mark.words}"
        lines += textwrap.wrap(words, _LINE_CHARACTERS, subsequent_indent="    ")
    if len(marks) > MOST_WORDS:
        lines.append(f"and {len(marks) - MOST_WORDS} more")
    return lines


_LOSS_PIXELS, _MEMORY_PIXELS, _PLAN_PIXELS, _LEVEL_PIXELS = 150, 46, 34, 15
_MOST_DEVICES, _MOST_MARKS = 16, 200
#: The width of the grid on which paths are drawn, which is stretched to the available width.
_GRID, _LEAST_GRID = 2000, 1.5
#: The share of the width of a character on a wide page, and of a mark's number on every page.
_CHARACTER_SHARE, _NUMBER_SHARE, _LEVELS = 0.0075, 0.035, 3


def run_picture(history: RunHistory) -> Picture:
    """The page's drawings, as one SVG.

    Raises:
        ValueError: if the history is empty.
    """
    _check(history)
    lines = tuple(mark_lines(history.marks))
    return picture_of(title_of(history), [_over_time(history), Figure(title="Plans", legend=_plan_colors(history), notes=lines)])


class _Time:
    """The axis that all rows share."""

    def __init__(self, history: RunHistory) -> None:
        self.start = min(0.0, *(span.start_seconds for span in history.spans))
        self.end = max(history.end_seconds(), self.start + 1e-9)
        self.length = self.end - self.start

    def at(self, seconds: float) -> str:
        """In per cent."""
        return share(seconds - self.start, self.length)

    def grid(self, seconds: float) -> float:
        """In units of a path."""
        return round(_GRID * (seconds - self.start) / self.length, 1)


def _check(history: RunHistory) -> None:
    if not history.spans:
        raise ValueError("there is nothing to draw: the run's history has no plan that ran; draw it after the run began")


def _body(history: RunHistory) -> list[Html]:
    _check(history)
    return [_head(history), _over_time(history).html(), Figure(title="Plans", legend=_plan_colors(history)).html("h3"), *_told(history)]


def _over_time(history: RunHistory) -> Figure:
    """The rows, from the loss to the plans."""
    time = _Time(history)
    devices = devices_of(history)
    rows = [_loss(history, time)] if history.losses else []
    rows += [_memory(device, history, time) for device in devices[:_MOST_DEVICES]]
    dotted = "The dotted line is what was predicted. " if any(span.predicted_bytes for span in history.spans) else ""
    numbered = "Upright lines are what happened, told below by their numbers." if history.marks else ""
    more = len(devices) - _MOST_DEVICES
    scale, unit = time_unit(time.end)
    return Figure(
        title="Over time",
        caption=f"{dotted}{numbered}",
        legend=tuple(_meanings(history)),
        rows=(*rows, _plans(history, time)),
        axis=axis(time.end / scale, unit, start=time.start / scale),
        notes=(f"{more} more devices aren't shown.",) if more > 0 else (),
    )


def _head(history: RunHistory) -> Html:
    """What ran, for how long, and how often it moved."""
    kinds = [mark.kind for mark in history.marks]
    tiles: list[tuple[str, ...]] = [("it ran for", format_seconds(history.end_seconds()))]
    points = [LossPoint(*point) for point in history.losses]
    if points:
        tiles.append(("steps", f"{min(point.step for point in points):,} to {max(point.step for point in points):,}"))
        finite = [point.value for point in points if math.isfinite(point.value)]
        if finite:
            tiles.append(("loss", f"{finite[-1]:.4g}", element("span", f"{finite[0]:.4g} at first")))
        if len(finite) < len(points):
            tiles.append(("losses that aren't finite", f"{len(points) - len(finite):,}"))
    tiles += [(f"{kind}s" if kinds.count(kind) > 1 else kind, f"{kinds.count(kind):,}") for kind in dict.fromkeys(kinds)]
    tiles.append(("plans", f"{len({span.title for span in history.spans if span.devices}):,}"))
    figures = [element("div", element("dt", name), element("dd", *words)) for name, *words in tiles]
    return element(
        "header", element("p", "A run", class_="eyebrow"), element("h1", history.title or "a run"), element("dl", *figures, class_="tiles")
    )


def _meanings(history: RunHistory) -> list[tuple[str, str]]:
    """The colours of memory."""
    found = [("c-ours", "taken by this run"), ("c-others", "taken by others")] if history.memory else []
    devices = devices_of(history)
    if any(device not in sample.devices for sample in history.memory for device in devices):
        found.append(("hatch", "not there"))
    elif any(not span.devices for span in history.spans):
        found.append(("hatch", "parked"))
    return found


def _stretched(height: float, *children: Html) -> Html:
    """Paths on the grid, stretched to the drawing's width; their lines keep their width."""
    return element("svg", *children, width="100%", height=height, viewBox=f"0 0 {_GRID} {height:g}", preserveAspectRatio="none")


def _moments(history: RunHistory, time: _Time, height: float, top: float = 0) -> list[Html]:
    """An upright line for each mark."""
    return [
        element("line", class_=f"moment {'failed' if mark.kind == 'failure' else ''}".strip(), x1=at, x2=at, y1=top, y2=height)
        for mark in history.marks
        if (at := time.at(mark.at_seconds))
    ]


# -- the loss ----------------------------------------------------------------------------------------------------------------------------


def _loss(history: RunHistory, time: _Time) -> Row:
    """The line of losses, broken while the run was parked and where the loss was not a number."""
    points = [LossPoint(*point) for point in history.losses]
    finite = [point.value for point in points if math.isfinite(point.value)]
    if not finite:
        moments = tuple(_moments(history, time, _LOSS_PIXELS))
        return Row(name="loss", height=_LOSS_PIXELS, label="the loss was never finite", drawn=moments, words=(("never finite", None),))
    steep = min(finite) > 0 and max(finite) / min(finite) > _LOG_RATIO
    low, high = min(finite), max(finite)
    span = (math.log(high / low) if steep else high - low) or 1.0

    def height(value: float) -> str:
        part = (math.log(value / low) if steep else value - low) / span
        return f"{8 + (_LOSS_PIXELS - 16) * (1 - part):.1f}"

    breaks = [((each.start_seconds + each.end_seconds) / 2, math.nan) for each in history.spans if not each.devices]
    drawn = sorted([*((point.at_seconds, point.value) for point in thinned(points)), *breaks], key=lambda point: point[0])
    commands, pen = [], "M"
    for at_seconds, value in drawn:
        if math.isfinite(value):
            commands.append(f"{pen}{time.grid(at_seconds):g} {height(value)}")
            # A point without neighbours becomes a dot, as lines have round ends.
            commands.append("h0" if pen == "M" else "")
            pen = "L"
        else:
            pen = "M"
    line = element("path", class_="loss", d="".join(commands), vector_effect="non-scaling-stroke")
    words = f"loss{', logarithmic' if steep else ''}: {finite[0]:.4g} at first, {finite[-1]:.4g} at last, {low:.4g} to {high:.4g}"
    # A loss falls: the upper right and the lower left are free.
    scale = [text(f"{high:.4g}", "99.5%", 15, class_="soft halo", anchor="end")]
    scale.append(text(f"{low:.4g}", "0.5%", _LOSS_PIXELS - 6, class_="soft halo"))
    frame = rect(0, 1, 1, class_="frame", y=0.5, height=_LOSS_PIXELS - 1)
    kind = (("logarithmic", "soft"),) if steep else ()
    return Row(
        name="loss",
        height=_LOSS_PIXELS,
        label=words,
        drawn=(frame, *_moments(history, time, _LOSS_PIXELS), _stretched(_LOSS_PIXELS, line), *scale),
        words=((f"{finite[-1]:.4g} at last", None), *kind),
    )


# -- memory ------------------------------------------------------------------------------------------------------------------------------


def _memory(device: str, history: RunHistory, time: _Time) -> Row:
    """This run's memory, above it others', up to the device's whole; the prediction as a line; hatched while the device is missing."""
    samples = sorted(history.memory, key=lambda sample: sample.at_seconds)
    found = [(sample.at_seconds, None if (each := sample.devices.get(device)) is None else MemoryUse(*each)) for sample in samples]
    held = [each for _, each in found if each is not None]
    predicted = [(span, span.predicted_bytes[device]) for span in history.spans if device in span.predicted_bytes]
    total = max(each.total for each in held)
    most = max([total, *(each.ours + each.others for each in held), *(size for _, size in predicted)]) or 1
    ends = [at for at, _ in found[1:]] + [max(time.end, found[-1][0])]
    spans = [(start, end, each) for (start, each), end in zip(found, ends, strict=True)]
    drawing = [rect(0, 1, 1, class_="frame", y=0.5, height=_MEMORY_PIXELS - 1)]
    drawing += [
        rect(start - time.start, end - time.start, time.length, class_="hatch", height=_MEMORY_PIXELS, title="not there")
        for start, end, each in _joined(spans)
        if each is None
    ]
    both = element("path", class_="c-others", d=_area(spans, most, time, others=True))
    ours = element("path", class_="c-ours", d=_area(spans, most, time, others=False))
    drawing.append(_stretched(_MEMORY_PIXELS, both, ours))
    for span, size in predicted:
        y = f"{_height(size, most)}"
        places = {"x1": time.at(span.start_seconds), "x2": time.at(span.end_seconds), "y1": y, "y2": y}
        drawing.append(element("line", element("title", f"predicted: {format_bytes(size)}"), class_="predicted", **places))
    peak = max(each.ours for each in held)
    words = f"{short_name(device)}, {format_bytes(total)}: at most {format_bytes(peak)} taken by this run, "
    words += f"{format_bytes(max(each.others for each in held))} by others"
    drawing += _moments(history, time, _MEMORY_PIXELS)
    said = f"{format_bytes(peak)} at most" if peak else "not used"
    return Row(
        name=short_name(device),
        height=_MEMORY_PIXELS,
        label=words,
        drawn=tuple(drawing),
        words=((said, None), (f"of {format_bytes(total)}", "soft")),
    )


def _height(size: float, most: float) -> str:
    return f"{_MEMORY_PIXELS * (1 - size / most):.1f}".removesuffix(".0")


def _joined(spans: Iterable[tuple[float, float, MemoryUse | None]]) -> list[tuple[float, float, MemoryUse | None]]:
    """The samples, with successive equal ones merged."""
    out: list[tuple[float, float, MemoryUse | None]] = []
    for start, end, each in spans:
        if out and out[-1][2] == each:
            out[-1] = (out[-1][0], end, each)
        else:
            out.append((start, end, each))
    return out


def _area(spans: Sequence[tuple[float, float, MemoryUse | None]], most: int, time: _Time, *, others: bool) -> str:
    """The area below a step line; of several values at one place of the grid, the highest, so that no peak is lost."""
    steps: list[tuple[float, float, float]] = []
    for start, end, each in _joined(spans):
        size = 0 if each is None else each.ours + (each.others if others else 0)
        place, until = time.grid(start), time.grid(end)
        if steps and until - steps[-1][0] < _LEAST_GRID:
            steps[-1] = (steps[-1][0], until, max(steps[-1][2], size))
        else:
            steps.append((place, until, size))
    if not any(size for _, _, size in steps):
        return ""
    lines: list[tuple[str, float]] = []
    for _, until, highest in steps:
        height = _height(highest, most)
        if lines and lines[-1][0] == height:
            lines[-1] = (height, until)
        else:
            lines.append((height, until))
    return f"M{steps[0][0]:g} {_MEMORY_PIXELS}" + "".join(f"V{height}H{end:g}" for height, end in lines) + f"V{_MEMORY_PIXELS}z"


# -- plans and marks ---------------------------------------------------------------------------------------------------------------------


def _plans(history: RunHistory, time: _Time) -> Row:
    """Spans in their plans' colours, hatched while parked; above them a number for each mark."""
    titles = list(dict.fromkeys(span.title for span in history.spans if span.devices))
    levels = mark_levels(history.marks[:_MOST_MARKS], time.length * _NUMBER_SHARE, _LEVELS)
    top = (max((level for level in levels if level is not None), default=-1) + 1) * _LEVEL_PIXELS
    height = top + _PLAN_PIXELS
    drawing: list[Html] = []
    for span in history.spans:
        class_ = f"c-plan{titles.index(span.title) % len(PLANS)}" if span.devices else "hatch"
        devices = ", ".join(map(short_name, span.devices))
        lasted = format_seconds(span.end_seconds - span.start_seconds)
        tip = f"{span.title}{' on ' + devices if devices else ''}: {lasted}"
        ends = span.start_seconds - time.start, span.end_seconds - time.start
        drawing.append(rect(*ends, time.length, class_=f"cell {class_}", y=top, height=_PLAN_PIXELS, title=tip))
        drawing += _span_words(span, devices, time, top)
    drawing += _moments(history, time, height, top)
    numbers = [
        text(str(number), time.at(mark.at_seconds), top - 4 - level * _LEVEL_PIXELS, anchor=_anchor(mark, time))
        for number, (mark, level) in enumerate(zip(history.marks, levels, strict=False), start=1)
        if level is not None
    ]
    label = "plans: " + "; ".join(
        f"{span.title} from {format_seconds(max(0.0, span.start_seconds))}" for span in history.spans[:_MOST_MARKS]
    )
    return Row(name="plans", height=height, label=label, drawn=(*drawing, *numbers))


def _span_words(span: PlanSpan, devices: str, time: _Time, top: float) -> list[Html]:
    """As many words as fit on a wide page."""
    room = (span.end_seconds - span.start_seconds) / time.length / _CHARACTER_SHARE
    words = [each for each in (span.title, devices) if each and len(each) <= room]
    middle = time.at((span.start_seconds + span.end_seconds) / 2)
    class_ = f"wide {'on-c-plan0' if span.devices else 'halo'}"
    first = top + _PLAN_PIXELS / 2 + (4 if len(words) == 1 else -3)
    return [text(each, middle, first + 14 * line, class_=class_, anchor="middle") for line, each in enumerate(words)]


def _anchor(mark: RunMark, time: _Time) -> str:
    place = (mark.at_seconds - time.start) / time.length
    return "start" if place < 0.02 else "end" if place > 0.98 else "middle"


def _plan_colors(history: RunHistory) -> tuple[tuple[str, str], ...]:
    """The plans with their colours."""
    titles = list(dict.fromkeys(span.title for span in history.spans if span.devices))
    colors = tuple((f"c-plan{index % len(PLANS)}", title) for index, title in enumerate(titles))
    return (*colors, ("hatch", "parked")) if any(not span.devices for span in history.spans) else colors


def _told(history: RunHistory) -> list[Html]:
    """What the marks' numbers mean."""
    if not history.marks:
        return []
    items = [
        element(
            "li",
            element("span", mark.kind, class_="alarm" if mark.kind == "failure" else "kind"),
            f" at {format_seconds(mark.at_seconds)}: {mark.words}",
        )
        for mark in history.marks[:_MOST_MARKS]
    ]
    more = len(history.marks) - _MOST_MARKS
    last = [element("p", f"and {more} more", class_="soft")] if more > 0 else []
    return [element("h2", "What moved it, and why"), element("ol", *items), *last]
