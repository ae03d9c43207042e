"""The best plans are replayed before they are taken: what fits by the rule of thumb may not, and the other way round."""

from __future__ import annotations

import gc
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_autopar.constraints import Constraints
from lightning_autopar.devices.inventory import Device, Inventory
from lightning_autopar.memory.allocator.options import AllocatorOptions
from lightning_autopar.memory.batch_scaling import scaled
from lightning_autopar.memory.device_bytes import DeviceBytes
from lightning_autopar.memory.footprint import Footprint, Moment
from lightning_autopar.memory.tape import Tape
from lightning_autopar.memory.trace.trace import trace
from lightning_autopar.planning import replayed_candidates
from lightning_autopar.planning.make_report import make_report
from lightning_autopar.planning.plan_bytes import predict, replay
from lightning_autopar.planning.plan_cost import Appraiser, Predictions
from lightning_autopar.planning.replayed_candidates import Finalists
from lightning_autopar.plans import OFFLOADS, Plan
from lightning_autopar.report.report import Candidate, NothingFits, Report
from tests.memory.trace.test_trace import GPT, Module, tokens
from tests.planning.test_search import step_of

MIB, GIB = 1 << 20, 1 << 30


def inventory(kind: str = "cuda", count: int = 1) -> Inventory:
    devices = tuple(
        Device(id=f"{kind}:{index}", kind=kind, name="H100" if kind == "cuda" else "CPU", total_bytes=80 * GIB, free_bytes=80 * GIB)  # type: ignore[arg-type]
        for index in range(count)
    )
    return Inventory(devices=devices, host_total_bytes=1 << 40, host_free_bytes=1 << 40, source="cpu")


ONE = Plan(engine="single", devices=("cuda:0",))


def report(
    step: Footprint, here: Inventory, budget_bytes: int = 80 * GIB, *, allocator: AllocatorOptions | None = None, pinned: Plan | None = None
) -> Report:
    options = allocator or AllocatorOptions()
    excluded = dict.fromkeys(("micro_batches", "offload"), "the tests look at recomputation")
    constraints = Constraints(memory_margin=0, memory_limit_bytes=budget_bytes, allocator=options, pinned=pinned, excluded=excluded)
    try:
        return make_report(step, here, constraints)
    except NothingFits as nothing:
        return nothing.report


ROUNDS = 10


def fragmenting() -> Footprint:
    """A step that leaves holes: 100 MiB come and go, then 60 stay in their place; the 40 left over are too small for the next 60."""
    tape = Tape()
    tape.add("allocate", 0, MIB, "parameters")
    tape.add("leave", -1)
    for index in range(1, 2 * ROUNDS, 2):
        tape.add("allocate", index, 100 * MIB, "activations")
        tape.add("free", index, 0, "activations")
        tape.add("allocate", index + 1, 60 * MIB, "activations")
    peak = (60 * (ROUNDS - 1) + 100) * MIB
    return Footprint(
        parameters=MIB // 4,
        trainable_parameters=0,
        batch_size=8,
        parameter_bytes=MIB,
        gradient_bytes=0,
        optimizer_bytes=0,
        buffer_bytes=0,
        activation_bytes=peak,
        temporary_bytes=0,
        input_bytes=0,
        moments=(Moment(phase="forward", activation_bytes=peak),),
        tape=tape,
    )


def around(step: Footprint, here: Inventory) -> tuple[int, int]:
    """What lies outside of the allocator, and what libraries take inside."""
    size = predict(step, ONE, here)["cuda:0"]
    return size.context, size.workspace


@pytest.fixture(scope="module")
def gpt() -> Footprint:
    torch.manual_seed(0)
    return trace(Module(GPT(width=256, depth=4)), None, next(iter(DataLoader(tokens(), 32))), target="cuda")


def first(found: Report) -> Candidate:
    return next(candidate for candidate in found.candidates if candidate.runnable)


def test_what_fits_by_the_rule_of_thumb_may_not() -> None:
    here, step = inventory(), fragmenting()
    context, workspace = around(step, here)
    budget = context + workspace + 900 * MIB
    assert first(report(replace(step, tape=None), here, budget)).fits
    found = first(report(step, here, budget))
    assert (found.fits, found.replayed) == (False, True)
    assert found.reason is not None
    assert max(found.needs.values()) > budget
    # Each of the ten holds its 100, as they can't be given back: 1,000 and what is small.
    enough = report(step, here, context + workspace + 1030 * MIB)
    assert first(enough).fits
    held = first(enough).bytes["cuda:0"]
    assert held.to_dict()["rounding"] == pytest.approx((100 * ROUNDS - 60 * (ROUNDS - 1) - 100) * MIB, abs=4 * MIB)


