"""The report's page: what is on it, that nothing gets out of it or into it, and how big it becomes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_autopar.constraints import Constraints
from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.planning.make_report import make_report
from lightning_autopar.report.page.markup import element, fragment, percent, share, ticks
from lightning_autopar.report.page.step import timeline
from lightning_autopar.report.page.style import contrast, on_color
from lightning_autopar.report.report import NothingFits, Report
from lightning_autopar.text import format_bytes
from tests.fakes.pages import NASTY, Parsed, pipelined
from tests.fakes.values import GIB, MIB, footprint, gpu, inventory

STEP = footprint(batch_size=16, parameter_bytes=GIB, activation_bytes=2 * GIB, flops=10**15, margin=0.05)


def made(here: Any, step: Any = STEP, **constraints: Any) -> Report:
    try:
        return make_report(step, here, Constraints(**constraints))
    except NothingFits as error:
        return error.report


@pytest.fixture(scope="module")
def report() -> Report:
    return made(inventory(gpu(0), gpu(1, 40 * GIB), gpu(2, 60 * GIB)), allow=("single", "ddp", "fsdp", "pipeline"))


def test_a_page_has_the_plan_its_reasons_and_every_candidate(report: Report) -> None:
    page = Parsed(report.to_html())
    assert [tag for tag, _ in page.tags[:2]] == ["html", "head"]
    assert report.to_html().startswith("<!DOCTYPE html>")
    best = report.best_candidate
    assert best is not None
    assert best.plan.title() in page.words
    assert f"{best.plan.title()} · lightning-autopar" in page.words
    for reason in best.plan.reasons:
        assert reason in page.words
    titles = [words for words in page.words if words in {candidate.plan.title() for candidate in report.candidates}]
    for candidate in report.candidates:
        assert candidate.plan.title() in titles
        assert candidate.reason is None or candidate.reason in page.words
    # The header of each row of the plans, the chosen one first.
    rows = [found.get("class") for tag, found in page.tags if tag == "tr" and found.get("role") == "row"]
    assert rows.count("best") == 1
    assert len([tag for tag, found in page.tags if found.get("role") == "rowheader"]) == len(report.candidates)
    assert f"All {len(report.candidates)} plans considered" in page.words


def test_memory_is_drawn_to_scale_with_what_is_left(report: Report) -> None:
    page = Parsed(report.to_html())
    best = report.best_candidate
    assert best is not None
    left = report.headroom_bytes(best)
    labels = page.attributes("svg", "aria-label")
    for device in best.plan.devices:
        need = best.needs[device]
        words = f"{format_bytes(need)} of {format_bytes(need + left[device])}, {format_bytes(left[device])} left"
        assert any(label.endswith(words) for label in labels)
    lines = [found for tag, found in page.tags if tag == "line"]
    marks = [float(str(found["x1"]).rstrip("%")) for found in lines if found.get("class") == "mark"]
    most = 79 * GIB
    budgets = {round(100 * report.budgets[device] / most, 1) for device in best.plan.devices}
    assert budgets <= {round(mark, 1) for mark in marks}


def test_a_step_is_drawn_as_it_is_predicted() -> None:
    shown = pipelined()
    best = shown.best_candidate
    assert best is not None
    assert best.plan.engine == "pipeline"
    spans = timeline(shown.footprint, best.plan, shown.inventory, precision=shown.precision, rates=shown.rates)
    end = max(span.end_seconds for span in spans)
    page = Parsed(shown.to_html())
    rows = [label for label in page.attributes("svg", "aria-label") if label.startswith("rank") and " of the step" in label]
    assert len(rows) == best.plan.world_size
    for rank, label in enumerate(rows):
        waits = sum(span.end_seconds - span.start_seconds for span in spans if span.rank == rank and span.kind == "idle") / end
        assert f"waits {percent(waits)}" in label or (waits < 0.0005 and "never waits" in label)
    assert "waiting" in page.words
    assert "Numbers are micro-batches." in " ".join(page.words)
    for micro_batch in range(best.plan.micro_batches):
        assert any(f"micro-batch {micro_batch}:" in words for words in page.words)
    cells = [found for tag, found in page.tags if tag == "rect" and str(found.get("class")).startswith("cell")]
    ends = [float(str(found["x"]).rstrip("%")) + float(str(found["width"]).rstrip("%")) for found in cells]
    assert max(ends) == pytest.approx(100, abs=0.05)


def test_what_is_missing_stands_out_where_nothing_fits() -> None:
    page = Parsed(made(parse_spec("2xcpu:4GiB"), allow=("single", "ddp")).to_html())
    assert "nothing fits · lightning-autopar" in page.words
    assert "No plan fits; the nearest one is shown" in page.words
    assert "Why it can't be taken" in page.words
    assert any(words.endswith("too little") for words in page.words)


def test_a_report_without_any_prediction_has_a_page() -> None:
    full = made(parse_spec("2xcpu:64GiB"))
    ruled_out = tuple(
        replace(candidate, fits=False, reason="ruled out for this test", bytes={}, raw={}, needs={}, seconds=None, raw_seconds=None)
        for candidate in full.candidates
    )
    page = Parsed(replace(full, candidates=ruled_out, best_index=None, adviser=None).to_html())
    assert "Nothing fits" in page.words
    assert page.words.count("ruled out for this test") == len(ruled_out)


def test_what_comes_from_the_user_is_escaped_everywhere() -> None:
    blocks = tuple(replace(block, fqn=f"{NASTY}.{index}") for index, block in enumerate(STEP.blocks))
    step = replace(STEP, blocks=blocks, assumptions=(NASTY,))
    here = inventory(*(replace(gpu(index), name=NASTY, id=f"{NASTY}{index}", index=None) for index in range(2)), notes=(NASTY,))
    shown = made(here, step)
    for markup in (shown.to_html(), shown._repr_html_()):
        page = Parsed(markup)
        assert not [tag for tag, _ in page.tags if tag in ("img", "script")]
        assert any(NASTY in words for words in page.words)
        assert any(NASTY in label for label in page.attributes("svg", "aria-label"))


def test_it_needs_nothing_but_itself(report: Report) -> None:
    for markup in (report.to_html(), report._repr_html_()):
        page = Parsed(markup)
        assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
        for _, attributes in page.tags:
            assert not {"src", "href", "xlink:href", "srcset"} & set(attributes)
            assert not [name for name in attributes if name.startswith("on")]
        assert re.findall(r"https?://|@import|url\((?!#)", page.style) == []


def test_a_fragment_keeps_its_style_to_itself(report: Report) -> None:
    page = Parsed(report._repr_html_())
    tag, attributes = page.tags[0]
    scope = attributes["id"] or ""
    assert tag == "div"
    assert not {"html", "head", "body", "main"} & {tag for tag, _ in page.tags}
    assert page.open == []
    inner = re.sub(r"@(?:media|container)[^{]*\{", "", page.style)
    selectors = [each.strip() for rule in re.findall(r"([^{}]+)\{", inner) for each in rule.split(",")]
    assert len(selectors) > 100
    assert [selector for selector in selectors if f"#{scope}" not in selector] == []
    assert set(re.findall(r"url\(#([^)]+)\)", page.style)) == {f"{scope}-hatch"}
    assert f"{scope}-hatch" in page.attributes("pattern", "id")
    other = Parsed(made(parse_spec("2xcpu:64GiB"), allow=("single",))._repr_html_())
    assert other.tags[0][1]["id"] != scope
    # The same report gives the same page.
    assert Parsed(report._repr_html_()).tags[0][1]["id"] == scope


def test_a_big_report_stays_small_and_loses_no_candidate() -> None:
    here = parse_spec("128x8xH100-80GB")
    devices = tuple(replace(device, free_bytes=device.free_bytes - index * MIB) for index, device in enumerate(here.devices))
    big = made(replace(here, devices=devices), replace(STEP, batch_size=4096), allow=("ddp", "fsdp"))
    reason = "needs more than there is of everything, in a rather long sentence that names many figures of many devices; " * 2
    more = tuple(replace(big.candidates[0], fits=False, reason=f"{reason}{index}") for index in range(200))
    big = replace(big, candidates=(*big.candidates, *more), adviser=None)
    markup = big.to_html()
    assert len(markup.encode()) < 1_000_000
    page = Parsed(markup)
    assert len([tag for tag, found in page.tags if found.get("role") == "rowheader"]) == len(big.candidates)
    assert any("the fullest" in words for words in page.words)


def test_devices_and_ranks_that_are_alike_are_one_row() -> None:
    page = Parsed(made(parse_spec("64xH100-80GB"), replace(STEP, batch_size=64), allow=("ddp",)).to_html())
    assert "H100-80GB:0-63 (64 alike)" in page.words
    assert "ranks 0–15 (16 alike)" in page.words
    assert any("ranks 0 to 15 of 64" in words for words in page.words)


def test_files(report: Report, tmp_path: Path) -> None:
    report.save_picture(str(tmp_path / "page.HTML"))
    assert (tmp_path / "page.HTML").read_text(encoding="utf-8") == report.to_html()
    with pytest.raises(ValueError, match="give a path in a folder that is there"):
        report.save_picture(tmp_path / "no" / "page.html")
    with pytest.raises(ValueError, match=r"must end in '\.html'"):
        report.save_picture(tmp_path / "plan.svg")


def test_another_candidate_can_be_shown(report: Report) -> None:
    second = next(candidate for candidate in report.candidates if candidate.bytes and candidate is not report.best_candidate)
    page = Parsed(report.to_html(second))
    headings = [words for words in page.words if words == second.plan.title()]
    assert len(headings) >= 2  # above, and in the table
    assert "Plan" in page.words


def test_markup() -> None:
    assert element("p", "a < b", element("b", "c"), None, class_="x", hidden=True, id=None) == '<p class="x" hidden>a &lt; b<b>c</b></p>'
    assert element("rect", aria_label='"', x=1.0) == '<rect aria-label="&quot;" x="1"/>'
    assert share(1, 3) == "33.33%"
    assert share(0, 0) == "0%"
    assert share(1, 1) == "100%"
    assert [percent(part) for part in (0.00123, 0.0731, 0.0999, 0.842, 1.0)] == ["0.12 %", "7.3 %", "10 %", "84 %", "100 %"]
    assert fragment([element("p", "x")]) == fragment([element("p", "x")])


@pytest.mark.parametrize("end", [0.003, 0.7, 1.0, 7.3, 95.0, 128.0, 79 * 1024.0])
def test_ticks_are_round_and_few(end: float) -> None:
    found = ticks(end)
    assert found[0] == 0
    assert found[-1] <= end
    assert 3 <= len(found) <= 12
    assert ticks(0.0) == [0.0]


def test_words_on_colours_can_be_read() -> None:
    for color in ("#0072b2", "#e69f00", "#7cc0ea", "#ffffff", "#000000"):
        assert contrast(on_color(color), color) >= 4.5
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
