"""The report as text: plans with the parts of their time in a wide terminal, with reasons below the plans in a narrow one.

It also has tables of a candidate's bytes by category, the candidates' seconds by part, and the footprint by layer. It reads a report, and
must not know how it was made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from lightning_autopar.devices.inventory import Device, Inventory, devices_label
from lightning_autopar.memory.footprint import Footprint, LayerFootprint
from lightning_autopar.report.report import Candidate, Report
from lightning_autopar.text import counted, format_bytes, format_of, format_seconds, format_share

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from lightning_autopar.timing.step_seconds import Seconds


#: From the first width on, the parts of the time and the headroom have columns; below the second, the reasons are under the plans.
_WIDE, _NARROW = 150, 100
_MOST_FITTING = 8
_MOST_OTHERS = 3
#: From so many rows on, what they all say is said once, below the table.
_SAID_OFTEN = 3
#: Parts of a step with a smaller share aren't named.
_LEAST_SHARE = 0.02
#: The words for when a device is fullest, if not in a training step.
_OCCASIONS = {"validation": "in validation", "checkpoint": "saving a checkpoint", "start": "at the start"}


class ReportTable:
    """A report for rich, at any width."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        yield from map(Text, self._header())
        yield self._lines(width)
        yield from (Text(f"Note {number}: {words}") for number, words in enumerate(self._notes.values(), start=1))
        yield from map(Text, self._footer())

    def _header(self) -> list[str]:
        """The model and the devices, in words."""
        needs = self.report.footprint
        sizes = {name: size for name, size in needs.to_dict()["bytes"].items() if size}
        batch = f"batch of {needs.batch_size}" if needs.batch_size else "batch without a batch dimension"
        step = "training step" if needs.training else "step without gradients"
        header = [
            f"Model: {needs.parameters:,} parameters, {needs.trainable_parameters:,} of them trainable; {batch}",
            f"One {step} needs: " + (", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items()) or "nothing known"),
        ]
        if needs.margin:
            header.append(f"Safety margin for errors of the prediction: {needs.margin * 100:.3g} %")
        if needs.lengths is not None and (words := needs.lengths.sentence()):
            header.append(f"Lengths: {words}")
        header += [f"Assumed: {assumption}" for assumption in needs.assumptions]
        header.append("Devices: " + "; ".join(device_words(self.report.inventory)))
        header.append("Host memory: " + host_words(self.report.inventory))
        header.append(f"Times: by rates {name}" if (name := getattr(self.report.rates, "name", "")) else "Times: by data sheets")
        header += [f"Note: {note}" for note in self.report.inventory.notes]
        return header

    def _lines(self, width: int) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True, padding=(0, 1, 0, 0))
        if width < _NARROW:
            for title, least in (("#", 2), ("plan", 12), ("memory", 6), ("a step", 7)):
                table.add_column(title, min_width=least, no_wrap=title != "plan", ratio=1 if title == "plan" else None)
        else:
            wide = width >= _WIDE
            columns: list[tuple[str, int, int | None]] = [
                ("#", 2, None),
                ("plan", 18, 34 if wide else 26),
                ("devices", 9, 18 if wide else 12),
            ]
            columns += [("peak (fullest device)", 21, 23)] + [("headroom", 8, None)] * wide + [("a step", 7, None)]
            columns += [("where the time goes", 24, 28)] * wide
            for title, least, most in columns:
                table.add_column(title, min_width=least, max_width=most, no_wrap=title in ("#", "a step", "headroom"))
            table.add_column("why, or why not", ratio=1)
        for which, (shown, left_out) in self._shown.items():
            for index in shown:
                table.add_row(*map(Text, self._row(index, width)))
            if left_out:
                table.add_row(Text(""), Text(f"… {left_out} more {which}"))
        return table

    @cached_property
    def _shown(self) -> dict[str, tuple[list[int], int]]:
        """By outcome: the candidates that have a row, and the number of those that have none."""
        limits = {"that fit": _MOST_FITTING, "ruled out": len(self.report.candidates)}
        groups = grouped(self.report).items()
        rows = {which: self._spread(indices, limits.get(which, _MOST_OTHERS)) for which, indices in groups}
        return {which: (rows[which], len(indices) - len(rows[which])) for which, indices in groups}

    @cached_property
    def _notes(self) -> dict[str, str]:
        """What many rows say, to be said once below the table; by topic. Where the rows differ, the topic alone is said there."""
        candidates = [self.report.candidates[index] for rows, _ in self._shown.values() for index in rows]
        said: dict[str, list[str]] = {}
        for topic, words in (each for candidate in candidates for each in _told(candidate)):
            said.setdefault(topic, []).append(words)
        often = {topic: sentences for topic, sentences in said.items() if len(sentences) >= _SAID_OFTEN}
        return {topic: sentences[0] if len(set(sentences)) == 1 else topic for topic, sentences in often.items()}

    def _spread(self, indices: Sequence[int], most: int) -> list[int]:
        """The first ``most``, and at least the first of every engine: readers ask why it isn't the best."""
        first = {self.report.candidates[index].plan.engine: index for index in reversed(indices)}
        chosen = set(first.values())
        for index in indices:
            if len(chosen) >= most:
                break
            chosen.add(index)
        return sorted(chosen)

    def _row(self, index: int, width: int) -> tuple[str, ...]:
        """One candidate's cells."""
        candidate = self.report.candidates[index]
        best = index == self.report.best_index
        devices = devices_label([self.report.inventory.device(device) for device in candidate.plan.devices])
        rank = f"▸{index + 1}" if best else str(index + 1) if candidate.fits else "–"
        step = format_seconds(candidate.seconds.step) if candidate.seconds else "–"
        title, why = candidate.plan.title(), "; ".join(self._why(candidate, best))
        if width < _NARROW:
            on_host = [f"host memory {candidate.host.words()}"] if candidate.host else []
            occasion = [f"fullest {words}"] if (words := occasion_words(self.report, candidate)) else []
            words = "\n".join((f"{title} on {devices}", *on_host, *occasion, *([why] if why else [])))
            return rank, words, fullest_words(self.report, candidate)[0] or "–", step
        memory = " ".join(fullest_words(self.report, candidate)).strip()
        if when := occasion_words(self.report, candidate):
            memory += f"\n{when}"
        if candidate.host is not None:
            memory += f"\nhost {candidate.host.words()}"
        if width < _WIDE:
            return rank, title, devices, memory, step, why
        return rank, title, devices, memory, headroom_words(self.report, candidate), step, time_words(candidate.seconds), why

    def _why(self, candidate: Candidate, best: bool) -> tuple[str, ...]:
        """Sentences for the last column."""
        reason = candidate.short_reason
        first = [reason] if reason else ["chosen, see below"] if best else []
        return (*first, *(self._in_short(topic, words) for topic, words in _told(candidate)))

    def _in_short(self, topic: str, words: str) -> str:
        """A note as a row gives it: what is said below the table is replaced by its number."""
        if topic not in self._notes:
            return words
        number = list(self._notes).index(topic) + 1
        return f"see note {number}" if self._notes[topic] == words else f"{words.removesuffix(f', as {topic}')} (note {number})"

    def _footer(self) -> list[str]:
        """What the reader should do or know."""
        best = self.report.best_candidate
        chosen = [f"Chosen: {best.plan.title()}"] + [f"  - {reason}" for reason in best.plan.reasons] if best else ["Nothing fits."]
        if best and best.host:
            chosen.append(f"  - it takes {format_bytes(best.host.total)} of the host's memory, of {format_bytes(best.host.budget)}")
        if best and best.seconds and (words := time_words(best.seconds)):
            chosen.append(f"  - of its {format_seconds(best.seconds.step)}: {words}")
        if self.report.lengths:
            chosen.append(f"  - {self.report.lengths}")
        return chosen + [f"Advice: {advice}" for advice in self.report.advice]


