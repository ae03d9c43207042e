"""Sweeps of plain Python scripts, which start at once, on devices and with reports that are made up."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_autopar.sharing.sweep.child_processes import Children, noted_signals
from lightning_autopar.sharing.sweep.controller import Controller, prospects
from lightning_autopar.sharing.sweep.dry_runs import DryRunResult
from lightning_autopar.sharing.sweep.runs_file import ListedSweep, sweep_folder


def report(*seconds: float | None, devices: int = 2) -> dict[str, Any]:
    """Of a run that takes so long on one device, two, …."""
    there = [
        {"id": f"cpu:{index}", "kind": "cpu", "name": "CPU", "node": 0, "slowdown": 1.0, "threads": 1, "error": None, "free_bytes": 1000}
        for index in range(devices)
    ]
    candidates = [
        {
            "plan": {"engine": "single" if count == 1 else "ddp", "devices": [device["id"] for device in there[:count]]},
            "fits": True,
            "seconds": {"step": 0.1 / count},
            "needs_bytes": {device["id"]: 10 for device in there[:count]},
            "run_seconds": each,
        }
        for count, each in enumerate(seconds, 1)
    ]
    return {"inventory": {"devices": there, "links": []}, "budgets": {}, "candidates": candidates}


def swept(
    sweep: ListedSweep, reports: Mapping[str, Mapping[str, Any]] | Sequence[float], parent: Path, *, told: list[str] | None = None
) -> Controller:
    """Run a sweep to its end.

    Args:
        sweep: of scripts that don't import Lightning.
        reports: by the run's name, or seconds of each run on one device.
        parent: of its folder.
        told: what is told is appended to it.
    """
    if not isinstance(reports, Mapping):
        reports = {run.name: report(each) for run, each in zip(sweep.runs, reports, strict=True)}
    looked = {name: DryRunResult(report=each, seconds=0.1) for name, each in reports.items()}
    with sweep_folder(sweep, parent) as folder, noted_signals() as signals, Children(orphan_seconds=0.5) as children:
        runs, devices = prospects(sweep, looked, folder)
        tell = print if told is None else told.append
        controller = Controller(sweep, runs, devices, folder, children, signals, tell=tell)
        controller.run()
    return controller


if __name__ == "__main__":  # a sweep that somebody kills
    from lightning_autopar.sharing.sweep.runs_file import sweep_of

    commands = sys.argv[1:]
    swept(sweep_of(commands, name="plain"), [100.0] * len(commands), Path.cwd())
