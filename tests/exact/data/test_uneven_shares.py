"""Plans with uneven shares on real ranks: the samples that each gets, and a run that is one device's."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchmetrics import MeanMetric

from lightning_autopar import AutoParallelStrategy
from lightning_autopar.exact.data.loader import ExactLoader
from lightning_autopar.exact.data.rank_share import Dealing
from lightning_autopar.plans import Engine, Plan
from lightning_autopar.state.snapshot import save_snapshot

pytestmark = [pytest.mark.filterwarnings("ignore:.*does not have many workers")]


def plan(engine: Engine, *shares: int) -> Plan:
    """On as many CPU devices as there are shares."""
    options: dict[str, Any] = {"reshard_after_forward": True, "shard": ("net.0",)} if engine == "fsdp" else {}
    return Plan(engine=engine, devices=tuple(f"cpu:{rank}" for rank in range(len(shares))), shares=shares, **options)


class Noisy(Dataset[Any]):
    """Numbered samples with noise that is drawn as they are loaded."""

    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index)) + 0.1 * torch.randn(8)
        return x, x.sum(0, keepdim=True), index


class Stream(IterableDataset[Any]):
    """Samples of unknown number."""

    def __iter__(self) -> Any:
        return (Noisy()[index] for index in range(20))


class Net(pl.LightningModule):
    """BatchNorm, dropout, metrics of every kind."""

    def __init__(self, *, norm: bool = True) -> None:
        super().__init__()
        # No bias in front of BatchNorm: its gradient is nothing but rounding, which AdamW divides by itself.
        self.net = nn.Sequential(
            nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16) if norm else nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)
        )
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        errors = (self.net(batch[0]) - batch[1]).pow(2)
        self.log("loss", errors.mean(), on_step=True, on_epoch=True)
        self.log("largest", errors.detach().max(), reduce_fx="max", on_epoch=True, on_step=False)
        self.mean(errors)
        self.log("mean", self.mean, on_epoch=True)
        return errors.mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", (self.net(batch[0]) - batch[1]).pow(2).mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Given(pl.Callback):
    """Writes down which samples each process was given."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        with (self.folder / f"{trainer.global_rank}-{batch_idx}.json").open("a") as file:
            file.write(json.dumps(batch[2].tolist()) + "\n")


def trainer(under: Plan | None, **options: Any) -> pl.Trainer:
    strategy: Any = "auto" if under is None else AutoParallelStrategy(devices=f"{under.world_size}xcpu:1GiB", plan=under)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return pl.Trainer(
        **{"accelerator": "cpu", "devices": 1, "strategy": strategy, "max_epochs": 2, "log_every_n_steps": 1, **quiet, **options}
    )


Fit: TypeAlias = tuple[dict[str, float], dict[str, Tensor], list[list[int]]]


def fit(folder: Path, under: Plan | None, stream: Any = None, *, resume: Path | None = None, make: Any = None, **options: Any) -> Fit:
    """Metrics, weights, and the samples of each step as one device has them."""
    folder.mkdir()
    pl.seed_everything(5, verbose=False)
    module, run = (make or Net)(), trainer(under, **{**options, "callbacks": [Given(folder), *options.get("callbacks", [])]})
    train, validation = (DataLoader(Noisy(), batch_size=8, shuffle=shuffle) if stream is None else stream for shuffle in (True, False))
    run.fit(module, train, validation, ckpt_path=resume)
    if under is not None:
        assert run.strategy.plan.shares == under.shares  # type: ignore[attr-defined]
    return {name: float(value) for name, value in run.callback_metrics.items()}, module.state_dict(), samples(folder, under)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> Fit:
    """Plain Lightning's run."""
    return fit(tmp_path_factory.mktemp("plain") / "run", None)


def samples(folder: Path, under: Plan | None) -> list[list[int]]:
    """The samples of each batch in order, put together by the plan's dealing; those of a batch's place in all epochs after each other."""
    dealing = Dealing.even(1) if under is None else Dealing(under.dealing)
    found = []
    for path in sorted(folder.glob("0-*.json")):
        ranks = [path.with_name(f"{rank}-{path.name[2:]}").read_text().splitlines() for rank in range(dealing.holders)]
        for lines in zip(*ranks, strict=True):
            parts: list[list[int]] = [json.loads(line) for line in lines]
            of = len({index for part in parts for index in part})  # a rank without a sample is fed another's
            whole = {place: index for rank, part in enumerate(parts) for place, index in zip(dealing.indices(of, rank), part, strict=False)}
            assert sorted(whole) == list(range(of))
            found.append([whole[place] for place in range(of)])
    return found


