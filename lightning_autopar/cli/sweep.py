"""``lightning-autopar sweep FILE``: many runs, placed on the devices so that the last is over soonest. Imports no torch."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_autopar.cli.arguments import add_devices, check_files
from lightning_autopar.cli.spinner import progress
from lightning_autopar.text import format_length

if TYPE_CHECKING:
    from rich.table import Table

    from lightning_autopar.sharing.sweep.controller import Controller, SweepRun
    from lightning_autopar.sharing.sweep.runs_file import ListedSweep, SweepFolder
    from lightning_autopar.sharing.sweep.scheduler import Schedule, SweepDevice

_DONE, _FAILED = 0, 1
_EXAMPLES = """\
examples:
  lightning-autopar sweep sweep.yaml                    the runs that a file lists
  lightning-autopar sweep commands.txt                  a command a line
  lightning-autopar sweep -- "train.py --lr 0.1" "train.py --lr 0.3"
  lightning-autopar sweep --dry-run sweep.yaml          what would run where, and until when
  lightning-autopar sweep --dry-run --devices 4xH100-80GB sweep.yaml
  lightning-autopar sweep --retries 2 sweep.yaml        a run that fails is started up to twice again
  lightning-autopar sweep --json result.json sweep.yaml

Each run is a process of its own, lightning-autopar run SCRIPT ..., with a log in the folder sweep-NAME. A sweep that is started again
skips finished runs.

