"""Run one plan of one scenario for a few steps, in a process of its own, and see what it took. It judges nothing.

Every question is answered in a forked child, so that the imports are paid for once and no run leaves anything behind for the next.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from decisions.models import MODELS
from decisions.scenarios import Scenario
from lightning_autopar import AutoParallelStrategy, NothingFits, Plan, Report
from lightning_autopar._lightning_compat import attach_data, run_arguments
from lightning_autopar.strategies.calibration.calibration import calibrate
from lightning_autopar.strategies.launcher import AutoLauncher
from lightning_autopar.strategies.preparation import planning_inputs

#: The first two steps say nothing of time, the next two are recorded for their memory, and the one after that puts the record away.
WARM_UP = 5
_TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Took:
    """What a run took.

    Args:
        steps: seconds of each step after the first :data:`WARM_UP`, on rank 0.
        peak_bytes: by device id; None where the run didn't measure it.
        error: the exception's last line, if the run failed.
    """

    steps: tuple[float, ...] = ()
    peak_bytes: dict[str, int | None]
    error: str | None = None


class RunFailed(RuntimeError):
    """The child ended without an answer, or with an exception."""


#: What was found out about a scenario's module and batch, by what was asked: the same for each of its runs, and found out once.
_findings: dict[Scenario, dict[str, Any]] = {}


def ask_planner(scenario: Scenario, cache: Path) -> Report:
    """The planner's report for the scenario, as a run under ``Trainer(strategy="autopar")`` would make it; also where nothing fits.

    Args:
        scenario: which.
        cache: a folder for the machine's measured rates, which are measured where they aren't there yet; no run leaves anything there.
    """
    report, found = _in_child(_plan, scenario, cache)
    _findings[scenario] = found
    return report  # type: ignore[no-any-return]


def run(scenario: Scenario, plan: Plan, steps: int) -> Took:
    """So many measured steps of a plan, whether or not the scenario's budgets have room for it."""
    known = _findings.setdefault(scenario, {})
    try:
        took, _findings[scenario] = _in_child(_train, scenario, plan, WARM_UP + steps, known)
    except RunFailed as error:
        return Took(peak_bytes={}, error=str(error))
    return took  # type: ignore[no-any-return]


class _Asked(BaseException):
    """Leaves ``fit`` before anything runs."""


def _plan(scenario: Scenario, cache: Path) -> tuple[Report, dict[str, Any]]:
    os.environ["AUTOPAR_CACHE"] = str(cache)
    calibrate(scenario.inventory, progress=False)
    reports: list[Report] = []

    def launch(launcher: AutoLauncher, function: Callable[..., Any], *arguments: Any, trainer: pl.Trainer, **named: Any) -> None:
        attach_data(trainer, run_arguments(function, arguments, named))
        strategy = trainer.strategy
        assert isinstance(strategy, AutoParallelStrategy), "asked for"
        try:
            reports.append(planning_inputs.plan_only(trainer, strategy.settings, strategy.inventory())[0])
        except NothingFits as error:
            reports.append(error.report)
        raise _Asked

    known: dict[str, Any] = {}
    with mock.patch.object(AutoLauncher, "launch", launch), tempfile.TemporaryDirectory() as folder, contextlib.suppress(_Asked):
        _fit(scenario, AutoParallelStrategy(devices=scenario.devices), 1, known, folder)
    return reports[0], known


def _fit(
    scenario: Scenario, strategy: AutoParallelStrategy, steps: int, known: dict[str, Any], folder: str, *callbacks: pl.Callback
) -> None:
    """So many steps. What is found out about the module is taken from ``known``, or put there."""
    model = MODELS[scenario.model]
    torch.manual_seed(0)
    module = model.build()
    data = model.data(scenario.batch)
    loader = DataLoader(data.repeat(steps, *[1] * (data.dim() - 1)), batch_size=scenario.batch)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", max_epochs=1, callbacks=list(callbacks), default_root_dir=folder, **quiet)
    with remembering(known):
        trainer.fit(module, loader)


@contextlib.contextmanager
def remembering(known: dict[str, Any]) -> Iterator[None]:
    """Inside, planning takes what it would find out about a module from ``known``, or puts it there."""
    look = planning_inputs.find_out

    def remembered(trainer: pl.Trainer, *arguments: Any) -> Any:
        asked = repr(arguments)  # they hold mappings
        if asked not in known:
            known[asked] = look(trainer, *arguments)
        return known[asked]

    with mock.patch.object(planning_inputs, "find_out", remembered):
        yield


class _Clock(pl.Callback):
    """When each step of rank 0 began, left in a file at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begun: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self.begun.append(time.perf_counter())

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_rank == 0:
            self.path.write_text(json.dumps(self.begun), encoding="utf-8")


def _train(scenario: Scenario, plan: Plan, steps: int, known: dict[str, Any]) -> tuple[Took, dict[str, Any]]:
    strategy = AutoParallelStrategy(plan=plan, devices=scenario.ample_devices)
    with tempfile.TemporaryDirectory() as folder:
        clock = _Clock(Path(folder) / "steps.json")
        _fit(scenario, strategy, steps + 1, known, folder, clock)
        begun = json.loads(clock.path.read_text(encoding="utf-8"))
    times = [later - earlier for earlier, later in itertools.pairwise(begun)]
    peaks = {device: values["peak_bytes"] for device, values in strategy.measured.items()}
    return Took(steps=tuple(times[WARM_UP:]), peak_bytes=peaks), known


def _in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result from a forked child.

    Raises:
        RunFailed: if it has none.
    """
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(writer, function, arguments))
    child.start()
    writer.close()
    try:
        if not reader.poll(_TIMEOUT_SECONDS):
            raise RunFailed(f"no answer within {_TIMEOUT_SECONDS:g} s")
        succeeded, value = reader.recv()
    except EOFError:
        child.join()
        raise RunFailed(f"the run ended with exit code {child.exitcode}") from None
    finally:
        if child.is_alive():
            child.join(5.0)
        if child.is_alive():
            child.kill()
        child.join()
        reader.close()
    if not succeeded:
        raise RunFailed(value)
    return value


def _answer(writer: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ["AUTOPAR_CACHE"] = "off"  # what one run took must not correct the next one's prediction
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_autopar"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        writer.send((True, function(*arguments)))
    except Exception as error:  # whatever it is, it is this plan's result
        writer.send((False, traceback.format_exception_only(error)[-1].strip()[:500]))
    writer.close()
