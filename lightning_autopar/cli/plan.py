"""``lightning-autopar plan SCRIPT``: run a script up to ``fit``, print every plan with its memory and time, and train nothing.

Run somebody's script up to ``fit``, plan for what it was about to do, and train nothing.

Knows the Trainer and our strategy; nothing of the command line that asks for it, nor of how a report is shown.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_autopar._lightning_compat import attach_data, run_arguments
from lightning_autopar.cli.arguments import (
    add_devices,
    add_script,
    add_strategy_options,
    check_picture,
    script_of,
    split_devices,
    strategy_options,
)
from lightning_autopar.cli.replace_strategy import Replaced, Replacement, Wanted, strategies_replaced
from lightning_autopar.cli.spinner import progress
from lightning_autopar.report.report import Candidate, NothingFits, Report
from lightning_autopar.strategies.base.assignment import BatchRule
from lightning_autopar.strategies.elastic.elastic_run import watchers
from lightning_autopar.strategies.launcher import AutoLauncher
from lightning_autopar.strategies.preparation.decide import survey
from lightning_autopar.strategies.processes.script import Script

_FITS, _NOTHING_FITS, _FAILED = 0, 1, 2
_EXAMPLES = """\
examples:
  lightning-autopar plan train.py --lr 0.1              plan for what is here
  lightning-autopar plan -m package.train --lr 0.1      as python -m
  lightning-autopar plan main.py fit -c config.yaml     a LightningCLI
  lightning-autopar plan --devices 8xH100-80GB train.py plan for what isn't here
  lightning-autopar plan --devices 2x8xA100-40GB train.py   two nodes of eight
  lightning-autopar plan --json train.py > plan.json    for a program to read; run --plan plan.json runs its best plan
  lightning-autopar plan --picture plan.html train.py   a page to look at; .svg for a talk

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
    command.add_argument("--picture", metavar="FILE", help="draw memory and a step's time as well, into a page (.html) or a picture (.svg)")
    add_strategy_options(command)
    add_script(command)


def plan_script(options: argparse.Namespace) -> int:
    """``lightning-autopar plan``; returns the exit code.

    Raises:
        ValueError: if there is no such script, or what is asked for can't be.
    """
    script, wanted_options = script_of(options), strategy_options(options)
    spec, trainer_devices = split_devices(options.devices)
    check_picture(options.picture)
    # Standard output is the report's alone: what the script prints goes where messages go.
    with contextlib.redirect_stdout(sys.stderr), progress() as show:
        show("importing Lightning")
        from lightning_autopar.cli.replace_strategy import Wanted

        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        wanted = Wanted(devices=spec, trainer_devices=trainer_devices, options=wanted_options)
        show(f"{script.name} runs up to fit")
        try:
            found = dry_run(script, wanted, on_plan=lambda function: show(f"tracing a step of {function}, and planning"))
        except ScriptFailed as error:
            if error.__cause__ is not None and not isinstance(error.__cause__, SystemExit):
                logging.getLogger(__name__).error("the script's own traceback:", exc_info=error.__cause__)
            print(f"lightning-autopar: {error}", file=sys.stderr)
            return _FAILED
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
    if found.function != "fit":
        console.print(f"The script calls {found.function}, not fit; this is its plan.")
    console.print(report.table())
    candidate = report.shown_candidate()
    if candidate is not None:
        console.print(by_category(report, candidate))
        console.print(by_part(report))
    console.print(by_layer(report.footprint))


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What came of it.

    Args:
        function: what the script was about to do: ``"fit"``, or ``"validate"``, ``"test"``, ``"predict"`` where it never came to fit.
        report: every plan for that, also where none fits.
        replaced: the strategy that the script names itself, if it names another one than ours.
        batches: training batches of the whole fit, at most; None where nobody knows, and where nothing is trained.
        batch: whether plans split a batch, or give each device batches of its own.
        elastic: whether a callback moves the run by itself, as ElasticReplan does.
    """

    function: str
    report: Report
    replaced: Replaced | None = None
    batches: int | None = None
    batch: BatchRule = "global"
    elastic: bool = False

    def seconds(self, candidate: Candidate) -> float | None:
        """How long the run trains under a plan by its prediction, without start and validation; None where nobody knows."""
        if self.batches is None or candidate.seconds is None:
            return None
        ranks = candidate.plan.data_ranks if self.batch == "per_device" else 1
        return -(-self.batches // ranks) * candidate.step_seconds


class ScriptFailed(Exception):
    """The script ended before it called the trainer; its own exception, if any, is the cause."""


class _Planned(BaseException):
    """Leaves the user's script, past its ``except Exception``."""


def dry_run(script: Script, wanted: Wanted | None = None, *, on_plan: Callable[[str], None] = lambda function: None) -> DryRun:
    """Run a script as Python would, until it calls ``fit``.

    Calls of ``validate``, ``test`` and ``predict`` before that are planned for, return an empty list and run nothing. The script's Trainer
    gets our strategy, if it names another one.

    Args:
        script: what to run.
        wanted: what to plan for, beside what the script says.
        on_plan: told of each function of the trainer that is about to be planned for.

    Raises:
        ScriptFailed: if the script ended or failed before any call of the trainer.
        ValueError: if there is no such script, or the Trainer's devices can't be had here.
    """
    found: list[DryRun] = []
    failure: BaseException | None = None
    with _planning(found, Wanted() if wanted is None else wanted, on_plan):
        try:
            script.run()
        except _Planned:
            pass
        except SystemExit as error:
            failure = error if error.code else None
        except Exception as error:
            failure = error
    if not found:
        if isinstance(failure, ValueError):
            raise failure
        how = f"failed ({type(failure).__name__}: {failure})" if failure is not None else "ended"
        raise ScriptFailed(
            f"{script.name} {how} before it called fit, validate, test or predict of lightning.pytorch's Trainer"
        ) from failure
    if failure is not None:
        rank_zero_warn(f"autopar: {script.name} failed after {found[-1].function}, which returned nothing ({failure!r})")
    return found[-1]


@contextmanager
def _planning(found: list[DryRun], wanted: Wanted, on_plan: Callable[[str], None]) -> Iterator[None]:
    """Every Trainer gets our strategy, and plans instead of running."""
    built: list[Replacement] = []

    def launch(launcher: AutoLauncher, function: Callable[..., Any], *args: Any, trainer: Trainer, **kwargs: Any) -> Any:
        attach_data(trainer, run_arguments(function, args, kwargs))
        strategy = launcher._strategy
        name = str(trainer.state.fn.value) if trainer.state.fn is not None else "fit"
        on_plan(name)
        batches = None
        try:
            report, findings = survey(trainer, strategy.settings, strategy.inventory())
            batches = findings.batches
        except NothingFits as error:
            report = error.report
        replaced = next(each.replaced for each in built if each.strategy is strategy)
        rule = strategy.settings.batch
        elastic = name == "fit" and rule == "global" and bool(watchers(trainer))
        found.append(DryRun(function=name, report=report, replaced=replaced, batches=batches, batch=rule, elastic=elastic))
        if name != "fit":
            return []
        strategy.mute(trainer)  # no hook of a callback or DataModule is told of an exception: there was no run
        raise _Planned

    original = AutoLauncher.launch
    AutoLauncher.launch = functools.wraps(original)(launch)  # type: ignore[method-assign, assignment]
    try:
        with strategies_replaced(built, wanted):
            yield
    finally:
        AutoLauncher.launch = original  # type: ignore[method-assign]
