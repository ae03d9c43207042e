"""``lightning-autopar plan SCRIPT``: run a script up to ``fit`` (transformers' ``train``), print every plan, and train nothing.

Our strategy is imported when the script builds its Trainer.
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
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

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
from lightning_autopar.cli.first_trainer import Wanted, at_first_trainer
from lightning_autopar.cli.spinner import progress
from lightning_autopar.huggingface.train_calls import trainers_planned
from lightning_autopar.strategies.processes.users_script import Script, is_ours

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_autopar.cli.replace_strategy import Replaced, Replacement
    from lightning_autopar.report.report import Candidate, Report
    from lightning_autopar.strategies.base.run_plan import BatchRule
    from lightning_autopar.strategies.launcher import AutoLauncher

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
                from lightning_autopar.strategies.base.worker_exception import users_part

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


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What came of it.

    Args:
        function: what the script was about to do: ``"fit"``, or ``"validate"``, ``"test"``, ``"predict"`` where it never came to fit;
            ``"train"`` of transformers' Trainer.
        report: every plan for that, even if none fits.
        replaced: the script's strategy, if it names another one than ours.
        batches: training batches of the whole fit, at most (of transformers' Trainer, the optimizer's steps); None where nobody knows, and
            where nothing is trained.
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
    """Ends the user's script; its ``except Exception`` doesn't catch this."""


def dry_run(script: Script, wanted: Wanted | None = None, *, on_plan: Callable[[str], None] = lambda function: None) -> DryRun:
    """Run a script as Python would, until it calls ``fit``.

    Calls of ``validate``, ``test`` and ``predict`` before that are planned for, return an empty list and run nothing; of transformers'
    Trainer a call of ``evaluate`` runs nothing. The script's Trainer gets our strategy, if it names another one.

    Args:
        on_plan: told of each function of the trainer that is about to be planned for.

    Raises:
        ScriptFailed: if the script ended or failed before any call of the trainer.
        ValueError: if there is no such script, or the Trainer's devices aren't here.
    """
    found: list[DryRun] = []
    left_out: list[str] = []
    failure: BaseException | None = None
    asked = Wanted() if wanted is None else wanted
    lightnings = at_first_trainer(lambda: _planning(found, asked, on_plan))
    with lightnings, trainers_planned(partial(_plan_for_train, found, asked, on_plan), left_out=left_out):
        try:
            script.run()
        except _Planned:
            pass
        except SystemExit as error:
            failure = error if error.code else None
        except Exception as error:
            failure = error
    if not found:
        if is_ours(failure):
            raise failure
        how = f"failed ({type(failure).__name__}: {failure})" if failure is not None else "ended"
        alone = "; for an evaluation alone there is nothing to plan: start the script without lightning-autopar" if left_out else ""
        raise ScriptFailed(
            f"{script.name} {how} before it called fit, validate, test or predict of Lightning's Trainer, or train of transformers'{alone}"
        ) from failure
    if failure is not None:
        from lightning_autopar._lightning import rank_zero_warn

        rank_zero_warn(f"autopar: {script.name} failed after {found[-1].function}, which here only plans and returns None ({failure!r})")
    return found[-1]


def _plan_for_train(found: list[DryRun], wanted: Wanted, on_plan: Callable[[str], None], trainer: Any) -> None:
    """Plan for what transformers' Trainer was about to do, and end the script."""
    from lightning_autopar.huggingface.planning import Asked, plan_for

    on_plan("train")
    planned = plan_for(trainer, Asked(devices=wanted.devices, trainer_devices=wanted.trainer_devices, options=wanted.options))
    found.append(DryRun(function="train", report=planned.report, batches=planned.steps))
    raise _Planned


@contextmanager
def _planning(found: list[DryRun], wanted: Wanted, on_plan: Callable[[str], None]) -> Iterator[None]:
    """While open, every Trainer gets our strategy, and plans instead of running."""
    from lightning_autopar._lightning_compat import attach_data, run_arguments
    from lightning_autopar._temporary import patched
    from lightning_autopar.cli.replace_strategy import strategies_replaced
    from lightning_autopar.report.report import NothingFits
    from lightning_autopar.strategies.elastic.start_elastic_fit import watchers
    from lightning_autopar.strategies.launcher import AutoLauncher
    from lightning_autopar.strategies.preparation.planning_inputs import plan_only

    built: list[Replacement] = []

    def launch(launcher: AutoLauncher, function: Callable[..., Any], *args: Any, trainer: Trainer, **kwargs: Any) -> Any:
        attach_data(trainer, run_arguments(function, args, kwargs))
        strategy = launcher._strategy
        name = str(trainer.state.fn.value) if trainer.state.fn is not None else "fit"
        on_plan(name)
        batches = None
        try:
            report, findings = plan_only(trainer, strategy.settings, strategy.inventory())
            batches = findings.batches
        except NothingFits as error:
            report = error.report
        replaced = next(each.replaced for each in built if each.strategy is strategy)
        rule = strategy.settings.batch
        elastic = name == "fit" and rule == "global" and bool(watchers(trainer))
        found.append(DryRun(function=name, report=report, replaced=replaced, batches=batches, batch=rule, elastic=elastic))
        if name != "fit":
            return []
        strategy.mute(trainer)  # no exception hook of a callback or DataModule is called: there was no run
        raise _Planned

    with patched(AutoLauncher, "launch", functools.wraps(AutoLauncher.launch)(launch)), strategies_replaced(built, wanted):
        yield
