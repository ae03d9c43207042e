"""What a run reports to have used, beside what was predicted, on CPU devices."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.profilers import PyTorchProfiler
from modules import Regression, loader, trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar.strategies.measure import without_noise


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
    run.fit(kind(), data, data)
    measured, predicted = run.strategy.measured, run.strategy.report.best_candidate.bytes
    assert list(measured) == list(run.strategy.plan.devices)
    for device, values in measured.items():
        assert 0 < values["step_seconds"] < 5
        # Shards are gathered by threads of gloo's, whose buffers may be freed a moment later, when the next ones are there.
        more = values["peak_bytes"] / predicted[device].allocated - 1
        assert -0.1 < more < (0.35 if engine == "fsdp" else 0.1)


def test_a_run_too_short_to_measure_says_none(tmp_path: Path) -> None:
    run = trainer("single", tmp_path, max_steps=2)
    run.fit(Regression(), loader(), loader())
    assert run.strategy.measured == {"cpu:0": {"peak_bytes": None, "step_seconds": None}}


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
