"""The report as one picture: memory by device against its budget, and below it what each rank does during a step.

It reads a report, and draws with matplotlib, which is optional (``pip install 'lightning-autopar[report]'``). Every colour is its own, so
that neither a dark page nor somebody's matplotlibrc makes it unreadable; the figure belongs to no window and no pyplot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_autopar.memory.inventory import Device
from lightning_autopar.planning.drawing import ALARM, FAINT, INK, PAPER, own_matplotlib, write
from lightning_autopar.planning.labels import devices_label
from lightning_autopar.planning.report import Candidate, Report
from lightning_autopar.planning.table import time_words
from lightning_autopar.planning.timeline import Span, timeline
from lightning_autopar.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HELD = "#e4e5e8"
#: Of Okabe and Ito's palette, which people with any colour vision can tell apart. What isn't named here is "other".
_CATEGORIES: Mapping[str, str] = {
    "parameters": "#0072b2",
    "gradients": "#e69f00",
    "optimizer": "#009e73",
    "activations": "#d55e00",
    "temporary": "#cc79a7",
    "communication": "#56b4e9",
    "context": "#6b6f76",
    "rounding": "#a9adb3",
}
_OTHER = "#8a6d3b"
_KINDS: Mapping[str, str] = {
    "forward": "#0072b2",
    "backward": "#e69f00",
    "recompute": "#cc79a7",
    "communication": "#56b4e9",
    "optimizer": "#009e73",
    "offload": "#8a6d3b",
    "input": "#6b6f76",
    "idle": "#ffffff",
}
_SUMS = ("allocated", "reserved")
#: More rows than these can't be read; the rest is named in the title.
_MOST_BARS, _MOST_RANKS = 16, 16
#: Shorter spans that follow each other closely are drawn as one; of thousands nobody sees more than some hundred.
_LEAST_SPAN_SHARE = 1 / 2000


@dataclass(frozen=True, kw_only=True)
class _Bar:
    """Devices that hold the same, as one bar."""

    devices: tuple[Device, ...]
    sizes: Mapping[str, int]
    need: int
    budget: int

    @property
    def label(self) -> str:
        """Their names, and how many there are."""
        many = f" ({len(self.devices)} alike)" if len(self.devices) > 1 else ""
        return devices_label(self.devices) + many


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
    bars = _bars(report, shown)
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


def _bars(report: Report, candidate: Candidate) -> list[_Bar]:
    """The plan's devices, those alike that follow each other as one."""
    left = report.headroom_bytes(candidate)

    def figures(device_id: str) -> tuple[Any, ...]:
        device = report.inventory.device(device_id)
        sizes = {name: size for name, size in candidate.bytes[device_id].to_dict().items() if isinstance(size, int) and name not in _SUMS}
        need = candidate.needs.get(device_id, candidate.bytes[device_id].reserved)
        return sizes, need, need + left.get(device_id, 0), device.free_bytes, device.total_bytes

    bars = []
    for (sizes, need, budget, _, _), group in groupby(candidate.plan.devices, key=figures):
        bars.append(_Bar(devices=tuple(map(report.inventory.device, group)), sizes=sizes, need=need, budget=budget))
    # Of many different ones those that have least left.
    return sorted(sorted(bars, key=lambda bar: bar.budget - bar.need)[:_MOST_BARS], key=bars.index)


def _draw_memory(axes: Axes, bars: Sequence[_Bar], devices: int) -> None:
    """A bar a device: categories, the margin for what may be missed, the budget's line, headroom in words."""
    most = max(max(bar.need, bar.budget, bar.devices[0].total_bytes if bar.devices[0].kind != "cpu" else 0) for bar in bars)
    unit, name = _unit(most)
    looks: dict[str, dict[str, Any]] = {}
    for row, bar in enumerate(bars):
        start = 0
        parts = {**_by_colour(bar.sizes)}
        parts["allowed for what may be missed"] = max(0, bar.need - sum(parts.values()))
        for category, size in parts.items():
            if not size:
                continue
            look: dict[str, Any] = {"facecolor": _CATEGORIES.get(category, _OTHER), "edgecolor": PAPER, "linewidth": 0.4}
            if category.startswith("allowed"):
                look = {"facecolor": PAPER, "edgecolor": FAINT, "hatch": "////", "linewidth": 0.6}
            axes.barh(row, size / unit, left=start / unit, height=0.62, **looks.setdefault(category, look))
            start += size
        device = bar.devices[0]
        if device.kind != "cpu":
            if (held := device.total_bytes - device.free_bytes) > 0:
                look = looks.setdefault("held by others", {"facecolor": _HELD})
                axes.barh(row, held / unit, left=device.free_bytes / unit, height=0.74, **look)
            axes.barh(row, device.total_bytes / unit, height=0.74, facecolor="none", edgecolor=FAINT, linewidth=0.8)
        headroom = bar.budget - bar.need
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


def _by_colour(sizes: Mapping[str, int]) -> dict[str, int]:
    """Those with a colour of their own, and the others together. A correction below nothing is taken off the activations."""
    found = {category: sizes.get(category, 0) for category in _CATEGORIES}
    other = sum(size for name, size in sizes.items() if name not in _CATEGORIES)
    if other < 0:
        found["activations"], other = max(0, found["activations"] + other), 0
    return {**found, "other": other}


def _unit(most_bytes: int) -> tuple[int, str]:
    """The unit in which the axis reads well."""
    power = min(4, int(math.log(max(1, most_bytes), 1024)))
    return 1024**power, ("bytes", "KiB", "MiB", "GiB", "TiB")[power]


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
    for kind, color in _KINDS.items():
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
