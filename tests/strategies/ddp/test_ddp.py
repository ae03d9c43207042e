"""DDP on two real ranks against plain Lightning on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from tests.strategies.fitted import Fitted, assert_same, fit, numbers, plan


class Skipping(Fitted):
    """Leaves a block out of every other step, as LayerDrop does."""

    def loss(self, batch: Any) -> Tensor:
        hidden = self.net[0](batch[0])
        for index in (1, 2, 3):
            if index != 2 or self.global_step % 2:
                hidden = self.net[index](hidden)
        return mse_loss(self.net[4](hidden), batch[1])


class ByHand(Fitted):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.manual_backward(0.1 * self.loss(batch))
        optimizer.step()
        self.log("loss", loss)


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}])
@pytest.mark.parametrize("make", [Fitted, Skipping])
def test_training_is_plain_lightnings(make: Any, options: dict[str, Any]) -> None:
    assert_same(make, numbers(), plan("ddp"), **options)


@pytest.mark.parametrize("make", [Fitted, ByHand])
def test_torch_s_advice_is_kept_from_the_user(make: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert_same(make, numbers(), plan("ddp"))
    assert "find_unused_parameters" not in capfd.readouterr().err


def test_what_else_is_on_stderr_stays(capfd: pytest.CaptureFixture[str]) -> None:
    class Talking(Fitted):
        def loss(self, batch: Any) -> Tensor:
            import os

            os.write(2, b"said in the step\n")
            return super().loss(batch)

    fit(Talking, numbers(8), plan("ddp"), max_epochs=1)
    assert "said in the step" in capfd.readouterr().err


def test_three_ranks_and_a_last_batch_of_two() -> None:
    torch.manual_seed(0)
    assert_same(Fitted, numbers(26), plan("ddp", ranks=3))
