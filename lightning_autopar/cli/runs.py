"""The commands about runs: ``status`` for all of them; ``yield``, ``pause``, ``resume`` and ``cancel`` for the user's own.

Imports neither torch nor Lightning.
"""

from __future__ import annotations

import argparse
import json
import time

from lightning_autopar.cli.spinner import progress
from lightning_autopar.cli.status import WATCH_SECONDS, left_words, show_status
from lightning_autopar.sharing.runs.folders import user_name
from lightning_autopar.sharing.runs.leftovers import leftovers, remove
from lightning_autopar.sharing.runs.requests import ask, cancel
from lightning_autopar.sharing.runs.status import Ask, Request

_DONE, _NO_ANSWER = 0, 1
_ASKS: dict[str, Ask] = {"yield": "yield", "pause": "park", "resume": "resume"}
_STATUS_EXAMPLES = """\
examples:
  lightning-autopar status
  lightning-autopar status --watch                      again every 2 s, until Ctrl-C
  lightning-autopar status --json                       for a program to read
  lightning-autopar status --watch 10 --json            a line of JSON every 10 s

exit codes: 0 shown, even if there are no runs, 2 the options don't go together
"""
_YIELD_EXAMPLES = """\
examples:
  lightning-autopar yield train-gpt-3f2a                move off its devices, or wait where there are no others
  lightning-autopar yield train                         the beginning of a name is enough if one run has it
  lightning-autopar yield 12345                         a pid, as nvidia-smi shows it
  lightning-autopar yield train --device GPU-7c1e9b04   off this device only, by its UUID or the beginning of it
  lightning-autopar yield train --wait 30               and wait for the run's answer

exit codes: 0 the run was asked (with --wait: has answered), 1 no answer came, 2 it can't be asked: there is no such run, it is another
user's, or it isn't elastic
"""
_PAUSE_EXAMPLES = """\
examples:
  lightning-autopar pause train-gpt-3f2a                save, give all devices back, and wait until it is resumed
  lightning-autopar pause train --wait 30               and wait for the run's answer

exit codes: the same as of yield
"""
_RESUME_EXAMPLES = """\
examples:
  lightning-autopar resume train-gpt-3f2a               go on as soon as there is room, at the step where it was paused
  lightning-autopar resume train --wait 30              and wait for the run's answer

exit codes: the same as of yield
"""
_CLEAN_EXAMPLES = """\
examples:
  lightning-autopar clean                               remove the files that killed runs of yours have left
  lightning-autopar clean --snapshots                   and the snapshots from which their next start would go on

Nothing of a run that still lives is removed. lightning-autopar status lists what killed runs have left.

exit codes: 0 all of it is removed, 1 something couldn't be removed
"""
_CANCEL_EXAMPLES = """\
examples:
  lightning-autopar cancel train-gpt-3f2a               end it, as Ctrl-C in its terminal does; queued ones, too
  lightning-autopar cancel train --wait 60              and wait for its end

exit codes: 0 the run was told (with --wait: has ended), 1 it hasn't ended in that time, 2 it can't be told: there is no such run, it is
another user's, or torchrun or Slurm has to end it
"""


def add_run_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``status``, ``yield``, ``pause``, ``resume``, ``cancel`` and ``clean`` to the command line's commands."""
    status = _add(commands, "status", "list all runs on this host, of all users: what they do, where, and why", _STATUS_EXAMPLES)
    status.add_argument("--json", action="store_true", help="print JSON instead of a table; with --watch a line at each look")
    status.add_argument(
        "--watch",
        metavar="SECONDS",
        nargs="?",
        type=float,
        const=WATCH_SECONDS,
        help=f"show it again every so many seconds ({WATCH_SECONDS:g} unless given), until Ctrl-C",
    )
    move = _add(commands, "yield", "ask one of your elastic runs to move off its devices now, without losing a step", _YIELD_EXAMPLES)
    move.add_argument("--device", metavar="UUID", help="leave this device only, which lightning-autopar status names")
    pause = _add(commands, "pause", "ask one of your elastic runs to save, give its devices back and wait to be resumed", _PAUSE_EXAMPLES)
    resume = _add(
        commands, "resume", "let one of your elastic runs go on after pause, and use all devices again after yield", _RESUME_EXAMPLES
    )
    end = _add(commands, "cancel", "end one of your runs, as Ctrl-C in its terminal does", _CANCEL_EXAMPLES)
    clean = _add(commands, "clean", "remove what killed runs of yours have left in memory and on disk", _CLEAN_EXAMPLES)
    clean.add_argument("--snapshots", action="store_true", help="also the snapshots from which their next start would go on")
    for command in (move, pause, resume, end):
        what = "end" if command is end else "answer"
        command.add_argument("run", metavar="RUN", help="its name, the beginning of it, or a pid")
        command.add_argument("--wait", metavar="SECONDS", type=float, help=f"how long to wait for the run's {what}")
        command.add_argument("--json", action="store_true", help="print JSON instead of a sentence")


def _clean(*, snapshots: bool) -> int:
    """``lightning-autopar clean``; returns the exit code."""
    code, now = _DONE, time.time()
    for left in leftovers():
        if left.goes_on and not snapshots:
            print(f"kept {left.path}: {left_words(left, now)}; --snapshots removes it")
        elif remove(left):
            print(f"removed {left.path}: {left_words(left, now)}")
        else:
            print(f"could not remove {left.path}")
            code = _NO_ANSWER
    return code


def _add(commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, what: str, examples: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=what, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter)


def run_command(options: argparse.Namespace) -> int:
    """Do one of these commands; returns the exit code.

    Raises:
        ValueError: if it can't be done, with the reason.
    """
    if options.command == "status":
        return show_status(as_json=options.json, watch_seconds=options.watch)
    if options.command == "clean":
        return _clean(snapshots=options.snapshots)
    if options.command == "cancel":
        return _cancel(options.run, options.wait, as_json=options.json)
    return _ask(_ASKS[options.command], options.run, getattr(options, "device", None), options.wait, as_json=options.json)


def _ask(what: Ask, run: str, device: str | None, wait_seconds: float | None, *, as_json: bool) -> int:
    with progress() as show:
        if wait_seconds:
            show(f"waiting for the answer of {run}")
        asked = ask(run, Request(ask=what, device=device, by=f"{user_name()} (command line)"), wait_seconds=wait_seconds)
    if as_json:
        words = {"run": asked.run_id, "device": asked.request.device, "answered": asked.answered, "ended": asked.ended}
        print(json.dumps({**words, "message": str(asked)}, indent=2))
    else:
        print(asked)
    return _NO_ANSWER if wait_seconds and asked.answered is None else _DONE


def _cancel(run: str, wait_seconds: float | None, *, as_json: bool) -> int:
    with progress() as show:
        if wait_seconds:
            show(f"waiting for the end of {run}")
        told = cancel(run, wait_seconds=wait_seconds)
    if as_json:
        print(json.dumps({"run": told.run_id, "signal": told.signal, "ended": told.ended, "message": str(told)}, indent=2))
    else:
        print(told)
    return _NO_ANSWER if told.ended is False else _DONE
