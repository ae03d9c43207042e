"""A prediction that takes more of a real GPU's memory than there is, and an optimizer's first step that does, run again there."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_autopar import AutoParallelStrategy
from tests.fresh import fresh
from tests.strategies.modules import QUIET, Regression, loader

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*does not have many workers")]


def fill(share: float, device: torch.device) -> None:
    """Take this share of the GPU's memory, for a moment; not while the step is planned for."""
    if torch.cuda.is_initialized():
        torch.empty(int(torch.cuda.mem_get_info(device)[1] * share), dtype=torch.uint8, device=device)


class Predicts(Regression):
    """Two samples fit at once."""

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        found: Tensor = self.net(batch[0])  # first: cuBLAS keeps memory, which would lie in the middle of what is filled
        fill(0.3 * len(batch[0]), self.device)
        return found


class Full(torch.optim.Adam):
    """Lacks memory when it has updated everything for the first time."""

    tried = 0

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.tried += 1
        if self.tried == 1:
            fill(2.0, self.param_groups[0]["params"][0].device)
        return loss


class Trains(Regression):
    optimizer: type[torch.optim.Adam] = Full

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=0.01)


class TrainsPlainly(Trains):
    optimizer = torch.optim.Adam


def _trainer() -> pl.Trainer:
    strategy, quiet = AutoParallelStrategy(calibrate="off", allow=["single"]), dict[str, Any](QUIET)
    return pl.Trainer(accelerator="gpu", devices=1, strategy=strategy, max_epochs=1, enable_checkpointing=False, **quiet)


def _predicted() -> tuple[Any, Any]:
    pl.seed_everything(1, verbose=False)
    module, batches = Predicts(), loader()
    ours = _trainer().predict(module, batches)
    return [each.cpu() for each in ours or []], [module.cpu().net(batch[0]).detach() for batch in batches]


def _trained(make: type[Trains]) -> dict[str, Tensor]:
    pl.seed_everything(1, verbose=False)
    module = make()
    _trainer().fit(module, loader())
    return {name: value.cpu() for name, value in module.state_dict().items()}


def test_a_prediction_is_run_again_in_parts() -> None:
    ours, theirs = fresh(_predicted)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_an_optimizers_first_step_is_done_again() -> None:
    torch.testing.assert_close(fresh(_trained, Trains), fresh(_trained, TrainsPlainly), rtol=1e-6, atol=1e-7)
