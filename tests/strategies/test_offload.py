"""FSDP2's offload to host memory. On CPU devices it saves nothing, but runs the same code, but for pinned memory and copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity import BLOCKS, Fitted, assert_same, mlp, numbers, plan
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torchmetrics import MeanMetric

from lightning_autopar.planning import runnable

pytestmark = pytest.mark.timeout(60)


class Watched(Fitted):
    """Built late, with BatchNorm's buffers, a metric, AdamW's state, and a look at where they lie."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None
        self.mean = MeanMetric()  # in place before the module is built in shapes only, and as real as ever after it

    def configure_model(self) -> None:
        if self.net is None:
            self.net = mlp()
            self.net[0] = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.BatchNorm1d(16))
            self.late = MeanMetric()
            self.register_buffer("unkept", torch.randn(1), persistent=False)

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) + self.unkept.sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for name, metric in (("mean", self.mean), ("late", self.late)):
            metric(loss.detach())
            self.log(name, metric, on_epoch=True, on_step=False)
        return loss

    def on_train_epoch_end(self) -> None:
        weight: Any = self.net[1][0].weight
        if isinstance(weight, DTensor):
            assert weight.to_local().device == torch.device("cpu")
            policy = self.net[1]._get_fsdp_state()._fsdp_param_groups[0].offload_policy
            assert isinstance(policy, CPUOffloadPolicy)
            assert not policy.pin_memory
        assert self.device == self.trainer.strategy.root_device

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


@pytest.mark.parametrize("large", [False, True])
def test_offloaded_shards_are_one_devices_run(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are clipped by their norm, which is a sum over the ranks of what lies in host memory."""
    monkeypatch.setattr(runnable, "RUNS", runnable.RUNS | {"offload"})  # planning takes no such plan by itself
    under = plan("fsdp", shard=BLOCKS, offload=("optimizer", "parameters"))
    assert_same(Watched, numbers(), under, large=large, gradient_clip_val=0.3)
