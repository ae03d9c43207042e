"""Whole steps: by hand with plain rates, and by order with the data sheet's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_autopar.devices.inventory import Device, Link, idle_share
from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.engines import Engine
from lightning_autopar.memory.batch_scaling import scaled
from lightning_autopar.memory.work.work import Work
from lightning_autopar.planning.plan_seconds import predict_seconds
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.fsdp.timing import ACCUMULATED_BYTES_PER_SECOND, OFFLOADED_PARAMETER, SHARDED_OPERATION
from lightning_autopar.strategies.zero.engine import Zero
from lightning_autopar.strategies.zero.settings import ZeroSettings
from lightning_autopar.timing.data_sheet import DATA_SHEET
from lightning_autopar.timing.rank_compute import RECOMPUTED, computing_dtype
from lightning_autopar.timing.rates import slowed
from lightning_autopar.timing.step_seconds import Seconds
from tests.fakes.rates import PlainRates
from tests.fakes.traced import BLOCKS, GPUS, HERE, traced
from tests.fakes.values import GIB, MIB, cpu, footprint, gpu, inventory
from tests.planning.test_search import step_of

MICRO = 1e-6


def seconds(engine: Any, *devices: str, step: Any = None, here: Any = HERE, **parts: Any) -> Seconds:
    asked = {name: parts.pop(name) for name in ("precision", "rates") if name in parts}
    others: Engine | None = parts.pop("asked", None)
    if engine == "fsdp":
        parts.setdefault("reshard_after_forward", True)
        parts.setdefault("shard", BLOCKS)
    plan = Plan(engine=engine, devices=devices, **parts)
    if others is not None:  # somebody else's engine
        return others.step(step, plan, here, asked.get("precision", "32-true"), asked["rates"]).seconds()
    return predict_seconds(step or footprint(), plan, here, **asked)


# -- parts -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parts",
    [
        {"engine": "single", "devices": GPUS[:1], "micro_batches": 3},
        {"engine": "ddp", "devices": GPUS[:4], "recompute": BLOCKS[:2]},
        {"engine": "fsdp", "devices": GPUS[:4], "reshard_after_forward": True, "shard": BLOCKS, "offload": ("optimizer", "parameters")},
        {"engine": "fsdp", "devices": GPUS[:4], "reshard_after_forward": False, "shard": BLOCKS[:2], "replicas": 2},
        {"engine": "zero", "devices": GPUS[:3], "zero_stage": 1},
        {"engine": "zero", "devices": GPUS[:3], "zero_stage": 3, "offload": ("optimizer",)},
        {"engine": "pipeline", "devices": GPUS[:2], "cuts": ("net.2",), "schedule": "1f1b", "micro_batches": 4, "recompute": BLOCKS},
        {"engine": "pipeline", "devices": GPUS[:4], "cuts": ("net.2",), "schedule": "gpipe", "micro_batches": 2, "replicas": 2},
    ],
)
def test_the_parts_add_up_to_the_step_and_none_is_negative(parts: dict[str, Any]) -> None:
    for step in (footprint(), traced(update=GIB)):
        whole = predict_seconds(step, Plan(**parts), HERE)
        named = whole.to_dict()
        assert named.pop("step") == whole.step == pytest.approx(sum(named.values()))
        assert set(named) == {"compute", "recompute", "optimizer", "communication", "bubble", "offload", "input", "overhead"}
        assert all(part >= -1e-12 for part in named.values()), named


def test_an_unknown_device_or_cut_is_an_error() -> None:
    with pytest.raises(ValueError, match="cpu:9"):
        seconds("single", "cpu:9")
    with pytest.raises(ValueError, match=r"names the block 'net\.9'"):
        seconds("pipeline", *GPUS[:2], cuts=("net.9",), schedule="gpipe")


# -- one device --------------------------------------------------------------------------------------------------------------------------


def test_one_device_computes_updates_and_copies_its_batch() -> None:
    rates = PlainRates(bytes_per_second=GIB, copy_bytes_per_second=GIB)
    found = seconds("single", GPUS[0], step=traced(update=2 * GIB, input_bytes=GIB), rates=rates)
    assert found.compute == pytest.approx(12, rel=MICRO)
    assert found.optimizer == pytest.approx(2)
    assert found.input == pytest.approx(1)
    assert found.step == pytest.approx(15, rel=MICRO)


def test_micro_batches_issue_more_and_a_slow_host_is_waited_for() -> None:
    step = traced(forward=10**9)
    rates = PlainRates(issue=1.0)
    once, thrice = (seconds("single", GPUS[0], step=step, rates=rates, micro_batches=count) for count in (1, 3))
    assert once.step == pytest.approx(8 + 1, rel=1e-3)  # eight lists of one operation, and the update's
    assert thrice.step == pytest.approx(24 + 1, rel=1e-3)
    assert thrice.compute == pytest.approx(once.compute)
    assert once.overhead > 0.99 * (once.step - once.compute)
    on_cpu = seconds("single", "cpu:0", step=step, rates=rates)
    assert on_cpu.compute == pytest.approx(8 + 0.012)  # one core does both, one after the other
    assert on_cpu.optimizer == pytest.approx(1)


def test_a_fast_host_costs_nothing_on_a_gpu() -> None:
    assert seconds("single", GPUS[0], step=traced(), rates=PlainRates(issue=0.1, loop=0.2)).overhead == 0


def test_a_scaler_of_gradients_makes_the_host_wait_before_the_update() -> None:
    step = traced(forward=10**12)  # twelve seconds on the device, eight to issue them, and one to issue the update
    scaled = replace(step, optimizer_work=(replace(step.optimizer_work[0], name="_amp_foreach_non_finite_check_and_unscale_"),))
    free, held = (seconds("single", GPUS[0], step=one, rates=PlainRates(issue=1.0, loop=2.0)) for one in (step, scaled))
    assert free.overhead == 0
    assert held.overhead == pytest.approx(3)  # after the wait the loop and the update's issue have nothing to hide behind


def test_parts_of_a_batch_add_up_their_gradients() -> None:
    rates = PlainRates(bytes_per_second=100 * MIB)
    once, thrice = (seconds("single", GPUS[0], step=traced(), rates=rates, micro_batches=count) for count in (1, 3))
    assert thrice.compute - once.compute == pytest.approx(2 * 4 * 3, rel=1e-3)  # read, read and written, twice, for four blocks


def test_recomputing_runs_a_forward_again() -> None:
    found = seconds("single", GPUS[0], step=traced(), rates=PlainRates(), recompute=BLOCKS[:2])
    assert found.recompute == pytest.approx(2, rel=MICRO)
    assert found.compute == pytest.approx(12, rel=MICRO)


def test_recomputing_costs_a_gpus_host_more_than_a_forward() -> None:
    """Torch's hooks run for each tensor that is saved. T5 took an H200 63 ms, and its host 94."""
    step = traced(forward=10**6)
    once, again = (
        seconds("single", GPUS[0], step=step, rates=PlainRates(issue=1e-3), recompute=blocks).overhead for blocks in ((), BLOCKS[:2])
    )
    forward = sum(work.count for block in step.blocks[:2] for work in block.work) * 1e-3
    assert again - once == pytest.approx(RECOMPUTED * forward, rel=1e-3)


