"""The search against a referee that writes plans down from their fields, and what must hold of micro-batches."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from math import inf

import pytest
import torch

from benchmarks.memory.stage_rank import GPT
from benchmarks.referee.judge import Referee
from lightning_autopar import engines
from lightning_autopar.constraints import Constraints
from lightning_autopar.devices.inventory import Device, Inventory
from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.engines import Engine, Searching
from lightning_autopar.memory.allocator.replay import Replayed
from lightning_autopar.memory.batch_scaling import scaled
from lightning_autopar.memory.device_bytes import DeviceBytes
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.learned.corrections import Corrections
from lightning_autopar.memory.learned.step_times import StepTime, StepTimes
from lightning_autopar.memory.trace.trace import trace
from lightning_autopar.planning.block_units import with_recompute
from lightning_autopar.planning.fit_to_memory import in_parts, without_recompute
from lightning_autopar.planning.make_report import make_report
from lightning_autopar.planning.plan_cost import Appraiser
from lightning_autopar.planning.plan_seconds import predict_seconds
from lightning_autopar.planning.search import Search, _Prospect
from lightning_autopar.plans import SCHEDULES, Plan, Schedule
from lightning_autopar.report.report import Candidate
from lightning_autopar.strategies.pipeline.plans import PipelineMaker

PRECISION = "bf16-mixed"
#: The chosen plan's predicted step is at most so many times the best one's.
GOAL = 1.02


@functools.cache
def step_of(width: int, depth: int) -> Footprint:
    """A language model's step on two samples of 512 words, traced once."""
    with torch.device("meta"):
        model = GPT(width=width, depth=depth, words=32000, length=512, heads=16)
    return trace(model, None, torch.zeros(2, 512, dtype=torch.long), target="cuda", precision=PRECISION)


@pytest.mark.parametrize(
    ("devices", "batch", "tight"),
    [
        ("1xRTX4090", 6, 0.1),
        ("1xL4", 7, 0.5),
        ("2xA100-40GB", 16, 0.05),
    ],
)
def test_no_plan_that_a_referee_writes_down_is_faster_and_fits(devices: str, batch: int, tight: float) -> None:
    step, constraints = scaled(step_of(1024, 12), batch), Constraints(precision=PRECISION)
    here = Referee(step, parse_spec(devices), constraints).cut_to(tight, samples=60)
    best = make_report(step, here, constraints).best_candidate
    assert best is not None
    verdict = Referee(step, here, constraints, seed=1).verdict(60, best.step_seconds)
    assert best.step_seconds <= GOAL * verdict.seconds, (best.plan.title(), verdict.best and verdict.best.title())


def test_a_run_that_was_faster_than_predicted_makes_all_plans_faster_and_changes_no_choice() -> None:
    """Half the seconds: uncorrected bounds would then pass over plans that are faster than the first one found."""
    step, here = scaled(step_of(1024, 12), 32), parse_spec("2xL40S")
    here = replace(here, devices=tuple(replace(one, free_bytes=5 * 2**30) for one in here.devices))
    ran = StepTime(
        module="this", shape="any", devices=("GPU",), rates="data sheet", predicted=1.0, links=0.0, measured=0.5, day="2026-11-26"
    )
    times = StepTimes(records=(ran,), module="this")
    known = Corrections(devices={one.id: "GPU" for one in here.devices}, times=times)
    constraints = [Constraints(precision=PRECISION, residuals=residuals) for residuals in (Corrections(), known)]
    before, after = (make_report(step, here, each).best_candidate for each in constraints)
    assert before is not None
    assert after is not None
    assert before.plan.engine == "pipeline"
    assert replace(after.plan, reasons=()) == replace(before.plan, reasons=())
    assert after.step_seconds == pytest.approx(before.step_seconds / 2)


@pytest.mark.parametrize("devices", ["1xL4", "1xRTX4090", "1xH100-80GB"])
def test_a_batch_in_more_parts_is_never_faster_with_nothing_else_changed(devices: str) -> None:
    here = parse_spec(devices)
    step, plan = scaled(step_of(1024, 12), 16), Plan(engine="single", devices=(here.devices[0].id,))
    seconds = [predict_seconds(step, replace(plan, micro_batches=parts), here, precision=PRECISION).step for parts in (1, 2, 4, 8, 16)]
    assert all(later >= before * 0.995 for before, later in pairwise(seconds)), seconds


