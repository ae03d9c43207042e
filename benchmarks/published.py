"""Predictions for training runs that other people measured on GPUs and published, beside what they measured.

    python benchmarks/published.py [--rows FILE] [--json OUT] [--only SUBSTRING]

What it does so far: **memory of runs on one device**. Each row's model is built on meta from its dimensions, in the manner of the library
that was measured, and traced once; nothing is fitted to the rows. Rows on several devices, times, and rows whose model or setting
isn't known (named with the reason) aren't predicted yet.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["AUTOPAR_CACHE"] = "off"

from machine import machine  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402
from rich.table import Table  # noqa: E402
from rows.row import NotBuilt, Question, Row, question  # noqa: E402

from lightning_autopar.memory.footprint import Footprint  # noqa: E402
from lightning_autopar.memory.inventory import probe  # noqa: E402
from lightning_autopar.memory.trace import trace  # noqa: E402
from lightning_autopar.planning.candidates import Constraints  # noqa: E402
from lightning_autopar.planning.planner import make_report  # noqa: E402
from lightning_autopar.planning.report import NothingFits  # noqa: E402
from lightning_autopar.plans import Plan  # noqa: E402

#: Of the catalogue, for memory alone: what a row needs doesn't depend on how much there is.
_DEVICE = "1xB200-180GB"


def predicted(asked: Question, footprint: Footprint) -> dict[str, int]:
    """Bytes by category on the one device."""
    inventory = probe(_DEVICE)
    plan = Plan(engine="single", devices=(inventory.devices[0].id,))
    constraints = Constraints(allow=("single",), pinned=plan, precision=asked.precision, memory_margin=0.0)
    try:
        report = make_report(footprint, inventory, constraints)
    except NothingFits as error:
        report = error.report
    (held,) = report.candidates[0].bytes.values()
    return {name: size for name, size in held.to_dict().items() if isinstance(size, int)}


def of_kind(held: dict[str, int], kind: str) -> int:
    """The figure that a row publishes: allocated, reserved, or all that the driver sees."""
    if "alloc" in kind or "active" in kind:
        return held["allocated"]
    return held["reserved"] if kind.startswith("nvidia-smi") else held["reserved"] - held["context"]


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=HERE / "rows" / "rows.json")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="rows with this in their id or source")
    options = parser.parse_args()
    rows: list[Row] = json.loads(options.rows.read_text(encoding="utf-8"))
    wanted = [
        row
        for row in rows
        if row["measured_peak_memory_gib"] and row["strategy"] == "single" and options.only in f"{row['id']} {row['source_name']}"
    ]
    footprints: dict[Question, tuple[Footprint, float]] = {}
    found: list[dict[str, Any]] = []
    left_out: Counter[str] = Counter()
    for row in track(wanted, console=Console(stderr=True)):
        try:
            asked = question(row)
        except NotBuilt as error:
            left_out[str(error)] += 1
            continue
        if asked not in footprints:
            begun = time.perf_counter()
            footprints[asked] = (
                trace(asked.build(), None, asked.batch(), precision=asked.precision, target="cuda"),
                time.perf_counter() - begun,
            )
        footprint, seconds = footprints[asked]
        held = predicted(asked, footprint)
        memory = of_kind(held, str(row["memory_kind"])) / 2**30
        measured = float(row["measured_peak_memory_gib"])
        found.append(
            {
                "id": row["id"],
                "source": row["source_name"],
                "model": row["model"],
                "kind": row["memory_kind"],
                "measured_gib": measured,
                "predicted_gib": memory,
                "error": memory / measured - 1,
                "traced": footprint.traced,
                "trace_seconds": seconds,
                "categories": held,
            }
        )
    summary = summarise(found)
    show(found, summary, left_out)
    if options.json is not None:
        result = {
            "benchmark": "published, memory on one device",
            **machine(),
            "summary": summary,
            "left_out": dict(left_out),
            "rows": found,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def summarise(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and 90th percentile of the error by source, and the mean over sources of the median."""
    by_source: dict[str, list[float]] = defaultdict(list)
    for row in found:
        by_source[row["source"]].append(abs(row["error"]))
    sources = {}
    for source, errors in by_source.items():
        errors.sort()
        sources[source] = {
            "n": len(errors),
            "median": statistics.median(errors),
            "p90": errors[min(len(errors) - 1, int(0.9 * len(errors)))],
        }
    mean = statistics.mean(one["median"] for one in sources.values()) if sources else None
    return {"rows": len(found), "mean_of_medians": mean, "sources": sources}


def show(found: list[dict[str, Any]], summary: dict[str, Any], left_out: Counter[str]) -> None:
    """The table, by source."""
    table = Table()
    for title in ("row", "model", "measured GiB", "predicted", "error"):
        table.add_column(title)
    for row in found:
        table.add_row(row["id"], row["model"], f"{row['measured_gib']:.2f}", f"{row['predicted_gib']:.2f}", f"{row['error']:+.1%}")
    console = Console()
    console.print(table)
    for reason, count in left_out.items():
        console.print(f"{count} not built: {reason}")
    console.print(summary)


if __name__ == "__main__":
    main()
