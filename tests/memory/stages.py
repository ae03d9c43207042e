"""Language models by hand and their footprints, for tests of what stages hold and take."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.memory.stage_rank import GPT
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.trace.trace import trace

MODELS: dict[str, dict[str, Any]] = {
    "narrow": {"width": 64, "depth": 8, "words": 512, "length": 64},
    "tied": {"width": 96, "depth": 9, "words": 1500, "length": 48, "tied": True},
}
ROWS = 16


def footprint_of(values: dict[str, Any], rows: int = ROWS) -> Footprint:
    """The trace of the whole module's training step."""
    model = GPT(**values)
    return trace(model, None, torch.zeros(rows, model.length, dtype=torch.long))
