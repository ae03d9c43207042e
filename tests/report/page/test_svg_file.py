"""Pictures: the page's drawings as one SVG file, to scale, with room for every word, and as which files."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lightning_autopar.constraints import Constraints
from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.planning.planner import make_report
from lightning_autopar.plans import Plan
from lightning_autopar.report.page.drawing import Figure, Row
from lightning_autopar.report.page.markup import rect
from lightning_autopar.report.page.svg_file import Picture, picture_of
from lightning_autopar.report.report import Candidate, NothingFits, Report
from tests.fakes.pages import pipelined
from tests.fakes.values import GIB, footprint, gpu, inventory

STEP = footprint(batch_size=16, parameter_bytes=GIB, activation_bytes=2 * GIB, flops=10**15, margin=0.05)
SVG = "{http://www.w3.org/2000/svg}"


def made(here: Any, **constraints: Any) -> Report:
    try:
        return make_report(STEP, here, Constraints(**constraints))
    except NothingFits as error:
        return error.report


def two_gpus() -> Report:
    return made(inventory(gpu(0), gpu(1, 40 * GIB)), allow=("ddp",))


def parsed(picture: Picture) -> ElementTree.Element:
    return ElementTree.fromstring(picture.svg)


def words(root: ElementTree.Element) -> list[str]:
    return [each.text or "" for each in root.iter(f"{SVG}text")]


def charts(root: ElementTree.Element) -> list[ElementTree.Element]:
    """The drawings of rows: those of an axis have no label."""
    return [each for each in root.findall(f"{SVG}svg") if each.find(f"{SVG}title") is not None]


def test_a_report_is_its_page_s_drawings() -> None:
    report = two_gpus()
    best = report.best_candidate
    assert best is not None
    root = parsed(report.picture())
    said = words(root)
    assert said[0].startswith(f"{best.plan.title()}: ")
    for each in (
        "Memory of each device",
        "One training step",
        "cuda:0",
        "cuda:1",
        "ranks 0–1 (2 alike)",
        "parameters",
        "held by others",
        "forward",
    ):
        assert each in said
    assert sum(each.endswith(" left") for each in said) == 2
    drawn = charts(root)
    page = report.to_html()
    assert len(drawn) == 4  # two devices, two ranks that are alike, and where the seconds go
    for chart in drawn:
        assert escape(chart.findtext(f"{SVG}title") or "") in page
        for bar in chart.iter(f"{SVG}rect"):
            assert f'x="{bar.get("x")}" y="{bar.get("y")}" width="{bar.get("width")}"' in page


def test_a_pipeline_has_its_micro_batches_and_what_they_wait() -> None:
    root = parsed(pipelined().picture())
    rows = [chart for chart in charts(root) if chart.get("class") == "cells"]
    assert len(rows) == 4
    assert any(bar.get("class") == "cell hatch" for bar in rows[0].iter(f"{SVG}rect"))
    assert {str(number) for number in range(8)} <= {each.text for each in rows[0].iter(f"{SVG}text")}


def test_every_word_has_room() -> None:
    """Long names are wrapped, rows are as tall as their words, and what is beside each other doesn't overlap."""
    long = "a device whose name nobody thought anybody would ever write into a picture of this size"
    rows = tuple(
        Row(
            name=name,
            height=20,
            label=name,
            drawn=(rect(0, 1, 1, class_="frame", height=20),),
            words=((long, None), ("1 GiB left", "good")),
        )
        for name in (long, "short")
    )
    legend = tuple(("c-parameters", f"a plan with a title that takes its room {index}") for index in range(8))
    root = parsed(picture_of(long, [Figure(title="one", legend=legend, rows=rows, notes=(long * 4,)), Figure(title="two", rows=rows)]))
    width, height = (float(str(root.get(name))) for name in ("width", "height"))
    texts = root.findall(f"{SVG}text")
    assert len(texts) > 30
    lines: dict[float, list[tuple[float, float]]] = {}
    for each in texts:
        left, foot, letters = float(str(each.get("x"))), float(str(each.get("y"))), len(each.text or "")
        size = {"words title": 20, "words heading": 16}.get(str(each.get("class")), 13)
        assert left >= 20
        assert left + letters * size * 0.58 <= width - 19
        assert 20 < foot < height - 20
        lines.setdefault(foot, []).append((left, left + letters * size * 0.58))
    for spans in lines.values():
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    frames = [[float(str(each.get(name))) for name in ("x", "y", "width", "height")] for each in charts(root)]
    assert all(x + wide < width - 20 and y + tall < height - 20 for x, y, wide, tall in frames)
    assert all(one[1] + one[3] < other[1] for one, other in itertools.pairwise(frames))


