"""``lightning-autopar run SCRIPT``: the script as it is, with our strategy in place of whatever it names."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_autopar.cli.arguments import (
    add_devices,
    add_script,
    add_strategy_options,
    add_turn_options,
    check_files,
    misplaced_options,
    option_words,
    script_of,
    split_devices,
)
from lightning_autopar.cli.arguments import strategy_options as chosen_options
from lightning_autopar.cli.first_trainer import Wanted, at_first_trainer
from lightning_autopar.huggingface.relaunch import promised, relaunch
from lightning_autopar.huggingface.settings import handed_over
from lightning_autopar.huggingface.train_calls import trainers_planned, trainers_set
from lightning_autopar.strategies.processes.users_script import Script, is_ours, own_traceback, started_by

if TYPE_CHECKING:
    from lightning_autopar.cli.replace_strategy import Replacement
    from lightning_autopar.huggingface.settings import Settings
    from lightning_autopar.report.run_history import RunHistory

#: The exit code of argparse and click for a command line that they refuse.
_MISUSED = 2

_EXAMPLES = """\
examples:
  lightning-autopar run train.py --lr 0.1               whatever strategy it names, or none
  lightning-autopar run -m package.train --lr 0.1       as python -m
  lightning-autopar run main.py fit -c config.yaml      a LightningCLI
  lightning-autopar run --allow single,fsdp train.py    of these engines only
  lightning-autopar run --devices 2xcpu:4GiB train.py   on two shares of this host
  lightning-autopar run --devices 0,1 train.py          on these GPUs, whatever the script asks for
  lightning-autopar run --plan plan.json train.py       under this plan (of lightning-autopar plan --json train.py)
  lightning-autopar run --priority 5 --wait 2h train.py before less important runs that wait, and for two hours at most
  lightning-autopar run --picture run.html train.py     a page to look at when it is over
  lightning-autopar run --json run.json train.py        plan, prediction and measurement for a program to read
  torchrun --nproc-per-node 4 -m lightning_autopar run train.py

With transformers' Trainer, the command plans when the script calls train. Then it starts the script again, with one process for each
device of the plan and with other TrainingArguments, and says which.

Standard error says which strategy is replaced, and which of its settings are lost.

