"""What happened to a run over time, as values and as text. The agent's recorder fills it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_autopar.text import counted, format_length

_LINE_CHARACTERS = 150


@dataclass(frozen=True, kw_only=True)
class PlanSpan:
    """A time in which a plan ran, or the run was parked.

    Args:
        start_seconds: since the run began.
        end_seconds: the same; infinite while it lasts.
        title: the plan in words; ``"parked"``.
        devices: it ran on; none while parked.
        predicted_bytes: what was predicted to be taken of each.
        reason: why it began.
        pause_seconds: from the last batch before it to its first; None where there was none before.
    """

    start_seconds: float
    end_seconds: float = math.inf
    title: str
    devices: tuple[str, ...] = ()
    predicted_bytes: Mapping[str, int] = field(default_factory=dict)
    reason: str = ""
    pause_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunMark:
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
class RunHistory:
    """What happened to a run. Times are in seconds since it began. ``print(history)`` tells it, as a notebook's cell does.

    Args:
        spans: plans and times of being parked; those between two of them were spent moving.
        marks: moves, parks, failures, with their reasons.
    """

    title: str = ""
    spans: tuple[PlanSpan, ...] = ()
    marks: tuple[RunMark, ...] = ()

    def __str__(self) -> str:
        """What ran and how often it moved; a line for each plan with its devices, and one for each mark."""
        kinds = [mark.kind for mark in self.marks]
        counts = [counted(kinds.count(kind), kind) for kind in dict.fromkeys(kinds)]
        ends = [*(span.end_seconds for span in self.spans), *(mark.at_seconds for mark in self.marks)]
        lines = [", ".join([self.title or "a run", format_length(max(ends, default=0.0)), *counts])]
        for span in self.spans:
            where = f" on {', '.join(span.devices)}" if span.devices else ""
            lines.append(f"{format_length(span.start_seconds)} to {format_length(span.end_seconds)}: {span.title}{where}")
        for mark in self.marks:
            told = f"at {format_length(mark.at_seconds)}, {mark.kind}: {mark.words}"
            lines += textwrap.wrap(told, _LINE_CHARACTERS, subsequent_indent="    ")
        return "\n".join(lines)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """For IPython."""
        printer.text(str(self))
