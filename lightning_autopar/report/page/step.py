"""The page's section on the step: what each rank does and when, what it waits for, and where the seconds go.

It draws spans of time, which come from the same step as the predicted seconds. It must not know how seconds are predicted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from lightning_autopar import engines
from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.plans import Plan
from lightning_autopar.report.page.markup import Figure, Html, Row, axis, element, figures, percent, rect, share, text
from lightning_autopar.report.page.style import color_class
from lightning_autopar.report.report import Candidate, Report
from lightning_autopar.report.table import by_part
from lightning_autopar.text import format_seconds
from lightning_autopar.timing.data_sheet import DATA_SHEET
from lightning_autopar.timing.rank_compute import LaneSpan
from lightning_autopar.timing.rates import Rates

Lane = Literal["compute", "communication"]
#: A gap shorter than this share of the step is rounding, not waiting.
_NOTHING = 1e-6


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something that a rank does, with its begin and end.

    Args:
        start_seconds: since the step began.
        label: of which block or stage.
        lane: a GPU computes and communicates at once, on two lanes; all work of a rank's cores is on the first.
    """

    rank: int
    start_seconds: float
    end_seconds: float
    kind: str
    label: str
    lane: Lane = "compute"


def timeline(
    footprint: Footprint,
    plan: Plan,
    inventory: Inventory,
    *,
    precision: str = "32-true",
    rates: Rates | None = None,
    ranks: int | None = None,
) -> tuple[Span, ...]:
    """The spans of one step by rank, in the order of their beginning on each lane.

    Args:
        footprint: as for :func:`lightning_autopar.planning.plan_seconds.predict_seconds`; so are ``plan``, ``inventory``, ``precision``
            and ``rates``.
        ranks: the first so many ranks only; all of them by default.

    Raises:
        ValueError: if a device of the plan isn't in the inventory, or the plan names blocks that the footprint hasn't.
    """
    step = engines.of(plan).step(footprint, plan, inventory, precision, rates or DATA_SHEET)
    seconds = step.seconds().step
    events = step.events(min(plan.world_size, ranks or plan.world_size))
    return tuple(span for rank, found in enumerate(events) for span in _spans(rank, found, seconds))


def _spans(rank: int, events: Iterable[LaneSpan], step_seconds: float) -> list[Span]:
    """The spans in order, with the compute lane's waiting in between."""
    spans: list[Span] = []
    lanes: tuple[Lane, Lane] = ("compute", "communication")
    ordered = sorted(events, key=lambda event: event.start)
    for lane in lanes:
        clock = 0.0
        for event in ordered:
            if event.lane != lane:
                continue
            if lane == "compute" and event.start - clock > _NOTHING * step_seconds:
                spans.append(Span(rank=rank, start_seconds=clock, end_seconds=event.start, kind="idle", label=""))
            spans.append(Span(rank=rank, start_seconds=event.start, end_seconds=event.end, kind=event.kind, label=event.label, lane=lane))
            clock = event.end
        if lane == "compute" and step_seconds - clock > _NOTHING * step_seconds:
            spans.append(Span(rank=rank, start_seconds=clock, end_seconds=step_seconds, kind="idle", label=""))
    return spans


#: The most rows that can be read; more only if one replica has more stages.
_MOST_RANKS, _MOST_STAGES = 16, 64
#: About the most spans of a page; shorter ones are merged until there are so few.
_MOST_SPANS, _LEAST_SHARE = 4000, 1 / 2000
#: Blocks that take a smaller share of the step are merged; micro-batches, which readers look for, aren't.
_BLOCK_SHARE = 0.012
#: The share of the axis from which on a character of a micro-batch's number fits: on a wide page, and on every page.
_CHARACTER_SHARE, _ALWAYS_SHARE = 0.008, 0.02
_ROW_PIXELS, _BESIDE_PIXELS = 24, 9
_STAGE, _MICRO_BATCH = re.compile(r"\bstage (\d+)"), re.compile(r"\bmicro-batch (\d+)")


