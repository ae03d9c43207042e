"""Parameters that a hook puts into the module after the run has begun: refused under every engine of several ranks."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
from torch import nn
from torch.utils.data import DataLoader

from lightning_autopar import AutoParallelStrategy
from tests.strategies.fitted import QUIET, Fitted, numbers


class NewHead(Fitted):
    """Another layer in the place of its last one, of the same name."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[4] = nn.Linear(16, 1)
            self.trainer.strategy.setup_optimizers(self.trainer)


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "pipeline", "zero"])
def test_a_new_layer_of_an_old_name_is_refused(engine: Any) -> None:
    strategy = AutoParallelStrategy(devices="2xcpu:1GiB", allow=[engine], calibrate="off")
    trainer = pl.Trainer(**QUIET, strategy=strategy, max_epochs=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'net\.4\.weight' was put into the module after the run had begun"):
        trainer.fit(NewHead(), DataLoader(numbers(), batch_size=8), DataLoader(numbers(8), batch_size=8))
