"""Callbacks that hold copies of the network do the same under FSDP2 as on one device, and have whole copies afterwards."""

from __future__ import annotations

import copy
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_autopar import CheckpointMigrate
from tests.strategies.elastic.test_elastic import Watch, to
from tests.strategies.fitted import BLOCKS, Fitted, assert_same, fit, numbers, plan


class Scaled(Fitted):
    """With a scalar, which isn't sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def loss(self, batch: Any) -> Any:
        return nn.functional.mse_loss(self.net(batch[0]) * self.scale, batch[1])


class Traced(Scaled):
    """Records its code in hooks, and that of a part of it, as loggers of graphs and exports do."""

    def forward(self, x: Any) -> Any:
        return self.net(x) * self.scale

    def on_train_epoch_end(self) -> None:
        x = torch.ones(2, 8)
        traced = torch.jit.trace(func=self, example_inputs=x)(x).sum()
        self.log_dict({"traced": traced, "part": torch.jit.trace(self.net[1:3], torch.ones(2, 16))(torch.ones(2, 16)).sum()})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_code_that_is_recorded_in_hooks_is_the_modules_own() -> None:
    assert_same(Traced, numbers(), plan("fsdp", shard=BLOCKS))


class Backup(pl.Callback):
    """The average of the weights that is copied most: parameters lend their data to it, and get it back."""

    def __init__(self) -> None:
        self.held: Any = {}
        self.backup: Any = {}

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.held = {name: parameter.data.clone() for name, parameter in module.named_parameters()}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for name, parameter in module.named_parameters():
            self.held[name] = (0.1 * parameter.data + 0.9 * self.held[name]).clone()

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        for name, parameter in module.named_parameters():
            self.backup[name] = parameter.data
            parameter.data = self.held[name]

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        for name, parameter in module.named_parameters():
            parameter.data = self.backup[name]
        self.backup = {}


class Swapped(Backup):
    """Parameters and averages exchange their data."""

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        for name, parameter in module.named_parameters():
            self.held[name].data, parameter.data = parameter.data, self.held[name].data

    on_validation_end = on_validation_start


class Cloned(Backup):
    """By state dicts."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for name, value in module.state_dict().items():
            self.held[name].mul_(0.9).add_(value, alpha=0.1)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.backup = copy.deepcopy(module.state_dict())
        module.load_state_dict(self.held)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        module.load_state_dict(self.backup)


class Deep(pl.Callback):
    """A copy of the network, which follows it, is called, and lends its weights."""

    def __init__(self) -> None:
        self.held: Any = None
        self.outputs: list[float] = []

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.held = copy.deepcopy(module.net).requires_grad_(False)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        with torch.no_grad():
            for average, parameter in zip(self.held.parameters(), module.net.parameters(), strict=True):
                average.lerp_(parameter, 0.1)
        module.to(module.device)  # which changes nothing
        self.outputs.append(float(self.held.to(module.device)(torch.ones(2, 8)).sum()))

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.kept = {name: value.clone() for name, value in module.net.state_dict().items()}
        module.net.load_state_dict(self.held.state_dict())

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        module.net.load_state_dict(self.kept)


