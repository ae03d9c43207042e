"""Predicted and measured seconds of a training step under ZeRO and offload, beside single, DDP and FSDP, on CPU devices of one thread.

Rates are measured first, into a folder of this run's own; what an earlier run took corrects no prediction here. Each plan is pinned and run
for some steps, ``--repeats`` times in turns with the others. ``ratio`` is predicted over measured, ``measured`` the least of the runs'
median steps, as others' work on the machine makes a run longer, never shorter. ``busy`` is rank 0's processor time of a step, which others'
work changes less: of one rank, which never waits, it is the step's time on a quiet machine.

    python benchmarks/zero_speed.py                     # writes benchmarks/results/zero_speed.json
    python benchmarks/zero_speed.py --only small:zero-3 # those alone, printed
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import lightning.pytorch as pl
import torch
from decisions.runs import remembering
from step_time import forget_runs
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar import AutoParallelStrategy, Plan
from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.plans import OFFLOADS
from lightning_autopar.strategies.calibration.calibration import calibrate

RESULTS = Path(__file__).resolve().parent / "results" / "zero_speed.json"
#: Blocks, width, sequence length and batch size.
MODELS = {"small": (4, 64, 64, 16), "medium": (8, 256, 128, 8)}
#: From here on a prediction should be within the bound; below, nothing but the order of the plans counts.
LONG_SECONDS, BOUND = 0.05, 0.20
DEVICES = "2xcpu:6GiB"
#: The first steps say nothing: no optimizer state, memory recorded.
WARM_UP = 5
_TIMEOUT_SECONDS = 120.0
_PLAIN = ("single", "ddp", "fsdp")
_QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = self.mix(self.before(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.between(x))))


class GPT(pl.LightningModule):
    """Writes down how long rank 0's steps took."""

    def __init__(self, name: str, out: Path | None = None) -> None:
        super().__init__()
        layers, width, length, _ = MODELS[name]
        self.out = out
        self.begun: list[tuple[float, float]] = []
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (tokens,) = batch
        x = self.embed(tokens[:, :-1]) + self.place(torch.arange(tokens.shape[1] - 1))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.begun.append((time.perf_counter(), time.process_time()))

    def on_train_end(self) -> None:
        if self.out is not None and self.global_rank == 0:
            steps = list(itertools.pairwise(self.begun))[WARM_UP:]
            self.out.write_text(json.dumps([[after[clock] - before[clock] for before, after in steps] for clock in (0, 1)]))


def plans(model: str) -> dict[str, Plan]:
    """By name."""
    one, two = ("cpu:0",), ("cpu:0", "cpu:1")
    shards: dict[str, Any] = {
        "engine": "fsdp",
        "reshard_after_forward": True,
        "shard": tuple(f"blocks.{index}" for index in range(MODELS[model][0])),
    }
    found = {
        "single": Plan(engine="single", devices=one),
        "ddp": Plan(engine="ddp", devices=two),
        "fsdp": Plan(devices=two, **shards),
        "fsdp offload x1": Plan(devices=one, offload=OFFLOADS, **shards),
        "fsdp offload x2": Plan(devices=two, offload=OFFLOADS, **shards),
    }
    for stage in (1, 2, 3):
        found[f"zero-{stage}"] = Plan(engine="zero", devices=two, zero_stage=stage)
    for ranks, devices in ((1, one), (2, two)):
        found[f"zero-2 offload x{ranks}"] = Plan(engine="zero", devices=devices, zero_stage=2, offload=("optimizer",))
        found[f"zero-3 offload x{ranks}"] = Plan(engine="zero", devices=devices, zero_stage=3, offload=OFFLOADS)
    return found


_known: dict[Any, Any] = {}


