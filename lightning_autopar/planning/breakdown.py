"""A candidate's bytes by category, the candidates' seconds by part, and the footprint by layer, as tables for a person.

Doesn't know how any of them was found.
"""

from __future__ import annotations

from itertools import groupby

from rich import box
from rich.table import Table

from lightning_autopar.memory.footprint import Footprint, LayerFootprint
from lightning_autopar.planning.labels import devices_label
from lightning_autopar.planning.report import Candidate, Report
from lightning_autopar.units import format_bytes, format_seconds

#: Sums of the others, shown after them.
_SUMS = ("allocated", "reserved")
_MOST_COMPARED = 4


def by_category(report: Report, candidate: Candidate) -> Table:
    """What the candidate holds at its fullest moment, and what that leaves: a column for each group of devices that hold the same.

    Args:
        report: has the candidate's devices.
        candidate: one with a prediction.
    """
    left = report.headroom_bytes(candidate)
    held = [
        (device, (candidate.bytes[device].to_dict(), candidate.needs.get(device), left.get(device))) for device in candidate.plan.devices
    ]
    columns = [(figures, [device for device, _ in group]) for figures, group in groupby(held, key=lambda item: item[1])]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=f"{candidate.plan.title()}, bytes of a device", title_justify="left")
    table.add_column("")
    for _, devices in columns:
        table.add_column(devices_label([report.inventory.device(device) for device in devices]), justify="right")
    names = [name for name, size in columns[0][0][0].items() if isinstance(size, int) and name not in _SUMS]
    for name in (*(name for name in names if any(sizes[name] for (sizes, _, _), _ in columns)), *_SUMS):
        table.add_row(name, *(format_bytes(sizes[name]) for (sizes, _, _), _ in columns), style="bold" if name in _SUMS else None)
    if candidate.needs:
        table.add_row("needed, with what may be missed", *(format_bytes(need or 0) for (_, need, _), _ in columns))
        table.add_row("may be used", *(format_bytes((need or 0) + (rest or 0)) for (_, need, rest), _ in columns))
        table.add_row("headroom", *(format_bytes(rest or 0).replace("-", "−") for (_, _, rest), _ in columns), style="bold")
    return table


def by_part(report: Report) -> Table:
    """Where a step's time goes: a column for each of the first candidates with a prediction, the chosen one first."""
    timed = [candidate for candidate in report.candidates if candidate.seconds is not None][:_MOST_COMPARED]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="seconds of a step", title_justify="left")
    table.add_column("")
    for candidate in timed:
        table.add_column(candidate.plan.title(), justify="right")
    parts = [candidate.seconds.to_dict() for candidate in timed if candidate.seconds is not None]
    for name in dict.fromkeys(name for each in parts for name in each):
        if any(each.get(name) for each in parts):
            words = (format_seconds(each[name]) if each.get(name) else "–" for each in parts)
            table.add_row(name, *words, style="bold" if name == "step" else None)
    return table


def by_layer(footprint: Footprint) -> Table:
    """What each block takes at the whole batch on one device; blocks in a row that take the same are one line."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="by layer, at the whole batch", title_justify="left")
    table.add_column("")
    for title in ("parameters", "gradients", "optimizer", "activations", "output", "GFLOPs"):
        table.add_column(title, justify="right")
    for name, part, _ in layer_groups(footprint):
        table.add_row(name, *layer_figures(part))
    return table


def layer_groups(footprint: Footprint) -> list[tuple[str, LayerFootprint, int]]:
    """The parts that hold or compute anything, those in a row that take the same as one: a name, one's figures, how many there are."""
    shown = [(name, part) for name, part in footprint.parts() if part.parameter_bytes or part.activation_bytes or part.flops]
    found = []
    for _, group in groupby(shown, key=lambda item: layer_figures(item[1])):
        parts = list(group)
        many = f" … {parts[-1][0]} ({len(parts)}×)" if len(parts) > 1 else ""
        found.append((parts[0][0] + many, parts[0][1], len(parts)))
    return found


def layer_figures(layer: LayerFootprint) -> tuple[str, ...]:
    """What a block takes, in words: parameters, gradients, optimizer, activations, output, GFLOPs of its forward."""
    sizes = (layer.parameter_bytes, layer.gradient_bytes, layer.optimizer_bytes, layer.activation_bytes, layer.output_bytes)
    return (*(format_bytes(size) if size else "–" for size in sizes), f"{layer.flops / 1e9:.3g}" if layer.flops else "–")
