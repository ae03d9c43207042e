"""How a worker ends: not before its part of what all ranks gather is done."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_autopar.state import checkpoint
from tests.strategies.modules import Regression, loader, trainer, weights


@pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor` is deprecated")  # by torch 2.13; 2.11 has nothing else
def test_no_rank_ends_before_the_weights_are_gathered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Gathers as NCCL does them: they return when they are enqueued, long before rank 0 comes to its part."""
    gather, whole, underway = DTensor.full_tensor, checkpoint._whole, []

    def enqueue(shard: Any, **_: Any) -> Tensor:
        group, local = shard.device_mesh.get_group(), shard.to_local().detach()
        rows = [len(chunk) for chunk in torch.empty(shard.shape).chunk(dist.get_world_size(group))]
        rows += [0] * (dist.get_world_size(group) - len(rows))
        sent = torch.zeros(max(rows), *shard.shape[1:])
        sent[: len(local)] = local
        received = torch.empty(len(rows), *sent.shape)
        work = dist.all_gather_into_tensor(received.flatten(0, 1), sent, group=group, async_op=True)
        underway.append((received, sent, work))
        return received

    def slowly(shard: Any, **_: Any) -> Tensor:
        time.sleep(0.1)
        return gather(shard)

    def gathered(tree: Any, keep: bool) -> Any:
        if not dist.is_initialized():  # a rehearsal's steps with whole parameters
            return whole(tree, keep)
        with monkeypatch.context() as patched:
            patched.setattr(DTensor, "full_tensor", slowly if dist.get_rank() == 0 else enqueue)
            return whole(tree, keep)

    monkeypatch.setattr(checkpoint, "_whole", gathered)
    module, plain = Regression(), Regression()
    plain.load_state_dict(module.state_dict())
    trainer("fsdp", tmp_path / "ours", max_epochs=1).fit(module, loader(), loader())
    monkeypatch.undo()
    trainer("plain", tmp_path / "plain", max_epochs=1).fit(plain, loader(), loader())
    torch.testing.assert_close(weights(module), weights(plain), rtol=1e-5, atol=1e-6)
