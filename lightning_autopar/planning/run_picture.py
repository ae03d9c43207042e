"""A run over time as one picture: its loss, the memory of each device, and below them the plans that ran, with what moved the run and why.

It draws with matplotlib, which is optional (``pip install 'lightning-autopar[report]'``). Its paper and its colours are its own, so that
neither a dark page nor somebody's matplotlibrc makes it unreadable. Knows only what a :class:`.run_history.RunHistory` says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_autopar.planning.drawing import ALARM, FAINT, INK, OTHERS, OURS, PAPER, PLANS, is_page, own_matplotlib, write
from lightning_autopar.planning.run_history import (
    MOST_WORDS,
    DeviceBytes,
    LossPoint,
    RunHistory,
    devices_of,
    is_steep,
    mark_levels,
    mark_lines,
    short_name,
    thinned,
    time_unit,
    title_of,
)
from lightning_autopar.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: More can't be read; the rest is counted in words. A few losses are marked, since a single one makes no line.
_MOST_DEVICES, _FEW_POINTS = 8, 60
_WIDTH_INCHES = 11.0
#: So wide is a character of the spans' words.
_CHARACTER_INCHES = 0.075
#: So far apart the marks' numbers stand; those that don't fit stand higher, by a share of the plans' row.
_NUMBER_INCHES, _LEVELS, _LEVEL_SHARE = 0.18, 2, 0.14
_HATCHES = (None, "..", "xx")
_LEFT, _RIGHT, _LEGEND_COLUMNS = 0.07, 0.98, 3


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
    lines = mark_lines(history.marks)
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
        figure.suptitle(_plainly(title_of(history)), color=INK, fontsize=12, x=0.01, y=1 - 0.1 / height, ha="left", va="top")
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


# -- memory ------------------------------------------------------------------------------------------------------------------------------


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
    marks = history.marks[:MOST_WORDS]
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