def test_even_parts_are_looked_at_where_fewer_uneven_ones_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    here = parse_spec("1xRTX3090")
    search = Search(Appraiser(scaled(step_of(1024, 12), 32), here, Constraints(precision=PRECISION)))
    search.best_seconds = 3.9
    monkeypatch.setattr(search.appraiser, "step_seconds", lambda plan: {5: 4.0, 6: 4.0, 8: 3.7, 16: 3.8}[plan.micro_batches])
    plan = Plan(engine="single", devices=(here.devices[0].id,))
    ((promised, following),) = search._followed(4.0, _Prospect(plan=plan, step="parts", left=(5, 6, 8, 16)))
    assert (promised, following.left) == (3.7, (8, 16))


def test_many_ranks_have_numbers_of_parts_between_the_powers_of_two() -> None:
    """Four may not fit where eight take too long."""
    here = parse_spec("5x8xA100-40GB")
    search = Search(Appraiser(scaled(step_of(1024, 12), 36 * 29), here, Constraints(precision=PRECISION)))
    plan = Plan(engine="ddp", devices=tuple(device.id for device in here.devices[:36]))
    assert search.remedies.parts(plan) == [1, 2, 3, 4, 6, 8, 15, 29]
    assert search.remedies.parts(replace(plan, engine="zero", zero_stage=2)) == [1], "DeepSpeed's gradients are those of the last part"


def test_replicas_are_looked_at_where_islands_of_a_node_are_of_different_sizes() -> None:
    """Four GPUs with NVLink and four without: nothing but the gradients' shards goes from the ones to the others."""
    search = Search(Appraiser(scaled(step_of(1024, 12), 35), parse_spec("4xRTX3090,4xV100-32GB"), Constraints(precision=PRECISION)))
    assert {2, 4} <= {plan.replicas for plan in search._options() if plan.engine == "fsdp" and plan.world_size == 8}


def test_uneven_micro_batches_in_stages_are_no_faster_than_fewer_even_ones() -> None:
    """Six samples in four parts, of which the larger two have as many as each of three."""
    step, here = scaled(step_of(1024, 12), 6), parse_spec("6xL4")
    devices, cuts = tuple(device.id for device in here.devices), tuple(block.fqn for block in step.blocks[2::2])
    three = Plan(engine="pipeline", devices=devices, micro_batches=3, cuts=cuts, schedule="gpipe")
    seconds = [predict_seconds(step, replace(three, micro_batches=parts), here, precision=PRECISION).step for parts in (3, 4)]
    assert seconds[1] >= seconds[0], seconds


def seconds_of_cuts(plan: Plan, step: Footprint, here: Inventory) -> list[float]:
    """Of the plan with all other cuts, nothing recomputed."""
    names = [block.fqn for block in step.blocks]
    others = (replace(plan, cuts=cuts, recompute=()) for cuts in combinations(names[1:], plan.stages - 1))
    return [predict_seconds(step, other, here, precision=PRECISION).step for other in others]


@pytest.mark.parametrize(("batch", "devices"), [(2, "2xRTX3090"), (2, "2xL4")])
def test_stages_of_which_a_rank_has_two_are_cut_by_the_ranks_sums(batch: int, devices: str) -> None:
    """With cuts by the slowest stage alone they take 3 % longer."""
    step, here = scaled(step_of(1024, 12), batch), parse_spec(devices)
    found = make_report(step, here, Constraints(precision=PRECISION, allow=("pipeline",))).candidates
    chosen = next(one for one in found if one.plan.schedule == "interleaved_1f1b")
    assert chosen.step_seconds <= 1.01 * min(seconds_of_cuts(chosen.plan, step, here))


@pytest.mark.parametrize(("batch", "devices", "seconds"), [(2, "3xRTX3090", 0.0305), (4, "6xRTX3090", 0.0335)])
def test_interleaved_stages_may_have_fewer_micro_batches_than_ranks_and_be_sharded(batch: int, devices: str, seconds: float) -> None:
    """Without such plans the choice takes a tenth longer."""
    chosen = make_report(scaled(step_of(1024, 12), batch), parse_spec(devices), Constraints(precision=PRECISION)).best_candidate
    assert chosen is not None
    assert chosen.step_seconds <= seconds, chosen.plan.title()


