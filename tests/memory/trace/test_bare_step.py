"""What a module is told that runs without a trainer's loops."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_autopar.memory.trace.bare_step import BareStep


class Scheduled(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


@pytest.mark.parametrize(("fn", "rates"), [(TrainerFn.FITTING, [0.5, 0.5]), (TrainerFn.VALIDATING, None)])
def test_a_validation_in_a_fit_has_the_optimizers_and_schedulers(fn: TrainerFn, rates: list[float] | None) -> None:
    module, trainer = Scheduled(), pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    trainer.state.fn = fn
    step = BareStep(module, trainer, "validate", autocast_dtype=None, default_dtype=None, enter=lambda phase: None)
    step.build()
    scheduler: Any = module.lr_schedulers()
    if rates is None:
        assert scheduler is None
    else:
        assert [scheduler.get_last_lr()[0], module.optimizers().param_groups[0]["lr"]] == rates  # type: ignore[union-attr]
    assert not step.optimizers
