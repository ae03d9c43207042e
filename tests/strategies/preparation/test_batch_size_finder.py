"""``BatchSizeFinder`` where a plan may have several devices: the size that Lightning's search would come to, of the global batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar import AutoParallelStrategy
from lightning_autopar._fork import ChildFailed
from lightning_autopar.strategies.preparation import batch_size_finder
from tests.strategies.modules import QUIET

SAMPLES = 3000


class Sized(pl.LightningModule):
    """Its batch size is its own; steps on larger batches than ``most`` run out of memory."""

    def __init__(self, most: int = SAMPLES) -> None:
        super().__init__()
        self.batch_size, self.most = 2, most
        self.net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.rand(SAMPLES, 64)), batch_size=self.batch_size)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        if len(x) > self.most:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        self.log("samples", float(len(x)))
        loss: Tensor = self.net(x).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trainer(root: Path, strategy: Any, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, default_root_dir=root, enable_checkpointing=False, **QUIET, **options
    )


@pytest.mark.parametrize("mode", ["power", "binsearch"])
@pytest.mark.parametrize("most", [37, 300])
def test_the_search_is_lightnings(most: int, mode: str, tmp_path: Path) -> None:
    finder = BatchSizeFinder(mode=mode, steps_per_trial=1)
    theirs = Tuner(trainer(tmp_path, "auto", max_steps=1)).scale_batch_size(Sized(most), mode=mode, steps_per_trial=1)
    assert batch_size_finder.searched(finder, lambda size: size <= most, SAMPLES) == theirs


def test_the_search_ends_at_the_data_and_never_with_a_size_that_does_not_fit() -> None:
    power, halves = (BatchSizeFinder(mode=mode, margin=0.0, max_val=512) for mode in ("power", "binsearch"))
    for finder in (power, halves):
        assert batch_size_finder.searched(finder, lambda size: True, 100) == 100
        assert batch_size_finder.searched(finder, lambda size: True, None) == 512
    assert batch_size_finder.searched(power, lambda size: size <= 300, None) == 256
    assert batch_size_finder.searched(halves, lambda size: size <= 300, None) == 300
    assert batch_size_finder.searched(halves, lambda size: size <= 2, None) == 2


def test_the_size_is_the_global_batchs_on_all_devices(tmp_path: Path) -> None:
    strategy = AutoParallelStrategy(devices="2xcpu:1MiB", calibrate="off", memory_margin=0, allow=["single", "ddp"])
    callback = BatchSizeFinder(mode="binsearch", margin=0.0)
    run, module = trainer(tmp_path, strategy, max_steps=2, callbacks=[callback]), Sized()
    run.fit(module)
    assert callback.optimal_batch_size == module.batch_size < SAMPLES
    assert run.callback_metrics["samples"] == module.batch_size
    assert callback in run.callbacks
    report = strategy.report
    assert report is not None
    assert report.footprint.batch_size == module.batch_size
    # As it is, half of it fits on each device, and not all of it on one.
    assert [each.plan.engine for each in report.candidates if each.fits and each.plan.micro_batches == 1 and not each.plan.recompute] == [
        "ddp"
    ]


def test_the_tuner_ends_with_the_size_and_without_a_run(tmp_path: Path) -> None:
    strategy = AutoParallelStrategy(devices="2xcpu:1MiB", calibrate="off", memory_margin=0)
    run, module = trainer(tmp_path, strategy, max_steps=2), Sized()
    size = Tuner(run).scale_batch_size(module, max_val=2000)
    assert size == module.batch_size > 2
    assert run.global_step == 0
    assert not any(isinstance(each, BatchSizeFinder) for each in run.callbacks)
    run.fit(module)
    assert run.callback_metrics["samples"] == size


def test_a_size_that_fails_its_trial_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[int] = []

    def run_forked(function: Any, run_plan: Any, run: Any, *args: Any, **options: Any) -> float:
        tried.append(run.lightning_module.batch_size)
        if tried[-1] > 16:
            raise ChildFailed("OutOfMemoryError: so said a rank")
        return 0.1

    monkeypatch.setattr(batch_size_finder, "run_forked", run_forked)
    strategy = AutoParallelStrategy(devices="2xcpu:1GiB", calibrate="off")
    with caplog.at_level("INFO"):
        size = Tuner(trainer(tmp_path, strategy, max_steps=2)).scale_batch_size(Sized(), max_val=64)
    assert tried == [64, 32, 16]
    assert size == 16
    assert "so 32 is tried: OutOfMemoryError: so said a rank" in caplog.text
