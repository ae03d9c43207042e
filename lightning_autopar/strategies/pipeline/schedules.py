"""The order in which a pipeline's rank runs its stages' micro-batches. Arithmetic on indices: knows neither sizes nor torch.

As ``torch.distributed.pipelining`` runs them (torch 2.13, ``schedules.py``): the single-stage schedules by their ``_step_microbatches``,
the others by the algorithm of the papers cited there. The tests compare with what torch's own classes say.
"""

from __future__ import annotations

from collections import defaultdict, deque
from functools import lru_cache
from typing import Literal, NamedTuple

from lightning_autopar.plans import INTERLEAVED, Schedule

#: So many turns of one forward and one backward are enough to see what each one does to the allocator.
_TURNS = 8

Work = Literal["forward", "backward"]


class Action(NamedTuple):
    """One piece of a rank's work."""

    work: Work
    stage: int
    micro_batch: int


@lru_cache(maxsize=1024)
def rank_actions(schedule: Schedule, rank: int, ranks: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    """A rank's actions in one step, in order.

    Args:
        rank: within its pipeline.
        stages: of the pipeline; stage ``s`` runs on rank ``s mod ranks``.
    """
    if schedule == "gpipe":
        forwards = [Action("forward", rank, index) for index in range(micro_batches)]
        return (*forwards, *(Action("backward", rank, index) for index in range(micro_batches)))
    if schedule == "1f1b":
        return _one_forward_one_backward(rank, stages, micro_batches)
    return _interleaved(rank, ranks, stages // ranks, micro_batches)


def receives(schedule: Schedule, rank: int, ranks: int, stages: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """For each of :func:`rank_actions`, the actions whose inputs the rank begins to receive just before it.

    Interleaved, torch receives as soon as the sender's action is placed (``_add_send_recv``), often several actions before its own.
    """
    if schedule in INTERLEAVED:
        return _early(ranks, stages, micro_batches)[rank]
    return tuple((action,) for action in rank_actions(schedule, rank, ranks, stages, micro_batches))


@lru_cache(maxsize=64)
def _early(ranks: int, stages: int, micro_batches: int) -> tuple[tuple[tuple[Action, ...], ...], ...]:
    """By rank, what :func:`receives` says."""
    orders = [_turns(_interleaved(rank, ranks, stages // ranks, micro_batches)) for rank in range(ranks)]
    found: list[list[tuple[Action, ...]]] = [[] for _ in range(ranks)]
    next_ones: list[list[Action]] = [[] for _ in range(ranks)]
    done: set[Action | None] = {None}
    while any(orders):
        for rank, order in enumerate(orders):
            if not order or (order[0] and _neighbour(order[0], stages, -1) not in done):
                continue
            if action := order.popleft():
                done.add(action)
                found[rank].append(tuple(next_ones[rank]))
                next_ones[rank].clear()
                if receiver := _neighbour(action, stages, 1):
                    next_ones[receiver.stage % ranks].append(receiver)
    return tuple(map(tuple, found))


def _turns(actions: tuple[Action, ...]) -> deque[Action | None]:
    """A rank's turns when torch orders actions and messages: None where it gathers, frees or reduces a stage, sharded or not
    (``_add_unshard_reshard``, at most three stages ahead; ``_add_reduce_grad``).
    """
    turns: deque[Action | None] = deque()
    ahead: list[int] = []
    last: set[int] = set()
    for action, before in zip(reversed(actions), [*reversed(actions[:-1]), None], strict=True):
        if action.work == "backward" and action.stage not in last:
            last.add(action.stage)
            turns.appendleft(None)
        turns.appendleft(action)
        ahead = [action.stage, *(stage for stage in ahead if stage != action.stage)][:3]
        others = [before.stage, *(stage for stage in ahead if stage != before.stage)][:3] if before else []
        turns.extendleft([None] * len({*ahead}.symmetric_difference(others)))
    return turns


def _neighbour(action: Action, stages: int, way: int) -> Action | None:
    """Who sends to an action (-1), or receives from it (1)."""
    stage = action.stage + (way if action.work == "forward" else -way)
    return action._replace(stage=stage) if 0 <= stage < stages else None


def played_micro_batches(schedule: Schedule, stages: int, micro_batches: int) -> int:
    """How many of a step's equal micro-batches show what all do: under 1F1B a rank holds no more at once. Under other schedules something
    of each stays to the end.
    """
    return min(micro_batches, 2 * stages + _TURNS) if schedule == "1f1b" else micro_batches


def _one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    """PipeDream-flush (https://arxiv.org/abs/2006.09503): the later the stage, the fewer forwards before its first backward."""
    ahead = min(micro_batches, stages - stage)
    actions = [Action("forward", stage, index) for index in range(ahead)]
    for index in range(micro_batches):
        actions.append(Action("backward", stage, index))
        if index + ahead < micro_batches:
            actions.append(Action("forward", stage, index + ahead))
    return tuple(actions)


def micro_batches_a_round(ranks: int, micro_batches: int) -> int:
    """How many micro-batches interleaved 1F1B runs through a rank's stage before the next one's turn: rounds are equal."""
    return micro_batches // max(1, micro_batches // ranks)


def _interleaved(rank: int, ranks: int, local: int, micro_batches: int) -> tuple[Action, ...]:
    """Interleaved 1F1B (https://arxiv.org/abs/2104.04473) of a rank with ``local`` stages."""
    per_round = micro_batches_a_round(ranks, micro_batches)
    total = local * micro_batches
    ahead = min((local - 1) * per_round + 2 * (ranks - 1 - rank), total)
    counts: defaultdict[tuple[Work, int], int] = defaultdict(int)
    actions: list[Action] = []

    def do(work: Work, step: int) -> None:
        index = step // per_round % local
        stage = (index if work == "forward" else local - 1 - index) * ranks + rank
        actions.append(Action(work, stage, counts[work, stage]))
        counts[work, stage] += 1

    for step in range(total + ahead):
        if step < total:
            do("forward", step)
        if step >= ahead:
            do("backward", step - ahead)
    return tuple(actions)
