"""Is the planner's choice the fastest plan that fits, by its own prediction? Random cases, held against a referee.

A case is a model of real size (Llamas of 0.2 to 13 billion parameters, the memory benchmark's zoo), 1 to 64 devices of the catalogue, even
or with different free memory or of two models, a precision, a global batch and an optimizer; every second one is tight in memory. The
referee (``referee/judge.py``) writes plans down from their fields, all of them where there are at most ``--plans``, else so many at random;
then every neighbour by one field of the best twenty, as long as that finds better ones. It shares with the search what predicts one plan.

    python benchmarks/search_against_all.py                     # 300 cases; goes on where it was stopped
    python benchmarks/search_against_all.py --cases 3 7 8 --plans 500 --dry     # a table only
    python benchmarks/search_against_all.py --cases 3 7 8 --again               # these again
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["AUTOPAR_CACHE"] = "off"

from machine import machine  # noqa: E402
from referee.cases import drawn, footprint_of, inventory_of  # noqa: E402
from referee.judge import Referee  # noqa: E402

from lightning_autopar.constraints import Constraints  # noqa: E402
from lightning_autopar.planning.make_report import make_report  # noqa: E402
from lightning_autopar.report.report import NothingFits  # noqa: E402

RESULTS = HERE / "results" / "search_against_all.json"
CASES, PLANS = 300, 20_000
#: The chosen plan's predicted step is at most so many times the best one's.
GOAL = 1.02


def judged(seed: int, plans: int) -> dict[str, Any]:
    """One case: the plan that was chosen, the referee's best, and how much longer the chosen one takes.

    ``ratio`` is 1 where the referee found nothing faster, and None where nothing was chosen though something fits.
    """
    case = drawn(seed)
    footprint, inventory = footprint_of(case), inventory_of(case)
    constraints = Constraints(precision=case.precision)
    if case.tight is not None:
        inventory = Referee(footprint, inventory, constraints, seed).cut_to(case.tight)
    began = time.process_time()
    try:
        report = make_report(footprint, inventory, constraints)
    except NothingFits as nothing:
        report = nothing.report
    planning_seconds = time.process_time() - began
    chosen, seconds = report.best, math.inf
    if chosen is not None:
        seconds = report.candidates[0].step_seconds
    verdict = Referee(footprint, inventory, constraints, seed).verdict(plans, seconds)
    ratio: float | None = 1.0
    if verdict.best is not None:
        ratio = None if chosen is None else seconds / verdict.seconds
    return {
        "seed": seed,
        "case": case.words(),
        "chosen": None if chosen is None else chosen.title(),
        "seconds": None if chosen is None else seconds,
        "best": None if verdict.best is None else verdict.best.title(),
        "best_seconds": None if verdict.best is None else verdict.seconds,
        "ratio": None if ratio is None else round(ratio, 4),
        "plans": verdict.plans,
        "planning_seconds": round(planning_seconds, 3),
    }


def is_missed(row: dict[str, Any]) -> bool:
    """Whether a plan that fits is faster than the chosen one by more than the goal, or nothing was chosen where one fits."""
    return row["ratio"] is None or row["ratio"] > GOAL


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many cases, how many of them were missed, and by how much."""
    ratios = sorted(row["ratio"] for row in rows if row["ratio"] is not None)
    return {
        "cases": len(rows),
        "missed": sum(map(is_missed, rows)),
        "nothing_fits_though_something_does": sum(row["ratio"] is None for row in rows),
        "worst_ratio": ratios[-1] if ratios else None,
        "mean_ratio": round(sum(ratios) / len(ratios), 4) if ratios else None,
        "plans": sum(row["plans"] for row in rows),
    }


def main() -> None:
    """Judge, print and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, nargs="*", help="seeds; the first 300 unless given")
    parser.add_argument("--plans", type=int, default=PLANS, help="that the referee looks at before neighbours")
    parser.add_argument("--dry", action="store_true", help="write nothing, and judge all anew")
    parser.add_argument("--anew", action="store_true", help="forget what was judged before")
    parser.add_argument("--again", action="store_true", help="judge these cases again, and keep the others")
    options = parser.parse_args()
    kept: dict[int, dict[str, Any]] = {}
    if RESULTS.is_file() and not options.dry and not options.anew:
        before = json.loads(RESULTS.read_text(encoding="utf-8"))
        if before["plans_a_case"] == options.plans:
            kept = {row["seed"]: row for row in before["rows"]}
    for seed in options.cases if options.cases is not None else range(CASES):
        if seed in kept and not options.again:
            continue
        row = kept[seed] = judged(seed, options.plans)
        verdict = f"best {row['best']} {row['best_seconds']:.4f} s" if row["best"] else "nothing faster found"
        missed = "MISSED " if is_missed(row) else ""
        seconds = "" if row["seconds"] is None else f" {row['seconds']:.4f} s"
        print(
            f"{missed}{seed}: {row['case']}: {row['chosen']}{seconds} ({row['planning_seconds']} s); {verdict}; ratio {row['ratio']}, "
            f"{row['plans']} plans",
            flush=True,
        )
        if not options.dry:
            rows = [kept[seed] for seed in sorted(kept)]
            found = {
                "benchmark": "search_against_all",
                **machine(),
                "goal": GOAL,
                "plans_a_case": options.plans,
                "summary": summary(rows),
                "rows": rows,
            }
            RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary(list(kept.values()))))


if __name__ == "__main__":
    main()
