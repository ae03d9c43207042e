"""The picture of a run: what is on its axes, in what words, and as which files."""

from __future__ import annotations

import math
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

matplotlib = pytest.importorskip("matplotlib")
colors = pytest.importorskip("matplotlib.colors")

from lightning_autopar.planning.run_history import DeviceBytes, LossPoint, Mark, MemorySample, PlanSpan, RunHistory  # noqa: E402
from lightning_autopar.planning.run_picture import draw, save  # noqa: E402

GIB = 1 << 30
GPU = "GPU-7c1e9b04-1111-2222"
SPANS = (
    PlanSpan(start_seconds=0, end_seconds=30, title="single", devices=("cpu:0",), predicted_bytes={"cpu:0": 2 * GIB}),
    PlanSpan(start_seconds=32, end_seconds=60, title="FSDP[2]", devices=("cpu:0", GPU), predicted_bytes={"cpu:0": GIB, GPU: GIB}),
    PlanSpan(start_seconds=60, end_seconds=80, title="parked"),
    PlanSpan(start_seconds=80, end_seconds=100, title="single", devices=("cpu:0",)),
)
MARKS = (
    Mark(at_seconds=30, kind="move", words="somebody took 2 GiB of cpu:0, which costs $1 and $2"),
    Mark(at_seconds=60, kind="park", words="nothing fits"),
    Mark(at_seconds=80, kind="move", words="the neighbour left"),
)


def sample(at_seconds: float, cpu: tuple[int, int], gpu: tuple[int, int] | None) -> MemorySample:
    devices = {"cpu:0": DeviceBytes(*cpu, 4 * GIB)}
    if gpu is not None:
        devices[GPU] = DeviceBytes(*gpu, 8 * GIB)
    return MemorySample(at_seconds=at_seconds, devices=devices)


MEMORY = (
    sample(0, (2 * GIB, 0), (0, GIB)),
    sample(30, (GIB, 2 * GIB), (GIB, GIB)),
    sample(60, (0, 2 * GIB), None),
    sample(80, (2 * GIB, 0), (0, GIB)),
)
LOSSES = tuple(LossPoint(at, at, 2 - at / 100) for at in (*range(60), *range(80, 100)))
HISTORY = RunHistory(title="train.py", spans=SPANS, marks=MARKS, memory=MEMORY, losses=LOSSES)


def axes_of(history: RunHistory) -> dict[str, Any]:
    return {str(axes.get_label()): axes for axes in draw(history).axes}


def words(figure: Any) -> str:
    texts = [*figure.texts, figure._suptitle]
    for axes in figure.axes:
        texts += [*axes.texts, axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label]
        texts += axes.get_legend().get_texts() if axes.get_legend() else []
    return "\n".join(text.get_text() for text in texts)


def area(collection: Any, at: float) -> tuple[float, float]:
    """From where to where a filled area reaches at a time."""
    heights = []
    for path in collection.get_paths():
        points = path.vertices
        for (x0, y0), (x1, y1) in pairwise(points):
            if min(x0, x1) <= at <= max(x0, x1) and x0 != x1:
                heights.append(y0 + (y1 - y0) * (at - x0) / (x1 - x0))
    return (min(heights), max(heights)) if heights else (0.0, 0.0)


def test_a_row_for_the_loss_for_each_device_and_for_the_plans() -> None:
    figure: Any = draw(HISTORY)
    assert [axes.get_label() for axes in figure.axes] == ["loss", "cpu:0", GPU, "plans"]
    said = words(figure)
    for each in (
        "train.py, 100 seconds, 2 moves, 1 park",
        "loss, steps 0 to 99",
        "cpu:0, 4 GiB",
        "GPU-7c1e9b04, 8 GiB",
        "predicted",
        "taken by this run",
        "taken by others",
        "free",
        "not there",
        "single",
        "FSDP[2]",
        "parked",
        r"1  at 30 s, move: somebody took 2 GiB of cpu:0, which costs \$1 and \$2",
        "2  at 60 s, park: nothing fits",
        "3  at 80 s, move: the neighbour left",
        "seconds since the run began",
    ):
        assert each in said


def test_memory_is_what_was_sampled_until_the_next_sample() -> None:
    axes = axes_of(HISTORY)
    ours, others = axes["cpu:0"].collections
    for at, (mine, theirs) in {10: (2, 0), 45: (1, 2), 70: (0, 2), 95: (2, 0)}.items():
        assert area(ours, at) == pytest.approx((0, mine))
        assert area(others, at) == pytest.approx((mine, mine + theirs))
    hatched = [collection for collection in axes[GPU].collections if collection.get_hatch()]
    assert len(hatched) == 1
    assert area(hatched[0], 70) == pytest.approx((0, 8))
    assert area(hatched[0], 50) == (0, 0)
    predicted = [line for line in axes["cpu:0"].lines if line.get_linestyle() == ":" or line.is_dashed()]
    found = {(tuple(line.get_xdata()), line.get_ydata()[0]) for line in predicted if line.get_ydata()[0] == line.get_ydata()[1]}
    assert {((0.0, 30.0), 2.0), ((32.0, 60.0), 1.0)} <= found


def test_plans_are_spans_of_their_colours_and_marks_go_through_all_rows() -> None:
    axes = axes_of(HISTORY)
    spans = axes["plans"].collections
    ends = [(path.get_extents().x0, path.get_extents().x1) for collection in spans for path in collection.get_paths()]
    assert ends == [(0, 30), (32, 60), (60, 80), (80, 100)]
    faces = [tuple(collection.get_facecolor()[0]) for collection in spans]
    assert faces[0] == faces[3]
    assert len(set(faces)) == 3
    assert [bool(collection.get_hatch()) for collection in spans] == [False, False, True, False]
    for each in axes.values():
        assert {30.0, 60.0, 80.0} <= {line.get_xdata()[0] for line in each.lines if list(line.get_ydata()) == [0, 1]}


