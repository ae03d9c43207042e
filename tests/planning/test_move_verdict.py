from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import Phase, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from lightning_autopar.constraints import Constraints
from lightning_autopar.devices.inventory import Inventory, device_events, usable
from lightning_autopar.memory.device_bytes import DeviceBytes
from lightning_autopar.planning.make_report import make_report
from lightning_autopar.planning.move_verdict import (
    LONGEST_WAIT_SECONDS,
    MoveHistory,
    Rules,
    TimeScale,
    Verdict,
    decide_move,
    decide_resume,
    fits,
    must_leave,
    pace_of,
    plan_kind,
    raw_batch_seconds,
    same_plan,
)
from lightning_autopar.planning.plan_seconds import predict_seconds
from lightning_autopar.plans import Plan
from lightning_autopar.report.report import Candidate, Report
from lightning_autopar.timing.step_seconds import Seconds
from tests.fakes.rates import PlainRates
from tests.fakes.traced import traced
from tests.fakes.values import GIB, MIB, cpu, gpu, inventory

settings = hypothesis_settings(max_examples=60, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
RULES = Rules()
TWO = inventory(cpu(0), cpu(1))


def candidate(*devices: str, taken: int = GIB, seconds: float = 1.0, margin: float = 0.1) -> Candidate:
    """A plan on these devices, of so many bytes on each."""
    plan = Plan(engine="single" if len(devices) == 1 else "ddp", devices=devices)
    size = DeviceBytes(parameters=taken)
    return Candidate(
        plan=plan,
        fits=True,
        bytes=dict.fromkeys(devices, size),
        needs=dict.fromkeys(devices, int(taken * (1 + margin))),
        seconds=Seconds(compute=seconds),
    )


def test_sizes_are_what_the_tests_take_them_for() -> None:
    held = candidate("cpu:0").bytes["cpu:0"]
    assert max(held.allocated, held.reserved) == GIB


# -- what happened ---------------------------------------------------------------------------------------------------------------------


def changed(device_id: str, **figures: Any) -> Inventory:
    devices = [replace(device, **figures) if device.id == device_id else device for device in TWO.devices]
    return replace(TWO, devices=tuple(devices))


@pytest.mark.parametrize(
    ("now", "kind", "words"),
    [
        (changed("cpu:0", free_bytes=3 * GIB), "shrank", ("cpu:0", "shrank by 1 GiB", "somebody took it")),
        (changed("cpu:0", free_bytes=5 * GIB), "grew", ("grew by 1 GiB", "gave it back")),
        (inventory(cpu(0)), "vanished", ("the run can no longer use cpu:1",)),
        (inventory(cpu(0), cpu(1), cpu(2)), "appeared", ("cpu:2", "4 GiB free")),
        (changed("cpu:1", error="XID 79"), "error", ("cpu:1", "XID 79")),
        (changed("cpu:1", slowdown=1.5), "slower", ("cpu:1 became slower", "1.5 times")),
        (replace(TWO, host_free_bytes=GIB), "host", ("host's memory is short", "1 GiB of 1 TiB")),
    ],
)
def test_what_happened_is_said_with_numbers(now: Inventory, kind: str, words: tuple[str, ...]) -> None:
    (event,) = device_events(TWO, now, ["cpu:0"])
    assert event.kind == kind
    assert all(word in event.text for word in words), event.text
    assert event.ours == (event.device == "cpu:0")


def test_what_ends_is_said_too() -> None:
    assert [event.kind for event in device_events(changed("cpu:0", error="XID 79", slowdown=2.0), TWO)] == ["recovered", "faster"]
    assert [event.kind for event in device_events(replace(TWO, host_free_bytes=GIB), TWO)] == ["host"]
    busy = inventory(gpu(0, utilization=0.5))
    (event,) = device_events(inventory(gpu(0, utilization=0.0)), busy)
    assert (event.kind, event.ours) == ("slower", False)
    assert event.text.startswith("cuda:0 became slower")


def test_what_an_allocator_does_is_nothing() -> None:
    assert device_events(TWO, changed("cpu:0", free_bytes=4 * GIB - 50 * MIB)) == ()
    assert device_events(TWO, TWO) == ()


# -- what can't stay -------------------------------------------------------------------------------------------------------------------


def test_a_plan_leaves_when_it_doesnt_fit_any_more() -> None:
    current = candidate("cpu:0", taken=GIB)
    assert must_leave(current, TWO) is None
    # It came with a margin, and stays without one: else it would bounce.
    assert must_leave(current, changed("cpu:0", free_bytes=GIB)) is None
    reason = must_leave(current, changed("cpu:0", free_bytes=GIB // 2))
    assert reason is not None
    assert reason == "the plan needs 1 GiB on cpu:0; only 512 MiB is free for it"


def test_the_larger_of_predicted_and_measured_counts() -> None:
    current, there = candidate("cpu:0", taken=GIB), changed("cpu:0", free_bytes=2 * GIB)
    assert must_leave(current, there, measured_bytes={"cpu:0": 2 * GIB}) is None
    assert "measured" in (must_leave(current, there, measured_bytes={"cpu:0": 3 * GIB}) or "")
    assert "needs 1 GiB" in (must_leave(current, changed("cpu:0", free_bytes=GIB - 1), measured_bytes={"cpu:0": 1}) or "")


def test_a_plan_leaves_a_device_that_is_gone_or_in_error() -> None:
    current = candidate("cpu:0", "cpu:1")
    assert must_leave(current, inventory(cpu(0))) == "the run can no longer use device cpu:1"
    assert must_leave(current, changed("cpu:1", error="XID 79")) == "cpu:1 is in error: XID 79"
    assert must_leave(candidate("cpu:0"), changed("cpu:1", error="XID 79")) is None


def test_a_plan_leaves_a_host_whose_memory_is_short() -> None:
    short = replace(TWO, host_free_bytes=GIB + 1)
    assert must_leave(candidate("cpu:0"), short) is None
    assert "2 GiB of the host's memory" in (must_leave(candidate("cpu:0", "cpu:1"), short) or "")
    on_gpu = replace(inventory(gpu(0)), host_free_bytes=GIB)
    assert must_leave(candidate("GPU-0000"), on_gpu) is None
    assert "host's memory" in (must_leave(candidate("GPU-0000"), on_gpu, host_bytes=2 * GIB) or "")


def test_devices_in_error_are_not_usable() -> None:
    assert usable(TWO) is TWO
    left = usable(changed("cpu:1", error="XID 79"))
    assert [device.id for device in left.devices] == ["cpu:0"]
    assert "XID 79" in left.notes[0]


def test_fitting_means_now_and_with_headroom() -> None:
    assert fits(candidate("cpu:0"), TWO)
    assert not fits(candidate("cpu:2"), TWO)
    assert not fits(candidate("cpu:0"), changed("cpu:0", error="XID 79"))
    assert not fits(candidate("cpu:0"), changed("cpu:0", free_bytes=GIB))
    tight = changed("cpu:0", free_bytes=int(1.15 * GIB))
    assert fits(candidate("cpu:0"), tight)
    assert not fits(candidate("cpu:0"), tight, headroom=0.1)
    # CPU devices share one memory.
    assert fits(candidate("cpu:0"), replace(TWO, host_free_bytes=2 * GIB))
    assert not fits(candidate("cpu:0", "cpu:1"), replace(TWO, host_free_bytes=2 * GIB))


# -- seconds on one scale --------------------------------------------------------------------------------------------------------------


def report_of(there: Inventory) -> Report:
    return make_report(traced(), there, Constraints(allow=("single", "ddp")), rates=PlainRates())


ONE, BOTH = (Plan(engine="single", devices=("cpu:0",)), Plan(engine="ddp", devices=("cpu:0", "cpu:1")))


def test_predictions_are_compared_with_predictions() -> None:
    """Measured is twice what was predicted: the other plan is believed to miss by as much."""
    report = report_of(TWO)
    alone, together = raw_batch_seconds(ONE, report), raw_batch_seconds(BOTH, report)
    assert alone == pytest.approx(2 * together)
    pace = pace_of(ONE, BOTH, report, 2 * alone)
    assert (pace.now, pace.then) == (pytest.approx(2 * alone), pytest.approx(2 * together))


def test_what_this_run_measured_of_another_kind_counts_for_it() -> None:
    report = report_of(TWO)
    alone, together = raw_batch_seconds(ONE, report), raw_batch_seconds(BOTH, report)
    factors = {plan_kind(BOTH, TWO): 3.0, plan_kind(ONE, TWO): 17.0}
    pace = pace_of(ONE, BOTH, report, alone, factors=factors)
    assert (pace.now, pace.then) == (pytest.approx(alone), pytest.approx(3 * together))
    # Of its own kind the latest counts, wherever it runs.
    elsewhere = pace_of(ONE, Plan(engine="single", devices=("cpu:1",)), report, 2 * alone, factors=factors)
    assert elsewhere.then == pytest.approx(2 * alone)


def test_a_slowed_device_is_predicted_slower() -> None:
    slowed = report_of(changed("cpu:0", slowdown=3.0))
    assert raw_batch_seconds(ONE, slowed) == pytest.approx(3 * raw_batch_seconds(ONE, report_of(TWO)))
    assert raw_batch_seconds(Plan(engine="single", devices=("cpu:1",)), slowed) == pytest.approx(raw_batch_seconds(ONE, report_of(TWO)))
    assert slowed.best is not None
    assert slowed.best.shares == (1, 3)


BLOCKS = tuple(f"net.{index}" for index in range(4))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(engine="single", devices=("cpu:0",)),
        Plan(engine="ddp", devices=("cpu:0", "cpu:1")),
        Plan(engine="fsdp", devices=("cpu:0", "cpu:1"), shard=BLOCKS, reshard_after_forward=True),
        Plan(engine="fsdp", devices=("cpu:0",), shard=BLOCKS, reshard_after_forward=True, offload=("optimizer", "parameters")),
        Plan(engine="zero", devices=("cpu:0", "cpu:1"), zero_stage=2, offload=("optimizer",)),
        Plan(engine="pipeline", devices=("cpu:0", "cpu:1"), cuts=("net.2",), schedule="gpipe", micro_batches=2),
    ],
    ids=Plan.title,
)
def test_a_slowed_cpu_device_is_slow_in_all_that_it_does(plan: Plan) -> None:
    """Or a plan would seem to gain by what happens not to be slowed, such as an update in host memory."""
    figures: dict[str, float] = {"issue": 0.25, "loop": 0.5, "unit": 0.1, "call": 1e-4, "action": 0.2, "adam_seconds": 1e-9}
    rates = PlainRates(bytes_per_second=1e10, wire_bytes_per_second=1e9, latency=0.01, hides=0.0, **figures)
    module = traced(update=10**9)
    usual, slow = (
        predict_seconds(module, plan, inventory(cpu(0, slowdown=times), cpu(1, slowdown=times)), rates=rates).step for times in (1.0, 2.0)
    )
    assert slow == pytest.approx(2 * usual)
    if plan.world_size > 1:  # all wait for the slowest
        one = predict_seconds(module, plan, inventory(cpu(0), cpu(1, slowdown=2.0)), rates=rates).step
        assert usual < one <= slow * (1 + 1e-9)


def test_a_slowed_gpus_host_is_as_fast_as_ever() -> None:
    rates, plan = PlainRates(issue=100.0, loop=7.0), Plan(engine="single", devices=("GPU-0000",))
    usual, slow = (predict_seconds(traced(), plan, inventory(gpu(0, slowdown=times)), rates=rates).step for times in (1.0, 2.0))
    assert usual == slow, "the host decides"
    rates = PlainRates()
    usual, slow = (predict_seconds(traced(), plan, inventory(gpu(0, slowdown=times)), rates=rates).step for times in (1.0, 2.0))
    assert slow == pytest.approx(2 * usual)


# -- the verdict -----------------------------------------------------------------------------------------------------------------------


LONG_THERE = MoveHistory(target=frozenset(["cpu:1"]), looks=10)


def ask(**facts: Any) -> Verdict:
    """A better plan on cpu:1 that has been there for long; with whatever is otherwise."""
    known: dict[str, Any] = {
        "now": 1000.0,
        "current": candidate("cpu:0").plan,
        "best": candidate("cpu:1"),
        "inventory": TWO,
        "rules": RULES,
        "history": LONG_THERE,
        "pace": TimeScale(now=1.0, then=0.5),
        "move_seconds": 2.0,
    }
    return decide_move(**{**known, **facts})


def test_a_better_plan_is_moved_to_with_the_numbers() -> None:
    verdict = ask()
    assert (verdict.action, verdict.code, verdict.urgent) == ("move", "move", False)
    assert all(words in verdict.reason for words in ("single on cpu:1", "500 ms a step instead of 1 s", "50% less", "costs 2 s"))


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        ({"best": candidate("cpu:0")}, "same"),
        ({"best": None}, "nothing"),
        ({"best": candidate("cpu:1", taken=5 * GIB)}, "nothing"),
        ({"best": candidate("cpu:7")}, "nothing"),
        ({"pace": None}, "unmeasured"),
        ({"pace": TimeScale(now=1.0, then=0.96)}, "gain"),
        ({"pace": TimeScale(now=1.0, then=3.0)}, "gain"),
        ({"remaining_steps": 7}, "price"),
        ({"move_seconds": 251.0}, "price"),
        ({"history": MoveHistory(target=frozenset(["cpu:1"]), looks=1)}, "patience"),
        ({"history": MoveHistory(target=frozenset(["cpu:9"]), looks=9)}, "patience"),
        ({"history": MoveHistory(target=frozenset(["cpu:1"]), looks=9, moved_at=950.0)}, "wait"),
    ],
)
def test_a_run_stays_for_a_reason(facts: dict[str, Any], code: str) -> None:
    verdict = ask(**facts)
    assert (verdict.action, verdict.code) == ("stay", code)
    assert verdict.reason