exit codes: 0 all runs ended with 0, 1 some didn't, 2 the command can't be done, 128 + the signal's number where one stopped it
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``sweep`` to the command line's commands."""
    command = commands.add_parser(
        "sweep",
        help="run many scripts, placed on the devices so that the last one ends soonest",
        usage="%(prog)s [options] (FILE | -- COMMAND ...)",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_devices(command, "2xcpu:4GiB, or as the Trainer takes them: auto, 2, or 0,1")
    command.add_argument("--name", metavar="NAME", help="the sweep's name, by default the file's; its folder is sweep-NAME")
    command.add_argument("--retries", metavar="N", type=int, help="how often a run that fails is started again; by default 0")
    command.add_argument("--dry-run", action="store_true", help="print what would run where, and until when; run nothing")
    command.add_argument("--again", action="store_true", help="also run what is done already")
    command.add_argument("--json", dest="result", metavar="FILE", help="write each run's plan, devices, seconds and exit code as JSON")
    command.add_argument(
        "sweep", nargs="+", metavar="FILE | COMMAND", help="a YAML file, a text file with a command a line, or commands in quotes"
    )


def sweep_scripts(options: argparse.Namespace) -> int:
    """``lightning-autopar sweep``; returns the exit code.

    Raises:
        ValueError: if the sweep isn't valid, or runs already.
    """
    from lightning_autopar.sharing.sweep.child_processes import Children, noted_signals
    from lightning_autopar.sharing.sweep.controller import Controller, first_schedule, prospects
    from lightning_autopar.sharing.sweep.dry_runs import Stopped, look_at
    from lightning_autopar.sharing.sweep.runs_file import sweep_folder

    check_files(json=options.result)
    sweep = _listed(options)
    with sweep_folder(sweep) as folder, noted_signals() as signals, Children() as children:
        if options.again:
            folder.done.clear()
        to_do = [run for run in sweep.runs if folder.is_done(run) is None]
        with progress() as show:
            try:
                looked = look_at(to_do, sweep.devices, folder, children, signals, at_once=_at_once(), show=show)
            except Stopped:
                return 128 + (signals.number or 0)
            show("placing the runs")
            runs, devices = prospects(sweep, looked, folder)
            first = first_schedule(runs, devices)
        if options.dry_run:
            _print_schedule(runs, first, devices)
            _write(options.result, sweep, runs, first)
            return _FAILED if any(run.word == "failed" for run in runs) else _DONE
        _check_here(looked.values())
        with _shown() as (show_run, tell):
            controller = Controller(sweep, runs, devices, folder, children, signals, show=show_run, tell=tell)
            for run in runs:
                if run.word in ("failed", "done before"):
                    tell(f"{run.name}: {run.reason or 'done before'}")
            if first.placed:
                expected = format_length(first.makespan_seconds)
                tell(f"{len(first.placed)} runs on {len(devices)} devices: {expected} expected{_unknown(runs)}")
            controller.run()
        _print_result(controller, folder)
        _write(options.result, sweep, runs, first, controller)
        if signals.number is not None:
            return 128 + signals.number
        return _DONE if all(run.word in ("done", "done before") for run in runs) else _FAILED


def _listed(options: argparse.Namespace) -> ListedSweep:
    from lightning_autopar.sharing.sweep.runs_file import named, read_sweep, sweep_of

    words: Sequence[str] = options.sweep
    is_file = len(words) == 1 and not words[0].endswith(".py") and (Path(words[0]).is_file() or len(words[0].split()) == 1)
    sweep = read_sweep(words[0]) if is_file else sweep_of(words)
    if options.devices is not None:
        sweep = replace(sweep, devices=options.devices)
    if options.retries is not None:
        if options.retries < 0:
            raise ValueError(f"--retries is {options.retries}, but must be a whole number from 0 on")
        sweep = replace(sweep, retries=options.retries)
    return sweep if options.name is None else named(sweep, options.name)


def _at_once() -> int:
    from lightning_autopar.devices.host import host_cores

    return max(1, host_cores())


def _check_here(looked: Any) -> None:
    """Raises: ValueError, if the devices can only be planned for."""
    for each in looked:
        kinds = {device["kind"] for device in each.report["inventory"]["devices"]} if each.report is not None else set()
        if kinds == {"catalogue"}:
            raise ValueError("these devices can be planned for, not run on; add --dry-run, or name devices that are here")


# -- showing ---------------------------------------------------------------------------------------------------------------------------


@contextmanager
def _shown() -> Iterator[tuple[Callable[[Controller], None], Callable[[str], None]]]:
    """How the sweep is shown while it runs: a table on a terminal's standard error, else a line for each thing that happens."""
    if not sys.stderr.isatty():
        yield lambda controller: None, lambda words: print(f"autopar: {words}", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(stderr=True)
    # Only this thread draws: processes are forked meanwhile.
    with Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False) as live:
        yield (
            lambda controller: live.update(_progress(controller), refresh=True),
            lambda words: console.print(Text(f"autopar: {words}")),
        )


def _progress(controller: Controller) -> Table:
    """The running and waiting runs, and how many are over."""
    from rich.table import Table
    from rich.text import Text

    order = {"running": 0, "waiting": 1}
    open_runs = sorted((run for run in controller.runs if run.word in order), key=lambda run: order[run.word])
    over = len(controller.runs) - len(open_runs)
    left = "" if controller.ends_in_seconds is None else f", {format_length(controller.ends_in_seconds)} to go"
    table = Table(
        box=None, pad_edge=False, title=f"{over} of {len(controller.runs)} over, {format_length(controller.elapsed_seconds)} so far{left}"
    )
    for title in ("run", "state", "plan", "devices", "step", "s", "expected s"):
        table.add_column(title, justify="right" if title in ("step", "s", "expected s") else "left", no_wrap=True)
    for run in open_runs:
        status, is_on = run.status, run.word == "running"
        step = "" if status is None or status.step is None else f"{status.step}" + (f"/{status.steps}" if status.steps else "")
        state = run.word if status is None or not is_on else status.state
        elapsed = f"{controller.elapsed_seconds - run.began:.0f}" if is_on and run.began is not None else ""
        words = (run.name, state, run.plan, " ".join(run.devices) if is_on else "", step, elapsed, _predicted(run))
        table.add_row(*map(Text, words))
    return table


def _print_result(controller: Controller, folder: SweepFolder) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console, table = Console(), Table(box=None, pad_edge=False)
    for title in ("run", "state", "plan", "devices", "expected s", "s", "log"):
        table.add_column(title, justify="right" if title in ("s", "expected s") else "left", overflow="fold")
    for run in controller.runs:
        log = folder.log(run.listed)
        seconds = "" if run.seconds is None else f"{run.seconds:.1f}"
        words = (run.name, run.word, run.plan, " ".join(run.devices), _predicted(run), seconds, _short(log) if log.exists() else "")
        table.add_row(*map(Text, words))
    console.print(table)
    for run in controller.runs:
        if run.word == "failed":
            console.print(Text(f"{run.name}: {run.reason}"))
    over = sum(run.word in ("done", "done before") for run in controller.runs)
    console.print(f"{over} of {len(controller.runs)} runs are done, after {format_length(controller.elapsed_seconds)}")


def _print_schedule(runs: Sequence[SweepRun], first: Schedule, devices: Sequence[SweepDevice]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console, table = Console(), Table(box=None, pad_edge=False)
    for title in ("run", "plan", "devices", "from s", "to s"):
        table.add_column(title, justify="right" if title.endswith(" s") else "left", overflow="fold")
    for place in first.placed:
        words = (place.job, place.option.title, " ".join(place.devices), f"{place.start_seconds:.0f}", f"{place.end_seconds:.0f}")
        table.add_row(*map(Text, words))
    console.print(table)
    for run in runs:
        if run.word in ("failed", "done before"):
            console.print(Text(f"{run.name}: {run.reason or 'done before'}"))
    if first.placed:
        expected = f"{format_length(first.makespan_seconds)} expected, without validation"
        console.print(Text(f"{len(first.placed)} runs on {len(devices)} devices: {expected}{_unknown(runs)}"))


def _unknown(runs: Sequence[SweepRun]) -> str:
    """The runs whose length is unknown, in words."""
    names = [run.name for run in runs if run.word == "waiting" and not run.known]
    return f"; the length of {', '.join(names)} isn't known, and counts as that of the longest run" if names else ""


def _predicted(run: SweepRun) -> str:
    return "" if run.predicted_seconds is None or not run.known else f"{run.predicted_seconds:.1f}"


def _short(path: Path) -> str:
    """The path relative to this folder, if it lies below."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _write(path: str | None, sweep: ListedSweep, runs: Sequence[SweepRun], first: Schedule, controller: Controller | None = None) -> None:
    """The result as JSON.

    Raises:
        ValueError: if it can't be written.
    """
    if path is None:
        return
    placed = [
        {"run": place.job, "plan": place.option.title, "devices": list(place.devices), "from": place.start_seconds, "to": place.end_seconds}
        for place in first.placed
    ]
    words = {
        "name": sweep.name,
        "devices": sweep.devices,
        "predicted_seconds": first.makespan_seconds,
        "schedule": placed,
        "seconds": None if controller is None else controller.elapsed_seconds,
        "runs": [run.to_dict() for run in runs],
    }
    try:
        Path(path).write_text(json.dumps(words, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"the result can't be written to {path!r}: {error.strerror}; name another file") from error
