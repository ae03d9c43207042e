"""Tables of stages against the exact prediction, and the pipelines that are made of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from benchmarks.memory.stage_rank import make_plan
from lightning_autopar.constraints import Constraints, SplitFinding
from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.planning.block_units import cuttable
from lightning_autopar.planning.make_report import make_report
from lightning_autopar.planning.plan_cost import WORTHWHILE, Appraiser
from lightning_autopar.planning.plan_seconds import device_speeds, part_seconds
from lightning_autopar.planning.refusals import cannot_run
from lightning_autopar.plans import Plan
from lightning_autopar.report.report import NothingFits, Report
from lightning_autopar.strategies.pipeline.memory import pipeline_bytes
from lightning_autopar.strategies.pipeline.partition import in_flight, lingers, stage_seconds, stage_tables
from lightning_autopar.strategies.pipeline.plans import pipeline_plans
from tests.fakes.values import MIB, cpu, footprint, inventory
from tests.memory.stages import MODELS, footprint_of


@pytest.fixture(scope="module")
def gpt() -> Footprint:
    return footprint_of(MODELS["narrow"])


@pytest.mark.parametrize(
    ("schedule", "most", "recompute"),
    [
        ("1f1b", 0.001, False),
        ("1f1b", 0.001, True),
        ("gpipe", 0.1, False),
        ("gpipe", 0.1, True),
        ("interleaved_1f1b", 0.15, False),
        ("interleaved_1f1b", 0.25, True),
    ],
)
def test_tables_say_what_stages_take(gpt: Footprint, schedule: Any, most: float, recompute: bool) -> None:
    stages = 8 if schedule == "interleaved_1f1b" else 4
    plan = make_plan(schedule, 4, 8, 8, stages=stages, recompute=8 if recompute else 0)
    tables = stage_tables(gpt, 2 / gpt.batch_size, 1.0, recompute=recompute)
    starts = [8 * stage // stages for stage in range(stages + 1)]
    for rank in range(4):
        told = sum(
            tables.needs(in_flight(schedule, stage, stages, 4, 8), lingers=lingers(schedule, stage, stages, 8))[
                starts[stage], starts[stage + 1]
            ]
            for stage in range(rank, stages, 4)
        )
        assert told == pytest.approx(pipeline_bytes(gpt, plan, rank).allocated, rel=most)


def test_tables_of_sharded_stages_hold_gathered_parameters_and_no_gathered_optimizer_state(gpt: Footprint) -> None:
    """Shapes that don't fit by the tables are passed over: these had the optimizer's state twice, once of them whole."""
    plan = make_plan("1f1b", 4, 8, 8, replicas=2, shard=True)
    tables = stage_tables(gpt, 1 / 8 / 2, 1 / 2, recompute=False)
    assert gpt.optimizer_bytes > gpt.parameter_bytes
    for rank in range(4):
        told = tables.needs(in_flight("1f1b", rank, 4, 4, 8), shards=2)[2 * rank, 2 * rank + 2]
        assert told == pytest.approx(pipeline_bytes(gpt, plan, rank).allocated, rel=0.01)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_batch_in_one_part_never_takes_less_than_the_tables_say(gpt: Footprint, recompute: bool) -> None:
    """Shapes that don't fit by the tables are passed over: these had all gradients beside all activations."""
    plan = make_plan("gpipe", 4, 1, 8, recompute=8 if recompute else 0)
    tables = stage_tables(gpt, 1.0, 1.0, recompute=recompute)
    told = [tables.needs(1, whole=True)[2 * rank, 2 * rank + 2] for rank in range(4)]
    exact = [pipeline_bytes(gpt, plan, rank).allocated for rank in range(4)]
    assert all(0.8 * real <= few <= 1.03 * real for few, real in zip(told, exact, strict=True)), (told, exact)
    assert any(tables.needs(1)[2 * rank, 2 * rank + 2] > 1.03 * exact[rank] for rank in range(4))


