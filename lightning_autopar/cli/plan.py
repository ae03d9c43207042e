"""``lightning-autopar plan SCRIPT``: run a script up to ``fit`` (transformers' ``train``), print every plan, and train nothing."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import sys
from types import ModuleType

from lightning_autopar._autoload import when_executed
from lightning_autopar._root import ROOTS
from lightning_autopar.cli.arguments import (
    add_devices,
    add_script,
    add_strategy_options,
    check_files,
    misplaced_options,
    script_of,
    split_devices,
    strategy_options,
)
from lightning_autopar.cli.dry_run import DryRun, ScriptFailed, dry_run
from lightning_autopar.cli.first_trainer import Wanted
from lightning_autopar.cli.spinner import progress

_FITS, _NOTHING_FITS, _FAILED = 0, 1, 2
_EXAMPLES = """\
examples:
  lightning-autopar plan train.py --lr 0.1              plan for what is here
  lightning-autopar plan -m package.train --lr 0.1      as python -m
  lightning-autopar plan main.py fit -c config.yaml     a LightningCLI
  lightning-autopar plan --devices 8xH100-80GB train.py plan for what isn't here
  lightning-autopar plan --devices 2x8xA100-40GB train.py   two nodes of eight
  lightning-autopar plan --json train.py > plan.json    for a program to read; run --plan plan.json runs its best plan
  lightning-autopar plan --picture plan.html train.py   a page to look at

exit codes: 0 a plan fits, 1 none does, 2 the command or the script failed
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``plan`` to the command line's commands."""
    command = commands.add_parser(
        "plan",
        help="run a script up to fit(), print every plan with its memory and time, and train nothing",
        usage="%(prog)s [options] (SCRIPT | -m MODULE) [arguments of the script]",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_devices(command, "8xH100-80GB or 2xcpu:4GiB")
    command.add_argument("--json", action="store_true", help="print JSON instead of tables")
    command.add_argument("--picture", metavar="FILE", help="draw memory and a step's time as well, into a page (.html)")
    add_strategy_options(command)
    add_script(command)


def plan_script(options: argparse.Namespace) -> int:
    """``lightning-autopar plan``; returns the exit code.

    Raises:
        ValueError: if there is no such script, or an option isn't valid.
    """
    script, wanted_options = script_of(options), strategy_options(options)
    spec, trainer_devices = split_devices(options.devices)
    check_files(picture=options.picture)
    # Standard output has only the report: what the script prints goes to stderr.
    with contextlib.redirect_stdout(sys.stderr), progress(lines=True) as show, contextlib.ExitStack() as until_the_end:
        for root in ROOTS:  # whose logger gets its level when it is imported
            until_the_end.callback(when_executed(root, functools.partial(_quiet, until_the_end)))
        wanted = Wanted(devices=spec, trainer_devices=trainer_devices, options=wanted_options)
        show(f"{script.name} runs up to fit")
        try:
            found = dry_run(script, wanted, on_plan=lambda function: show(f"tracing a step of {function}, and planning"))
        except ScriptFailed as error:
            if error.__cause__ is not None and not isinstance(error.__cause__, SystemExit):
                from lightning_autopar.strategies.base.users_traceback import users_part

                own = error.__cause__
                own = own.with_traceback(users_part(own.__traceback__))  # without a frame where Python can't read the script
                logging.getLogger(__name__).error("the script's own traceback:", exc_info=own)
            print(f"lightning-autopar: {error}", file=sys.stderr)
            if isinstance(error.__cause__, SystemExit) and (hint := misplaced_options(script)) is not None:
                print(hint, file=sys.stderr)
            return _FAILED
        if (hint := misplaced_options(script, understood=True)) is not None:
            print(hint, file=sys.stderr)
        if options.picture is not None:
            show(f"drawing {options.picture}")
            found.report.save_picture(options.picture)
        elif options.json:
            show("looking for what would help")
            _ = found.report.advice
    if options.json:
        print(json.dumps(_as_json(found), indent=2))
    else:
        _print_report(found)
    return _FITS if found.report.best is not None else _NOTHING_FITS


def _quiet(until_the_end: contextlib.ExitStack, module: ModuleType) -> None:
    logger = logging.getLogger(module.__name__)
    until_the_end.callback(logger.setLevel, logger.level)
    logger.setLevel(logging.WARNING)


def _as_json(found: DryRun) -> dict[str, object]:
    replaced, report = found.replaced, found.report.to_dict()
    for candidate, words in zip(found.report.candidates, report["candidates"], strict=True):
        words["run_seconds"] = found.seconds(candidate)
    return {
        "function": found.function,
        "replaced_strategy": None if replaced is None else replaced.name,
        "replaced": None if replaced is None else replaced.to_dict(),
        "run": {"batches": found.batches, "batch": found.batch, "elastic": found.elastic},
        **report,
    }


def _print_report(found: DryRun) -> None:
    from rich.console import Console
    from rich.text import Text

    from lightning_autopar.report.table import by_category, by_layer, by_part

    console = Console()
    report = found.report
    if found.replaced is not None:
        console.print(Text("\n".join(found.replaced.lines())))
    if found.function == "train":
        console.print("The script calls train of transformers' Trainer; these are the plans that it can run itself.")
    elif found.function != "fit":
        console.print(f"The script calls {found.function}, not fit; this is its plan.")
    console.print(report.table())
    candidate = report.shown_candidate()
    if candidate is not None:
        console.print(by_category(report, candidate))
        console.print(by_part(report, candidate))
    console.print(by_layer(report.footprint))
