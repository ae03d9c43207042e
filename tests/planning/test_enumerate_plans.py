from dataclasses import replace
from typing import Any

import pytest

from lightning_autopar.constraints import Constraints, SplitFinding
from lightning_autopar.devices.inventory import Link
from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.engines import Question
from lightning_autopar.memory.footprint import Footprint, LayerFootprint
from lightning_autopar.planning.block_units import recomputable_order, with_recompute
from lightning_autopar.planning.enumerate_plans import Option, enumerate_candidates, micro_batch_counts
from lightning_autopar.planning.refusals import engine_runs
from lightning_autopar.plans import Plan
from tests.fakes.values import GIB, block, cpu, footprint, gpu, inventory


def with_blocks(blocks: tuple[LayerFootprint, ...]) -> Footprint:
    return replace(footprint(), blocks=blocks)


def options(step: Any = None, here: Any = None, *, runs: bool = True, **constraints: Any) -> list[Option]:
    step, here = step or footprint(), here or inventory(cpu(0), cpu(1))
    asked = Constraints(**constraints)
    question = Question(footprint=step, inventory=here, constraints=asked)
    return list(enumerate_candidates(question, keep=lambda engine: engine_runs(engine, asked.allow) == runs))


def devices_of(found: list[Option], engine: str = "ddp") -> list[tuple[str, ...]]:
    return list(dict.fromkeys(option.plan.devices for option in found if option.plan.engine == engine))


def test_every_engine_that_can_be_run() -> None:
    """What lies in host memory needs no second device."""
    assert [option.plan.title() for option in options()] == [
        "single",
        "ddp ×2",
        "fsdp, keep gathered, offload optimizer + parameters",
        "fsdp, reshard, offload optimizer + parameters",
        "fsdp ×2, keep gathered",
        "fsdp ×2, reshard",
        "fsdp ×2, keep gathered, offload optimizer + parameters",
        "fsdp ×2, reshard, offload optimizer + parameters",
    ]
    kept = options(excluded={"offload": "all stays on the devices"})
    assert [option.plan.title() for option in kept] == ["single", "ddp ×2", "fsdp ×2, keep gathered", "fsdp ×2, reshard"]


def test_what_cannot_be_run_yet_is_there_as_well_and_offload_on_one_device_too() -> None:
    assert [option.plan.title() for option in options(runs=False)] == [
        "zero-2, offload optimizer",
        "zero-3, offload optimizer",
        "zero-3, offload optimizer + parameters",
        "zero-1 ×2",
        "zero-2 ×2",
        "zero-3 ×2",
        "zero-2 ×2, offload optimizer",
        "zero-3 ×2, offload optimizer",
        "zero-3 ×2, offload optimizer + parameters",
    ]
    assert {option.plan.engine for option in options(runs=False, min_devices=2)} == {"zero"}
    assert all(option.plan.world_size == 2 for option in options(runs=False, min_devices=2))


