"""The report: every candidate with its prediction, in order, as values, JSON and a table that a person reads.

It must not know how plans are found or predicted; it shows what the planner made.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.inventory import Device, Inventory
from lightning_autopar.memory.residuals import Residuals
from lightning_autopar.planning.timing import Seconds
from lightning_autopar.plans import Plan
from lightning_autopar.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

__all__ = ["Candidate", "DeviceNeed", "NothingFits", "Report", "Seconds", "device_label", "devices_label"]

_WIDTH = 110
_MOST_FITTING = 8
_MOST_UNFIT = 3


class DeviceNeed(Protocol):
    """Predicted bytes on one device, as :class:`lightning_autopar.memory.predict.DeviceBytes` has them."""

    @property
    def allocated(self) -> int:
        """Bytes in tensors at the peak."""

    @property
    def reserved(self) -> int:
        """Bytes that the process takes of the device at the peak."""

    def to_dict(self) -> dict[str, int]:
        """Bytes by category."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan with its prediction.

    Args:
        plan: what is predicted.
        fits: whether it can be taken.
        reason: why not, one sentence; None where it fits.
        bytes: predicted bytes by device id, corrected by what earlier runs took; empty where a plan is ruled out before any prediction.
        raw: the same before the correction: what a run is compared with, for the next one.
        needs: by device id, the bytes that must be there for it: the prediction with what the footprint may miss.
        seconds: predicted seconds of a step; None where there is no prediction.
        notes: what a reader should know, a sentence each.
        learned: how earlier runs correct the prediction, a sentence each.
        replayed: whether the allocations of its steps were replayed, which says to some MiB what the allocator holds.
    """

    plan: Plan
    fits: bool
    reason: str | None = None
    bytes: Mapping[str, DeviceNeed] = field(default_factory=dict)
    raw: Mapping[str, DeviceNeed] = field(default_factory=dict)
    needs: Mapping[str, int] = field(default_factory=dict)
    seconds: Seconds | None = None
    notes: tuple[str, ...] = ()
    learned: tuple[str, ...] = ()
    replayed: bool = False

    def __post_init__(self) -> None:
        assert self.fits == (self.reason is None), "a candidate fits, or says in one sentence why it doesn't"

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of a step, of a candidate that has a prediction, as every fitting one."""
        assert self.seconds is not None, "a plan that is ruled out has no prediction"
        return self.seconds.step

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "plan": self.plan.to_dict(),
            "fits": self.fits,
            "reason": self.reason,
            "bytes": {
                device: {**need.to_dict(), "allocated": need.allocated, "reserved": need.reserved} for device, need in self.bytes.items()
            },
            "seconds": self.seconds.to_dict() if self.seconds else {},
            "notes": [*self.notes, *self.learned],
            "replayed": self.replayed,
        }


