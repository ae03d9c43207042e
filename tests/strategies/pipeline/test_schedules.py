"""The order of a pipeline's work against what torch's own schedules say."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, _ComputationType

from lightning_autopar.strategies.pipeline.schedules import Action, rank_actions, receives

WORK = {
    _ComputationType.FORWARD: "forward",
    _ComputationType.FULL_BACKWARD: "backward",
}
RECEIVED = {_ComputationType.RECV_F: "forward", _ComputationType.RECV_B: "backward"}


class Stage:
    """What a schedule asks of a stage before anything runs."""

    group = None
    has_backward = True
    device = "cpu"

    def __init__(self, index: int, stages: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, stages, ranks, index % ranks
        self.stage_index_to_group_rank = {stage: stage % ranks for stage in range(stages)}
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.submod = nn.Identity()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("local", [1, 2, 3])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 6, 8])
def test_the_order_is_that_of_torch(ranks: int, local: int, micro_batches: int) -> None:
    for rank in range(ranks):
        stages = [Stage(rank + ranks * index, ranks * local, ranks) for index in range(local)]
        if micro_batches % max(1, micro_batches // ranks):
            continue
        schedule = ScheduleInterleaved1F1B(stages, micro_batches, loss_fn=lambda output, target: output)
        executed = [action for action in schedule.pipeline_order_with_comms[rank] if action.computation_type in WORK]
        theirs = [Action(WORK[action.computation_type], action.stage_index, action.microbatch_index) for action in executed]  # type: ignore[arg-type]
        assert list(rank_actions("interleaved_1f1b", rank, ranks, ranks * local, micro_batches)) == theirs
        received: list[list[Action]] = [[]]
        for action in schedule.pipeline_order_with_comms[rank]:
            if action.computation_type in RECEIVED:
                received[-1].append(Action(RECEIVED[action.computation_type], action.stage_index, action.microbatch_index))  # type: ignore[arg-type]
            elif action.computation_type in WORK:
                received.append([])
        assert [list(each) for each in receives("interleaved_1f1b", rank, ranks, ranks * local, micro_batches)] == received[:-1]


@pytest.mark.parametrize("micro_batches", [2, 4, 9])
@pytest.mark.parametrize(
    ("schedule", "most"), [("gpipe", lambda stage, count: count), ("1f1b", lambda stage, count: min(count, 4 - stage))]
)
def test_so_many_micro_batches_are_in_flight(schedule: Any, most: Any, micro_batches: int) -> None:
    for stage in range(4):
        actions = rank_actions(schedule, stage, 4, 4, micro_batches)
        level, peak, done = 0, 0, []
        for work, index, micro_batch in actions:
            assert index == stage
            level += 1 if work == "forward" else -1
            peak = max(peak, level)
            done.append((work, micro_batch))
        assert peak == most(stage, micro_batches)
        assert sorted(done) == sorted((work, index) for work in ("forward", "backward") for index in range(micro_batches))
