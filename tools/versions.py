"""Writes docs/versions.md: which versions ran together, and when, by the benchmarks' results, which each say so. The one source.

python tools/versions.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "versions.md"
COLUMNS = ("python", "torch", "lightning", "transformers", "deepspeed")
#: Versions that the package's metadata allows and no result names, a row each.
ADMITTED = {"python": ("3.11", "3.12", "3.13")}

_HEAD = """# Versions

Which versions ran together, when, and what ran: by the benchmarks' results in `benchmarks/results/`, each of which names its versions and
its date. `tools/versions.py` writes this page. Versions that aren't in the table were **not run**. The tests use the versions in
`constraints.txt`.

"""


def combinations(results: Path) -> dict[tuple[str, ...], dict[str, str]]:
    """By versions: the day of each result that ran with them, by its name."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for path in sorted(results.glob("*.json")):
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        versions = data.get("versions") if isinstance(data, dict) else None
        if versions and "torch" in versions:
            key = tuple(str(versions.get(name) or "–") for name in COLUMNS)
            found.setdefault(key, {})[path.stem] = str(data.get("date", ""))[:10]
    return found


def page(results: Path) -> str:
    """The page's text."""
    lines = [f"| {' | '.join(COLUMNS)} | ran | last on |", "|" + "---|" * (len(COLUMNS) + 2)]
    found = combinations(results)
    for key, ran in sorted(found.items(), reverse=True):
        names = ", ".join(f"`{name}`" for name in sorted(ran))
        lines.append(f"| {' | '.join(key)} | {names} | {max(ran.values()) or 'not dated'} |")
    for column, versions in ADMITTED.items():
        at = COLUMNS.index(column)
        for version in versions:
            if not any(key[at].startswith(f"{version}.") for key in found):
                cells = ["any"] * len(COLUMNS)
                cells[at] = version
                lines.append(f"| {' | '.join(cells)} | **not run** | |")
    return _HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(ROOT / "benchmarks" / "results"), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE.relative_to(ROOT)}\n")
