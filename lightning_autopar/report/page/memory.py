"""The page's section on memory: a bar for each device by category against its budget, the same as a table, and the footprint by layer.

It reads a report, and must not know how a prediction was made. Its bars are the ones that every picture of a report draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from lightning_autopar.devices.inventory import Device, devices_label
from lightning_autopar.report.page.drawing import Figure, Row, axis
from lightning_autopar.report.page.markup import Html, element, join, rect, scrolled, share
from lightning_autopar.report.page.style import CATEGORIES, color_class
from lightning_autopar.report.report import Candidate, Report
from lightning_autopar.report.table import layer_figures, layer_groups
from lightning_autopar.text import format_bytes

_SUMS = ("allocated", "reserved")


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Devices that hold the same, as one bar.

    Args:
        devices: in rank order.
        sizes: bytes by category on each of them; the sums aren't among them.
        need: bytes that must be there: the prediction with what it may miss.
        budget: bytes that may be used.
    """

    devices: tuple[Device, ...]
    sizes: Mapping[str, int]
    need: int
    budget: int

    @property
    def label(self) -> str:
        """The devices' names, and how many there are."""
        many = f" ({len(self.devices)} alike)" if len(self.devices) > 1 else ""
        return devices_label(self.devices) + many

    @property
    def headroom(self) -> int:
        """Bytes left of the budget; below 0 where they are missing."""
        return self.budget - self.need

    @property
    def frame(self) -> int:
        """The most bytes that the bar shows: on a GPU all of the device, else what may be used."""
        return max(self.need, self.budget, self.devices[0].total_bytes if self.devices[0].kind != "cpu" else 0)


def bars_of(report: Report, candidate: Candidate, *, most: int) -> list[Bar]:
    """The plan's devices, equal ones as one bar, in the order of their first ranks.

    Args:
        report: has the candidate's devices.
        candidate: one with a prediction.
        most: at most so many bars; if there are more, those with least left.
    """
    left = report.headroom_bytes(candidate)
    alike: dict[Any, list[Device]] = {}
    for device_id in candidate.plan.devices:
        device = report.inventory.device(device_id)
        sizes = {name: size for name, size in candidate.bytes[device_id].to_dict().items() if isinstance(size, int) and name not in _SUMS}
        need = candidate.needs.get(device_id, candidate.bytes[device_id].reserved)
        budget = need + left.get(device_id, 0)
        alike.setdefault((tuple(sizes.items()), need, budget, device.free_bytes, device.total_bytes), []).append(device)
    bars = [Bar(devices=tuple(found), sizes=dict(key[0]), need=key[1], budget=key[2]) for key, found in alike.items()]
    return sorted(sorted(bars, key=lambda bar: bar.headroom)[:most], key=bars.index)


def by_color(sizes: Mapping[str, int]) -> dict[str, int]:
    """The categories with a colour of their own, and the others together. A negative correction is subtracted from the activations."""
    found = {category: sizes.get(category, 0) for category in CATEGORIES}
    other = sum(size for name, size in sizes.items() if name not in CATEGORIES)
    if other < 0:
        found["activations"], other = max(0, found["activations"] + other), 0
    return {**found, "other": other}


def unit_of(most_bytes: int) -> tuple[int, str]:
    """The unit in which an axis up to so many bytes reads well, in bytes, and its name."""
    power = min(4, int(math.log(max(1, most_bytes), 1024)))
    return 1024**power, ("bytes", "KiB", "MiB", "GiB", "TiB")[power]


#: More bars, columns and layers than these can't be read; the rest is counted in words.
_MOST_BARS, _MOST_COLUMNS, _MOST_LAYERS = 24, 8, 200
_BAR_PIXELS, _ALLOWED = 26, "safety margin"
#: A smaller share of the axis is less than a pixel.
_SEEN_SHARE = 1e-3
_LAYER_TITLES = ("parameters", "gradients", "optimizer", "activations", "output", "GFLOPs")


def memory_section(report: Report, candidate: Candidate) -> Html:
    """Bars by device, and the figures.

    Args:
        report: has the candidate's devices.
        candidate: one with a prediction.
    """
    figures = _figures(bars_of(report, candidate, most=_MOST_BARS))
    return element(
        "section",
        memory_figure(report, candidate).html(),
        element("details", element("summary", "The figures", class_="head"), figures),
    )


def memory_figure(report: Report, candidate: Candidate) -> Figure:
    """A bar for each device by category, against what may be used.

    Args:
        report: has the candidate's devices.
        candidate: one with a prediction.
    """
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
    parts = by_color(bar.sizes)
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


def _figures(bars: Sequence[Bar]) -> Html:
    """A column for each group of devices."""
    columns = sorted(sorted(bars, key=lambda bar: bar.headroom)[:_MOST_COLUMNS], key=bars.index)
    head = element("tr", element("th", "bytes of a device", scope="col"), *(element("th", bar.label, scope="col") for bar in columns))
    names = [name for name in columns[0].sizes if any(bar.sizes.get(name) for bar in columns)]
    rows = [(name, [format_bytes(bar.sizes.get(name, 0)) for bar in columns], "") for name in names]
    rows.append(("needed, with the safety margin", [format_bytes(bar.need) for bar in columns], "sum"))
    rows.append(("may be used", [format_bytes(bar.budget) for bar in columns], ""))
    rows.append(("headroom", [format_bytes(bar.headroom).replace("-", "−") for bar in columns], "sum"))
    rows.append(("free now", [format_bytes(bar.devices[0].free_bytes) for bar in columns], ""))
    rows.append(("in all", [format_bytes(bar.devices[0].total_bytes) for bar in columns], ""))
    body = [
        element("tr", element("th", name, scope="row"), *(element("td", words) for words in cells), class_=class_ or None)
        for name, cells, class_ in rows
    ]
    few = element("p", f"{len(columns)} of {len(bars)} kinds of devices, the fullest.", class_="soft") if len(columns) < len(bars) else None
    table = element("table", element("thead", head), element("tbody", *body), class_="figures")
    return join([few, scrolled("bytes by category and device", table)])


def layer_section(report: Report) -> Html | None:
    """What each block takes at the whole batch on one device; None where there are no layers."""
    groups = layer_groups(report.footprint)
    if not groups:
        return None
    head = element("tr", element("th", "layer", scope="col"), *(element("th", title, scope="col") for title in _LAYER_TITLES))
    rows = [
        element("tr", element("th", name, scope="row"), *(element("td", words) for words in layer_figures(part)))
        for name, part, _ in islice(groups, _MOST_LAYERS)
    ]
    more = f" The first {_MOST_LAYERS} of {len(groups)}." if len(groups) > _MOST_LAYERS else ""
    return element(
        "section",
        element("h2", "Footprint by layer"),
        element("p", f"At the whole batch, on one device; layers in a row that take the same are one line.{more}", class_="soft"),
        scrolled("footprint by layer", element("table", element("thead", head), element("tbody", *rows), class_="figures")),
    )
