"""A member through the real engine: a pinned pipeline plan, ``Trainer.fit``, a process for each stage; its gradients as hooks see them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.zoo.compare import STEPS, Gradients
from benchmarks.zoo.member import Member
from lightning_autopar import AutoParallelStrategy
from lightning_autopar.exact.absent.absent_tensor import is_absent
from lightning_autopar.plans import Plan


class Batches(Dataset[Any]):
    """A member's batches, ready made."""

    def __init__(self, member: Member) -> None:
        self.member = member

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> Any:
        return self.member.batch(index)


class Keep(pl.Callback):
    """Each rank leaves the gradients of its stage's parameters in a file for each step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        found: dict[str, Tensor | None] = {}
        for name, parameter in pl_module.named_parameters():
            if not is_absent(parameter):
                found[name] = None if parameter.grad is None else parameter.grad.detach().clone()
        torch.save(found, self.folder / f"{trainer.global_step}-{trainer.global_rank}.pt")


def fitted(member: Member, cuts: Sequence[str], *, micro_batches: int) -> Gradients:
    """The gradients of the steps in as many processes as stages."""
    ranks = len(cuts) + 1
    plan = Plan(
        engine="pipeline",
        devices=tuple(f"cpu:{rank}" for rank in range(ranks)),
        cuts=tuple(cuts),
        schedule="1f1b" if micro_batches >= ranks else "gpipe",
        micro_batches=micro_batches,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trainer = pl.Trainer(
            accelerator="cpu",
            strategy=AutoParallelStrategy(plan=plan, devices=f"{ranks}xcpu:1GiB"),
            callbacks=[Keep(folder)],
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(member.build(), DataLoader(Batches(member), batch_size=None))
        found: Gradients = []
        for step in range(STEPS):
            gradients: dict[str, Tensor | None] = {}
            for rank in reversed(range(ranks)):
                gradients.update(torch.load(folder / f"{step}-{rank}.pt"))
            found.append(gradients)
    return found