def test_a_run_that_must_leave_does_so_at_once() -> None:
    lately = MoveHistory(moved_at=999.9, returns=9)
    verdict = ask(history=lately, must="cpu:0 is gone", pace=None, remaining_steps=1, move_seconds=1e6)
    assert (verdict.action, verdict.code, verdict.urgent) == ("move", "must", True)
    assert verdict.reason.startswith("cpu:0 is gone; ")
    assert ask(must="cpu:0 is gone", best=None).action == "park"
    assert ask(must="cpu:0 is gone", best=candidate("cpu:1", taken=5 * GIB)).action == "park"
    # Planning has looked closer, at the allocations one by one.
    assert (stays := ask(must="too little", best=candidate("cpu:0"))).action == "stay"
    assert stays.code == "fits"


def test_a_parked_run_resumes_with_headroom_or_after_long() -> None:
    def looks(free: int) -> int:
        history = MoveHistory(moved_at=0.0)
        for look in range(1, 100):
            there = changed("cpu:1", free_bytes=free)
            verdict = decide_resume(now=5.0 * look, best=candidate("cpu:1"), inventory=there, rules=RULES, history=history)
            history = verdict.history
            if verdict.action == "move":
                assert verdict.code == "resume"
                return look
        return 0

    assert looks(2 * GIB) == RULES.patience
    assert looks(int(1.15 * GIB)) == 8 * RULES.patience
    assert looks(GIB) == 0


