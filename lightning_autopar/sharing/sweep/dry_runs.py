"""How each run of a sweep could run: its script runs up to ``fit`` in a process of its own, as ``lightning-autopar plan --json`` does.

It places nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_autopar.sharing.sweep.child_processes import Child, Children, Signals, wait
from lightning_autopar.sharing.sweep.runs_file import ListedRun, SweepFolder

_FITS, _NOTHING_FITS = 0, 1


@dataclass(frozen=True, kw_only=True)
class DryRunResult:
    """What was found about a run.

    Args:
        report: as ``lightning-autopar plan --json`` prints it; None where there is none.
        seconds: what it took: about what a run takes until its first step.
        problem: why the run can't be run; None where it can.
    """

    report: Mapping[str, Any] | None = None
    seconds: float = 0.0
    problem: str | None = None


class Stopped(Exception):
    """A signal came."""


def look_at(
    runs: Sequence[ListedRun],
    devices: str,
    folder: SweepFolder,
    children: Children,
    signals: Signals,
    *,
    at_once: int,
    show: Callable[[str], None],
) -> dict[str, DryRunResult]:
    """Find out about each run, by its name. The first one has the machine alone: it may measure how fast devices are.

    Args:
        devices: as ``--devices`` takes them.
        children: which the processes are to be among.
        show: is told how far it is.

    Raises:
        Stopped: if a signal came.
    """
    found: dict[str, DryRunResult] = {}
    waiting, on = [*runs], list[_Look]()
    count, first = len(waiting), True
    while waiting or on:
        show(f"looking at runs: {count - len(waiting) - len(on)} of {count} ({', '.join(look.run.name for look in on[:3]) or '…'})")
        while waiting and len(on) < (1 if first else at_once):
            try:
                on.append(_Look(waiting[0], devices, folder, children))
            except OSError as error:
                found[waiting[0].name] = DryRunResult(problem=f"it can't be started: {error}")
            waiting.pop(0)
            if first:
                break
        wait([look.child for look in on], signals, 5.0)
        if signals.number is not None:
            children.end([look.child for look in on], grace_seconds=1.0, signals=signals)
            raise Stopped
        for look in on[:]:
            code = children.ended(look.child)
            if code is not None:
                first = False
                on.remove(look)
                found[look.run.name] = look.result(code)
    return found


class _Look:
    """One script on its way to ``fit``."""

    def __init__(self, run: ListedRun, devices: str, folder: SweepFolder, children: Children) -> None:
        self.run = run
        self._out, self._err = folder.plan(run).with_suffix(".out"), folder.plan(run).with_suffix(".err")
        words = [sys.executable, "-m", "lightning_autopar", "plan", "--json", f"--devices={devices}", *run.words]
        with open(self._out, "wb") as out, open(self._err, "wb") as err:
            self.child: Child = children.start(words, cwd=run.cwd, env={**os.environ, **run.env}, out=out.fileno(), err=err.fileno())

    def result(self, code: int) -> DryRunResult:
        """What came of it."""
        seconds = time.monotonic() - self.child.started_at
        told = self._err.read_text(encoding="utf-8", errors="replace")
        if code not in (_FITS, _NOTHING_FITS):
            return DryRunResult(problem=f"it can't be planned for: {last_words(told) or code}; {self._err} has it all")
        try:
            report = json.loads(self._out.read_text(encoding="utf-8"))
            problem = _problem(report, code)
        except (ValueError, KeyError, TypeError):  # its own exit code is 1, but this isn't our report
            return DryRunResult(problem=f"it can't be planned for: {last_words(told) or code}; {self._err} has it all")
        if problem is not None:
            return DryRunResult(report=report, seconds=seconds, problem=problem)
        for path in (self._out, self._err):
            Path(path).unlink(missing_ok=True)
        return DryRunResult(report=report, seconds=seconds)


def _problem(report: Mapping[str, Any], code: int) -> str | None:
    if code == _NOTHING_FITS:
        advice = next((f"; {each['text']}" for each in report["advice"]), "")
        return f"no plan fits on the devices{advice}"
    if not report["candidates"]:
        return "no plan was found"
    return None


def last_words(told: str) -> str:
    """The last line that a process wrote."""
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    return " ".join(lines[-1:])[-400:]
