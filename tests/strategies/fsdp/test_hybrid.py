"""Hybrid sharding on four real ranks, two replicas of two shards each, against plain Lightning on one device."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from lightning_autopar.state.snapshot import save_snapshot
from lightning_autopar.strategies.fsdp.shard import shard, unshard
from tests.ranks import run_ranks
from tests.strategies.fitted import BLOCKS, Fitted, assert_same, fit, mlp, numbers, plan

HYBRID = plan("fsdp", ranks=4, replicas=2, shard=BLOCKS)


class Clipped(Fitted):
    """Built late, with parameters of its own, a frozen block, AdamW, and the gradients' norm logged in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = mlp(7)  # no number of ranks divides it
            self.net[2].requires_grad_(False)
            self.scale = torch.nn.Parameter(torch.tensor(1.0))

    def on_train_start(self) -> None:
        weight: Any = self.net[1][0].weight
        if not isinstance(weight, DTensor):
            return
        if weight.device_mesh.ndim == 1:
            assert weight.device_mesh.shape == (4,)
            return
        assert weight.device_mesh.mesh.tolist() == [[0, 1], [2, 3]]  # rank r is of replica r // 2
        assert isinstance(weight.placements[0], Replicate)
        assert weight.to_local().shape[0] in (3, 4)

    def loss(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch[0]) * self.scale, batch[1])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [float(parameter.grad.norm()) for parameter in self.parameters() if parameter.grad is not None]
        self.log("norm", torch.tensor(norms).norm())

    def on_train_epoch_end(self) -> None:
        self.log("outside", self.net(torch.ones(1, 8)).sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([parameter for parameter in self.parameters() if parameter.requires_grad], 1e-2)


class Saves(pl.Callback):
    """After one step: a snapshot, or a checkpoint of Lightning's where the path ends in .ckpt."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            (trainer.save_checkpoint if self.path.suffix else partial(save_snapshot, trainer))(self.path)


def test_two_replicas_of_two_shards_are_one_devices_run() -> None:
    """Built in shapes only on all ranks but one, gradients clipped by their norm, and uneven shares of the batch."""
    under = plan("fsdp", ranks=4, replicas=2, shard=BLOCKS, reshard=False, shares=(1, 2, 1, 2))
    assert_same(Clipped, numbers(), under, tolerance=1e-6, large=True, gradient_clip_val=0.3)


def test_snapshots_and_checkpoints_travel_between_hybrid_flat_and_no_shards(tmp_path: Path) -> None:
    """One device, two replicas of two shards, four shards, two of two again: each goes on where the other was in mid-epoch."""
    options = {"gradient_clip_val": 0.3}
    whole, _, _ = fit(Clipped, numbers(), None, **options)
    one = plan("single", ranks=1)
    runs = (
        (one, None, [Saves(tmp_path / "one", 1)]),
        (HYBRID, tmp_path / "one", [Saves(tmp_path / "hybrid", 2), Saves(tmp_path / "file.ckpt", 3)]),
        (plan("fsdp", ranks=4, shard=BLOCKS), tmp_path / "hybrid", [Saves(tmp_path / "flat", 5)]),
        (HYBRID, tmp_path / "flat", []),
        (one, tmp_path / "file.ckpt", []),
    )
    for under, begin, callbacks in runs:
        ours, _, trainer = fit(Clipped, numbers(), under, resume=begin, callbacks=callbacks, **options)
        assert trainer.global_step == 8
        torch.testing.assert_close(dict(ours.state_dict()), dict(whole.state_dict()), rtol=1e-6, atol=1e-6)


def _there_and_back(rank: int, world_size: int) -> list[tuple[int, ...]]:
    module = Clipped()
    module.configure_model()
    module.load_state_dict({name: torch.full_like(value, 0.1) for name, value in module.state_dict().items()})
    before = {name: value.clone() for name, value in module.state_dict().items()}
    shard(module, BLOCKS, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")), reshard_after_forward=True)
    held = [tuple(module.net[0].weight.to_local().shape)]
    unshard(module)
    torch.testing.assert_close(dict(module.state_dict()), before, rtol=0, atol=0)
    return held


def test_a_module_is_whole_again_after_hybrid_sharding() -> None:
    assert run_ranks(_there_and_back, 4) == [[(4, 8)], [(3, 8)]] * 2
