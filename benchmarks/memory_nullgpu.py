"""Predicted memory against torch's own caching allocator, on a stub GPU (``tests/nullgpu``): no GPU is needed, and nothing is timed.

    NULLGPU_DEVICES=1 NULLGPU_COMPUTE=1 NULLGPU_COMPUTE_BYTES=4194304 NULLGPU_COPY_MIB=4 \\
        python benchmarks/memory_nullgpu.py --json OUT [--seconds 540] [--only SUBSTRING] [--sets zoo,unseen,judging,ranks,budgets]

    NULLGPU_DEVICES=4 NULLGPU_COMPUTE=1 NULLGPU_COMPUTE_BYTES=65536 … --sets stages --json benchmarks/results/memory_nullgpu_stages.json
    NULLGPU_DEVICES=4 NULLGPU_COMPUTE=1 NULLGPU_COMPUTE_BYTES=65536 … --sets zero --json benchmarks/results/memory_nullgpu_zero.json

Each job is predicted in a process of its own that has no device, and trained for sixteen steps (``--steps``) in another with plain
Lightning. The result file is written after each job; a job that is in it isn't run again. Networks that
take workspaces of cuDNN's or run its recurrent layers are left out by name: the stub has neither.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

# Before torch is imported: a process is one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["AUTOPAR_CACHE"] = "off"  # what earlier runs taught would be no prediction

import transformers  # noqa: F401  # once, before the forks
from machine import machine
from memory import gpu_job, gpu_rank, gpu_stages, gpu_zero
from memory.gpu_job import Task
from memory.zoo_gpu import gpu_models
from memory.zoo_unseen import judging_models, unseen_models

SPEC = "H100-80GB"
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed")
OPTIMIZERS = ("foreach", "fused", "sgd", "adafactor", "loop")
SETS = ("zoo", "unseen", "judging", "ranks", "budgets")
#: Their operations take workspaces of cuDNN's or are cuDNN's own, of which the stub has none.
NOT_ON_THE_STUB = ("residual CNN", "U-Net", "3-D CNN", "1-D CNN", "ResNet", "ConvNeXt", "LSTM", "GRU", "Wav2Vec2", "Whisper")
#: The goals; shown beside what was measured, never changed by it.
GOALS = {
    "allocated": {"median": 0.005, "worst": 0.03},
    "reserved": {"median": 0.01, "too low": 0.05},
    "said to fit, ran out": 0,
    "refused, would have fitted": 0.05,
}
_SEED = 21
#: What the strategy leaves free beside a prediction, unless it is told otherwise.
MARGIN = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--steps", type=int, default=gpu_job.STEPS, help="of each job on one device")
    parser.add_argument("--again", action="store_true", help="run jobs that are in the file once more")
    arguments = parser.parse_args()
    deadline, gpu_job.STEPS = time.monotonic() + arguments.seconds, arguments.steps
    known: dict[str, dict[str, Any]] = {}
    if arguments.json.exists():
        known = {row["job"]: row for row in json.loads(arguments.json.read_text())["rows"]}
    for name, run in jobs(arguments.sets.split(",")):
        if arguments.only.lower() not in name.lower() or (name in known and not arguments.again):
            continue
        if time.monotonic() > deadline:
            break
        known[name] = {"job": name, **run()}
        print(f"{name:60s} {shown(known[name])}", flush=True)
        _write(arguments.json, list(known.values()))
    print(json.dumps(summary(list(known.values())), indent=2))


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    found = {
        "benchmark": "memory_nullgpu",
        **_apart(machine),
        "device": "a stub GPU",
        "spec": SPEC,
        "goals": GOALS,
        "summary": summary(rows),
    }
    text = json.dumps({**found, "left out": list(NOT_ON_THE_STUB), "rows": rows}, indent=1)
    beside = path.with_suffix(".new")
    beside.write_text(text + "\n")
    beside.replace(path)


# -- the jobs --------------------------------------------------------------------------------------------------------------------------


def jobs(sets: list[str]) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Name and work of each job, those first whose figures say most."""
    for part in sets:
        if part in _MODELS:
            yield from _singles(part)
        elif part == "ranks":
            yield from _ranks()
        elif part == "stages":
            for task in gpu_stages.stages_tasks():
                yield f"stages: {task.words}", lambda task=task: _several(task, gpu_stages.predict_stages)  # type: ignore[misc]
        elif part == "zero":
            for task in gpu_zero.zero_tasks():
                yield f"zero: {task.words}", lambda task=task: _several(task, gpu_zero.predict_zero)  # type: ignore[misc]
        else:
            yield from _budgets()


