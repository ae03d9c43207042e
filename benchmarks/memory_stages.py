"""Predicted against real memory of every stage of a pipeline, on torch.distributed.pipelining over gloo on CPU devices.

A language model like GPT in stages, by hand (``memory/stage_rank.py``). Measured is what parameters, optimizer state and the stages'
buffers take, plus the running sum of the profiler's memory events over a step in steady state, in each rank. Predicted is what the package
says from the trace of the whole module's training step.

    python benchmarks/memory_stages.py               # writes benchmarks/results/memory_stages.json
    python benchmarks/memory_stages.py --quick       # a few cases, a table only
    python benchmarks/memory_stages.py --resume      # what was measured before is taken from that file, and predicted anew
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import torch  # noqa: E402

from benchmarks.machine import machine  # noqa: E402
from benchmarks.memory.stage_rank import GPT, rank_of_pipeline  # noqa: E402
from lightning_autopar.memory.footprint import Footprint  # noqa: E402
from lightning_autopar.memory.pipeline_bytes import pipeline_bytes  # noqa: E402
from lightning_autopar.memory.trace import trace  # noqa: E402
from lightning_autopar.plans import Plan, Schedule  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

RESULTS = HERE / "results" / "memory_stages.json"
#: What a stage may differ from its prediction.
GOAL = 0.03
MODELS: dict[str, dict[str, Any]] = {
    "narrow": {"width": 64, "depth": 8, "words": 512, "length": 64},
    "wide": {"width": 192, "depth": 8, "words": 1000, "length": 32, "heads": 6},
    "tied": {"width": 96, "depth": 9, "words": 1500, "length": 48, "tied": True},
}
ROWS = 16


def make_plan(
    schedule: Schedule,
    ranks: int,
    micro_batches: int,
    depth: int,
    *,
    cuts: tuple[int, ...] = (),
    stages: int = 0,
    recompute: int = 0,
    replicas: int = 1,
) -> Plan:
    """A pipeline on CPU devices, cut evenly unless the cuts are given.

    Args:
        ranks: of a replica.
        recompute: how many blocks.
    """
    stages = stages or ranks
    cuts = cuts or tuple(depth * stage // stages for stage in range(1, stages))
    return Plan(
        engine="pipeline",
        devices=tuple(f"cpu:{index}" for index in range(ranks * replicas)),
        replicas=replicas,
        schedule=schedule,
        micro_batches=micro_batches,
        cuts=tuple(f"blocks.{cut}" for cut in cuts),
        recompute=tuple(f"blocks.{index}" for index in range(recompute)),
    )


def cases(*, quick: bool) -> Iterator[tuple[str, Plan]]:
    """Models and plans."""
    for name, values in MODELS.items():
        depth = values["depth"]
        for ranks in (2, 4):
            for micro_batches in (4, 8):
                if quick and (name != "narrow" or micro_batches != 4 or ranks != 2):
                    continue
                yield name, make_plan("gpipe", ranks, micro_batches, depth)
                yield name, make_plan("1f1b", ranks, micro_batches, depth)
                yield name, make_plan("1f1b", ranks, micro_batches, depth, recompute=depth)
                yield name, make_plan("interleaved_1f1b", ranks, micro_batches, depth, stages=2 * ranks)
                if not quick:
                    yield name, make_plan("gpipe", ranks, micro_batches, depth, recompute=depth // 2)
                    yield name, make_plan("1f1b", ranks, micro_batches, depth, cuts=(3,) if ranks == 2 else (1, 4, 6))
                    yield name, make_plan("zero_bubble", ranks, micro_batches, depth)
                if not quick and ranks == 2:
                    yield name, make_plan("gpipe", ranks, micro_batches, depth, replicas=2)
                    yield name, make_plan("1f1b", ranks, micro_batches, depth, replicas=2)


def footprint_of(values: dict[str, Any], rows: int = ROWS) -> Footprint:
    """The trace of the whole module's step."""
    model = GPT(**values)
    return trace(model, None, torch.zeros(rows, model.length, dtype=torch.long))


def measure(name: str, plan: Plan) -> list[int]:
    """Bytes of each rank."""
    found = run_ranks(rank_of_pipeline, plan.world_size, MODELS[name], plan, ROWS, timeout_seconds=120)
    return [rank["allocated"] for rank in found]


def measured_earlier() -> dict[str, list[int]]:
    """What the result file has, by model and plan."""
    found: dict[str, list[int]] = {}
    for row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if RESULTS.exists() else []:
        found.setdefault(row["model"] + Plan.from_dict(row["plan"]).to_json(), []).append(row["measured_bytes"])
    return found


def compare(name: str, plan: Plan, measured: list[int], footprint: Footprint) -> list[dict[str, Any]]:
    """A row for each rank."""
    rows = []
    for rank, real in enumerate(measured):
        predicted = pipeline_bytes(footprint, plan, rank, on_cpu=True)
        error = predicted.allocated / real - 1
        row = {
            "model": name,
            "plan": {name: value for name, value in plan.to_dict().items() if value},
            "title": plan.title(),
            "rank": rank,
            "measured_bytes": real,
        }
        rows.append({**row, "predicted_bytes": predicted.allocated, "error": error})
        print(f"{name:8} {plan.title():44} rank {rank} {real:>11,} {predicted.allocated:>11,} {error:+8.3%}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few cases, and nothing written")
    parser.add_argument("--resume", action="store_true", help="measure only what the result file lacks")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    footprints = {name: footprint_of(values) for name, values in MODELS.items()}
    known = measured_earlier() if arguments.resume else {}
    rows = []
    for name, plan in cases(quick=arguments.quick):
        rows += compare(name, plan, known.get(name + plan.to_json()) or measure(name, plan), footprints[name])
    split = [abs(row["error"]) for row in rows if row["plan"]["schedule"] == "zero_bubble"]
    errors = [abs(row["error"]) for row in rows if row["plan"]["schedule"] != "zero_bubble"]
    summary = {"stages": len(errors), "median_error": statistics.median(errors), "largest_error": max(errors), "goal": GOAL}
    if split:
        summary |= {
            "zero_bubble_stages": len(split),
            "zero_bubble_median_error": statistics.median(split),
            "zero_bubble_largest_error": max(split),
        }
    print(json.dumps(summary, indent=2))
    if not arguments.quick:
        RESULTS.parent.mkdir(exist_ok=True)
        head = json.dumps({**machine(), "summary": summary}, indent=2).removesuffix("\n}")
        lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
        RESULTS.write_text(f'{head},\n  "rows": [\n{lines}\n  ]\n}}\n', encoding="utf-8")
    return int(max(errors) > GOAL)


if __name__ == "__main__":
    sys.exit(main())
