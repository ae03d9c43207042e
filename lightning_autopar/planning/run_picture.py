"""A run over time as one picture: its loss, the memory of each device, and below them the plans that ran, with what moved the run and why.

It draws with matplotlib, which is optional (``pip install 'lightning-autopar[report]'``). Its paper and its colours are its own, so that
neither a dark page nor somebody's matplotlibrc makes it unreadable. Knows only what a :class:`RunHistory` says; the agent fills it.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_autopar.planning.drawing import ALARM, FAINT, INK, OTHERS, OURS, PAPER, PLANS, is_page, own_matplotlib, write
from lightning_autopar.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: More can't be read; the rest is counted in words. A few losses are marked, since a single one makes no line.
_MOST_DEVICES, _MOST_WORDS, _MOST_POINTS, _FEW_POINTS = 8, 14, 4000, 60
#: Of losses whose ends lie further apart, a linear axis shows only the first.
_LOG_RATIO = 50.0
_WIDTH_INCHES, _LINE_CHARACTERS = 11.0, 150
#: So wide is a character of the spans' words.
_CHARACTER_INCHES = 0.075
#: So far apart the marks' numbers stand; those that don't fit stand higher, by a share of the plans' row.
_NUMBER_INCHES, _LEVELS, _LEVEL_SHARE = 0.18, 2, 0.14
_HATCHES = (None, "..", "xx")
_LEFT, _RIGHT, _LEGEND_COLUMNS, _DEVICE_CHARACTERS = 0.07, 0.98, 3, 12


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

    def _repr_html_(self) -> str | None:
        """What a notebook shows; nothing of its own where no plan ran."""
        from lightning_autopar.planning.run_page import run_fragment

        return str(run_fragment(self)) if self.spans else None

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What IPython shows in a terminal, and keeps beside the page in a notebook: a line for the run, and one for each mark."""
        printer.text("\n".join([_title(self), *_mark_lines(self.marks)]))

    def end_seconds(self) -> float:
        """When the last thing in it happened."""
        moments = [*(span.end_seconds for span in self.spans), *(mark.at_seconds for mark in self.marks)]
        return max([*moments, *(sample.at_seconds for sample in self.memory), *(point[0] for point in self.losses)], default=0.0)


def draw(history: RunHistory) -> Figure:
    """The figure: axes labelled ``"loss"``, one labelled by each device, and ``"plans"``; those without anything to draw are left out.

    Raises:
        ValueError: if matplotlib isn't installed, or the history is empty.
    """
    if not history.spans:
        raise ValueError("there is nothing to draw: the run's history has no plan that ran; draw it after the run began")
    figure_class, styled = own_matplotlib()
    devices = devices_of(history)
    shown = devices[:_MOST_DEVICES]
    lines = _mark_lines(history.marks)
    titles = list(dict.fromkeys(span.title for span in history.spans if span.devices))
    legend_rows = math.ceil(len({span.title for span in history.spans}) / _LEGEND_COLUMNS)
    rows = {**({"loss": 2.4} if history.losses else {}), **dict.fromkeys(shown, 0.95), "plans": 0.9}
    below = 0.17 * len(lines) + 0.2 * legend_rows + 0.85
    height = sum(rows.values()) + below + 1.0
    with styled:
        figure = figure_class(figsize=(_WIDTH_INCHES, height), facecolor=PAPER)
        grid = figure.subplots(
            len(rows), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": list(rows.values()), "hspace": 0.32}
        )[:, 0]
        figure.subplots_adjust(left=_LEFT, right=_RIGHT, top=1 - 0.75 / height, bottom=below / height)
        axes: dict[str, Axes] = dict(zip(rows, grid, strict=True))
        scale, unit = time_unit(history.end_seconds())
        for label, each in axes.items():
            _plain(each, label)
            for mark in history.marks:
                color = ALARM if mark.kind == "failure" else INK
                each.axvline(mark.at_seconds / scale, color=color, linewidth=0.8, linestyle=(0, (4, 3)), zorder=3)
        if history.losses:
            _draw_losses(axes["loss"], history, scale)
        for device in shown:
            _draw_memory(axes[device], device, history, scale)
        if shown:
            _memory_legend(axes[shown[0]], history)
        _draw_plans(axes["plans"], history, titles, scale)
        start = min(0.0, *(span.start_seconds for span in history.spans))
        axes["plans"].set_xlim(start / scale, max(history.end_seconds(), start + 1e-9) / scale)
        more = f"; {len(devices) - len(shown)} more devices aren't shown" if len(shown) < len(devices) else ""
        axes["plans"].set_xlabel(f"{unit} since the run began{more}", color=INK, fontsize=9)
        figure.suptitle(_plainly(_title(history)), color=INK, fontsize=12, x=0.01, y=1 - 0.1 / height, ha="left", va="top")
        figure.text(0.01, 0.08 / height, _plainly("\n".join(lines)), color=INK, fontsize=8, ha="left", va="bottom", linespacing=1.5)
    return figure