_MODELS = {"zoo": lambda: gpu_models(small=False), "unseen": unseen_models, "judging": judging_models}


def _names(part: str) -> list[str]:
    return [model.name for model in _MODELS[part]() if not any(word in model.name for word in NOT_ON_THE_STUB)]


def _singles(part: str) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    for optimizer in OPTIMIZERS if part == "zoo" else OPTIMIZERS[:1]:
        for precision in PRECISIONS:
            for recompute in (False, True):
                for name in _names(part):
                    task = Task(model=name, precision=precision, optimizer=optimizer, recompute=recompute, small=False)
                    words = f"{part}: {name}, {precision}, {optimizer}" + (", recomputed" if recompute else "")
                    yield words, lambda task=task: _single(task)  # type: ignore[misc]


def _single(task: Task) -> dict[str, Any]:
    predicted = _apart(lambda: gpu_job.predict_both(task, f"1x{SPEC}")[int(task.recompute)])
    if isinstance(predicted, str):
        return {**asdict(task), "error": predicted}
    if task.recompute and not predicted.fqns:
        return {**asdict(task), "same": "nothing in it can be recomputed"}
    measured = _apart(lambda: gpu_job.measure(task, predicted.fqns))
    if isinstance(measured, str) or "error" in measured:
        return {**asdict(task), "error": measured if isinstance(measured, str) else measured["error"]}
    found = gpu_job.row(task, predicted, measured)
    without = _without_replay(predicted.categories) / measured["reserved"] - 1
    return {**found, "steps": gpu_job.STEPS, "without_replay_error": without}


def _without_replay(said: dict[str, int]) -> float:
    """What would be said to be reserved without a replay: allocated, and a share of it for rounding."""
    from lightning_autopar.planning.plan_bytes import ROUNDING_BYTES

    return said["allocated"] * 1.1 + ROUNDING_BYTES  # ``Engine.lost_share``


def _ranks() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    for ranks in (2, 4):
        for task in gpu_rank.rank_tasks(False):
            if task.engine == "pipeline" and task.rank >= ranks:
                continue
            words = f"ranks: {task.model}, {task.engine} of {ranks}, {task.precision}, {task.setting}, rank {task.rank}"
            yield words, lambda task=task, ranks=ranks: _rank(task, ranks)  # type: ignore[misc]


def _rank(task: gpu_rank.RankTask, ranks: int) -> dict[str, Any]:
    gpu_rank.FSDP_RANKS = gpu_rank.STAGES = ranks
    said = _apart(lambda: gpu_rank.predict_rank(task, SPEC))
    if isinstance(said, str):
        return {**asdict(task), "error": said}
    predicted, plan, seconds = said
    measured = _apart(lambda: gpu_rank.measure_rank(task, plan))
    if isinstance(measured, str) or "error" in measured:
        return {**asdict(task), "error": measured if isinstance(measured, str) else measured["error"]}
    found = gpu_rank.rank_row(task, predicted, seconds, measured)
    return {**found, "without_replay_error": _without_replay(predicted) / measured["reserved"] - 1}


def _several(task: Any, predict: Callable[[Any, str], list[dict[str, int]]]) -> dict[str, Any]:
    """All ranks of a run on several GPUs."""
    predicted = _apart(lambda: predict(task, SPEC))
    measured = predicted if isinstance(predicted, str) else _apart(lambda: gpu_stages.measure_ranks(task))
    return {**asdict(task), "error": measured} if isinstance(measured, str) else gpu_stages.ranks_row(task, predicted, measured)


def _budgets() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """A budget of random size around what a job is predicted to need, for each of a sample of jobs."""
    draw = random.Random(_SEED)
    for part in _MODELS:
        for name in _names(part):
            for precision in ("32-true", "bf16-mixed"):
                share, recompute = draw.uniform(0.85, 1.1), draw.random() < 0.3
                task = Task(model=name, precision=precision, optimizer="foreach", recompute=recompute, small=False)
                words = f"budgets: {name}, {precision}" + (", recomputed" if recompute else "")
                yield words, lambda task=task, share=share: _budget(task, share)  # type: ignore[misc]