def step_section(report: Report, candidate: Candidate) -> Html:
    """A row for each rank, and the parts of the seconds.

    Args:
        candidate: one with a prediction of its time.
    """
    parts = parts_figure(candidate)
    return element(
        "section",
        step_figure(report, candidate).html(),
        None if parts is None else parts.html("h3"),
        element(
            "details", element("summary", "Compared with the next plans", class_="head"), figures("of a step", by_part(report, candidate))
        ),
    )


def step_figure(report: Report, candidate: Candidate) -> Figure:
    """A row for each rank, equal ranks as one."""
    plan = candidate.plan
    limit = max(_MOST_RANKS, min(0 if engines.of(plan).splits else plan.devices_per_replica, _MOST_STAGES))
    spans = timeline(report.footprint, plan, report.inventory, precision=report.precision, rates=report.rates, ranks=limit)
    end = max((span.end_seconds for span in spans), default=0.0)
    groups = _alike(spans)
    short = (_BLOCK_SHARE if engines.of(plan).splits else _LEAST_SHARE) * end
    drawn = [(_merged(found, end * _LEAST_SHARE, short), ranks) for found, ranks in groups]
    while sum(len(found) for found, _ in drawn) > _MOST_SPANS:
        short *= 2
        drawn = [(_merged(found, short, short), ranks) for found, ranks in drawn]
    more = f" Shown are ranks 0 to {limit - 1} of {plan.world_size}." if plan.world_size > limit else ""
    every = [span for found, _ in drawn for span in found]
    numbers = " Numbers are micro-batches." if any(_MICRO_BATCH.search(span.label) for span in every) else ""
    beside = " The thin row is communication that goes on beside computing." if any(span.lane != "compute" for span in every) else ""
    scale, unit = (1e6, "µs") if end < 1e-3 else (1e3, "ms") if end < 1 else (1.0, "s")
    return Figure(
        title="One training step" if report.footprint.training else "One step",
        caption=f"What each rank does, and when.{numbers}{beside}{more}",
        legend=tuple(_marks(every, plan.devices_per_replica)),
        rows=tuple(_row(report, candidate, found, ranks, end) for found, ranks in drawn),
        axis=axis(end * scale, unit),
    )


def _alike(spans: Iterable[Span]) -> list[tuple[list[Span], list[int]]]:
    """The different things that ranks do, and which ranks do each."""
    found: dict[tuple[object, ...], tuple[list[Span], list[int]]] = {}
    for rank, group in groupby(spans, key=lambda span: span.rank):
        its = list(group)
        key = tuple((span.start_seconds, span.end_seconds, span.kind, span.label, span.lane) for span in its)
        found.setdefault(key, (its, []))[1].append(rank)
    return list(found.values())


def _merged(spans: Iterable[Span], gap_seconds: float, short_seconds: float) -> list[Span]:
    """The spans, with close ones of one kind merged if one is too short to be seen or they are the same."""
    merged: list[Span] = []
    for span in spans:
        last = merged[-1] if merged else None
        if last is not None and (last.lane, last.kind) == (span.lane, span.kind) and span.start_seconds - last.end_seconds < gap_seconds:
            short = min(last.end_seconds - last.start_seconds, span.end_seconds - span.start_seconds) < short_seconds
            if short or span.label == last.label:
                first, _, _ = last.label.partition(" … ")
                words = first if first == span.label else f"{first} … {span.label.rpartition(' … ')[2]}"
                merged[-1] = Span(
                    rank=last.rank,
                    start_seconds=last.start_seconds,
                    end_seconds=max(last.end_seconds, span.end_seconds),
                    kind=last.kind,
                    label=words,
                    lane=last.lane,
                )
                continue
        merged.append(span)
    return merged


