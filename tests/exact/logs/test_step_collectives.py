"""A step that logs makes one collective for all that it logs, and one that logs nothing makes none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MeanSquaredError

from lightning_autopar import AutoParallelStrategy
from lightning_autopar.exact import logs
from lightning_autopar.plans import Plan
from tests.strategies.collectives import Counts

pytestmark = [pytest.mark.filterwarnings("ignore:.*does not have many workers")]

PLANS: Mapping[str, Mapping[str, Any]] = {
    "ddp": {"engine": "ddp"},
    "ddp uneven, in parts": {"engine": "ddp", "shares": (2, 1), "micro_batches": 2},
    "fsdp in parts": {"engine": "fsdp", "shard": ("net.0",), "reshard_after_forward": True, "micro_batches": 2},
    "pipeline": {"engine": "pipeline", "cuts": ("net.2",), "schedule": "1f1b", "micro_batches": 2},
}


class Quiet(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


class Logs(Quiet):
    """Logs more values than an exchange has room for at first, and metrics' values of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.error, self.mean = MeanSquaredError(), MeanMetric()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        output = self.net(batch[0])
        loss = nn.functional.mse_loss(output, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({f"max {number}": output.detach().max() * number for number in range(70)}, reduce_fx="max")
        self.error(output.detach(), batch[1])
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.mean(output.detach())
        self.log("mean", self.mean, on_step=True, on_epoch=False)
        return loss


class GoesOn(Quiet):
    """Has a hook that sees the loss."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step > 99:
            raise AssertionError


class Stops(Quiet):
    """Has one that may end the fit."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step > 99:
            self.trainer.should_stop = True


def _fit(kind: type[Quiet], name: str, folder: Path, *, between: bool = False) -> dict[int, list[dict[str, int]]]:
    """What each rank's steps began; or with what comes ``between`` them, also by Lightning."""
    pl.seed_everything(1, verbose=False)
    counts, x = Counts(folder, everyones=between), torch.randn(9 * 7, 8)
    plan = Plan(devices=("cpu:0", "cpu:1"), **PLANS[name])
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy=AutoParallelStrategy(plan=plan, calibrate="off", devices="2xcpu:1GiB"), max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[counts],
    )  # fmt: skip
    trainer.fit(kind(), DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=9))
    return counts.read()


def _for_logs(step: Mapping[str, int]) -> int:
    """How many of them are for what is logged."""
    files = {path.name for path in Path(logs.__path__[0]).glob("*.py")}
    return sum(count for what, count in step.items() if what.split(" in ")[1] in files)


@pytest.mark.parametrize("name", PLANS)
def test_all_that_a_step_logs_goes_by_one_collective(name: str, tmp_path: Path) -> None:
    for rank, steps in _fit(Logs, name, tmp_path).items():
        assert len(steps) == 3
        assert [_for_logs(step) for step in steps] == [1, 1, 1], f"rank {rank}: {steps}"


@pytest.mark.parametrize("name", ["ddp", "fsdp in parts"])
def test_a_step_that_logs_nothing_begins_none(name: str, tmp_path: Path) -> None:
    for rank, steps in _fit(Quiet, name, tmp_path).items():
        assert len(steps) == 3
        assert not any(steps), f"rank {rank}: {steps}"


@pytest.mark.parametrize("name", PLANS)
def test_whether_to_stop_goes_by_one_collective_from_batch_to_batch(name: str, tmp_path: Path) -> None:
    counted: list[list[Counter[str]]] = []
    for kind in (GoesOn, Stops):
        (tmp_path / kind.__name__).mkdir()
        ranks = _fit(kind, name, tmp_path / kind.__name__, between=True)
        counted.append([Counter(step) for steps in ranks.values() for step in steps])
    for plain, stops in zip(*counted, strict=True):
        assert stops - plain == {"allreduce_ in process_group.py": 1}