@pytest.mark.parametrize(
    ("schedule", "stage", "flight"),
    [("gpipe", 0, 8), ("1f1b", 0, 4), ("1f1b", 3, 1)],
)
def test_micro_batches_in_flight(schedule: Any, stage: int, flight: int) -> None:
    assert in_flight(schedule, stage, 4, 4, 8) == flight


def test_no_cut_between_blocks_that_share_a_parameter() -> None:
    step = footprint(blocks=5, tied=(("net.1.weight", "net.3.weight"), ("net.0.weight", "head.weight")))
    assert cuttable(step) == [True, True, False, False, True]


def test_stages_take_what_their_parts_do_and_what_they_receive(gpt: Footprint) -> None:
    parts = [forward + backward for _, forward, backward in part_seconds(gpt, cpu(0), 0.5)]
    table = stage_seconds(parts, lambda size_bytes: 0.25, gpt, 0.5)
    assert table[0, 8] == pytest.approx(sum(parts))
    assert table[0, 3] + table[3, 8] == pytest.approx(sum(parts) + 2 * 0.25)


def made(step: Footprint, here: Inventory, **constraints: Any) -> list[Plan]:
    appraiser = Appraiser(step, here, Constraints(memory_margin=0.0, **constraints))
    return list(pipeline_plans(appraiser, [here.devices], device_speeds(step, here)))


def test_a_pipeline_for_each_schedule_that_memory_suffices_for(gpt: Footprint) -> None:
    here = inventory(*(cpu(index, 64 * MIB) for index in range(4)))
    plans = made(gpt, here)
    assert [plan.schedule for plan in plans] == ["gpipe", "1f1b", "interleaved_1f1b"]
    appraiser = Appraiser(gpt, here, Constraints(memory_margin=0.0))
    assert all(appraiser.holds(plan) for plan in plans)
    assert all(cannot_run(plan) is None for plan in plans)
    assert all(plan.schedule == "gpipe" or plan.micro_batches >= plan.devices_per_replica for plan in plans)


