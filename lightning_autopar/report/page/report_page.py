"""The report as one self-contained HTML page: the chosen plan and its reasons, memory, a step, every candidate, the footprint.

It reads a report, and must not know how it was made. All drawings are inline SVG, and the page has no script.
"""

from __future__ import annotations

from lightning_autopar.report.page.markup import Html, element, fragment, page
from lightning_autopar.report.page.memory import layer_section, memory_figure, memory_section
from lightning_autopar.report.page.plan_list import table_section
from lightning_autopar.report.page.step import parts_figure, step_figure, step_section
from lightning_autopar.report.page.svg_file import Picture, picture_of
from lightning_autopar.report.report import Candidate, Report
from lightning_autopar.report.table import device_words, fullest
from lightning_autopar.text import format_bytes, format_seconds


def report_page(report: Report, candidate: Candidate | None = None) -> Html:
    """A whole page.

    Args:
        report: what it shows.
        candidate: whose memory and step are drawn; :meth:`Report.shown_candidate` by default.
    """
    shown = candidate or report.shown_candidate()
    title = "nothing fits" if report.best is None else report.best.title()
    return page(f"{title} · lightning-autopar", _body(report, shown))


def report_fragment(report: Report, candidate: Candidate | None = None) -> Html:
    """The same for a place in another page, such as a notebook's cell."""
    return fragment(_body(report, candidate or report.shown_candidate()))


def report_picture(report: Report, candidate: Candidate | None = None) -> Picture:
    """The page's drawings of a plan, memory and step, as one SVG.

    Raises:
        ValueError: if there is no prediction to draw.
    """
    shown = candidate or report.shown_candidate()
    if shown is None or not shown.bytes:
        which = "none of the plans" if shown is None else f"the plan {shown.plan.title()!r}"
        why = shown.reason if shown is not None else "; ".join(dict.fromkeys(one.reason or "" for one in report.candidates))
        raise ValueError(f"there is nothing to draw: {which} was predicted ({why}); draw one that has a prediction")
    figures = [memory_figure(report, shown)]
    if shown.seconds is not None:
        figures.append(step_figure(report, shown))
        figures += [parts] if (parts := parts_figure(shown)) is not None else []
    return picture_of(_title(shown), figures)


def _title(candidate: Candidate) -> str:
    """The plan and its main figures."""
    step = f", {format_seconds(candidate.seconds.step)} a step" if candidate.seconds else ""
    if candidate.fits:
        return f"{candidate.plan.title()}: {format_bytes(max(candidate.needs.values(), default=0))} on the fullest device{step}"
    verdict = "wasn't asked for" if not candidate.runnable else "doesn't fit"
    return f"{candidate.plan.title()} {verdict}{step}"


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
        lines.append(f"Safety margin for what the prediction may miss: {needs.margin * 100:.3g} %.")
    lines += [f"Assumed: {assumption}" for assumption in needs.assumptions]
    lines += [f"Device: {words}" for words in device_words(report.inventory)]
    lines.append(f"Times: by rates {name}" if (name := getattr(report.rates, "name", "")) else "Times: by data sheets")
    lines += [f"Note: {note}" for note in report.inventory.notes]
    return element("section", element("h2", "What this rests on"), element("ul", *(element("li", line) for line in lines)))
