"""The command line about runs that are on: ``lightning-autopar status`` and ``lightning-autopar yield RUN``. No torch, no Lightning."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Mapping

from lightning_autopar.cli.progress import progress
from lightning_autopar.strategies.run_files import Request, RunStatus
from lightning_autopar.strategies.run_folders import user_name
from lightning_autopar.strategies.run_requests import ask, runs
from lightning_autopar.units import format_bytes

_DONE, _NO_ANSWER = 0, 1
#: A run shows itself every few seconds; silent for longer it hangs, or was stopped.
_SILENT_SECONDS = 60.0
#: In a narrower terminal the reasons stand below the table.
_WIDE = 100
#: Of a GPU's or a MIG device's UUID.
_DEVICE_CHARACTERS = 12
_STATUS_EXAMPLES = """\
examples:
  lightning-autopar status
  lightning-autopar status --json                       for a program to read

exit code: 0, whether there are runs or not
"""
_YIELD_EXAMPLES = """\
examples:
  lightning-autopar yield train-gpt-3f2a                move off its devices, or wait where there are no others
  lightning-autopar yield train                         the beginning of a name is enough if one run has it
  lightning-autopar yield 12345                         a pid, as nvidia-smi shows it
  lightning-autopar yield train --device GPU-7c1e9b04   off this device only, by its UUID or the beginning of it
  lightning-autopar yield train --wait 30               and wait for the run's answer

exit codes: 0 the run was asked (with --wait: has answered), 1 no answer came, 2 there is no such run
"""


def add_run_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``status`` and ``yield`` to the command line's commands."""
    status = commands.add_parser(
        "status",
        help="list your elastic runs on this host: what they do, where, and why",
        epilog=_STATUS_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    status.add_argument("--json", action="store_true", help="print JSON instead of a table")
    move = commands.add_parser(
        "yield",
        help="ask one of your elastic runs to move off its devices now, without losing a step",
        epilog=_YIELD_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    move.add_argument("run", metavar="RUN", help="its name, the beginning of it, or a pid")
    move.add_argument("--device", metavar="UUID", help="leave this device only, which lightning-autopar status names")
    move.add_argument("--wait", metavar="SECONDS", type=float, help="wait so long for the run's answer")
    move.add_argument("--json", action="store_true", help="print JSON instead of a sentence")


def show_runs(*, as_json: bool) -> int:
    """``lightning-autopar status``; returns the exit code."""
    found = runs()
    if as_json:
        print(json.dumps({"runs": [status.to_dict() for status in found]}, indent=2))
    elif found:
        _print_table(found)
    else:
        print(f"No elastic runs of {user_name()} on this host.")
    return _DONE


def ask_to_yield(run: str, device: str | None, wait_seconds: float | None, *, as_json: bool) -> int:
    """``lightning-autopar yield``; returns the exit code.

    Raises:
        ValueError: as :func:`lightning_autopar.strategies.run_requests.ask`.
    """
    with progress() as show:
        if wait_seconds:
            show(f"waiting for the answer of {run}")
        asked = ask(run, Request(ask="yield", device=device, by=f"{user_name()} (command line)"), wait_seconds=wait_seconds)
    if as_json:
        words = {"run": asked.run_id, "device": asked.request.device, "answered": asked.answered, "ended": asked.ended}
        print(json.dumps({**words, "message": str(asked)}, indent=2))
    else:
        print(asked)
    return _NO_ANSWER if wait_seconds and asked.answered is None else _DONE


def _print_table(found: Iterable[RunStatus]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console, now = Console(), time.time()
    wide = console.width >= _WIDE
    titles = ["run", "state", "plan", "devices", "step", "s/step", "since"]
    table = Table(box=None, pad_edge=False)
    for title in [*titles, "reason"] if wide else titles:
        number = title in ("step", "s/step", "since")
        table.add_column(title, justify="right" if number else "left", no_wrap=title not in ("plan", "reason"))
    reasons = []
    for status in found:
        reason = _reason(status, now)
        # As Text, since a script's or a device's name may hold what rich reads as markup.
        table.add_row(*map(Text, (*_row(status, now, wide=wide), *([reason] if wide else []))))
        if reason and not wide:
            reasons.append(Text(f"{status.run_id}: {reason}"))
    console.print(table)
    for line in reasons:
        console.print(line)


def _row(status: RunStatus, now: float, *, wide: bool) -> tuple[str, ...]:
    """What the table says of a run, but for the reason."""
    step = "" if status.step is None else str(status.step) + ("" if status.steps is None else f"/{status.steps}")
    seconds = "" if status.step_seconds is None else f"{status.step_seconds:.3g}"
    return status.run_id, status.state, status.plan, _devices(status, sizes=wide), step, seconds, _ago(now - status.since)


def _reason(status: RunStatus, now: float) -> str:
    """Its own, or that it says nothing any more."""
    if now - status.shown_at <= _SILENT_SECONDS:
        return status.reason
    silent = f"silent for {_ago(now - status.shown_at)}: stopped, or it hangs"
    return f"{silent} ({status.reason})" if status.reason else silent


def _devices(status: RunStatus, *, sizes: bool) -> str:
    """Each device on a line, with what the run takes of it, or else has claimed."""
    taken: Mapping[str, int] = {**status.leased_bytes, **status.used_bytes} if sizes else {}
    return "\n".join(_short(device) + (f" {format_bytes(taken[device])}" if device in taken else "") for device in status.devices)


def _short(device: str) -> str:
    """So much of a UUID as tells devices of a host apart, and as ``yield --device`` takes."""
    return device[:_DEVICE_CHARACTERS] if device.startswith(("GPU-", "MIG-")) else device


def _ago(seconds: float) -> str:
    """``5400`` → ``"90 min"``."""
    for least, unit_seconds, unit in ((48 * 3600, 86400, "d"), (7200, 3600, "h"), (120, 60, "min"), (1, 1, "s")):
        if seconds >= least:
            return f"{seconds / unit_seconds:.0f} {unit}"
    return "now"