@pytest.mark.parametrize("pinned", [True, False])
def test_a_plan_whose_later_steps_lack_memory_is_not_taken(gpt: Footprint, pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first steps fit: a search replays no more of most plans."""

    def later(footprint: Footprint, plan: Plan, rank: int, **options: Any) -> Any:
        found = replay(footprint, plan, rank, **options)
        if not options["first_look"] or plan.recompute:
            return found
        return replace(found, go_on=lambda: replace(found, fits=False, missing_bytes=MIB))

    before = first(report(gpt, inventory(), pinned=ONE if pinned else None))
    monkeypatch.setattr(replayed_candidates, "replay", later)
    found = first(report(gpt, inventory(), pinned=ONE if pinned else None))
    assert (before.plan.recompute, before.fits) == ((), True)
    assert (found.fits, bool(found.plan.recompute)) == ((False, False) if pinned else (True, True))


def test_a_step_that_waits_for_its_allocator_takes_longer() -> None:
    """Where a step fits only because the allocator gives segments back in each, the price of that is part of its seconds."""
    here, step = inventory(), scaled(step_of(1024, 12), 6)
    blocks = tuple(block.fqn for block in step.blocks)
    how = {"shard": blocks, "reshard_after_forward": True, "offload": OFFLOADS, "recompute": blocks, "micro_batches": 2}
    pinned = Constraints(memory_margin=0, precision="bf16-mixed", pinned=Plan(engine="fsdp", devices=("cuda:0",), **how))
    ample = make_report(step, here, pinned).candidates[0]
    assert not any("narrowly" in note for note in ample.notes)
    limit = ample.bytes["cuda:0"].reserved - 400 * MIB
    narrow = make_report(step, here, replace(pinned, memory_limit_bytes=limit)).candidates[0]
    waiting = re.search(r"fits narrowly: .* give memory back to the driver (\d+) times", " ".join(narrow.notes))
    assert waiting is not None
    assert narrow.step_seconds == pytest.approx(ample.step_seconds + 1e-3 * int(waiting[1]))


def test_settings_of_the_allocator_count() -> None:
    here, step = inventory(), fragmenting()
    context, workspace = around(step, here)
    budget = context + workspace + 760 * MIB
    assert not first(report(step, here, budget)).fits
    assert first(report(step, here, budget, allocator=AllocatorOptions(expandable_segments=True))).fits
    little = AllocatorOptions(expandable_segments=True, memory_fraction=0.005)  # of 80 GiB: 410 MiB
    refused = first(report(step, here, budget, allocator=little))
    assert refused.reason is not None
    assert "needs more than 410 MiB" in refused.reason


def test_what_does_not_fit_by_the_rule_of_thumb_may(gpt: Footprint) -> None:
    here = inventory()
    coarse = first(report(replace(gpt, tape=None), here, pinned=ONE))
    exact = first(report(gpt, here, pinned=ONE))
    need, less = max(coarse.needs.values()), max(exact.needs.values())
    assert less < need
    between = (need + less) // 2
    assert not first(report(replace(gpt, tape=None), here, between, pinned=ONE)).fits
    assert first(report(gpt, here, between, pinned=ONE)).fits
    # Where the choice is free, the faster plan is found thanks to it.
    with_tape, without = report(gpt, here, between).best, report(replace(gpt, tape=None), here, between).best
    assert with_tape is not None
    assert without is not None
    assert without.recompute
    assert not with_tape.recompute


def test_the_replays_figures_are_reported(gpt: Footprint) -> None:
    here = inventory()
    found = report(gpt, here)
    best = first(found)
    predicted = predict(gpt, best.plan, here)["cuda:0"]
    played = replay(gpt, best.plan, 0, workspaces=(predicted.workspace // 2,) * 2)
    size = best.bytes["cuda:0"]
    assert size.to_dict()["rounding"] == played.reserved_peak_bytes - played.allocated_peak_bytes
    assert size.allocated == played.allocated_peak_bytes == pytest.approx(predicted.allocated, rel=0.001)
    assert max(best.needs.values()) == max(size.reserved, played.reserved_peak_bytes + predicted.context)
    assert found.to_dict()["candidates"][0]["replayed"] is True
    assert any(reason.startswith("a replay of its allocations") for reason in best.plan.reasons)
    # One replay decides: the others are said to be predicted.
    assert sum(candidate.replayed for candidate in found.candidates) == 1


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_each_rank_of_a_pipeline_is_replayed(gpt: Footprint, schedule: Any) -> None:
    here, cuts = inventory(count=4), tuple(block.fqn for block in gpt.blocks[1:])
    pinned = Plan(engine="pipeline", devices=tuple(device.id for device in here.devices), cuts=cuts, schedule=schedule, micro_batches=4)
    asked = Constraints(memory_margin=0, pinned=pinned)
    best = make_report(gpt, here, asked).candidates[0]
    assert best.replayed
    for rank, (device, size) in enumerate(best.bytes.items()):
        assert isinstance(size, DeviceBytes)
        played = replay(gpt, pinned, rank, workspaces=(size.workspace // 2,) * 2)
        assert size.to_dict()["rounding"] == played.reserved_peak_bytes - played.allocated_peak_bytes
        assert best.needs[device] == played.reserved_peak_bytes + size.context
    assert len(set(best.needs.values())) > 1
    with pytest.raises(NothingFits) as nothing:
        make_report(gpt, here, replace(asked, memory_limit_bytes=max(best.needs.values()) - 2 * MIB))
    assert nothing.value.report.candidates[0].replayed


def test_the_footprints_margin_counts_in_a_replay(gpt: Footprint) -> None:
    here = inventory()
    need = max(first(report(gpt, here, pinned=ONE)).needs.values())
    wide = replace(gpt, margin=0.2)
    assert not first(report(wide, here, int(1.15 * need), pinned=ONE)).fits
    assert first(report(wide, here, int(1.21 * need), pinned=ONE)).fits


def test_cpu_devices_need_no_replay(gpt: Footprint) -> None:
    assert not any(candidate.replayed for candidate in report(gpt, inventory("cpu", 2)).candidates)


def test_the_best_is_looked_for_until_one_fits(gpt: Footprint) -> None:
    """With less and less memory, whatever is chosen was replayed under its limit, and what is better than it was, too, and doesn't fit."""
    here = inventory(count=4)
    most = max(first(report(gpt, here)).needs.values())
    context, _ = around(gpt, here)
    seen = set()
    for step in range(12):
        budget = int(context + (most - context) * (1.02 - 0.06 * step))
        found = report(gpt, here, budget)
        if found.best is None:
            assert not any(candidate.fits for candidate in found.candidates)
            continue
        seen.add(found.best.title())
        best = first(found)
        assert best.replayed
        assert max(best.needs.values()) <= budget
        others = [candidate for candidate in found.candidates if candidate.replayed and candidate is not best]
        assert all(candidate.reason or candidate.step_seconds > best.step_seconds for candidate in others)
    assert len(seen) > 1


def test_a_search_sets_off_no_collection(gpt: Footprint) -> None:
    """It goes on as it was afterwards, also where nothing fits."""
    seen = []

    def asked(footprint: Footprint, plan: Plan, inventory: Inventory) -> Mapping[str, DeviceBytes]:
        seen.append(gc.isenabled())
        return predict(footprint, plan, inventory)

    assert gc.isenabled()
    for margin in (0.0, 0.9999):
        with suppress(NothingFits):
            make_report(gpt, inventory(), Constraints(memory_margin=margin), predict=asked)
        assert gc.isenabled()
    assert seen
    assert not any(seen)
    gc.collect()
    gc.disable()
    try:
        assert any(one.replayed for one in report(gpt, inventory()).candidates)
        assert gc.collect() < 100, "what a search has made is gone with it"
    finally:
        gc.enable()


def test_replays_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight devices, twelve blocks (as many as GPT-2 has): the last replay begins before so many allocations were replayed."""
    torch.manual_seed(0)
    step = trace(Module(GPT(width=64, depth=12)), None, next(iter(DataLoader(tokens(), 32))), target="cuda")
    here = inventory(count=8)
    assert step.tape is not None
    assert len(step.tape) > 2000
    allocations: list[int] = []

    def counted(*arguments: Any, **named: Any) -> Any:
        found = replay(*arguments, **named)
        allocations.append(found.allocations)
        return found

    monkeypatch.setattr(replayed_candidates, "replay", counted)
    for budget in (80 * GIB, first(report(step, here)).bytes["cuda:0"].reserved):
        allocations.clear()
        report(step, here, budget)
        assert min(allocations) > 0
        assert sum(allocations[:-1]) < replayed_candidates._MOST_ALLOCATIONS


def test_what_is_missing_is_measured_on_the_rank_that_was_played(gpt: Footprint) -> None:
    """The first rank has most samples and most memory; on the second, which has least to spare, hardly anything is missing."""
    here, shares = inventory(count=2), (31, 1)
    plan = Plan(engine="ddp", devices=("cuda:0", "cuda:1"), shares=shares)
    constraints = Constraints(memory_margin=0)
    candidate = Appraiser(gpt, here, constraints).candidate(plan)
    limit = candidate.bytes["cuda:1"].allocated - candidate.bytes["cuda:1"].context - 8 * MIB  # type: ignore[attr-defined]
    played = Finalists(Appraiser(gpt, here, constraints)).replayed(candidate, 1, limit)
    assert not played.fits
    assert played.missing_bytes < candidate.bytes["cuda:0"].allocated - limit


@pytest.mark.parametrize("pinned", [True, False])
def test_a_replay_makes_up_for_nothing_that_the_host_lacks(gpt: Footprint, pinned: bool) -> None:
    """What is offloaded must have room there, however little the allocator holds on the device."""
    plan = Plan(engine="fsdp", devices=("cuda:0",), reshard_after_forward=True, shard=("net.blocks.0",), offload=OFFLOADS)
    constraints = Constraints(memory_margin=0, allow=("fsdp",), pinned=plan if pinned else None)
    here = replace(inventory(), host_total_bytes=16 * MIB, host_free_bytes=16 * MIB)
    with pytest.raises(NothingFits) as refused:
        make_report(gpt, here, constraints)
    assert "of the host's memory, which has 16 MiB" in str(refused.value)
    ample = make_report(gpt, inventory(), constraints).best_candidate
    assert ample is not None
    assert ample.replayed


def test_plans_that_differ_have_replays_of_their_own(gpt: Footprint) -> None:
    """A plan that offloads holds less on its device than the same without, whichever is replayed first; other devices, other libraries."""
    here = inventory(count=2)
    constraints = Constraints(memory_margin=0)
    finalists = Finalists(Appraiser(gpt, here, constraints))
    whole = Plan(engine="fsdp", devices=("cuda:0", "cuda:1"), reshard_after_forward=True, shard=("net.blocks.0",))
    appraiser = Appraiser(gpt, here, constraints)
    less, more = (finalists.replayed(appraiser.candidate(plan), 0, 80 * GIB) for plan in (replace(whole, offload=OFFLOADS), whole))
    assert less.allocated_peak_bytes < more.allocated_peak_bytes
    others = replace(here, devices=tuple(replace(device, name="L4" if device.id == "cuda:1" else device.name) for device in here.devices))
    both = Finalists(Appraiser(gpt, others, constraints))
    for device in ("cuda:0", "cuda:1"):
        both.replayed(Appraiser(gpt, others, constraints).candidate(replace(ONE, devices=(device,))), 0, 80 * GIB)
    assert len(both._played) == 2


def test_questions_that_share_predictions_share_replays(gpt: Footprint, monkeypatch: pytest.MonkeyPatch) -> None:
    """How much memory is free changes nothing in them. Each search counts those that it asks for, and goes on by itself."""
    made: list[Any] = []
    monkeypatch.setattr(replayed_candidates, "replay", lambda *given, **named: made.append(named) or replay(*given, **named))
    shared, residuals, left = Predictions(), Constraints().residuals, []

    def played(lasting: bool, **constraints: Any) -> Any:
        appraiser = Appraiser(gpt, inventory(), Constraints(residuals=residuals, **constraints), predictions=shared)
        finalists, candidate = Finalists(appraiser), appraiser.candidate(ONE)
        finalists.lasting |= {ONE} if lasting else set()
        found = finalists.replayed(candidate, 0, 80 * GIB)
        left.append(finalists._left)
        return found

    first, last, again = played(False), played(True, memory_margin=0.5), played(True)
    assert len(made) == 1
    assert first.go_on is not None
    assert last == again
    assert last.allocations > first.allocations
    assert played(False).allocations == first.allocations
    assert len(set(left)) == 1
    played(False, allocator=AllocatorOptions(memory_fraction=0.9))
    assert len(made) == 2, "other settings of the allocator are another question"