def test_copies_of_the_model_lie_on_a_node_or_an_island_each() -> None:
    found = options(footprint(batch_size=64), parse_spec("4x2xH100-80GB"))
    hybrid = [option.plan for option in found if option.plan.replicas > 1 and option.plan.world_size == 8]
    assert {plan.replicas for plan in hybrid} == {4, 2}
    node = {device: number // 2 for number, device in enumerate(hybrid[0].devices)}
    assert all(node[plan.devices[0]] == node[plan.devices[1]] for plan in hybrid)
    four = [gpu(index) for index in range(4)]
    links = (Link(a="GPU-0000", b="GPU-0002", kind="nvlink"), Link(a="GPU-0001", b="GPU-0003", kind="nvlink"))
    found = options(here=inventory(*four, links=links))
    plan = next(option.plan for option in found if option.plan.replicas == 2)
    assert plan.devices in (("GPU-0000", "GPU-0002", "GPU-0001", "GPU-0003"), ("GPU-0001", "GPU-0003", "GPU-0000", "GPU-0002"))


def test_every_plan_says_why() -> None:
    assert all(option.plan.reasons for option in (*options(), *options(runs=False)))


def test_blocks_are_the_units_of_sharding_but_not_those_whose_parameters_are_others_as_well() -> None:
    step = footprint(blocks=3, tied=(("net.0.weight", "head.weight"), ("net.1.a.weight", "net.1.b.weight")))
    plan = next(option.plan for option in options(step) if option.plan.engine == "fsdp")
    assert plan.shard == ("net.1", "net.2")
    assert any("net.0" in reason and "other code has or uses their parameters" in reason for reason in plan.reasons)
    routed = SplitFinding(uneven_calls=("net.1", "net.2.expert"))
    plan = next(option.plan for option in options(step, split=routed) if option.plan.engine == "fsdp")
    assert plan.shard == ("net.2",)
    assert any("net.0, net.1" in reason and "samples decide whether they are called" in reason for reason in plan.reasons)


def test_nothing_is_recomputed_that_may_not_run_twice_or_saves_nothing_or_has_no_backward() -> None:
    blocks = (block("net.0", recomputable=False), block("net.1", activation_bytes=64, input_bytes=64), block("net.2"))
    assert recomputable_order(footprint(blocks=0, training=True)) == ()
    assert recomputable_order(footprint(training=False)) == ()
    assert recomputable_order(with_blocks(blocks)) == ("net.2",)


def test_blocks_that_save_most_for_their_time_come_first_and_plans_name_them_in_running_order() -> None:
    blocks = tuple(block(f"net.{index}", activation_bytes=size, input_bytes=0) for index, size in enumerate((64, 256, 128, 256)))
    step = with_blocks((*blocks, block("head", recomputable=False, repeated=False)))  # a layer, with which a stage may begin, isn't counted
    assert recomputable_order(step) == ("net.1", "net.3", "net.2", "net.0")
    seconds = {"net.0": 0.1, "net.1": 1.0, "net.2": 1.0, "net.3": 2.0}
    assert recomputable_order(step, seconds) == ("net.0", "net.1", "net.2", "net.3")
    plan = with_recompute(Plan(engine="single", devices=("cpu:0",)), step, ("net.3", "net.1"))
    assert plan.recompute == ("net.1", "net.3")
    assert "activations of 2 of 4 blocks are recomputed" in plan.reasons[0]


def test_a_batch_is_taken_apart_so_that_the_largest_part_has_any_number_of_samples() -> None:
    assert [micro_batch_counts(rows) for rows in (0, 1, 2, 6, 8)] == [[1], [1], [1, 2], [1, 2, 3, 6], [1, 2, 3, 4, 8]]
    assert {-(-60 // parts) for parts in micro_batch_counts(60)} == {-(-60 // parts) for parts in range(1, 61)}


def test_with_a_batch_for_each_rank_its_size_bounds_nothing() -> None:
    found = options(footprint(batch_size=1), split_batch=False)
    assert {"ddp", "fsdp"} <= {option.plan.engine for option in found}
    assert any("each rank takes a batch of its own" in reason for reason in found[-1].plan.reasons)


def test_the_freest_device_takes_the_larger_share_of_an_uneven_batch() -> None:
    here = inventory(cpu(0, 2 * GIB), cpu(1, 4 * GIB))
    assert devices_of(options(footprint(batch_size=5), here)) == [("cpu:1", "cpu:0")]
    assert devices_of(options(footprint(batch_size=4), here)) == [("cpu:0", "cpu:1")]
    assert devices_of(options(footprint(batch_size=5), here, min_devices=2)) == [("cpu:0", "cpu:1")]


@pytest.mark.parametrize("engine", ["single", "ddp", "fsdp"])
def test_batch_norm_over_ranks_is_mentioned(engine: str) -> None:
    plans = [option.plan for option in options(footprint(batch_norm=("bn",))) if option.plan.engine == engine]
    assert plans
    assert all(any("1 batch norm are" in reason for reason in plan.reasons) == (plan.world_size > 1) for plan in plans)
