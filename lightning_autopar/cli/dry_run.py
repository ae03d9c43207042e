"""Run somebody's script up to ``fit``, or ``train`` of transformers' Trainer, plan for what it was about to do, and train nothing.

Knows the Trainers and our strategy, which it imports when the script builds its Trainer. Knows nothing of the command line that asks for
it, nor of how a report is shown.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_autopar.cli.first_trainer import Wanted, at_first_trainer
from lightning_autopar.huggingface.train_calls import trainers_planned
from lightning_autopar.strategies.processes.users_script import Script, is_ours

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_autopar.cli.replace_strategy import Replaced, Replacement
    from lightning_autopar.report.report import Candidate, Report
    from lightning_autopar.strategies.base.run_plan import BatchRule
    from lightning_autopar.strategies.launcher import AutoLauncher


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
