"""Loaders that look at ``torch.distributed`` or at the trainer by themselves: they give the batches that one device has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.distributed import get_rank, get_world_size, is_initialized
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, Subset

from lightning_autopar import AutoParallelStrategy
from tests.strategies.fitted import QUIET, Fitted, _decided, numbers, plan


class Sampled(Fitted):
    """A DistributedSampler where there is a process group, as many scripts have it."""

    def train_dataloader(self) -> Any:
        sampler = DistributedSampler(numbers()) if dist.is_available() and dist.is_initialized() else None
        return DataLoader(numbers(), batch_size=8, sampler=sampler)


class AskedTrainer(Fitted):
    """The same, by what the trainer says."""

    def train_dataloader(self) -> Any:
        data, trainer, sampler = numbers(), self.trainer, None
        if trainer.world_size > 1:
            sampler = DistributedSampler(data, num_replicas=trainer.world_size, rank=trainer.global_rank, shuffle=False)
        return DataLoader(data, batch_size=8 // trainer.num_devices, sampler=sampler)


class Dealt(Sampler[int]):
    """A sampler of the user's own, which looks each time."""

    def _dealt(self) -> range:
        return range(get_rank(), 26, get_world_size()) if is_initialized() else range(26)

    def __iter__(self) -> Iterator[int]:
        return iter(self._dealt())

    def __len__(self) -> int:
        return len(self._dealt())


class OwnSampler(Fitted):
    def train_dataloader(self) -> Any:
        return DataLoader(numbers(), batch_size=8, sampler=Dealt())


class Stream(IterableDataset[Any]):
    """A stream that deals its samples to the ranks, and to nobody else."""

    def __iter__(self) -> Iterator[Any]:
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        data: Dataset[Any] = numbers()
        for index in range(rank, 26, world_size):
            yield data[index]


class Streamed(Fitted):
    workers = 0

    def train_dataloader(self) -> Any:
        return DataLoader(Stream(), batch_size=8, num_workers=self.workers)


class StreamedByWorkers(Streamed):
    workers = 1


class Told(IterableDataset[Any]):
    """A stream that deals its samples by the launcher's variables, as webdataset does."""

    def __iter__(self) -> Iterator[Any]:
        data: Dataset[Any] = numbers()
        for index in range(int(os.environ.get("LOCAL_RANK", "0")), 26, int(os.environ.get("WORLD_SIZE", "1"))):
            yield data[index]


class StreamedByVariables(Streamed):
    def train_dataloader(self) -> Any:
        return DataLoader(Told(), batch_size=8, num_workers=self.workers)


class KeepsItsPart(pl.LightningDataModule):
    """Keeps a rank's part of the data when it is set up.

    Args:
        asked: the trainer, or torch.
    """

    def __init__(self, asked: str) -> None:
        super().__init__()
        self.asked, self.times = asked, 0

    def setup(self, stage: str) -> None:
        rank, ranks = (get_rank(), get_world_size()) if is_initialized() else (0, 1)
        if self.asked == "trainer":
            assert self.trainer is not None
            rank, ranks = self.trainer.global_rank, self.trainer.world_size
        self.data, self.times = Subset(numbers(), range(rank, 26, ranks)), self.times + 1

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=8)


def _fit(make: Any, under: Any, datamodule: Any = None) -> Any:
    pl.seed_everything(3, verbose=False)
    module = make()
    strategy: Any = "auto" if under is None else AutoParallelStrategy(devices="2xcpu:4GiB")
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=2, **QUIET)
    with _decided(under):
        trainer.fit(module, datamodule=datamodule)
    return module, trainer


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.parametrize("make", [Sampled, AskedTrainer, OwnSampler, Streamed, StreamedByWorkers, StreamedByVariables])
def test_a_loader_deals_to_nobody(make: Any) -> None:
    ours, trainer = _fit(make, plan("ddp"))
    theirs, plain = _fit(make, None)
    assert trainer.global_step == plain.global_step == 8
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(trainer.callback_metrics["loss_epoch"], plain.callback_metrics["loss_epoch"], rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.parametrize("asked", ["trainer", "torch"])
def test_a_datamodules_setup_keeps_all_of_the_data(asked: str) -> None:
    data = KeepsItsPart(asked)
    ours, trainer = _fit(Fitted, plan("ddp"), data)
    theirs, plain = _fit(Fitted, None, KeepsItsPart(asked))
    assert trainer.global_step == plain.global_step == 8
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=1e-5, atol=1e-5)
    assert "setup" not in vars(data), "its own again"
