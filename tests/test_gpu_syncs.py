"""No engine has a training step wait for its GPU where plain Lightning's step on one GPU doesn't, nor exchange what nobody logs."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanAbsoluteError, MeanSquaredError

from lightning_autopar import AutoParallelStrategy, Plan
from lightning_autopar.devices.discover import probe
from lightning_autopar.strategies.elastic import snapshot_schedule
from tests.fresh import fresh
from tests.syncs import HostSyncs, read

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.two_gpus,
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]
#: The first step that is counted: before it DDP measures itself, for which it waits (kDDPRuntimeLoggingSampleRate).
FIRST = 11
Steps = dict[int, list[dict[str, int]]]
BLOCKS = tuple(f"blocks.{index}" for index in range(4))
FSDP = {"engine": "fsdp", "reshard_after_forward": True, "shard": BLOCKS}
PLANS: Mapping[str, Mapping[str, Any]] = {
    "single": {"engine": "single"},
    "single in parts": {"engine": "single", "micro_batches": 2, "recompute": BLOCKS},
    "ddp": {"engine": "ddp"},
    "ddp in parts": {"engine": "ddp", "micro_batches": 2},
    "ddp uneven": {"engine": "ddp", "shares": (2, 1)},
    "fsdp": FSDP,
    "fsdp in parts": {**FSDP, "micro_batches": 2},
    "fsdp uneven": {**FSDP, "shares": (2, 1)},
    "fsdp offload": {**FSDP, "offload": ("optimizer", "parameters")},
    "zero-2": {"engine": "zero", "zero_stage": 2},
    "zero-3": {"engine": "zero", "zero_stage": 3},
    "pipeline": {"engine": "pipeline", "cuts": ("blocks.2",), "schedule": "1f1b", "micro_batches": 2},
}


class Net(pl.LightningModule):
    """Logs nothing."""

    def __init__(self, *, dropout: float = 0.0, norms: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
        layers = [[nn.Linear(16, 16), nn.BatchNorm1d(16) if norms else nn.Identity(), nn.Dropout(dropout), nn.Tanh()] for _ in BLOCKS]
        self.blocks = nn.ModuleList(nn.Sequential(*layer) for layer in layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.last(x)
        return output

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Logs(Net):
    """Logs by step and epoch, with every reduction, and metrics: one by step, one by epoch."""

    def __init__(self, *, dist_sync_on_step: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.error = MeanSquaredError(dist_sync_on_step=dist_sync_on_step)
        self.absolute = MeanAbsoluteError(dist_sync_on_step=dist_sync_on_step)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        output = self(batch[0])
        loss = nn.functional.mse_loss(output, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("epoch", 2 * loss, on_step=False, on_epoch=True)
        self.log("sum", output.detach().sum(), on_step=True, on_epoch=True, reduce_fx="sum")
        self.log("max", output.detach().max(), reduce_fx="max")
        self.error(output.detach(), batch[1])
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.absolute.update(output.detach(), batch[1])
        self.log("absolute", self.absolute, on_step=False, on_epoch=True)
        return loss


#: Module, its options and the Trainer's.
RUNS: Mapping[str, tuple[type[Net], Mapping[str, Any], Mapping[str, Any]]] = {
    "quiet": (Net, {}, {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}),
    "logs": (Logs, {"dropout": 0.1}, {"gradient_clip_val": 0.5}),
    "logs, synchronised metrics": (Logs, {"dist_sync_on_step": True}, {"accumulate_grad_batches": 2}),
    "batch norm": (Logs, {"norms": True}, {}),
}


def counted(name: str | None, run: str) -> Steps:
    """What each rank's steps waited for; under plain Lightning on one GPU where there is no plan."""
    kind, options, arguments = RUNS[run]
    plan = None
    if name is not None:
        devices = tuple(device.id for device in probe(accelerator="cuda").devices)
        plan = Plan(devices=devices[: 1 if name.startswith("single") else 2], **PLANS[name])
    pl.seed_everything(1, verbose=False)
    first = FIRST * arguments.get("accumulate_grad_batches", 1)
    module, x = kind(**options), torch.randn(8 * (first + 4), 8)
    snapshot_schedule.SAVE_SECONDS = 1e6  # this process ends after it: on a slow machine one would fall into the steps that are counted
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="gpu", devices=1 if plan is None else 2, strategy="auto" if plan is None else AutoParallelStrategy(plan=plan),
            max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[HostSyncs(Path(folder), skip=first)], **arguments,
        )  # fmt: skip
        trainer.fit(module, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8))
        return read(Path(folder))


def ours(step: Mapping[str, int], kind: str) -> dict[str, int]:
    """Of one kind, those that this package began."""
    return {what: count for what, count in step.items() if what.split(" at ")[0] == kind and "lightning_autopar/" in what}


def is_deepspeeds(what: str) -> bool:
    """Whether it is DeepSpeed's code that waits, and not this package's."""
    for place in what.partition(" at ")[2].split(" < "):
        if "lightning_autopar/" in place:
            return False
        if "deepspeed/" in place or place.startswith(("runtime/zero/", "runtime/utils/")):
            return True
    return False


def cases() -> list[Any]:
    """Logs under every plan; the rest where an engine may differ."""
    others = {
        "quiet": ("single", "ddp", "fsdp", "pipeline"),
        "logs, synchronised metrics": ("ddp", "fsdp", "pipeline"),
        "batch norm": ("ddp", "ddp uneven", "fsdp"),
    }
    return [(name, "logs") for name in PLANS] + [(name, run) for run, names in others.items() for name in names]


def test_a_wait_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum(fresh(waiting)[0][0].values()) > 0


def waiting() -> Steps:
    step = Net.training_step

    def asking(self: Any, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = step(self, batch, batch_idx)
        loss.item()
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Net, "training_step", asking)
        return counted(None, "quiet")


@pytest.mark.parametrize(("name", "run"), cases())
def test_a_step_waits_for_nothing_more(name: str, run: str) -> None:
    if name.startswith("zero"):
        pytest.importorskip("deepspeed")
    for rank, steps in fresh(counted, name, run).items():
        assert len(steps) >= 3
        for step in steps:
            waits = {what: count for what, count in step.items() if what.startswith("wait")}
            if name == "fsdp offload":  # torch's own: gradients are waited for before the host steps
                waits = {what: count for what, count in waits.items() if " at " in what and "_fsdp_param_group.py" not in what}
            if name.startswith("zero"):  # the runtime's own count doesn't say whose they are
                waits = {what: count for what, count in waits.items() if " at " in what and not is_deepspeeds(what)}
            assert not any(waits.values()), f"rank {rank}: {waits}"
            gathers = ours(step, "all_gather")
            if run == "quiet" and name != "pipeline":
                assert not gathers, "nothing is logged"
            if run.startswith("logs") and not name.startswith(("single", "pipeline")):
                assert sum(gathers.values()) <= 2, f"rank {rank}: more than the host's and the device's: {gathers}"
