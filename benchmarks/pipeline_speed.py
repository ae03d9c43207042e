"""How fast the pipeline engine is: against a loop by hand on the same model, and against what a schedule allows at best.

A GPT of twelve blocks in two stages on two CPU devices of one core each, under 1F1B. Four figures for each number of micro-batches M:

- engine: seconds a step through ``Trainer.fit`` with a pinned plan, from one batch's end to the next one's, on rank 0;
- hand: the same of a loop on ``torch.distributed.pipelining``, with stages written for this model, the same batches and optimizer;
- alone: for each stage, seconds of the forwards and backwards of all micro-batches, with nothing else running: one process computes on
  tensors of its own where it would receive. There are no messages, no waiting, no optimizer;
- paired: the same of both stages at once, which is what the machine takes of each core's speed when both are busy. For information.

At best a step takes ``slowest stage alone x (M + S - 1) / M``. Beside engine and hand stand the CPU seconds that rank 0 spends on a step,
which other people's work on the machine disturbs less; for information, too. All measurements run in turns, so that a slow minute of the
machine hits all of them; compared are the quietest repeats, and for information the medians. Each process computes with one thread.

    python benchmarks/pipeline_speed.py               # writes benchmarks/results/pipeline_speed.json, some four minutes
    python benchmarks/pipeline_speed.py --quick       # a smoke test: figures without meaning, nothing written
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

# One thread a process, and nothing learnt from earlier runs.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["AUTOPAR_CACHE"] = "off"

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import lightning.pytorch as pl  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.pipelining import PipelineStage  # noqa: E402
from torch.distributed.pipelining.schedules import Schedule1F1B  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from benchmarks.machine import machine  # noqa: E402
from benchmarks.memory.stage_rank import GPT, StageModule  # noqa: E402
from lightning_autopar import AutoParallelStrategy, Plan  # noqa: E402
from lightning_autopar._fork import run_forked  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

RESULTS = HERE / "results" / "pipeline_speed.json"
#: What the engine's step may take, of the best that the schedule allows, and of the loop by hand.
BEST_BOUND, HAND_BOUND = 1.08, 1.05
STAGES = 2
MODEL: dict[str, Any] = {"width": 192, "depth": 12, "words": 256, "length": 128, "heads": 6}
QUICK: dict[str, Any] = {"width": 32, "depth": 4, "words": 64, "length": 16, "heads": 2}


class Times(pl.Callback):
    """When each batch ended, and the CPU seconds of this process by then."""

    def __init__(self) -> None:
        self.ended: list[float] = []
        self.cpu: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ended.append(time.perf_counter())
        self.cpu.append(time.process_time())


class Settings:
    """What is run.

    Args:
        quick: a small model, and few steps.
    """

    def __init__(self, *, quick: bool) -> None:
        self.model = QUICK if quick else MODEL
        self.rows = 16
        self.repeats = 2 if quick else 3
        self.timed = 2 if quick else 6
        #: The engine measures its memory in two steps of the first ones, which are slower.
        self.warm_up = 5
        self.cut = self.model["depth"] // STAGES

    def loader(self) -> DataLoader[Any]:
        """As many batches as a run has steps."""
        rows = self.rows * (self.timed + self.warm_up)
        tokens = torch.randint(0, self.model["words"], (rows, self.model["length"]), generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(tokens), batch_size=self.rows)

    def build(self) -> GPT:
        """The module, the same each time."""
        torch.manual_seed(0)
        return _Unpacked(**self.model)

    def stage(self, model: GPT, index: int) -> StageModule:
        """One of the two, as somebody would write it for this model."""
        first, last = (0, self.cut) if index == 0 else (self.cut, self.model["depth"])
        return StageModule(model, first, last, frozenset())

    def seconds(self, times: Times) -> tuple[float, float]:
        """The medians of a run's steps: seconds, and CPU seconds."""
        return _median(times.ended[self.warm_up - 1 :]), _median(times.cpu[self.warm_up - 1 :])


def _median(readings: list[float]) -> float:
    return statistics.median(after - before for before, after in itertools.pairwise(readings))


