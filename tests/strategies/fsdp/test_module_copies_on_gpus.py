"""Callbacks' copies of the network under FSDP2 over NCCL, which has no collective for what lies in host memory."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_autopar import AutoParallelStrategy, Plan
from lightning_autopar.devices.discover import probe
from tests.fresh import fresh
from tests.strategies.fitted import BLOCKS, QUIET, numbers
from tests.strategies.fsdp.test_module_copies import Deep, Scaled


class OnHost(Deep):
    """A copy in host memory, which follows the network, is called, and lends its weights."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.held = copy.deepcopy(module.net).requires_grad_(False).cpu()

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for average, parameter in zip(self.held.parameters(), module.net.parameters(), strict=True):
            average.lerp_(parameter.detach().cpu(), 0.1)
        self.outputs += [float(self.held(torch.ones(2, 8)).sum()), float(module.net[0].weight.detach().cpu().norm())]

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["average"] = self.held.state_dict()


def _run(sharded: bool, folder: Any) -> tuple[Any, ...]:
    warnings.simplefilter("ignore")
    pl.seed_everything(3, verbose=False)
    strategy: Any = "auto"
    if sharded:
        ids = tuple(device.id for device in probe(accelerator="cuda").devices[:2])
        plan = Plan(engine="fsdp", devices=ids, shard=BLOCKS, reshard_after_forward=True)
        strategy = AutoParallelStrategy(plan=plan, calibrate="off")
    module, average, saving = Scaled(), OnHost(), pl.callbacks.ModelCheckpoint(dirpath=folder)
    trainer = pl.Trainer(
        accelerator="gpu", devices=2 if sharded else 1, strategy=strategy, max_epochs=2, num_sanity_val_steps=0,
        callbacks=[average, saving], **{**QUIET, "enable_checkpointing": True},
    )  # fmt: skip
    trainer.fit(module, DataLoader(numbers(), batch_size=8, shuffle=True), DataLoader(numbers(), batch_size=8))
    saved = torch.load(saving.best_model_path, map_location="cpu", weights_only=False)["average"]
    held: dict[str, Tensor] = average.held.state_dict()
    return held, dict(saved), average.outputs, {name: value.cpu() for name, value in module.state_dict().items()}


@pytest.mark.gpu
@pytest.mark.two_gpus
def test_a_copy_in_host_memory_is_one_devices_and_comes_back_whole(tmp_path: Any) -> None:
    ours, theirs = fresh(_run, True, tmp_path / "sharded"), fresh(_run, False, tmp_path / "plain")
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