def test_what_comes_from_the_user_is_words_and_xml_takes_it() -> None:
    root = parsed(picture_of("a\x1b[31m\ud800 & <b>", [Figure(title="<img>")]))
    assert words(root)[0] == "a�[31m� & <b>"
    assert [tag for tag in root.iter() if tag.tag.rpartition("}")[2] in ("script", "image", "img", "a", "b")] == []


def test_it_needs_nothing_but_itself_and_no_variables() -> None:
    picture = two_gpus().picture()
    assert re.findall(r"(?<!xmlns=\")https?://(?!x/y)|@import|url\((?!#)|var\(", picture.svg) == []
    scope = parsed(picture).get("id")
    assert f'id="{scope}-hatch"' in picture.svg
    assert f"url(#{scope}-hatch)" in picture.svg
    assert two_gpus().picture().svg == two_gpus().picture().svg


def test_devices_alike_are_one_bar_and_many_ranks_are_cut_off() -> None:
    report = make_report(replace(STEP, batch_size=64), parse_spec("64xH100-80GB"), Constraints(allow=("ddp",)))
    said = words(parsed(report.picture()))
    assert any("64 alike" in each for each in said)
    assert any("ranks 0 to 15 of 64" in each for each in said)


def test_what_is_missing_stands_out_where_nothing_fits() -> None:
    report = made(parse_spec("2xcpu:4GiB"), allow=("single", "ddp"))
    assert report.best is None
    root = parsed(report.picture())
    assert "doesn't fit" in words(root)[0]
    missing = [each for each in root.iter(f"{SVG}text") if (each.text or "").endswith(" too little")]
    assert missing
    assert {each.get("class") for each in missing} == {"words alarm"}


def test_files(tmp_path: Path) -> None:
    report = two_gpus()
    report.save_picture(tmp_path / "plan.SVG")
    report.picture().save(tmp_path / "again.svg")
    text = (tmp_path / "plan.SVG").read_text(encoding="utf-8")
    assert text == (tmp_path / "again.svg").read_text(encoding="utf-8") == report.picture()._repr_svg_()
    report.save_picture(str(tmp_path / "plan.html"))
    assert (tmp_path / "plan.html").read_text(encoding="utf-8") == report.to_html()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plan.png", "choose '.svg' for a picture or '.html' for a page"),
        ("plan.pdf", "choose '.svg' for a picture or '.html' for a page"),
        ("plan", "choose '.svg' for a picture or '.html' for a page"),
        ("no/plan.svg", "give a path in a folder"),
    ],
)
def test_a_file_that_cannot_be_written(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        two_gpus().save_picture(tmp_path / name)


def test_a_picture_is_written_as_svg_alone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end in '.svg'; for a page call save_picture of the report"):
        two_gpus().picture().save(tmp_path / "plan.html")
    assert "save('plan.svg')" in repr(two_gpus().picture())


def test_a_plan_without_a_prediction_cannot_be_drawn() -> None:
    report = made(parse_spec("2xcpu:4GiB"), allow=("single",))
    ruled_out = next(candidate for candidate in report.candidates if not candidate.bytes)
    with pytest.raises(ValueError, match="there is nothing to draw"):
        report.picture(ruled_out)
    alone = Candidate(plan=Plan(engine="single", devices=("cpu:0",)), fits=False, reason="excluded")
    with pytest.raises(ValueError, match=r"none of the plans was predicted \(excluded\)"):
        replace(report, candidates=(alone,), best_index=None).picture()
