"""What the user's code sees of the ranks' process group: a module nothing, as on one device; a callback all."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import all_reduce, get_world_size, is_initialized
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar import AutoParallelStrategy
from tests.strategies.fitted import QUIET


class Normalized(pl.LightningModule):
    """Divides by the labels of all ranks, reduced by its own code, as detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, labels = batch
        count = (labels != -100).sum().float()
        if is_initialized():
            all_reduce(count)
            count = count / get_world_size()
        loss: Tensor = F.cross_entropy(self.net(x), labels, reduction="sum") / count.clamp(min=1)
        self.log("loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        seen = torch.ones(())
        if dist.is_initialized():
            dist.all_reduce(seen)
        self.log("ranks", seen)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Counting(pl.Callback):
    """Sums up over ranks by itself, as each rank's callbacks have their own part of the batch."""

    ranks = 0.0

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        seen = torch.ones(())
        if dist.is_initialized():
            dist.all_reduce(seen)
        self.ranks = float(seen)


def trained(strategy: Any) -> tuple[Any, Any, Counting]:
    pl.seed_everything(1, verbose=False)
    module, counting = Normalized(), Counting()
    labels = torch.randint(3, (22,))
    data = TensorDataset(torch.randn(22, 6), labels.masked_fill(torch.arange(22) % 3 == 0, -100))
    trainer = pl.Trainer(
        accelerator="cpu", devices="auto" if strategy != "auto" else 1, strategy=strategy, max_epochs=2, callbacks=[counting], **QUIET
    )
    trainer.fit(module, DataLoader(data, batch_size=8))
    return module, trainer, counting


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "pipeline"])
def test_what_the_users_code_would_reduce_over_ranks_is_one_devices(engine: str) -> None:
    theirs, alone, _ = trained("auto")
    strategy = AutoParallelStrategy(allow=[engine], devices="2xcpu:2GiB")
    ours, trainer, counting = trained(strategy)
    assert (strategy.plan.world_size, counting.ranks) == (2, 2)
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(trainer.callback_metrics, alone.callback_metrics, rtol=1e-5, atol=1e-6)