exit codes: the script's own, or 143 where SIGTERM ended the training; 2 where it couldn't be started, or what --json and --picture
name couldn't be written
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``run`` to the command line's commands."""
    command = commands.add_parser(
        "run",
        help="run a script unchanged, with autopar in place of the strategy that it names",
        usage="%(prog)s [options] (SCRIPT | -m MODULE) [arguments of the script]",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_devices(command, "2xcpu:4GiB, or as the Trainer takes them: auto, 2, or 0,1")
    command.add_argument(
        "--json", dest="summary", metavar="FILE", help="when the run is over, write the plan that ran, predicted and measured, as JSON"
    )
    command.add_argument("--picture", metavar="FILE", help="when the run is over, draw its plan into a page (.html)")
    add_strategy_options(command)
    add_turn_options(command)
    add_script(command)


def run_script(options: argparse.Namespace) -> int:
    """``lightning-autopar run``; returns the exit code.

    Raises:
        ValueError: if it can't be started.
    """
    script, wanted_options = script_of(options), chosen_options(options)
    spec, trainer_devices = split_devices(options.devices)
    check_files(json=options.summary, picture=options.picture)
    built: list[Replacement] = []

    def replace_from_now_on() -> AbstractContextManager[None]:
        from lightning_autopar.cli.replace_strategy import strategies_replaced

        if _is_first_rank() and (hint := misplaced_options(script, understood=True)) is not None:
            print(hint, file=sys.stderr, flush=True)
        wanted = Wanted(devices=spec, trainer_devices=trainer_devices, options=wanted_options)
        return strategies_replaced(built, wanted, on_replace=_tell)

    start_again = [sys.executable, "-m", "lightning_autopar", "run", *option_words(options)]
    what = ["-m", script.target] if script.is_module else [str(Path(script.target).resolve())]
    ran: list[Settings] = []
    with ExitStack() as until_the_end:
        settings = handed_over()
        if settings is None:
            wanted_by = {"devices": spec, "trainer_devices": trainer_devices, "options": wanted_options}
            until_the_end.enter_context(trainers_planned(partial(_start_planned, wanted_by, options, what)))
        else:
            until_the_end.enter_context(promised(settings, spec))
            until_the_end.enter_context(trainers_set(settings, ran))
        until_the_end.enter_context(at_first_trainer(replace_from_now_on))
        until_the_end.enter_context(started_by([*start_again, *what]))
        code = _run(script)
    if not built and not ran and code == 0:
        print(
            f"autopar: {script.name} created no Trainer of Lightning, and called train of no Trainer of transformers; it ran unchanged",
            file=sys.stderr,
        )
    if _is_first_rank():
        if options.summary is not None:
            _write_summary(options.summary, script, built, ran, code)
        if options.picture is not None and not ran:
            _draw(options.picture, built)
    return code


def _start_planned(asked: Mapping[str, Any], options: argparse.Namespace, what: Sequence[str], trainer: Any) -> None:
    """Plan for what transformers' Trainer was about to do, say what its arguments become, and start the script again under them; doesn't
    return.

    Args:
        asked: of the command line, the fields of ``Asked``.
        what: the script's words on a command line, without its own arguments.

    Raises:
        NothingFits: if no plan fits.
        ValueError: if nothing can be planned, or the devices aren't here.
    """
    from lightning_autopar.huggingface.planning import Asked, plan_for
    from lightning_autopar.report.report import NothingFits

    planned = plan_for(trainer, Asked(**asked))
    if (settings := planned.settings) is None:
        raise NothingFits(planned.report)
    if catalogue := [device.id for device in planned.report.inventory.devices if device.kind == "catalogue"]:
        raise ValueError(f"devices {', '.join(catalogue)} can be planned for, not run on; give devices that are here, such as 2xcpu:4GiB")
    print(planned.report, file=sys.stderr)
    left_out = [f"  not as in the script: {words}; --exact excludes such plans" for words in planned.differs]
    print("\n".join([*settings.lines(planned.said), *left_out]), file=sys.stderr, flush=True)
    if options.picture is not None:
        planned.report.save_picture(options.picture)
    words = option_words(options) + ([f"--json={Path(options.summary).resolve()}"] if options.summary is not None else [])
    relaunch(settings, ["-m", "lightning_autopar", "run", *words, *what, *sys.argv[1:]])


def _run(script: Script) -> int:
    """Run the script; returns the exit code that Python would have. An exception is printed as Python prints it.

    A training that SIGTERM has ended isn't done, though Lightning's exception for that leaves Python with 0.
    """
    try:
        script.run()
    except SystemExit as error:
        if type(error).__name__ == "SIGTERMException":
            return 128 + signal.SIGTERM
        if error.code == _MISUSED and (hint := misplaced_options(script)) is not None:
            print(hint, file=sys.stderr)
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        found = own_traceback(error)
        if found is None and isinstance(error, ValueError):
            raise  # the script hasn't begun
        if is_ours(error) and error.__cause__ is None:
            print(f"lightning-autopar: {error}", file=sys.stderr)
            return 1
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, found
        sys.excepthook(type(error), error.with_traceback(found), found)
        return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


_told: set[str] = set()


def _tell(replacement: Replacement) -> None:
    """Print what is replaced: each thing once, on rank 0, and not by a logger, which could be turned off."""
    if replacement.replaced is None or not _is_first_rank():
        return
    words = "\n".join(replacement.replaced.lines())
    if words not in _told:
        _told.add(words)
        print(words, file=sys.stderr, flush=True)


def _is_first_rank() -> bool:
    """Whether this process reports for the run; Lightning knows once it has been imported, else the launcher's variable says."""
    utilities = sys.modules.get("lightning_utilities.core.rank_zero")
    rank = getattr(getattr(utilities, "rank_zero_only", None), "rank", None)
    return not (int(os.environ.get("RANK", 0)) if rank is None else rank)


def _draw(path: str, built: list[Replacement]) -> None:
    """Draw the latest run's plan.

    Raises:
        ValueError: if it can't be drawn, or nothing ran.
    """
    report = next((report for each in reversed(built) if (report := each.strategy.report) is not None), None)
    if report is None:
        raise ValueError(f"there is nothing to draw into {path!r}: the script ran no Trainer")
    report.save_picture(path)


def _write_summary(path: str, script: Script, built: list[Replacement], ran: list[Settings], code: int) -> None:
    """What ran.

    Raises:
        ValueError: if the file can't be written.
    """
    trainers = [_summary(each) for each in built]
    trainers += [{"transformers": each.to_dict(), "title": each.plan.title(), "settings": each.fields()} for each in ran]
    words = {"script": script.target, "arguments": list(script.arguments), "exit_code": code, "trainers": trainers}
    try:
        Path(path).write_text(json.dumps(words, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"the summary can't be written to {path!r}: {error.strerror}; name another file") from error


def _summary(each: Replacement) -> dict[str, Any]:
    """The summary of one Trainer: what was replaced, and its latest run with its prediction; null without a run."""
    strategy = each.strategy
    candidate = None if strategy.report is None else strategy.report.best_candidate
    return {
        "replaced": None if each.replaced is None else each.replaced.to_dict(),
        "plan": None if strategy.plan is None else strategy.plan.to_dict(),
        "title": None if strategy.plan is None else strategy.plan.title(),
        "predicted": None if candidate is None else candidate.to_dict(),
        "measured": strategy.measured or None,
        "history": None if strategy.history is None else _course(strategy.history),
    }


def _course(history: RunHistory) -> dict[str, Any]:
    """The history of an elastic run."""
    spans = [{**vars(span), "devices": list(span.devices), "predicted_bytes": dict(span.predicted_bytes)} for span in history.spans]
    return {"spans": spans, "events": [vars(mark) for mark in history.marks]}