def test_the_loss_is_broken_while_parked_and_where_it_is_no_number() -> None:
    losses = (*LOSSES[:20], LossPoint(20, 20, math.nan), LossPoint(21, 21, math.inf), *LOSSES[22:])
    axes = axes_of(RunHistory(spans=SPANS, losses=losses))["loss"]
    (line,) = (line for line in axes.lines if len(line.get_xdata()) > 2)
    lost = [x for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True) if math.isnan(y)]
    assert lost == [20, 21, 70]
    assert axes._left_title.get_text() == "loss, steps 0 to 99; 2 not finite"
    assert axes.get_yscale() == "linear"
    falling = tuple(LossPoint(at, at, 10.0 ** (-at / 20)) for at in range(60))
    assert axes_of(RunHistory(spans=SPANS, losses=falling))["loss"].get_yscale() == "log"


def test_of_very_many_losses_no_peak_is_lost() -> None:
    losses = tuple(LossPoint(at / 1000, at, 1000.0 if at == 54_321 else math.nan if at == 7 else 1.0) for at in range(100_000))
    axes = axes_of(RunHistory(spans=SPANS, losses=losses))["loss"]
    (line,) = (line for line in axes.lines if len(line.get_xdata()) > 2)
    assert len(line.get_xdata()) < 5000
    assert (54.321, 1000.0) in set(zip(line.get_xdata(), line.get_ydata(), strict=True))
    assert sum(map(math.isnan, line.get_ydata())) == 2  # and where it was parked


def test_without_memory_losses_or_marks_there_are_the_plans() -> None:
    assert list(axes_of(RunHistory(spans=SPANS[:1]))) == ["plans"]
    assert list(axes_of(RunHistory(spans=(PlanSpan(start_seconds=0, end_seconds=0, title="parked"),)))) == ["plans"]


def test_long_runs_have_longer_units_and_many_marks_are_counted() -> None:
    spans = tuple(PlanSpan(start_seconds=600 * n, end_seconds=600 * (n + 1), title=f"plan {n}", devices=("cpu:0",)) for n in range(30))
    marks = tuple(Mark(at_seconds=600.0 * n, kind="move", words=f"reason {n}") for n in range(30))
    devices = {f"cpu:{n}": DeviceBytes(0, 0, GIB) for n in range(12)}
    figure: Any = draw(RunHistory(spans=spans, marks=marks, memory=(MemorySample(at_seconds=0, devices=devices),)))
    said = words(figure)
    assert "hours since the run began; 4 more devices aren't shown" in said
    assert "and 16 more" in said
    assert len(figure.axes) == 9
    looks = {(tuple(each.get_facecolor()[0]), each.get_hatch()) for each in figure.axes[-1].collections}
    assert len(looks) >= 24  # of more plans than colours, patterns tell them apart


@pytest.mark.parametrize(
    ("history", "message"),
    [
        (lambda: draw(RunHistory()), "there is nothing to draw: the run's history has no plan that ran"),
        (lambda: draw(RunHistory(losses=LOSSES, memory=MEMORY)), "there is nothing to draw"),
        (lambda: RunHistory(spans=(PlanSpan(start_seconds=2, end_seconds=1, title="x"),)), "'x' can't have run from 2 s to 1 s"),
        (lambda: RunHistory(spans=(PlanSpan(start_seconds=0, end_seconds=math.inf, title="x"),)), "can't have run from 0 s to inf s"),
        (lambda: RunHistory(marks=(Mark(at_seconds=math.nan, kind="move", words=""),)), "a time that isn't finite"),
    ],
)
def test_what_cannot_be_drawn_is_refused(history: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        history()


def test_its_colours_are_its_own_on_any_page() -> None:
    dark = {
        "text.color": "white",
        "axes.facecolor": "black",
        "axes.labelcolor": "white",
        "figure.facecolor": "black",
        "xtick.color": "white",
    }
    with matplotlib.rc_context(dark):
        figure: Any = draw(HISTORY)
        figure.canvas.draw()
    assert figure.get_facecolor()[3] == 1.0
    paper = colors.to_rgb(figure.get_facecolor())
    for axes in figure.axes:
        texts = [axes.xaxis.label, axes.yaxis.label, axes._left_title, *axes.get_xticklabels(), *axes.get_yticklabels()]
        texts += axes.get_legend().get_texts() if axes.get_legend() else []
        assert all(contrast(colors.to_rgb(text.get_color()), paper) >= 4.5 for text in texts if text.get_text())
    plans = figure.axes[-1]
    backs = [colors.to_rgb(each.get_facecolor()[0]) for each in plans.collections]
    assert all(contrast(colors.to_rgb(text.get_color()), back) >= 4.5 for text in plans.texts for back in backs)


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """WCAG 2's contrast ratio."""

    def luminance(color: tuple[float, ...]) -> float:
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in color]
        return float(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_files(tmp_path: Path) -> None:
    save(HISTORY, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    for name in ("one.svg", "two.svg"):
        save(HISTORY, str(tmp_path / name))
    text = (tmp_path / "one.svg").read_text(encoding="utf-8")
    assert "the neighbour left" in text
    assert "costs $1 and $2" in text
    assert text == (tmp_path / "two.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "message"), [("run.xyz", "choose '.png'"), ("run", "'.svg'"), ("no/run.png", "give a path in a folder")])
def test_a_file_that_cannot_be_written(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        save(RunHistory(spans=SPANS[:1]), tmp_path / name)


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"needs matplotlib, which isn't installed; pip install 'lightning-autopar\[report\]'"):
        draw(HISTORY)
