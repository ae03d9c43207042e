"""Predicted against measured memory on one GPU: allocated, reserved, and whether what is said to fit does.

    python benchmarks/memory_gpu.py --json OUT [--seconds 540] [--device auto|cpu] [--models SUBSTRING]

At least 30 models × {32-true, bf16-mixed, bf16-true} × {no recomputation, all blocks} × {foreach, fused AdamW}; every task in a clean
allocator, several processes at once on the one device. Then fit decisions: each model runs under ``set_per_process_memory_fraction``
at 90 % fill. Stops taking up tasks after ``--seconds``; what was left out is counted.

Without a GPU the same runs on the CPU at small sizes, on which nothing is reserved and nothing can be capped.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

# Before torch is imported, here and in the pools: a process is one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["AUTOPAR_CACHE"] = "off"  # what earlier runs taught would be no prediction

import torch
from machine import machine
from memory import gpu_job, gpu_rank
from memory.gpu_job import Predicted, Task
from memory.zoo_gpu import gpu_models
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
OPTIMIZERS = ("foreach", "fused")
FILL = 0.9
#: What the issue asks for; shown beside what was found, never changed by it.
GOALS = {
    "allocated": {"median": 0.01, "p95": 0.04},
    "reserved": {"median": 0.03, "p95": 0.08},
    "said to fit, ran out": 0,
    "said not to fit, fits": 0.05,
}


def _blind() -> None:
    """Predictions must come from processes that see no GPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def tasks_of(small: bool, wanted: str, quick: bool) -> list[Task]:
    """One task for each trace: model × precision × optimizer; recomputation is predicted from the same trace."""
    names = [model.name for model in gpu_models(small=small) if wanted.lower() in model.name.lower()]
    precisions, optimizers = (PRECISIONS[:2], OPTIMIZERS[:1]) if quick else (PRECISIONS, OPTIMIZERS)
    return [
        Task(model=name, precision=precision, optimizer=optimizer, recompute=False, small=small)
        for precision in precisions
        for optimizer in optimizers
        for name in names
    ]


