"""Runs that are moved, parked and killed at drawn batches are the runs that plain Lightning makes on one device."""

from __future__ import annotations

from pathlib import Path

from lightning_autopar.plans import Plan
from tests.chaos.chaos_modules import Variant, draw_variant
from tests.chaos.chaos_runs import compare, fit_plainly, fit_with
from tests.chaos.chaos_schedules import ddp, draw_actions, fsdp, offloaded, pipeline, pool, single, zero
from tests.chaos.chaos_stage import Action

#: Each of them is entered and left once, in an order in which states go from each kind to another.
EVERY = (ddp(0, 1), pipeline(1, 2), fsdp(0, 2), zero(1, 0, 1), zero(3, 1, 2), ddp(0, 1, 2), offloaded(1), single(2))


def test_every_engine_is_entered_and_left(tmp_path: Path) -> None:
    variant = Variant(seed=3, limit=10)
    actions = [Action(at=2 + 3 * number, what="move", plan=plan) for number, plan in enumerate(EVERY)]
    figures = compare(fit_plainly(variant, tmp_path / "plain"), fit_with(variant, tmp_path / "moved", actions))
    assert figures.moves == len(EVERY)
    assert figures.again == 0
    assert len(figures.left) == len(set(figures.entered) | {"single"})


def _move(at: int, plan: Plan) -> Action:
    return Action(at=at, what="move", plan=plan)


def _kill(at: int, where: str, rank: int = 0, plan: Plan | None = None) -> Action:
    return Action(at=at, what="fault", where=where, rank=rank, plan=plan)


def test_the_same_plan_elsewhere_is_the_same_run_bit_by_bit(tmp_path: Path) -> None:
    variant = Variant(seed=4, data="two", workers=1, accumulate=2)
    end = variant.batches
    actions = [_move(3, single(1)), _kill(5, "saved"), _move(end, single(0)), Action(at=15, what="park", plan=single(2))]
    actions += [_kill(18, "outside"), _move(25, single(1))]
    run = fit_with(variant, tmp_path / "moved", actions, allow=["single"])
    figures = compare(fit_plainly(variant, tmp_path / "plain"), run, exact=True)
    assert (figures.moves, figures.parks, figures.faults) == (4, 1, 2)


def test_killed_workers_cost_no_step(tmp_path: Path) -> None:
    variant = Variant(seed=5, data="stream", accumulate=2)
    actions = [_move(2, ddp(0, 1)), _kill(5, "outside", 1), _kill(8, "starting", 1, pipeline(1, 2)), _kill(12, "tensors_saved", 1)]
    actions += [_kill(16, "validation"), _move(22, fsdp(0, 2)), _kill(27, "preparing", 0, single(1))]
    run = fit_with(variant, tmp_path / "moved", actions, allow=["single", "ddp", "fsdp", "pipeline"])
    figures = compare(fit_plainly(variant, tmp_path / "plain"), run)
    assert (figures.moves, figures.faults) == (3, 5), [(span.title, span.reason) for span in run.timeline]


def test_a_seed_draws_the_same_schedule_each_time() -> None:
    variant = draw_variant(7)
    drawn = [draw_actions(7, variant, pool(variant, 3), moves=5, kills=3, parks=1) for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert [action.at for action in drawn[0]] == sorted(action.at for action in drawn[0])
    assert sum(action.what == "fault" for action in drawn[0]) == 3