def run(model: str, plan: Plan, steps: int, cache: Path) -> dict[str, Any]:
    """One plan for some steps, in a forked child, so that nothing is left behind for the next."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(writer, model, plan, steps, cache))
    child.start()
    writer.close()
    try:
        if not reader.poll(_TIMEOUT_SECONDS):
            raise RuntimeError(f"{model} under {plan.title()}: no answer within {_TIMEOUT_SECONDS:g} s")
        answer = reader.recv()
    finally:
        child.join(20.0)
        if child.exitcode is None:
            child.kill()
            child.join()
        reader.close()
    if isinstance(answer, str):
        raise RuntimeError(f"{model} under {plan.title()}:\n{answer}")
    found, _known[model] = answer
    return dict(found)


def _answer(writer: Any, model: str, plan: Plan, steps: int, cache: Path) -> None:
    try:
        writer.send(_train(model, plan, steps, cache))
    except BaseException:  # whatever it is, it is this run's answer
        writer.send(traceback.format_exc())
    writer.close()


def _train(model: str, plan: Plan, steps: int, cache: Path) -> tuple[dict[str, Any], dict[Any, Any]]:
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_autopar"):
        logging.getLogger(name).setLevel(logging.ERROR)
    forget_runs(cache)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    known = dict(_known.get(model, {}))
    _, _, length, batch = MODELS[model]
    samples = TensorDataset(torch.randint(256, (batch * (steps + WARM_UP + 1), length + 1)))
    strategy = AutoParallelStrategy(plan=plan, devices=DEVICES, calibrate="auto")
    with tempfile.TemporaryDirectory() as folder, remembering(known):
        out = Path(folder) / "steps.json"
        trainer = pl.Trainer(accelerator="cpu", strategy=strategy, max_epochs=1, default_root_dir=folder, **_QUIET)
        trainer.fit(GPT(model, out), DataLoader(samples, batch_size=batch))
        wall, busy = json.loads(out.read_text())
    assert strategy.report is not None
    best = strategy.report.best_candidate
    assert best is not None
    assert best.seconds is not None
    row = {
        "model": model,
        "plan": plan.title(),
        "predicted": best.seconds.to_dict(),
        "measured": statistics.median(wall),
        "busy": statistics.median(busy),
    }
    return row, known


def wrong_orders(rows: list[dict[str, Any]]) -> list[str]:
    """ZeRO or offload predicted faster than single, DDP or FSDP though it is slower: what would be chosen wrongly."""
    plain = [row for row in rows if row["name"] in _PLAIN]
    others = [row for row in rows if row["name"] not in _PLAIN]
    return [
        f"{row['model']}: {row['name']} before {other['name']}"
        for row, other in itertools.product(others, plain)
        if row["model"] == other["model"] and row["predicted"]["step"] < other["predicted"]["step"] and row["measured"] > other["measured"]
    ]


def inventory() -> Inventory:
    """The devices that the plans run on."""
    return parse_spec(DEVICES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="MODEL:PLAN's beginning, or either alone")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--cache", type=Path, help="measured rates to use instead of measuring them first")
    arguments = parser.parse_args()
    from machine import machine

    from lightning_autopar.strategies.zero.deepspeed_compat import import_deepspeed

    begun = time.monotonic()
    import_deepspeed("cpu")  # once, for all children
    model, _, name = arguments.only.rpartition(":") if ":" in arguments.only else ("", "", arguments.only)
    wanted = [
        (size, title, plan)
        for size in MODELS
        for title, plan in plans(size).items()
        if (not model or size == model) and (not name or title.startswith(name) or size == name)
    ]
    taken: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        cache = arguments.cache or Path(folder)
        os.environ["AUTOPAR_CACHE"] = str(cache)
        os.environ["OMP_NUM_THREADS"] = "1"
        calibrate(inventory(), progress=False)
        for _ in range(arguments.repeats):
            for size, title, plan in wanted:
                taken.setdefault((size, title), []).append(run(size, plan, arguments.steps, cache))
    rows = []
    for (_, title), found in taken.items():
        best = min(found, key=lambda row: row["measured"])
        busy = min(row["busy"] for row in found)
        row = {"name": title, **best, "busy": busy, "ratio": best["predicted"]["step"] / best["measured"]}
        rows.append(row)
        parts = ", ".join(f"{part} {seconds * 1e3:.1f}" for part, seconds in row["predicted"].items() if seconds)
        times = f"{row['measured'] * 1e3:8.2f} ms measured, ratio {row['ratio']:.2f}, busy {busy * 1e3:.2f} ms"
        print(f"{row['model']:7} {title:16} {times} ({parts})", flush=True)
    long = [row for row in rows if row["measured"] >= LONG_SECONDS]
    errors = sorted(abs(row["ratio"] - 1) for row in long)
    summary = {
        "long_steps": len(long),
        "median_error": statistics.median(errors) if errors else None,
        "worst_error": errors[-1] if errors else None,
        "within_bound": sum(error <= BOUND for error in errors),
        "wrong_orders": wrong_orders(rows),
        "took_seconds": round(time.monotonic() - begun),
    }
    print(summary)
    if not arguments.only:
        RESULTS.write_text(json.dumps({**machine(), "bound": BOUND, "summary": summary, "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