def test_a_parked_run_that_was_parked_before_waits() -> None:
    history = MoveHistory(moved_at=0.0, resumes=1, target=frozenset(["cpu:1"]), looks=10)
    ready = {"best": candidate("cpu:1"), "inventory": TWO, "rules": RULES}
    assert decide_resume(now=30.0, history=history, **ready).code == "wait"  # type: ignore[arg-type]
    assert decide_resume(now=60.0, history=history, **ready).code == "resume"  # type: ignore[arg-type]


def test_plans_are_the_same_whatever_the_reasons() -> None:
    plan = candidate("cpu:0").plan
    assert same_plan(plan, replace(plan, reasons=("it is the only one",)))
    assert not same_plan(plan, candidate("cpu:1").plan)


# -- what holds of any course of things ------------------------------------------------------------------------------------------------


TAKEN = changed("cpu:1", free_bytes=MIB)


@dataclass
class Course:
    """A run beside a neighbour, looked at every five seconds; at its best on both devices, half as fast on the first alone."""

    rules: Rules = RULES
    move_seconds: float = 2.0

    def moves(self, total_seconds: float, taken: Callable[[float], bool]) -> list[tuple[float, bool]]:
        """When it moved, and whether it had to."""
        slow, fast = candidate("cpu:0"), candidate("cpu:0", "cpu:1")
        paces = {(a, b): TimeScale(now=1.0 if a else 2.0, then=1.0 if b else 2.0) for a in (True, False) for b in (True, False)}
        current, history, found = fast, MoveHistory(), []
        now = 0.0
        while (now := now + 5.0) < total_seconds:
            there = TAKEN if taken(now) else TWO
            best = fast if fits(fast, there) else slow
            must = must_leave(current, there)
            pace = paces[current is fast, best is fast]
            facts: dict[str, Any] = {"now": now, "current": current.plan, "best": best, "inventory": there, "must": must, "pace": pace}
            verdict = decide_move(**facts, rules=self.rules, history=history, move_seconds=self.move_seconds)
            history = verdict.history
            assert (must is not None) == (verdict.urgent and verdict.action == "move")
            if verdict.action == "move":
                assert fits(best, there)
                history = history.moved(current.plan, best.plan, now, self.rules, urgent=verdict.urgent)
                current = best
                found.append((now, verdict.urgent))
        return found


