"""Language models by hand, their footprints and pipelines of them, for tests of what stages hold and take."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.memory.stage_rank import GPT
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.trace import trace
from lightning_autopar.plans import Plan, Schedule

MODELS: dict[str, dict[str, Any]] = {
    "narrow": {"width": 64, "depth": 8, "words": 512, "length": 64},
    "tied": {"width": 96, "depth": 9, "words": 1500, "length": 48, "tied": True},
}
ROWS = 16


def footprint_of(values: dict[str, Any], rows: int = ROWS) -> Footprint:
    """The trace of the whole module's training step."""
    model = GPT(**values)
    return trace(model, None, torch.zeros(rows, model.length, dtype=torch.long))


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
    """A pipeline on CPU devices, cut evenly unless the cuts are given; ``recompute``: how many blocks."""
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
