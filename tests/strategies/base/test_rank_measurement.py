"""What a run reports to have used, beside what was predicted, on CPU devices."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.profilers import PyTorchProfiler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar._temporary import without_noise
from lightning_autopar.devices.host import host_cores
from lightning_autopar.memory.learned.step_times import disturbance
from lightning_autopar.strategies.base.rank_measurement import GpuSteps, Point, StepClock
from tests.strategies.modules import Regression, loader, trainer


class Wide(Regression):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(384, 384), nn.ReLU()) for _ in range(3)]
        self.net = nn.Sequential(nn.Linear(8, 384), *layers, nn.Linear(384, 1))


class Text(Regression):
    """A small GPT without its mask."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Embedding(64, 64),
            *(nn.TransformerEncoderLayer(64, 2, 256, dropout=0.0, batch_first=True, norm_first=True) for _ in range(3)),
            nn.Linear(64, 64),
        )

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[0].flatten())


def _text() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randint(0, 64, (64, 32))), batch_size=8)


@pytest.mark.parametrize("engine", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize("kind", [Wide, Text], ids=["mlp", "gpt"])
def test_the_peak_is_what_was_predicted(kind: type[Regression], engine: str, tmp_path: Path) -> None:
    run = trainer(engine, tmp_path, max_epochs=1)
    data = _text() if kind is Text else loader(256, 32)
    began = time.monotonic()
    run.fit(kind(), data, data)
    took_seconds = time.monotonic() - began
    measured, predicted = run.strategy.measured, run.strategy.report.best_candidate.bytes
    assert list(measured) == list(run.strategy.plan.devices)
    for device, values in measured.items():
        assert 0 < values["step_seconds"] * run.global_step < took_seconds
        # Shards are gathered by threads of gloo's, whose buffers may be freed a moment later, when the next ones are there.
        assert abs(values["peak_bytes"] / predicted[device].allocated - 1) < (0.06 if engine == "fsdp" else 0.01)


class Normed(Wide):
    """With buffers and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 256), nn.BatchNorm1d(256), *self.net[1:-1], nn.Linear(384, 1))
        self.net[2][0] = nn.Linear(256, 384)
        self.net[0].requires_grad_(False)


@pytest.mark.parametrize(("engine", "accumulate"), [("single", 1), ("single", 3), ("ddp", 1), ("fsdp", 1)])
def test_what_holds_the_peak(engine: str, accumulate: int, tmp_path: Path) -> None:
    module = Normed()
    trainable = sum(parameter.numel() * 4 for parameter in module.parameters() if parameter.requires_grad)
    whole = sum(parameter.numel() * 4 for parameter in module.parameters())
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())
    steps = 4 * sum(parameter.requires_grad for parameter in module.parameters())
    run = trainer(engine, tmp_path, max_epochs=1, accumulate_grad_batches=accumulate)
    run.fit(module, loader(320, 32), loader(8))
    shards, uneven = (2, 4096) if engine == "fsdp" else (1, 0)  # shards are of whole rows, and the last layer has one
    for values in run.strategy.measured.values():
        found = values["bytes"]
        assert sum(found.values()) == values["peak_bytes"]
        assert found["buffers"] == buffers
        assert found["parameters"] == pytest.approx(whole / shards, abs=uneven)
        assert found["optimizer"] == pytest.approx(2 * trainable / shards + steps, abs=uneven)
        # The peak is in the optimizer's step, or with accumulated gradients in a backward beside them.
        assert engine == "fsdp" or found["gradients"] == trainable
        assert found["rest"] > 0


@pytest.mark.parametrize("options", [{"val_check_interval": 3}, {"limit_train_batches": 2, "max_epochs": 4}, {"max_steps": 4}])
def test_evaluations_between_steps_do_not_spoil_the_figures(options: dict[str, Any], tmp_path: Path) -> None:
    peaks = []
    for these in ({}, options):
        run = trainer("single", tmp_path, **{"max_epochs": 1, **these})
        run.fit(Wide(), loader(256, 32), loader(64, 32))
        peaks.append(run.strategy.measured["cpu:0"]["peak_bytes"])
    assert peaks[1] == pytest.approx(peaks[0], abs=16 * 1024)


def test_where_every_step_is_followed_by_an_evaluation_there_is_no_figure(tmp_path: Path) -> None:
    run = trainer("single", tmp_path, max_epochs=1, val_check_interval=1)
    run.fit(Regression(), loader(64), loader(8))
    measured = run.strategy.measured["cpu:0"]
    assert (measured["peak_bytes"], measured["bytes"]) == (None, {})
    assert measured["step_seconds"] > 0


@pytest.mark.parametrize(
    ("peaks", "expected"),
    [
        ({"forward": 900}, {"parameters": 100, "optimizer": 200, "gradients": 0, "rest": 600}),
        ({"backward": 900}, {"parameters": 100, "optimizer": 200, "gradients": 0, "rest": 600}),
        ({"gradients": 900}, {"parameters": 100, "optimizer": 200, "rest": 600}),
        ({None: 900}, {"parameters": 100, "optimizer": 200, "gradients": 100, "rest": 500}),
        ({"forward": 800, "gradients": 900, None: 950}, {"parameters": 100, "optimizer": 200, "gradients": 100, "rest": 550}),
        ({}, {}),
    ],
    ids=["forward", "its end", "backward", "optimizer", "the last", "before training"],
)
def test_a_gpus_peak_belongs_to_the_part_of_the_step_in_which_the_counter_rose(
    peaks: dict[Point | None, int], expected: dict[str, int]
) -> None:
    steps, peak = GpuSteps(700), 700
    there: tuple[tuple[Point | None, int], ...] = (("forward", 0), ("backward", 0), ("gradients", 100), (None, 100))
    for point, gradient_bytes in there:
        peak = max(peak, peaks.get(point, 0))
        steps.note(point, peak, gradient_bytes)
    assert steps.bytes({"parameters": 100, "optimizer": 200}) == expected


class Lagging:
    """A GPU's events: the host enqueues at once what the device does in a tenth of a second each."""

    enqueued = done = waits = 0

    def __init__(self) -> None:
        self.at = 0

    def record(self, stream: Any) -> None:
        self.at = Lagging.enqueued

    def query(self) -> bool:
        return self.at <= Lagging.done

    def synchronize(self) -> None:
        Lagging.waits += 1
        Lagging.done = max(Lagging.done, self.at)

    def elapsed_time(self, other: Lagging) -> float:
        assert other.query(), "cudaErrorNotReady"
        return 100.0 * (other.at - self.at)


def test_a_gpus_steps_take_what_the_device_takes_and_nobody_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    clock, device = StepClock(Lagging), torch.device("cuda", 0)
    for step in range(9):
        clock.start(device)
        Lagging.enqueued += 1
        clock.stop(device)
        Lagging.done = max(0, step - 2)
    assert clock.median_seconds() == pytest.approx(0.1)
    assert Lagging.waits == 0
    clock.wait()
    assert clock.median_seconds() == pytest.approx(0.1)
    assert (Lagging.waits, Lagging.done) == (1, 9)


def test_a_clock_sees_whether_others_keep_the_machine_busy() -> None:
    clock, device = StepClock(), torch.device("cpu")
    burners = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(3 * host_cores())]
    try:
        for _ in range(6):
            clock.start(device)
            until = time.process_time() + 0.05
            while time.process_time() < until:
                pass
            clock.stop(device)
        clock.wait()
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    waited = clock.waited_share()
    assert waited is not None
    assert waited > 0.4
    assert "others kept the machine busy" in (disturbance(spread=clock.spread(), waited=waited) or "")


