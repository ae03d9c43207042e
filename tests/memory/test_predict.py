"""Bytes per device: the arithmetic of each engine, and recomputation against the real peak."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_autopar.memory.footprint import Footprint, LayerFootprint, Moment
from lightning_autopar.memory.inventory import Device, Inventory
from lightning_autopar.memory.predict import CONTEXT_BYTES, NCCL_BYTES, DeviceBytes, predict
from lightning_autopar.memory.trace import trace
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.recompute import recomputed
from tests.memory.test_trace import GPT, Module, make_trainer, real_peak_bytes, tokens

INVENTORY = Inventory(
    devices=tuple(
        Device(id=f"{kind}:{index}", kind=kind, name=kind, total_bytes=1 << 40, free_bytes=1 << 40)  # type: ignore[arg-type]
        for kind in ("cpu", "cuda")
        for index in range(4)
    ),
    host_total_bytes=1 << 40,
    host_free_bytes=1 << 40,
    source="cpu",
)


def block(index: int) -> LayerFootprint:
    return LayerFootprint(
        fqn=f"blocks.{index}",
        parameters=250,
        parameter_bytes=1000,
        gradient_bytes=1000,
        optimizer_bytes=2000,
        activation_bytes=400,
        input_bytes=40,
        flops=1,
    )


def moment(phase: str, **values: Any) -> Moment:
    return Moment(phase=phase, **values)


#: Two blocks of 1000 bytes and a root of 500; a batch of 8.
FOOTPRINT = Footprint(
    parameters=625,
    trainable_parameters=625,
    batch_size=8,
    parameter_bytes=2500,
    gradient_bytes=2500,
    optimizer_bytes=5000,
    buffer_bytes=16,
    activation_bytes=880,
    temporary_bytes=0,
    input_bytes=80,
    blocks=(block(0), block(1)),
    moments=(
        moment("forward", held=1, running=True, gradient_bytes=2500, activation_bytes=800),
        moment("forward", held=2, gradient_bytes=2500, activation_bytes=880),
        moment("backward", held=2, activation_bytes=880, temporary_bytes=80, fixed_bytes=0),
        moment("backward", held=1, gradient_bytes=500, activation_bytes=800, temporary_bytes=80, fixed_bytes=300),
        moment("optimizer", gradient_bytes=2500, fixed_bytes=600),
    ),
)


def plan(engine: Any = "single", world_size: int = 1, *, kind: str = "cpu", **values: Any) -> Plan:
    return Plan(engine=engine, devices=tuple(f"{kind}:{index}" for index in range(world_size)), **values)


def one(footprint: Footprint, of: Plan) -> DeviceBytes:
    """What the first device holds."""
    return predict(footprint, of, INVENTORY)[of.devices[0]]


def test_single_device_holds_everything_at_the_fullest_moment() -> None:
    held = one(FOOTPRINT, plan())
    assert held == DeviceBytes(parameters=2500, gradients=2500, optimizer=5000, activations=880, buffers=16, input=80)
    assert held.allocated == held.reserved == 2500 + 2500 + 5000 + 880 + 16 + 80
    assert held.to_dict()["allocated"] == held.allocated


def test_replicas_share_the_batch_and_keep_every_gradient() -> None:
    held = predict(FOOTPRINT, plan("ddp", 3), INVENTORY)
    assert list(held) == ["cpu:0", "cpu:1", "cpu:2"]
    # Of 8 samples ranks get 3, 3 and 2; gradients in the making don't shrink with the batch.
    assert held["cpu:0"] == DeviceBytes(
        parameters=2500, gradients=2500, optimizer=5000, activations=300, temporary=330, buffers=16, input=30
    )
    assert held["cpu:1"] == held["cpu:0"]
    assert held["cpu:2"].input == 20
    # The optimizer's scratch is the peak where activations are few.
    assert held["cpu:2"].temporary == 600
    assert held["cpu:2"].activations == 0


def test_a_rank_without_a_sample_is_fed_one() -> None:
    held = predict(replace(FOOTPRINT, batch_size=1), plan("ddp", 2), INVENTORY)
    assert held["cpu:0"] == held["cpu:1"]
    assert held["cpu:1"].input == 80


def test_batch_of_unknown_size_is_not_split() -> None:
    assert one(replace(FOOTPRINT, batch_size=0), plan("ddp", 2)).input == 80


def test_shards() -> None:
    names = ("blocks.0", "blocks.1")
    footprint = replace(FOOTPRINT, moments=FOOTPRINT.moments[:1])
    resharding = one(footprint, plan("fsdp", 2, reshard_after_forward=True, shard=names))
    # The root's own, one block's, and the buffer that this one was gathered through.
    assert resharding.communication == 500 + 1000 + 1000
    assert (resharding.parameters, resharding.gradients, resharding.optimizer) == (1250, 1250, 2500)
    assert (resharding.activations, resharding.input, resharding.buffers) == (400, 40, 16)
    keeping = one(footprint, plan("fsdp", 2, reshard_after_forward=False, shard=names))
    assert keeping.communication == 500 + 2000 + 1000
    whole = one(footprint, plan("fsdp", 2, reshard_after_forward=True))
    assert whole.communication == 2 * 2500


def test_shards_in_backward_hold_whole_gradients() -> None:
    footprint = replace(FOOTPRINT, moments=(moment("backward", held=0, gradient_bytes=1500, fixed_bytes=20_000),))
    held = one(footprint, plan("fsdp", 2, reshard_after_forward=True, shard=("blocks.0", "blocks.1")))
    # Block 1's gradients are reduced; the root's 500 wait for the end of backward.
    assert held.gradients == 500 + 500
    # Gathered: the root's and block 0's; block 1's reduce-scatter buffer is kept.
    assert held.communication == 500 + 1000 + 1000
    first = replace(footprint, moments=(moment("backward", held=1, fixed_bytes=20_000),))
    held = one(first, plan("fsdp", 2, reshard_after_forward=True, shard=("blocks.0", "blocks.1")))
    # Gathered: the root's and block 1's, and block 0's buffer ahead of time.
    assert held.communication == 500 + 1000 + 1000


def test_optimizer_scratch_is_sharded() -> None:
    footprint = replace(FOOTPRINT, moments=(moment("optimizer", gradient_bytes=2500, fixed_bytes=10_000),))
    held = one(footprint, plan("fsdp", 4, reshard_after_forward=True, shard=("blocks.0", "blocks.1")))
    assert held.temporary == 2500
    assert held.communication == 0
    assert held.gradients == 625


def test_recomputed_blocks_give_up_what_they_saved() -> None:
    names = ("blocks.0", "blocks.1")
    footprint = replace(FOOTPRINT, moments=FOOTPRINT.moments[:-1])
    held = one(footprint, plan(recompute=names))
    # Forward's end keeps 80 of 880; while block 1 runs, block 0 has given up 400.
    assert held.activations == 400
    some = one(footprint, plan(recompute=names[:1]))
    assert some.activations == 880 - 400
    extra = replace(footprint, blocks=tuple(replace(part, input_extra_bytes=40) for part in FOOTPRINT.blocks))
    assert one(extra, plan(recompute=names)).activations == 440


def test_without_moments_the_peak_is_the_sum() -> None:
    footprint = replace(FOOTPRINT, moments=(), temporary_bytes=100)
    held = one(footprint, plan())
    assert held.allocated == 2500 + 2500 + 5000 + 16 + 880 + 100 + 80
    recomputing = one(footprint, plan(recompute=("blocks.0", "blocks.1")))
    assert recomputing.activations == 880 - 800 + 400


def test_a_gpu_needs_more_than_its_tensors() -> None:
    single, replica = one(FOOTPRINT, plan(kind="cuda")), one(FOOTPRINT, plan("ddp", 2, kind="cuda"))
    assert single.context == CONTEXT_BYTES
    assert replica.context == CONTEXT_BYTES + NCCL_BYTES
    assert single.reserved == single.allocated + single.rounding + single.context
    assert single.rounding > 0
    assert single.allocated == one(FOOTPRINT, plan()).allocated


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (plan("zero", 2), "'zero'"),
        (plan(recompute=("blocks.7",)), "'blocks.7'"),
        (Plan(engine="single", devices=("cpu:9",)), "'cpu:9'"),
    ],
)
def test_what_cannot_be_predicted_is_refused(wrong: Plan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict(FOOTPRINT, wrong, INVENTORY)


@pytest.mark.parametrize("count", [1, 3])
def test_recomputation_against_the_real_peak(count: int) -> None:
    torch.manual_seed(0)
    module = Module(GPT(dropout=0.1))
    loader = DataLoader(tokens(), 4)
    footprint = trace(module, make_trainer(), next(iter(loader)))
    names = tuple(part.fqn for part in footprint.blocks)[:count]
    predicted = one(footprint, plan(recompute=names)).allocated
    with recomputed(module, names):
        real = real_peak_bytes(module, loader)
    assert predicted == pytest.approx(real, rel=0.05)
    assert predicted < 0.95 * one(footprint, plan()).allocated