def _told(candidate: Candidate) -> list[tuple[str, str]]:
    """A candidate's notes, each with its topic: a correction's reason, ``"single was measured on 2026-11-27"``, else the note itself."""
    return [(words, words) for words in candidate.notes] + [(words.rpartition(", as ")[2], words) for words in candidate.learned]


def device_words(inventory: Inventory) -> list[str]:
    """Devices with their memory, equal ones as one."""
    alike: dict[str, list[Device]] = {}
    for device in inventory.devices:
        words = f"{format_bytes(device.free_bytes)} free of {format_bytes(device.total_bytes)}"
        name = device.name if device.kind == "cuda" else ""
        busy = f", {device.utilization:.0%} busy" if device.utilization and device.utilization >= 0.05 else ""
        alike.setdefault(f"{name + ', ' if name else ''}{words}{busy}", []).append(device)
    return [f"{devices_label(devices)} ({words}{' each' if len(devices) > 1 else ''})" for words, devices in alike.items()]


def host_words(inventory: Inventory) -> str:
    """What the hosts have: ``"18.2 GiB free of 23.5 GiB"``, or of those that are only planned for ``"47.3 GiB, assumed …"``."""
    if not inventory.node_host_bytes:
        return f"{format_bytes(inventory.host_free_bytes)} free of {format_bytes(inventory.host_total_bytes)}"
    alike: dict[tuple[int, bool], int] = {}
    for node, size in enumerate(inventory.node_host_bytes):
        key = size, node in inventory.assumed_hosts
        alike[key] = alike.get(key, 0) + 1
    several = len(inventory.node_host_bytes) > 1
    parts = [
        format_bytes(size) + (f" on {counted(count, 'node')}" if several else "") + (", assumed" if assumed else "")
        for (size, assumed), count in alike.items()
    ]
    if inventory.assumed_hosts:
        name = inventory.devices[0].name
        rule = "twice the devices', at most 256 GiB a device"
        parts[-1] += f" ({rule}; to say that a node has 128 GiB, write '{name}@128GiB' in the spec)"
    return "; ".join(parts)


