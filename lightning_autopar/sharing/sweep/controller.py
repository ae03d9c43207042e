"""Runs a sweep: starts each run on the devices that the schedule gives it, and schedules the rest anew whenever one ends.

It knows processes, their files and what they show of themselves; not how that is shown to people, nor what a plan is.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_autopar.devices.allowed import ALLOWED_VARIABLE, write_allowed
from lightning_autopar.sharing.runs.requests import runs as runs_of_user
from lightning_autopar.sharing.runs.status import RunStatus
from lightning_autopar.sharing.sweep.child_processes import Child, Children, Signals, wait
from lightning_autopar.sharing.sweep.dry_runs import DryRunResult, last_words
from lightning_autopar.sharing.sweep.runs_file import ListedRun, ListedSweep, SweepFolder
from lightning_autopar.sharing.sweep.scheduler import (
    Job,
    Placed,
    RunOption,
    Schedule,
    SweepDevice,
    devices_of,
    options_of,
    scaled,
    schedule,
)

RunWord = Literal["waiting", "running", "done", "done before", "failed", "stopped"]

#: Seconds between two looks at runs' statuses, if nothing ends meanwhile.
_LOOK_SECONDS = 1.0
#: How often the rest is scheduled anew while devices are idle though something waits, as runs may be slower or faster than predicted.
_AGAIN_SECONDS = 10.0
#: A run that takes longer than predicted is expected to take this share of its time so far, in addition.
_OVERDUE_SHARE = 0.1
_LEAST_SECONDS = 0.5
#: The limits of a prediction's correction by other runs' times.
_PACES = (0.1, 10.0)
#: The length that is assumed where no run of the sweep has a known one.
_UNKNOWN_SECONDS = 3600.0


@dataclass(kw_only=True)
class SweepRun:
    """One run, from the list to its end.

    Args:
        ways: how it may run, by prediction.
        known: whether its length is predicted, rather than taken to be that of the longest.
        plan: what runs or ran, in words.
        devices: that it has or had.
        predicted_seconds: when it was started, corrected by what other runs took.
        seconds: measured; of the last attempt.
        began: in the sweep's seconds, the last attempt.
        exit_code: of the last attempt, None before its end.
    """

    listed: ListedRun
    options: tuple[RunOption, ...] = ()
    word: RunWord = "waiting"
    known: bool = True
    reason: str = ""
    plan: str = ""
    devices: tuple[str, ...] = ()
    predicted_seconds: float | None = None
    seconds: float | None = None
    began: float | None = None
    attempts: int = 0
    exit_code: int | None = None
    status: RunStatus | None = None
    child: Child | None = field(default=None, repr=False)
    option: RunOption | None = field(default=None, repr=False)
    first_step: tuple[float, int] | None = field(default=None, repr=False)
    log_from: int = field(default=0, repr=False)

    @property
    def name(self) -> str:
        """Its own in the sweep."""
        return self.listed.name

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "name": self.name,
            "command": self.listed.command,
            "state": self.word,
            "plan": self.plan,
            "devices": list(self.devices),
            "predicted_seconds": self.predicted_seconds if self.known else None,
            "seconds": self.seconds,
            "began_seconds": self.began,
            "attempts": self.attempts,
            "exit_code": self.exit_code,
            "reason": self.reason,
        }


def prospects(sweep: ListedSweep, looked: Mapping[str, DryRunResult], folder: SweepFolder) -> tuple[list[SweepRun], list[SweepDevice]]:
    """The sweep's runs with the ways that were found for them, and the devices.

    Args:
        looked: what was found of each run that isn't done.
    """
    reports = {name: each.report for name, each in looked.items() if each.report is not None}
    devices: dict[str, SweepDevice] = {}
    for device in (device for report in reports.values() for device in devices_of(report)):
        # Free memory changed between two looks: a run may count on what was free at its own look.
        if device.id not in devices or device.free_bytes > devices[device.id].free_bytes:
            devices[device.id] = device
    seconds = {name: _shortest(report) for name, report in reports.items()}
    longest = max((found for found in seconds.values() if found is not None), default=_UNKNOWN_SECONDS)
    runs = []
    for listed in sweep.runs:
        run = SweepRun(listed=listed)
        runs.append(run)
        before = folder.is_done(listed)
        if before is not None:
            run.word, run.exit_code, run.plan = "done before", 0, str(before.get("plan", ""))
            run.devices, run.seconds = tuple(before.get("devices", ())), before.get("seconds")
            run.predicted_seconds = before.get("predicted_seconds")
            continue
        found = looked[listed.name]
        report = reports.get(listed.name)
        if report is None or found.problem is not None:
            run.word, run.reason = "failed", found.problem or "it can't be planned for"
            continue
        # Of simultaneous looks at one script, one is slower than the other only by chance.
        start_seconds = statistics.median(looked[other.name].seconds for other in sweep.runs if _is_like(other, listed, looked))
        run.known = seconds[listed.name] is not None
        run.options = options_of(report, start_seconds=start_seconds, unknown_seconds=longest)
        if not run.options:
            run.word, run.reason = "failed", "no plan fits on the devices"
    return runs, list(devices.values())


def _is_like(one: ListedRun, other: ListedRun, looked: Mapping[str, DryRunResult]) -> bool:
    """Whether a look at one shows how long the other takes to start."""
    return one.name in looked and looked[one.name].report is not None and script_of(one) == script_of(other)


def script_of(run: ListedRun) -> str:
    """The word of a run's command that names its script or module."""
    return next((word for word in run.words if word.endswith(".py")), run.words[0])


