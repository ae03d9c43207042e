"""The table in ``later.md``: what `make test` leaves to `make test-slow`, and which tests of `make test` cover it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_CELL, _ALTERNATIVE = re.compile(r"(?<!\\)\|"), re.compile(r"\|(?![^(]*\))")


class Part(NamedTuple):
    """What `make test` has of a test: a regular expression of its cases, empty if none, and the other tests that cover the rest."""

    cases: str
    covered: tuple[str, ...]


def _table() -> dict[str, Part]:
    """By the test's ``path::name``."""
    lines = Path(__file__).with_suffix(".md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in _CELL.split(line)[1:-1]] for line in lines if line.startswith("| `")]
    return {
        test.strip("`"): Part("" if cases == "none" else cases.strip("`").replace(r"\|", "|"), tuple(re.findall("`([^`]+)`", covered)))
        for test, cases, covered in rows
    }


LATER = _table()


def left_to_later(test: str, case: str) -> bool:
    """Whether `make test` leaves this case of a test to `make test-slow`."""
    part = LATER.get(test)
    return part is not None and (not part.cases or re.fullmatch(part.cases, case) is None)


def wrong_entries(collected: Iterable[tuple[str, str]]) -> list[str]:
    """Of tests that were collected with all of their cases, the entries that leave nothing out or name a case that isn't there.
    ``tests/conftest.py`` asks for them in each part of `make test`, which collects some of the files.
    """
    found: dict[str, list[str]] = {}
    for test, case in collected:
        if test in LATER:
            found.setdefault(test, []).append(case)
    return [
        test
        for test, cases in found.items()
        if not any(left_to_later(test, case) for case in cases)
        or not all(any(re.fullmatch(each, case) for case in cases) for each in _ALTERNATIVE.split(LATER[test].cases) if each)
    ]
