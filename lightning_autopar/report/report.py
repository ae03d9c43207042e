"""The report: every candidate with its prediction, in order, and advice; as values and JSON.

It must not know how plans are found or predicted; it shows what the planner made. :mod:`table` and :mod:`page` show it to people.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.memory.device_bytes import DeviceBytes, HostNeed
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.learned.corrections import Corrections
from lightning_autopar.plans import Plan
from lightning_autopar.text import format_bytes
from lightning_autopar.timing.rates import Rates
from lightning_autopar.timing.step_seconds import Seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Where the text isn't for a terminal, whose width it takes.
_WIDTH, _LEAST_WIDTH = 110, 60


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan with its prediction.

    Args:
        plan: what is predicted.
        fits: whether it can be taken.
        reason: why not, one sentence; None where it fits.
        bytes: predicted bytes by device id, corrected by what earlier runs took; empty where a plan is ruled out before any prediction.
        raw: the same before the correction, with which a run is compared, to correct the next one.
        needs: by device id, the bytes that must be there for it: the prediction with the footprint's margin.
        host: what it takes of the memory of the host that has least to spare; None where it offloads nothing.
        seconds: predicted seconds of a step, corrected by what earlier runs took; None where there is no prediction.
        raw_seconds: the same before the correction; None where nothing was predicted.
        notes: what a reader should know, a sentence each.
        learned: how earlier runs correct the prediction, a sentence each.
        replayed: whether the allocations of its steps were replayed, which says to some MiB what the allocator holds.
        held_back: whether no such plan is taken, though it can be predicted.
    """

    plan: Plan
    fits: bool
    reason: str | None = None
    bytes: Mapping[str, DeviceBytes] = field(default_factory=dict)
    raw: Mapping[str, DeviceBytes] = field(default_factory=dict)
    needs: Mapping[str, int] = field(default_factory=dict)
    host: HostNeed | None = None
    seconds: Seconds | None = None
    raw_seconds: Seconds | None = None
    notes: tuple[str, ...] = ()
    learned: tuple[str, ...] = ()
    replayed: bool = False
    held_back: bool = False

    def __post_init__(self) -> None:
        assert self.fits == (self.reason is None), "a candidate fits, or says in one sentence why it doesn't"
        assert not (self.fits and self.held_back), "what is held back is not to be taken"

    @property
    def runnable(self) -> bool:
        """Whether such a plan may be taken. A plan that may not is still predicted."""
        return not self.held_back

    @property
    def short_reason(self) -> str:
        """The reason without what is the same for all plans or in another column: how the budget was computed, the seconds."""
        reason = self.reason or ""
        if not self.runnable:
            return reason.partition("; it would")[0]
        return reason.partition(" (")[0] if self.bytes else reason

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of a step; only for candidates with a prediction, such as all fitting ones."""
        assert self.seconds is not None, "a plan that is ruled out has no prediction"
        return self.seconds.step

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "plan": self.plan.to_dict(),
            "fits": self.fits,
            "reason": self.reason,
            "runnable": self.runnable,
            "bytes": {device: need.to_dict() for device, need in self.bytes.items()},
            "needs_bytes": dict(self.needs),
            "host_bytes": None if self.host is None else self.host.to_dict(),
            "seconds": self.seconds.to_dict() if self.seconds else {},
            "notes": [*self.notes, *self.learned],
            "replayed": self.replayed,
        }


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One change with which a plan would fit, or a faster one than the best that fits now.

    Args:
        kind: what is to be changed. ``"memory"``: free bytes of devices or hosts; ``"batch_size"``; ``"setting"``: an argument of the
            strategy or the Trainer; ``"others"``: what other processes hold; ``"module"``: the user's own code, its optimizer or its
            validation loader; ``"devices"``: how many there are.
        text: the sentence.
        change: the same for a program: ``{"batch_size": 12}``, ``{"more_free_bytes": {"cpu:1": 4096}}``, ``{"allow": ["single", "ddp"]}``.
        plan: the plan that would be taken; None where none is certain.
        speedup: seconds a sample now over those after the change, both predicted; None where nothing fits now.
        gained_seconds: by how many seconds a batch is shorter then; None where nothing fits now.
        gained_bytes: by how many bytes the fullest device is emptier then, below 0 where it is fuller; None where nothing fits now.
    """

    kind: Literal["memory", "batch_size", "setting", "others", "module", "devices"]
    text: str
    change: Mapping[str, Any] = field(default_factory=dict)
    plan: Plan | None = None
    speedup: float | None = None
    gained_seconds: float | None = None
    gained_bytes: int | None = None

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "kind": self.kind,
            "text": self.text,
            "change": dict(self.change),
            "plan": self.plan.to_dict() if self.plan else None,
            "speedup": self.speedup,
            "gained_seconds": self.gained_seconds,
            "gained_bytes": self.gained_bytes,
        }


