"""The page's list of every candidate, those that fit first. Each opens to show what speaks for or against it.

It reads a report, and must not know how plans are found.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_autopar.devices.inventory import devices_label
from lightning_autopar.report.page.markup import Html, chart, element, join, percent, rect, share
from lightning_autopar.report.report import Candidate, Report
from lightning_autopar.report.table import fullest, fullest_words, grouped, headroom_words, occasion_words, time_words
from lightning_autopar.text import format_seconds

#: How many fitting plans are shown; further ones are folded.
_MOST_OPEN = 12
_BAR_PIXELS = 7
_COLUMNS = (("rank", "#"), ("plan", "plan"), ("memory", "peak memory (fullest device)"), ("step", "a step"), ("why", "why, or why not"))


def table_section(report: Report) -> Html:
    """All candidates in the groups of :func:`lightning_autopar.report.table.grouped`."""
    groups = grouped(report)
    timed = [candidate.seconds.step for candidate in report.candidates if candidate.seconds and candidate.fits]
    timed = timed or [candidate.seconds.step for candidate in report.candidates if candidate.seconds]
    slowest = max(timed, default=0.0)
    parts: list[Html] = []
    nothing_fits = not groups["that fit"]
    for which, indices in groups.items():
        if not indices:
            continue
        opened = which == "that fit" or (nothing_fits and which == "that don't fit")
        first, rest = (indices[:_MOST_OPEN], indices[_MOST_OPEN:]) if opened else ([], indices)
        if first:
            words = _counted(len(indices), which)
            parts.append(join([element("p", words, class_="soft"), _table(report, first, words, slowest)]))
        if rest:
            words = f"{len(rest)} more {which}" if first else _counted(len(rest), which)
            parts.append(element("details", element("summary", words, class_="head"), _table(report, rest, words, slowest)))
    return element("section", element("h2", f"All {len(report.candidates)} plans considered"), *parts)


def _counted(count: int, which: str) -> str:
    """``"8 that fit"``, ``"1 that fits"``."""
    alone = {"that fit": "that fits", "that don't fit": "that doesn't fit"}
    return f"{count} {alone.get(which, which) if count == 1 else which}"


def _table(report: Report, indices: Sequence[int], title: str, slowest: float) -> Html:
    """One group. It names roles, as a narrow page shows rows as blocks, which would lose their roles."""
    head = element("tr", *(element("th", words, scope="col", role="columnheader", class_=name) for name, words in _COLUMNS), role="row")
    rows = [_row(report, index, slowest) for index in indices]
    return element(
        "table",
        element("thead", head, role="rowgroup"),
        element("tbody", *rows, role="rowgroup"),
        class_="plans",
        role="table",
        aria_label=title,
    )


def _row(report: Report, index: int, slowest: float) -> Html:
    """A candidate's cells."""
    candidate = report.candidates[index]
    best = index == report.best_index
    devices = devices_label([report.inventory.device(device) for device in candidate.plan.devices])
    return element(
        "tr",
        element("td", "▸ " if best else None, str(index + 1) if candidate.fits else "–", role="cell", class_="rank"),
        element("th", candidate.plan.title(), element("span", devices), scope="row", role="rowheader", class_="plan"),
        element("td", _memory(report, candidate), role="cell", class_="memory"),
        element("td", _step(candidate, slowest), role="cell", class_="step"),
        element("td", _why(report, candidate, best), role="cell", class_="why"),
        class_="best" if best else None,
        role="row",
    )


def _memory(report: Report, candidate: Candidate) -> Html:
    """How full the fullest device is: words and a bar."""
    found = fullest(report, candidate)
    if found is None:
        return Html("–")
    need, budget = found
    whole = max(need, budget)
    words, percent = fullest_words(report, candidate)
    at = share(budget, whole)
    drawn = [rect(0, need, whole, class_="c-ours" if need <= budget else "c-activations", height=_BAR_PIXELS)]
    drawn.append(rect(0, budget, whole, class_="frame", y=0.5, height=_BAR_PIXELS - 1))
    drawn += [element("line", class_="mark over", x1=at, x2=at, y1=0, y2=_BAR_PIXELS)] if need > budget else []
    return join(
        [
            words,
            " ",
            element("span", percent, class_=None if need <= budget else "alarm"),
            _bar(f"{percent} full" if percent else words, drawn),
        ]
    )


def _step(candidate: Candidate, slowest: float) -> Html:
    """Seconds: words, and a bar relative to the slowest that fits."""
    if candidate.seconds is None:
        return Html("–")
    step = candidate.seconds.step
    if step > slowest:
        return join([format_seconds(step)])  # beyond the scale, which is for plans that fit
    return join([format_seconds(step), _bar(format_seconds(step), [rect(0, step, slowest, class_="c-backward", height=_BAR_PIXELS)])])


def _bar(label: str, drawn: Sequence[Html]) -> Html:
    return element("div", chart(_BAR_PIXELS, label, *drawn), class_="bar")


def _why(report: Report, candidate: Candidate, best: bool) -> Html:
    """The short reason, which opens to show all that is known."""
    reason = candidate.short_reason
    notes = (*candidate.notes, *candidate.learned)
    short = reason or ("chosen" if best else _beside(report, candidate))
    told = []
    if candidate.reason and candidate.reason != short:
        told.append(candidate.reason)
    told += [note for note in notes if note != short]
    told += candidate.plan.reasons
    if candidate.seconds is not None:
        told.append(f"of its {format_seconds(candidate.seconds.step)}: {time_words(candidate.seconds)}")
    if candidate.needs:
        told.append(f"headroom: {headroom_words(report, candidate)}")
    if when := occasion_words(report, candidate):
        told.append(f"memory is fullest {when}")
    if candidate.host is not None:
        told.append(f"memory of the host: {candidate.host.words()}")
    if not told:
        return element("span", short)
    return element("details", element("summary", short), element("ul", *(element("li", words) for words in dict.fromkeys(told))))


def _beside(report: Report, candidate: Candidate) -> str:
    """How a plan that fits compares with the chosen one."""
    best = report.best_candidate
    left = f"{headroom_words(report, candidate)} left"
    if best is None or best.seconds is None or candidate.seconds is None or not best.seconds.step:
        return left
    more = candidate.seconds.step / best.seconds.step - 1
    if abs(more) < 0.0005:
        return f"as fast, {left}"
    return f"{more + 1:.2g} × as long, {left}" if more >= 1 else f"{percent(abs(more))} {'slower' if more > 0 else 'faster'}, {left}"
