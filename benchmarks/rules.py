"""What each rule about a published run changes: the rows that it applies to, by source, and their errors with it and without it.

    python benchmarks/rules.py [--part shown|held|all] [--json OUT] [--cache FOLDER]

Rules are those by which :mod:`rows.planned` and :mod:`published` read how a run was laid out, and those of the planner that one number
switches off. What a rule rests on is said in ``docs/published_rules.md``; here is how many sources have a say in it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections import defaultdict
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, get_args

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["AUTOPAR_CACHE"] = "off"

from machine import machine  # noqa: E402
from published import Asked, grouped  # noqa: E402
from rows.held_back import Part, of_part  # noqa: E402
from rows.judged import judge  # noqa: E402
from rows.planned import Layout  # noqa: E402
from rows.question import Question  # noqa: E402
from rows.tracing import Footprints, code_digest  # noqa: E402

#: Fields of a layout that say what was run, rather than how a library did it.
_FACTS = ("engine", "ranks", "data", "stages", "accumulate", "replicas", "reshard", "zero_stage", "offload", "recompute", "tf32", "narrow")
DEFAULTS = {one.name: one.default for one in fields(Layout) if one.default is not MISSING and one.name not in _FACTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=get_args(Part), default="shown")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cache", type=Path, default=HERE / ".cache")
    options = parser.parse_args()
    rows = of_part(json.loads((HERE / "rows" / "rows.json").read_text(encoding="utf-8")), options.part)
    found = summary(compared(rows, Footprints(options.cache, code_digest())))
    for rule, sources in found.items():
        print(rule)
        for source, one in sources.items():
            print(f"  {source[:44]:44} {one['rows']:3} rows", {name: one[name] for name in ("memory", "seconds")})
    if options.json is not None:
        written = {"benchmark": "rules", **machine(), "part": options.part, "rules": found}
        options.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def compared(rows: list[Any], footprints: Footprints) -> list[dict[str, Any]]:
    """A row's errors with one rule and without it, for each rule that applies to it and changes a figure."""
    found = []
    groups, _ = grouped(rows)
    for batch in groups:
        most = max((asked for _, (_, asked, _, _) in batch), key=lambda asked: asked.rows)
        for _, asked in batch:
            found += _compared(asked, most, footprints)
    return found


def _compared(given: Asked, most: Question, footprints: Footprints) -> list[dict[str, Any]]:
    row, asked, laid, assumptions = given
    applied = [name for name, default in DEFAULTS.items() if getattr(laid, name) != default]
    if not applied:
        return []

    def errors(layout: Layout) -> dict[str, float | None]:
        result = judge(row, asked, layout, assumptions, most, footprints)
        return {name: result[f"{name}_error"] for name in ("memory", "seconds")}

    whole = errors(laid)
    return [
        {"rule": name, "source": row["source_name"], "id": row["id"], "with": whole, "without": without}
        for name in applied
        if (without := errors(replace(laid, **{name: DEFAULTS[name]}))) != whole
    ]


def summary(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By rule and source: how many rows it changes, and their median absolute errors with it and without it; None where none is judged."""
    sorted_out: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for one in found:
        sorted_out[one["rule"]][one["source"]].append(one)

    def median(ones: list[dict[str, Any]], which: str, name: str) -> float | None:
        sizes = [abs(one[which][name]) for one in ones if one[which][name] is not None]
        return round(statistics.median(sizes), 4) if sizes else None

    return {
        rule: {
            source: {
                "rows": len(ones),
                **{name: {which: median(ones, which, name) for which in ("with", "without")} for name in ("memory", "seconds")},
            }
            for source, ones in sorted(sources.items())
        }
        for rule, sources in sorted(sorted_out.items())
    }


if __name__ == "__main__":
    main()
