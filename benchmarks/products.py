"""Matrix products on one CPU core between the sizes that calibration measures: predicted beside measured seconds.

A micro-batch's products have fewer rows than the batch's: calibration measures a few numbers of rows, and between them the prediction goes
along a straight line. ``by_rates`` is what it was before: the logarithm of FLOP/s along the logarithm of the rows. Each figure is of a
forward's product and a weight gradient's. Processor time, the least of several, so that others' work on the machine counts less.

    python benchmarks/products.py                  # writes benchmarks/results/products.json, half a minute
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import torch  # noqa: E402

from benchmarks.machine import machine  # noqa: E402
from lightning_autopar.devices.inventory import Device  # noqa: E402
from lightning_autopar.memory.work.work import Work  # noqa: E402
from lightning_autopar.strategies.calibration.device_curves import cold_product  # noqa: E402
from lightning_autopar.timing.data_sheet import DATA_SHEET  # noqa: E402
from lightning_autopar.timing.measured_curves import Calibration, Curve  # noqa: E402
from lightning_autopar.timing.measured_rates import SMALLEST_DIMENSIONS, MeasuredRates, device_key  # noqa: E402

RESULTS = HERE / "results" / "products.json"
WIDE = (256, 1024)
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
CPU = Device(id="cpu:0", kind="cpu", name="cpu", total_bytes=2**30, free_bytes=2**30, threads=1)


def seconds_of(run: Callable[[], None], repeats: int = 25) -> float:
    """Processor seconds of one run, the least of several."""
    run()
    began = time.process_time()
    run()
    count = max(1, int(0.004 / max(1e-7, time.process_time() - began)))
    taken = []
    for _ in range(repeats):
        began = time.process_time()
        for _ in range(count):
            run()
        taken.append((time.process_time() - began) / count)
    return min(taken)


def measured(rows: int, wide: int) -> float:
    """Seconds of a product, the mean of a forward's and a weight gradient's."""
    cpu = torch.device("cpu")
    pair = cold_product(cpu, torch.float32, rows, wide, wide), cold_product(cpu, torch.float32, wide, wide, rows)
    return sum(map(seconds_of, pair)) / 2


def by_rates(rows: int, known: dict[int, float]) -> float:
    """Seconds along the logarithm of the rate between the nearest known numbers of rows."""
    below, above = max(count for count in known if count <= rows), min(count for count in known if count >= rows)
    if below == above:
        return known[rows]
    part = math.log(rows / below) / math.log(above / below)
    return rows / math.exp((1 - part) * math.log(below / known[below]) + part * math.log(above / known[above]))


def main() -> None:
    """Measure, print and keep it."""
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    for wide in WIDE:
        taken = {rows: measured(rows, wide) for rows in ROWS if rows <= wide}
        known = {rows: seconds for rows, seconds in taken.items() if rows in SMALLEST_DIMENSIONS}
        curves = (
            Curve(subject=device_key(CPU), thing=f"matmul/{rows}", dtype="fp32", sizes=(wide,), seconds=(each,))
            for rows, each in known.items()
        )
        rates = MeasuredRates(Calibration().with_curves(curves, day="2026-01-01", took_seconds=1.0), DATA_SHEET)
        for rows in (rows for rows in taken if rows not in known and rows < max(known)):
            work = Work(
                kind="matmul", name="mm", dtype="fp32", flops=2 * rows * wide**2, moved_bytes=4 * wide**2, shape=(1, rows, wide, wide)
            )
            row = {"rows": rows, "wide": wide, "seconds": taken[rows]}
            ratios = {"predicted": rates.work_seconds(CPU, work) / taken[rows], "by_rates": by_rates(rows, known) / taken[rows]}
            found.append(row | {name: round(ratio, 3) for name, ratio in ratios.items()})
            words = f"predicted {ratios['predicted']:.2f} x, before {ratios['by_rates']:.2f} x"
            print(f"{rows:4} x {wide} x {wide}: {taken[rows] * 1e6:7.1f} us, {words}")
    summary = {f"mean_error_{name}": round(sum(abs(row[name] - 1) for row in found) / len(found), 3) for name in ("predicted", "by_rates")}
    print(summary)
    RESULTS.write_text(
        json.dumps({"benchmark": "products", **machine(), "summary": summary, "rows": found}, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
