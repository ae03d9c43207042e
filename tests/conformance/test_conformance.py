"""Every module and every feature on every engine: each cell comes to what expected.py says."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.conformance.expected import (
    CELLS,
    DEVICES,
    ENGINES,
    FEATURE_CELLS,
    KINDS,
    MODULE_CELLS,
    PLAN_CELLS,
    QUICK,
    SPLITTING,
    Cell,
    expected,
    refusal,
)
from tests.conformance.features import FEATURES, PLAIN
from tests.conformance.harness import ROWS, Run, distance, run
from tests.conformance.pinned import PINNED
from tests.conformance.render import NOT_RUN, PAGE, page
from tests.conformance.verdict import SIZE, Verdict, autopar, judge, keep
from tests.conformance.zoo import ZOO


@functools.cache
def runs_lstm_in_bf16() -> bool:
    """Whether this CPU has oneDNN's LSTM in bfloat16, which needs AVX-512; without it plain Lightning fails, too."""
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            nn.LSTM(4, 12)(torch.zeros(1, 1, 4))
    except RuntimeError:
        return False
    return True


def check(cell: Cell, root: Path) -> None:
    if cell.case == "lstm" and cell.feature == "bf16-mixed" and not runs_lstm_in_bf16():
        pytest.skip("plain Lightning can't run an LSTM in bf16-mixed on this CPU")
    verdict = judge(cell, root)
    assert verdict.outcome == expected(cell), f"{cell.id} came to {verdict}"
    if verdict.outcome == "refused":
        assert (refusal(cell) or "") in verdict.reason
    keep(cell, verdict)


def cells(of: Sequence[Cell]) -> Any:
    """A test's cells, those marked that not every run of the tests has."""
    later = pytest.mark.all_cells
    return pytest.mark.parametrize(
        "cell", [pytest.param(cell, id=cell.id, marks=[] if cell.engine not in KINDS or cell.id in QUICK else [later]) for cell in of]
    )


@cells(MODULE_CELLS)
def test_module(cell: Cell, tmp_path: Path) -> None:
    check(cell, tmp_path)


@cells(FEATURE_CELLS)
def test_feature(cell: Cell, tmp_path: Path) -> None:
    check(cell, tmp_path)


@cells(PLAN_CELLS)
def test_plan(cell: Cell, tmp_path: Path) -> None:
    check(cell, tmp_path)


@pytest.mark.parametrize("engine", SPLITTING)
@pytest.mark.parametrize("name", [name for name, case in ZOO.items() if not case.mean])
def test_exact_excludes_a_loss_that_is_no_mean_over_samples(name: str, engine: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="exact=True") as error:
        run(ZOO[name], ROWS["plain"], autopar(engine, exact=True), root=tmp_path)
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
    verdicts = {cell.id: Verdict(outcome=expected(cell), difference=0.0, reason=refusal(cell) or "") for cell in CELLS}
    wanted = outcomes(page(verdicts))
    assert len(wanted) == len(ZOO) + len(FEATURES) + len(PINNED)
    shown = outcomes(PAGE.read_text(encoding="utf-8"))
    assert len(shown) == len(wanted)
    for line, expected_line in zip(shown, wanted, strict=True):
        pairs = zip(line, expected_line, strict=True)
        assert all(cell == outcome or cell == NOT_RUN.split()[0] for cell, outcome in pairs), f"{line}: run `make conformance`"


def test_the_devices_of_the_suite_are_enough_for_every_engine() -> None:
    assert DEVICES.startswith(f"{max(ENGINES.values())}x")
