"""The trial: the fastest of the best plans is taken, and the run is what it would have been without."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.plans import Plan
from lightning_autopar.report.report import Candidate, Report
from lightning_autopar.strategies.auto import AutoParallelStrategy
from lightning_autopar.strategies.base.run_plan import RunPlan
from lightning_autopar.strategies.preparation import decide as deciding
from lightning_autopar.strategies.preparation import plan_trial
from lightning_autopar.strategies.preparation.decision import Decision
from lightning_autopar.strategies.preparation.plan_trial import Outcome, choose
from lightning_autopar.timing.data_sheet import DataSheet
from lightning_autopar.timing.measured_curves import Calibration
from lightning_autopar.timing.measured_rates import MeasuredRates
from lightning_autopar.timing.step_seconds import Seconds

INVENTORY = parse_spec("2xcpu:64MiB", cores=2)
PLANS = {
    "single": Plan(engine="single", devices=("cpu:0",)),
    "ddp": Plan(engine="ddp", devices=("cpu:0", "cpu:1")),
    "fsdp": Plan(engine="fsdp", devices=("cpu:0", "cpu:1"), reshard_after_forward=True),
    "kept": Plan(engine="fsdp", devices=("cpu:0", "cpu:1"), reshard_after_forward=False),
}
FOOTPRINT = Footprint(
    parameters=8,
    trainable_parameters=8,
    batch_size=4,
    parameter_bytes=32,
    gradient_bytes=32,
    optimizer_bytes=64,
    buffer_bytes=0,
    activation_bytes=8,
    temporary_bytes=8,
    input_bytes=8,
)


def decision(**seconds: float) -> Decision:
    """Plans in the order given, with these predicted seconds a step; a negative one doesn't fit."""
    candidates = tuple(
        Candidate(plan=PLANS[name], fits=each > 0, reason=None if each > 0 else "too large", seconds=Seconds(compute=abs(each)))
        for name, each in seconds.items()
    )
    report = Report(inventory=INVENTORY, footprint=FOOTPRINT, candidates=candidates, best_index=0)
    best = candidates[0]
    devices = tuple(INVENTORY.device(device) for device in best.plan.devices)
    return Decision(report=report, run_plan=RunPlan(plan=best.plan, devices=devices, candidate=best))


def run_of(times: dict[str, float | None], tried: list[str] | None = None) -> plan_trial.Run:
    def run(run_plan: RunPlan, steps: int, timeout_seconds: float) -> Outcome:
        name = next(name for name, plan in PLANS.items() if plan == run_plan.plan)
        assert steps > plan_trial._WARM_UP
        assert timeout_seconds > 0
        assert [device.id for device in run_plan.devices] == list(run_plan.plan.devices)
        if tried is not None:
            tried.append(name)
        seconds = times[name]
        return Outcome(step_seconds=seconds, reason="" if seconds else "it crashed")

    return run


def test_the_fastest_is_taken_and_says_why() -> None:
    ticks = iter([10.0, 14.5])
    predicted = decision(single=1.0, ddp=1.1, fsdp=1.2)
    predicted = replace(predicted, run_plan=replace(predicted.run_plan, findings={"single": "one", "ddp": "two"}))
    found = choose(predicted, run_of({"single": 1.5, "ddp": 0.9, "fsdp": 2.0}), clock=lambda: next(ticks))
    assert found.run_plan.plan.engine == "ddp"
    assert found.run_plan.finding == "two", "what its own engine found"
    assert found.report.best == found.run_plan.plan
    assert len(found.run_plan.devices) == 2
    assert found.run_plan.candidate == found.report.best_candidate
    assert [candidate.plan.engine for candidate in found.report.candidates] == ["ddp", "single", "fsdp"]
    reason = found.run_plan.plan.reasons[-1]
    assert reason == (
        "the fastest of 3 plans tried on this run's batches, 900 ms a step (single 1.5 s, fsdp ×2, reshard 2 s); the trial took 4.5 s"
    )
    assert found.report.candidates[1].learned == ("1.5 s a step in the trial",)


def test_noise_does_not_change_the_order() -> None:
    found = choose(decision(single=1.0, ddp=1.1), run_of({"single": 1.02, "ddp": 1.0}))
    assert found.run_plan.plan.engine == "single"


