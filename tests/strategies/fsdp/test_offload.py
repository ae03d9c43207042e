"""FSDP2's offload to host memory against plain Lightning, on one device and on two.

On CPU devices it saves no memory, but runs the same code, but for pinned memory and copies.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_autopar.plans import OFFLOADS
from lightning_autopar.strategies.auto import AutoParallelStrategy
from lightning_autopar.strategies.base.host_optimizers import on_host
from lightning_autopar.strategies.fsdp.same_collectives import groups_of
from lightning_autopar.strategies.fsdp.shard import shard
from lightning_autopar.strategies.fsdp.strategy import fused_on_shards
from tests.ranks import run_ranks
from tests.strategies.fitted import BLOCKS, QUIET, Fitted, assert_same, fit, mlp, numbers, plan, tokens
from tests.strategies.fsdp.test_fsdp import LAYERS, Adversarial, Meddling, Sharing, Text
from tests.strategies.fsdp.test_hybrid import Saves

offloaded = partial(plan, "fsdp", offload=OFFLOADS)


class Watched(Fitted):
    """Built late, with BatchNorm's buffers, a frozen layer, metrics, AdamW under a schedule, and a look at where everything lies."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None
        self.mean = MeanMetric()  # in place before the module is built in shapes only, and as real as ever after it

    def configure_model(self) -> None:
        if self.net is None:
            self.net = mlp()
            self.net[0] = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.BatchNorm1d(16))
            self.net[3].requires_grad_(False)
            self.late, self.scale = MeanMetric(), torch.nn.Parameter(torch.tensor(1.0))
            self.register_buffer("unkept", torch.randn(1), persistent=False)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * self.scale.exp() + self.unkept.sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for name, metric in (("mean", self.mean), ("late", self.late)):
            metric(loss.detach())
            self.log(name, metric, on_epoch=True, on_step=False)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("slope", self.net[1][0].weight.grad.norm().item())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        assert optimizer.param_groups[0]["fused"] is None  # as the user made it, but for the time of a step

    def on_train_epoch_end(self) -> None:
        weight: Any = self.net[1][0].weight
        self.log("outside", self.net[1](torch.ones(1, 16, dtype=weight.dtype)).sum() + float(weight.detach().norm()))
        if isinstance(weight, DTensor):
            assert weight.to_local().device == torch.device("cpu")
            policy = groups_of(self.net[1])[0].offload_policy
            strategy: Any = self.trainer.strategy
            assert isinstance(policy, CPUOffloadPolicy) == bool(strategy.run_plan.plan.offload)
            assert not getattr(policy, "pin_memory", False)
        assert self.device == self.trainer.strategy.root_device

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([parameter for parameter in self.parameters() if parameter.requires_grad], 1e-2)
        return [optimizer], [{"scheduler": LinearLR(optimizer, 0.5, 1.0, 5), "interval": "step"}]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("large", [False, True])
def test_offloaded_shards_are_one_devices_run(ranks: int, large: bool) -> None:
    """Gradients are clipped by their norm, which is a sum over the ranks of what lies in host memory; a window of two batches at a time."""
    under = offloaded(ranks=ranks, shard=BLOCKS)
    assert_same(Watched, numbers(), under, large=large, gradient_clip_val=0.3, accumulate_grad_batches=2)


@pytest.mark.parametrize(
    ("make", "data", "units", "ranks", "more", "options"),
    [
        (Text, tokens(), LAYERS, 1, {"recompute": LAYERS}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        (Text, tokens(), LAYERS, 2, {"shares": (1, 2), "recompute": LAYERS}, {}),
        (Meddling, numbers(), BLOCKS, 1, {}, {}),
        (Meddling, numbers(), BLOCKS, 2, {"reshard": False}, {}),
        (Adversarial, numbers(), (), 1, {}, {}),
        (Fitted, numbers(), BLOCKS, 2, {"micro_batches": 2}, {}),
        (Fitted, numbers(), BLOCKS, 4, {"replicas": 2}, {"gradient_clip_val": 0.3}),
    ],
)
def test_tied_weights_recomputation_hooks_and_manual_steps(
    make: Any, data: Any, units: tuple[str, ...], ranks: int, more: dict[str, Any], options: dict[str, Any]
) -> None:
    assert_same(make, data, offloaded(ranks=ranks, shard=units, **more), **options)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_one_device_in_bf16_is_plain_lightnings_to_the_bit(precision: Any) -> None:
    """In 16 bits the update stays the loop that it is without offload: the fused kernel rounds less often."""
    ours, theirs = assert_same(Watched, numbers(), offloaded(ranks=1, shard=BLOCKS), tolerance=1e-6, precision=precision)
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=1e-6, atol=1e-6)