def test_a_busy_device_is_slower_by_what_others_take_and_never_stands_still() -> None:
    rates = PlainRates()
    assert seconds("single", GPUS[4], step=traced(), rates=rates).compute == pytest.approx(24, rel=MICRO)
    full = inventory(gpu(0, utilization=1.0))
    assert seconds("single", GPUS[0], step=traced(), rates=rates, here=full).compute == pytest.approx(120, rel=MICRO)


# -- replicas ----------------------------------------------------------------------------------------------------------------------------


def test_of_a_batch_of_three_two_ranks_do_two_and_shares_are_heeded() -> None:
    rates = PlainRates()
    step = traced(batch_size=3)
    assert seconds("ddp", *GPUS[:2], step=step, rates=rates).compute == pytest.approx(8, rel=MICRO)
    step = traced(batch_size=8)
    assert seconds("ddp", *GPUS[:2], step=step, rates=rates, shares=(1, 3)).compute == pytest.approx(9, rel=MICRO)
    slow = seconds("ddp", GPUS[0], GPUS[4], step=traced(batch_size=9), rates=rates, shares=(2, 1))  # twice as slow, half as much
    assert slow.compute == pytest.approx(8, rel=MICRO)


def test_buckets_hide_behind_backward_and_the_last_one_does_not() -> None:
    # Backward takes 2 s a block, a block's gradients 1 s on the wire: all but the last block's go while the next one computes.
    rates = PlainRates(wire_bytes_per_second=100 * MIB)
    found = seconds("ddp", *GPUS[:2], step=traced(forward=2 * 10**12), rates=rates)
    assert found.communication == pytest.approx(1, rel=MICRO)
    # Twice as slow a wire keeps up just so; at four times it is the wire that counts, from the first bucket on.
    slow = seconds("ddp", *GPUS[:2], step=traced(forward=2 * 10**12), rates=PlainRates(wire_bytes_per_second=50 * MIB))
    assert slow.communication == pytest.approx(2, rel=MICRO)
    slower = seconds("ddp", *GPUS[:2], step=traced(forward=2 * 10**12), rates=PlainRates(wire_bytes_per_second=25 * MIB))
    assert slower.communication == pytest.approx(2 + 4 * 4 - 8, rel=MICRO)


