"""The models that trained on a GPU (``memory_gpu.py``), predicted by the code as it is now, beside the bytes that they held then.

    python benchmarks/memory_gpu_again.py    # reads results/memory_gpu.json, writes results/memory_gpu_again.json; needs no GPU

T5 is left out: the transformers of that run hands its bias to attention in another layout than later ones, so that it holds more. It was
measured again there, with the code of then (``results/memory_gpu_t5.json``). Rows of the fused optimizer hold what those of foreach do.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ["AUTOPAR_CACHE"] = "off"  # what earlier runs taught would be no prediction

from machine import machine
from memory import gpu_job
from memory.gpu_job import Task
from rich.progress import track

RESULTS = Path(__file__).resolve().parent / "results"


def summary(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The errors of all rows, the largest by size first."""
    errors = sorted((abs(row[name]) for row in rows), reverse=True)
    worst = max(rows, key=lambda row: abs(row[name]))
    return {
        "median": statistics.median(errors),
        "p95": errors[int(0.05 * len(errors))],
        "worst": worst[name],
        "worst row": [worst["model"], worst["precision"], worst["recompute"]],
        "more than 5 % too low": sum(row[name] < -0.05 for row in rows),
        "of": len(rows),
    }


def main() -> None:
    before = json.loads((RESULTS / "memory_gpu.json").read_text(encoding="utf-8"))
    then = [row for row in before["rows"] if row["optimizer"] == "foreach" and row["model"] != "T5"]
    predicted, rows = {}, []
    for row in track(then, "rows"):
        task = Task(**{name: row[name] for name in Task.__dataclass_fields__})
        key = task.model, task.precision
        if key not in predicted:
            predicted[key] = gpu_job.predict_both(task, before["spec"])
        found = gpu_job.row(task, predicted[key][int(task.recompute)], row["measured"])
        names = ("model", "precision", "recompute", "allocated_error", "reserved_error")
        rows.append({name: found[name] for name in names} | {"before": [row["allocated_error"], row["reserved_error"]]})
    result = {**machine(), "measured": before["date"], "device": before["device"]}
    result["summary"] = {name: summary(rows, f"{name}_error") for name in ("allocated", "reserved")}
    (RESULTS / "memory_gpu_again.json").write_text(json.dumps({**result, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["summary"], indent=1))


if __name__ == "__main__":
    main()
