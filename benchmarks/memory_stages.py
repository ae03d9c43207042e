"""Predicted against real memory of every rank of a pipeline, run by the Trainer on CPU devices as a user's would be.

Language models in stages under pinned plans: by a few hand-made blocks like GPT's, and by Hugging Face. Measured is what the run itself
reports (``strategy.measured``): what lives from step to step, plus the running sum of the profiler's memory events over a step in steady
state, in each rank. Predicted is what the report of the same run said.

    python benchmarks/memory_stages.py               # writes benchmarks/results/memory_stages.json, some ten minutes
    python benchmarks/memory_stages.py --quick       # a few cases, a table only
    python benchmarks/memory_stages.py --only tied   # those whose model or plan's title contains it, a table only
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

# One thread a rank; and what is compared is the prediction, not what earlier runs taught it.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["AUTOPAR_CACHE"] = "off"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import lightning.pytorch as pl  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from benchmarks.machine import machine  # noqa: E402
from benchmarks.memory.job import Batches, Learner, adamw, hugging_face, own_loss  # noqa: E402
from benchmarks.memory.stage_rank import GPT, make_plan  # noqa: E402
from lightning_autopar import AutoParallelStrategy, Plan  # noqa: E402
from lightning_autopar.memory.footprint import Footprint  # noqa: E402
from lightning_autopar.memory.trace.trace import trace  # noqa: E402

RESULTS = HERE / "results" / "memory_stages.json"
#: What a rank may differ from its prediction.
GOAL = 0.03
ROWS = 16
STEPS = 8


class Model:
    """A model and its blocks.

    Args:
        build: makes the module.
        blocks: FQNs of its blocks, in order.
        words: of its vocabulary.
        length: tokens of a sample.
        plain: whether a batch is a tensor of tokens, not a mapping with ``input_ids`` and ``labels``.
    """

    def __init__(self, build: Callable[[], pl.LightningModule], blocks: list[str], words: int, length: int, *, plain: bool = False) -> None:
        self.build, self.blocks, self.words, self.length, self.plain = build, blocks, words, length, plain

    def loader(self) -> DataLoader[Any]:
        """As many equal batches as there are steps."""
        tokens = torch.randint(0, self.words, (self.length,), generator=torch.Generator().manual_seed(0))
        sample = tokens if self.plain else {"input_ids": tokens, "labels": tokens.clone()}
        return DataLoader(Batches(sample, ROWS * STEPS), ROWS)


def _gpt(**values: Any) -> Model:
    blocks = [f"blocks.{index}" for index in range(values["depth"])]
    return Model(lambda: GPT(**values), blocks, values["words"], values["length"], plain=True)


def _hugging_face(model: str, config: str, blocks: list[str], **settings: Any) -> Model:
    def build() -> pl.LightningModule:
        torch.manual_seed(0)
        return Learner(hugging_face(model, config, **settings), own_loss, adamw)

    return Model(build, [f"net.{block}" for block in blocks], settings["vocab_size"], 32)


_LLAMA = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
_T5 = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 4, "num_decoder_layers": 4, "num_heads": 4, "decoder_start_token_id": 0}
#: What the models by hand are made with.
MODELS: dict[str, dict[str, Any]] = {
    "narrow": {"width": 64, "depth": 8, "words": 512, "length": 64},
    "wide": {"width": 192, "depth": 8, "words": 1000, "length": 32, "heads": 6},
    "tied": {"width": 96, "depth": 9, "words": 1500, "length": 48, "tied": True},
}
ALL: dict[str, Model] = {
    **{name: _gpt(**values) for name, values in MODELS.items()},
    "llama": _hugging_face("LlamaForCausalLM", "LlamaConfig", [f"model.layers.{index}" for index in range(8)], vocab_size=512, **_LLAMA),
    "t5": _hugging_face(
        "T5ForConditionalGeneration",
        "T5Config",
        [f"{half}.block.{index}" for half in ("encoder", "decoder") for index in range(4)],
        vocab_size=512,
        dropout_rate=0.0,
        **_T5,
    ),
}


def cases(*, quick: bool) -> Iterator[tuple[str, Plan]]:
    """Models and plans."""
    for name, model in ALL.items():
        depth = len(model.blocks)
        make = partial(make_plan, depth=depth, blocks=model.blocks)
        yield name, make("1f1b", 2, 4)
        yield name, make("gpipe", 2, 4)
        yield name, make("interleaved_1f1b", 2, 4, stages=4)
        if quick:
            continue
        yield name, make("1f1b", 2, 8, recompute=depth)
        yield name, make("gpipe", 2, 4, recompute=depth // 2)
        yield name, make("1f1b", 2, 4, cuts=(3,))
        yield name, make("1f1b", 4, 8)
        yield name, make("gpipe", 4, 4)
        yield name, make("interleaved_1f1b", 4, 8, stages=8)
        yield name, make("1f1b", 2, 4, replicas=2)
        yield name, make("interleaved_1f1b", 2, 4, stages=4, replicas=2)
        yield name, make("1f1b", 2, 4, replicas=2, shard=True)


def footprint_of(values: dict[str, Any], rows: int = ROWS) -> Footprint:
    """The trace of a whole module by hand."""
    model = GPT(**values)
    return trace(model, None, torch.zeros(rows, model.length, dtype=torch.long))


def run(model: Model, plan: Plan) -> list[tuple[int, int, dict[str, int], dict[str, int]]]:
    """Train for a few steps: of each rank measured and predicted bytes, and both by what holds them.

    Raises:
        RuntimeError: if a rank couldn't be measured.
    """
    strategy = AutoParallelStrategy(plan=plan, devices=f"{plan.world_size}xcpu:2GiB")
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    pl.Trainer(accelerator="cpu", strategy=strategy, max_epochs=1, **quiet).fit(model.build(), model.loader())
    assert strategy.report is not None
    assert strategy.report.best_candidate is not None
    found = []
    for device in plan.devices:
        measured, predicted = strategy.measured[device], strategy.report.best_candidate.bytes[device]
        if measured["peak_bytes"] is None:
            raise RuntimeError(f"{device} wasn't measured under {plan.title()!r}")
        found.append((measured["peak_bytes"], predicted.allocated, dict(measured["bytes"]), predicted.to_dict()))
    return found


def rows_of(name: str, plan: Plan) -> list[dict[str, Any]]:
    """A row for each rank."""
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    try:
        ranks = run(ALL[name], plan)
    except ValueError as refusal:  # before any process starts
        print(f"{name:8} {plan.title():52} {refusal}", flush=True)
        return [{"model": name, "title": plan.title(), "refused": str(refusal)}]
    for rank, (measured, predicted, by_holder, by_category) in enumerate(ranks):
        row = {
            "model": name,
            "plan": {field: value for field, value in plan.to_dict().items() if value},
            "title": plan.title(),
            "rank": rank,
            "measured_bytes": measured,
            "predicted_bytes": predicted,
            "error": predicted / measured - 1,
            "measured": by_holder,
            "predicted": by_category,
        }
        rows.append(row)
    errors = " ".join(f"{row['error']:+8.3%}" for row in rows)
    print(f"{name:8} {plan.title():52} {errors} ({time.monotonic() - began:.1f} s)", flush=True)
    return rows


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all ranks, and by schedule."""

    def one(errors: list[float]) -> dict[str, Any]:
        within = sum(error <= GOAL for error in errors) / len(errors)
        return {"ranks": len(errors), "median_error": statistics.median(errors), "largest_error": max(errors), "within_goal": within}

    refused = sum("refused" in row for row in rows)
    rows = [row for row in rows if "refused" not in row]
    schedules = sorted({row["plan"]["schedule"] for row in rows})
    by_schedule = {kind: one([abs(row["error"]) for row in rows if row["plan"]["schedule"] == kind]) for kind in schedules}
    return {"goal": GOAL, "refused": refused, **one([abs(row["error"]) for row in rows]), "by_schedule": by_schedule}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few cases, and nothing written")
    parser.add_argument("--only", help="those whose model or plan's title contains this; nothing written")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    for logger in ("lightning.pytorch", "lightning_autopar"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    rows: list[dict[str, Any]] = []
    for name, plan in cases(quick=arguments.quick):
        if not arguments.only or arguments.only in f"{name} {plan.title()}":
            rows += rows_of(name, plan)
    summary = summarise(rows)
    print(json.dumps(summary, indent=2))
    if not arguments.quick and not arguments.only:
        RESULTS.parent.mkdir(exist_ok=True)
        head = json.dumps({**machine(), "summary": summary}, indent=2).removesuffix("\n}")
        lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
        RESULTS.write_text(f'{head},\n  "rows": [\n{lines}\n  ]\n}}\n', encoding="utf-8")
    return int(summary["largest_error"] > GOAL)


if __name__ == "__main__":
    sys.exit(main())