def test_the_spread_is_of_the_middle_half(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, device = StepClock(), torch.device("cpu")
    now = iter([0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0, 104.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    for steps in range(5):
        assert (clock.spread() is None) == (steps < 4)
        clock.start(device)
        clock.stop(device)
    assert clock.spread() == pytest.approx(49.5), "of five steps the last one lies in no middle"


def test_a_run_too_short_to_measure_says_none(tmp_path: Path) -> None:
    run = trainer("single", tmp_path, max_steps=2)
    run.fit(Regression(), loader(), loader())
    nothing: dict[str, Any] = {"peak_bytes": None, "step_seconds": None, "bytes": {}, "reserved_bytes": None, "context_bytes": None}
    nothing |= {"host_bytes": None, "lacked_bytes": None, "step_spread": None, "waited_share": None}
    assert run.strategy.measured == {"cpu:0": nothing}


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_the_users_own_profiler_is_left_alone(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(dirpath=tmp_path, filename="profile", profile_memory=True, export_to_chrome=False)
    run = trainer("single", tmp_path, max_epochs=1, profiler=profiler)
    run.fit(Regression(), loader(96), loader())
    assert run.strategy.measured["cpu:0"]["step_seconds"] > 0
    assert "aten::linear" in profiler.summary()


def test_the_users_lines_on_stderr_come_through(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def speak(module: Regression, index: int) -> None:
        print(f"step {index}", file=sys.stderr)

    trainer("single", tmp_path, max_epochs=1).fit(Regression({"training_step": speak}), loader(64), loader())
    lines = capfd.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("step ")][-8:] == [f"step {index}" for index in range(8)]
    assert not [line for line in lines if "USDT" in line or "unknown size" in line]


def test_an_exception_under_the_profiler_gives_stderr_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def fail(module: Regression, index: int) -> None:
        if index == 3 and os.getpid() == parent:
            raise RuntimeError("in the profiled step")

    parent = os.getpid()
    with pytest.raises(RuntimeError, match="in the profiled step"):
        trainer("single", tmp_path, max_epochs=1).fit(Regression({"training_step": fail}), loader(64), loader())
    assert not torch.autograd._profiler_enabled()
    os.write(2, b"after\n")
    assert "after" in capfd.readouterr().err


def test_only_lines_that_hold_the_words_are_kept_back(capfd: pytest.CaptureFixture[str]) -> None:
    with without_noise((b"nonsense",)):
        os.write(2, b"first\nsome nonsense\nlast")
    assert capfd.readouterr().err == "first\nlast"
