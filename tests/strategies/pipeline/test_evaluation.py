"""Validation, test and prediction through the stages of a pipeline, with and without a fit, against plain Lightning on one device."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor

from tests.strategies.fitted import BLOCKS, Fitted, numbers
from tests.strategies.pipelines import pipeline, run

UNDER = pipeline(("net.2", "net.3"), schedule="1f1b", micro_batches=3)
INTERLEAVED = pipeline(("net.1", "net.2", "net.3"), schedule="interleaved_1f1b", micro_batches=2, ranks=2)


class Evaluated(Fitted):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("test_loss", loss)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        given = self.net(batch[0])
        return {"given": given, "index": batch_idx, "first": given[0]}


class Outputs(pl.Callback):
    """On every rank the last stage's outputs."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_test_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any, **__: Any) -> None:
        self.seen.append(float(outputs))
        gathered = [None] * trainer.world_size
        if trainer.world_size > 1:
            torch.distributed.all_gather_object(gathered, self.seen[-1])
            assert len(set(gathered)) == 1


@pytest.mark.parametrize("inference_mode", [True, False])
def test_validate_and_test_without_a_fit(inference_mode: bool) -> None:
    seen = []
    for plan in (UNDER, None):
        outputs = Outputs()
        run(Evaluated, numbers(), plan, blocks=BLOCKS, hooks=["test_step"], fn="test", callbacks=[outputs], inference_mode=inference_mode)
        seen.append(outputs.seen)
    torch.testing.assert_close(*seen)
    found = [run(Evaluated, numbers(), plan, blocks=BLOCKS, hooks=["validation_step"], fn="validate")[3] for plan in (INTERLEAVED, None)]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("under", [UNDER, INTERLEAVED], ids=lambda plan: plan.title())
def test_predictions_are_whole_and_in_order(under: Any) -> None:
    found = [
        run(Evaluated, numbers(), plan, blocks=BLOCKS, hooks=["predict_step"], fn="predict", limit_predict_batches=3)[3]
        for plan in (under, None)
    ]
    assert [each["index"] for each in found[0]] == [0, 1, 2]
    torch.testing.assert_close(*found)


def test_monitors_see_the_same_on_every_rank() -> None:
    """A plateau scheduler and early stopping on a value of the last stage; limits, several validations an epoch, a sanity check."""

    class Plateau(Evaluated):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    found = []
    for plan in (UNDER, None):
        stopping = EarlyStopping("val_loss", patience=1, min_delta=0.5)
        options = {"callbacks": [stopping], "val_check_interval": 2, "limit_val_batches": 2, "limit_train_batches": 3, "max_epochs": 5}
        module, losses, trainer, _ = run(Plateau, numbers(), plan, blocks=BLOCKS, num_sanity_val_steps=1, **options)
        found.append((losses, dict(module.state_dict()), float(stopping.best_score), trainer.global_step))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)
    assert 3 < found[0][3] < 15, "it stopped early"


def test_a_fast_dev_run_goes_through_all_of_it() -> None:
    found = [run(Evaluated, numbers(), plan, blocks=BLOCKS, fast_dev_run=2)[1] for plan in (UNDER, None)]
    assert len(found[0]) == 2
    torch.testing.assert_close(*found)
