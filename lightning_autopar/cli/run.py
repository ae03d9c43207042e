"""``lightning-autopar run SCRIPT``: the script as it is, with our strategy in place of whatever it names."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightning_autopar._autoload import refuse, when_executed
from lightning_autopar.cli.arguments import (
    add_devices,
    add_script,
    add_strategy_options,
    add_turn_options,
    check_picture,
    misplaced_options,
    option_words,
    script_of,
    split_devices,
)
from lightning_autopar.cli.arguments import strategy_options as chosen_options
from lightning_autopar.strategies.processes.script import Script, own_traceback, started_by

if TYPE_CHECKING:
    from lightning_autopar.cli.replace_strategy import Replacement
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

What it replaces, and which settings of that are lost, it says on stderr.

exit codes: the script's own; 2 where it couldn't be started, or what --json and --picture name couldn't be written
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
    command.add_argument("--json", dest="summary", metavar="FILE", help="write what ran, predicted and measured, as JSON when it is over")
    command.add_argument("--picture", metavar="FILE", help="draw the plan, or an elastic run's course, when it is over: .html or .svg")
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
    check_picture(options.picture)
    built: list[Replacement] = []
    with ExitStack() as until_the_end:

        def replace_from_now_on(module: ModuleType) -> None:
            from lightning_autopar.cli.replace_strategy import Wanted, strategies_replaced

            wanted = Wanted(devices=spec, trainer_devices=trainer_devices, options=wanted_options)
            until_the_end.enter_context(strategies_replaced(built, wanted, on_replace=_tell))

        # Not before the script imports it: environment variables that the script sets first must count.
        until_the_end.callback(when_executed("lightning.pytorch", replace_from_now_on))
        until_the_end.callback(when_executed("pytorch_lightning.trainer.connectors.accelerator_connector", _refuse_the_other))
        start_again = [sys.executable, "-m", "lightning_autopar", "run", *option_words(options)]
        what = ["-m", script.target] if script.is_module else [str(Path(script.target).resolve())]
        until_the_end.enter_context(started_by([*start_again, *what]))
        code = _run(script)
    if not built and code == 0:
        print(f"autopar: {script.name} never created a Lightning Trainer; it ran unchanged", file=sys.stderr)
    if _is_first_rank():
        if options.summary is not None:
            _write_summary(options.summary, script, built, code)
        if options.picture is not None:
            _draw(options.picture, built)
    return code


def _run(script: Script) -> int:
    """Run the script; returns the exit code that Python would have. An exception is printed as Python prints it."""
    try:
        script.run()
    except SystemExit as error:
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
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, found
        sys.excepthook(type(error), error.with_traceback(found), found)
        return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _refuse_the_other(module: Any) -> None:
    """Make a Trainer of ``pytorch_lightning``, which can't use our strategy, raise an error when it is built."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        refuse()

    module._AcceleratorConnector.__init__ = init


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
    """Whether this process reports for the run; known once Lightning has been imported, and true before."""
    utilities = sys.modules.get("lightning.fabric.utilities.rank_zero")
    return not getattr(getattr(utilities, "rank_zero_only", None), "rank", None)


def _draw(path: str, built: list[Replacement]) -> None:
    """Draw the latest run as a picture.

    Raises:
        ValueError: if it can't be drawn, or nothing ran.
    """
    strategy = next((each.strategy for each in reversed(built) if each.strategy.report is not None), None)
    if strategy is None:
        raise ValueError(f"there is nothing to draw into {path!r}: the script ran no Trainer")
    assert strategy.report is not None, "as was looked for"
    (strategy.report if strategy.history is None else strategy.history).save_picture(path)


def _write_summary(path: str, script: Script, built: list[Replacement], code: int) -> None:
    """What ran.

    Raises:
        ValueError: if the file can't be written.
    """
    trainers = [_summary(each) for each in built]
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