def assert_same(ours: Fit, theirs: Fit) -> None:
    assert ours[0] == pytest.approx(theirs[0], abs=1e-6, rel=1e-6)
    torch.testing.assert_close(dict(ours[1]), dict(theirs[1]), atol=1e-6, rtol=1e-6)
    assert ours[2] == theirs[2]


@pytest.mark.parametrize(("engine", "shares"), [("fsdp", (2, 1)), ("ddp", (1, 2, 2))])
def test_uneven_shares_are_one_devices_run(engine: Engine, shares: tuple[int, ...], one_device: Fit, tmp_path: Path) -> None:
    """Batches of eight and a last one of two, which leaves a rank without: BatchNorm, dropout, noise in the dataset, logged values."""
    assert_same(fit(tmp_path / "ours", plan(engine, *shares)), one_device)


def test_uneven_shares_in_parts(tmp_path: Path) -> None:
    """Micro-batches of uneven shares: a rank's parts are as many as the largest share needs. (BatchNorm isn't for micro-batches.)"""
    under = replace(plan("ddp", 1, 3), micro_batches=2)
    make = partial(Net, norm=False)
    assert_same(fit(tmp_path / "ours", under, make=make), fit(tmp_path / "theirs", None, make=make))


def test_a_stream_is_dealt_out_unevenly(tmp_path: Path) -> None:
    ours = fit(tmp_path / "ours", plan("ddp", 1, 2), DataLoader(Stream(), batch_size=6), max_epochs=1)
    assert_same(ours, fit(tmp_path / "theirs", None, DataLoader(Stream(), batch_size=6), max_epochs=1))


class Snapshots(pl.Callback):
    """Saves after one step."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            save_snapshot(trainer, self.path)


def test_a_run_goes_on_with_other_shares_in_mid_epoch(one_device: Fit, tmp_path: Path) -> None:
    """Shares 1:3 of replicas, then 3:1:2 of shards, then one device: the same run."""
    runs = (
        (plan("ddp", 1, 3), None, [Snapshots(tmp_path / "two", 2)]),
        (plan("fsdp", 3, 1, 2), tmp_path / "two", [Snapshots(tmp_path / "five", 5)]),
        (Plan(engine="single", devices=("cpu:0",)), tmp_path / "five", []),
    )
    for number, (under, begin, callbacks) in enumerate(runs):
        metrics, weights, _ = fit(tmp_path / f"run {number}", under, resume=begin, callbacks=callbacks)
        assert_same((metrics, weights, one_device[2]), one_device)


def test_predictions_and_evaluation_are_one_devices() -> None:
    torch.manual_seed(2)
    module, loader = Net(), DataLoader(TensorDataset(torch.randn(13, 8), torch.randn(13, 1)), batch_size=4)
    expected, value = trainer(None).predict(module, loader), trainer(None).validate(module, loader, verbose=False)
    under = plan("ddp", 1, 3)
    torch.testing.assert_close(trainer(under).predict(module, loader), expected)
    assert trainer(under).validate(module, loader, verbose=False) == [pytest.approx(value[0], rel=1e-6)]


class Wide(pl.LightningModule):
    """Its activations are most of its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).pow(2).mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-3)


def test_each_ranks_memory_is_that_of_its_own_share() -> None:
    run = trainer(plan("ddp", 1, 3), max_epochs=1)
    run.fit(Wide(), DataLoader(TensorDataset(torch.randn(24, 512, 64)), batch_size=4))
    strategy: Any = run.strategy
    predicted = strategy.report.best_candidate.bytes
    small, large = (strategy.measured[device]["peak_bytes"] for device in ("cpu:0", "cpu:1"))
    assert large > 2 * small
    for device, measured in (("cpu:0", small), ("cpu:1", large)):
        assert predicted[device].allocated == pytest.approx(measured, rel=0.02)


def test_every_rank_needs_a_share(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dealt out to 2 ranks, but there are 3"):
        ExactLoader(DataLoader(Noisy()), rank=0, world_size=3, dealing=Dealing.even(2))


class Pairs(DataLoader[Any]):
    """Two loaders' batches together, by an iteration of its own."""

    def __iter__(self) -> Any:
        return zip(super().__iter__(), DataLoader(self.dataset, batch_size=8), strict=True)


class Paired(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        first, second = batch
        super().validation_step([first[0], second[1]], batch_idx)


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_a_validation_loader_with_an_iteration_of_its_own(engine: Engine) -> None:
    found = []
    for under in (None, plan(engine, 1, 1)):
        pl.seed_everything(5, verbose=False)
        module, run = Paired(norm=False), trainer(under, max_epochs=1)
        run.fit(module, DataLoader(Noisy(), batch_size=8), Pairs(Noisy(), batch_size=8))
        found.append(float(run.callback_metrics["val_loss"]))
    assert found[1] == pytest.approx(found[0], rel=1e-5)