@pytest.mark.parametrize(
    ("seconds", "tried"),
    [
        ({"single": 1.0}, []),
        ({"single": 1.0, "ddp": -1.0}, []),
        ({"single": 1.0, "ddp": 2.5}, []),
        ({"fsdp": 1.0, "kept": 1.1, "ddp": 1.2, "single": 1.3}, ["fsdp", "ddp", "single"]),
        ({"fsdp": 1.0, "kept": 1.1, "ddp": 1.2, "single": 9.0}, ["fsdp", "kept", "ddp"]),
    ],
)
def test_what_is_worth_a_trial(seconds: dict[str, float], tried: list[str]) -> None:
    found: list[str] = []
    before = decision(**seconds)
    after = choose(before, run_of(dict.fromkeys(PLANS, 1.0), found))
    assert found == tried
    assert tried or after is before


def test_a_plan_that_fails_is_out() -> None:
    with pytest.warns(UserWarning, match=r"the trial of single measured no step time: it crashed"):
        found = choose(decision(single=1.0, ddp=1.1, fsdp=1.2), run_of({"single": None, "ddp": 2.0, "fsdp": 1.0}))
    assert found.run_plan.plan.engine == "fsdp"
    before = decision(single=1.0, ddp=1.1)
    with pytest.warns(UserWarning, match="measured no step time"):
        assert choose(before, run_of({"single": None, "ddp": 1.0})) is before, "nothing to compare it with"


def test_short_steps_are_tried_more_often() -> None:
    candidates = decision(single=1e-3, ddp=0.5, fsdp=100.0).report.candidates
    assert [plan_trial._steps(candidate) for candidate in candidates] == [40, 8, 4]


# -- really --------------------------------------------------------------------------------------------------------------------------


class Counting(L.Callback):
    """Leaves a mark whenever it is told of a batch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, *args: Any) -> None:
        with self.path.open("a") as file:
            file.write("x")


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = (self.net(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.fixture
def tried_plans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float | None]]:
    """What was tried, and the time that it took; of two plans, the times being ours."""
    found: list[tuple[str, float | None]] = []
    real = plan_trial.run_forked

    def noting(function: Callable[..., Any], run_plan: RunPlan, *args: Any, timeout_seconds: float, gpus: bool) -> float:
        seconds = real(function, run_plan, *args, timeout_seconds=timeout_seconds)
        found.append((run_plan.plan.engine, seconds))
        return {"single": 0.1, "ddp": 0.2}[run_plan.plan.engine]

    monkeypatch.setattr(plan_trial, "run_forked", noting)
    monkeypatch.setattr(plan_trial, "_MOST_TIMES", math.inf)
    monkeypatch.setattr(plan_trial, "_MOST_STEPS", 4)
    monkeypatch.setattr(deciding, "calibrate", lambda _, **__: MeasuredRates(Calibration(), DataSheet()))
    return found


def train(
    path: Path, calibrate: Any, allow: Sequence[str]
) -> tuple[dict[str, torch.Tensor], AutoParallelStrategy, L.Trainer, torch.Tensor]:
    torch.manual_seed(3)
    module = Module()
    strategy = AutoParallelStrategy(devices="2xcpu:256MiB", allow=list(allow), calibrate=calibrate)
    data = TensorDataset(torch.randn(24, 8))
    trainer = L.Trainer(
        default_root_dir=path,
        accelerator="cpu",
        strategy=strategy,
        max_epochs=2,
        callbacks=[Counting(path / "marks")],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=4, shuffle=True))
    return module.state_dict(), strategy, trainer, torch.rand(3)


def test_the_run_is_the_one_without_a_trial(tmp_path: Path, tried_plans: list[tuple[str, float | None]]) -> None:
    for name in ("without", "with"):
        (tmp_path / name).mkdir()
    plain, strategy, _, drawn = train(tmp_path / "without", "off", ["single"])
    assert tried_plans == []
    found, strategy, trainer, drawn_after = train(tmp_path / "with", "trial", ["single", "ddp"])
    assert sorted(engine for engine, _ in tried_plans) == ["ddp", "single"]
    assert all(seconds is not None and seconds > 0 for _, seconds in tried_plans)
    assert strategy.plan is not None
    assert strategy.plan.engine == "single"
    assert "the trial took" in strategy.plan.reasons[-1]
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    assert torch.equal(drawn, drawn_after), "the random state is the same after the run"
    assert trainer.global_step == 12
    assert trainer.limit_val_batches == 1.0
    for name in ("without", "with"):
        assert len((tmp_path / name / "marks").read_text()) == 12, "callbacks saw the run alone"
    kept = [sorted(path.name for path in (tmp_path / name).rglob("*.ckpt")) for name in ("without", "with")]
    assert kept[0] == kept[1] != []
