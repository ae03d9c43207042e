"""The doorways to Lightning's private names do what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lightning_autopar import AutoParallelStrategy
from lightning_autopar import _lightning_compat as compat


def trainer(**options: Any) -> Any:
    return pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, **options)


@pytest.mark.parametrize("devices", ["auto", 1, 2, "2"])
def test_what_the_user_asked_for_is_read_as_it_was(devices: Any) -> None:
    assert trainer(strategy=AutoParallelStrategy(), devices=devices).strategy._requested == devices


def test_outside_a_trainer_nothing_was_asked_for() -> None:
    assert compat.requested_devices() == "auto"


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_is_installed_and_taken_away_again(fails: bool) -> None:
    owner = trainer(strategy=AutoParallelStrategy(), precision="bf16-mixed", use_distributed_sampler=True)
    connector, module = owner._accelerator_connector, BoringModel()
    before = {name: getattr(connector, name) for name in compat._CONNECTOR_FIELDS}
    engine = SingleDeviceStrategy(device=torch.device("cpu"))

    def use() -> None:
        with compat.installed(owner, engine, module, [torch.device("cpu")], keep_sampler=False):
            assert owner.strategy is engine
            assert engine.launcher is None
            assert engine.lightning_module is module
            assert engine.precision_plugin is owner.precision_plugin
            assert owner.precision == "bf16-mixed"
            assert not connector.use_distributed_sampler
            if fails:
                raise KeyError

    if fails:
        with pytest.raises(KeyError):
            use()
    else:
        use()
    assert {name: getattr(connector, name) for name in compat._CONNECTOR_FIELDS} == before


def test_a_distributed_engine_is_seen_as_one() -> None:
    owner = trainer(strategy=AutoParallelStrategy())
    engine = DDPStrategy(parallel_devices=[torch.device("cpu")] * 2)
    engine._configure_launcher = lambda: None
    with compat.installed(owner, engine, BoringModel(), [torch.device("cpu")] * 2, keep_sampler=True):
        assert owner._accelerator_connector.is_distributed
        assert owner._accelerator_connector.use_distributed_sampler
    assert not owner._accelerator_connector.is_distributed


def test_progress_goes_to_another_trainer_whole() -> None:
    module, first = BoringModel(), trainer(max_epochs=2, limit_train_batches=3, limit_val_batches=2, devices=1, strategy="auto")
    first.fit(module)
    second = trainer(max_epochs=2, devices=1, strategy="auto")
    second.strategy._lightning_module = module
    compat.restore_progress(second, compat.progress_of(first))
    for name in ("global_step", "current_epoch", "num_training_batches", "should_stop"):
        assert getattr(second, name) == getattr(first, name), name
    assert second.callback_metrics.keys() == first.callback_metrics.keys()
    assert second.state == first.state
    assert second.fit_loop.state_dict() == first.fit_loop.state_dict()
    assert not second.fit_loop.restarting
    assert not second.fit_loop.is_resuming
    assert not second.fit_loop.epoch_loop.restarting


def test_loaders_go_to_another_trainer() -> None:
    module, first = BoringModel(), trainer(max_epochs=1, limit_train_batches=1, limit_val_batches=1, devices=1, strategy="auto")
    loader = module.train_dataloader()
    first.fit(module, loader)
    second = trainer(devices=1, strategy="auto")
    compat.restore_loaders(second, compat.combined_loaders(first, lambda each: each))
    assert second.train_dataloader is loader
    assert second.val_dataloaders is first.val_dataloaders
    assert second.num_val_batches == first.num_val_batches


def test_a_module_without_a_step_is_refused_in_lightnings_words(tmp_path: Path) -> None:
    owner = trainer(default_root_dir=tmp_path)
    owner.state.fn = compat.TrainerFn.FITTING
    owner.strategy._lightning_module = pl.LightningModule()
    with pytest.raises(Exception, match="No `training_step"):
        compat.verify_configuration(owner)
