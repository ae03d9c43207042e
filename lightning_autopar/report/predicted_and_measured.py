"""Predicted and measured figures, device by device: as values, as a table, as numbers for loggers, and as warnings.

It must not know how either was found.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_autopar.report.report import Candidate
from lightning_autopar.text import format_bytes, format_change, format_seconds

#: The categories that can be measured separately in a run; the rest is activations, temporaries, communication and input.
_READABLE = ("parameters", "gradients", "optimizer", "buffers")
_TITLES = {"rest": "activations and the rest", "allocated": "tensors in all", "reserved": "held by torch", "context": "beside torch"}
_WIDTH = 100
#: By how much a device may exceed the allowed bytes before a warning: a share of them, and what loggers and metrics hold.
_TOLERATED_SHARE, _TOLERATED_BYTES = 0.02, 1 << 20


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One rank's figures.

    Args:
        device: its device's id.
        predicted: bytes by category: those of ``measured``, and ``"allocated"``, their sum.
        measured: bytes by category: ``"parameters"``, ``"gradients"``, ``"optimizer"``, ``"buffers"`` and ``"rest"`` at the peak of a
            training step, ``"allocated"``, their sum; on a GPU ``"reserved"`` by torch's allocator and ``"context"`` beside it. Unknown
            figures are missing.
    """

    device: str
    predicted: Mapping[str, int]
    measured: Mapping[str, int]
    predicted_seconds: float | None
    measured_seconds: float | None


def compare(candidate: Candidate, measured: Mapping[str, Mapping[str, Any]]) -> tuple[Comparison, ...]:
    """Put both beside each other.

    Args:
        candidate: the plan that ran, with its prediction.
        measured: by device id, as ``strategy.measured`` has it.
    """
    seconds = None if candidate.seconds is None else candidate.seconds.step
    found = []
    for device, values in measured.items():
        if device not in candidate.bytes:
            continue
        need = candidate.bytes[device]
        sizes = need.to_dict()
        seen: dict[str, int] = dict(values["bytes"])
        if seen:
            seen["allocated"] = sum(seen.values())
        elif values["peak_bytes"] is not None:
            seen["allocated"] = values["peak_bytes"]
        named = [name for name in _READABLE if name in seen or not values["bytes"]]
        predicted = {name: int(sizes.get(name, 0)) for name in named}
        predicted["rest"] = need.allocated - sum(predicted.values())
        predicted["allocated"] = need.allocated
        if values["reserved_bytes"] is not None:
            seen["reserved"] = values["reserved_bytes"]
            predicted["reserved"] = need.allocated + int(sizes.get("rounding", 0))
            predicted["context"] = int(sizes.get("context", 0))
        if values["context_bytes"] is not None:
            seen["context"] = values["context_bytes"]
        found.append(
            Comparison(
                device=device, predicted=predicted, measured=seen, predicted_seconds=seconds, measured_seconds=values["step_seconds"]
            )
        )
    return tuple(found)


def metrics(comparisons: Sequence[Comparison]) -> dict[str, float]:
    """The values for loggers: ``autopar/rank0/measured_bytes/parameters`` and so on."""
    found: dict[str, float] = {}
    for rank, each in enumerate(comparisons):
        for side, sizes in (("predicted", each.predicted), ("measured", each.measured)):
            found |= {f"autopar/rank{rank}/{side}_bytes/{name}": float(size) for name, size in sizes.items()}
        for side, seconds in (("predicted", each.predicted_seconds), ("measured", each.measured_seconds)):
            if seconds is not None:
                found[f"autopar/rank{rank}/{side}_step_seconds"] = seconds
    return found


def table(comparisons: Sequence[Comparison], title: str) -> str:
    """A text table: a line for each device and category that is worth one."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("device")
    shown.add_column("")
    for column in ("predicted", "measured", "difference"):
        shown.add_column(column, justify="right")
    for each in comparisons:
        for index, row in enumerate(_rows(each)):
            shown.add_row(each.device if index == 0 else "", *row)
    out = io.StringIO()
    plain = {"color_system": None, "force_terminal": False, "force_jupyter": False, "legacy_windows": False}
    Console(file=out, width=_WIDTH, **plain).print(shown)  # type: ignore[arg-type]
    return "\n".join([title, *(line.rstrip() for line in out.getvalue().splitlines() if line.strip())])


def _rows(each: Comparison) -> Iterator[tuple[str, ...]]:
    for name in dict.fromkeys((*each.predicted, *each.measured)):
        sizes = each.predicted.get(name), each.measured.get(name)
        if any(sizes):
            yield (
                _TITLES.get(name, name),
                *("–" if size is None else format_bytes(size) for size in sizes),
                _difference(*sizes, format_change),
            )
    times = each.predicted_seconds, each.measured_seconds
    if any(times):
        yield (
            "a step",
            *("–" if seconds is None else format_seconds(seconds) for seconds in times),
            _difference(*times, lambda after, before: f"{after / before - 1:+.1%}"),
        )


def _difference(predicted: float | None, measured: float | None, words: Callable[[float, float], str]) -> str:
    if predicted is None or measured is None:
        return ""
    return words(measured, predicted) if predicted else "more than nothing" if measured else ""


def warnings(candidate: Candidate, budgets: Mapping[str, int], comparisons: Sequence[Comparison]) -> tuple[str, ...]:
    """A sentence for each device that took more than its plan allowed for.

    Args:
        candidate: the plan that ran; its ``needs`` are the prediction with the margin for what it may miss.
    """
    found = []
    for each in comparisons:
        need, took = candidate.needs.get(each.device), each.measured.get("allocated")
        if "reserved" in each.measured:
            took = each.measured["reserved"] + each.measured.get("context", each.predicted["context"])
        if need is None or took is None or took <= need * (1 + _TOLERATED_SHARE) + _TOLERATED_BYTES:
            continue
        words = f"{each.device} took {format_bytes(took)}, {format_bytes(took - need)} more than the {format_bytes(need)} allowed for"
        budget = budgets.get(each.device)
        if budget is not None:
            left = f"{format_bytes(budget - took)} are left of" if took <= budget else f"it is {format_bytes(took - budget)} beyond"
            words += f"; {left} the {format_bytes(budget)} that the plan may use there"
        found.append(words)
    return tuple(found)
