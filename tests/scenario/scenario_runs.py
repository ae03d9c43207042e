"""The runs of the scenario: small modules of different sizes, each in a process of its own as a script would be."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar import AutoParallelStrategy, CheckpointMigrate, ElasticReplan

MIB = 1 << 20
#: Three devices as large as this, and nothing else.
DEVICE_BYTES = 60 * MIB
DEVICES = f"3xcpu:{DEVICE_BYTES}"
_BATCH, _ROWS = 8, 96


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A run.

    Args:
        name: of its script.
        at_seconds: when it is started, from the beginning or from when the runs of ``after`` have all begun to train.
        priority: its user's.
        width: of its layers, which is what its memory comes from.
        epochs: to train for, of :data:`_ROWS` rows each.
        elastic: whether it has the callbacks.
        allow: the engines to choose from.
        step_seconds: what a step takes besides computing, as if the devices were others than this host's cores.
        after: names of runs that come before it.
    """

    name: str
    at_seconds: float
    priority: int
    width: int
    epochs: int
    elastic: bool
    allow: tuple[str, ...] = ("single", "ddp")
    step_seconds: float = 0.04
    after: tuple[str, ...] = ()


FIRST = ("large", "middle", "patient")
#: Two large ones need most of a device, or shards of several; the middle ones share one; the last are small and in a hurry.
SPECS = (
    Spec(name="large", at_seconds=0.0, priority=0, width=1000, epochs=16, elastic=True),
    Spec(name="middle", at_seconds=0.3, priority=0, width=700, epochs=14, elastic=True),
    Spec(name="patient", at_seconds=0.6, priority=-5, width=950, epochs=10, elastic=True),
    Spec(name="plain", at_seconds=0.0, priority=0, width=900, epochs=8, elastic=False, after=FIRST),
    Spec(name="small", at_seconds=1.0, priority=0, width=300, epochs=6, elastic=False, after=FIRST),
    Spec(name="urgent", at_seconds=1.0, priority=5, width=1000, epochs=6, elastic=False, after=("plain",)),
)


class Layers(pl.LightningModule):
    """Some wide layers; momentum gives the optimizer a state."""

    def __init__(self, width: int, step_seconds: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(width, 1)
        self.step_seconds = step_seconds

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        for block in self.blocks:
            x = x + block(x)
        if self.step_seconds:
            time.sleep(self.step_seconds)  # what a device would compute meanwhile; this host's cores are the other runs' as well
        return nn.functional.mse_loss(self.head(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


def loader(width: int, seed: int) -> DataLoader[tuple[Tensor, ...]]:
    """Rows of one's own, shuffled."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(_ROWS, width, generator=generator)
    return DataLoader(TensorDataset(rows, rows[:, :1].sin()), batch_size=_BATCH, shuffle=True)


def train(spec: Spec, folder: Path, *, plainly: bool) -> None:
    """Train it, and leave its weights and what became of it in the folder."""
    warnings.simplefilter("ignore")
    if not plainly:
        sys.argv[:] = [f"{spec.name}.py"]
        os.environ["AUTOPAR_PRIORITY"] = str(spec.priority)
        logging.getLogger("lightning_autopar").setLevel(logging.INFO)
    pl.seed_everything(len(spec.name), workers=True, verbose=False)
    module = Layers(spec.width, 0.0 if plainly else spec.step_seconds)
    callbacks = []
    if spec.elastic and not plainly:
        callbacks = [
            ElasticReplan(interval_seconds=0.3, min_seconds_between_moves=3, patience=2),
            CheckpointMigrate(snapshot_seconds=2.0),
        ]
    strategy = "auto" if plainly else AutoParallelStrategy(allow=list(spec.allow), calibrate="off")
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1 if plainly else "auto",
        max_epochs=spec.epochs,
        default_root_dir=folder / spec.name,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    began = time.monotonic()
    trainer.fit(module, loader(spec.width, 7))
    kind = "plain" if plainly else "shared"
    torch.save(module.state_dict(), folder / f"{spec.name}-{kind}.pt")
    found: dict[str, Any] = {"step": trainer.global_step, "seconds": time.monotonic() - began}
    if not plainly:
        assert isinstance(strategy, AutoParallelStrategy)
        history = strategy.history
        found["measured"] = strategy.measured
        found["plan"] = strategy.plan.title() if strategy.plan is not None else None
        found["spans"] = [] if history is None else [[span.title, span.start_seconds, span.end_seconds] for span in history.spans]
        found["marks"] = [] if history is None else [[mark.kind, mark.at_seconds, mark.words] for mark in history.marks]
    (folder / f"{spec.name}-{kind}.json").write_text(json.dumps(found), encoding="utf-8")
