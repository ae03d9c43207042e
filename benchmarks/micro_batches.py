"""Whether a step on one CPU device really takes as long in 2, 4, 8 micro-batches as planning says, by model.

Planning sometimes predicts more micro-batches to be *faster*, with nothing else changed. Here the same model and batch run under the plan
of one device in 1, 2, 4 and 8 micro-batches. Both figures are given as multiples of the whole batch's: the predicted step, and the
processor time of a step (median, least of ``--repeats`` runs), which others' work on the machine changes less than its seconds.

    python benchmarks/micro_batches.py             # writes benchmarks/results/micro_batches.json
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import step_time

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "micro_batches.json"
PARTS = (1, 2, 4, 8)
#: Models of ``step_time`` without batch norm, and one whose logits are most of what a step holds.
MODELS = ("mlp", "gpt", "lstm", "wide_logits")
BATCH = 32
DEVICE = "1xcpu:8GiB"
QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}


def module(name: str) -> tuple[Any, Any]:
    """A LightningModule and its samples."""
    import torch
    from torch import nn

    if name != "wide_logits":
        return step_time.module(name)
    net, _ = step_time.module("gpt")
    net.net = nn.Sequential(nn.Embedding(16_384, 128), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16_384), nn.Flatten(0, 1))
    text = torch.randint(16_384, (640, 65))
    return net, torch.utils.data.TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())


def run(name: str, parts: int, steps: int) -> dict[str, Any]:
    """One model in so many micro-batches, in this process."""
    import lightning as L
    import torch
    from torch.utils.data import DataLoader

    from lightning_autopar.plans import Plan
    from lightning_autopar.strategies.auto import AutoParallelStrategy

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    net, data = module(name)
    strategy = AutoParallelStrategy(plan=Plan(engine="single", devices=("cpu:0",), micro_batches=parts), devices=DEVICE)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "busy"
        trainer = L.Trainer(accelerator="cpu", strategy=strategy, max_steps=steps, callbacks=[step_time.busy_callback(out)], **QUIET)
        trainer.fit(net, DataLoader(data, batch_size=BATCH))
        busy = float(out.read_text(encoding="utf-8"))
    assert strategy.report is not None
    best = strategy.report.best_candidate
    assert best is not None
    assert best.seconds is not None
    return {"predicted": best.seconds.to_dict(), "busy_seconds": busy}


def measure(name: str, cache: Path, repeats: int, steps: int) -> list[dict[str, Any]]:
    """A model in each number of micro-batches, the best of some runs each, taking turns."""
    rows: dict[int, list[dict[str, Any]]] = {parts: [] for parts in PARTS}
    for _ in range(repeats):
        for parts in PARTS:
            rows[parts].append(step_time.run_anew(__file__, [name, "--parts", str(parts), "--steps", str(steps)], cache))
    best = {parts: min(found, key=lambda row: float(row["busy_seconds"])) for parts, found in rows.items()}
    whole = best[1]
    return [
        {
            "model": name,
            "micro_batches": parts,
            **row,
            "predicted_ratio": row["predicted"]["step"] / whole["predicted"]["step"],
            "measured_ratio": row["busy_seconds"] / whole["busy_seconds"],
        }
        for parts, row in best.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="one model, printed alone")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--cache", type=Path, help="measured rates to use instead of measuring them first")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--parts", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        print(json.dumps(run(arguments.run, arguments.parts, arguments.steps)))
        return
    from machine import machine

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        cache = arguments.cache or Path(folder)
        environment = {**os.environ, "AUTOPAR_CACHE": str(cache), "AUTOPAR_DEVICES": DEVICE, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-m", "lightning_autopar", "calibrate"], env=environment, check=True)
        for name in MODELS:
            if arguments.only in (None, name):
                rows += measure(name, cache, arguments.repeats, arguments.steps)
                for row in rows[-len(PARTS) :]:
                    words = f"{row['measured_ratio']:.2f} x measured, {row['predicted_ratio']:.2f} x predicted"
                    print(f"{name:12} {row['micro_batches']} micro-batches: {row['busy_seconds'] * 1e3:8.2f} ms busy, {words}", flush=True)
    errors = sorted(abs(row["predicted_ratio"] / row["measured_ratio"] - 1) for row in rows if row["micro_batches"] > 1)
    said_faster = [row for row in rows if row["micro_batches"] > 1 and row["predicted_ratio"] < 1]
    summary = {
        "median_error": statistics.median(errors),
        "worst_error": errors[-1],
        "predicted_faster": len(said_faster),
        "of_them_slower": sum(row["measured_ratio"] > 1 for row in said_faster),
        "of": len(errors),
    }
    print(summary)
    if not arguments.only:
        RESULTS.write_text(json.dumps({**machine(), "summary": summary, "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
