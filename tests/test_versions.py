"""The page of versions says what the results say; the metadata and the changelog name what there is."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tools"))

import versions  # noqa: E402

from lightning_autopar._version import __version__  # noqa: E402


def test_the_page_is_what_the_results_say() -> None:
    assert versions.PAGE.read_text(encoding="utf-8") == versions.page(ROOT / "benchmarks" / "results"), "run python tools/versions.py"


def test_every_admitted_python_is_in_the_table() -> None:
    named = re.findall(r"Programming Language :: Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert tuple(named) == versions.ADMITTED["python"]


def test_the_changelog_begins_with_this_version() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == __version__
