"""What planning finds out beside memory and splits: how many batches a fit has, as Lightning counts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_autopar import AutoParallelStrategy
from lightning_autopar.strategies.decide import consider
from lightning_autopar.strategies.prospect import Prospect
from tests.strategies.modules import QUIET

QUICK = {"accelerator": "cpu", "enable_checkpointing": False, **QUIET}


class Net(pl.LightningModule):
    """Counts its batches."""

    def __init__(self, *, automatic: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.automatic_optimization = automatic
        self.count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count += 1
        first = batch
        while not isinstance(first, Tensor):
            first = next(iter(first.values() if isinstance(first, dict) else [each for each in first if each is not None]))
        loss: Tensor = self.layer(first).square().mean()
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            for _ in range(2):
                optimizer.step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stream(IterableDataset[Tensor]):
    """Of no known length."""

    def __iter__(self) -> Any:
        return iter(torch.randn(100, 2))


def loader(batches: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(2 * batches, 2)), batch_size=2)


def found(module: Net, data: Any, root: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> int | None:
    """What is found out before the run, which then doesn't happen."""
    seen: list[int | None] = []

    class Enough(Exception):
        pass

    def stop(*args: Any, **kwargs: Any) -> Prospect:
        seen.append(consider(*args, **kwargs).decision().batches)
        raise Enough

    monkeypatch.setattr("lightning_autopar.strategies.launcher.consider", stop)
    strategy = AutoParallelStrategy(devices="cpu:1GiB", allow=["single"], calibrate="off")
    with pytest.raises(Enough):
        pl.Trainer(strategy=strategy, default_root_dir=root, **QUICK, **options).fit(module, data)  # type: ignore[arg-type]
    return seen[0]


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (lambda: loader(5), {"max_epochs": 3}),
        (lambda: loader(5), {"max_epochs": 3, "max_steps": 7}),
        (lambda: loader(5), {"max_steps": 7}),
        (lambda: loader(5), {"max_epochs": 0}),
        (lambda: loader(5), {"max_epochs": 2, "limit_train_batches": 3}),
        (lambda: loader(5), {"max_epochs": 2, "limit_train_batches": 0.5}),
        (lambda: loader(5), {"max_steps": 7, "accumulate_grad_batches": 2}),
        (lambda: loader(5), {"max_epochs": 2, "accumulate_grad_batches": 4}),
        (lambda: loader(5), {"fast_dev_run": 2}),
        (lambda: loader(5), {"overfit_batches": 2, "max_epochs": 3}),
        (lambda: [loader(5), loader(2)], {"max_epochs": 2}),
        (lambda: CombinedLoader({"a": loader(5), "b": loader(2)}, "min_size"), {"max_epochs": 2}),
        (lambda: CombinedLoader({"a": loader(5), "b": loader(2)}, "max_size_cycle"), {"max_epochs": 2, "limit_train_batches": 4}),
        (lambda: DataLoader(Stream(), batch_size=2), {"max_steps": 6, "accumulate_grad_batches": 2}),
        (lambda: DataLoader(Stream(), batch_size=2), {"max_epochs": 2, "limit_train_batches": 4}),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_batches_of_a_fit_are_lightnings(data: Any, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Net()
    pl.Trainer(default_root_dir=tmp_path, devices=1, **QUICK, **options).fit(plain, data())  # type: ignore[arg-type]
    assert found(Net(), data(), tmp_path, monkeypatch, **options) == plain.count


@pytest.mark.parametrize(
    ("data", "options", "automatic"),
    [
        (lambda: DataLoader(Stream(), batch_size=2), {"max_epochs": 2}, True),
        (lambda: loader(5), {"max_epochs": -1}, True),
        (lambda: DataLoader(Stream(), batch_size=2), {"max_steps": 6}, False),
    ],
)
def test_what_nobody_knows_is_unknown(
    data: Any, options: dict[str, Any], automatic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found(Net(automatic=automatic), data(), tmp_path, monkeypatch, **options) is None
