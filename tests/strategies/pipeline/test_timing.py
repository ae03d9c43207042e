"""Schedules against what they take by hand, and by brute force."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.planning.plan_seconds import predict_seconds
from lightning_autopar.plans import Plan, Schedule
from lightning_autopar.strategies.pipeline.schedules import Action
from lightning_autopar.strategies.pipeline.timing import Stages, pipeline_ends, play
from lightning_autopar.timing.data_sheet import DATA_SHEET
from tests.fakes.values import MIB, footprint


def stages(
    schedule: Schedule,
    ranks: int,
    micro_batches: int,
    forward: tuple[float, ...],
    backward: tuple[float, ...],
    send: float = 0.0,
    held: float = 0.0,
) -> Stages:
    between = len(forward) - 1
    return Stages(schedule, ranks, micro_batches, forward, backward, (send,) * between, held=(held,) * between)


def test_one_forward_one_backward_of_two_stages_and_four_micro_batches() -> None:
    found = play(stages("1f1b", 2, 4, (1, 1), (2, 2)))
    first = [(done.action, done.start) for done in found if done.rank == 0]
    forward, backward = (lambda index: Action("forward", 0, index)), (lambda index: Action("backward", 0, index))
    # Two forwards ahead; then it waits for the second stage's gradients, which come every three seconds.
    assert first == [
        (forward(0), 0),
        (forward(1), 1),
        (backward(0), 4),
        (forward(2), 6),
        (backward(1), 7),
        (forward(3), 9),
        (backward(2), 10),
        (backward(3), 13),
    ]
    assert pipeline_ends(stages("1f1b", 2, 4, (1, 1), (2, 2))) == (15, 13)


def test_gpipe_does_all_forwards_first() -> None:
    assert pipeline_ends(stages("gpipe", 3, 4, (1, 1, 1), (2, 2, 2))) == ((4 + 2) * 3, (4 + 1) * 3 + 1, 4 * 3 + 2)


def test_micro_batches_of_other_sizes_take_time_by_their_size() -> None:
    # Five samples in three micro-batches of 2, 2 and 1: the small one waits behind the others.
    asked = replace(stages("gpipe", 2, 3, (1.0, 1.0), (2.0, 2.0)), sizes=(1.2, 1.2, 0.6))
    assert pipeline_ends(asked) == pytest.approx((1.2 * 3 + 0.6 + 1.2 * 2 + 3 * 2, 1.2 * 3 + 0.6 + 3 * 2))
    many = replace(asked, schedule="1f1b", micro_batches=900, sizes=(1.2,) * 600 + (0.6,) * 300)
    assert max(pipeline_ends(many)) == pytest.approx(900 * 3 + 3, rel=0.001)


def test_sending_takes_as_long_as_it_does_forward_and_back() -> None:
    assert max(pipeline_ends(stages("gpipe", 2, 1, (1, 1), (2, 2), send=0.5))) == 6 + 1


def test_messages_take_time_of_who_computes_where_nothing_hides_them() -> None:
    asked = stages("1f1b", 2, 4, (1, 2), (2, 4), send=0.5)
    # The second stage begins when the first forward has come, and has no pause; its last gradients go back to the first.
    assert pipeline_ends(asked) == (1.5 + 4 * 6 + 0.5 + 2, 1.5 + 4 * 6)
    # Between two micro-batches it sends one's gradients, and receives the next one's activations.
    assert pipeline_ends(replace(asked, held=(0.25,))) == (1.5 + 4 * 6 + 3 * 0.5 + 0.5 + 2, 1.5 + 4 * 6 + 3 * 0.5)


def test_interleaving_pays_for_more_messages() -> None:
    """Where sending is hidden two stages a rank wait less; where it isn't, there is more of it than they save."""

    def seconds(schedule: Schedule, local: int, held: float) -> float:
        count = 2 * local
        return max(pipeline_ends(stages(schedule, 2, 8, (2 / local,) * count, (4 / local,) * count, 0.5, held)))

    assert seconds("interleaved_1f1b", 2, 0.0) < seconds("1f1b", 1, 0.0)
    assert seconds("interleaved_1f1b", 2, 0.25) > seconds("1f1b", 1, 0.25)


@pytest.mark.parametrize("micro_batches", [4, 8])
def test_interleaving_waits_less(micro_batches: int) -> None:
    plain = max(pipeline_ends(stages("1f1b", 4, micro_batches, (2,) * 4, (4,) * 4)))
    interleaved = max(pipeline_ends(stages("interleaved_1f1b", 4, micro_batches, (1,) * 8, (2,) * 8)))
    busy = 6 * micro_batches
    assert plain == busy + 3 * 6
    assert interleaved == busy + 3 * 3  # half the bubble with two stages a rank (https://arxiv.org/abs/2104.04473)


