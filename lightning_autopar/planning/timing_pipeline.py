"""A pipeline's schedule, played action by action over stages that need not be even. Arithmetic on seconds: it knows no device or link."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from lightning_autopar.memory.schedules import Action, rank_actions
from lightning_autopar.plans import Schedule

#: Actions beyond which a schedule is played for fewer micro-batches and carried on at the pace that it has reached by then.
_MOST_ACTIONS = 3000


@dataclass(frozen=True)
class Stages:
    """What a pipeline's stages take, for one micro-batch.

    Args:
        schedule: their order.
        ranks: of the pipeline; stage ``s`` runs on rank ``s mod ranks``.
        micro_batches: of a step.
        forward: seconds of each stage's forward.
        backward: of its backward, a second forward included.
        sends: of handing on what it made, stage to stage: one less than there are stages. Gradients take as long.
        held: how long each of ``sends`` keeps its sender from computing, and its receiver as long, which is part of its seconds; not at all
            unless given.
    """

    schedule: Schedule
    ranks: int
    micro_batches: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    sends: tuple[float, ...]
    held: tuple[float, ...] = ()


class Done(NamedTuple):
    """An action of a rank, and when it ran."""

    rank: int
    action: Action
    start: float
    end: float


def pipeline_ends(stages: Stages) -> tuple[float, ...]:
    """When each rank has done its last action.

    Schedules of many micro-batches settle into a rhythm (a max-plus recurrence is periodic after its beginning): those are played at a
    smaller number, and carried on at its pace.
    """
    few = _few(stages)
    if few is None:
        return _ends(stages)
    number, period = few
    last = _ends(_with(stages, number))
    if stages.schedule in ("gpipe", "1f1b"):
        pace = _pace(stages)
    else:
        before = _ends(_with(stages, number - period))
        pace = max(a - b for a, b in zip(last, before, strict=True)) / period
    return tuple(end + (stages.micro_batches - number) * pace for end in last)


def _pace(stages: Stages) -> float:
    """Seconds from one micro-batch to the next, once a schedule has found its rhythm.

    Under GPipe the slowest forward and the slowest backward. Under 1F1B a micro-batch goes from any stage to any later one and back while
    as many others as there are stages between them, and itself, are under way: the longest such round by their number.
    """
    both = [forward + backward for forward, backward in zip(stages.forward, stages.backward, strict=True)]
    held = [0.0, *(stages.held or (0.0,) * len(stages.sends)), 0.0]  # by what is before each stage, and behind it
    if stages.schedule == "gpipe":
        each = [before + behind for before, behind in pairwise(held)]
        slowest = (max(map(sum, zip(seconds, each, strict=True))) for seconds in (stages.forward, stages.backward))
        return sum(slowest)
    pace = 0.0
    for first in range(len(both)):
        round_trip = 0.0
        for last in range(first, len(both)):
            round_trip += both[last] + (2 * stages.sends[last - 1] if last > first else 0.0)
            pace = max(pace, (round_trip + 2 * held[first] + 2 * held[last + 1]) / (last - first + 1))
    return pace


def _with(stages: Stages, micro_batches: int) -> Stages:
    return replace(stages, micro_batches=micro_batches)


def _few(stages: Stages) -> tuple[int, int] | None:
    """A number of micro-batches that shows the rhythm, and the rhythm's period; None where all can be played."""
    count, total = len(stages.forward), stages.micro_batches
    if 2 * count * total <= _MOST_ACTIONS:
        return None
    # The rhythm's period may be as long as the pipeline, where sending takes time.
    number = total % stages.ranks + 2 * stages.ranks
    return (number, stages.ranks) if number + stages.ranks <= total else None


@lru_cache(maxsize=4096)
def _ends(stages: Stages) -> tuple[float, ...]:
    ends = [0.0] * stages.ranks
    for done in _played(stages):
        ends[done[0]] = done[3]
    return tuple(ends)


def play(stages: Stages) -> list[Done]:
    """All actions of a step with their times."""
    return [Done(*done) for done in _played(stages)]


def _played(stages: Stages) -> list[tuple[int, Action, float, float]]:
    """Each rank does its actions in order, each as soon as what it needs is there."""
    count, ranks = len(stages.forward), stages.ranks
    forward, backward, sends = stages.forward, stages.backward, stages.sends
    last = count - 1
    held = stages.held or (0.0,) * len(sends)
    crosses = [index % ranks != (index + 1) % ranks for index in range(last)]
    queues = [rank_actions(stages.schedule, rank, ranks, count, stages.micro_batches) for rank in range(ranks)]
    places, clocks = [0] * ranks, [0.0] * ranks
    arrived: dict[tuple[bool, int, int], float] = {(False, 0, index): 0.0 for index in range(stages.micro_batches)}
    waiting: dict[tuple[bool, int, int], int] = {}
    ready = list(range(ranks))
    out: list[tuple[int, Action, float, float]] = []
    while ready:
        rank = ready.pop()
        queue, place, clock = queues[rank], places[rank], clocks[rank]
        while place < len(queue):
            action = queue[place]
            work, stage, index = action
            need = work != "forward", stage, index
            there = arrived.get(need)
            if there is None:
                waiting[need] = rank
                break
            edge = stage - 1 if work == "forward" else stage
            start = max(clock + held[edge] if 0 <= edge < last and crosses[edge] else clock, there)
            clock = start + (forward[stage] if work == "forward" else backward[stage])
            place += 1
            out.append((rank, action, start, clock))
            made: tuple[bool, int, int] | None = None
            edge = stage if work == "forward" else stage - 1
            if work == "forward":
                made = (False, stage + 1, index) if stage < last else (True, stage, index)
            elif stage:
                made = True, stage - 1, index
            if made is not None:
                sent = 0 <= edge < last and crosses[edge]
                arrived[made] = clock + (sends[edge] if sent else 0.0)
                clock += held[edge] if sent else 0.0
                if made in waiting:
                    ready.append(waiting.pop(made))
        places[rank], clocks[rank] = place, clock
    assert all(place == len(queue) for place, queue in zip(places, queues, strict=True)), "a schedule waits for itself"
    return out
