"""Run somebody's script up to ``fit``, plan for what it was about to do, and train nothing.

Knows the Trainer and our strategy; nothing of the command line that asks for it, nor of how a report is shown.
"""

from __future__ import annotations

import functools
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_autopar._lightning_compat import attach_data, requests_changed, run_arguments
from lightning_autopar.planning.report import NothingFits, Report
from lightning_autopar.strategies.auto import AutoParallelStrategy
from lightning_autopar.strategies.decide import survey
from lightning_autopar.strategies.launcher import AutoLauncher


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What came of it.

    Args:
        function: what the script was about to do: ``"fit"``, or ``"validate"``, ``"test"``, ``"predict"`` where it never came to fit.
        report: every plan for that, also where none fits.
        replaced: the strategy that the script names itself, if it names another one than ours.
    """

    function: str
    report: Report
    replaced: str | None = None


class ScriptFailed(Exception):
    """The script ended before it called the trainer; its own exception, if any, is the cause."""


class _Planned(BaseException):
    """Leaves the user's script, past its ``except Exception``."""


def dry_run(script: str | Path, arguments: Sequence[str] = (), *, devices: str | None = None) -> DryRun:
    """Run a script as ``python script arguments…`` would, until it calls ``fit``.

    Calls of ``validate``, ``test`` and ``predict`` before that are planned for, return an empty list and run nothing. The script's Trainer
    gets our strategy, if it names another one.

    Args:
        script: path of a Python file.
        arguments: its command-line arguments.
        devices: the spec of what to plan for; what the script's Trainer would find, unless given.

    Raises:
        ScriptFailed: if the script ended or failed before any call of the trainer.
        ValueError: if there is no such file, or the Trainer's devices can't be had here.
    """
    path = Path(script)
    if not path.is_file():
        raise ValueError(f"there is no script {str(script)!r}; give the path of the Python file that calls fit")
    found: list[DryRun] = []
    failure: BaseException | None = None
    with _as_main(path, arguments), _planning(found, devices):
        try:
            runpy.run_path(str(path), run_name="__main__")
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
        raise ScriptFailed(f"{path.name} {how} before it called fit, validate, test or predict of lightning.pytorch's Trainer") from failure
    if failure is not None:
        rank_zero_warn(f"autopar: {path.name} failed after {found[-1].function}, which returned nothing ({failure!r})")
    return found[-1]


@contextmanager
def _as_main(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    """``sys.argv`` and ``sys.path`` as a script finds them."""
    before = sys.argv[:], sys.path[:]
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path = before


@contextmanager
def _planning(found: list[DryRun], devices: str | None) -> Iterator[None]:
    """Every Trainer gets our strategy, and plans instead of running."""
    named: list[str | None] = []

    def change(request: dict[str, Any]) -> dict[str, Any]:
        asked = request.get("strategy", "auto")
        ours = asked if isinstance(asked, AutoParallelStrategy) else AutoParallelStrategy(devices=devices)
        if devices is not None:
            ours.plan_for(devices)
            # What the script asks for needn't be here; what is planned for is in the spec.
            request = {**request, "accelerator": "cpu", "devices": 1, "num_nodes": 1}
        named.append(None if asked == "autopar" or ours is asked else asked if isinstance(asked, str) else type(asked).__name__)
        return {**request, "strategy": ours}

    def launch(launcher: AutoLauncher, function: Callable[..., Any], *args: Any, trainer: Trainer, **kwargs: Any) -> Any:
        attach_data(trainer, run_arguments(function, args, kwargs))
        strategy = launcher._strategy
        try:
            report = survey(trainer, strategy.settings, strategy.inventory())[0]
        except NothingFits as error:
            report = error.report
        name = str(trainer.state.fn.value) if trainer.state.fn is not None else "fit"
        found.append(DryRun(function=name, report=report, replaced=named[-1]))
        if name != "fit":
            return []
        strategy.mute(trainer)  # no hook of a callback or DataModule is told of an exception: there was no run
        raise _Planned

    original = AutoLauncher.launch
    AutoLauncher.launch = functools.wraps(original)(launch)  # type: ignore[method-assign, assignment]
    try:
        with requests_changed(change):
            yield
    finally:
        AutoLauncher.launch = original  # type: ignore[method-assign]
