"""Two pipelines side by side on four real ranks, whole and sharded, against plain Lightning on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar.exact.absent.absent_tensor import is_absent
from lightning_autopar.plans import Plan, Schedule
from lightning_autopar.strategies.auto import AutoParallelStrategy
from tests.strategies.fitted import QUIET

BLOCKS = tuple(f"blocks.{index}" for index in range(4))


class Net(pl.LightningModule):
    """Four blocks, one of them frozen, between two layers that share a matrix; a parameter of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 7, bias=False)  # no number of ranks divides it
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.LayerNorm(7)) for _ in range(4))
        self.blocks[1][0].requires_grad_(False)  # type: ignore[index]
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x * self.scale, self.first.weight.t())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([parameter for parameter in self.parameters() if parameter.requires_grad], 1e-2)


class Gradients(pl.Callback):
    """Each rank's gradients, whole, before each step of the optimizer, in a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: list[dict[str, Tensor]] = []
        self.sharded = 0
        self.losses: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        found = {}
        for name, parameter in module.named_parameters():
            if not is_absent(parameter) and parameter.grad is not None:
                self.sharded += isinstance(parameter, DTensor)
                gradient = parameter.grad
                found[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()
        self.steps.append(found)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["loss_step"]))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        torch.save((self.steps, self.sharded), self.folder / f"rank{trainer.global_rank}.pt")


def _fit(plan: Plan | None, folder: Path, **options: Any) -> tuple[Net, Gradients, dict[str, Any]]:
    """Two epochs of four batches, of which the last has two samples."""
    folder.mkdir()
    pl.seed_everything(3, verbose=False)
    module, gradients = Net(), Gradients(folder)
    settings: dict[str, Any] = {
        "strategy": "auto" if plan is None else AutoParallelStrategy(plan=plan, devices="4xcpu:2GiB"),
        "accelerator": "cpu",
        "devices": 1 if plan is None else "auto",
        "max_epochs": 2,
        "log_every_n_steps": 1,
        **QUIET,
        **options,
    }
    x = torch.randn(26, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.roll(1, 1))
    trainer = pl.Trainer(callbacks=[gradients], **settings)
    trainer.fit(module, DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=8))
    return module, gradients, dict(trainer.callback_metrics)


def _plan(schedule: Schedule, *, shard: bool) -> Plan:
    cuts = BLOCKS[1:] if schedule == "interleaved_1f1b" else BLOCKS[2:3]
    return Plan(
        engine="pipeline",
        devices=tuple(f"cpu:{rank}" for rank in range(4)),
        replicas=2,
        schedule=schedule,
        micro_batches=2,
        cuts=cuts,
        shard=BLOCKS if shard else (),
    )


def _moved(module: Net) -> None:
    raise AssertionError("the module was moved to the CPU before its shards were gathered, which NCCL does on GPUs alone")


@pytest.mark.parametrize(
    ("schedule", "shard", "options"),
    [
        ("1f1b", False, {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}),
        ("gpipe", True, {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}),
        ("interleaved_1f1b", True, {}),
    ],
    ids=["1f1b-accumulated-clipped", "gpipe-sharded-accumulated-clipped", "interleaved_1f1b-sharded"],
)
def test_two_pipelines_are_one_devices_run(schedule: Schedule, shard: bool, options: dict[str, Any], tmp_path: Path) -> None:
    plan = _plan(schedule, shard=shard)
    with mock.patch.object(Net, "cpu", _moved):
        ours, seen, metrics = _fit(plan, tmp_path / "ours", **options)
    theirs, expected, their_metrics = _fit(None, tmp_path / "theirs", **options)
    assert expected.steps
    torch.testing.assert_close(seen.losses, expected.losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(metrics, their_metrics, rtol=1e-5, atol=1e-6)
    found: set[str] = set()
    for rank in range(4):
        steps, sharded = torch.load(tmp_path / "ours" / f"rank{rank}.pt")
        assert bool(sharded) == shard
        assert len(steps) == len(expected.steps)
        for step, wanted in zip(steps, expected.steps, strict=True):
            torch.testing.assert_close(step, {name: wanted[name] for name in step}, rtol=1e-5, atol=1e-6)
            found.update(step)
    assert found == set(expected.steps[0])
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=1e-5, atol=1e-6)
