"""What must hold of any search: on random modules and machines, by the planner's own predictions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from lightning_autopar import engines
from lightning_autopar.constraints import Constraints
from lightning_autopar.devices.inventory import Device, Inventory, Link
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.planning.block_units import recomputable
from lightning_autopar.planning.enumerate_plans import micro_batch_counts
from lightning_autopar.planning.make_report import make_report
from lightning_autopar.planning.plan_cost import WORTHWHILE, Appraiser
from lightning_autopar.planning.refusals import cannot_run
from lightning_autopar.plans import Plan
from lightning_autopar.report.report import NothingFits, Report
from tests.fakes.values import GIB, MIB, block, cpu, footprint, gpu, inventory

#: Nothing is shrunk: on a busy machine that takes minutes, and these examples are small.
PHASES = (Phase.explicit, Phase.generate)
settings = hypothesis_settings(max_examples=20, deadline=None, derandomize=True, phases=PHASES)

#: Of each device its free memory in 64 MiB, threads and other people's load.
DEVICES = st.lists(st.tuples(st.integers(2, 40), st.sampled_from([1, 2, 4]), st.sampled_from([None, 0.3, 0.8])), min_size=1, max_size=4)
#: Of each block its parameters and activations in MiB, and its FLOPs in 10^9.
BLOCKS = st.lists(st.tuples(st.integers(1, 32), st.integers(1, 256), st.integers(1, 40)), min_size=1, max_size=4)
#: The same with few parameters, where activations are what memory goes for.
WIDE_BLOCKS = st.lists(st.tuples(st.integers(1, 8), st.integers(16, 256), st.integers(1, 40)), min_size=1, max_size=4)
#: Of each device its memory in percent of what one device needs, threads and other people's load.
TIGHT_DEVICES = st.lists(st.tuples(st.integers(25, 110), st.sampled_from([1, 2]), st.sampled_from([None, 0.5])), min_size=1, max_size=3)


def module(blocks: list[tuple[int, int, int]], batch_size: int, margin: float = 0.0) -> Footprint:
    """A stack of blocks of any size."""
    layers = tuple(
        block(f"net.{index}", parameter_bytes=size * MIB, activation_bytes=saved * MIB, flops=flops * 10**9)
        for index, (size, saved, flops) in enumerate(blocks)
    )
    sizes = {
        name: sum(getattr(layer, name) for layer in layers)
        for name in ("parameters", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes")
    }
    values: dict[str, Any] = {
        **sizes,
        "trainable_parameters": sizes["parameters"],
        "blocks": layers,
        "flops": 3 * sum(layer.flops for layer in layers),
        "largest_parameter_bytes": max(layer.parameter_bytes for layer in layers),
    }
    return replace(footprint(batch_size=batch_size, margin=margin), **values)


def machine(devices: list[tuple[int, int, float | None]]) -> Inventory:
    """CPU devices, which the prediction is exact for."""
    return inventory(
        *(
            cpu(index, free * 64 * MIB, threads=threads, utilization=busy, total_bytes=64 * GIB)
            for index, (free, threads, busy) in enumerate(devices)
        )
    )


def tight(step: Footprint, devices: list[tuple[int, int, float | None]]) -> Inventory:
    """The same with memory in percent of what the module takes on one device, so that it is often short."""
    whole = max(Appraiser(step, inventory(cpu(0)), Constraints()).needs(Plan(engine="single", devices=("cpu:0",))).values())
    here = machine(devices)
    frees = [whole * percent // 100 for percent, _, _ in devices]
    return replace(here, devices=tuple(replace(one, free_bytes=free) for one, free in zip(here.devices, frees, strict=True)))


def plan_for(step: Footprint, here: Inventory, **constraints: Any) -> Report:
    constraints.setdefault("memory_margin", 0.0)
    try:
        return make_report(step, here, Constraints(**constraints))
    except NothingFits as error:
        return error.report


def best_seconds(found: Report) -> float:
    best = found.best_candidate
    return float("inf") if best is None else best.step_seconds


@settings
@given(BLOCKS, st.integers(0, 9), DEVICES)
def test_what_fits_exceeds_no_device_and_everything_else_says_why(blocks: Any, batch: int, devices: Any) -> None:
    step, here = module(blocks, batch, margin=0.07), machine(devices)
    found = plan_for(step, here, memory_margin=0.1, memory_limit_bytes=GIB)
    assert found.candidates
    for candidate in found.candidates:
        if candidate.fits:
            assert cannot_run(candidate.plan) is None
            for device in candidate.plan.devices:
                need = max(candidate.bytes[device].allocated, candidate.bytes[device].reserved)
                assert need * (1 + step.margin) <= min(here.device(device).free_bytes, GIB) * 0.9
        else:
            assert candidate.reason
            assert "\n" not in candidate.reason
    assert (found.best_index == 0) == found.candidates[0].fits


@settings
@given(BLOCKS, st.integers(0, 9), DEVICES)
def test_plans_survive_json_and_no_two_are_the_same(blocks: Any, batch: int, devices: Any) -> None:
    found = plan_for(module(blocks, batch), machine(devices))
    plans = [candidate.plan for candidate in found.candidates if candidate.bytes]
    assert [Plan.from_json(plan.to_json()) for plan in plans] == plans
    assert len({replace(plan, reasons=()) for plan in plans}) == len(plans)


@settings
@given(BLOCKS, st.integers(1, 9), DEVICES, st.integers(0, 3), st.integers(1, 40))
def test_more_memory_never_gives_a_slower_best_plan(blocks: Any, batch: int, devices: Any, which: int, more: int) -> None:
    step = module(blocks, batch)
    before = best_seconds(plan_for(step, machine(devices)))
    which %= len(devices)
    larger = [(free + more if index == which else free, *rest) for index, (free, *rest) in enumerate(devices)]
    assert best_seconds(plan_for(step, machine(larger))) <= before * (1 + WORTHWHILE)


@settings
@given(BLOCKS, st.integers(1, 9), DEVICES, st.integers(0, 3))
def test_a_faster_device_never_gives_a_slower_best_plan(blocks: Any, batch: int, devices: Any, which: int) -> None:
    # Which devices are worth a look is told from their speed and memory: with offload, which needs less of both, a pair may be missed.
    kept = {"offload": "all stays on the devices"}
    step = module(blocks, batch)
    before = best_seconds(plan_for(step, machine(devices), excluded=kept))
    which %= len(devices)
    faster = [(free, 2 * threads if index == which else threads, busy) for index, (free, threads, busy) in enumerate(devices)]
    assert best_seconds(plan_for(step, machine(faster), excluded=kept)) <= before * (1 + WORTHWHILE)


@settings
@given(BLOCKS, st.integers(1, 9), DEVICES, st.booleans(), st.randoms(use_true_random=False))
def test_the_order_of_the_devices_does_not_change_the_best_prediction(
    blocks: Any, batch: int, devices: Any, linked: bool, random: Any
) -> None:
    gpus = [
        gpu(index, free * 256 * MIB, utilization=busy, node=threads % 2, name="Tesla T4" if threads == 4 else "NVIDIA H100 80GB HBM3")
        for index, (free, threads, busy) in enumerate(devices)
    ]
    links = tuple(Link(a=a.id, b=b.id, kind="nvlink") for a, b in itertools.pairwise(gpus) if a.node == b.node) if linked else ()
    here = inventory(*gpus, links=links)
    shuffled: list[Device] = list(here.devices)
    random.shuffle(shuffled)
    step = module(blocks, batch)
    first, second = plan_for(step, here).best_candidate, plan_for(step, replace(here, devices=tuple(shuffled))).best_candidate
    assert (first is None) == (second is None)
    if first is not None and second is not None:
        assert first.step_seconds == pytest.approx(second.step_seconds, rel=WORTHWHILE)


@settings
@given(WIDE_BLOCKS, st.integers(1, 9), st.integers(40, 99))
def test_no_recomputed_block_of_the_best_plan_can_be_missed(blocks: Any, batch: int, percent: int) -> None:
    step = module(blocks, batch)
    here = tight(step, [(percent, 1, None)])
    best = plan_for(step, here, excluded={"micro_batches": "not here", "offload": "not here"}).best
    assume(best is not None)
    assert best is not None
    assert best.recompute
    appraiser = Appraiser(step, here, Constraints(memory_margin=0.0))
    for fqn in best.recompute:
        fewer = replace(best, recompute=tuple(other for other in best.recompute if other != fqn))
        assert not appraiser.holds(fewer)


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to share out so many samples."""
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