def grouped(report: Report) -> dict[str, list[int]]:
    """Indices of the candidates by outcome; a group's name follows the number of its plans."""
    groups: dict[str, list[int]] = {"that fit": [], "that are held back": [], "that don't fit": [], "ruled out": []}
    for index, candidate in enumerate(report.candidates):
        if candidate.fits:
            which = "that fit"
        elif not candidate.bytes:
            which = "ruled out"
        else:
            which = "that don't fit" if candidate.runnable else "that are held back"
        groups[which].append(index)
    return groups


def fullest(report: Report, candidate: Candidate) -> tuple[int, int] | None:
    """The bytes that are needed on the fullest device, and those that may be used; None without a prediction."""
    if (device := _fullest_device(report, candidate)) is None:
        return None
    need = candidate.needs[device]
    return need, need + report.headroom_bytes(candidate)[device]


def _fullest_device(report: Report, candidate: Candidate) -> str | None:
    """The id of the device that is used most."""
    left = report.headroom_bytes(candidate)
    used = {device: (need / max(1, need + left[device]), need) for device, need in candidate.needs.items()}
    return max(used, key=lambda device: used[device]) if used else None


def occasion_words(report: Report, candidate: Candidate) -> str:
    """When the fullest device is that full, where that isn't in forward or backward: ``"in validation"``; else nothing."""
    size = candidate.bytes.get(_fullest_device(report, candidate) or "")
    if size is not None and size.occasion == "step" and size.updates:
        return "in the optimizer's step"
    return "" if size is None else _OCCASIONS.get(size.occasion, "")


def fullest_words(report: Report, candidate: Candidate) -> tuple[str, str]:
    """The fullest device: ``"3.1 / 3.8 GiB"`` and ``"82%"``, which is empty where kibibytes are meant."""
    if (found := fullest(report, candidate)) is None:
        return "", "–"
    need, budget = found
    return format_of(need, budget), format_share(need, budget)


def headroom_words(report: Report, candidate: Candidate) -> str:
    """The bytes left on the device with least left, with a minus if they are missing."""
    left = report.headroom_bytes(candidate)
    return format_bytes(min(left.values())).replace("-", "−") if left else "–"


def time_words(seconds: Seconds | None) -> str:
    """Where a step's time goes, the largest part first: ``"compute 61 %, communication 30 %"``."""
    if seconds is None or seconds.step <= 0:
        return "–"
    shares = {name: part / seconds.step for name, part in seconds.to_dict().items() if name != "step"}
    named = sorted((item for item in shares.items() if item[1] >= _LEAST_SHARE), key=lambda item: -item[1])
    return ", ".join(f"{name} {share * 100:.0f} %" for name, share in named)


