"""A shared box: six runs of different sizes and priorities on three CPU devices, with a stranger, and what becomes of them.

Plays the scenario of ``tests/scenario`` some times, in other orders and with a killed and a stopped run in all but the first, and compares
each run's weights with those of plain Lightning on one device.

    python benchmarks/scenario.py                # writes benchmarks/results/scenario.json and docs/pictures/scenario.png
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCENARIO = ROOT / "tests" / "scenario"
sys.path[:0] = [str(SCENARIO), str(ROOT / "benchmarks"), str(ROOT)]
RESULTS, PICTURE = ROOT / "benchmarks" / "results" / "scenario.json", ROOT / "docs" / "pictures" / "scenario.png"
SEEDS = range(7)

import torch  # noqa: E402
from machine import machine  # noqa: E402
from rich.progress import track  # noqa: E402

from tests.scenario.scenario_box import killed, play  # noqa: E402
from tests.scenario.scenario_picture import draw  # noqa: E402
from tests.scenario.scenario_runs import SPECS, train  # noqa: E402


def summary(box: dict[str, Any], folder: Path, plain: Path) -> dict[str, Any]:
    """The figures of one time."""
    gone = killed(box)
    apart, fullest = 0.0, 0.0
    for spec in SPECS:
        if spec.name not in gone:
            shared, alone = torch.load(folder / f"{spec.name}-shared.pt"), torch.load(plain / f"{spec.name}-plain.pt")
            apart = max(apart, *(float((shared[name] - weight).abs().max()) for name, weight in alone.items()))
    for sample in box["samples"]:
        for device in ("cpu:0", "cpu:1", "cpu:2"):
            held = sum(sizes.get(device, 0) for sizes in sample["leases"].values()) + sample["taken"].get(device, 0)
            fullest = max(fullest, held / box["device_bytes"])
    states = {name: {sample["runs"][name][0] for sample in box["samples"] if name in sample["runs"]} for name in box["ended"]}
    return {
        "seed": box["seed"],
        "seconds": max(ended["at"] for ended in box["ended"].values()),
        "finished": sorted(name for name, ended in box["ended"].items() if ended["code"] == 0),
        "killed": sorted(gone),
        "waited": sorted(name for name, seen in states.items() if "queued" in seen),
        "parked": sorted(name for name, seen in states.items() if "parked" in seen),
        "fullest_device": fullest,
        "largest_weight_difference": apart,
        "room_after_seconds": _room_after(box),
        "left_behind": box["left"],
    }


def _room_after(box: dict[str, Any]) -> list[float]:
    """From when a run asked others to make room until it had a lease."""
    found = []
    for name in box["ended"]:
        asked = [sample["at"] for sample in box["samples"] if any(place[0] == name and place[2] for place in sample["places"])]
        had = [sample["at"] for sample in box["samples"] if asked and name in sample["leases"] and sample["at"] > asked[0]]
        if had:
            found.append(round(had[0] - asked[0], 2))
    return found


def main() -> None:
    """Play, and write what came of it."""
    began, found = time.monotonic(), []
    with tempfile.TemporaryDirectory() as name:
        plain = Path(name)
        for spec in SPECS:
            train(spec, plain, plainly=True)
        for seed in track(SEEDS, description="the box"):
            folder = plain / str(seed)
            folder.mkdir()
            box = play(folder, seed)
            found.append(summary(box, folder, plain))
            if not seed:
                draw(box, PICTURE)
    result = {"benchmark": "scenario", **machine(), "seconds": time.monotonic() - began, "rounds": found}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