class Benchmark:
    """The pools, the deadline and the rows.

    Args:
        on_gpu: whether to measure on the GPU.
        seconds: after which no further task is taken up.
        quick: a fraction of the settings.
        wanted: only models with this in their name.
    """

    def __init__(self, *, on_gpu: bool, seconds: float, quick: bool, wanted: str) -> None:
        self.on_gpu = on_gpu
        self.spec = f"1x{device_spec()}" if on_gpu else "1xcpu:16GiB"
        self.deadline = time.monotonic() + seconds
        self.tasks = tasks_of(not on_gpu, wanted, quick)
        self.rows: list[dict[str, Any]] = []
        self.fits: list[dict[str, Any]] = []
        self.ranks: list[dict[str, Any]] = []
        self.failed: list[dict[str, Any]] = []
        self.left_out = 0
        self.context_bytes: int | None = None
        self.predictions: dict[Task, Predicted] = {}
        cores = len(os.sched_getaffinity(0))
        context = multiprocessing.get_context("spawn")
        self.predictors = ProcessPoolExecutor(max(1, cores - 4 if on_gpu else cores - 1), context, _blind)
        self.meters = ProcessPoolExecutor(4 if on_gpu else 1, context)

    def run(self, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Everything, then the summary.

        Args:
            keep: is given the result after each part, so that who ends this too early has what was found.
        """
        if self.on_gpu:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
                self.context_bytes = alone.submit(gpu_job.context_bytes).result()
        with self.predictors, self.meters, Progress(console=Console(stderr=True)) as progress:
            bar = progress.add_task("tasks", total=2 * len(self.tasks))
            self._measure_all(lambda: progress.advance(bar))
            keep(self.result())
            if self.on_gpu:
                self._decide_all()
                keep(self.result())
            self._measure_ranks()
        return self.result()

    def result(self) -> dict[str, Any]:
        """What was found so far."""
        return {
            "benchmark": "memory_gpu",
            **machine(),
            "device": torch.cuda.get_device_name(0) if self.on_gpu else "cpu",
            "spec": self.spec,
            "goals": GOALS,
            "context": {"measured": self.context_bytes, "predicted": next((row["predicted"]["context"] for row in self.rows), None)},
            "summary": self.summary(),
            "rows": self.rows,
            "ranks": self.ranks,
            "fits": self.fits,
            "failed": self.failed,
        }

    def _measure_all(self, done: Any) -> None:
        traced = {self.predictors.submit(gpu_job.predict_both, task, self.spec): task for task in self.tasks}
        measured: dict[Future[Any], tuple[Task, Predicted]] = {}
        for future in as_completed(traced):
            task = traced[future]
            if time.monotonic() > self.deadline:
                for other in traced:
                    other.cancel()
                self.left_out += 2
                continue
            try:
                both = future.result()
            except Exception as error:  # a model that can't be built here is counted, and the others go on
                self.failed.append({"model": task.model, "precision": task.precision, "error": f"{type(error).__name__}: {error}"})
                done(), done()
                continue
            for recompute, predicted in enumerate(both):
                one = Task(**{**task.__dict__, "recompute": bool(recompute)})
                if recompute and not predicted.fqns:
                    done()
                    continue  # nothing in it can be recomputed: the same task again
                self.predictions[one] = predicted
                measured[self.meters.submit(self._on_time, one, predicted.fqns, self.deadline - time.monotonic() + time.time())] = (
                    one,
                    predicted,
                )
        for future in as_completed(measured):
            task, predicted = measured[future]
            found = future.result()
            done()
            if found is None:
                self.left_out += 1
            elif "error" in found:
                self.failed.append({**task.__dict__, **found})
            else:
                self.rows.append(gpu_job.row(task, predicted, found))

    @staticmethod
    def _on_time(task: Task, fqns: tuple[str, ...], until: float) -> dict[str, Any] | None:
        return gpu_job.measure(task, fqns) if time.time() < until else None

    def _measure_ranks(self) -> None:
        """Ranks of larger worlds, each predicted from the whole model and measured by itself."""
        spec = self.spec.removeprefix("1x")
        tasks = gpu_rank.rank_tasks(not self.on_gpu)
        if time.monotonic() > self.deadline:
            self.left_out += len(tasks)
            return
        said = {self.predictors.submit(gpu_rank.predict_rank, task, spec): task for task in tasks}
        waiting: dict[Future[Any], Any] = {}
        for future in as_completed(said):
            try:
                predicted, plan, seconds = future.result()
            except Exception as error:  # a rank that can't be predicted is counted, and the others go on
                self.failed.append({**said[future].__dict__, "error": f"{type(error).__name__}: {error}"})
                continue
            until = self.deadline - time.monotonic() + time.time()
            waiting[self.meters.submit(self._rank_on_time, said[future], plan, until)] = (said[future], predicted, seconds)
        for future in as_completed(waiting):
            task, predicted, seconds = waiting[future]
            found = future.result()
            if found is None:
                self.left_out += 1
            elif "error" in found:
                self.failed.append({**task.__dict__, **found})
            else:
                self.ranks.append(gpu_rank.rank_row(task, predicted, seconds, found))

    @staticmethod
    def _rank_on_time(task: Any, plan: Any, until: float) -> dict[str, Any] | None:
        return gpu_rank.measure_rank(task, plan) if time.time() < until else None

    def _decide_all(self) -> None:
        """Fit decisions at 90 % fill, both ways, for every foreach row without recomputation."""
        waiting: dict[Future[Any], dict[str, Any]] = {}
        for row in self.rows:
            if row["optimizer"] != "foreach" or row["recompute"] or row["precision"] == "bf16-true":
                continue
            task = Task(**{name: row[name] for name in Task.__dataclass_fields__})
            predicted = self.predictions[task]
            outside = predicted.categories["context"]
            # Said to need 90 % of what there is: it must run within that.
            cap = int(predicted.needs_bytes / FILL) - outside
            waiting[self.meters.submit(self._capped, task, predicted.fqns, cap, self.deadline - time.monotonic() + time.time())] = {
                "model": task.model, "precision": task.precision, "way": "said to fit", "cap_bytes": cap,
            }  # fmt: skip
            # It takes 90 % of what there is: it must be said to fit.
            cap = int(row["measured"]["reserved"] / FILL) + outside
            waiting[self.predictors.submit(gpu_job.says_fits, predicted, self.spec, task.precision, cap)] = {
                "model": task.model, "precision": task.precision, "way": "fits", "cap_bytes": cap,
            }  # fmt: skip
        for future in as_completed(waiting):
            found = future.result()
            if found is None:
                self.left_out += 1
            elif isinstance(found, bool):
                self.fits.append({**waiting[future], "right": found})
            else:
                self.fits.append({**waiting[future], "right": not found.get("oom", False), **found})

    @staticmethod
    def _capped(task: Task, fqns: tuple[str, ...], cap: int, until: float) -> dict[str, Any] | None:
        return gpu_job.measure(task, fqns, cap) if time.time() < until else None

    def summary(self) -> dict[str, Any]:
        """Errors' median and 95th percentile, and wrong decisions."""
        found: dict[str, Any] = {"tasks": len(self.rows), "models": len({row["model"] for row in self.rows}), "left out": self.left_out}
        found["failed"] = len(self.failed)
        for name in ("allocated", "reserved", "process"):
            if errors := self._errors(self.rows, name):
                found[name] = errors
            if errors := self._errors(self.ranks, name):
                found[f"{name}, ranks of larger worlds"] = errors
        for way, name in (("said to fit", "said to fit, ran out"), ("fits", "said not to fit, fits")):
            decided = [one for one in self.fits if one["way"] == way]
            if decided:
                found[name] = {"wrong": sum(not one["right"] for one in decided), "of": len(decided)}
        return found

    @staticmethod
    def _errors(rows: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
        key = f"{name}_error"
        known = sorted((row for row in rows if key in row), key=lambda row: abs(row[key]))
        if not known:
            return None
        errors = [abs(row[key]) for row in known]
        worst = {what: value for what, value in known[-1].items() if isinstance(value, (str, int)) and what != "small"}
        p95 = errors[min(len(errors) - 1, int(0.95 * len(errors)))]
        return {"median": statistics.median(errors), "p95": p95, "worst": known[-1][key], "worst task": worst, "of": len(errors)}


def device_spec() -> str:
    """The catalogue's word for this GPU."""
    from lightning_autopar.devices.catalogue import find_by_device_name

    name = torch.cuda.get_device_name(0)
    found = find_by_device_name(name)
    if found is None:
        raise SystemExit(f"the catalogue doesn't know {name!r}; add it to lightning_autopar/devices/catalogue.py")
    return found.name


def show(result: dict[str, Any]) -> None:
    """The table."""
    table = Table(title=f"memory on {result['device']}")
    for title in ("model", "precision", "optimizer", "recompute", "measured MiB", "predicted", "error", "reserved", "error "):
        table.add_column(title, justify="left" if title in ("model", "precision", "optimizer") else "right")
    for row in sorted(result["rows"], key=lambda row: -abs(row.get("allocated_error", 0))):
        measured, predicted = row["measured"], row["predicted"]
        table.add_row(
            row["model"], row["precision"], row["optimizer"], str(row["recomputed"]),
            f"{measured['allocated'] / 2**20:.1f}", f"{predicted['allocated'] / 2**20:.1f}", f"{row['allocated_error']:+.2%}",
            f"{measured['reserved'] / 2**20:.0f}" if measured["reserved"] else "–",
            f"{row['reserved_error']:+.2%}" if "reserved_error" in row else "–",
        )  # fmt: skip
    console = Console()
    console.print(table)
    ranks = Table(title="ranks of larger worlds")
    for title in ("model", "engine", "precision", "setting", "rank", "measured MiB", "predicted", "error", "reserved error"):
        ranks.add_column(title)
    for row in result["ranks"]:
        ranks.add_row(
            *(str(row[name]) for name in ("model", "engine", "precision", "setting", "rank")),
            f"{row['measured']['allocated'] / 2**20:.1f}", f"{row['predicted']['allocated'] / 2**20:.1f}", f"{row['allocated_error']:+.2%}",
            f"{row['reserved_error']:+.2%}" if "reserved_error" in row else "–",
        )  # fmt: skip
    console.print(ranks)
    for failed in result["failed"]:
        console.print("failed:", failed)
    console.print(result["summary"])
    console.print("goals:", result["goals"], "context:", result["context"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--seconds", type=float, default=480, help="take up no task after so long")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--models", default="", help="only those with this in their name")
    parser.add_argument("--quick", action="store_true", help="two precisions, one optimizer")
    options = parser.parse_args()
    on_gpu = options.device == "auto" and torch.cuda.is_available()

    def keep(result: dict[str, Any]) -> None:
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(result, indent=1) + "\n")

    result = Benchmark(on_gpu=on_gpu, seconds=options.seconds, quick=options.quick, wanted=options.models).run(keep)
    keep(result)
    show(result)


if __name__ == "__main__":
    main()
