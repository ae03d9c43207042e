"""A model four times larger than a device's budget trains on one CPU device, by ZeRO-3 with offload and by FSDP2's offload.

Both are run by the Trainer as a user's would be, on a device whose budget is a quarter of what the parameters alone take. The run holds if
the device-side peak, as the run measures it, is within the budget and within 5 % of the prediction, and each loss is that of a run by plain
Lightning without a budget.

    python benchmarks/offload_cpu.py                 # writes benchmarks/results/offload_cpu.json, under a minute
    python benchmarks/offload_cpu.py --depth 16      # another model, a table only
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

# One thread a rank; and what is compared is the prediction, not what earlier runs taught it.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["AUTOPAR_CACHE"] = "off"
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import lightning.pytorch as pl  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from benchmarks.machine import machine  # noqa: E402
from benchmarks.memory.stage_rank import GPT  # noqa: E402
from lightning_autopar import AutoParallelStrategy, Plan  # noqa: E402

RESULTS = HERE / "results" / "offload_cpu.json"
#: How many times larger the parameters are than the budget.
TIMES = 4
GOAL = 0.05
#: Of each loss, relatively.
SAME = 1e-5
DEPTH, WIDTH, WORDS, LENGTH = 40, 128, 256, 16
ROWS, STEPS = 2, 6
BOTH = ("optimizer", "parameters")


class Losses(pl.Callback):
    """Writes each step's loss into a file, from whatever process trains."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{outputs['loss'].item()!r}\n")


def plans(depth: int) -> dict[str, Plan]:
    """The two ways, with all blocks recomputed."""
    blocks = tuple(f"blocks.{index}" for index in range(depth))
    return {
        "zero": Plan(engine="zero", devices=("cpu:0",), zero_stage=3, offload=BOTH, recompute=blocks),  # type: ignore[arg-type]
        "fsdp": Plan(
            engine="fsdp",
            devices=("cpu:0",),
            reshard_after_forward=True,
            shard=blocks,
            offload=BOTH,  # type: ignore[arg-type]
            recompute=blocks,
        ),
    }


def train(depth: int, strategy: Any) -> list[float]:
    """The losses of a run."""
    torch.manual_seed(0)
    module = GPT(width=WIDTH, depth=depth, words=WORDS, length=LENGTH)
    data = torch.randint(0, WORDS, (ROWS * STEPS, LENGTH), generator=torch.Generator().manual_seed(1))
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "losses"
        pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, callbacks=[Losses(path)], **quiet).fit(
            module, DataLoader(data, ROWS)
        )
        return [float(line) for line in path.read_text(encoding="utf-8").splitlines()]


def model_bytes(depth: int) -> int:
    """What the parameters take."""
    with torch.device("meta"):
        module = GPT(width=WIDTH, depth=depth, words=WORDS, length=LENGTH)
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def run(depth: int, plan: Plan, expected: list[float]) -> dict[str, Any]:
    """Train under a plan within the budget: what it took, and how its losses differ."""
    began = time.monotonic()
    size_bytes = model_bytes(depth)
    budget_bytes = size_bytes // TIMES
    strategy = AutoParallelStrategy(plan=plan, devices=f"1xcpu:{budget_bytes}B", memory_margin=0.0)
    losses = train(depth, strategy)
    assert strategy.report is not None
    assert strategy.report.best_candidate is not None
    predicted_bytes = strategy.report.best_candidate.bytes["cpu:0"].allocated
    measured = strategy.measured["cpu:0"]
    differences = [abs(loss / wanted - 1) for loss, wanted in zip(losses, expected, strict=True)]
    row = {
        "title": plan.title(),
        "model_bytes": size_bytes,
        "budget_bytes": budget_bytes,
        "predicted_bytes": predicted_bytes,
        "measured_bytes": measured["peak_bytes"],
        "error": predicted_bytes / measured["peak_bytes"] - 1,
        "host_bytes": measured["host_bytes"],
        "step_seconds": measured["step_seconds"],
        "largest_difference_of_loss": max(differences),
        "bytes": measured["bytes"],
    }
    row["holds"] = row["measured_bytes"] <= budget_bytes and abs(row["error"]) <= GOAL and row["largest_difference_of_loss"] <= SAME
    words = [
        f"{row['title']:60} budget {budget_bytes:,}",
        f"measured {row['measured_bytes']:,}",
        f"predicted {row['error']:+.2%}",
        f"losses differ by {row['largest_difference_of_loss']:.1e}",
        f"{'holds' if row['holds'] else 'FAILS'} ({time.monotonic() - began:.0f} s)",
    ]
    print("  ".join(words), flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=DEPTH, help="blocks of the model; nothing is written unless it is the default")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    for logger in ("lightning.pytorch", "lightning_autopar"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    expected = train(arguments.depth, "auto")
    rows = [run(arguments.depth, plan, expected) for plan in plans(arguments.depth).values()]
    if arguments.depth == DEPTH:
        RESULTS.parent.mkdir(exist_ok=True)
        written = {**machine(), "times": TIMES, "goal": GOAL, "losses": expected, "holds": all(row["holds"] for row in rows), "rows": rows}
        RESULTS.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return int(not all(row["holds"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
