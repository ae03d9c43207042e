"""Seeds under every plan against plain Lightning: `python -m tests.fuzz.run [--plans ddp,fsdp] FIRST LAST` (`make fuzz`).

What each came to goes to build/fuzz.json; seeds that were there before aren't run again. A defect is printed as it is found, and the
sentences that refused are counted at the end, to be read: whether one is true, no program can tell.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import rich.progress

from tests.conformance.verdict import keep
from tests.fuzz.module import member
from tests.fuzz.recipe import draw
from tests.packages.cell import findings
from tests.packages.plans import PLANS

RESULTS = Path(__file__).parents[2] / "build" / "fuzz.json"
DEFECTS = ("differs", "crashed")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int, help="included")
    parser.add_argument("--plans", default=",".join(PLANS), help="all by default")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    before = json.loads(options.results.read_text(encoding="utf-8")) if options.results.exists() else {}
    for seed in rich.progress.track(range(options.first, options.last + 1), "seeds"):
        plans = [plan for plan in options.plans.split(",") if f"{seed}-{plan}" not in before]
        if plans:
            print(f"{seed}: {draw(seed)}", flush=True)
            for plan, finding in findings(member(draw(seed)), plans):
                keep(f"{seed}-{plan}", finding, options.results)
    found = json.loads(options.results.read_text(encoding="utf-8"))
    print(dict(Counter(finding["outcome"] for finding in found.values())))
    for sentence, count in Counter(finding["reason"] for finding in found.values() if finding["outcome"] == "refused").most_common():
        print(f"{count:4} refused: {sentence}")
    defects = [cell for cell, finding in found.items() if finding["outcome"] in DEFECTS]
    print(f"{len(defects)} defects: {', '.join(sorted(defects))}")
    return bool(defects)


if __name__ == "__main__":
    sys.exit(main())
