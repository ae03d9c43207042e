"""What a training step takes on the CPU, predicted and measured, on some seventy architectures; and what others predict of the same.

Measured is plain Lightning's Trainer in steady state: what lives from step to step plus the running sum of the profiler's memory
events, each job in a process of its own; for a few the same is counted by a library under the process, too. Predicted is the plan for
one CPU device, from a trace under fake tensors. A prediction is flagged if the footprint has a margin that covers its error and says in
its assumptions why.

    python benchmarks/memory_cpu.py                    # everything: benchmarks/results/memory_cpu.json and .png, some ten minutes
    python benchmarks/memory_cpu.py --quick            # eight jobs
    python benchmarks/memory_cpu.py --jobs GPT-2,LSTM  # those whose names contain one of these
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

# One thread a process, two processes at a time; and no corrections from earlier runs.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["AUTOPAR_CACHE"] = "off"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
RESULTS = HERE / "results" / "memory_cpu.json"
TIMEOUT_SECONDS = 300
#: Jobs that are counted another way as well.
COUNTED = ("BERT", "ResNet-18", "LSTM", "Graph network")
MEDIAN_BOUND, ONE_PERCENT_SHARE, WORST_BOUND = 0.001, 0.9, 0.05


def run_job(name: str, with_rivals: bool, counter: Path | None) -> dict[str, Any]:
    """Everything about one job, each figure from a process of its own."""
    from memory import counted, measure, rivals
    from memory.zoo import JOBS

    from lightning_autopar._fork import ChildFailed, run_forked

    job = JOBS[name]
    real = run_forked(lambda: measure.real_run(job).bytes, timeout_seconds=TIMEOUT_SECONDS)
    said = run_forked(measure.predicted, job, timeout_seconds=TIMEOUT_SECONDS)
    found: dict[str, Any] = {"family": job.family, "precision": job.precision, "measured_bytes": real, "predicted": said}
    found["error"] = said["bytes"] / real - 1
    found["flagged"] = bool(said["assumptions"]) and _within(said["bytes"], real, said["margin"]) and said["margin"] > 0
    if counter is not None and name in COUNTED:
        found["counted_bytes"] = counted.counted_bytes(name, counter)
    found["rivals"] = {}
    if with_rivals:
        found["sizes"] = run_forked(rivals.sizes, job, timeout_seconds=TIMEOUT_SECONDS)
        for fake in (True, False):
            try:
                found["rivals"][rivals.TRACKER] = run_forked(partial(rivals.mem_tracker, job, fake=fake), timeout_seconds=TIMEOUT_SECONDS)
                break
            except ChildFailed as error:
                crash = found["rivals"].setdefault(rivals.TRACKER, {"crashed": {}})
                crash["crashed"]["fake" if fake else "real"] = error.reason[:300]
    return found


def _within(said: int, real: int, margin: float) -> bool:
    return real <= said * (1 + margin) and said <= real * (1 + margin)


def _quiet() -> None:
    logging.disable(logging.WARNING)
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)


def measure_all(names: list[str], with_rivals: bool, processes: int) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The jobs, some at a time, and why some of them failed; progress is shown."""
    from memory.counted import build_counter
    from rich.progress import Progress

    found: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        counter = build_counter(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        pool = stack.enter_context(ProcessPoolExecutor(processes, mp_context=context, initializer=_quiet))
        progress = stack.enter_context(Progress())
        bar = progress.add_task("measuring", total=len(names))
        futures = {pool.submit(run_job, name, with_rivals, counter): name for name in names}
        for future in as_completed(futures):
            name = futures[future]
            progress.update(bar, advance=1)
            try:
                found[name] = future.result()
            except Exception as error:  # one job less, and the gate doesn't hold
                failed[name] = f"{type(error).__name__}: {error}"
            said = failed.get(name) or f"{100 * found[name]['error']:+.3f} %"
            progress.console.print(f"{name}: {said}", highlight=False)
    return {name: found[name] for name in names if name in found}, failed


def add_estimates(jobs: dict[str, dict[str, Any]]) -> None:
    """What is only arithmetic."""
    from memory import rivals

    for job in jobs.values():
        for rival, size in rivals.estimates(job.pop("sizes"), job["precision"]).items():
            job["rivals"][rival] = {"bytes": size}
        for said in job["rivals"].values():
            if "bytes" in said:
                said["error"] = said["bytes"] / job["measured_bytes"] - 1


def summarise(errors: list[float], *, crashed: int = 0) -> dict[str, Any]:
    """Of one predictor over the jobs for which it said something; a crash is an error of no bound in the shares."""
    if not errors:
        return {"jobs": 0, "crashed": crashed}
    sizes = [abs(error) for error in errors]
    return {
        "jobs": len(sizes),
        "crashed": crashed,
        "median": statistics.median(sizes),
        "within_1_percent": sum(size <= 0.01 for size in sizes) / (len(sizes) + crashed),
        "within_5_percent": sum(size <= 0.05 for size in sizes) / (len(sizes) + crashed),
        "worst": max(sizes),
    }


def report_on(jobs: dict[str, dict[str, Any]], failed: dict[str, str]) -> dict[str, Any]:
    """The summary of everybody, and whether the gate holds."""
    from memory.rivals import RIVALS

    ours = summarise([job["error"] for job in jobs.values()])
    unflagged = {name: abs(job["error"]) for name, job in jobs.items() if not job["flagged"]}
    ours["worst_unflagged"] = max(unflagged.values(), default=0.0)
    ours["flagged"] = len(jobs) - len(unflagged)
    ours["seconds"] = statistics.median(job["predicted"]["seconds"] for job in jobs.values())
    within = ours["median"] <= MEDIAN_BOUND and ours["within_1_percent"] >= ONE_PERCENT_SHARE and ours["worst_unflagged"] <= WORST_BOUND
    summary: dict[str, Any] = {"lightning-autopar": ours, "within": within and not failed, "failed": failed}
    counts = [abs(job["counted_bytes"] / job["measured_bytes"] - 1) for job in jobs.values() if "counted_bytes" in job]
    if counts:
        summary["worst_between_measurements"] = max(counts)
    for rival in RIVALS:
        said = [job["rivals"][rival] for job in jobs.values() if rival in job["rivals"]]
        if said:
            summary[rival] = summarise([one["error"] for one in said if "error" in one], crashed=sum("crashed" in one for one in said))
    return summary


def show(report: dict[str, Any]) -> None:
    """Two tables: jobs, and predictors."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "job", "measured", "predicted", "error", "s", "MemTracker", "DeepSpeed 2", "accelerate", "16 bytes", title="Peak of a step, MiB"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for name, job in report["jobs"].items():
        others = [job["rivals"].get(rival, {}) for rival in ("MemTracker", "DeepSpeed ZeRO-2", "accelerate", "16 bytes a parameter")]
        cells = [f"{100 * other['error']:+.1f} %" if "error" in other else "crashed" if "crashed" in other else "" for other in others]
        flag = " flagged" if job["flagged"] else ""
        sizes = [f"{size / 2**20:.2f}" for size in (job["measured_bytes"], job["predicted"]["bytes"])]
        table.add_row(name, *sizes, f"{100 * job['error']:+.3f} %{flag}", f"{job['predicted']['seconds']:.1f}", *cells)
    totals = Table("predictor", "jobs", "crashed", "median", "within 1 %", "within 5 %", "worst", title="Errors")
    for column in totals.columns[1:]:
        column.justify = "right"
    for name, one in report["summary"].items():
        if isinstance(one, dict) and one.get("jobs"):
            shares = [f"{100 * one[key]:.0f} %" for key in ("within_1_percent", "within_5_percent")]
            totals.add_row(
                name, str(one["jobs"]), str(one["crashed"]), f"{100 * one['median']:.4f} %", *shares, f"{100 * one['worst']:.1f} %"
            )
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table, totals)
    ours = report["summary"]["lightning-autopar"]
    console.print(
        f"worst unflagged: {100 * ours['worst_unflagged']:.2f} %; the gate {'holds' if report['summary']['within'] else 'does NOT hold'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", help="parts of the jobs' names, separated by commas", default="")
    parser.add_argument("--quick", action="store_true", help="eight jobs")
    parser.add_argument("--no-rivals", action="store_true", help="ours only")
    parser.add_argument("--json", help="the file to write; the picture lies beside it", default=str(RESULTS))
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1), help="jobs at a time")
    parser.add_argument("--fail", action="store_true", help="exit with 1 if the gate doesn't hold")
    arguments = parser.parse_args()
    from machine import machine
    from memory.picture import draw
    from memory.zoo import JOBS

    parts = [part.strip().lower() for part in arguments.jobs.split(",") if part.strip()]
    names = [
        name
        for name, job in JOBS.items()
        if (job.quick or not arguments.quick) and (not parts or any(part in name.lower() for part in parts))
    ]
    if not names:
        parser.error(f"no job's name contains one of {arguments.jobs!r}; the jobs are {', '.join(JOBS)}")
    jobs, failed = measure_all(names, not arguments.no_rivals, arguments.processes)
    if not jobs:
        sys.exit(f"every job failed: {failed}")
    if not arguments.no_rivals:
        add_estimates(jobs)
    report = {**machine(), "threads": 1, "quick": arguments.quick, "summary": report_on(jobs, failed), "jobs": jobs}
    out = Path(arguments.json)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    draw(report, out.with_suffix(".png"))
    show(report)
    print(f"written to {out} and {out.with_suffix('.png')}")
    if arguments.fail and not report["summary"]["within"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