@settings(max_examples=60, deadline=None)
@given(
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    forward=st.lists(st.floats(0.1, 10), min_size=2, max_size=5),
    micro_batches=st.integers(1, 3),
    send=st.floats(0, 1),
)
def test_no_rank_does_two_things_at_once_or_before_they_can_be_done(
    schedule: Schedule, forward: list[float], micro_batches: int, send: float
) -> None:
    ranks = len(forward)
    asked = stages(schedule, ranks, micro_batches * ranks, tuple(forward), tuple(2 * seconds for seconds in forward), send)
    found = play(asked)
    ends = {(done.action.work, done.action.stage, done.action.micro_batch): done.end for done in found}
    clocks = [0.0] * ranks
    for done in sorted(found, key=lambda done: done.start):
        assert done.start >= clocks[done.rank] - 1e-9
        clocks[done.rank] = done.end
        work, stage, index = done.action
        if work == "forward" and stage:
            assert done.start >= ends["forward", stage - 1, index] + send - 1e-9
        if work == "backward":
            assert done.start >= ends["forward", stage, index] - 1e-9
            if stage < ranks - 1:
                assert done.start >= ends[work, stage + 1, index] + send - 1e-9
    assert tuple(clocks) == pytest.approx(pipeline_ends(asked))


@settings(max_examples=30, deadline=None)
@given(
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    forward=st.lists(st.floats(0.5, 2), min_size=8, max_size=8),
    send=st.floats(0, 0.5),
    held=st.floats(0, 0.5),
)
def test_many_micro_batches_go_on_at_the_pace_of_a_few(schedule: Schedule, forward: list[float], send: float, held: float) -> None:
    asked = stages(schedule, 8, 400, tuple(forward), tuple(2 * seconds for seconds in forward), send, held * send)
    ends = [0.0] * 8
    for done in play(asked):
        ends[done.rank] = done.end
    assert max(pipeline_ends(asked)) == pytest.approx(max(ends), rel=0.03)


@settings(max_examples=30, deadline=None)
@given(
    forward=st.lists(st.floats(0.1, 10), min_size=4, max_size=4),
    stage=st.integers(0, 3),
    more=st.floats(0, 10),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
)
def test_a_slower_stage_is_never_faster(forward: list[float], stage: int, more: float, schedule: Schedule) -> None:
    asked = stages(schedule, 4, 8, tuple(forward), tuple(forward))
    slower = [seconds + (more if number == stage else 0) for number, seconds in enumerate(forward)]
    assert max(pipeline_ends(replace(asked, forward=tuple(slower)))) >= max(pipeline_ends(asked)) - 1e-9


def test_a_gpus_host_takes_its_time_for_each_action_and_runs_ahead() -> None:
    here = parse_spec("2xH100-80GB")
    ids = tuple(device.id for device in here.devices)

    def seconds(parts: int, flops: int) -> float:
        plan = Plan(engine="pipeline", devices=ids, cuts=("net.2",), schedule="gpipe", micro_batches=parts)
        return predict_seconds(footprint(parameter_bytes=MIB // 4, activation_bytes=MIB, flops=flops), plan, here).step

    action = DATA_SHEET.python_seconds(here.devices[0], "action")
    assert action > 0
    assert seconds(8, 10**6) - seconds(4, 10**6) >= 2 * 4 * action, "the host decides: a forward and a backward for each micro-batch"
    assert seconds(8, 10**14) - seconds(4, 10**14) < action / 10, "the GPU decides: its host has long been there"


@pytest.mark.parametrize(("ranks", "rounds", "a_round"), [(11, 7, 12), (8, 20, 8), (6, 45, 6), (9, 5, 10), (10, 6, 11)])
def test_rounds_longer_than_the_pipeline_go_on_at_their_own_pace(ranks: int, rounds: int, a_round: int) -> None:
    """Interleaved stages run equal rounds: those of a few micro-batches must be as long as those of all, or they don't go out evenly."""
    count = 4 * ranks
    forward = tuple(1.0 + 0.1 * (stage % 3) for stage in range(count))
    asked = stages("interleaved_1f1b", ranks, rounds * a_round, forward, tuple(2 * seconds for seconds in forward), 0.05)
    ends = [0.0] * ranks
    for done in play(asked):
        ends[done.rank] = done.end
    assert 2 * count * asked.micro_batches > 3000, "extrapolated"
    assert pipeline_ends(asked) == pytest.approx(ends, rel=0.01)