def _shortest(report: Mapping[str, Any]) -> float | None:
    """How long the run takes at its fastest; None where nobody knows."""
    known = [each["run_seconds"] for each in report["candidates"] if each["fits"] and each.get("run_seconds") is not None]
    return min(known, default=None)


def first_schedule(runs: Sequence[SweepRun], devices: Sequence[SweepDevice]) -> Schedule:
    """Where everything that waits would run, by prediction."""
    jobs = [Job(name=run.name, options=run.options, priority=run.listed.priority) for run in runs if run.word == "waiting"]
    return schedule(jobs, devices)


class Controller:
    """One sweep at work.

    Args:
        runs: of :func:`prospects`.
        children: which the runs are to be among.
        show: is told of each change, and every second.
        tell: is told in a sentence what has happened.
    """

    def __init__(
        self,
        sweep: ListedSweep,
        runs: Sequence[SweepRun],
        devices: Sequence[SweepDevice],
        folder: SweepFolder,
        children: Children,
        signals: Signals,
        *,
        show: Callable[[Controller], None] = lambda controller: None,
        tell: Callable[[str], None] = lambda words: None,
    ) -> None:
        self.runs, self.devices = list(runs), list(devices)
        self._sweep, self._folder, self._children, self._signals = sweep, folder, children, signals
        self._show, self._tell = show, tell
        self._began = time.monotonic()
        self._scheduled_at = -_AGAIN_SECONDS
        self._paces: dict[str, list[float]] = {}
        self.ends_in_seconds: float | None = None

    @property
    def elapsed_seconds(self) -> float:
        """Since the sweep began."""
        return time.monotonic() - self._began

    def run(self) -> None:
        """Run until everything is over, or a signal comes, which ends the running ones."""
        changed = True
        while True:
            running = [run for run in self.runs if run.word == "running"]
            if not running and not any(run.word == "waiting" for run in self.runs):
                return
            if self._signals.number is not None:
                self._stop(running)
                return
            if changed or (self._idle() and time.monotonic() - self._scheduled_at > _AGAIN_SECONDS):
                self._scheduled_at = time.monotonic()
                self._place()
                running = [run for run in self.runs if run.word == "running"]
            self._show(self)
            wait([run.child for run in running if run.child is not None], self._signals, _LOOK_SECONDS)
            self._look(running)
            ended = [run for run in running if self._has_ended(run)]
            changed = bool(ended)

    # -- placing -----------------------------------------------------------------------------------------------------------------------

    def _idle(self) -> list[SweepDevice]:
        held = {device for run in self.runs if run.word == "running" for device in run.devices}
        return [device for device in self.devices if device.id not in held]

    def _place(self) -> None:
        """Start the runs that a schedule of the rest starts now."""
        waiting = [run for run in self.runs if run.word == "waiting"]
        running = [run for run in self.runs if run.word == "running"]
        if not waiting:
            self.ends_in_seconds = max((self._left_seconds(run) for run in running), default=0.0)
            return
        jobs = [Job(name=run.name, options=scaled(run.options, self._pace(run)), priority=run.listed.priority) for run in waiting]
        busy = {device: self._left_seconds(run) for run in running for device in run.devices}
        found = schedule(jobs, self.devices, busy)
        self.ends_in_seconds = found.makespan_seconds
        by_name = {run.name: run for run in waiting}
        for place in found.now:
            self._start(by_name[place.job], place)

    # -- a run's beginning and end -----------------------------------------------------------------------------------------------------

    def _start(self, run: SweepRun, place: Placed) -> None:
        allowed, log, summary = self._folder.devices(run.listed), self._folder.log(run.listed), self._folder.summary(run.listed)
        write_allowed(allowed, place.devices)
        summary.unlink(missing_ok=True)
        words = [sys.executable, "-m", "lightning_autopar", "run", f"--devices={self._sweep.devices}", f"--json={summary}"]
        env = {**os.environ, "PYTHONUNBUFFERED": "1", **run.listed.env, ALLOWED_VARIABLE: str(allowed)}
        if run.listed.priority:
            env = {**env, "AUTOPAR_PRIORITY": str(run.listed.priority), **run.listed.env}
        run.attempts += 1
        with open(log, "ab" if run.attempts > 1 else "wb") as file:
            if run.attempts > 1:
                file.write(f"\n---- attempt {run.attempts} ----\n".encode())
                file.flush()
            run.log_from = file.tell()
            try:
                run.child = self._children.start(
                    [*words, *run.listed.words], cwd=run.listed.cwd, env=env, out=file.fileno(), err=file.fileno()
                )
            except OSError as error:
                run.word, run.reason = "failed", f"it can't be started: {error}"
                self._tell(f"{run.name} failed: {run.reason}")
                return
        run.word, run.option, run.devices, run.plan = "running", place.option, place.devices, place.option.title
        run.predicted_seconds, run.began, run.status, run.first_step = place.option.seconds, self.elapsed_seconds, None, None
        run.exit_code = run.seconds = None
        expected = f"{place.option.seconds:.0f} s expected" if run.known else "of unknown length"
        self._tell(f"{run.name} starts on {', '.join(place.devices)} ({place.option.title}, {expected}); its log: {log}")

    def _has_ended(self, run: SweepRun) -> bool:
        assert run.child is not None
        code = self._children.ended(run.child)
        if code is None:
            return False
        run.exit_code, run.seconds = code, time.monotonic() - run.child.started_at
        run.child = None
        self._read_summary(run)
        if code == 0:
            run.word = "done"
            assert run.predicted_seconds is not None
            if run.known:
                self._paces.setdefault(script_of(run.listed), []).append(run.seconds / run.predicted_seconds * self._pace(run))
            self._tell(f"{run.name} is done after {run.seconds:.0f} s ({run.predicted_seconds:.0f} s expected)")
        else:
            with open(self._folder.log(run.listed), "rb") as file:
                file.seek(run.log_from)
                words = last_words(file.read().decode(errors="replace"))
            run.reason = (f"it ended with {code}" if code >= 0 else f"it was ended by signal {-code}") + (f": {words}" if words else "")
            again = run.attempts <= self._sweep.retries
            run.word = "waiting" if again else "failed"
            self._tell(f"{run.name} failed: {run.reason}; {'it is tried again' if again else self._folder.log(run.listed)}")
        if run.word != "waiting":
            self._folder.note(run.listed, {**run.to_dict(), "log": str(self._folder.log(run.listed))})
        return True

    def _stop(self, running: Sequence[SweepRun]) -> None:
        self._tell(f"stopping {len(running)} runs; press Ctrl-C again to kill them")
        self._show(self)
        self._children.end([run.child for run in running if run.child is not None], signals=self._signals)
        for run in running:
            assert run.child is not None
            run.exit_code, run.seconds = run.child.process.returncode, time.monotonic() - run.child.started_at
            run.word, run.reason, run.child = "stopped", "the sweep was stopped", None
        for run in self.runs:
            if run.word == "waiting":
                run.word, run.reason = "stopped", "the sweep was stopped before it began"

    # -- what runs show ----------------------------------------------------------------------------------------------------------------

    def _look(self, running: Sequence[SweepRun]) -> None:
        by_pid = {status.pid: status for status in runs_of_user()}
        for run in running:
            if run.child is None or (status := by_pid.get(run.child.pid)) is None:
                continue
            run.status = status
            run.plan = status.plan or run.plan
            if status.step is not None and (run.first_step is None or status.step < run.first_step[1]):
                run.first_step = time.monotonic(), status.step

    def _left_seconds(self, run: SweepRun) -> float:
        """How long a run still takes: by its own status, by its speed so far, or by its prediction."""
        assert run.child is not None
        assert run.predicted_seconds is not None
        elapsed = time.monotonic() - run.child.started_at
        status = run.status
        if status is not None and status.state == "running":
            if status.ends_at is not None:
                return max(_LEAST_SECONDS, status.ends_at - time.time())
            if run.first_step is not None and status.step is not None and status.steps is not None and status.step > run.first_step[1]:
                pace = (time.monotonic() - run.first_step[0]) / (status.step - run.first_step[1])
                return max(_LEAST_SECONDS, pace * (status.steps - status.step))
        return max(_LEAST_SECONDS, _OVERDUE_SHARE * elapsed, run.predicted_seconds - elapsed)

    def _pace(self, run: SweepRun) -> float:
        """How many times longer than predicted runs of the same script took here; of any script, if none of the same has ended."""
        known = self._paces.get(script_of(run.listed)) or [pace for paces in self._paces.values() for pace in paces]
        return min(max(statistics.median(known), _PACES[0]), _PACES[1]) if known else 1.0

    def _read_summary(self, run: SweepRun) -> None:
        """The plan that ran, as ``lightning-autopar run --json`` wrote it."""
        try:
            trainers = json.loads(self._folder.summary(run.listed).read_text(encoding="utf-8"))["trainers"]
            run.plan = next((each["title"] for each in reversed(trainers) if each["title"]), run.plan)
        except (OSError, ValueError, KeyError, TypeError):
            return  # it was killed before, or its own --json went elsewhere