@dataclass(frozen=True, kw_only=True)
class Report:
    """Every candidate for one footprint on one inventory, the fitting ones first, best first.

    Args:
        inventory: the devices as they were.
        footprint: what one step needs.
        candidates: best first; after the fitting ones those that don't fit, then those that are ruled out.
        best_index: which of them is to be run; None where nothing fits.
        budgets: bytes that a plan may use, by device id.
        residuals: what earlier runs were measured to take, by which the predictions are corrected.
        adviser: finds the advice when somebody asks for it: it plans a few times more, which the search needn't wait for.
        precision: Lightning's name of the precision that was planned for.
        rates: how fast devices are, where that isn't the data sheets' word.
        lengths: the longest batches that the best plan can run, a sentence; "" where all have one size, or that isn't known.
    """

    inventory: Inventory
    footprint: Footprint
    candidates: tuple[Candidate, ...]
    best_index: int | None
    budgets: Mapping[str, int] = field(default_factory=dict)
    residuals: Corrections = field(default_factory=Corrections)
    adviser: Callable[[], tuple[Advice, ...]] | None = field(default=None, repr=False, compare=False)
    precision: str = "32-true"
    rates: Rates | None = field(default=None, repr=False, compare=False)
    lengths: str = ""

    @property
    def best_candidate(self) -> Candidate | None:
        """The candidate to be run; None where nothing fits."""
        return None if self.best_index is None else self.candidates[self.best_index]

    @property
    def best(self) -> Plan | None:
        """The plan to be run; None where nothing fits."""
        candidate = self.best_candidate
        return None if candidate is None else candidate.plan

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """Changes with which something would fit, or a faster plan, the most helpful first. Computed at the first access."""
        return self.adviser() if self.adviser is not None else ()

    def __getstate__(self) -> dict[str, Any]:
        """The state with the advice instead of the adviser, which refers to the whole search."""
        return {**self.__dict__, "advice": self.advice, "adviser": None}

    def headroom_bytes(self, candidate: Candidate) -> dict[str, int]:
        """The bytes of the budget that the plan leaves, by device id; below 0 where that much is missing."""
        return {
            device: self.budgets.get(device, self.inventory.device(device).free_bytes) - need for device, need in candidate.needs.items()
        }

    def shown_candidate(self) -> Candidate | None:
        """The candidate to show in detail: the best, or, where nothing fits, the first with a prediction, preferably a runnable one."""
        predicted = [candidate for candidate in self.candidates if candidate.bytes]
        return self.best_candidate or next(iter(sorted(predicted, key=lambda candidate: not candidate.runnable)), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: inventory, footprint, budgets, the index of the best or None, candidates, advice."""
        return {
            "inventory": self.inventory.to_dict(),
            "footprint": self.footprint.to_dict(),
            "precision": self.precision,
            "budgets": dict(self.budgets),
            "lengths": self.lengths,
            "best": self.best_index,
            "candidates": [{**candidate.to_dict(), "headroom_bytes": self.headroom_bytes(candidate)} for candidate in self.candidates],
            "advice": [advice.to_dict() for advice in self.advice],
        }

    def to_json(self) -> str:
        """:meth:`to_dict` as a JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def table(self) -> RenderableType:
        """The table for rich, as wide as the console: model and devices, a line for each candidate worth one, notes and advice."""
        from lightning_autopar.report.table import ReportTable

        return ReportTable(self)

    def save_picture(self, path: str | Path, candidate: Candidate | None = None) -> None:
        """Write :meth:`to_html` to a file.

        Raises:
            ValueError: if its name doesn't end in ``.html``, or it can't be written.
        """
        from lightning_autopar.report.page.markup import write

        write(self.to_html(candidate), path)

    def to_html(self, candidate: Candidate | None = None) -> str:
        """The whole report as one HTML page without external files: readable in light and dark, and printable.

        Args:
            candidate: whose memory and step are drawn; the best unless given, or where nothing fits the one that lacks least.
        """
        from lightning_autopar.report.page.report_page import report_page

        return str(report_page(self, candidate))

    def _repr_html_(self) -> str:
        """For a notebook: the page as a fragment whose style changes nothing else."""
        from lightning_autopar.report.page.report_page import report_fragment

        return str(report_fragment(self))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """For IPython in a terminal, and stored with the fragment in a notebook: the table."""
        printer.text(str(self))

    def __str__(self) -> str:
        from rich.console import Console

        out = io.StringIO()
        plain = {"color_system": None, "force_terminal": False, "force_jupyter": False, "legacy_windows": False}
        console = Console(file=out, width=_width(), **plain)  # type: ignore[arg-type]
        console.print(self.table())
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _width() -> int:
    """Columns of the terminal that the process writes to, by its output or its errors; where neither is one, some number."""
    for stream in (sys.__stdout__, sys.__stderr__):
        try:
            columns = os.get_terminal_size(stream.fileno()).columns if stream is not None else 0
        except (OSError, ValueError):  # no terminal; a closed stream
            continue
        if columns:
            return max(_LEAST_WIDTH, columns)
    return _WIDTH


class NothingFits(ValueError):
    """No plan can be run. The message contains the report's table, what is needed, what there is and what would help.

    Args:
        report: one without a best plan, kept in :attr:`report`.
        waited: a sentence on what the run waited for and how long; "" if it didn't wait.
    """

    def __init__(self, report: Report, waited: str = "") -> None:
        assert report.best_index is None, "something fits"
        self.report, self.waited = report, waited
        after = f"; {waited}" if waited else ""
        super().__init__(f"no plan fits: {_shortest_reason(report)}{after}\n\n{report}")

    def __reduce__(self) -> tuple[type[NothingFits], tuple[Report, str]]:
        """Pickled with the report rather than the message, so that it can come from another process."""
        return type(self), (self.report, self.waited)


def _shortest_reason(report: Report) -> str:
    """The need of the plan that needs least, and what there is."""
    predicted = [candidate for candidate in report.candidates if candidate.needs and candidate.runnable]
    if not predicted:
        return "; ".join(dict.fromkeys(f"{candidate.plan.engine}: {candidate.short_reason}" for candidate in report.candidates))
    least = min(predicted, key=lambda candidate: max(candidate.needs.values()))
    held = [candidate for candidate in report.candidates if candidate.needs and candidate.held_back]
    less = min(held, key=lambda candidate: max(candidate.needs.values()), default=least)
    need = max(less.needs.values())
    also = "" if need >= max(least.needs.values()) else f" ({less.plan.title()} needs {format_bytes(need)}: {less.short_reason})"
    return f"the allowed plan that needs least memory is {least.plan.title()}; it {least.reason}{also}"