def save(history: RunHistory, path: str | Path) -> None:
    """The figure as a file: ``.png``, ``.svg`` or ``.pdf``; with the ending ``.html`` a page, which needs no matplotlib.

    Raises:
        ValueError: as :func:`draw`; or if the path's ending names no format that matplotlib writes, or it can't be written.
    """
    if is_page(path):
        from lightning_autopar.planning.page_markup import write_page

        write_page(history.to_html(), path)
    else:
        write(draw(history), path)


def _plain(axes: Axes, label: str) -> None:
    axes.set_label(label)
    axes.set_facecolor(PAPER)
    axes.tick_params(colors=INK, labelsize=8, length=2)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("bottom", "left"))
        spine.set_color(FAINT)


def _title(history: RunHistory) -> str:
    """What ran, for how long, and how often it moved."""
    kinds = [mark.kind for mark in history.marks]
    counts = [f"{kinds.count(kind)} {kind}{'s' if kinds.count(kind) > 1 else ''}" for kind in dict.fromkeys(kinds)]
    scale, unit = time_unit(history.end_seconds())
    return ", ".join([history.title or "a run", f"{history.end_seconds() / scale:.3g} {unit}", *counts])


def time_unit(end_seconds: float) -> tuple[float, str]:
    """Seconds of the unit in which the axis reads well."""
    return (1.0, "seconds") if end_seconds < 300 else (60.0, "minutes") if end_seconds < 3 * 3600 else (3600.0, "hours")


def _plainly(text: str) -> str:
    """As it is: between two dollars matplotlib reads mathematics."""
    return text.replace("$", r"\$")


def _legend(axes: Axes, handles: Sequence[Any], **place: Any) -> None:
    axes.legend(handles=handles, frameon=False, fontsize=8, labelcolor=INK, borderaxespad=0.2, **place)


# -- the loss ----------------------------------------------------------------------------------------------------------------------------


def _draw_losses(axes: Axes, history: RunHistory, scale: float) -> None:
    """A line, broken while the run was parked, and where the loss was no number, which is said."""
    points = [LossPoint(*point) for point in history.losses]
    values = [point.value for point in points if math.isfinite(point.value)]
    parked = [((span.start_seconds + span.end_seconds) / 2, math.nan) for span in history.spans if not span.devices]
    drawn = sorted([*((point.at_seconds, point.value) for point in thinned(points)), *parked], key=lambda point: point[0])
    axes.plot(
        [at_seconds / scale for at_seconds, _ in drawn],
        [value if math.isfinite(value) else math.nan for _, value in drawn],
        color=OURS,
        linewidth=1.2,
        marker="." if len(drawn) < _FEW_POINTS else None,
        zorder=4,
    )
    steps = f"steps {min(point.step for point in points)} to {max(point.step for point in points)}"
    broken = f"; {len(points) - len(values)} not finite" if len(values) < len(points) else ""
    axes.set_title(f"loss, {steps}{broken}", color=INK, fontsize=9, loc="left", pad=6)
    if values and is_steep(values):
        axes.set_yscale("log")
        axes.tick_params(which="both", colors=INK, labelsize=8)


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


# -- memory ------------------------------------------------------------------------------------------------------------------------------


def devices_of(history: RunHistory) -> list[str]:
    """Those with a sample, the ones that the run was on first."""
    sampled = dict.fromkeys(device for sample in history.memory for device in sample.devices)
    used = {device for span in history.spans for device in span.devices}
    return sorted(sampled, key=lambda device: device not in used)


def _draw_memory(axes: Axes, device: str, history: RunHistory, scale: float) -> None:
    """What this run takes, above it what others do, up to the whole; the prediction as a line; hatched while the device isn't there."""
    samples = sorted(history.memory, key=lambda sample: sample.at_seconds)
    found = [None if (each := sample.devices.get(device)) is None else DeviceBytes(*each) for sample in samples]
    times = [*(sample.at_seconds / scale for sample in samples), max(history.end_seconds(), samples[-1].at_seconds) / scale]
    predicted = [(span, span.predicted_bytes[device]) for span in history.spans if device in span.predicted_bytes]
    total = max(each.total for each in found if each is not None)
    most = max([total, *(each.ours + each.others for each in found if each is not None), *(size for _, size in predicted)])
    power = min(4, int(math.log(max(1, most), 1024)))
    size = 1024**power
    for there, part in groupby(range(len(found)), key=lambda index: found[index] is not None):
        indices = list(part)
        span = [times[index] for index in (*indices, indices[-1] + 1)]  # a sample holds until the next one
        if not there:
            axes.fill_between(span, 0, most / size, facecolor=PAPER, edgecolor=FAINT, hatch="////", linewidth=0)
            continue
        held = [each for each in found[indices[0] : indices[-1] + 1] if each is not None]
        ours = [each.ours / size for each in (*held, held[-1])]
        both = [(each.ours + each.others) / size for each in (*held, held[-1])]
        whole = [each.total / size for each in (*held, held[-1])]
        axes.fill_between(span, 0, ours, step="post", facecolor=OURS, linewidth=0)
        axes.fill_between(span, ours, both, step="post", facecolor=OTHERS, linewidth=0)
        axes.plot(span, whole, drawstyle="steps-post", color=FAINT, linewidth=0.8)
    for plan, need in predicted:
        ends = [plan.start_seconds / scale, plan.end_seconds / scale]
        axes.plot(ends, [need / size] * 2, color=INK, linewidth=1.4, linestyle=(0, (1, 1)), zorder=4)
    axes.set_ylim(0, 1.05 * most / size)
    axes.set_ylabel(("bytes", "KiB", "MiB", "GiB", "TiB")[power], fontsize=8)
    axes.set_title(_plainly(f"{short_name(device)}, {format_bytes(total)}"), color=INK, fontsize=9, loc="left", pad=4)