@dataclass(frozen=True, kw_only=True)
class Report:
    """Every candidate for one footprint on one inventory, the fitting ones first, best first.

    Args:
        inventory: the devices as they were.
        footprint: what one step needs.
        candidates: best first; behind the fitting ones those that don't fit, then those that are ruled out.
        best_index: which of them is to be run; None where nothing fits.
        advice: what would make something fit, or fit better, a sentence each.
        budgets: bytes that a plan may use, by device id.
        residuals: what earlier runs were measured to take, by which the predictions are corrected.
    """

    inventory: Inventory
    footprint: Footprint
    candidates: tuple[Candidate, ...]
    best_index: int | None
    advice: tuple[str, ...] = ()
    budgets: Mapping[str, int] = field(default_factory=dict)
    residuals: Residuals = field(default_factory=Residuals)

    @property
    def best_candidate(self) -> Candidate | None:
        """The candidate to be run; None where nothing fits."""
        return None if self.best_index is None else self.candidates[self.best_index]

    @property
    def best(self) -> Plan | None:
        """The plan to be run; None where nothing fits."""
        candidate = self.best_candidate
        return None if candidate is None else candidate.plan

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: ``inventory``, ``footprint``, ``best`` (an index or None), ``candidates``, ``advice``."""
        return {
            "inventory": self.inventory.to_dict(),
            "footprint": self.footprint.to_dict(),
            "best": self.best_index,
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            "advice": list(self.advice),
        }

    def to_json(self) -> str:
        """:meth:`to_dict` as a JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def table(self) -> RenderableType:
        """What rich shows: model and devices, a line for each candidate worth one, notes and advice."""
        from rich.console import Group
        from rich.text import Text

        return Group(*map(Text, self._header()), self._lines(), *map(Text, self._footer()))

    def __str__(self) -> str:
        from rich.console import Console

        out = io.StringIO()
        plain = {"color_system": None, "force_terminal": False, "force_jupyter": False, "legacy_windows": False}
        console = Console(file=out, width=_WIDTH, **plain)  # type: ignore[arg-type]
        console.print(self.table())
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def _header(self) -> list[str]:
        """The model and the devices, in words."""
        needs = self.footprint
        sizes = {name: size for name, size in needs.to_dict()["bytes"].items() if size}
        batch = f"batch of {needs.batch_size}" if needs.batch_size else "batch without a batch dimension"
        step = "training step" if needs.training else "step without gradients"
        header = [
            f"Model: {needs.parameters:,} parameters, {needs.trainable_parameters:,} of them trainable; {batch}",
            f"One {step} needs: " + (", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items()) or "nothing known"),
        ]
        if needs.margin:
            header.append(f"Up to {needs.margin * 100:.3g} % more is allowed for, as the prediction may miss it")
        header += [f"Assumed: {assumption}" for assumption in needs.assumptions]
        header.append("Devices: " + "; ".join(self._device_words()))
        header += [f"Note: {note}" for note in self.inventory.notes]
        return header

    def _device_words(self) -> list[str]:
        """Devices with their memory, those alike as one."""
        alike: dict[str, list[Device]] = {}
        for device in self.inventory.devices:
            words = f"{format_bytes(device.free_bytes)} free of {format_bytes(device.total_bytes)}"
            name = device.name if device.kind == "cuda" else ""
            busy = f", {device.utilization:.0%} busy" if device.utilization and device.utilization >= 0.05 else ""
            alike.setdefault(f"{name + ', ' if name else ''}{words}{busy}", []).append(device)
        return [f"{devices_label(devices)} ({words}{' each' if len(devices) > 1 else ''})" for words, devices in alike.items()]

    def _lines(self) -> Table:
        """The table itself."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True, padding=(0, 1, 0, 0))
        for title, least in (("#", 2), ("plan", 18), ("devices", 9), ("memory of the fullest", 22), ("a step", 7)):
            table.add_column(title, min_width=least, no_wrap=title in ("#", "a step"))
        table.add_column("why, or why not", ratio=1)
        fitting = [index for index, candidate in enumerate(self.candidates) if candidate.fits]
        unfit = [index for index, candidate in enumerate(self.candidates) if not candidate.fits and candidate.bytes]
        ruled_out = [index for index, candidate in enumerate(self.candidates) if not candidate.fits and not candidate.bytes]
        parts = ((fitting, _MOST_FITTING, "that fit"), (unfit, _MOST_UNFIT, "that don't fit"), (ruled_out, len(ruled_out), "ruled out"))
        for shown, most, which in parts:
            chosen = self._spread(shown, most)
            for index in chosen:
                table.add_row(*map(Text, self._row(index)))
            if len(shown) > len(chosen):
                table.add_row(Text(""), Text(f"… {len(shown) - len(chosen)} more {which}"))
        return table

    def _spread(self, indices: Sequence[int], most: int) -> list[int]:
        """The first ``most``, but of every engine at least the first: why it isn't the best is what people ask."""
        first = {self.candidates[index].plan.engine: index for index in reversed(indices)}
        chosen = set(first.values())
        for index in indices:
            if len(chosen) >= most:
                break
            chosen.add(index)
        return sorted(chosen)

    def _row(self, index: int) -> tuple[str, ...]:
        """One candidate's cells."""
        candidate = self.candidates[index]
        plan = candidate.plan
        devices = devices_label([self.inventory.device(device) for device in plan.devices])
        rank = f"▸{index + 1}" if index == self.best_index else str(index + 1) if candidate.fits else "–"
        step = format_seconds(candidate.seconds.step) if candidate.seconds else "–"
        reason = candidate.reason or ""
        if candidate.bytes:
            reason = reason.partition(" (")[0]  # how the budget came to be is the same for all, and long
        why = [reason] if reason else ["chosen, see below"] if index == self.best_index else []
        return rank, plan.title(), devices, self._memory_words(candidate), step, "; ".join((*why, *candidate.notes, *candidate.learned))

    def _memory_words(self, candidate: Candidate) -> str:
        """The fullest device: ``"3.1 / 3.8 GiB 82%"``."""
        if not candidate.needs:
            return "–"
        full, need, budget = max(
            (need / max(1, budget), need, budget)
            for device, need in candidate.needs.items()
            for budget in [self.budgets.get(device, self.inventory.device(device).free_bytes)]
        )
        amount, unit = format_bytes(need).split()
        if format_bytes(budget).endswith(f" {unit}"):
            unit = ""
        return f"{amount}{' ' + unit if unit else ''} / {format_bytes(budget)} {full:.0%}"

    def _footer(self) -> list[str]:
        """What the reader should do or know."""
        best = self.best_candidate
        chosen = [f"Chosen: {best.plan.title()}"] + [f"  - {reason}" for reason in best.plan.reasons] if best else ["Nothing fits."]
        return chosen + [f"Advice: {advice}" for advice in self.advice]


class NothingFits(ValueError):
    """No plan can be run. The message holds the report's table, what is needed, what is there and what would help.

    Args:
        report: one without a best plan, kept in :attr:`report`.
    """

    def __init__(self, report: Report) -> None:
        assert report.best_index is None, "something fits"
        self.report = report
        super().__init__(f"no plan fits: {_shortest_reason(report)}\n\n{report}")

    def __reduce__(self) -> tuple[type[NothingFits], tuple[Report]]:
        """Pickled with the report rather than the message, so that it can come from another process."""
        return type(self), (self.report,)


def _shortest_reason(report: Report) -> str:
    """What the plan that needs least needs, and what there is."""
    predicted = [candidate for candidate in report.candidates if candidate.needs]
    if not predicted:
        return "; ".join(dict.fromkeys(f"{candidate.plan.engine}: {candidate.reason}" for candidate in report.candidates))
    least = min(predicted, key=lambda candidate: max(candidate.needs.values()))
    return f"the one that needs least memory, {least.plan.title()}, {least.reason}"


def device_label(device: Device) -> str:
    """A device's name as people know it: ``"cuda:0"`` rather than its UUID."""
    return f"cuda:{device.index}" if device.kind == "cuda" and device.index is not None else device.id


def devices_label(devices: Iterable[Device]) -> str:
    """Several devices' names, runs of numbers drawn together: ``"cuda:0-3,6"``."""
    runs: dict[str, list[list[int]]] = {}
    others: list[str] = []
    for label in sorted(map(device_label, devices), key=_number_last):
        name, number = _number_last(label)
        if number < 0:
            others.append(label)
        elif runs.get(name) and runs[name][-1][-1] == number - 1:
            runs[name][-1].append(number)
        else:
            runs.setdefault(name, []).append([number])
    drawn = [f"{name}:" + ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in parts) for name, parts in runs.items()]
    return ", ".join((*drawn, *others))


def _number_last(label: str) -> tuple[str, int]:
    """``"cpu:3"`` → ``("cpu", 3)``; −1 where there is no number."""
    name, _, number = label.rpartition(":")
    return (name, int(number)) if name and number.isdecimal() else (label, -1)
