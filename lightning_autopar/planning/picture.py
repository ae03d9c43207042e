"""The report as one picture: memory by device against its budget, and below it what each rank does during a step.

It reads a report, and draws with matplotlib, which is optional (``pip install 'lightning-autopar[report]'``). Every colour is its own, so
that neither a dark page nor somebody's matplotlibrc makes it unreadable; the figure belongs to no window and no pyplot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_autopar.planning.bars import Bar, bars_of, by_color, unit_of
from lightning_autopar.planning.drawing import ALARM, CATEGORIES, FAINT, HELD, INK, KINDS, OTHER, PAPER, own_matplotlib, write
from lightning_autopar.planning.report import Candidate, Report
from lightning_autopar.planning.table import time_words
from lightning_autopar.planning.timeline import Span, timeline
from lightning_autopar.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: More rows than these can't be read; the rest is named in the title.
_MOST_BARS, _MOST_RANKS = 16, 16
#: Shorter spans that follow each other closely are drawn as one; of thousands nobody sees more than some hundred.
_LEAST_SPAN_SHARE = 1 / 2000


def draw(report: Report, candidate: Candidate | None = None) -> Figure:
    """The figure: two axes, the upper labelled ``"memory"``, the lower ``"step"``.

    Args:
        report: has the candidate, or one to choose.
        candidate: one with a prediction; the best unless given, or where nothing fits the first that has one.

    Raises:
        ValueError: if matplotlib isn't installed, or there is no prediction to draw.
    """
    shown = candidate or report.shown_candidate()
    if shown is None or not shown.bytes:
        which = "none of the plans" if shown is None else f"the plan {shown.plan.title()!r}"
        why = shown.reason if shown is not None else "; ".join(dict.fromkeys(one.reason or "" for one in report.candidates))
        raise ValueError(f"there is nothing to draw: {which} was predicted ({why}); draw one that has a prediction")
    figure_class, styled = own_matplotlib(instead="print the report instead")
    bars = bars_of(report, shown, most=_MOST_BARS)
    spans = _shown_spans(report, shown)
    lanes = _lanes(spans)
    heights = [0.5 * len(bars) + 0.9, 0.34 * len(lanes) + 0.9]
    with styled:
        figure = figure_class(figsize=(10.5, sum(heights) + 1.9), facecolor=PAPER)
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
        upper, lower = figure.subplots(2, 1, gridspec_kw={"height_ratios": heights})
        for axes, label in ((upper, "memory"), (lower, "step")):
            axes.set_label(label)
            axes.set_facecolor(PAPER)
            axes.tick_params(colors=INK, labelsize=9, length=2)
            for side, spine in axes.spines.items():
                spine.set_visible(side == "bottom")
                spine.set_color(FAINT)
        figure.suptitle(_title(report, shown), color=INK, fontsize=12, x=0.01, ha="left")
        _draw_memory(upper, bars, len(shown.plan.devices))
        _draw_step(lower, shown, spans, lanes)
    return figure


def save(report: Report, path: str | Path, candidate: Candidate | None = None) -> None:
    """The figure as a file.

    Raises:
        ValueError: as :func:`draw`; or if the path's ending names no format that matplotlib writes, or it can't be written.
    """
    write(draw(report, candidate), path)


def _title(report: Report, candidate: Candidate) -> str:
    """The plan and what it comes to."""
    step = f", {format_seconds(candidate.seconds.step)} a step" if candidate.seconds else ""
    if candidate.fits:
        return f"{candidate.plan.title()}: {format_bytes(max(candidate.needs.values(), default=0))} on the fullest device{step}"
    verdict = "can't be run by this version" if not candidate.runnable else "doesn't fit"
    return f"{candidate.plan.title()} {verdict}{step}"


# -- memory ------------------------------------------------------------------------------------------------------------------------------


def _draw_memory(axes: Axes, bars: Sequence[Bar], devices: int) -> None:
    """A bar a device: categories, the margin for what may be missed, the budget's line, headroom in words."""
    most = max(bar.frame for bar in bars)
    unit, name = unit_of(most)
    looks: dict[str, dict[str, Any]] = {}
    for row, bar in enumerate(bars):
        start = 0
        parts = {**by_color(bar.sizes)}
        parts["allowed for what may be missed"] = max(0, bar.need - sum(parts.values()))
        for category, size in parts.items():
            if not size:
                continue
            look: dict[str, Any] = {"facecolor": CATEGORIES.get(category, OTHER), "edgecolor": PAPER, "linewidth": 0.4}
            if category.startswith("allowed"):
                look = {"facecolor": PAPER, "edgecolor": FAINT, "hatch": "////", "linewidth": 0.6}
            axes.barh(row, size / unit, left=start / unit, height=0.62, **looks.setdefault(category, look))
            start += size
        device = bar.devices[0]
        if device.kind != "cpu":
            if (held := device.total_bytes - device.free_bytes) > 0:
                look = looks.setdefault("held by others", {"facecolor": HELD})
                axes.barh(row, held / unit, left=device.free_bytes / unit, height=0.74, **look)
            axes.barh(row, device.total_bytes / unit, height=0.74, facecolor="none", edgecolor=FAINT, linewidth=0.8)
        headroom = bar.headroom
        color = INK if headroom >= 0 else ALARM
        axes.plot([bar.budget / unit] * 2, [row - 0.42, row + 0.42], color=color, linewidth=2, solid_capstyle="butt")
        words = f"{format_bytes(headroom)} left" if headroom >= 0 else f"{format_bytes(-headroom)} too little"
        axes.text(most * 1.015 / unit, row, words, va="center", ha="left", fontsize=9, color=color, clip_on=False)
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, most * 1.005 / unit)
    shown = sum(len(bar.devices) for bar in bars)
    few = f" ({shown} of {devices} devices, the fullest)" if shown < devices else ""
    axes.set_xlabel(f"memory at the fullest moment, {name}{few}; the line is what may be used")
    _legend(axes, looks)