def test_only_the_last_micro_batch_sends_gradients() -> None:
    rates = PlainRates(wire_bytes_per_second=100 * MIB)
    assert seconds("ddp", *GPUS[:2], step=traced(forward=4 * 10**12), rates=rates, micro_batches=2).communication == pytest.approx(
        1, rel=1e-5
    )


def test_where_the_same_cores_do_both_nothing_is_hidden() -> None:
    rates = PlainRates(wire_bytes_per_second=100 * MIB, hides=0.0)
    assert seconds("ddp", "cpu:0", "cpu:1", step=traced(), rates=rates).communication == pytest.approx(4, rel=MICRO)
    half = PlainRates(wire_bytes_per_second=100 * MIB, hides=0.5)
    assert seconds("ddp", "cpu:0", "cpu:1", step=traced(forward=2 * 10**12), rates=half).communication == pytest.approx(1 + 1.5, rel=MICRO)


def test_without_gradients_replicas_have_nothing_to_say_to_each_other() -> None:
    step = footprint(training=False)
    assert seconds("ddp", "cpu:0", "cpu:1", step=step).communication == 0
    assert seconds("fsdp", "cpu:0", "cpu:1", step=step).communication > 0


def test_batch_norms_wait_for_each_other() -> None:
    rates = PlainRates(latency=0.25)
    plain, normed = (seconds("ddp", *GPUS[:2], step=traced(batch_norm=names), rates=rates) for names in ((), ("a", "b")))
    assert normed.communication - plain.communication == pytest.approx(1)


# -- shards ------------------------------------------------------------------------------------------------------------------------------


def test_a_unit_is_gathered_while_the_one_before_it_computes() -> None:
    # A unit of 100 MiB takes 0.5 s to gather and to reduce, its forward 1 s on one rank of two, its backward 2 s.
    step = traced(forward=2 * 10**12)
    rates = PlainRates(wire_bytes_per_second=200 * MIB)
    kept = seconds("fsdp", *GPUS[:2], step=step, rates=rates, reshard_after_forward=False)
    assert kept.communication == pytest.approx(0.5 + 0.5, rel=1e-5)  # the first gather, the last reduction
    again = seconds("fsdp", *GPUS[:2], step=step, rates=rates)
    assert again.communication == pytest.approx(0.5 + 0.5 + 0.5, rel=1e-5)  # the last block is gathered again before its backward
    assert again.optimizer == pytest.approx(kept.optimizer)


