"""After a run: what a step took is kept, and corrects the next prediction on this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar.memory.device_bytes import DeviceBytes
from lightning_autopar.memory.learned.step_times import LEAST, MOST, load_step_times
from lightning_autopar.plans import Plan
from lightning_autopar.report.report import Candidate
from lightning_autopar.strategies import launcher
from lightning_autopar.strategies.auto import AutoParallelStrategy
from lightning_autopar.strategies.base.worker_exception import LACKED
from lightning_autopar.strategies.preparation import finished_run as account
from lightning_autopar.strategies.processes import worker


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def train(path: Path, steps: int = 8, engine: str = "single", module: L.LightningModule | None = None) -> AutoParallelStrategy:
    strategy = AutoParallelStrategy(devices="2xcpu:256MiB", allow=[engine], calibrate="off")
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}
    trainer = L.Trainer(default_root_dir=path, accelerator="cpu", strategy=strategy, max_steps=steps, **quiet)
    trainer.fit(module or Module(), DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=4))
    return strategy


@pytest.mark.parametrize("engine", ["single", "ddp"])
def test_a_run_corrects_the_next_prediction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(account, "disturbed", lambda report, measured: None)  # whatever else runs on this machine
    first = train(tmp_path, engine=engine)
    assert first.report is not None
    before = first.report.best_candidate
    assert before is not None
    assert before.seconds is not None
    slowest = max(values["step_seconds"] for values in first.measured.values())
    kept = load_step_times(first.report.inventory.host_threads)
    assert [record.rates for record in kept] == ["data sheet"]
    assert kept[0].measured == slowest
    assert kept[0].predicted == pytest.approx(before.seconds.step)

    second = train(tmp_path, engine=engine)
    assert second.report is not None
    after = second.report.best_candidate
    assert after is not None
    assert after.seconds is not None
    factor = min(MOST, max(LEAST, kept[0].ratio))
    assert after.seconds.step == pytest.approx(before.seconds.step * factor, rel=0.021)
    assert any("time corrected ×" in told for told in after.learned) or abs(factor - 1) < 0.02
    newest = load_step_times(first.report.inventory.host_threads)[0]
    assert newest.predicted == pytest.approx(before.seconds.step), "what is kept is compared with the prediction before any correction"


def test_a_disturbed_run_teaches_nothing_about_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(account, "disturbed", lambda report, measured: "others kept the machine busy")
    with caplog.at_level("INFO"):
        strategy = train(tmp_path)
    assert strategy.report is not None
    assert load_step_times(strategy.report.inventory.host_threads) == ()
    assert "this run's step times don't count for the next plan: others kept the machine busy" in caplog.text


def test_what_a_run_measured_says_whether_it_was_disturbed(tmp_path: Path) -> None:
    strategy = train(tmp_path, engine="ddp")
    report = strategy.report
    assert report is not None
    assert {type(values["step_spread"]) for values in strategy.measured.values()} == {float}
    assert all(0 <= values["waited_share"] <= 1 for values in strategy.measured.values())
    quiet = {device: {**values, "step_spread": 0.1, "waited_share": 0.05} for device, values in strategy.measured.items()}
    assert account.disturbed(report, quiet) is None
    for name, value in (("waited_share", 0.9), ("step_spread", 0.9), ("waited_share", None), ("step_spread", None)):
        assert account.disturbed(report, {**quiet, "cpu:1": {**quiet["cpu:1"], name: value}}) is not None
    slow = replace(report.inventory.devices[0], slowdown=2.0)
    beside = replace(report, inventory=replace(report.inventory, devices=(slow, *report.inventory.devices[1:])))
    assert "kept its devices busy: 50 %" in (account.disturbed(beside, quiet) or "")


def test_a_run_that_is_too_short_teaches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "cache"))
    strategy = train(tmp_path, steps=2)
    assert strategy.report is not None
    assert load_step_times(strategy.report.inventory.host_threads) == ()


@pytest.mark.parametrize("engine", ["single", "ddp"])
def test_a_plan_that_ran_out_of_memory_is_not_counted_on_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "cache"))
    for module in (launcher, worker):
        monkeypatch.setattr(module, "explain", ran_out)
    with pytest.raises(torch.OutOfMemoryError, match="of device 0"):
        train(tmp_path, engine=engine, module=Short())
    monkeypatch.undo()
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "cache"))
    again = train(tmp_path, engine=engine, module=Short(steps=99))
    assert again.report is not None
    best = again.report.best_candidate
    assert best is not None
    assert {need.reserved for need in best.bytes.values()} == {round(LACKING * 1.05)}
    assert any("ran out of memory on" in note for note in best.learned)


def test_a_run_whose_batches_came_in_more_parts_teaches_what_the_plan_lacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "cache"))
    first = train(tmp_path)
    assert first.report is not None
    times = load_step_times(first.report.inventory.host_threads)
    account.learn(first.report, {device: {**values, "lacked_bytes": LACKING} for device, values in first.measured.items()})
    assert load_step_times(first.report.inventory.host_threads) == times, "its steps were those of more parts"
    again = train(tmp_path, steps=2)
    assert again.report is not None
    best = again.report.best_candidate
    assert best is not None
    assert all(need.reserved >= LACKING for need in best.bytes.values())
    assert any("ran out of memory on" in note for note in best.learned)


LACKING = 16 * 1024


class Short(Module):
    """Runs out of memory, where nothing but the run itself looks."""

    def __init__(self, steps: int = 1) -> None:
        super().__init__()
        self.steps = steps

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step >= self.steps:
            raise torch.OutOfMemoryError("of device 0")


def ran_out(engine: Any, error: BaseException) -> None:
    """As a GPU's engine would say it."""
    vars(error)[LACKED] = dict.fromkeys(engine.run_plan.plan.devices, LACKING)


def test_a_prediction_for_a_validation_is_not_compared_with_a_training_steps_bytes(caplog: pytest.LogCaptureFixture) -> None:
    plan = Plan(engine="single", devices=("cpu:0",))
    candidate = Candidate(plan=plan, fits=True, bytes={"cpu:0": DeviceBytes(activations=1 << 20, occasion="validation")})
    report = SimpleNamespace(best_candidate=candidate, footprint=SimpleNamespace(lengths=None))
    with caplog.at_level("INFO"):
        account.announce_measured(cast(Any, report), {"cpu:0": {"peak_bytes": 1 << 19, "step_seconds": None}})
    assert "1 MiB predicted for a validation, 512 KiB measured in a training step" in caplog.text
    assert "%" not in caplog.text