def _memory_legend(axes: Axes, history: RunHistory) -> None:
    """The colours' meanings, once for all devices."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(label="taken by this run", facecolor=OURS),
        Patch(label="taken by others", facecolor=OTHERS),
        Patch(label="free", facecolor=PAPER, edgecolor=FAINT),
    ]
    if any(span.predicted_bytes for span in history.spans):
        handles.insert(0, Line2D([], [], label="predicted", color=INK, linewidth=1.4, linestyle=(0, (1, 1))))
    devices = devices_of(history)
    if any(device not in sample.devices for sample in history.memory for device in devices):
        handles.append(Patch(label="not there", facecolor=PAPER, edgecolor=FAINT, hatch="////"))
    _legend(axes, handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(handles))


def short_name(device: str) -> str:
    """So much of a UUID as tells the devices of a host apart."""
    return device[:_DEVICE_CHARACTERS] if device.startswith(("GPU-", "MIG-")) else device


# -- plans and marks ---------------------------------------------------------------------------------------------------------------------


def _draw_plans(axes: Axes, history: RunHistory, titles: Sequence[str], scale: float) -> None:
    """A row of spans in their plans' colours, hatched while parked, with as many words as fit; a number for each mark above it."""
    from matplotlib.patches import Patch

    # Where there are more plans than colours, a pattern tells them apart.
    colors = {title: (PLANS[index % len(PLANS)], _HATCHES[index // len(PLANS) % len(_HATCHES)]) for index, title in enumerate(titles)}
    looks: dict[str, dict[str, Any]] = {}
    inches = _WIDTH_INCHES * (_RIGHT - _LEFT) / max(history.end_seconds(), 1e-9)
    for span in history.spans:
        color, hatch = colors[span.title] if span.devices else (PAPER, "////")
        look: dict[str, Any] = {"facecolor": color, "edgecolor": PAPER if span.devices else FAINT, "hatch": hatch, "linewidth": 0.6}
        looks.setdefault(span.title, look)
        start, width = span.start_seconds / scale, (span.end_seconds - span.start_seconds) / scale
        axes.broken_barh([(start, width)], (0, 1), **look)
        room = int((span.end_seconds - span.start_seconds) * inches / _CHARACTER_INCHES)
        words = [text for text in (span.title, ", ".join(map(short_name, span.devices))) if text and len(text) <= room]
        if words:
            back = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.5} if not span.devices else None
            axes.text(
                start + width / 2, 0.5, _plainly("\n".join(words)), color=INK, fontsize=8, ha="center", va="center", bbox=back, zorder=5
            )
    marks = history.marks[:_MOST_WORDS]
    levels = mark_levels(marks, _NUMBER_INCHES / inches, _LEVELS)
    for number, (mark, level) in enumerate(zip(marks, levels, strict=True), start=1):
        if level is not None:
            y = 1.04 + _LEVEL_SHARE * level
            axes.text(mark.at_seconds / scale, y, str(number), color=INK, fontsize=8, ha="center", va="bottom", clip_on=False)
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_title("plans", color=INK, fontsize=9, x=-0.01, y=0.4, ha="right", va="center")
    _legend(
        axes,
        [Patch(label=_plainly(title), **look) for title, look in looks.items()],
        loc="upper left",
        bbox_to_anchor=(0, -0.55),
        ncols=_LEGEND_COLUMNS,
    )


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


def _mark_lines(marks: Sequence[Mark]) -> list[str]:
    """What the numbers mean, a line or more each."""
    lines = []
    for number, mark in enumerate(marks[:_MOST_WORDS], start=1):
        words = f"{number}  at {format_seconds(mark.at_seconds)}, {mark.kind}: {mark.words}"
        lines += textwrap.wrap(words, _LINE_CHARACTERS, subsequent_indent="    ")
    if len(marks) > _MOST_WORDS:
        lines.append(f"and {len(marks) - _MOST_WORDS} more")
    return lines