@pytest.mark.parametrize(("enough", "allocations"), [((9, 10, 11, 12), 300), ((7, 8), 12_000), (range(7, 13), 45_000)])
def test_more_recomputed_blocks_are_replayed_where_fewer_lose_more_than_they_save(
    monkeypatch: pytest.MonkeyPatch, enough: Sequence[int], allocations: int
) -> None:
    """After a failed replay a search assumes its loss for all plans of that sort; but with so many blocks this allocator loses nothing.
    Then the most that may win are tried, and half of them, even where failed replays have used up what a search may replay: as long as
    each is faster than the one before, it goes on.
    """
    step, constraints = scaled(step_of(1024, 12), 6), Constraints(precision=PRECISION, allow=("single",))
    here = Referee(step, parse_spec("1xRTX4090"), constraints).cut_to(0.5, samples=60)
    search = Search(Appraiser(step, here, constraints))
    monkeypatch.setattr(search.finalists, "replayed", lambda candidate, rank, limit, beyond=False: played(candidate.plan, limit))

    def played(plan: Plan, limit: int | None) -> Replayed:
        if limit is None:
            return Replayed(reserved_peak_bytes=1 << 40, allocated_peak_bytes=1 << 40)
        loses = plan.micro_batches > 1 or len(plan.recompute) not in enough
        search.finalists._left -= allocations
        missing = 4 << 30 if loses else 0
        return Replayed(reserved_peak_bytes=limit, allocated_peak_bytes=limit, fits=not loses, missing_bytes=missing)

    best = search.first()
    assert best is not None
    assert (best.plan.engine, len(best.plan.recompute), best.plan.micro_batches) == ("single", min(enough), 1)


@pytest.mark.parametrize(("released", "blocks"), [(400, 9), (1, 0)])
def test_a_plan_that_gives_memory_back_in_each_step_is_taken_only_where_that_pays(
    monkeypatch: pytest.MonkeyPatch, released: int, blocks: int
) -> None:
    """With less than nine recomputed blocks the allocator gives so many segments back in each step."""
    whole = {"micro_batches": "the batch stays whole"}
    step, constraints = scaled(step_of(1024, 12), 6), Constraints(precision=PRECISION, allow=("single",), excluded=whole)
    search = Search(Appraiser(step, parse_spec("1xRTX4090"), constraints))

    def played(candidate: Candidate, rank: int, limit: int | None, **_: bool) -> Replayed:
        narrow = len(candidate.plan.recompute) < blocks or released == 1
        holds = limit or 1 << 40
        return Replayed(reserved_peak_bytes=holds, allocated_peak_bytes=holds, released=released if narrow and limit else 0)

    monkeypatch.setattr(search.finalists, "replayed", played)
    best = search.first()
    assert best is not None
    assert len(best.plan.recompute) == blocks
    predicted = predict_seconds(step, best.plan, search.inventory, precision=PRECISION).step
    assert best.step_seconds == pytest.approx(predicted + (0.001 if released == 1 else 0))
    assert any("fits narrowly" in note for note in best.notes) == (released == 1)


@pytest.mark.parametrize(("narrow", "order"), [(0, range(12)), (11, (0, 1, 2, 3, 4, 11, 5, 6, 7, 8, 9, 10))])
def test_other_blocks_are_recomputed_where_the_first_ones_let_a_plan_wait_for_the_allocator(
    monkeypatch: pytest.MonkeyPatch, narrow: int, order: Sequence[int]
) -> None:
    """Here the allocator gives memory back in each step of every plan that recomputes a certain block. Blocks may save more for their time
    than others that run before them.
    """
    whole = {"micro_batches": "the batch stays whole"}
    step, constraints = scaled(step_of(1024, 12), 6), Constraints(precision=PRECISION, allow=("single",), excluded=whole)
    search = Search(Appraiser(step, Referee(step, parse_spec("1xRTX4090"), constraints).cut_to(0.05, samples=60), constraints))

    def played(candidate: Candidate, rank: int, limit: int | None, **_: bool) -> Replayed:
        waits = limit is not None and step.blocks[narrow].fqn in candidate.plan.recompute
        return Replayed(reserved_peak_bytes=limit or 0, allocated_peak_bytes=limit or 0, released=400 if waits else 0)

    monkeypatch.setattr(search.finalists, "replayed", played)
    monkeypatch.setattr(search.remedies, "order", lambda _: tuple(step.blocks[number].fqn for number in order))
    best = search.first()
    assert best is not None
    assert best.plan.recompute
    assert step.blocks[narrow].fqn not in best.plan.recompute


