"""Every module and every feature on every engine: each cell comes to what expected.py says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from lightning_autopar.plans import Plan
from tests.conformance import render
from tests.conformance.devices import CPUS
from tests.conformance.expected import (
    CELLS,
    ELSEWHERE,
    FEATURE_CELLS,
    MODULE_CELLS,
    PLAN_CELLS,
    SPLITTING,
    Cell,
    expected,
    is_quick,
    needed,
    refusal,
    why_not_here,
)
from tests.conformance.features import FEATURES, PLAIN
from tests.conformance.harness import ROWS, Run, distance, run
from tests.conformance.pinned import PINNED
from tests.conformance.render import CPU_PAGE, CUDA_PAGE, page
from tests.conformance.verdict import SIZE, Verdict, autopar, judge, keep
from tests.conformance.zoo import ZOO


def check(cell: Cell, root: Path) -> None:
    if (reason := why_not_here(cell)) is not None:
        pytest.skip(f"plain Lightning can't run it on this CPU: {reason}")
    verdict = judge(cell, root)
    assert verdict.outcome == expected(cell), f"{cell.id} came to {verdict}"
    if verdict.outcome == "refused":
        assert (refusal(cell) or "") in verdict.reason
    keep(cell.id, verdict)


def cells(of: Sequence[Cell]) -> Any:
    """A test's cells, those marked that not every run of the tests has."""
    later = pytest.mark.all_cells
    return pytest.mark.parametrize("cell", [pytest.param(cell, id=cell.id, marks=[] if is_quick(cell) else [later]) for cell in of])


@cells(MODULE_CELLS)
def test_module(cell: Cell, tmp_path: Path) -> None:
    check(cell, tmp_path)


@cells(FEATURE_CELLS)
def test_feature(cell: Cell, tmp_path: Path) -> None:
    check(cell, tmp_path)


@cells(PLAN_CELLS)
def test_plan(cell: Cell, tmp_path: Path) -> None:
    check(cell, tmp_path)


def test_exact_excludes_parts_of_a_batch_whose_samples_the_loss_compares(tmp_path: Path) -> None:
    parts = Plan(engine="single", devices=CPUS.ids(1), micro_batches=2)
    with pytest.raises(ValueError, match="exact=True") as error:
        run(ZOO["contrastive"], ROWS["plain"], autopar("single", plan=parts, exact=True), root=tmp_path)
    assert SIZE.search(str(error.value))
    assert not list(tmp_path.glob("process-*"))


@pytest.mark.parametrize("engine", SPLITTING)
def test_exact_leaves_a_mean_over_samples_alone(engine: str, tmp_path: Path) -> None:
    assert run(ZOO["lstm"], ROWS["plain"], autopar(engine, exact=True), root=tmp_path).strategy.plan.engine == engine


def one_step(precision: str, strategy: Any, root: Path) -> Run:
    feature = replace(PLAIN, epochs=1, trainer=lambda root: {"precision": precision, "limit_train_batches": 1})
    return run(ZOO["resnet"], feature, strategy, root=root)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("engine", SPLITTING)
def test_batch_norm_in_bf16_is_as_near_to_fp32_as_plain_lightning(engine: str, precision: str, tmp_path: Path) -> None:
    exact = one_step("32-true", "auto", tmp_path / "exact")
    plain = one_step(precision, "auto", tmp_path / "plain")
    ours = one_step(precision, autopar(engine), tmp_path / "ours")
    moved = distance(exact.weights, exact.start)
    assert ours.strategy.plan.engine == engine
    assert distance(exact.weights, ours.weights) <= 1.1 * distance(exact.weights, plain.weights) < 0.2 * moved


def outcomes(text: str) -> list[list[str]]:
    """The page's tables, reduced to names and outcomes."""
    rows = []
    for line in text.splitlines():
        if line.startswith("| **"):
            name, *cells = (part.strip() for part in line.strip("|").split(" | "))
            rows.append([name] + ["; ".join(word.replace(":", " ").split()[0] for word in cell.split("; ")) for cell in cells])
    return rows


def test_the_page_shows_what_is_expected() -> None:
    """Of all cells; of those that not every CPU can run, it may say that they weren't."""
    assert ELSEWHERE.keys() <= FEATURES.keys()
    verdicts = {cell.id: Verdict(outcome=expected(cell), difference=0.0, reason=refusal(cell) or "") for cell in CELLS}
    wanted = outcomes(page(verdicts))
    without = outcomes(page({cell.id: verdicts[cell.id] for cell in CELLS if needed(cell) is None}))
    assert len(wanted) == len(ZOO) + len(FEATURES) + len(PINNED)
    assert sum(line != other for line, other in zip(wanted, without, strict=True)) == 1
    shown = outcomes(CPU_PAGE.path.read_text(encoding="utf-8"))
    assert len(shown) == len(wanted)
    for line, whole, partial in zip(shown, wanted, without, strict=True):
        assert line in (whole, partial), f"{line}: run `make conformance`"


def test_the_page_of_gpus_shows_what_is_expected_of_what_was_run() -> None:
    """What wasn't run says so: a cell is never a pass by being left out."""
    verdicts = {cell.id: Verdict(outcome=expected(cell), difference=0.0, reason=refusal(cell) or "") for cell in CELLS}
    wanted = {name: cells for name, *cells in outcomes(page(verdicts))}
    shown = {name: cells for name, *cells in outcomes(CUDA_PAGE.path.read_text(encoding="utf-8"))}
    assert list(shown) == list(wanted)
    for name, cells in shown.items():
        for found, expected_words in zip(cells, wanted[name], strict=True):
            assert set(found.split("; ")) <= {*expected_words.split("; "), "not"}, f"{name}: run `make conformance-cuda`"


def test_the_page_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(render, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(render, "CPU_PAGE", replace(CPU_PAGE, path=tmp_path / "page.md"))
    monkeypatch.setattr(render, "why_not_here", needed)  # a CPU without what some cells need
    verdicts = {cell.id: asdict(Verdict(outcome=expected(cell), reason=refusal(cell) or "")) for cell in CELLS if needed(cell) is None}
    left_out = verdicts.pop("gpt-plain-ddp")
    render.RESULTS.write_text(json.dumps(verdicts), encoding="utf-8")
    assert render.main() == 1
    assert "1 cells have no outcome" in capsys.readouterr().err
    assert not render.CPU_PAGE.path.exists()
    render.RESULTS.write_text(json.dumps({**verdicts, "gpt-plain-ddp": left_out}), encoding="utf-8")
    assert render.main() == 0
    text = render.CPU_PAGE.path.read_text(encoding="utf-8")
    assert text.count("not run: an LSTM in bf16-mixed needs a CPU with AVX-512") == sum(needed(cell) is not None for cell in CELLS)
    assert text == page({name: Verdict(**verdict) for name, verdict in {**verdicts, "gpt-plain-ddp": left_out}.items()})
