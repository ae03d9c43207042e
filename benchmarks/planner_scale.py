"""How long planning takes by numbers of devices and blocks: the search alone, without the trace of the step.

A language model of equal blocks (``memory/stage_rank.py``, on meta), traced once for each depth, and catalogue devices in nodes of eight,
with the same free memory each, or with all different. The batch has four samples a device; with 96 blocks also fewer and more, where
pipelines or recomputation are nearer. Seconds are of the process, the least of several; and those of the first one beside them, which takes
the step apart, as a run's only search does.

    python benchmarks/planner_scale.py               # writes benchmarks/results/planner_scale.json
    python benchmarks/planner_scale.py --quick       # a few cases, a table only
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
import warnings
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import torch  # noqa: E402

from benchmarks.machine import machine  # noqa: E402
from benchmarks.memory.stage_rank import GPT  # noqa: E402
from lightning_autopar.constraints import Constraints  # noqa: E402
from lightning_autopar.devices.inventory import Inventory  # noqa: E402
from lightning_autopar.devices.spec import parse_spec  # noqa: E402
from lightning_autopar.memory.batch_scaling import scaled  # noqa: E402
from lightning_autopar.memory.footprint import Footprint  # noqa: E402
from lightning_autopar.memory.trace.trace import trace  # noqa: E402
from lightning_autopar.planning.make_report import make_report  # noqa: E402
from lightning_autopar.report.report import NothingFits  # noqa: E402

RESULTS = HERE / "results" / "planner_scale.json"
DEVICES, BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024), (12, 24, 48, 96, 192)
#: At most so many seconds for so many devices, with 96 blocks.
GOALS = {8: 0.5, 1024: 2.0}
ROWS_A_DEVICE = 4
#: With so many blocks, the batch may also have so many samples a device.
OTHER_BLOCKS, OTHER_ROWS = 96, (0.5, 1, 16)


def traced(blocks: int) -> Footprint:
    """The model's step on a batch of eight."""
    with torch.device("meta"):
        model = GPT(width=2048, depth=blocks, words=32000, length=1024, heads=16)
    return trace(model, None, torch.zeros(8, 1024, dtype=torch.long), target="cuda", precision="bf16-mixed")


def devices_of(count: int, different: bool) -> Inventory:
    """H100s with 70 GiB free each, or with 30 to 78."""
    here = parse_spec(f"{max(1, count // 8)}x{min(8, count)}xH100-80GB")
    draw = random.Random(0)
    free = [int((draw.uniform(30, 78) if different else 70) * 2**30) for _ in here.devices]
    return replace(here, devices=tuple(replace(one, free_bytes=size) for one, size in zip(here.devices, free, strict=True)))


def plan_seconds(footprint: Footprint, here: Inventory, repeats: int) -> tuple[float, float, int, str]:
    """Seconds of the fastest of several searches and of the first, how many candidates it reports, and the best one."""
    taken = []
    for _ in range(repeats):
        began = time.process_time()
        try:
            report = make_report(footprint, here, Constraints(precision="bf16-mixed"))
        except NothingFits as nothing:
            report = nothing.report
        taken.append(time.process_time() - began)
    return min(taken), taken[0], len(report.candidates), report.best.title() if report.best else "nothing fits"


def growth(rows: list[dict[str, Any]], name: str, least: int) -> float:
    """The exponent with which seconds grow from ``least`` on: the slope of a line through logarithms, all else the same."""
    slopes = []
    others = {tuple(row[key] for key in ("devices", "blocks", "free") if key != name) for row in rows}
    for other in others:
        same = [
            row for row in rows if tuple(row[key] for key in ("devices", "blocks", "free") if key != name) == other and row[name] >= least
        ]
        if len(same) < 2:
            continue
        x, y = [math.log(row[name]) for row in same], [math.log(row["seconds"]) for row in same]
        middle_x, middle_y = sum(x) / len(x), sum(y) / len(y)
        slopes.append(sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True)) / sum((a - middle_x) ** 2 for a in x))
    return sum(slopes) / max(1, len(slopes))


def main() -> None:
    """Measure, print and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for blocks in (12, 96) if arguments.quick else BLOCKS:
        step = traced(blocks)
        for count in (8, 64, 1024) if arguments.quick else DEVICES:
            batches = (ROWS_A_DEVICE, *(OTHER_ROWS if blocks == OTHER_BLOCKS and count in (8, 64, 1024) else ()))
            for different, samples in product((False, True) if count > 1 else (False,), batches):
                footprint = scaled(step, int(samples * count))  # anew, as nothing of the one before is to be known
                repeats = arguments.repeats if samples == ROWS_A_DEVICE else 1
                seconds, first, candidates, best = plan_seconds(footprint, devices_of(count, different), repeats)
                free = "different" if different else "equal"
                row = {"devices": count, "blocks": blocks, "free": free, "samples_a_device": samples}
                row |= {"seconds": round(seconds, 4), "first_seconds": round(first, 4), "candidates": candidates, "best": best}
                rows.append(row)
                print(
                    f"{count:5} devices, {free:9} {blocks:4} blocks, {samples:4} samples a device: {seconds * 1e3:7.0f} ms, "
                    f"{first * 1e3:7.0f} ms the first time, {candidates:4} candidates; {best}",
                    flush=True,
                )
    usual = [row for row in rows if row["samples_a_device"] == ROWS_A_DEVICE]
    goals = [row | {"goal": GOALS[row["devices"]]} for row in usual if row["blocks"] == 96 and row["devices"] in GOALS]
    for row in goals:
        verdict = "within" if row["seconds"] <= row["goal"] else "over"
        print(f"{row['devices']} devices, {row['free']}: {row['seconds']:.2f} s, {verdict} the goal of {row['goal']} s")
    exponents = {"devices": round(growth(usual, "devices", 8), 2), "blocks": round(growth(usual, "blocks", 12), 2)}
    print(f"seconds grow with the power {exponents['devices']} of the devices from 8 on, {exponents['blocks']} of the blocks")
    if not arguments.quick:
        RESULTS.write_text(json.dumps(machine() | {"goals": goals, "growth": exponents, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
