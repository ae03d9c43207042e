"""The page's section on memory: a bar for each device by category against its budget, the same as a table, and the footprint by layer.

It reads a report, and must not know how a prediction was made. Its bars are the ones that every picture of a report draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_autopar.report.page.markup import Figure, Html, Row, axis, element, figures, rect, share
from lightning_autopar.report.page.style import CATEGORIES, color_class
from lightning_autopar.report.report import Candidate, Report
from lightning_autopar.report.table import Bar, bars_of, by_category, by_layer
from lightning_autopar.text import format_bytes


def unit_of(most_bytes: int) -> tuple[int, str]:
    """The unit in which an axis up to so many bytes reads well, in bytes, and its name."""
    power = min(4, int(math.log(max(1, most_bytes), 1024)))
    return 1024**power, ("bytes", "KiB", "MiB", "GiB", "TiB")[power]


#: More bars than these can't be read; the rest is counted in words.
_MOST_BARS = 24
_BAR_PIXELS, _ALLOWED = 26, "safety margin"
#: A smaller share of the axis is less than a pixel.
_SEEN_SHARE = 1e-3


def memory_section(report: Report, candidate: Candidate) -> Html:
    """Bars by device, and the figures.

    Args:
        candidate: one with a prediction.
    """
    return element(
        "section",
        memory_figure(report, candidate).html(),
        element("details", element("summary", "The figures", class_="head"), figures("bytes of a device", by_category(report, candidate))),
    )


def memory_figure(report: Report, candidate: Candidate) -> Figure:
    """A bar for each device by category, against what may be used."""
    bars = bars_of(report, candidate, most=_MOST_BARS)
    shown, there = sum(len(bar.devices) for bar in bars), len(candidate.plan.devices)
    few = f" {shown} of {there} devices, the fullest." if shown < there else ""
    most = max(_whole(bar) for bar in bars)
    unit, name = unit_of(most)
    names = [_ALLOWED if category == "allowed" else category for category in _used(bars, most)]
    marks = [(color_class("allowed" if each == _ALLOWED else each), each) for each in names]
    if any(bar.devices[0].free_bytes < bar.devices[0].total_bytes for bar in bars):
        marks.append(("held", "held by others"))
    return Figure(
        title="Memory of each device",
        caption=f"At the fullest moment of a step. The upright line is what may be used.{few}",
        legend=tuple(marks),
        rows=tuple(_row(bar, most) for bar in bars),
        axis=axis(most / unit, name),
    )


def _whole(bar: Bar) -> int:
    """The end of a bar: all of the device, or more where more is needed."""
    return max(bar.need, bar.budget, bar.devices[0].total_bytes)


def _used(bars: Sequence[Bar], most: int) -> list[str]:
    """The visible categories, in the palette's order."""
    found = {category for bar in bars for category, size in _parts(bar).items() if size > most * _SEEN_SHARE}
    order = list(_parts(bars[0]))
    return sorted(found, key=order.index)


def _parts(bar: Bar) -> dict[str, int]:
    """Bytes by colour, and the margin beyond the prediction."""
    found = {category: bar.sizes.get(category, 0) for category in CATEGORIES}
    other = sum(size for name, size in bar.sizes.items() if name not in CATEGORIES)
    if other < 0:
        found["activations"], other = max(0, found["activations"] + other), 0
    parts = {**found, "other": other}
    return {**parts, "allowed": max(0, bar.need - sum(parts.values()))}


def _row(bar: Bar, most: int) -> Row:
    """A device's name, its bar, and in words what is needed and left."""
    drawn: list[Html] = []
    device = bar.devices[0]
    if device.free_bytes < device.total_bytes:
        words = f"held by others: {format_bytes(device.total_bytes - device.free_bytes)}"
        drawn.append(rect(device.free_bytes, device.total_bytes, most, class_="held", y=1, height=_BAR_PIXELS - 2, title=words))
    start = 0
    for category, size in _parts(bar).items():
        if size:
            name = _ALLOWED if category == "allowed" else category
            words = f"{name}: {format_bytes(size)}"
            drawn.append(rect(start, start + size, most, class_=color_class(category), y=4, height=_BAR_PIXELS - 8, title=words))
            start += size
    drawn.append(rect(0, device.total_bytes, most, class_="frame", y=0.5, height=_BAR_PIXELS - 1))
    at = share(bar.budget, most)
    over = "mark over" if bar.headroom < 0 else "mark"
    drawn.append(element("line", class_=over, x1=at, x2=at, y1=0, y2=_BAR_PIXELS))
    needed = f"{format_bytes(bar.need)} of {format_bytes(bar.budget)}"
    left = f"{format_bytes(bar.headroom)} left" if bar.headroom >= 0 else f"{format_bytes(-bar.headroom)} too little"
    return Row(
        name=bar.label,
        height=_BAR_PIXELS,
        label=f"{bar.label}: {needed}, {left}",
        drawn=tuple(drawn),
        words=((needed, None), (left, "good" if bar.headroom >= 0 else "alarm")),
    )


def layer_section(report: Report) -> Html | None:
    """What each block takes at the whole batch on one device; None where there are no layers."""
    found = by_layer(report.footprint)
    if not found.rows:
        return None
    words = f"{found.title}, on one device; layers in a row that take the same are one line.".capitalize()
    return element("section", element("h2", "Footprint by layer"), element("p", words, class_="soft"), figures("layer", found))