#: Sums of the other categories, shown after them.
_SUMS = ("allocated", "reserved")
#: The most columns and lines that can be read.
_MOST_COLUMNS, _MOST_COMPARED, _MOST_LAYERS = 8, 4, 200


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


def bars_of(report: Report, candidate: Candidate, *, most: int) -> list[Bar]:
    """The plan's devices, equal ones as one bar, in the order of their first ranks.

    Args:
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


@dataclass(frozen=True, kw_only=True)
class Figures:
    """A table of figures, for rich as it is, and for the page.

    Args:
        columns: their titles.
        rows: of each the name, a cell for each column, and whether it stands out.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str], bool]]

    def __rich__(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=self.title, title_justify="left")
        table.add_column("")
        for title in self.columns:
            table.add_column(title, justify="right")
        for name, cells, strong in self.rows:
            table.add_row(name, *cells, style="bold" if strong else None)
        return table


def by_category(report: Report, candidate: Candidate) -> Figures:
    """The candidate's bytes at its fullest moment, and the bytes left: a column for each group of devices that hold the same, of many the
    fullest.
    """
    bars = bars_of(report, candidate, most=_MOST_COLUMNS)
    held = [candidate.bytes[bar.devices[0].id] for bar in bars]
    names = [name for name in bars[0].sizes if any(bar.sizes.get(name) for bar in bars)]
    rows = [(name, [format_bytes(bar.sizes.get(name, 0)) for bar in bars], False) for name in names]
    rows += [(name, [format_bytes(each.to_dict()[name]) for each in held], True) for name in _SUMS]
    rows += [
        ("needed, with the safety margin", [format_bytes(bar.need) for bar in bars], False),
        ("may be used", [format_bytes(bar.budget) for bar in bars], False),
        ("headroom", [format_bytes(bar.headroom).replace("-", "−") for bar in bars], True),
        ("free now", [format_bytes(bar.devices[0].free_bytes) for bar in bars], False),
        ("in all", [format_bytes(bar.devices[0].total_bytes) for bar in bars], False),
    ]
    some = ", the fullest ones" if sum(len(bar.devices) for bar in bars) < candidate.plan.world_size else ""
    return Figures(title=f"{candidate.plan.title()}, bytes of a device{some}", columns=[bar.label for bar in bars], rows=rows)


def by_part(report: Report, candidate: Candidate) -> Figures:
    """Where a step's time goes: a column for each of the first candidates with a prediction, this one first."""
    others = [each for each in report.candidates if each.seconds is not None and each is not candidate]
    shown = [candidate, *others][:_MOST_COMPARED]
    parts = [{} if each.seconds is None else each.seconds.to_dict() for each in shown]
    names = [name for name in dict.fromkeys(name for each in parts for name in each) if any(each.get(name) for each in parts)]
    rows = [(name, [format_seconds(each[name]) if each.get(name) else "–" for each in parts], name == "step") for name in names]
    needs = [format_bytes(max(each.needs.values())) if each.needs else "–" for each in shown]
    rows.append(("memory of the device that needs most", needs, False))
    return Figures(title="seconds of a step", columns=[each.plan.title() for each in shown], rows=rows)


def by_layer(footprint: Footprint) -> Figures:
    """What each block takes at the whole batch on one device; blocks in a row that take the same are one line."""
    groups = layer_groups(footprint)
    more = f"; the first {_MOST_LAYERS} of {len(groups)}" if len(groups) > _MOST_LAYERS else ""
    return Figures(
        title=f"by layer, at the whole batch{more}",
        columns=("parameters", "gradients", "optimizer", "activations", "output", "GFLOPs"),
        rows=[(name, layer_figures(part), False) for name, part, _ in groups[:_MOST_LAYERS]],
    )


def layer_groups(footprint: Footprint) -> list[tuple[str, LayerFootprint, int]]:
    """The parts that hold or compute anything, with successive equal ones merged: a name, one part's figures, and their number."""
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
