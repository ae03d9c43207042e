"""Random draws in hooks and callbacks, whose parameters are shards or another stage's: those of one device, on every engine."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.utils.data import DataLoader

from lightning_autopar import AutoParallelStrategy
from tests.strategies.fitted import QUIET, Fitted, numbers


class Resets(Fitted):
    """Resets one layer before training and another one later on; weights move at random after each batch."""

    def on_fit_start(self) -> None:
        nn.init.normal_(self.net[2][0].weight, std=0.1)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            nn.init.uniform_(self.net[4].weight, -0.1, 0.1)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)


class NoisyGradients(pl.Callback):
    """Drops gradients, adds noise to them, and logs their norms as Lightning's documentation does."""

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                # Its first dimension can be divided by the samples, as a draw over a batch.
                parameter.grad.mul_(torch.empty_like(parameter.grad).bernoulli_(0.8))

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(torch.rand_like(parameter.grad), alpha=1e-3)
        pl_module.log_dict(grad_norm(pl_module, norm_type=2))


def trained(strategy: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    pl.seed_everything(3, verbose=False)
    module = Resets()
    trainer = pl.Trainer(**QUIET, strategy=strategy, max_epochs=2, limit_val_batches=0, callbacks=[NoisyGradients()])  # type: ignore[arg-type]
    trainer.fit(module, DataLoader(numbers(), batch_size=8, shuffle=True), DataLoader(numbers(8), batch_size=8))
    return dict(module.state_dict()), {name: value.float() for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "pipeline"])
def test_hooks_draw_what_they_draw_on_one_device(engine: Any) -> None:
    ours = trained(AutoParallelStrategy(devices="2xcpu:1GiB", allow=[engine], calibrate="off"))
    torch.testing.assert_close(ours, trained("auto"), rtol=1e-5, atol=1e-6)
