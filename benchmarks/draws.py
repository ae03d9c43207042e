"""What drawing the whole batch's random numbers on every rank costs, as the planner prices it and as it was measured.

A rank that has some of the batch's samples draws for all of them and keeps its own rows, so that the run is one device's. The planner's
price comes from this machine's calibration, made here first. Measured are CPU seconds of the same draws under ``GlobalDraws``, in turns
with draws of the rank's own (``draws="per-rank"``) and on one device, on one thread; of each the median, over several rounds.

    python benchmarks/draws.py                 # writes benchmarks/results/draws.json
    python benchmarks/draws.py --quick         # a smoke test: figures without meaning
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from machine import machine

from lightning_autopar.devices.inventory import Device
from lightning_autopar.exact.data.rank_share import BatchShare
from lightning_autopar.exact.random.whole_batch_draws import Draw, DrawPlan, GlobalDraws, Rows
from lightning_autopar.memory.work.work import Work
from lightning_autopar.strategies.calibration.device_curves import measure_device
from lightning_autopar.timing.data_sheet import DataSheet
from lightning_autopar.timing.measured_curves import Calibration
from lightning_autopar.timing.measured_rates import MeasuredRates, device_key
from lightning_autopar.timing.rank_compute import DRAW, drawn_seconds

RESULTS = Path(__file__).resolve().parent / "results/draws.json"
BOUND = 0.2
DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "bernoulli_": lambda mask: mask.bernoulli_(0.9),
    "normal_": lambda noise: noise.normal_(),
    "uniform_": lambda noise: noise.uniform_(),
    "exponential_": lambda noise: noise.exponential_(),
}
#: (samples in the batch, ranks, numbers for each sample)
BATCHES = ((16, 2, 1 << 13), (16, 2, 1 << 15), (32, 4, 1 << 15), (8, 2, 1 << 17), (16, 8, 1 << 16), (32, 8, 1 << 14))


ROUNDS, TURNS = 5, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    quick, out = vars(parser.parse_args()).values()
    torch.set_num_threads(1)
    batches, seconds = (BATCHES[:1], 0.5) if quick else (BATCHES, 6.0)
    rounds = [one_round(batches, seconds) for _ in range(1 if quick else ROUNDS)]
    rows = [merged(rows) for rows in zip(*rounds, strict=True)]
    errors = [abs(row["predicted_by_measured"] - 1) for row in rows]
    found = {
        **machine(),
        "python_calls": python_calls(),
        "bound": BOUND,
        "median_error": round(statistics.median(errors), 3),
        "worst_error": round(max(errors), 3),
        "within": sum(error <= BOUND for error in errors),
        "of": len(errors),
        "rows": rows,
    }
    if not quick:
        out.write_text(json.dumps(found, indent=1) + "\n")
    for one in rows:
        print("  ".join(f"{name} {value}" for name, value in one.items()))
    print(f"{found['python_calls']} calls of Python a draw; {DRAW} are counted with")
    print(
        f"median error {found['median_error']:.1%}, worst {found['worst_error']:.1%}, {found['within']} of {found['of']} within {BOUND:.0%}"
    )


def one_round(batches: Sequence[tuple[int, int, int]], seconds: float) -> list[dict[str, Any]]:
    """This machine's rates, and right behind them every draw."""
    device = Device(id="cpu:0", kind="cpu", name="cpu", total_bytes=1 << 34, free_bytes=1 << 34, threads=1)
    curves = measure_device(torch.device("cpu"), device_key(device), seconds=seconds)
    rates = MeasuredRates(Calibration().with_curves(curves, day="", took_seconds=seconds), DataSheet())
    return [row(rates, device, name, *batch) for name in DRAWS for batch in batches]


def row(rates: MeasuredRates, device: Device, name: str, samples: int, ranks: int, width: int) -> dict[str, Any]:
    """One draw: as predicted, and measured in the three ways, in turns."""
    share: BatchShare | None = BatchShare(rows=samples // ranks, of=samples, rank=1, world_size=ranks)
    own = samples // ranks
    ways = {"one_device_us": (None, samples), "whole_us": (DrawPlan(), own), "per_rank_us": (DrawPlan(seeded=True), own)}
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(TURNS):
        for way, (plan, rows) in ways.items():
            numbers = torch.empty(rows, width)
            with GlobalDraws(lambda plan=plan: share if plan is not None else None, plan):
                for turn in range(4):
                    begin = time.process_time()
                    DRAWS[name](numbers)
                    if turn:  # the first one looks things up
                        taken[way].append(time.process_time() - begin)
    work = Work(kind="pointwise", name=name, dtype="fp32", moved_bytes=4 * samples * width, drawn=True)
    predicted = drawn_seconds(work, 1 / ranks, device, rates) + rates.issue_seconds(device) + DRAW * rates.python_seconds(device, "call")
    measured = {way: round(1e6 * statistics.median(seconds), 1) for way, seconds in taken.items()}
    return {"draw": name, "samples": samples, "ranks": ranks, "each": width, "predicted_us": round(1e6 * predicted, 1), **measured}


def merged(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One draw's rounds: medians, and the median of what was predicted beside what was measured in the same round."""
    figures = {name: statistics.median(row[name] for row in rows) if name.endswith("_us") else value for name, value in rows[0].items()}
    return {**figures, "predicted_by_measured": round(statistics.median(row["predicted_us"] / row["whole_us"] for row in rows), 3)}


def python_calls() -> int:
    """Of functions and builtins in a draw of the whole batch's, as they are counted in steps."""
    share = BatchShare(rows=8, of=16, rank=1, world_size=2)
    mask, calls = torch.empty(8, 8), 0
    plan = DrawPlan(draws=(Draw(op="bernoulli_", shape=(16, 8), choice=Rows(dim=0)),), batch_size=16)

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    with GlobalDraws(lambda: share, plan) as draws:
        mask.bernoulli_(0.5)
        draws.begin()
        sys.setprofile(count)
        mask.bernoulli_(0.5)
        sys.setprofile(None)
    return calls


if __name__ == "__main__":
    main()
