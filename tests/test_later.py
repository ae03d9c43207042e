"""The table of what `make test` leaves to `make test-slow`: its tests are there, its cases are, and so is what covers them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.later import COLLECTED, HERE, LATER, left_to_later, without_a_case

ROOT = Path(__file__).parents[1]


def names_a_test(name: str) -> bool:
    """Whether this file, or this test of it, is there, and isn't itself left to later as a whole."""
    path, _, function = name.partition("::")
    if not (ROOT / path).is_file() or (name in LATER and not LATER[name].cases):
        return False
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return not function or any(isinstance(node, ast.FunctionDef) and node.name == function for node in tree.body)


def test_what_is_left_out_is_covered_by_what_is_there() -> None:
    for name, part in LATER.items():
        assert (ROOT / name.partition("::")[0]).is_file(), name
        assert part.covered, name
        assert part.cases or HERE not in part.covered, f"{name}: no case stays that could cover the others"
        assert [each for each in part.covered if each != HERE and not names_a_test(each)] == [], name


def test_a_case_that_is_gone_is_an_error(request: pytest.FixtureRequest) -> None:
    """Of the files that this run has whole: each entry leaves cases out, and has the ones that it names."""
    config = request.config
    if config.option.keyword or config.option.markexpr or any("::" in name for name in config.args):
        pytest.skip("a choice of tests says nothing of the others")
    assert without_a_case(config.stash.get(COLLECTED, [])) == []


def test_the_rule() -> None:
    name = next(name for name, part in LATER.items() if part.cases)
    assert left_to_later(name, "no such case")
    assert not left_to_later("tests/test_units.py::test_any", "case")
    assert without_a_case([(name, "no such case")]) == [name]