def test_more_recomputed_blocks_are_replayed_where_later_steps_wait_longer_than_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """With less than nine recomputed blocks the allocator gives one segment back in the first step, and 400 in later ones."""
    whole = {"micro_batches": "the batch stays whole"}
    step, constraints = scaled(step_of(1024, 12), 6), Constraints(precision=PRECISION, allow=("single",), excluded=whole)
    search = Search(Appraiser(step, parse_spec("1xRTX4090"), constraints))

    def played(candidate: Candidate, rank: int, limit: int | None, **_: bool) -> Replayed:
        released = 0 if limit is None or len(candidate.plan.recompute) >= 9 else 400 if candidate.plan in search.finalists.lasting else 1
        return Replayed(reserved_peak_bytes=limit or 0, allocated_peak_bytes=limit or 0, released=released)

    monkeypatch.setattr(search.finalists, "replayed", played)
    best = search.first()
    assert best is not None
    assert len(best.plan.recompute) == 9
    assert search.best_seconds == search.appraiser.batch_seconds(best)


@pytest.mark.parametrize("waits", [True, False])
def test_stages_that_wait_for_the_allocator_or_lack_memory_are_replayed_with_more_recomputed_blocks(
    monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """Here the last rank needs two recomputed blocks, and the search, which learns what was lost without them, would need many more."""
    constraints = Constraints(precision=PRECISION, allow=("pipeline",))
    search = Search(Appraiser(scaled(step_of(1024, 12), 8), parse_spec("2xRTX4090"), constraints))

    def played(candidate: Candidate, rank: int, limit: int | None, **_: bool) -> Replayed:
        plan = candidate.plan
        own = engines.of(plan).own_blocks(search.footprint, plan, 1)
        narrow = limit is not None and rank == 1 and len(set(own).intersection(plan.recompute)) < 2
        holds = limit or int(1.05 * search.finalists.budget[plan.devices[rank]])
        missing = (8 << 30) if narrow and not waits else 0
        released = 400 if narrow and waits else 0
        return Replayed(reserved_peak_bytes=holds, allocated_peak_bytes=holds, released=released, fits=not missing, missing_bytes=missing)

    monkeypatch.setattr(search.finalists, "replayed", played)
    best = search.first()
    assert best is not None
    own = engines.of(best.plan).own_blocks(search.footprint, best.plan, 1)
    assert (best.fits, best.notes) == (True, search.appraiser.candidate(best.plan).notes)
    assert len(best.plan.recompute) <= 3
    assert set(best.plan.recompute) <= set(own)


def test_parts_as_large_as_those_that_failed_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 samples five parts have four at most, as four parts have; here five go through, and four don't."""
    step, constraints = scaled(step_of(1024, 12), 16), Constraints(precision=PRECISION, allow=("fsdp",))
    search = Search(Appraiser(step, parse_spec("1xRTX4090"), constraints))

    def played(candidate: Candidate, rank: int, limit: int | None, **_: bool) -> Replayed:
        missing = 0 if candidate.plan.micro_batches >= 5 else 4 << 30
        holds = limit or 1 << 40
        return Replayed(reserved_peak_bytes=holds, allocated_peak_bytes=holds, fits=not missing, missing_bytes=missing)

    monkeypatch.setattr(search.finalists, "replayed", played)
    best = search.first()
    assert best is not None
    assert best.plan.micro_batches == 5


def test_a_chosen_plan_has_been_replayed_however_much_the_allocator_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where replays refute one plan after the other, what they lost is assumed for all of their kind, until one fits."""
    step, constraints = scaled(step_of(1024, 12), 64), Constraints(precision=PRECISION, allow=("fsdp",))
    here = Referee(step, parse_spec("8xA100-40GB"), constraints).cut_to(0.3, samples=60)
    search = Search(Appraiser(step, here, constraints))
    asked: list[Plan] = []

    def played(candidate: Candidate, rank: int, limit: int | None, **_: bool) -> Replayed:
        asked.append(candidate.plan)
        search.finalists._left -= 30_000
        size = candidate.bytes[candidate.plan.devices[rank]]
        assert isinstance(size, DeviceBytes)
        holds = size.reserved - size.rounding - size.context + (500 << 20)
        missing = max(0, holds - (limit or holds))
        return Replayed(reserved_peak_bytes=holds, allocated_peak_bytes=holds, fits=not missing, missing_bytes=missing)

    monkeypatch.setattr(search.finalists, "replayed", played)
    best = search.first()
    assert best is not None
    assert (best.fits, best.replayed) == (True, True)
    assert search.finalists.is_tired
    assert not search.finalists.is_spent
    assert len(asked) < 20


def test_a_plan_whose_kind_loses_more_than_it_does_is_replayed_before_it_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """All lose 2 GB to the allocator but those in six parts with all blocks recomputed, which are faster than the first that fits."""
    step = scaled(step_of(1024, 12), 64)
    constraints = Constraints(precision=PRECISION, allow=("fsdp",), excluded={"shares": "the batch is shared out evenly"})
    search = Search(Appraiser(step, Referee(step, parse_spec("4xA100-40GB"), constraints).cut_to(0.3, samples=60), constraints))

    def played(candidate: Candidate, rank: int, limit: int | None, **_: bool) -> Replayed:
        search.finalists._left -= 30_000
        size = candidate.bytes[candidate.plan.devices[rank]]
        assert isinstance(size, DeviceBytes)
        lost = 20 if (candidate.plan.micro_batches, len(candidate.plan.recompute)) == (6, 12) else 2000
        holds = size.reserved - size.rounding - size.context + (lost << 20)
        missing = max(0, holds - (limit or holds))
        return Replayed(reserved_peak_bytes=holds, allocated_peak_bytes=holds, fits=not missing, missing_bytes=missing)

    monkeypatch.setattr(search.finalists, "replayed", played)
    best = search.first()
    assert best is not None
    assert best.plan.micro_batches == 6


def test_pipelines_that_are_hardly_slower_are_improved_like_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them may gain more by moving its cuts than the best one does."""
    asked: list[Plan] = []
    engine = engines.named("pipeline")
    polished = type(engine).polished

    def noting(self: Engine, search: Searching, plan: Plan) -> Plan:
        asked.append(plan)
        return polished(self, search, plan)

    monkeypatch.setattr(type(engine), "polished", noting)
    search = Search(Appraiser(scaled(step_of(1024, 12), 8), parse_spec("8xRTX4090"), Constraints(precision=PRECISION, allow=("pipeline",))))
    best = search.first()
    assert best is not None
    seconds = [search.appraiser.step_seconds(plan) for plan in {replace(plan, reasons=()) for plan in asked}]
    assert len(seconds) > 1
    assert max(seconds) <= 1.05 * min(seconds)


@pytest.mark.parametrize(
    ("devices", "batch", "tight", "schedule"),
    [("3xL4", 12, 0.4, "interleaved_1f1b"), ("4xV100-32GB", 16, 0.4, "interleaved_1f1b"), ("2xL40S", 8, 0.6, "gpipe")],
)
def test_a_pipeline_is_found_below_any_limit_that_it_meets(devices: str, batch: int, tight: float, schedule: Schedule) -> None:
    """A limit hides only what is slower."""
    step, constraints = scaled(step_of(1024, 12), batch), Constraints(precision=PRECISION)
    here = Referee(step, parse_spec(devices), constraints).cut_to(tight, samples=60)
    search = Search(Appraiser(step, here, constraints))

    def seconds(limit: float) -> float:
        plan = PipelineMaker(search.appraiser, here.devices, search.speed, None).best(schedule, lambda: limit)
        return inf if plan is None else search.appraiser.step_seconds(plan)

    found = seconds(inf)
    assert [seconds(found * more) for more in (1.0001, 1.02, 1.05)] == [found] * 3


def test_moved_cuts_recompute_no_more_than_they_have_to() -> None:
    step, constraints = scaled(step_of(1024, 12), 16), Constraints(precision=PRECISION)
    here = Referee(step, parse_spec("2xL40S"), constraints).cut_to(0.4, samples=60)
    search = Search(Appraiser(step, here, constraints))
    plan = PipelineMaker(search.appraiser, here.devices, search.speed, None).best("interleaved_1f1b", lambda: inf)
    assert plan is not None
    assert plan.recompute
    fewer = (with_recompute(without_recompute(plan), step, [fqn for fqn in plan.recompute if fqn != one]) for one in plan.recompute)
    assert not any(map(search.appraiser.holds, fewer))


def test_the_cuts_of_a_batch_that_stays_whole_are_moved() -> None:
    """Stages that run one after the other take equally long wherever they are cut; the update of the largest one decides."""
    step, here = scaled(step_of(1024, 12), 1), parse_spec("4xRTX3090")
    search = Search(Appraiser(step, here, Constraints(precision=PRECISION)))
    plan = PipelineMaker(search.appraiser, here.devices, search.speed, None).best("gpipe", lambda: inf)
    assert plan is not None
    assert search.appraiser.step_seconds(plan) <= 1.001 * min(seconds_of_cuts(plan, step, here))


@pytest.mark.parametrize(("devices", "batch"), [("2x4xA10G", 12), ("3xL4,3xA10G", 12), ("4xH100-80GB", 1)])
def test_no_pipeline_is_faster_than_the_bound_by_which_it_may_be_left(devices: str, batch: int) -> None:
    """Neither than that of its shape, nor than that of its cuts; and where replicas average gradients, the bound knows that. A single
    sample keeps the hosts busier than the GPUs; all ranks' hosts issue at once.
    """
    step, here = scaled(step_of(1024, 12), batch), parse_spec(devices)
    search = Search(Appraiser(step, here, Constraints(precision=PRECISION)))
    maker = PipelineMaker(search.appraiser, here.devices, search.speed, None)
    told = 0
    for schedule in SCHEDULES:
        for least, shape in maker._promising(schedule):
            plan = maker._fitted(shape, inf, any_will_do=True)
            if plan is None:
                continue
            exact = search.appraiser.step_seconds(plan)
            places = [0, *(index for index, block in enumerate(step.blocks) if block.fqn in plan.cuts)]
            assert max(least, maker._first_averages(shape, places)) <= exact, plan.title()
            told += least > shape.least_seconds(maker._total_seconds(shape))
    assert told > 0 or batch == 1


@pytest.mark.parametrize("free_gib", [3.4, 4.2, 6.0])
def test_parts_that_lack_memory_are_the_same_as_if_each_were_asked_about(free_gib: float) -> None:
    step, here = scaled(step_of(1024, 12), 48), parse_spec("2xL4,2xA10G")
    free = [int(free_gib * 2**30) * (2 + index) // 2 for index in range(4)]
    here = replace(here, devices=tuple(replace(one, free_bytes=size) for one, size in zip(here.devices, free, strict=True)))
    search = Search(Appraiser(step, here, Constraints(precision=PRECISION)))
    remedies = search.remedies
    plain = next(plan for plan in search._options() if plan.engine == "fsdp" and plan.world_size == 4)
    blocks = remedies.order(plain)

    def all_recomputed(parts: int) -> Plan:
        return with_recompute(in_parts(plain, parts), step, blocks)

    shared, even = remedies.shared_parts(plain), remedies.parts(plain)
    lacking = [not remedies._has_room(all_recomputed(parts)) for parts in shared]
    assert [remedies.is_crowded(in_parts(plain, parts)) for parts in shared] == lacking
    never = [not search.appraiser.holds(all_recomputed(parts)) for parts in even]
    assert [remedies._lacks_in_parts(in_parts(plain, parts), remedies.parts, search.appraiser.holds) for parts in even] == never


def test_beside_many_devices_an_engines_own_search_looks_at_some_numbers_and_around_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    engine = engines.named("pipeline")
    search, least = type(engine).searched, Constraints(precision=PRECISION, allow=("pipeline",))

    def searched(self: Engine, searching: Searching, devices: Sequence[Device], shown: bool) -> Iterable[Plan]:
        looked.append(len(devices))
        return search(self, searching, devices, shown)

    monkeypatch.setattr(type(engine), "searched", searched)
    best = make_report(scaled(step_of(1024, 12), 4), parse_spec("3x8xA100-40GB"), least).best
    assert best is not None
    near = [size for size in looked if size > 16 and size % 4]
    assert looked[0] == 24
    assert len(looked) == len(set(looked))
    assert all(abs(size - best.world_size) < 4 for size in near)


def test_plans_whose_devices_compute_too_long_are_left_without_predicting_them() -> None:
    """On 128 devices with different free memory, 1,900 plans could be predicted. Two thirds of them can't be faster than the best one."""
    here, draw = parse_spec("16x8xA100-40GB"), random.Random(0)
    devices = tuple(replace(one, free_bytes=int(draw.uniform(3, 14) * 2**30)) for one in here.devices)
    constraints = Constraints(precision=PRECISION, allow=("fsdp",), excluded={"shares": "the batch is shared out evenly"})
    search = Search(Appraiser(scaled(step_of(2048, 24), 512), replace(here, devices=devices), constraints))
    assert search.first() is not None
    assert len(search.appraiser._known_seconds) < 1000
