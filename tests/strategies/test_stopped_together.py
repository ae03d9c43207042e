"""A step that ends the fit by ``trainer.should_stop``, or that gives no gradient, by what one rank alone knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.strategies.fitted import BLOCKS, Fitted, assert_same, numbers, plan
from tests.strategies.pipelines import pipeline, run

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec")


class Stops(Fitted):
    """Ends the fit at a sample that only one rank has; in stages, after all blocks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        if bool((batch[0][:, 0] == numbers()[9][0][0]).any()):
            self.trainer.should_stop = True
        return loss


class Stands(Fitted):
    """Has a loss that no parameter is behind, from its third step on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss if self.global_step < 2 else torch.zeros((), requires_grad=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def test_a_rank_that_stops_stops_all() -> None:
    options: dict[str, Any] = {"min_epochs": 0, "max_epochs": 3}
    assert_same(Stops, numbers(), plan("ddp"), **options)
    found = [run(Stops, numbers(), each, blocks=BLOCKS, **options) for each in (None, pipeline(["net.3"]))]
    assert found[0][2].global_step == found[1][2].global_step < 12


def test_a_step_without_a_gradient_ends_a_pipeline() -> None:
    with pytest.raises(RuntimeError, match="a tensor between two stages has no gradient for this batch, but had one for an earlier one"):
        run(Stands, numbers(24), pipeline(["net.3"]), blocks=BLOCKS)
