"""Bytes per device: the arithmetic of each engine, and recomputation against the real peak."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_autopar import engines
from lightning_autopar.devices.inventory import Device, Inventory
from lightning_autopar.exact.step.recompute import recomputed
from lightning_autopar.memory.cuda_overhead import context_bytes, nccl_bytes, workspace_bytes
from lightning_autopar.memory.device_bytes import DeviceBytes
from lightning_autopar.memory.footprint import Footprint, LayerFootprint, Moment
from lightning_autopar.memory.fullest_moments import RNG_STATE_BYTES
from lightning_autopar.memory.trace.trace import trace
from lightning_autopar.planning import plan_bytes as prediction
from lightning_autopar.planning.plan_bytes import predict
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.pipeline import memory as pipeline_bytes
from lightning_autopar.strategies.zero import memory as zero_bytes
from tests.memory.trace.test_trace import GPT, Module, make_trainer, real_peak_bytes, tokens
from tests.work import counted

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
        moment("backward", held=1, running=True, gradient_bytes=500, activation_bytes=800, temporary_bytes=80, fixed_bytes=300),
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


def test_recomputed_blocks_give_up_what_they_saved() -> None:
    names = ("blocks.0", "blocks.1")
    footprint = replace(FOOTPRINT, moments=FOOTPRINT.moments[:-1])
    held = one(footprint, plan(recompute=names))
    # Forward's end keeps 80 of 880; while block 1 runs, block 0 has given up 400.
    assert held.activations == 400 + 2 * RNG_STATE_BYTES  # a CPU device is the host, on which those lie
    some = one(footprint, plan(recompute=names[:1]))
    assert some.activations == 880 - 400 + RNG_STATE_BYTES
    extra = replace(footprint, blocks=tuple(replace(part, input_extra_bytes=40) for part in FOOTPRINT.blocks))
    assert one(extra, plan(recompute=names)).activations == 440 + 2 * RNG_STATE_BYTES


def test_without_moments_the_peak_is_the_sum() -> None:
    footprint = replace(FOOTPRINT, moments=(), temporary_bytes=100)
    held = one(footprint, plan())
    assert held.allocated == 2500 + 2500 + 5000 + 16 + 880 + 100 + 80
    recomputing = one(footprint, plan(recompute=("blocks.0", "blocks.1")))
    assert recomputing.activations == 880 - 800 + 400 + 2 * RNG_STATE_BYTES


def test_a_recomputed_block_runs_its_forward_again_when_its_backward_begins() -> None:
    blocks = tuple(replace(part, forward_peak_bytes=640, forward_unsaved_bytes=240) for part in FOOTPRINT.blocks)
    begins = moment("backward", held=1, running=True, boundary=True, activation_bytes=800, temporary_bytes=80)
    held = one(replace(FOOTPRINT, blocks=blocks, moments=(begins,)), plan(recompute=("blocks.0", "blocks.1")))
    assert held.activations == 800 - 2 * 400 + 640 + 3 * RNG_STATE_BYTES
    # In forward nothing is saved: between what the operations need and what local names may hold.
    runs = moment("forward", held=1, running=True, activation_bytes=800)
    held = one(replace(FOOTPRINT, blocks=blocks, moments=(runs,)), plan(recompute=("blocks.0", "blocks.1")))
    assert held.activations == 800 - 400 - (640 - 240) // 2 + 2 * RNG_STATE_BYTES


def test_parts_of_a_batch_hold_less_at_a_time_and_the_gradients_of_the_parts_before() -> None:
    whole, parts = one(FOOTPRINT, plan()), one(FOOTPRINT, plan(micro_batches=4))
    assert parts.gradients == 2500
    assert parts.input == whole.input == 80
    # A quarter of 800 and 80, and a gradient in the making beside those that are there.
    assert (parts.activations, parts.temporary) == (0, 600)
    backward = replace(FOOTPRINT, moments=FOOTPRINT.moments[3:4])
    parts = one(backward, plan(micro_batches=4))
    assert (parts.gradients, parts.activations, parts.temporary) == (2500, 200, 20 + 300)


def test_a_gpu_needs_more_than_its_tensors() -> None:
    name = INVENTORY.device("cuda:0").name
    multiplies = replace(FOOTPRINT, flops=1)
    single, replica = one(multiplies, plan(kind="cuda")), one(multiplies, plan("ddp", 2, kind="cuda"))
    assert single.context == context_bytes(name)
    assert replica.context == context_bytes(name) + nccl_bytes(2)
    assert single.workspace == workspace_bytes(multiplies, name) > 0
    assert single.reserved == single.allocated + single.rounding + single.context
    assert single.rounding > 0
    assert single.allocated == one(FOOTPRINT, plan()).allocated + single.workspace
    assert one(multiplies, plan()).workspace == 0


def test_replicas_of_shards_have_a_communicator_within_each_and_one_across() -> None:
    """Beside that of all devices: NCCL takes its buffers for each of them."""
    hybrid = Plan(engine="fsdp", devices=tuple(f"cuda:{index}" for index in range(4)), replicas=2, reshard_after_forward=True)
    (size, *_) = predict(FOOTPRINT, hybrid, INVENTORY).values()
    assert size.context == context_bytes("cuda") + nccl_bytes(4) + 2 * nccl_bytes(2)


def test_communicators_are_counted_by_the_plan() -> None:
    four = tuple(f"cuda:{index}" for index in range(4))
    assert engines.of(one := Plan(engine="ddp", devices=four)).communicators(one) == (4,)
    assert engines.of(one := Plan(engine="zero", devices=four, zero_stage=2)).communicators(one) == (4, 4)
    assert engines.of(one := Plan(engine="fsdp", devices=four, reshard_after_forward=True)).communicators(one) == (4,)
    assert engines.of(one := Plan(engine="fsdp", devices=four, reshard_after_forward=True, replicas=2)).communicators(one) == (4, 2, 2)


def test_every_engine_is_predicted() -> None:
    footprint = trace(Module(GPT()), make_trainer(), next(iter(DataLoader(tokens(), 4))))
    names = tuple(part.fqn for part in footprint.blocks)
    alone = one(footprint, plan()).allocated
    plans = [
        plan("ddp", 2),
        plan("fsdp", 2, reshard_after_forward=True, shard=names),
        plan("zero", 2, zero_stage=2),
        plan("pipeline", 2, cuts=names[1:2], micro_batches=2, schedule="1f1b"),
    ]
    for each in plans:
        found = predict(footprint, each, INVENTORY)
        assert list(found) == ["cpu:0", "cpu:1"]
        assert all(0.2 * alone < held.allocated for held in found.values())
        if each.engine != "zero":  # DeepSpeed's buckets are as large for a small module
            assert all(held.allocated < 2 * alone for held in found.values())


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_every_engine_keeps_a_state_of_random_numbers_for_each_recomputed_block(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    footprint = trace(Module(GPT()), make_trainer(), next(iter(DataLoader(tokens(), 4))))
    names = tuple(part.fqn for part in footprint.blocks)
    plans = [
        plan(kind=kind, recompute=names),
        plan("ddp", 2, kind=kind, recompute=names),
        plan("fsdp", 2, kind=kind, reshard_after_forward=True, shard=names, recompute=names),
        plan("zero", 2, kind=kind, zero_stage=2, recompute=names),
        plan("zero", 2, kind=kind, zero_stage=3, recompute=names),
        plan("pipeline", 2, kind=kind, cuts=names[1:2], micro_batches=1, schedule="gpipe", recompute=names),
    ]
    before = [one(footprint, each).allocated for each in plans]
    state_bytes = 100 * 1024**2
    for module in (prediction, pipeline_bytes, zero_bytes):
        monkeypatch.setattr(module, "RNG_STATE_BYTES", state_bytes)
    for each, allocated in zip(plans, before, strict=True):
        blocks = 1 if each.engine == "pipeline" else len(names)
        # And another while a block's forward runs again; what of it hides behind another moment is less than one.
        more = one(footprint, each).allocated - allocated
        assert more == 0 if kind == "cuda" else blocks * state_bytes < more <= (blocks + 1) * state_bytes


def test_a_hundred_blocks_take_a_few_calls_each() -> None:
    names = tuple(f"blocks.{index}" for index in range(100))
    blocks = tuple(replace(block(index), parameter_rows=((10, 60, True), (4, 100, True)), forward_peak_bytes=600) for index in range(100))
    moments = []
    for index in range(100):
        for boundary in (True, False, False):
            moments += [
                moment("forward", held=index, running=True, boundary=boundary, gradient_bytes=100_500, activation_bytes=400 * index),
                moment("backward", held=99 - index, running=True, boundary=boundary, gradient_bytes=1000 * index, fixed_bytes=1),
                moment("backward", held=99 - index, boundary=boundary, gradient_bytes=1000 * index, fixed_bytes=1),
            ]
    footprint = replace(
        FOOTPRINT,
        blocks=blocks,
        moments=tuple(moments),
        parameter_bytes=100_500,
        outer=(LayerFootprint(fqn="", parameter_rows=((5, 100, True),)), *(LayerFootprint(fqn="") for _ in range(100))),
    )
    plans = [
        plan(recompute=names),
        plan("ddp", 4, recompute=names[:50]),
        *(plan("fsdp", 4, reshard_after_forward=reshard, shard=names, recompute=names) for reshard in (True, False)),
    ]
    for each in plans:
        predict(footprint, each, INVENTORY)
        assert counted(predict, footprint, each, INVENTORY)[1] < 3000, each.title()  # two shares of the batch at most


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (plan("fsdp", 2, reshard_after_forward=True, shard=("blocks.8",)), "'blocks.8'"),
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
