"""The page of a run: what is on it, to scale, and that what a user wrote is words."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lightning_autopar.report.run_history import LossPoint, MemorySample, MemoryUse, PlanSpan, RunHistory, RunMark, mark_levels
from tests.fakes.pages import HISTORY, LOSSES, NASTY, Parsed
from tests.fakes.values import GIB


def test_the_run_its_plans_and_what_moved_it() -> None:
    page = Parsed(HISTORY.to_html())
    for words in (NASTY, f"{NASTY} · lightning-autopar", "single", "ddp ×2", "parked", "move", "failure", "resume", "not there", "0 to 99"):
        assert words in page.words
    assert f" at 60 s: {NASTY}".strip() in page.words
    assert not [tag for tag, _ in page.tags if tag in ("img", "script")]
    rows = page.attributes("svg", "aria-label")
    assert any(row.startswith("loss: 2 at first, 1.01 at last") for row in rows)
    assert "cpu:0, 4 GiB: at most 2 GiB taken by this run, 2 GiB by others" in rows
    assert re.findall(r"https?://|@import", page.style) == []


def test_memory_and_losses_are_to_scale() -> None:
    page = Parsed(HISTORY.to_html())
    paths = dict(zip(page.attributes("path", "class"), page.attributes("path", "d"), strict=True))
    # The last of each class is cpu:1's: 1 of 4 GiB held by others, up to the second sample, half of the run; then it isn't there.
    assert paths["c-others"] == "M0 46V34.5H1000V46H2000V46z"
    assert paths["c-ours"] == ""
    assert page.attributes("path", "d")[1] == "M0 46V23H1000V11.5H2000V46z"  # cpu:0's, of this run and others
    assert page.attributes("path", "d")[2] == "M0 46V23H1000V34.5H2000V46z"
    assert paths["loss"].count("M") == 2  # broken while the run was parked
    assert paths["loss"].startswith("M0 8.0")
    hatched = [found for tag, found in page.tags if tag == "rect" and found.get("class") == "hatch" and "x" in found]
    assert ("50%", "50%") in {(found["x"], found["width"]) for found in hatched}
    predicted = [found for tag, found in page.tags if tag == "line" and found.get("class") == "predicted"]
    assert ("0%", "30%", "23") in {(found["x1"], found["x2"], found["y1"]) for found in predicted}
    moments = {(found["x1"], found["class"]) for tag, found in page.tags if tag == "line" and str(found.get("class")).startswith("moment")}
    assert moments == {("30%", "moment"), ("60%", "moment failed"), ("80%", "moment")}


def test_losses_that_are_no_number() -> None:
    broken = replace(HISTORY, losses=(*LOSSES[:20], LossPoint(20, 20, math.nan), *LOSSES[21:]))
    page = Parsed(broken.to_html())
    assert "losses that aren't finite" in page.words
    (line,) = (d for d, class_ in zip(page.attributes("path", "d"), page.attributes("path", "class"), strict=True) if class_ == "loss")
    assert line.count("M") == 3
    assert "nan" not in line
    never = replace(HISTORY, losses=(LossPoint(0, 0, math.inf),))
    assert "never finite" in Parsed(never.to_html()).words


def test_a_long_run_stays_small() -> None:
    devices = {f"GPU-{index}": MemoryUse(GIB, index * GIB, 80 * GIB) for index in range(8)}
    memory = tuple(
        MemorySample(at_seconds=at, devices={name: each._replace(ours=GIB + at * 1000) for name, each in devices.items()})
        for at in range(0, 40_000, 10)
    )
    losses = tuple(LossPoint(at, at, 1 + (at % 97) / 97) for at in range(40_000))
    spans = (PlanSpan(start_seconds=0, end_seconds=40_000, title="ddp ×8", devices=tuple(devices)),)
    assert len(RunHistory(spans=spans, memory=memory, losses=losses).to_html().encode()) < 1_000_000


def test_notebooks() -> None:
    fragment = HISTORY._repr_html_()
    assert fragment is not None
    assert fragment.startswith("<div id=")
    assert RunHistory()._repr_html_() is None
    said: list[str] = []
    HISTORY._repr_pretty_(SimpleNamespace(text=said.append), cycle=False)
    assert said[0].splitlines()[:2] == [f"{NASTY}, 100 seconds, 1 move, 1 failure, 1 resume", "1  at 30 s, move: a device is free again"]
    with pytest.raises(ValueError, match="no plan that ran"):
        RunHistory().to_html()


def test_numbers_of_marks_have_room() -> None:
    marks = [RunMark(at_seconds=at, kind="move", words="") for at in (0, 1, 2, 3, 20)]
    assert mark_levels(marks, 5, 2) == [0, 1, None, None, 0]
