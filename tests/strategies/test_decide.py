"""Planning in the parent: it leaves everything as it was, and says what plain Lightning would say."""

from __future__ import annotations

import random
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar import AutoParallelStrategy, NothingFits
from lightning_autopar._lightning_compat import TrainerFn, attach_data
from lightning_autopar.memory.spec import parse_spec
from lightning_autopar.strategies import decide as deciding
from lightning_autopar.strategies.decide import Decision, Settings, decide


class Custom(Exception):
    """With a constructor that no pickle calls rightly."""

    def __init__(self, code: int, *, word: str) -> None:
        super().__init__(f"{word} {code}")
        self.code = code


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.notes: list[str] = []

    def setup(self, stage: str) -> None:
        self.notes.append(stage)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.notes.append("step")
        random.random()
        numpy.random.rand()
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        self.notes.append("optimizers")
        return torch.optim.Adam(self.parameters())


class Dataset(TensorDataset):
    def __init__(self) -> None:
        super().__init__(torch.randn(12, 4), torch.randn(12, 1))
        self.read = 0

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        torch.rand(1)
        return super().__getitem__(index)


def trainer_for(module: Any, loader: Any, root: Path, strategy: Any = None, **options: Any) -> Any:
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy or AutoParallelStrategy(devices="2xcpu:1GiB"),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
        **options,
    )
    trainer.state.fn = TrainerFn.FITTING
    trainer.strategy._lightning_module = module
    attach_data(trainer, {"model": module, "train_dataloaders": loader})
    return trainer


def plan(trainer: Any, *, spec: str = "2xcpu:1GiB", **settings: Any) -> Decision:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return decide(trainer, Settings(**{"allow": ("single", "ddp", "fsdp"), **settings}), (parse_spec(spec), None))


def test_nothing_is_changed_by_planning(tmp_path: Path) -> None:
    module, generator = Net(), torch.Generator().manual_seed(3)
    dataset = Dataset()
    loader = DataLoader(dataset, batch_size=4, shuffle=True, generator=generator)
    trainer = trainer_for(module, loader, tmp_path)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    names = set(vars(module))
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy(), generator.get_state()
    plan(trainer)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert (states[2] == numpy.random.get_state()[1]).all()
    assert torch.equal(states[3], generator.get_state())
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in weights.items())
    assert (module.notes, dataset.read, set(vars(module)), list(tmp_path.iterdir())) == ([], 0, names, [])
    assert all(parameter.grad is None for parameter in module.parameters())
    assert trainer.train_dataloader is None


@pytest.mark.parametrize("where", ["prepare_data", "setup", "loader", "dataset", "collate"])
def test_what_the_users_data_code_raises_is_raised_as_it_is(where: str, tmp_path: Path) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise Custom(7, word=where)

    module: Any = Net()
    loader: Any = DataLoader(Dataset(), batch_size=4)
    if where == "dataset":
        loader.dataset.__class__ = type("Failing", (Dataset,), {"__getitem__": fail})
    elif where == "collate":
        loader.collate_fn = fail
    elif where == "loader":
        module.train_dataloader, loader = fail, None
    else:
        setattr(module, where, fail)
    trainer = trainer_for(module, loader, tmp_path)
    with pytest.raises(Custom, match=f"{where} 7") as caught:
        plan(trainer)
    assert caught.value.code == 7
    assert "in fail" in str(caught.value.__cause__)


def test_a_missing_loader_or_step_is_lightnings_own_error(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match="train_dataloader"):
        plan(trainer_for(Net(), None, tmp_path))

    class Stepless(pl.LightningModule):
        pass

    with pytest.raises(MisconfigurationException, match="No `training_step"):
        plan(trainer_for(Stepless(), DataLoader(Dataset()), tmp_path))


def test_a_step_that_takes_too_long_to_look_at_is_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(*args: Any, **kwargs: Any) -> Any:
        time.sleep(60)

    monkeypatch.setattr(deciding, "trace", wait)
    monkeypatch.setattr(deciding, "_TRACE_SECONDS", 0.7)
    trainer = trainer_for(Net(), DataLoader(Dataset(), batch_size=4), tmp_path)
    with pytest.warns(UserWarning, match="guessed: the child process was stopped after 0.7 seconds"):
        decision = decide(trainer, Settings(allow=("ddp",)), (parse_spec("2xcpu:1GiB"), None))
    assert any("guess" in text for text in decision.report.footprint.assumptions)
    assert decision.assignment.plan.engine == "ddp"


def test_a_loader_that_never_gives_a_batch_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Dataset):
        def __getitem__(self, index: int) -> Any:
            time.sleep(60)

    monkeypatch.setattr(deciding, "_TRACE_SECONDS", 0.3)
    with pytest.raises(RuntimeError, match=r"needs the run's first batch, and couldn't have it: .* stopped after 0.3 seconds"):
        plan(trainer_for(Net(), DataLoader(Slow(), batch_size=4), tmp_path))


def test_devices_of_the_catalogue_are_not_run_on(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can be planned for, not run on; give devices that are here"):
        plan(trainer_for(Net(), DataLoader(Dataset(), batch_size=4), tmp_path), spec="8xH100-80GB")


def test_a_module_that_fits_nowhere_is_told_with_the_table(tmp_path: Path) -> None:
    class Large(Net):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Linear(4096, 4096)

    with pytest.raises(NothingFits, match="needs") as caught:
        plan(trainer_for(Large(), DataLoader(Dataset(), batch_size=4), tmp_path), spec="2xcpu:64MiB")
    report = caught.value.report
    assert report.best is None
    assert {candidate.plan.engine for candidate in report.candidates} >= {"single", "ddp", "fsdp"}
    assert "ddp" in str(caught.value)
    assert report.advice


def test_batches_of_each_device_are_planned_as_such(tmp_path: Path) -> None:
    loader = DataLoader(Dataset(), batch_size=1)
    with pytest.raises(NothingFits, match="a batch of 1 sample"):
        plan(trainer_for(Net(), loader, tmp_path), allow=("ddp",))
    decision = plan(trainer_for(Net(), loader, tmp_path), allow=("ddp",), batch="per_device")
    assert decision.assignment.batch == "per_device"
    whole = plan(trainer_for(Net(), DataLoader(Dataset(), batch_size=8), tmp_path), allow=("ddp",), batch="per_device")
    split = plan(trainer_for(Net(), DataLoader(Dataset(), batch_size=8), tmp_path), allow=("ddp",))
    assert whole.candidate.bytes["cpu:0"].input == 2 * split.candidate.bytes["cpu:0"].input