def every_plan(step: Footprint, here: Inventory, constraints: Constraints) -> Iterator[Plan]:
    """The whole space of plans that can be run: sets of devices, engines, shares, micro-batches, sets of recomputed blocks."""
    names = [layer.fqn for layer in recomputable(step)]
    subsets = [subset for count in range(len(names) + 1) for subset in itertools.combinations(names, count)]
    for count in range(1, min(len(here.devices), step.batch_size) + 1):
        for devices in itertools.combinations(here.devices, count):
            question = engines.Question(footprint=step, inventory=here, constraints=constraints)
            several = ("single",) if count == 1 else ("ddp", "fsdp")
            for plain in [one for engine in several for one in engines.named(engine).plans(question, devices)]:
                if plain.offload:
                    continue
                for rows in compositions(step.batch_size, count):
                    for parts, subset in itertools.product(micro_batch_counts(max(rows)), subsets):
                        shares = rows if len(set(rows)) > 1 else ()
                        yield replace(plain, shares=shares, micro_batches=parts, recompute=subset, reasons=())


def regret(step: Footprint, here: Inventory) -> float:
    """By how much the best plan is slower than the fastest of all."""
    constraints = Constraints(memory_margin=0.0)
    appraiser = Appraiser(step, here, constraints)
    fastest = float("inf")
    for plan in every_plan(step, here, constraints):
        if (seconds := appraiser.step_seconds(plan)) < fastest and appraiser.holds(plan):
            fastest = seconds
    found = best_seconds(plan_for(step, here))
    return 0.0 if found == fastest else found / fastest - 1


@hypothesis_settings(max_examples=15, deadline=None, derandomize=True, phases=PHASES)
@given(WIDE_BLOCKS.filter(lambda blocks: len(blocks) <= 2), st.integers(1, 5), TIGHT_DEVICES)
def test_nothing_in_the_whole_space_of_plans_is_faster_than_the_best_one(blocks: Any, batch: int, devices: Any) -> None:
    step = module(blocks, batch)
    assert regret(step, tight(step, devices)) <= WORTHWHILE
