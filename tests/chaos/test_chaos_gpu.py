"""An allocation that fails on a GPU, in each part of a step: the run ends by it, as a want of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar import AutoParallelStrategy, Plan
from lightning_autopar.memory.inventory import probe
from tests.fresh import fresh
from tests.nullgpu import control

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus, pytest.mark.filterwarnings("ignore:.*does not have many workers")]


class Wide(pl.LightningModule):
    """Its gradients and its optimizer's temporary tensors are too large for what the allocator holds in stock."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 2048), nn.Tanh(), nn.Linear(2048, 2048), nn.Tanh(), nn.Linear(2048, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        room = batch[0].new_zeros(4 << 20)
        return nn.functional.mse_loss(self.net(batch[0]) + room[:1], batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-2, momentum=0.9, foreach=True)


class Shortage(pl.Callback):
    """Once in each part of a step an allocation of the last rank's fails.

    Args:
        at: the steps, by the parts.
        folder: where it is noted that one has failed.
    """

    def __init__(self, at: dict[str, int], folder: Path) -> None:
        self.at, self.folder = at, folder

    def _strike(self, part: str, trainer: pl.Trainer) -> None:
        done = self.folder / part
        if trainer.global_step == self.at.get(part) and trainer.global_rank == trainer.world_size - 1 and not done.exists():
            done.touch()
            torch.cuda.empty_cache()
            control.fail_allocations(trainer.strategy.root_device.index, from_bytes=8 << 20)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._strike("forward", trainer)

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        self._strike("backward", trainer)

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        self._strike("optimizer", trainer)


def _fit(strategy: AutoParallelStrategy, callbacks: list[pl.Callback], folder: Path) -> None:
    pl.seed_everything(3, verbose=False)
    module, x = Wide(), torch.randn(64, 8)
    trainer = pl.Trainer(
        accelerator="gpu", devices=2, strategy=strategy, max_epochs=1, callbacks=callbacks,
        default_root_dir=folder, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8))


PLANS = {
    "ddp": {"engine": "ddp"},
    "fsdp": {"engine": "fsdp", "shard": ("net.0", "net.2"), "reshard_after_forward": True},
}


def _short(engine: str, part: str, folder: Path) -> None:
    ids = tuple(device.id for device in probe(accelerator="cuda").devices[:2])
    plan = Plan(devices=ids, **PLANS[engine])  # type: ignore[arg-type]
    _fit(AutoParallelStrategy(plan=plan, calibrate="off"), [Shortage({part: 3}, folder)], folder)


@pytest.mark.stub
@pytest.mark.parametrize("part", ["forward", "backward", "optimizer"])
@pytest.mark.parametrize("engine", PLANS)
def test_an_allocation_that_fails_ends_the_run_as_a_want_of_memory(
    engine: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NULLGPU_STATE", str(tmp_path / "state"))
    with pytest.raises(torch.OutOfMemoryError, match="GPU 1 has a total capacity"):
        fresh(_short, engine, part, tmp_path)