@hypothesis_settings(settings, max_examples=30)
@given(period=st.floats(5.0, 3_000.0), share=st.floats(0.05, 0.95), min_seconds=st.floats(5.0, 100.0))
def test_a_flickering_neighbour_doesnt_make_it_dance(period: float, share: float, min_seconds: float) -> None:
    total = 6_000.0
    course = Course(rules=replace(RULES, min_seconds=min_seconds))
    found = course.moves(total, lambda now: now % period < share * period)
    free = [now for now, urgent in found if not urgent]
    # Each back and forth doubles the wait up to the longest; one is forgiven after four times the wait that it made.
    most = 2 + math.log2(max(2.0, LONGEST_WAIT_SECONDS / min_seconds)) + total / min(8 * min_seconds, LONGEST_WAIT_SECONDS)
    assert len(free) <= most
    assert all(later - earlier >= min_seconds for earlier, later in pairwise(free))
    assert len(found) - len(free) <= len(free) + 1


def test_a_neighbour_that_leaves_for_good_is_made_use_of() -> None:
    assert Course().moves(10_000.0, lambda now: now < 300) == [(5.0, True), (310.0, False)]


def test_a_fast_flicker_is_ignored_after_the_first() -> None:
    """It is never away for as many looks as patience wants."""
    assert Course().moves(10_000.0, lambda now: now % 15 < 5) == [(15.0, True)]


