"""The plans that ran on a GPU (``plans_gpu.py``), replayed by the code as it is now, beside the bytes that the GPU's allocator held then.

    python benchmarks/plans_gpu_again.py    # reads results/plans_gpu.json, writes results/plans_gpu_again.json; needs no GPU

Seconds aren't compared: they go by rates that were measured on that machine. T5's run isn't comparable, as the engine has changed since:
its units no longer copy what they hand on.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from machine import machine
from memory.gpu_job import adamw, model_of

from lightning_autopar import Plan
from lightning_autopar.devices.discover import probe
from lightning_autopar.memory.cuda_overhead import workspaces
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.trace.trace import trace
from lightning_autopar.planning.block_units import recomputable_order, shardable
from lightning_autopar.planning.plan_bytes import replay
from lightning_autopar.plans import OFFLOADS

RESULTS = Path(__file__).resolve().parent / "results"
DEVICES = "1xH200-141GB"


def plan_of(title: str, footprint: Footprint, device: str) -> Plan:
    """The plan of such a title."""

    def number(what: str, otherwise: int) -> int:
        found = re.search(rf"{what} (\d+)", title)
        return int(found[1]) if found else otherwise

    again = frozenset(recomputable_order(footprint)[: number("recompute", 0)])
    recompute = tuple(block.fqn for block in footprint.blocks if block.fqn in again)
    parts = number("micro-batches", 1)
    if title.startswith("single"):
        return Plan(engine="single", devices=(device,), recompute=recompute, micro_batches=parts)
    return Plan(
        engine="fsdp",
        devices=(device,),
        reshard_after_forward="reshard" in title,
        shard=shardable(footprint)[0],
        offload=OFFLOADS,
        recompute=recompute,
        micro_batches=parts,
    )


def main() -> None:
    warnings.simplefilter("ignore")
    measured = json.loads((RESULTS / "plans_gpu.json").read_text(encoding="utf-8"))
    inventory = probe(DEVICES)
    device = inventory.devices[0]
    footprints: dict[tuple[str, str], Footprint] = {}
    rows: list[dict[str, Any]] = []
    for row in measured["rows"]:
        if "step_seconds" not in row["measured"]:
            continue
        name, precision = re.fullmatch(r"(.+), (32-true|bf16-mixed|bf16-true)(?:, .+)?", row["scenario"]).groups()  # type: ignore[union-attr]  # as plans_gpu.py names them
        if (name, precision) not in footprints:
            torch.manual_seed(0)
            model = model_of(name, small=False)
            footprints[name, precision] = trace(
                model.build(adamw("foreach", on_gpu=True)), None, model.batch(), precision=precision, target="sm90"
            )
        footprint = footprints[name, precision]
        played = replay(footprint, plan_of(row["title"], footprint, device.id), 0, workspaces=workspaces(footprint, device.name))
        ratios = {
            "allocated_ratio": played.allocated_peak_bytes / row["measured"]["allocated"],
            "reserved_ratio": played.reserved_peak_bytes / row["measured"]["reserved"],
        }
        rows.append({"scenario": row["scenario"], "title": row["title"], **ratios})
        print(f"{row['scenario']}: {row['title']}: allocated {ratios['allocated_ratio']:.4f}, reserved {ratios['reserved_ratio']:.4f}")
    result = {**machine(), "measured": "plans_gpu.json", "rows": rows}
    (RESULTS / "plans_gpu_again.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
