from dataclasses import replace
from typing import Any

import pytest

from lightning_autopar.memory.inventory import Link
from lightning_autopar.planning.timing import Rates, Seconds, catalogue_rates, group_bandwidth, predict_seconds
from lightning_autopar.plans import Plan
from tests.fakes.values import GIB, cpu, footprint, gpu, inventory

HERE = inventory(cpu(0), cpu(1), cpu(2, threads=2), gpu(0), gpu(1), gpu(2, utilization=0.5), gpu(3, node=1))


def seconds(engine: Any, *devices: str, step: Any = None, here: Any = HERE, precision: str = "32-true", **parts: Any) -> Seconds:
    if engine == "fsdp":
        parts.setdefault("reshard_after_forward", True)
    return predict_seconds(step or footprint(), Plan(engine=engine, devices=devices, **parts), here, precision=precision)


def test_the_parts_add_up_to_the_step() -> None:
    whole = seconds("fsdp", "cpu:0", "cpu:1", recompute=("net.0",), shard=("net.0", "net.1"))
    parts = whole.to_dict()
    assert parts.pop("step") == whole.step == pytest.approx(sum(parts.values()))
    assert set(parts) == {"compute", "recompute", "communication", "input", "overhead"}
    assert all(part > 0 for name, part in parts.items() if name != "input")


def test_twice_the_threads_halve_the_flops_time() -> None:
    step = footprint(optimizer_bytes=0, gradient_bytes=0, parameter_bytes=0, parameters=10**6, flops=3 * 10**10)
    assert seconds("single", "cpu:0", step=step).compute == pytest.approx(1.0)
    assert seconds("single", "cpu:2", step=step).compute == pytest.approx(0.5)


def test_a_busy_device_is_slower_by_what_others_take_and_never_stands_still() -> None:
    assert seconds("single", "GPU-0002").compute == pytest.approx(2 * seconds("single", "GPU-0000").compute)
    full = inventory(gpu(0, utilization=1.0))
    assert seconds("single", "GPU-0000", here=full).compute == pytest.approx(10 * seconds("single", "GPU-0000").compute)


def test_the_slowest_rank_decides() -> None:
    assert seconds("ddp", "GPU-0000", "GPU-0002").compute == seconds("ddp", "GPU-0002", "GPU-0001").compute
    assert seconds("ddp", "GPU-0000", "GPU-0002").compute > seconds("ddp", "GPU-0000", "GPU-0001").compute


def test_of_a_batch_of_three_two_ranks_do_two() -> None:
    step = footprint(batch_size=3, optimizer_bytes=0, gradient_bytes=0, parameter_bytes=0)
    assert seconds("ddp", "cpu:0", "cpu:1", step=step).compute == pytest.approx(2 / 3 * seconds("single", "cpu:0", step=step).compute)


def test_recomputing_every_block_adds_a_third_of_the_flops() -> None:
    step = footprint(optimizer_bytes=0, gradient_bytes=0, parameter_bytes=0)
    recomputed = seconds("single", "cpu:0", step=step, recompute=tuple(f"net.{index}" for index in range(4)))
    assert recomputed.recompute == pytest.approx(recomputed.compute / 3)
    uncounted = replace(step, blocks=tuple(replace(block, flops=0) for block in step.blocks))
    assert seconds("single", "cpu:0", step=uncounted, recompute=("net.1",)).recompute == pytest.approx(recomputed.recompute / 4)


def test_gathering_twice_takes_longer_than_once() -> None:
    assert (
        seconds("fsdp", "cpu:0", "cpu:1", reshard_after_forward=True).communication
        > seconds("fsdp", "cpu:0", "cpu:1", reshard_after_forward=False).communication
        > seconds("ddp", "cpu:0", "cpu:1").communication
        > 0
    )


def test_without_gradients_replicas_have_nothing_to_say_to_each_other() -> None:
    step = footprint(training=False)
    assert seconds("ddp", "cpu:0", "cpu:1", step=step).communication == 0
    assert seconds("fsdp", "cpu:0", "cpu:1", step=step).communication > 0


def test_a_gpu_hides_communication_behind_computing_and_a_cpu_does_not() -> None:
    heavy, light = footprint(flops=10**16), footprint(flops=10**9)
    assert (
        seconds("ddp", "GPU-0000", "GPU-0001", step=heavy).communication < seconds("ddp", "GPU-0000", "GPU-0001", step=light).communication
    )
    assert seconds("ddp", "cpu:0", "cpu:1", step=heavy).communication == seconds("ddp", "cpu:0", "cpu:1", step=light).communication


def test_another_node_and_a_slower_link_take_longer() -> None:
    near = seconds("ddp", "GPU-0000", "GPU-0001").communication
    assert seconds("ddp", "GPU-0000", "GPU-0003").communication > near
    linked = replace(HERE, links=(Link(a="GPU-0000", b="GPU-0001", kind="nvlink"),))
    assert seconds("ddp", "GPU-0000", "GPU-0001", here=linked).communication < near


def test_the_slowest_hop_of_the_best_way_counts() -> None:
    links = (
        Link(a="GPU-0000", b="GPU-0001", kind="nvlink", bytes_per_second=100e9),
        Link(a="GPU-0001", b="GPU-0002", kind="nvlink", bytes_per_second=50e9),
        Link(a="GPU-0000", b="GPU-0002", kind="pcie", bytes_per_second=10e9),
    )
    here = replace(HERE, links=links)
    whole = group_bandwidth(here, ("GPU-0000", "GPU-0001", "GPU-0002"))
    assert whole == group_bandwidth(here, ("GPU-0002", "GPU-0001")) == pytest.approx(0.5 * group_bandwidth(here, ("GPU-0000", "GPU-0001")))


def test_batch_norms_and_units_of_shards_cost_something() -> None:
    assert (
        seconds("ddp", "cpu:0", "cpu:1", step=footprint(batch_norm=("a", "b"))).communication
        > seconds("ddp", "cpu:0", "cpu:1").communication
    )
    assert seconds("fsdp", "cpu:0", "cpu:1", shard=("net.0",)).overhead > seconds("fsdp", "cpu:0", "cpu:1").overhead


def test_flops_that_were_not_counted_are_guessed_from_the_parameters() -> None:
    assert seconds("single", "cpu:0", step=footprint(flops=0)).compute > 0


def test_rates_by_precision_and_of_an_unknown_gpu() -> None:
    assert catalogue_rates(gpu(0), "bf16-mixed").flops_per_second > 10 * catalogue_rates(gpu(0), "32-true").flops_per_second
    assert catalogue_rates(gpu(0), "64-true").flops_per_second == catalogue_rates(gpu(0), "32-true").flops_per_second / 2
    assert catalogue_rates(gpu(0, name="GPU of tomorrow"), "32-true").flops_per_second < catalogue_rates(gpu(0), "32-true").flops_per_second
    planned = replace(gpu(0), kind="catalogue", name="H100-80GB")
    assert catalogue_rates(planned, "16-mixed") == catalogue_rates(gpu(0), "16-mixed")


def test_measured_rates_take_the_catalogues_place() -> None:
    step = footprint(flops=10**9, parameter_bytes=0, gradient_bytes=0, optimizer_bytes=0)
    plan = Plan(engine="single", devices=("cpu:0",))
    rates = Rates(flops_per_second=1e9, memory_bytes_per_second=GIB)
    assert predict_seconds(step, plan, HERE, rates=lambda device, precision: rates).compute == pytest.approx(1.0)


def test_an_unknown_device_is_an_error() -> None:
    with pytest.raises(ValueError, match="cpu:9"):
        seconds("single", "cpu:9")
