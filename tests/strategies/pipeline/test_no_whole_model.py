"""A model of which no worker ever holds all: built, trained, saved and gone on from in stages."""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar.strategies.auto import AutoParallelStrategy
from tests.fresh import fresh
from tests.strategies.fitted import QUIET, _decided
from tests.strategies.pipelines import pipeline, stage

WIDTH, BLOCKS, RANKS = 2048, 12, 4
#: Of all weights.
MODEL_BYTES = BLOCKS * WIDTH * WIDTH * 4
PLAN = pipeline([f"blocks.{index}" for index in range(BLOCKS // RANKS, BLOCKS, BLOCKS // RANKS)], micro_batches=4, schedule="1f1b")


_M_MMAP_THRESHOLD = -3  # malloc.h


class Deep(pl.LightningModule):
    """Wide blocks; built when it is made, or when it is asked to."""

    def __init__(self, width: int = WIDTH, *, later: bool = False) -> None:
        super().__init__()
        self.width = width
        self.blocks: Any = None
        if not later:
            self.configure_model()

    def configure_model(self) -> None:
        if self.blocks is None:
            self.blocks = nn.ModuleList(nn.Linear(self.width, self.width, bias=False) for _ in range(BLOCKS))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 10.0)


class Private(pl.Callback):
    """The most private bytes of each worker from its setup to its end, beyond what it had at first; a line a rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if "AUTOPAR_RENDEZVOUS_FILE" in os.environ:
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 128 * 1024)  # what is freed is given back, so that only what is held counts
            watch = _Watch(self.folder / f"private{trainer.global_rank}")
            watch.start()
            _watches.append(watch)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        for watch in _watches:
            watch.over.set()
            watch.join()
        _watches.clear()


class _Watch(threading.Thread):
    def __init__(self, file: Path) -> None:
        super().__init__(daemon=True)
        self.file, self.first, self.over = file, _private_bytes(), threading.Event()

    def run(self) -> None:
        most = 0
        while not self.over.wait(0.02):
            most = max(most, _private_bytes() - self.first)
        self.file.write_text(str(most))


#: Of this process.
_watches: list[_Watch] = []


def _private_bytes() -> int:
    return int(psutil.Process().memory_full_info().uss)


def train(folder: Path, *, later: bool, resume: Path | None, epochs: int) -> tuple[Any, list[int]]:
    pl.seed_everything(1, verbose=False)
    small = Deep(8)
    staging = stage(small, [f"blocks.{index}" for index in range(BLOCKS)], {"training_step": [torch.ones(2, 8)]})
    pl.seed_everything(1, verbose=False)
    module = Deep(later=later)
    saves = ModelCheckpoint(folder / f"until{epochs}", filename="{epoch}", save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=True)
    options: dict[str, Any] = {**QUIET, "enable_checkpointing": True, "max_epochs": epochs, "default_root_dir": folder}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=AutoParallelStrategy(devices=f"{RANKS}xcpu:4GiB"),
        callbacks=[saves, Private(folder)],
        **options,
    )
    data = TensorDataset(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0)))
    with _decided(PLAN, findings={"pipeline": staging}, large=later):
        trainer.fit(module, DataLoader(data, batch_size=4), ckpt_path=resume)
    return module, [int((folder / f"private{rank}").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("later", [False, True])
def test_no_worker_ever_holds_all_of_a_model(later: bool, tmp_path: Path) -> None:
    # Not forked off pytest's process: a worker's garbage collector writes to each page of the Python objects that it was forked with, which
    # makes the page the worker's own, and after some thousand tests these take 140 MiB.
    fresh(hold_a_part_each, later, tmp_path, seconds=170)


def hold_a_part_each(later: bool, tmp_path: Path) -> None:
    """Trains, saves and goes on in stages."""
    warnings.filterwarnings("ignore", "The dirpath has changed")
    module, first = train(tmp_path, later=later, resume=None, epochs=1)
    saved = torch.load(tmp_path / "until1" / "epoch=0.ckpt", mmap=True, weights_only=True)["state_dict"]
    assert all(torch.equal(saved[name], value) for name, value in module.state_dict().items())
    pl.seed_everything(1, verbose=False)
    start = Deep()
    assert all(0 < float((saved[name] - value).abs().max()) < 0.1 for name, value in start.state_dict().items()), (
        "trained from its first weights"
    )
    # A stage's own weights and gradients are half of the model's bytes.
    assert max(first) < MODEL_BYTES
    if later:
        pl.seed_everything(1, verbose=False)
        moved = [float((saved[name] - value).abs().max()) for name, value in Deep().state_dict().items()]
        assert all(0 < each < 0.1 for each in moved), "trained from the weights that one process would draw"
        return
    _, then = train(tmp_path, later=later, resume=tmp_path / "until1" / "epoch=0.ckpt", epochs=2)
    assert max(then) < MODEL_BYTES