class Adapted(Text):
    """A frozen body with adapters of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.down = nn.ModuleList([nn.Linear(16, 2, bias=False) for _ in range(3)])
        self.up = nn.ModuleList([nn.Linear(2, 16, bias=False) for _ in range(3)])

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for layer, down, up in zip(self.layers, self.down, self.up, strict=True):
            hidden = layer(hidden) + up(down(hidden))
        return self.head(hidden)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_beside_a_frozen_body(ranks: int) -> None:
    assert_same(Adapted, tokens(), offloaded(ranks=ranks, shard=LAYERS))


# -- states ------------------------------------------------------------------------------------------------------------------------------


def test_snapshots_and_checkpoints_travel_between_offloaded_shards_and_others(tmp_path: Path) -> None:
    """Each run goes on in mid-epoch where another one was, which had its states elsewhere, or the other way round."""
    options = {"gradient_clip_val": 0.3}
    whole, _, _ = fit(Watched, numbers(), None, **options)
    one, shards = plan("single", ranks=1), plan("fsdp", ranks=2, shard=BLOCKS)
    alone, together = offloaded(ranks=1, shard=BLOCKS), offloaded(ranks=2, shard=BLOCKS)
    runs: tuple[tuple[Any, Path | None, list[Any]], ...] = (
        (one, None, [Saves(tmp_path / "one", 1)]),
        (alone, tmp_path / "one", [Saves(tmp_path / "alone", 2), Saves(tmp_path / "file.ckpt", 3)]),
        (together, tmp_path / "alone", [Saves(tmp_path / "hook.ckpt", 4), Saves(tmp_path / "together", 5)]),
        (shards, tmp_path / "together", []),
        (one, tmp_path / "hook.ckpt", []),
        (together, tmp_path / "file.ckpt", []),
        (alone, tmp_path / "hook.ckpt", []),
    )
    for under, begin, callbacks in runs:
        ours, _, trainer = fit(Watched, numbers(), under, resume=begin, callbacks=callbacks, **options)
        assert trainer.global_step == 8
        torch.testing.assert_close(dict(ours.state_dict()), dict(whole.state_dict()), rtol=1e-5, atol=1e-5)
    plain = torch.load(tmp_path / "hook.ckpt", weights_only=True)
    assert list(plain["state_dict"]) == list(whole.state_dict())
    assert plain["optimizer_states"][0]["param_groups"][0]["fused"] is None


def test_after_the_run_optimizer_and_module_are_as_after_plain_lightning() -> None:
    _, _, ours = fit(Watched, numbers(), offloaded(ranks=1, shard=BLOCKS))
    _, _, theirs = fit(Watched, numbers(), None)
    torch.testing.assert_close(ours.optimizers[0].state_dict(), theirs.optimizers[0].state_dict(), rtol=1e-5, atol=1e-5)


# -- evaluation --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_evaluation_alone(ranks: int) -> None:
    module = Adapted()
    strategy = AutoParallelStrategy(plan=offloaded(ranks=ranks, shard=LAYERS), devices=f"{ranks}xcpu:4GiB")
    loader = DataLoader(tokens(), batch_size=8)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    ours, theirs = (pl.Trainer(accelerator="cpu", devices=1, strategy=kind, **QUIET) for kind in (strategy, "auto"))
    for function in ("validate", "test", "predict"):
        found, expected = (getattr(trainer, function)(module, loader) for trainer in (ours, theirs))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dict(module.state_dict()), before, rtol=0, atol=0)


# -- refusals and kernels ----------------------------------------------------------------------------------------------------------------


def test_a_module_that_shards_itself_cannot_be_offloaded() -> None:
    with pytest.raises(ValueError, match="its configure_model has sharded it already; leave the sharding to the strategy"):
        fit(Sharing, numbers(), offloaded(ranks=1, shard=BLOCKS))


class Called(Fitted):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def _updated(rank: int, world_size: int, kind: Any) -> list[Tensor]:
    """A module's weights after some updates of shards: by torch's loop, and by its fused kernel."""
    found = []
    fused_on_shards()
    for fused in (False, True):
        torch.manual_seed(0)
        module = Called(width=7)  # no number of ranks divides it
        shard(
            module, BLOCKS, init_device_mesh("cpu", (world_size,)), reshard_after_forward=True, offload=CPUOffloadPolicy(pin_memory=False)
        )
        optimizer = kind(module.parameters(), lr=1e-2)
        if fused:
            on_host(optimizer)
        for _ in range(3):
            module(torch.ones(2, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(torch.cat([parameter.detach().full_tensor().flatten() for parameter in module.parameters()]))  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_fused_updates_of_shards_are_the_loops(kind: Any) -> None:
    for looped, fused in run_ranks(_updated, 2, kind):
        torch.testing.assert_close(fused, looped, rtol=1e-6, atol=1e-6)