def _row(report: Report, candidate: Candidate, spans: Sequence[Span], ranks: Sequence[int], end: float) -> Row:
    """A rank's name, what it does, and how much of the step it waits."""
    device = report.inventory.device(candidate.plan.devices[ranks[0]])
    name = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_runs(ranks)} ({len(ranks)} alike)"
    beside = any(span.lane != "compute" for span in spans)
    drawn, words = [], []
    for span in spans:
        computing = span.lane == "compute"
        kind = _shade(span, candidate.plan.devices_per_replica)
        tip = f"{'waiting' if span.kind == 'idle' else span.kind}{', ' + span.label if span.label else ''}: "
        tip += f"{format_seconds(span.end_seconds - span.start_seconds)}, at {format_seconds(span.start_seconds)}"
        y, height = (0, _ROW_PIXELS) if computing else (_ROW_PIXELS + 1, _BESIDE_PIXELS)
        class_ = f"cell {color_class(kind)}"
        drawn.append(rect(span.start_seconds, span.end_seconds, end, class_=class_, y=y, height=height, title=tip))
        number = _MICRO_BATCH.search(span.label)
        room = (span.end_seconds - span.start_seconds) / end
        if computing and number and "…" not in span.label and room >= _CHARACTER_SHARE * len(number[1]):
            middle = (span.start_seconds + span.end_seconds) / 2
            wide = " wide" if room < _ALWAYS_SHARE * len(number[1]) else ""
            words.append(text(number[1], share(middle, end), _ROW_PIXELS / 2 + 4, class_=f"on-{color_class(kind)}{wide}"))
    waits = sum(span.end_seconds - span.start_seconds for span in spans if span.kind == "idle" and span.lane == "compute")
    waiting = f"waits {percent(waits / end)}" if end and waits / end >= 0.0005 else "never waits"
    label = f"{name}: {waiting} of the step"
    height = _ROW_PIXELS + (1 + _BESIDE_PIXELS if beside else 0)
    where = f" on {report.inventory.device(device.id).name} {device.id}" if len(ranks) == 1 else ""
    return Row(
        name=name,
        height=height,
        label=label + where,
        drawn=(*drawn, element("g", *words)) if words else tuple(drawn),
        words=((waiting, "soft"),),
        class_="cells",
    )


def _runs(ranks: Sequence[int]) -> str:
    """``"0–3, 6"``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _shade(span: Span, ranks: int) -> str:
    """The span's kind; every other stage of a rank has a colour of its own."""
    stage = _STAGE.search(span.label)
    second = stage is not None and int(stage[1]) // max(1, ranks) % 2 == 1
    return f"{span.kind}-2" if second and span.kind in ("forward", "backward") else span.kind


def _marks(spans: Sequence[Span], ranks: int) -> list[tuple[str, str]]:
    """The colours in use, in the order of a step."""
    order = ("forward", "forward-2", "backward", "backward-2", "recompute", "communication", "optimizer", "offload", "input", "idle")
    there = {_shade(span, ranks) for span in spans}
    names = {"idle": "waiting", "forward-2": "forward, the rank's other stage", "backward-2": "backward, the rank's other stage"}
    return [(color_class(kind), names.get(kind, kind)) for kind in order if kind in there]


def parts_figure(candidate: Candidate) -> Figure | None:
    """Where the slowest rank's seconds go, as one bar and in words."""
    if candidate.seconds is None or candidate.seconds.step <= 0:
        return None
    step = candidate.seconds.step
    parts = {name: seconds for name, seconds in candidate.seconds.parts().items() if seconds > 0}
    drawn, start = [], 0.0
    for name, seconds in parts.items():
        title = f"{name}: {format_seconds(seconds)}"
        drawn.append(rect(start, start + seconds, step, class_=f"cell {color_class(name)}", height=_ROW_PIXELS, title=title))
        start += seconds
    marks = [
        (color_class(name), f"{name} {format_seconds(seconds)} ({percent(seconds / step)})")
        for name, seconds in parts.items()
        if seconds >= _LEAST_SHARE * step
    ]
    said = ", ".join(words for _, words in marks)
    return Figure(
        title=f"Where the slowest rank's {format_seconds(step)} go",
        legend=tuple(marks),
        rows=(Row(height=_ROW_PIXELS, label=f"the step's parts: {said}", drawn=tuple(drawn)),),
    )
