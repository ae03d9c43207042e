"""How the values that an evaluation logs combine, by the batches that planning looks at."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_autopar.constraints import SplitFinding
from lightning_autopar.memory.trace.first_batch import FirstBatch
from lightning_autopar.strategies.preparation.evaluation_findings import with_evaluation


class Summing(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("squares", self.layer(batch).square().sum())


ONE, MORE = (FirstBatch(batch=torch.rand(count, 3), batch_size=count, loaders=(DataLoader([0], batch_size=None),)) for count in (1, 4))


@pytest.mark.parametrize(("batches", "size", "told"), [((ONE, MORE), None, "rule"), ((ONE,), None, "note"), ((ONE,), 1, "")])
def test_where_the_first_batch_has_one_sample_another_one_tells(batches: tuple[FirstBatch, ...], size: int | None, told: str) -> None:
    for batch in batches:
        object.__setattr__(batch, "loaders", (DataLoader([0], batch_size=size),))
    module, trainer = Summing(), pl.Trainer(accelerator="cpu", logger=False)
    module.trainer = trainer
    found = with_evaluation(SplitFinding(), module, trainer, batches, [], "fit", quick=True)
    assert found.log_rules.get(("validation_step", "squares")) == (("sum",) if told == "rule" else None)
    assert [note.partition(":")[0] for note in found.notes] == ["not checked"] * (told == "note")
