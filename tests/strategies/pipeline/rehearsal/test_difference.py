"""What counts as a difference, and how it is put."""

from __future__ import annotations

import math

import torch

from lightning_autopar.exact.logs.log_rules import Logged
from lightning_autopar.strategies.pipeline.rehearsal.difference import EQUAL, Outcome, Step, difference, number_distance, tensor_distance


def step(**values: object) -> Step:
    given: dict[str, object] = {
        "loss": 2.0,
        "logged": {"loss": Logged(value=2.0, reduce_fx="mean")},
        "gradients": {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([1e-9]), "unused": None},
        "settings": [{"lr": 0.1}],
        "moved": {"a": torch.tensor([0.1, 0.2])},
        "buffers": {"count": torch.tensor(3)},
    }
    return Step(**{**given, **values})  # type: ignore[arg-type]


def words(**values: object) -> str | None:
    found = difference(Outcome(steps=[step(), step(**values)]), Outcome(steps=[step(), step()]))
    return None if found is None else found[1]


def test_nothing_differs() -> None:
    assert words() is None
    assert words(loss=2.0 + 1e-7) is None
    assert words(gradients={"a": torch.tensor([1.0, 2.0 + 1e-6])}) is None, "what another stage has isn't here"
    assert words(moved={"a": torch.tensor([0.1, 0.2 + 1e-6])}) is None, "the rounding of a parameter is more of its small step"
    assert words(moved={"a": torch.tensor([0.1, 0.2 + 1e-5])}) is not None


def test_each_difference_has_its_sentence() -> None:
    assert words(loss=2.5) == "in stages the loss is 2.5 instead of 2"
    assert words(loss=None) == "in stages the loss is missing instead of 2"
    assert words(logged={}) == "in stages the value logged as 'loss' is missing instead of 2"
    more = {"loss": Logged(value=2.0, reduce_fx="mean"), "more": Logged(value=1.0, reduce_fx="mean")}
    assert words(logged=more) == "in stages the value logged as 'more' is 1 instead of missing"
    assert words(returned=torch.ones(2)) == "in stages the step returns something else"
    assert words(gradients={"a": torch.tensor([1.0, 2.2])}) == "in stages the gradient of 'a' differs by 0.1 of it"
    assert words(gradients={"unused": torch.zeros(1)}) == "in stages the gradient of 'unused' differs by all of it"
    assert words(settings=[{"lr": 0.2}]) == "the optimizer sets 'lr' by all parameters together, and a stage has some of them only"
    assert words(moved={"a": torch.tensor([0.1, 0.3])}) == (
        "in stages the optimizer's step of 'a' differs by 0.5 of it, as if it looked at all parameters together"
    )
    assert words(buffers={"count": torch.tensor(4)}) == "in stages the buffer 'count' has other values after the step"


def test_the_first_step_that_differs_is_told() -> None:
    ours = Outcome(steps=[step(gradients={"a": torch.tensor([5.0, 2.0])}), step(loss=7.0)])
    assert difference(ours, Outcome(steps=[step(), step()])) == (2.0, "in stages the gradient of 'a' differs by 2 of it")


def test_hooks_that_fail_in_stages_alone() -> None:
    ours, theirs = Outcome(steps=[step()], notes=("a hook failed", "x failed")), Outcome(steps=[step()], notes=("x failed",))
    assert difference(ours, theirs) == (math.inf, "in stages a hook failed")
    assert difference(theirs, ours) is None


def test_gradients_that_are_zero_but_for_rounding_are_judged_beside_the_others() -> None:
    assert words(gradients={"b": torch.tensor([-1e-9])}) is None
    found = tensor_distance(torch.tensor([-1e-9]), torch.tensor([1e-9]), 0.0)
    assert found == 2.0


def test_distances_of_numbers() -> None:
    assert number_distance(None, None) == 0.0
    assert number_distance(math.nan, math.nan) == 0.0
    assert number_distance(math.nan, 1.0) == math.inf
    assert number_distance(1.0, 1.0 + 1e-3) > EQUAL


def test_distances_of_tensors() -> None:
    assert tensor_distance(torch.ones(2), torch.ones(3), 1.0) == math.inf
    assert tensor_distance(torch.tensor([1, 2]), torch.tensor([1, 3]), 1.0) == math.inf
    assert tensor_distance(torch.tensor([True]), torch.tensor([True]), 1.0) == 0.0
    assert tensor_distance(torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0]), 1.0) == 0.0
    assert tensor_distance(torch.tensor([math.nan]), torch.tensor([1.0]), 1.0) == math.inf
    assert tensor_distance(torch.tensor([math.inf]), torch.tensor([math.inf]), 1.0) == 0.0
    assert tensor_distance(torch.tensor([1e-3]), torch.tensor([0.0]), 0.0) == math.inf
    assert tensor_distance(torch.zeros(0), torch.zeros(0), 1.0) == 0.0


def test_outputs_are_compared_leaf_by_leaf() -> None:
    one = {"logits": torch.ones(2), "more": [1, "word", (torch.zeros(1), None)]}
    other = {"logits": torch.ones(2), "more": [1, "word", (torch.ones(1), None)]}
    same = Outcome(steps=[Step(returned=one)])
    assert difference(same, Outcome(steps=[Step(returned=dict(one))])) is None
    assert difference(same, Outcome(steps=[Step(returned=other)])) is not None
    assert difference(same, Outcome(steps=[Step(returned=None)])) is not None