@settings
@given(
    now=st.floats(0.01, 100),
    then=st.floats(0.01, 100),
    remaining=st.one_of(st.just(math.inf), st.integers(0, 10**6)),
    move_seconds=st.floats(0.1, 1000),
    lasted=st.floats(0, 10**6),
    looks=st.integers(0, 20),
    moved=st.one_of(st.none(), st.floats(0, 10**6)),
    factor=st.floats(1, 5),
)
def test_a_gain_below_the_price_never_moves(
    now: float, then: float, remaining: float, move_seconds: float, lasted: float, looks: int, moved: float | None, factor: float
) -> None:
    clock = 2e6
    history = MoveHistory(
        target=frozenset(["cpu:1"]), looks=looks, since=clock - lasted, moved_at=None if moved is None else clock - moved, returns=looks
    )
    rules = replace(RULES, price_factor=factor)
    pace = TimeScale(now=now, then=then)
    facts: dict[str, Any] = {"remaining_steps": remaining, "move_seconds": move_seconds, "rules": rules, "pace": pace}
    verdict = ask(now=clock, history=history, **facts)
    if verdict.action == "move":
        assert remaining * (now - then) > factor * move_seconds
        assert (1 - then / now) * lasted > factor * move_seconds
        assert looks + 1 >= rules.patience
        assert then < (1 - rules.min_gain) * now
    else:
        assert verdict.action == "stay"


@settings
@given(
    free=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    taken=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    errors=st.tuples(st.booleans(), st.booleans()),
    gone=st.tuples(st.booleans(), st.booleans()),
    parked=st.booleans(),
)
def test_it_never_moves_to_what_doesnt_fit_and_never_stays_where_it_cant(
    free: tuple[int, int], taken: tuple[int, int], errors: tuple[bool, bool], gone: tuple[bool, bool], parked: bool
) -> None:
    """Whatever somebody else says is the best plan."""
    devices = [cpu(index, free[index] * 128 * MIB, error="XID 79" if errors[index] else None) for index in (0, 1) if not gone[index]]
    there = inventory(*devices)
    current, best = candidate("cpu:0", taken=taken[0] * 128 * MIB), candidate("cpu:1", taken=taken[1] * 128 * MIB)
    history = MoveHistory(target=frozenset(["cpu:1"]), looks=100)
    must = must_leave(current, there)
    if parked:
        verdict = decide_resume(now=1e6, best=best, inventory=there, rules=RULES, history=history)
    else:
        pace = TimeScale(now=1.0, then=0.5)
        facts: dict[str, Any] = {"current": current.plan, "best": best, "inventory": there, "pace": pace, "move_seconds": 2.0}
        verdict = decide_move(now=1e6, rules=RULES, history=history, must=must, **facts)
    if verdict.action == "move":
        assert not gone[1]
        assert not errors[1]
        assert best.needs["cpu:1"] <= free[1] * 128 * MIB
    holds = not gone[0] and not errors[0] and taken[0] <= free[0]
    assert holds == (must is None)
    if not parked:
        assert verdict.urgent == (not holds)
        assert verdict.action != "stay" or holds
