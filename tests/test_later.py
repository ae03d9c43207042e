"""The table of what `make test` leaves to `make test-slow`: its tests are there, its cases are, and so is what covers them."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.later import LATER, left_to_later, wrong_entries

ROOT = Path(__file__).parents[1]


def is_there(name: str) -> bool:
    """Whether this file, or this test of it, exists."""
    path, _, test = name.partition("::")
    if not (ROOT / path).is_file():
        return False
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return not test or any(isinstance(node, ast.FunctionDef) and node.name == test for node in tree.body)


def test_what_is_left_out_is_covered_by_what_is_there() -> None:
    assert len(LATER) > 50
    for name, part in LATER.items():
        assert is_there(name), name
        assert part.cases or part.covered, f"{name}: nothing covers it"
        for each in part.covered:
            assert is_there(each), f"{name}: {each} doesn't exist"
            assert each not in LATER or LATER[each].cases, f"{name}: {each} is left out itself"


def test_the_rule() -> None:
    name = next(name for name, part in LATER.items() if part.cases)
    assert left_to_later(name, "no such case")
    assert not left_to_later("tests/test_text.py::test_any", "case")
    assert wrong_entries([(name, "no such case")]) == [name]