def test_where_links_are_slow_they_are_what_counts() -> None:
    rates = PlainRates(wire_bytes_per_second=1 * MIB)
    kept, again = (seconds("fsdp", *GPUS[:2], step=traced(), rates=rates, reshard_after_forward=reshard) for reshard in (False, True))
    assert kept.step == pytest.approx(800, rel=0.02)
    assert again.step == pytest.approx(1200, rel=0.02)


def test_each_part_of_a_batch_gathers_anew() -> None:
    rates = PlainRates(wire_bytes_per_second=1 * MIB)
    counts = {
        count: seconds("fsdp", *GPUS[:2], step=traced(batch_size=16), rates=rates, micro_batches=count).step for count in (1, 2, 4, 8)
    }
    assert counts[2] == pytest.approx(2 * counts[1], rel=0.02)
    assert counts[8] == pytest.approx(8 * counts[1], rel=0.02)


def test_hybrid_shards_gather_near_and_reduce_far() -> None:
    step = traced(update=8 * GIB)
    links = (Link(a=GPUS[0], b=GPUS[1], kind="nvlink"), Link(a=GPUS[2], b=GPUS[3], kind="nvlink"))
    here = replace(HERE, links=links)
    flat = seconds("fsdp", *GPUS[:4], step=step, here=here, precision="bf16-mixed")
    hybrid = seconds("fsdp", *GPUS[:4], step=step, here=here, precision="bf16-mixed", replicas=2)
    assert hybrid.communication < flat.communication
    assert hybrid.optimizer > flat.optimizer


def test_a_rank_updates_its_own_part() -> None:
    rates = PlainRates(bytes_per_second=GIB)
    step = traced(update=8 * GIB)
    assert seconds("ddp", *GPUS[:4], step=step, rates=rates).optimizer == pytest.approx(8)
    assert seconds("fsdp", *GPUS[:4], step=step, rates=rates).optimizer == pytest.approx(2)
    assert seconds("fsdp", *GPUS[:4], step=step, rates=rates, replicas=2).optimizer == pytest.approx(4)
    assert seconds("zero", *GPUS[:4], step=step, rates=rates, zero_stage=1).optimizer == pytest.approx(2)


