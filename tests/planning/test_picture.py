"""The picture: what is on its axes, in what colours, and as which files."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_autopar.memory.spec import parse_spec
from lightning_autopar.planning.constraints import Constraints
from lightning_autopar.planning.planner import make_report
from lightning_autopar.planning.report import Candidate, NothingFits, Report
from lightning_autopar.plans import Plan
from tests.fakes.values import GIB, footprint, gpu, inventory

matplotlib = pytest.importorskip("matplotlib")
colors = pytest.importorskip("matplotlib.colors")

from lightning_autopar.planning import picture  # noqa: E402

STEP = footprint(batch_size=16, parameter_bytes=GIB, activation_bytes=2 * GIB, flops=10**15, margin=0.05)


def made(here: Any, **constraints: Any) -> Report:
    try:
        return make_report(STEP, here, Constraints(**constraints))
    except NothingFits as error:
        return error.report


def two_gpus(**constraints: Any) -> Report:
    return made(inventory(gpu(0), gpu(1, 40 * GIB)), **constraints)


def words(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def legend(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_a_bar_a_device_with_its_categories_budget_and_headroom() -> None:
    report = two_gpus(allow=("ddp",))
    figure = report.picture()
    memory, step = figure.axes
    assert (memory.get_label(), step.get_label()) == ("memory", "step")
    assert [text.get_text() for text in memory.get_yticklabels()] == ["cuda:0", "cuda:1"]
    assert {"parameters", "gradients", "optimizer", "activations", "allowed for what may be missed", "held by others"} <= set(
        legend(memory)
    )
    best = report.best_candidate
    assert best is not None
    lines = [line.get_xdata()[0] * GIB for line in memory.lines]
    assert lines == pytest.approx([report.budgets[device] for device in best.plan.devices])
    ends = dict.fromkeys(range(2), 0.0)
    for bar in memory.patches:
        if bar.get_facecolor()[3] and bar.get_height() < 0.7:  # neither the device's frame nor what others hold
            row = round(bar.get_y() + bar.get_height() / 2)
            ends[row] = max(ends[row], (bar.get_x() + bar.get_width()) * GIB)
    assert ends[0] == pytest.approx(best.needs[best.plan.devices[0]], rel=1e-6)
    assert all(text.endswith(" left") for text in words(memory))
    assert "GiB" in memory.get_xlabel()
    assert figure.get_suptitle().startswith(best.plan.title())


def test_each_rank_has_a_row_of_its_step() -> None:
    figure = two_gpus(allow=("ddp",)).picture()
    step = figure.axes[1]
    rows = [text.get_text() for text in step.get_yticklabels()]
    assert [row for row in rows if row.startswith("rank")] == ["rank 0", "rank 1"]
    assert {"forward", "backward"} <= set(legend(step))
    assert step.get_xlabel().startswith("one step, ")
    ends = [max(path.get_extents().x1 for path in collection.get_paths()) for collection in step.collections]
    assert max(ends) <= step.get_xlim()[1] * (1 + 1e-9)


def test_waiting_is_hatched(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(*arguments: Any, **keywords: Any) -> tuple[Any, ...]:
        span = {"rank": 0, "label": "", "lane": "compute"}
        return tuple(
            picture.Span(start_seconds=start, end_seconds=end, kind=kind, **span)
            for start, end, kind in ((0, 1, "forward"), (1, 2, "idle"), (2, 3, "backward"), (3.0001, 4, "backward"))
        )

    monkeypatch.setattr(picture, "timeline", fake)
    step = two_gpus(allow=("ddp",)).picture().axes[1]
    assert legend(step) == ["forward", "backward", "waiting"]
    hatched = [collection for collection in step.collections if collection.get_hatch()]
    assert len(hatched) == 1
    # Neighbours of one kind are drawn as one.
    assert [len(collection.get_paths()) for collection in step.collections] == [1, 1, 1]
    assert "seconds" in step.get_xlabel()


def test_what_is_missing_stands_out_where_nothing_fits() -> None:
    report = made(parse_spec("2xcpu:4GiB"), allow=("single", "ddp"))
    assert report.best is None
    figure = report.picture()
    assert "doesn't fit" in figure.get_suptitle()
    assert any(text.endswith(" too little") for text in words(figure.axes[0]))


def test_devices_alike_are_one_bar_and_many_ranks_are_cut_off() -> None:
    report = make_report(replace(STEP, batch_size=64), parse_spec("64xH100-80GB"), Constraints(allow=("ddp",)))
    best = report.candidates[0]
    assert best.plan.world_size == 64
    figure = report.picture()
    memory, step = figure.axes
    assert len(memory.get_yticklabels()) <= 2
    assert any("alike" in text.get_text() for text in memory.get_yticklabels())
    assert sum(text.get_text().startswith("rank") for text in step.get_yticklabels()) == 16
    assert "of 64" in step.get_xlabel()


def test_its_colours_are_its_own_on_any_page() -> None:
    with matplotlib.rc_context({"text.color": "white", "axes.facecolor": "black", "axes.labelcolor": "white", "figure.facecolor": "black"}):
        figure = two_gpus().picture()
        figure.canvas.draw()
    paper = colors.to_rgb(figure.get_facecolor())
    assert figure.get_facecolor()[3] == 1.0
    for axes in figure.axes:
        texts = [*axes.texts, *axes.get_yticklabels(), *axes.get_xticklabels(), axes.xaxis.label, *axes.get_legend().get_texts()]
        assert all(contrast(colors.to_rgb(text.get_color()), paper) >= 4.5 for text in texts)
    assert contrast(colors.to_rgb(figure._suptitle.get_color()), paper) >= 4.5


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """WCAG 2's contrast ratio."""

    def luminance(color: tuple[float, ...]) -> float:
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in color]
        return float(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_files(tmp_path: Path) -> None:
    report = two_gpus()
    report.save_picture(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    report.save_picture(str(tmp_path / "plan.svg"))
    text = (tmp_path / "plan.svg").read_text(encoding="utf-8")
    assert re.search(r"<text[^>]*>rank 0</text>", text)
    assert "parameters" in text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plan.xyz", "has an ending that names no format; choose '.png'"),
        ("plan", "'.png', '.svg'"),
        ("no/plan.png", "give a path in a folder"),
    ],
)
def test_a_file_that_cannot_be_written(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        two_gpus().save_picture(tmp_path / name)


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    report = two_gpus()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"needs matplotlib, which isn't installed; pip install 'lightning-autopar\[report\]'"):
        report.picture()


def test_a_plan_without_a_prediction_cannot_be_drawn() -> None:
    report = made(parse_spec("2xcpu:4GiB"), allow=("single",))
    ruled_out = next(candidate for candidate in report.candidates if not candidate.bytes)
    with pytest.raises(ValueError, match="there is nothing to draw"):
        report.picture(ruled_out)
    alone = Candidate(plan=Plan(engine="single", devices=("cpu:0",)), fits=False, reason="excluded")
    with pytest.raises(ValueError, match=r"none of the plans was predicted \(excluded\)"):
        replace(report, candidates=(alone,), best_index=None).picture()
