"""The report as one self-contained HTML page: the chosen plan and its reasons, memory, a step, every candidate, the footprint.

It reads a report, and must not know how it was made. All drawings are inline SVG, and the page has no script.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_autopar.devices.inventory import devices_label
from lightning_autopar.report.page.markup import Html, chart, element, fragment, join, page, percent, rect, share
from lightning_autopar.report.page.memory import layer_section, memory_section
from lightning_autopar.report.page.step import step_section
from lightning_autopar.report.report import Candidate, Report
from lightning_autopar.report.table import device_words, fullest, fullest_words, grouped, headroom_words, occasion_words, time_words
from lightning_autopar.text import format_bytes, format_seconds


def report_page(report: Report, candidate: Candidate | None = None) -> Html:
    """A whole page.

    Args:
        candidate: whose memory and step are drawn; :meth:`Report.shown_candidate` by default.
    """
    shown = candidate or report.shown_candidate()
    title = "nothing fits" if report.best is None else report.best.title()
    return page(f"{title} · lightning-autopar", _body(report, shown))


def report_fragment(report: Report) -> Html:
    """The same for a place in another page, such as a notebook's cell."""
    return fragment(_body(report, report.shown_candidate()))


def _body(report: Report, shown: Candidate | None) -> list[Html]:
    """All sections that have content."""
    parts = [_head(report, shown), _why(report, shown), _advice(report)]
    if shown is not None and shown.bytes:
        parts.append(memory_section(report, shown))
    if shown is not None and shown.seconds is not None:
        parts.append(step_section(report, shown))
    parts += [table_section(report), layer_section(report), _notes(report)]
    return [part for part in parts if part is not None]


def _head(report: Report, shown: Candidate | None) -> Html:
    """What was chosen, and its main figures."""
    best = report.best_candidate
    words = "Chosen plan" if best is shown else "Plan"
    if best is None:
        words = "No plan fits; the nearest one is shown"
    title = shown.plan.title() if shown is not None else "Nothing fits"
    return element(
        "header",
        element("p", words, class_="eyebrow" if best is not None else "alarm"),
        element("h1", title),
        element(
            "dl",
            *(element("div", element("dt", name), element("dd", *figures)) for name, *figures in _tiles(report, shown)),
            class_="tiles",
        ),
    )


def _tiles(report: Report, shown: Candidate | None) -> list[tuple[str, ...]]:
    """Names and figures."""
    needs = report.footprint
    tiles: list[tuple[str, ...]] = []
    if shown is not None and shown.seconds is not None:
        step = shown.seconds.step
        rate = needs.batch_size / step if step > 0 else 0.0
        words = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
        tiles.append(("a step, predicted", format_seconds(step), *([element("span", f"{words} samples a second")] if rate else [])))
    if shown is not None and (full := fullest(report, shown)) is not None:
        need, budget = full
        tiles.append(("fullest device", format_bytes(need), element("span", f"{need / max(1, budget):.0%} of {format_bytes(budget)}")))
    if shown is not None:
        used, there = len(shown.plan.devices), len(report.inventory.devices)
        tiles.append(("devices", f"{used:,} of {there:,}", element("span", shown.plan.engine)))
    trainable = f"{needs.trainable_parameters:,} trainable"
    tiles.append(("parameters", _count(needs.parameters), element("span", trainable)))
    batch = f"{needs.batch_size:,}" if needs.batch_size else "–"
    tiles.append(("batch, over all devices", batch, element("span", f"precision {report.precision}")))
    fitting = sum(candidate.fits for candidate in report.candidates)
    tiles.append(("plans that fit", f"{fitting:,} of {len(report.candidates):,}"))
    return tiles


def _count(number: int) -> str:
    """``9575936`` → ``"9.58 M"``."""
    for unit, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {letter}"
    return str(number)


def _why(report: Report, shown: Candidate | None) -> Html | None:
    """The plan's reasons, or what speaks against the shown one."""
    if shown is None:
        return None
    reasons = [shown.reason] if shown.reason else []
    reasons += [*shown.plan.reasons, *shown.notes, *shown.learned]
    if not reasons:
        return None
    title = "Why this plan" if shown.fits else "Why it can't be taken"
    return element("section", element("h2", title), element("ul", *(element("li", reason) for reason in reasons)))


def _advice(report: Report) -> Html | None:
    """What would help."""
    if not report.advice:
        return None
    advice = [element("li", str(each)) for each in report.advice]
    title = "What would make it faster" if report.best is not None else "What would make something fit"
    return element("section", element("div", element("h3", title, style="margin-top:0"), element("ul", *advice), class_="advice"))


def _notes(report: Report) -> Html:
    """Devices, what was assumed, and what the figures rest on."""
    needs = report.footprint
    step = "training step" if needs.training else "step without gradients"
    sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in needs.to_dict()["bytes"].items() if size)
    lines = [f"One {step} needs, on one device: {sizes or 'nothing known'}."]
    if needs.margin:
        lines.append(f"Safety margin for errors of the prediction: {needs.margin * 100:.3g} %.")
    lines += [f"Assumed: {assumption}" for assumption in needs.assumptions]
    lines += [f"Device: {words}" for words in device_words(report.inventory)]
    lines.append(f"Times: by rates {name}" if (name := getattr(report.rates, "name", "")) else "Times: by data sheets")
    lines += [f"Note: {note}" for note in report.inventory.notes]
    return element("section", element("h2", "What this rests on"), element("ul", *(element("li", line) for line in lines)))


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
        element("td", _reason(report, candidate, best), role="cell", class_="why"),
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


def _reason(report: Report, candidate: Candidate, best: bool) -> Html:
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
