"""PlanMonitor under every engine: what it shows, logs, warns of and leaves behind."""

from __future__ import annotations

import csv
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger, Logger

import lightning_autopar
from lightning_autopar import PlanMonitor
from lightning_autopar.callbacks.plan_monitor import PlanMonitor as Monitor
from tests.strategies.modules import Regression, loader, trainer

CATEGORIES = {"parameters", "gradients", "optimizer", "buffers", "rest", "allocated"}


class Notebook(Logger):
    """Writes down in a file what it is told, since it may be told in another process."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    name = "notebook"
    version = 0

    def _write(self, kind: str, values: Any, step: int | None) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps([kind, os.getpid(), step, {str(key): value for key, value in dict(values).items()}], default=str) + "\n")

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self._write("metrics", metrics, step)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self._write("hyperparameters", params, None)

    def told(self, kind: str) -> list[Any]:
        lines = map(json.loads, self.path.read_text().splitlines())
        return [line for line in lines if line[0] == kind and any(name.startswith("autopar/") for name in line[3])]


@pytest.mark.parametrize("engine", ["single", "ddp", "fsdp"])
def test_every_ranks_figures_are_shown_and_logged(engine: str, tmp_path: Path, said: Path) -> None:
    monitor, notebook = PlanMonitor(), Notebook(tmp_path / "notebook")
    loggers = [CSVLogger(tmp_path, name="csv"), notebook]
    run = trainer(engine, tmp_path, callbacks=[monitor], logger=loggers, max_epochs=1)
    run.fit(Regression(width=256), loader(64), loader(8))
    devices = run.strategy.plan.devices
    assert [each.device for each in monitor.comparisons] == list(devices)
    predicted = run.strategy.report.best_candidate.bytes
    for each in monitor.comparisons:
        measured = run.strategy.measured[each.device]
        assert set(each.predicted) == set(each.measured) == CATEGORIES
        assert each.measured["allocated"] == sum(measured["bytes"].values()) == measured["peak_bytes"]
        assert each.predicted["allocated"] == predicted[each.device].allocated == sum(each.predicted.values()) // 2
        assert each.measured["parameters"] == pytest.approx(each.predicted["parameters"], rel=0.01)
        assert each.measured["optimizer"] == pytest.approx(each.predicted["optimizer"], rel=0.01)
        assert each.measured_seconds > 0
        assert each.predicted_seconds == run.strategy.report.best_candidate.step_seconds

    (_, _, begun, first), (_, pid, step, told) = notebook.told("metrics")
    assert begun == 0
    assert first == {
        "autopar/world_size": len(devices),
        "autopar/predicted_step_seconds": run.strategy.report.best_candidate.step_seconds,
        "autopar/predicted_peak_bytes": max(held.allocated for held in predicted.values()),
    }
    assert (pid == os.getpid()) == (engine == "single")
    assert step == run.global_step
    assert len(told) == len(devices) * (2 * len(CATEGORIES) + 2)
    last = monitor.comparisons[-1]
    assert told[f"autopar/rank{len(devices) - 1}/measured_bytes/rest"] == last.measured["rest"]
    assert told["autopar/rank0/predicted_bytes/allocated"] == monitor.comparisons[0].predicted["allocated"]
    (_, _, _, plan) = notebook.told("hyperparameters")[-1]
    assert len(notebook.told("hyperparameters")) == 1
    named = {
        "autopar/plan": run.strategy.plan.title(),
        "autopar/engine": engine,
        "autopar/devices": "cpu:0" if engine == "single" else "cpu:0-1",
    }
    assert plan == {**first, **named, "autopar/world_size": len(devices)}

    with (tmp_path / "csv" / "version_0" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["autopar/rank0/measured_bytes/allocated"]]
    assert [float(row["autopar/rank0/measured_bytes/allocated"]) for row in rows] == [monitor.comparisons[0].measured["allocated"]]

    shown = said.read_text()
    assert shown.count("predicted and measured") == 1
    assert all(any(line.startswith(f" {device} ") for line in shown.splitlines()) for device in devices)
    assert "activations and the rest" in shown
    assert "a step" in shown


def test_without_loggers_and_without_a_run_long_enough(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = PlanMonitor()
    trainer("single", tmp_path, callbacks=[monitor], logger=False, max_steps=2).fit(Regression(), loader(), loader(8))
    assert monitor.comparisons[0].measured == {}
    assert monitor.comparisons[0].measured_seconds is None
    assert monitor.comparisons[0].predicted["allocated"] > 0
    assert "predicted and measured" in caplog.text


def test_it_warns_of_a_device_that_took_more_than_was_allowed_for(tmp_path: Path) -> None:
    def shrink(module: Regression, index: int) -> None:
        if os.getpid() == parent:
            engine: Any = module.trainer.strategy
            candidate = engine.run_plan.candidate
            engine.run_plan = replace(engine.run_plan, candidate=replace(candidate, needs={"cpu:0": 1024}), budgets={"cpu:0": 2048})

    parent = os.getpid()
    with pytest.warns(UserWarning, match=r"cpu:0 took .* MiB, .* MiB more than the 1 KiB allowed for; it is .* MiB beyond the 2 KiB"):
        trainer("single", tmp_path, callbacks=[PlanMonitor()], max_epochs=1).fit(
            Regression({"on_fit_start": shrink}, width=2**15), loader(64), loader(8)
        )


def test_under_another_strategy_it_says_so_once_and_does_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = PlanMonitor()
    for _ in range(2):
        trainer("plain", tmp_path, callbacks=[monitor], max_steps=4).fit(Regression(), loader(), loader(8))
    assert monitor.comparisons == ()
    assert caplog.text.count("there is no plan to watch, as the strategy is SingleDeviceStrategy") == 1


def test_evaluations_are_no_business_of_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = PlanMonitor()
    trainer("single", tmp_path, callbacks=[monitor]).validate(Regression(), loader(8), verbose=False)
    assert monitor.comparisons == ()
    assert "PlanMonitor" not in caplog.text


def test_a_run_with_it_computes_what_a_run_without_it_does(tmp_path: Path) -> None:
    finals = []
    for callbacks in ([], [PlanMonitor()]):
        torch.manual_seed(0)
        module = Regression(dropout=0.5)
        trainer("ddp", tmp_path, callbacks=callbacks).fit(module, loader(64), loader(8))
        finals.append(torch.cat([parameter.detach().flatten() for parameter in module.parameters()]))
    assert torch.equal(*finals)


def test_it_is_named_in_yaml_by_the_packages_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("trainer:\n  logger: false\n  callbacks:\n    - class_path: lightning_autopar.PlanMonitor\n")
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", str(config)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own, about its use of jsonargparse
        cli = LightningCLI(Regression, run=False, save_config_callback=None, seed_everything_default=False)
    assert any(isinstance(callback, Monitor) for callback in cli.trainer.callbacks)


def test_the_name_is_exported_without_importing_torch() -> None:
    assert lightning_autopar.PlanMonitor is Monitor
    code = "import lightning_autopar, sys; assert 'PlanMonitor' in dir(lightning_autopar); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


@pytest.fixture
def said(tmp_path: Path) -> Iterator[Path]:
    """What is logged, in workers as well."""
    handler = logging.FileHandler(tmp_path / "said")
    logger = logging.getLogger("lightning.pytorch")
    logger.addHandler(handler)
    yield tmp_path / "said"
    logger.removeHandler(handler)
    handler.close()
