"""What an engine adds to Lightning's strategy while it sets up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_autopar.plans import Plan
from tests.strategies.fitted import BLOCKS, Fitted, assert_same, numbers, plan


class ByAddress(Fitted):
    """A group of parameters in another order on each rank, as one that was made from a set is."""

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return torch.optim.Adam(parameters[::-1] if self.global_rank else parameters, 0.01)


@pytest.mark.parametrize("under", [plan("fsdp", shard=BLOCKS), plan("zero", zero_stage=1)], ids=lambda under: under.engine)
def test_a_group_may_have_another_order_on_each_rank(under: Plan) -> None:
    assert_same(ByAddress, numbers(), under)