def test_offloaded_the_host_updates() -> None:
    elements = traced().trainable_parameters
    rates = PlainRates(adam_seconds=1 / elements, copy_bytes_per_second=100 * MIB)
    step = traced(update=8 * GIB)
    found = seconds("zero", *GPUS[:4], step=step, rates=rates, zero_stage=2, offload=("optimizer",))
    # Every rank's quarter goes down and up in a second each, and the host's cores update all of it.
    assert found.offload == pytest.approx(1 + 1 + 1)
    assert found.optimizer == 0
    torch_adam = seconds("fsdp", *GPUS[:4], step=step, rates=rates, offload=("optimizer", "parameters"))
    assert torch_adam.offload > 1
    assert torch_adam.communication > seconds("fsdp", *GPUS[:4], step=step, rates=rates).communication
    half = replace(step, parameter_bytes=step.parameter_bytes // 2)
    of_half = seconds("fsdp", *GPUS[:4], step=half, rates=rates, offload=("optimizer", "parameters"))
    assert of_half.offload == pytest.approx(torch_adam.offload / 2, rel=1e-3), "a loop of operations takes as long as its bytes"
    one_pass = replace(step, optimizer_work=tuple(replace(work, name="_fused_adamw_") for work in step.optimizer_work))
    fused = seconds("fsdp", *GPUS[:4], step=one_pass, rates=rates, offload=("optimizer", "parameters"))
    assert fused.offload < torch_adam.offload / 5


def test_zero_gathers_the_updated_parameters_at_the_end() -> None:
    rates = PlainRates(wire_bytes_per_second=100 * MIB)
    step, others = traced(forward=10**15), ZeroSettings()
    found = seconds("zero", *GPUS[:2], step=step, rates=rates, zero_stage=1, asked=Zero(others))
    assert found.communication == pytest.approx(4 + 4)  # one bucket holds all the gradients, and goes when backward ends
    half = seconds("zero", *GPUS[:2], step=step, rates=rates, zero_stage=1, precision="bf16-mixed", asked=Zero(others))
    assert half.communication == pytest.approx(2 + 2)
    ours = seconds("zero", *GPUS[:2], step=step, rates=rates, zero_stage=1, precision="bf16-mixed")
    assert ours.communication == pytest.approx(1 + 4, rel=MICRO)  # each block fills a bucket; in 32 bits, as the parameters stay


def test_deepspeeds_python_and_fsdps_are_paid_for_by_the_call() -> None:
    """On a CPU device; a GPU's host works ahead."""
    two, rates, step = ("cpu:0", "cpu:1"), PlainRates(call=1e-6), traced(forward=10**9)
    stages = [seconds("zero", *two, step=step, rates=rates, zero_stage=stage).overhead for stage in (1, 2, 3)]
    assert stages[2] > 3 * stages[0] > stages[1] > 1e-3
    assert seconds("zero", *two, step=step, rates=rates, zero_stage=3, asked=Zero(ZeroSettings())).overhead == 0  # somebody else's engine
    assert seconds("zero", *GPUS[:2], step=traced(forward=10**12), rates=rates, zero_stage=3).overhead == 0
    looped = seconds("fsdp", *two, step=step, rates=rates).overhead
    one_pass = replace(step, optimizer_classes=("AdamW",))
    offloaded = seconds("fsdp", *two, step=one_pass, rates=rates, offload=("optimizer", "parameters")).overhead
    assert looped == pytest.approx(offloaded)  # the update is the same one
    users = replace(step, optimizer_work=tuple(replace(work, name="_fused_adamw_") for work in step.optimizer_work))
    assert looped == pytest.approx(seconds("fsdp", *two, step=users, rates=rates).overhead + 1e-6 * SHARDED_OPERATION)


def test_an_update_in_host_memory_by_what_it_goes_over() -> None:
    elements, all_of_it = traced().trainable_parameters, ("optimizer", "parameters")
    rates = PlainRates(adam_seconds=1 / elements, bytes_per_second=GIB)
    adam = replace(traced(update=8 * GIB), optimizer_bytes=2 * traced().gradient_bytes, optimizer_classes=("AdamW",))
    plain = replace(adam, optimizer_bytes=0, optimizer_classes=("SGD",))
    kept = replace(adam, optimizer_classes=("RMSprop",))
    found = [seconds("fsdp", GPUS[0], step=step, rates=rates, offload=all_of_it).offload for step in (adam, plain)]
    assert found == pytest.approx([1, 3 / 7])
    found = [seconds("fsdp", "cpu:0", step=step, rates=rates, offload=all_of_it).offload for step in (adam, plain, kept)]
    assert found == pytest.approx([8, 8, 8])  # a CPU device's host is itself: the operations are the device's own
    halves = seconds("fsdp", "cpu:0", "cpu:1", step=adam, rates=rates, offload=all_of_it)
    assert halves.offload == pytest.approx(4)  # it updates by itself, and so does the other one
    assert seconds("fsdp", *GPUS[:2], step=adam, rates=rates, offload=all_of_it).offload == pytest.approx(1)  # the host all of it


def test_one_device_waits_for_parameters_from_the_host() -> None:
    """FSDP2 fetches a unit's when its forward begins; with several ranks it gathers ahead of it."""
    rates = PlainRates(copy_bytes_per_second=100 * MIB)
    found = seconds("fsdp", GPUS[0], step=traced(forward=10**15), rates=rates, offload=("optimizer", "parameters"))
    assert found.communication >= 2 * 4  # four blocks of 100 MiB, forward and backward, however long these take


# -- pipelines ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("micro_batches", [2, 4, 8])
def test_even_stages_wait_for_filling_and_draining(schedule: str, micro_batches: int) -> None:
    found = seconds(
        "pipeline", *GPUS[:2], step=traced(), rates=PlainRates(), cuts=("net.2",), schedule=schedule, micro_batches=micro_batches
    )
    assert found.compute == pytest.approx(6, rel=1e-5)
    assert found.step == pytest.approx(6 * (micro_batches + 1) / micro_batches, rel=1e-5)  # (M + S - 1) / M
    assert found.bubble == pytest.approx(6 / micro_batches, rel=1e-5)


def test_each_micro_batch_costs_its_stages_something_beside_their_operations() -> None:
    plan = {"cuts": ("net.2",), "schedule": "1f1b", "micro_batches": 4}
    asked: dict[str, Any] = {"step": traced(), "here": inventory(cpu(0), cpu(1)), **plan}
    found, free = (seconds("pipeline", "cpu:0", "cpu:1", rates=PlainRates(action=each), **asked) for each in (0.01, 0.0))
    assert found.step - free.step == pytest.approx(2 * (4 + 1) * 0.01, rel=1e-5)  # forward and backward of M + S - 1
    assert found.overhead == pytest.approx(2 * 4 * 0.01, rel=1e-5)
    assert found.compute == pytest.approx(free.compute)


def test_the_slowest_stage_decides() -> None:
    rates = PlainRates()
    even, uneven = (
        seconds("pipeline", *GPUS[:2], step=traced(), rates=rates, cuts=(cut,), schedule="1f1b", micro_batches=8)
        for cut in ("net.2", "net.3")
    )
    assert uneven.compute == pytest.approx(9, rel=1e-5)
    assert uneven.step > even.step


def test_what_crosses_a_cut_is_sent() -> None:
    step = traced()
    rates = PlainRates(wire_bytes_per_second=8 * MIB)  # a block's input is 8 MiB
    found, free = (
        seconds("pipeline", *GPUS[:2], step=step, rates=one, cuts=("net.2",), schedule="gpipe", micro_batches=1)
        for one in (rates, PlainRates())
    )
    assert found.communication == pytest.approx(2, rel=1e-5)  # forward and back
    assert found.step - free.step == pytest.approx(2, rel=1e-5)


def test_replicas_of_a_pipeline_reduce_their_gradients_and_tied_stages_too() -> None:
    rates = PlainRates(wire_bytes_per_second=1 * MIB)
    plan = {"cuts": ("net.2",), "schedule": "1f1b", "micro_batches": 2}
    alone, twice = (seconds("pipeline", *GPUS[: 2 * count], step=traced(), rates=rates, replicas=count, **plan) for count in (1, 2))
    assert twice.communication > alone.communication + 100
    step = traced(also_uses=((4, "head.weight", 50 * MIB, 50 * MIB, 0),))
    tied = seconds("pipeline", *GPUS[:2], step=step, rates=rates, **plan)
    assert tied.communication - alone.communication == pytest.approx(50, rel=0.02)


# -- the data sheet's rates --------------------------------------------------------------------------------------------------------------


def device_speed(device: Device, precision: str = "32-true") -> float:
    """FLOP/s of large matrix products that others leave of a device."""
    product = Work(
        kind="matmul", name="mm", dtype=computing_dtype(precision), flops=2 << 36, moved_bytes=3 << 26, shape=(1, 4096, 4096, 4096)
    )
    return product.flops / slowed(DATA_SHEET, (device,)).work_seconds(device, product) * idle_share(device)


def test_half_precision_is_faster_on_a_gpu_and_an_unknown_gpu_is_slow() -> None:
    assert device_speed(gpu(0), "bf16-mixed") > 8 * device_speed(gpu(0), "32-true") > 0
    assert device_speed(gpu(0), "64-true") <= device_speed(gpu(0), "32-true")
    assert device_speed(gpu(0, name="GPU of tomorrow")) < device_speed(gpu(0))
    assert device_speed(gpu(0, utilization=0.5)) == pytest.approx(device_speed(gpu(0)) / 2)
    assert device_speed(cpu(0, threads=4)) == pytest.approx(4 * device_speed(cpu(0)))
    planned = replace(gpu(0), kind="catalogue", name="H100-80GB")
    assert device_speed(planned, "16-mixed") == device_speed(gpu(0), "16-mixed")


def test_flops_that_were_not_counted_are_guessed_from_the_parameters() -> None:
    bare = footprint(flops=0, blocks=0, parameters=10**9)
    some, more = (seconds("single", "cpu:0", step=replace(bare, parameters=count)).compute for count in (10**9, 2 * 10**9))
    assert more == pytest.approx(2 * some, rel=1e-3)
    assert some > 0


def test_another_node_and_a_slower_link_take_longer() -> None:
    near = seconds("ddp", *GPUS[:2]).communication
    assert seconds("ddp", GPUS[0], GPUS[5]).communication > near
    linked = replace(HERE, links=(Link(a=GPUS[0], b=GPUS[1], kind="nvlink"),))
    assert seconds("ddp", *GPUS[:2], here=linked).communication < near


_ENGINES = st.sampled_from(
    [
        {"engine": "single", "devices": GPUS[:1]},
        {"engine": "ddp", "devices": GPUS[:4]},
        {"engine": "fsdp", "devices": GPUS[:4], "reshard_after_forward": True, "shard": BLOCKS},
        {"engine": "zero", "devices": GPUS[:4], "zero_stage": 2},
        {"engine": "pipeline", "devices": GPUS[:2], "cuts": ("net.2",), "schedule": "1f1b", "micro_batches": 4},
    ]
)


@settings(max_examples=60, deadline=None)
@given(plan=_ENGINES, flops=st.integers(10**9, 10**14), more=st.integers(0, 10**14))
def test_more_flops_are_never_faster(plan: dict[str, Any], flops: int, more: int) -> None:
    less, greater = (predict_seconds(traced(forward=size), Plan(**plan), HERE).step for size in (flops, flops + more))
    assert greater >= less * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(plan=_ENGINES, speed=st.floats(1e6, 1e12), factor=st.floats(1, 100))
def test_faster_links_are_never_slower(plan: dict[str, Any], speed: float, factor: float) -> None:
    slow, fast = (
        predict_seconds(traced(), Plan(**plan), HERE, rates=PlainRates(wire_bytes_per_second=one)).step for one in (speed, speed * factor)
    )
    assert fast <= slow * (1 + 1e-9)


def test_a_gpus_host_offloads_parameter_by_parameter_and_issues_nothing_while_it_updates() -> None:
    """As measured on an H200: GPT-2 took 3.6 times as long as on the device alone, of which the update was a fifth."""
    step, all_of_it = traced(forward=10**9), ("optimizer", "parameters")
    elements, parameters = step.trainable_parameters, sum(len(block.parameter_rows) for block in step.blocks)
    assert parameters
    rates = PlainRates(issue=1e-3, adam_seconds=1 / elements)
    step = replace(step, optimizer_bytes=2 * step.gradient_bytes, optimizer_classes=("AdamW",))
    kept = seconds("fsdp", GPUS[0], step=step, rates=rates)
    found = seconds("fsdp", GPUS[0], step=step, rates=rates, offload=all_of_it)
    assert found.offload == pytest.approx(1)
    more = OFFLOADED_PARAMETER * parameters * 1e-3
    assert found.overhead >= more - found.compute
    assert found.step >= kept.step + more + 1 - 0.01
    thrice = seconds("fsdp", GPUS[0], step=step, rates=rates, offload=all_of_it, micro_batches=3)
    assert thrice.offload == pytest.approx(1 + 2 * step.gradient_bytes / ACCUMULATED_BYTES_PER_SECOND)
    assert thrice.overhead >= 3 * more - thrice.compute


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_the_rank_with_most_samples_is_waited_for_where_hosts_are_slower_than_gpus(engine: str) -> None:
    """All hosts issue as many operations, so that alone each rank takes as long; but gradients are exchanged when the last one has them."""
    step, here = scaled(step_of(256, 4), 16), parse_spec("8xL40S")
    how: dict[str, Any] = {"shard": tuple(block.fqn for block in step.blocks), "reshard_after_forward": False} if engine == "fsdp" else {}
    ids = [device.id for device in here.devices]
    even, uneven = (
        seconds(engine, *ids, step=step, here=here, shares=shares, precision="bf16-mixed", **how) for shares in ((), (1, *[2] * 6, 3))
    )
    assert uneven.compute > even.compute
    assert uneven.step > even.step
