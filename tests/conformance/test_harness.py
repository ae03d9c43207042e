"""The harness itself: plain Lightning equals itself, and what an engine could get wrong is seen."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.expected import ENGINES, FEATURE_CELLS, KINDS, MODULE_CELLS, UNCUT
from tests.conformance.features import FEATURES
from tests.conformance.harness import ROWS, TOLERANCES, Difference, Run, compare, compare_leaves, leaves, plain, run
from tests.conformance.zoo import ZOO, Case

HALVED = ("frozen-backbone", "nested", "datamodule")


def rows_of(batch: Any, part: int) -> Any:
    """Every second sample of a batch, as one of two ranks would have it."""
    if isinstance(batch, dict):
        return {key: rows_of(value, part) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)) and not isinstance(batch[0], str):
        return [rows_of(value, part) for value in batch]
    return batch[part::2]


def in_halves(case: Case, *, weighted: bool) -> Case:
    """The case with each training loss computed in two halves, combined by their sizes or (a mistake) half and half."""

    class Halves(case.module):  # type: ignore[name-defined, misc]
        def loss(self, batch: Any) -> Tensor:
            size = self.size(batch)
            if not self.training or size == 1:
                return super().loss(batch)
            losses = [super(Halves, self).loss(rows_of(batch, part)) for part in (0, 1)]
            share = (size + 1) // 2 / size if weighted else 0.5
            return losses[0] * share + losses[1] * (1 - share)

    return replace(case, module=Halves)


@pytest.mark.parametrize("name", ["gpt", "vae", "gan", "metrics", "graph", "datamodule", "iterable"])
def test_plain_lightning_equals_itself(name: str) -> None:
    difference = compare(plain(name, "plain"), run(ZOO[name], ROWS["plain"]), TOLERANCES["fp32"])
    assert (difference.largest, difference.beyond) == (0.0, [])


@pytest.mark.parametrize("name", ["gpt", "vae", "gan", "iterable"])
def test_another_seed_is_seen(name: str) -> None:
    difference = compare(plain(name, "plain"), run(ZOO[name], ROWS["plain"], seed=8), TOLERANCES["fp32"])
    assert any("weights" in line for line in difference.beyond)
    assert any("rows" in line for line in difference.beyond)


@pytest.mark.parametrize("name", FEATURES["resume"].cases)
def test_plain_lightning_resumed_with_its_random_state_is_the_uninterrupted_run(name: str) -> None:
    whole = run(ZOO[name], replace(FEATURES["resume"], resume=False))
    difference = Difference()
    compare_leaves(whole.weights, plain(name, "resume").weights, 0.0, difference)
    assert not difference.beyond


def test_a_learning_rate_off_by_a_thousandth_is_seen() -> None:
    other = run(ZOO["lstm"], ROWS["plain"], module={"lr": 0.1 * 1.001})
    assert compare(plain("lstm", "plain"), other, TOLERANCES["fp32"]).beyond


@pytest.mark.parametrize("feature", ["plain", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", HALVED)
def test_a_batch_in_halves_passes_and_wrong_weights_of_a_ragged_batch_do_not(name: str, feature: str) -> None:
    tolerance = TOLERANCES[ROWS[feature].numbers]
    reference = plain(name, feature)
    right = compare(reference, run(in_halves(ZOO[name], weighted=True), ROWS[feature]), tolerance)
    wrong = compare(reference, run(in_halves(ZOO[name], weighted=False), ROWS[feature]), tolerance)
    assert right.largest > 0
    assert not right.beyond
    assert any(line.startswith("weights") for line in wrong.beyond)


def test_a_wrong_ema_is_seen() -> None:
    assert compare(plain("lstm", "plain"), plain("lstm", "weight-averaging"), TOLERANCES["fp32"]).beyond


@pytest.mark.parametrize(
    ("feature", "name"),
    [
        ("clip-norm", "gpt"),
        ("clip-value", "lstm"),
        ("accumulation", "resnet"),
        ("bf16-mixed", "gpt"),
        ("bf16-true", "lstm"),
        ("schedule-step", "gpt"),
        ("schedule-epoch", "lstm"),
        ("schedule-plateau", "resnet"),
        ("early-stopping", "gpt"),
        ("mid-epoch-validation", "gpt"),
        ("limits", "lstm"),
    ],
)
def test_a_feature_that_is_ignored_is_seen(feature: str, name: str) -> None:
    row = ROWS[feature]
    ignored = run(ZOO[name], replace(row, trainer=lambda root: {}, module={}))
    assert compare(plain(name, feature), ignored, TOLERANCES["fp32"]).beyond


def compared(a: dict[str, Any], b: dict[str, Any]) -> Difference:
    difference = Difference()
    compare_leaves(dict(leaves(a)), dict(leaves(b)), 1e-5, difference)
    return difference


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"x": 1.0}, {}),
        ({"x": 1.0}, {"x": 1.0, "y": 2.0}),
        ({"x": 1.0}, {"x": math.nan}),
        ({"x": 1.0}, {"x": "1.0"}),
        ({"x": [1, 2]}, {"x": [1]}),
        ({"x": torch.zeros(2)}, {"x": torch.zeros(3)}),
        ({"x": torch.zeros(2)}, {"x": torch.zeros(2, dtype=torch.bfloat16)}),
        ({"x": torch.zeros(2)}, {"x": torch.nn.Parameter(torch.zeros(2))}),
        ({"x": torch.zeros(2)}, {"x": torch.tensor([0.0, 2e-5])}),
        ({"x": 1000.0}, {"x": 1000.02}),
        ({"x": None}, {"x": 0.0}),
    ],
)
def test_what_differs_is_named(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert len(compared(a, b).beyond) >= 1


@pytest.mark.parametrize("value", [1.0, math.nan, math.inf, "text", None, [1, [2.0]], {"a": torch.tensor([math.nan, 1.0])}])
def test_equal_values_are_equal(value: Any) -> None:
    difference = compared({"x": value}, {"x": value})
    assert (difference.largest, difference.beyond) == (0.0, [])


def test_a_run_that_moved_nothing_has_no_parity_by_movement() -> None:
    still = Run(observed={}, weights={"w": torch.ones(2)}, start={"w": torch.ones(2)}, processes=1, warnings=[], strategy=None)
    assert compare(still, still, TOLERANCES["bf16-mixed"]).beyond


def test_every_module_and_every_feature_on_three_modules_meets_every_engine() -> None:
    assert len(ZOO) >= 12
    assert {(cell.case, cell.engine) for cell in MODULE_CELLS} == {(case, engine) for case in ZOO for engine in ENGINES}
    for name in FEATURES:
        for engine in ENGINES:
            cases = {cell.case for cell in FEATURE_CELLS if (cell.feature, cell.engine) == (name, engine)}
            assert len(cases) >= (1 if engine == "pipeline" or engine in KINDS else 3)
            assert engine != "pipeline" or not {(case, engine) for case in cases} & set(UNCUT), "a feature is tried where it can be"