class _Unpacked(GPT):
    """Takes its tokens from a TensorDataset's batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(batch[0], batch_idx)
        self.log("loss", loss)
        return loss


def by_engine(settings: Settings, micro_batches: int) -> tuple[float, float]:
    """Seconds and CPU seconds a step through ``Trainer.fit``."""
    cut = f"blocks.{settings.cut}"
    plan = Plan(engine="pipeline", devices=("cpu:0", "cpu:1"), schedule="1f1b", micro_batches=micro_batches, cuts=(cut,))
    times = Times()
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=AutoParallelStrategy(plan=plan, devices=f"{STAGES}xcpu:4GiB"),
        max_epochs=1,
        callbacks=[times],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(settings.build(), settings.loader())
    return settings.seconds(times)


def by_hand(settings: Settings, micro_batches: int) -> tuple[float, float]:
    """Seconds and CPU seconds a step of the loop."""
    return run_ranks(_hand, STAGES, settings, micro_batches, timeout_seconds=300)[0]


def _hand(rank: int, world_size: int, settings: Settings, micro_batches: int) -> tuple[float, float]:
    module = settings.stage(settings.build(), rank)
    stage = PipelineStage(module, rank, world_size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=lambda loss, _: loss / micro_batches, scale_grads=False)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3)
    times = Times()
    for (tokens,) in settings.loader():
        last: dict[str, Any] = {"target": torch.zeros(len(tokens)), "losses": []} if stage.is_last else {}
        schedule.step(tokens=tokens, return_outputs=False, **last)
        optimizer.step()
        optimizer.zero_grad()
        times.on_train_batch_end()
    return settings.seconds(times)


def alone(settings: Settings, micro_batches: int, stage: int) -> float:
    """Seconds that one stage computes for a step, by itself."""
    return run_forked(lambda: _compute(settings, micro_batches, stage), timeout_seconds=300)


def paired(settings: Settings, micro_batches: int) -> list[float]:
    """The same of both stages at the same time."""
    return run_ranks(_compute_together, STAGES, settings, micro_batches, timeout_seconds=300)


def _compute_together(rank: int, world_size: int, settings: Settings, micro_batches: int) -> float:
    return _compute(settings, micro_batches, rank, begin=dist.barrier)


def _compute(settings: Settings, micro_batches: int, stage: int, begin: Callable[[], Any] = lambda: None) -> float:
    """A forward and a backward of each micro-batch in turn, as a stage does amid a step of 1F1B."""
    torch.set_num_threads(1)
    module = settings.stage(settings.build(), stage)
    rows = settings.rows // micro_batches
    between = torch.randn(rows, settings.model["length"], settings.model["width"])
    tokens = torch.zeros(rows, settings.model["length"], dtype=torch.long)
    seconds = []
    for _ in range(settings.timed + 1):
        begin()
        started = time.perf_counter()
        for _ in range(micro_batches):
            if stage == 0:
                module(tokens=tokens).backward(between)
            else:
                (module(between.clone().requires_grad_(), tokens=tokens) / micro_batches).backward()
        seconds.append(time.perf_counter() - started)
        module.zero_grad()
    return statistics.median(seconds[1:])


def measure(settings: Settings, micro_batches: int, *, engine: bool) -> dict[str, Any]:
    """One repeat of everything."""
    found: dict[str, Any] = {f"alone_{stage}": alone(settings, micro_batches, stage) for stage in range(STAGES)}
    found["hand"], found["hand_cpu"] = by_hand(settings, micro_batches)
    if engine:
        found["engine"], found["engine_cpu"] = by_engine(settings, micro_batches)
    found["paired"] = max(paired(settings, micro_batches))
    return found


def judge(repeats: list[dict[str, Any]], micro_batches: int) -> dict[str, Any]:
    """All figures of one number of micro-batches, by their quietest repeats and by their medians."""
    verdict: dict[str, Any] = {}
    for name, pick in (("quietest", min), ("median", statistics.median)):
        seconds = {key: pick([repeat[key] for repeat in repeats]) for key in repeats[0]}
        slowest = max(value for key, value in seconds.items() if key.startswith("alone"))
        best = slowest * (micro_batches + STAGES - 1) / micro_batches
        verdict[name] = {key: round(value, 5) for key, value in seconds.items()} | {"best": round(best, 5)}
        verdict[name]["paired_over_alone"] = round(seconds["paired"] / slowest, 4)
        verdict[name]["hand_over_best"] = round(seconds["hand"] / best, 4)
        if "engine" in seconds:
            verdict[name]["engine_over_best"] = round(seconds["engine"] / best, 4)
            verdict[name]["engine_over_hand"] = round(seconds["engine"] / seconds["hand"], 4)
            verdict[name]["engine_over_hand_cpu"] = round(seconds["engine_cpu"] / seconds["hand_cpu"], 4)
    quietest = verdict["quietest"]
    if "engine_over_best" in quietest:
        verdict["within"] = quietest["engine_over_best"] <= BEST_BOUND and quietest["engine_over_hand"] <= HAND_BOUND
    return verdict


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke test")
    parser.add_argument("--no-engine", action="store_true", help="only what the engine is compared with; nothing is written")
    parser.add_argument("--out", help="the JSON file to write", default=str(RESULTS))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    for logger in ("lightning.pytorch", "lightning_autopar"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    settings = Settings(quick=arguments.quick)
    repeats: dict[int, list[dict[str, Any]]] = {4: [], 8: []}
    for number in range(settings.repeats):
        for micro_batches, found in repeats.items():
            found.append(measure(settings, micro_batches, engine=not arguments.no_engine))
            print(f"repeat {number}, M = {micro_batches}:", {key: round(value, 4) for key, value in found[-1].items()}, flush=True)
    report: dict[str, Any] = {**machine(), "model": settings.model, "rows": settings.rows, "stages": STAGES, "schedule": "1f1b"}
    report["bounds"] = {"engine_over_best": BEST_BOUND, "engine_over_hand": HAND_BOUND}
    report["micro_batches"] = {str(micro_batches): judge(found, micro_batches) for micro_batches, found in repeats.items()}
    report["repeats"] = {str(micro_batches): found for micro_batches, found in repeats.items()}
    print(json.dumps(report["micro_batches"], indent=2))
    if arguments.quick or arguments.no_engine:
        return 0
    out = Path(arguments.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"written to {out}")
    return int(not all(verdict["within"] for verdict in report["micro_batches"].values()))


if __name__ == "__main__":
    sys.exit(main())