def _budget(task: Task, share: float) -> dict[str, Any]:
    """Whether the planner says that the plan fits the budget, and whether it does: the whole budget, what the margin leaves of it, and the
    least for which the planner would say so.
    """

    def ask() -> tuple[gpu_job.Predicted, int, bool]:
        predicted = gpu_job.predict_both(task, f"1x{SPEC}")[int(task.recompute)]
        budget = int(predicted.needs_bytes * share / (1 - MARGIN))
        return predicted, budget, gpu_job.says_fits(predicted, f"1x{SPEC}", task.precision, int(budget * (1 - MARGIN)))

    asked = _apart(ask)
    if isinstance(asked, str):
        return {**asdict(task), "error": asked}
    predicted, budget, fits = asked
    found = {**asdict(task), "needs": predicted.needs_bytes, "budget": budget, "said to fit": fits}
    least = int(predicted.needs_bytes / (1 - MARGIN))
    for words, cap in (("ran", budget), ("ran within the margin", int(budget * (1 - MARGIN))), ("ran within what it needs", least)):
        measured = _apart(lambda cap=cap: gpu_job.measure(task, predicted.fqns, cap - predicted.categories["context"]))  # type: ignore[misc]
        if isinstance(measured, str) or ("error" in measured and not measured["oom"]):
            return {**found, "error": measured if isinstance(measured, str) else measured["error"]}
        found[words] = "error" not in measured
    return found


def _apart(work: Callable[[], Any]) -> Any:
    """What it returns in a process of its own, which this one's imports have come to; or what it says as it fails."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1), os.dup2(quiet, 2)
        try:
            found = work()
        except Exception as error:  # one model that can't be run here must not end the others
            found = f"{type(error).__name__}: {error}"[:600]
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(found, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    return pickle.loads(answer) if answer else f"the process ended with status {status}"


# -- what came of them -----------------------------------------------------------------------------------------------------------------


def shown(row: dict[str, Any]) -> str:
    """A row in a line."""
    if "error" in row:
        return str(row["error"])[:160]
    if "allocated_error" in row:
        errors = [f"{kind} {row[f'{kind}_error']:+7.2%}" for kind in ("allocated", "reserved", "without_replay")]
        return "  ".join(errors)
    if isinstance(row.get("ranks"), list):
        return " | ".join(map(shown, row["ranks"]))
    if "budget" in row:
        return ", ".join(f"{words}: {row[words]}" for words in row if words == "said to fit" or words.startswith("ran"))
    return str(row.get("same", ""))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians and worst errors by set, and the budgets that were judged wrong."""
    found: dict[str, Any] = {}
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        part = row["job"].partition(":")[0]
        if measured := [one for one in ([] if "error" in row else row.get("ranks", [row])) if "allocated_error" in one]:
            groups.setdefault(part if part != "ranks" else f"{part}, {row['engine']}", []).extend(measured)
    for name, group in groups.items():
        found[name] = {"rows": len(group)} | {
            kind: {
                "median": statistics.median(abs(row[f"{kind}_error"]) for row in group),
                "too low": min(row[f"{kind}_error"] for row in group),
                "too high": max(row[f"{kind}_error"] for row in group),
            }
            for kind in ("allocated", "reserved", "without_replay")
        }
    budgets = [row for row in rows if row["job"].startswith("budgets") and "error" not in row]
    if budgets:
        refused = [row for row in budgets if not row["said to fit"]]
        found["budgets"] = {
            "rows": len(budgets),
            "said to fit, ran out": sum(row["said to fit"] and not row["ran"] for row in budgets)
            + sum(not row["ran within what it needs"] for row in budgets),
            "refused": len(refused),
            "refused, would have fitted": sum(row["ran within the margin"] for row in refused),
            "refused, would have fitted without a margin": sum(row["ran"] for row in refused),
        }
    found["failed"] = [row["job"] for row in rows if "error" in row]
    return found


if __name__ == "__main__":
    main()