def _legend(axes: Axes, looks: Mapping[str, Mapping[str, Any]]) -> None:
    """The colours' meanings, above the axes."""
    from matplotlib.patches import Patch

    handles = [Patch(label=label, **look) for label, look in looks.items()]
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=5, frameon=False, fontsize=8, labelcolor=INK)


# -- the step ----------------------------------------------------------------------------------------------------------------------------


def _shown_spans(report: Report, candidate: Candidate) -> list[Span]:
    """What the first ranks do, very short spans of a kind drawn together."""
    spans = timeline(report.footprint, candidate.plan, report.inventory, precision=report.precision, rates=report.rates, ranks=_MOST_RANKS)
    ordered = sorted((span for span in spans), key=lambda span: (span.rank, span.lane, span.start_seconds))
    least = max((span.end_seconds for span in ordered), default=0.0) * _LEAST_SPAN_SHARE
    merged: list[Span] = []
    for span in ordered:
        last = merged[-1] if merged else None
        alike = last is not None and (last.rank, last.lane, last.kind) == (span.rank, span.lane, span.kind)
        if last is not None and alike and span.start_seconds - last.end_seconds < least:
            merged[-1] = Span(
                rank=last.rank,
                start_seconds=last.start_seconds,
                end_seconds=max(last.end_seconds, span.end_seconds),
                kind=last.kind,
                label=last.label,
                lane=last.lane,
            )
        else:
            merged.append(span)
    return merged


def _lanes(spans: Sequence[Span]) -> list[tuple[int, str]]:
    """Rows of the lower axes: of each rank its computing and, where that goes on beside it, its communication."""
    return sorted({(span.rank, span.lane) for span in spans}, key=lambda lane: (lane[0], lane[1] != "compute"))


def _draw_step(axes: Axes, candidate: Candidate, spans: Sequence[Span], lanes: Sequence[tuple[int, str]]) -> None:
    """A row a rank and lane; waiting is hatched."""
    end = max((span.end_seconds for span in spans), default=0.0)
    scale, name = (1e3, "milliseconds") if end < 1 else (1.0, "seconds")
    looks: dict[str, dict[str, Any]] = {}
    for kind, color in KINDS.items():
        look: dict[str, Any] = {"facecolor": color, "edgecolor": PAPER, "linewidth": 0.3}
        if kind == "idle":
            look = {"facecolor": PAPER, "edgecolor": FAINT, "hatch": "////", "linewidth": 0.4}
        for row, lane in enumerate(lanes):
            ranges = [
                (span.start_seconds * scale, (span.end_seconds - span.start_seconds) * scale)
                for span in spans
                if (span.rank, span.lane) == lane and span.kind == kind
            ]
            if ranges:
                axes.broken_barh(ranges, (row - 0.36, 0.72), **looks.setdefault("waiting" if kind == "idle" else kind, look))
    axes.set_yticks(range(len(lanes)), [_lane_label(candidate, lane) for lane in lanes])
    axes.set_ylim(max(1, len(lanes)) - 0.4, -0.6)
    axes.set_xlim(0, max(end * scale, 1e-9))
    world = candidate.plan.world_size
    more = f" (ranks 0 to {_MOST_RANKS - 1} of {world})" if world > _MOST_RANKS else ""
    axes.set_xlabel(f"one step, {name}{more}: {time_words(candidate.seconds)}")
    _legend(axes, looks)


def _lane_label(candidate: Candidate, lane: tuple[int, str]) -> str:
    """``"rank 0"``, and what its second row is."""
    return f"rank {lane[0]}" if lane[1] == "compute" else "its communication"