class OfTheModule(Deep):
    """torch's average of the whole LightningModule."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.held = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.held.update_parameters(module)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        pass

    on_validation_end = on_validation_start


class Early:
    """Copies the network before it is sharded, so that the copy is whole."""

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        super().on_fit_start(trainer, module)  # type: ignore[misc]

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        pass


class EarlyBackup(Early, Backup): ...


class EarlyClones(Early, Cloned): ...


class EarlyDeep(Early, Deep): ...


class EarlyOfTheModule(Early, OfTheModule): ...


@pytest.mark.parametrize("make", [Backup, Swapped, Cloned, Deep, OfTheModule, EarlyBackup, EarlyClones, EarlyDeep, EarlyOfTheModule])
def test_an_average_is_one_devices_and_comes_back_whole(make: Any) -> None:
    found: list[Any] = []
    for under in (plan("fsdp", shard=BLOCKS), None):
        callback = make()
        module, losses, trainer = fit(Scaled, numbers(), under, callbacks=[callback], num_sanity_val_steps=0)
        held = callback.held if isinstance(callback.held, dict) else dict(callback.held.state_dict())
        if isinstance(callback.held, nn.Module):
            assert not any(child._forward_hooks or child._load_state_dict_pre_hooks for child in callback.held.modules())
            assert all(isinstance(each, nn.Parameter) for each in callback.held.parameters())
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        found.append((held, losses, metrics, dict(module.state_dict()), getattr(callback, "outputs", [])))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging"])
def test_lightnings_averages_are_one_devices(name: str, tmp_path: Path) -> None:
    kind = getattr(callbacks, name, None)
    if kind is None:
        pytest.skip(f"this Lightning has no {name}")
    found: list[Any] = []
    for under in (plan("fsdp", shard=BLOCKS), None):
        average = kind(1e-2, swa_epoch_start=1) if name.startswith("Stochastic") else kind()
        saving = callbacks.ModelCheckpoint(dirpath=tmp_path / str(under is None), save_last=True)
        options = {"callbacks": [average, saving], "enable_checkpointing": True, "num_sanity_val_steps": 0, "max_epochs": 3}
        module, losses, trainer = fit(Scaled, numbers(), under, **options)
        saved = torch.load(saving.last_model_path, weights_only=False)
        states = [saved["state_dict"], saved.get("current_model_state"), saved.get("averaging_state")]
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        found.append((losses, metrics, dict(average._average_model.state_dict()), dict(module.state_dict()), states))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


class Slow(Scaled):
    """Each step takes a while in a worker, so that the run lasts long enough to be moved."""

    def loss(self, batch: Any) -> Any:
        if os.getpid() != _HOME:
            time.sleep(0.02)
        return super().loss(batch)


_HOME = os.getpid()


@pytest.mark.parametrize("make", [Cloned, Deep, getattr(callbacks, "EMAWeightAveraging", EarlyClones)])
def test_averages_move_with_the_run(make: Any) -> None:
    """A generation's shards are of no use to the next one, also where that has as many ranks."""
    found: list[Any] = []
    first = plan("fsdp", shard=BLOCKS)
    for under in (first, None):
        average, moves = make(), []
        if under is not None:
            moves = [CheckpointMigrate(), Watch((3, to(replace(first, devices=("cpu:1", "cpu:0")))), (7, to(plan("single", ranks=1))))]
        options: Any = {"num_sanity_val_steps": 0, "max_epochs": 3, "callbacks": [average, *moves]}
        module, losses, trainer = fit(Slow, numbers(), under, **options)
        if under is not None:
            assert [span.title for span in trainer.strategy.history.spans] == ["fsdp ×2, reshard", "fsdp ×2, reshard", "single"]
        held = getattr(average, "held", None)
        found.append(
            (
                average._average_model.state_dict() if held is None else held if isinstance(held, dict) else held.state_dict(),
                losses,
                dict(module.state_dict()),
            )
        )
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


class OfItsRows(EarlyClones):
    """Writes to the weights what it finds in its rank's rows."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(self.held[name] * batch[0].mean())


class Recorded(EarlyClones):
    """Computes with whole tensors where gradients are recorded."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        sum((parameter - self.held[name]).square().sum() for name, parameter in module.named_parameters()).backward()


@pytest.mark.parametrize(("make", "words"), [(OfItsRows, "writes other values to a parameter"), (Recorded, "gradients are recorded")])
def test_what_would_not_be_the_same_on_all_ranks_is_refused(make: Any, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        fit(Scaled, numbers(), plan("fsdp", shard=BLOCKS), callbacks=[make()], num_sanity_val_steps=0)


class Saving(Cloned):
    """Puts its average into checkpoints, as a state and by itself."""

    only_on: Any = (0, 1)

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held}

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        if trainer.global_rank in self.only_on:
            checkpoint["average"] = list(self.held.values())


def test_a_checkpoint_has_whole_averages(tmp_path: Path) -> None:
    saved = []
    for under in (plan("fsdp", shard=BLOCKS), None):
        best = pl.callbacks.ModelCheckpoint(dirpath=tmp_path / str(under is None))
        fit(Scaled, numbers(), under, callbacks=[Saving(), best], enable_checkpointing=True, num_sanity_val_steps=0)
        checkpoint = torch.load(best.best_model_path, weights_only=True)
        saved.append((checkpoint["callbacks"]["Saving"], checkpoint["average"]))
    torch.testing.assert_close(*saved, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:these changes of the run could not be brought back")  # one rank's shards
def test_a_checkpoint_with_one_ranks_shards_is_refused(tmp_path: Path) -> None:
    class OfRankZero(Saving):
        only_on = (0,)

    options = {"callbacks": [OfRankZero(), pl.callbacks.ModelCheckpoint(dirpath=tmp_path)], "enable_checkpointing": True}
    with pytest.raises(ValueError, match=r"checkpoint\['average'\]\[0\] is a shard of FSDP2's that not every rank has put there"):
        fit(Scaled, numbers(), plan("fsdp", shard=BLOCKS), num_sanity_val_steps=0, **options)