def test_devices_with_most_memory_come_first_and_take_as_many_blocks_as_fit(gpt: Footprint) -> None:
    appraiser = Appraiser(gpt, inventory(cpu(0), cpu(1)), Constraints())
    even = make_plan("1f1b", 2, 2, 8)
    most = max(appraiser.needs(even).values())
    # The smaller device lacks the memory for an even share.
    here = inventory(cpu(0, most * 2 // 3), cpu(1, most * 2))
    plan = next(plan for plan in made(gpt, here) if plan.schedule == "1f1b")
    assert plan.devices == ("cpu:1", "cpu:0")
    assert Appraiser(gpt, here, Constraints(memory_margin=0.0)).holds(plan)
    assert any("devices with most memory come first" in reason for reason in plan.reasons)


def test_shared_embeddings_are_said_to_be_in_several_stages() -> None:
    tied = footprint_of(MODELS["tied"])
    plan = made(tied, inventory(cpu(0), cpu(1)))[0]
    assert any("hold a copy each" in reason for reason in plan.reasons)


def test_where_memory_suffices_for_none_there_is_one_to_be_read(gpt: Footprint) -> None:
    plans = made(gpt, inventory(cpu(0, MIB), cpu(1, MIB)))
    assert {plan.schedule for plan in plans} >= {"gpipe", "1f1b"}


def test_a_batch_that_is_not_taken_apart_runs_through_the_stages_whole(gpt: Footprint) -> None:
    here = inventory(*(cpu(index) for index in range(4)))
    for step in (replace(gpt, batch_size=1), replace(gpt, batch_norm=("norm",))):
        plans = made(step, here)
        assert [(plan.schedule, plan.micro_batches) for plan in plans] == [("gpipe", 1)]
    whole = made(gpt, here, split=SplitFinding(splittable=False, reason="no samples"))
    assert [(plan.micro_batches, plan.replicas, plan.stages) for plan in whole] == [(1, 1, 4)]


def test_no_stage_begins_with_a_block_of_which_it_is_known_that_it_cannot(gpt: Footprint) -> None:
    names = [block.fqn for block in gpt.blocks]
    uncuttable = {fqn: "a value that Python reads" for fqn in names if fqn not in names[2::3]}
    plans = made(gpt, inventory(cpu(0), cpu(1)), uncuttable=uncuttable)
    assert {cut for plan in plans for cut in plan.cuts} <= set(names[2::3])
    assert "interleaved_1f1b" not in {plan.schedule for plan in plans}  # four stages take three cuts
    small = made(gpt, inventory(cpu(0, MIB), cpu(1, MIB)), uncuttable=uncuttable)
    assert {cut for plan in small for cut in plan.cuts} <= set(names[2::3])


def test_only_so_many_blocks_of_each_rank_are_recomputed_as_it_takes(gpt: Footprint) -> None:
    appraiser = Appraiser(gpt, inventory(cpu(0), cpu(1)), Constraints())
    without = make_plan("gpipe", 2, 2, 8)
    needs = appraiser.needs(without)
    # The first device is a little too small for its stage, the second has all it may want.
    here = inventory(cpu(0, needs["cpu:0"] * 3 // 4), cpu(1, needs["cpu:0"] * 3 // 4 - 1))
    plan = next(plan for plan in made(gpt, here) if plan.schedule == "gpipe" and plan.recompute)
    exact = Appraiser(gpt, here, Constraints(memory_margin=0.0))
    assert exact.holds(plan)
    assert len(plan.recompute) < len(gpt.blocks)
    for fqn in plan.recompute:
        fewer = tuple(other for other in plan.recompute if other != fqn)
        first = [other for other in plan.recompute if (other >= plan.cuts[0]) == (fqn >= plan.cuts[0])]
        assert fqn != first[-1] or not exact.holds(replace(plan, recompute=fewer))


def test_what_promises_to_be_slower_than_the_limit_is_not_looked_at(gpt: Footprint) -> None:
    here = inventory(cpu(0), cpu(1))
    appraiser, speed = Appraiser(gpt, here, Constraints()), device_speeds(gpt, here)
    plans = list(pipeline_plans(appraiser, [here.devices], speed))
    fastest = min(appraiser.step_seconds(plan) for plan in plans)
    assert list(pipeline_plans(appraiser, [here.devices], speed, limit=lambda: fastest / 2, shown=False)) == []
    assert list(pipeline_plans(appraiser, [here.devices], speed, limit=lambda: fastest * 100, shown=False)) == plans
    # One of each schedule is there to be read all the same.
    told = list(pipeline_plans(appraiser, [here.devices], speed, limit=lambda: fastest / 2))
    assert [plan.schedule for plan in told] == [plan.schedule for plan in plans]


@settings(max_examples=15, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(
    percents=st.lists(st.integers(20, 110), min_size=2, max_size=4),
    which=st.integers(0, 3),
    more=st.integers(1, 90),
    order=st.randoms(use_true_random=False),
)
def test_pipelines_keep_to_memory_and_gain_by_more_of_it_and_devices_have_no_order(
    gpt: Footprint, percents: list[int], which: int, more: int, order: Any
) -> None:
    whole = Appraiser(gpt, inventory(cpu(0)), Constraints()).needs(Plan(engine="single", devices=("cpu:0",)))["cpu:0"]

    def planned(devices: list[tuple[int, int]]) -> Report:
        here = inventory(*(cpu(index, whole * percent // 100) for index, percent in devices))
        try:
            return make_report(gpt, here, Constraints(memory_margin=0.0, allow=("single", "pipeline")))
        except NothingFits as nothing:
            return nothing.report

    def seconds(found: Report) -> float:
        return found.best_candidate.step_seconds if found.best_candidate is not None else float("inf")

    devices = list(enumerate(percents))
    found = planned(devices)
    for candidate in found.candidates:
        for device in candidate.plan.devices if candidate.fits else ():
            assert candidate.bytes[device].allocated * (1 + gpt.margin) <= found.inventory.device(device).free_bytes
    which %= len(devices)
    larger = [(index, percent + more * (index == which)) for index, percent in devices]
    assert seconds(planned(larger)) <= seconds(found) * (1 + WORTHWHILE)
    order.shuffle(devices)
    assert seconds(planned(devices)) == pytest.approx(seconds(found))
