"""Seconds of one step of a pipeline: its stages' own work, what they send, and what their replicas exchange at the end.

The schedule is played action by action over stages that may be uneven. It finds no plans.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

from lightning_autopar.devices.inventory import Device, Inventory
from lightning_autopar.memory.allocator.tape_player import parts_of
from lightning_autopar.plans import INTERLEAVED, Schedule
from lightning_autopar.strategies.pipeline.schedules import Action, micro_batches_a_round, rank_actions
from lightning_autopar.timing.rank_compute import LaneSpan, RankWork, work_of
from lightning_autopar.timing.rates import Rates
from lightning_autopar.timing.step_seconds import Seconds, Step

#: With more actions than this, a schedule is played for fewer micro-batches, and extrapolated at its pace.
_MOST_ACTIONS = 3000


@dataclass(frozen=True)
class Stages:
    """The seconds of a pipeline's stages, for one micro-batch.

    Args:
        schedule: their order.
        ranks: of the pipeline; stage ``s`` runs on rank ``s mod ranks``.
        forward: seconds of each stage's forward.
        backward: of its backward, a second forward included.
        sends: seconds of sending from each stage to the next: one fewer than there are stages. Gradients take as long.
        held: the part of each of ``sends`` in which neither sender nor receiver computes; 0 unless given.
        sizes: of each micro-batch, as a multiple of the one that the seconds are of; all 1 unless given.
    """

    schedule: Schedule
    ranks: int
    micro_batches: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    sends: tuple[float, ...]
    held: tuple[float, ...] = ()
    sizes: tuple[float, ...] = ()


class Done(NamedTuple):
    """An action of a rank, and when it ran."""

    rank: int
    action: Action
    start: float
    end: float


def pipeline_ends(stages: Stages) -> tuple[float, ...]:
    """When each rank has done its last action.

    Schedules of many micro-batches become periodic (as max-plus recurrences do): they are played with fewer, and extrapolated at that pace.
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
    """Seconds from one micro-batch to the next, once a schedule is periodic. Under GPipe: the slowest forward plus the slowest backward.
    Under 1F1B: a micro-batch goes from a stage to a later one and back while so many micro-batches are in flight as there are stages from
    the one to the other; the pace is the longest such round divided by that number.
    """
    both = [forward + backward for forward, backward in zip(stages.forward, stages.backward, strict=True)]
    held = [0.0, *(stages.held or (0.0,) * len(stages.sends)), 0.0]  # by the stages before each stage, and after it
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
    """With fewer micro-batches, and of each size as large a part of them."""
    kept = [
        stages.sizes[(2 * number + 1) * stages.micro_batches // (2 * micro_batches)]
        for number in range(micro_batches if stages.sizes else 0)
    ]
    return replace(stages, micro_batches=micro_batches, sizes=tuple(kept))


def _few(stages: Stages) -> tuple[int, int] | None:
    """A number of micro-batches that shows the period, and the period; None where all can be played."""
    count, total = len(stages.forward), stages.micro_batches
    if 2 * count * total <= _MOST_ACTIONS:
        return None
    if stages.schedule in INTERLEAVED:  # two of its rounds, which may be longer than the pipeline
        period = micro_batches_a_round(stages.ranks, total)
        number = 2 * period
    else:  # the period may be as long as the pipeline, where sending takes time
        period = stages.ranks
        number = total % period + 2 * period
    return (number, period) if number + period <= total else None


@lru_cache(maxsize=4096)
def _ends(stages: Stages) -> tuple[float, ...]:
    _, last, spans = _played(stages)
    return tuple(spans[place][1] for place in last)


def play(stages: Stages) -> list[Done]:
    """All actions of a step with their times."""
    order, _, spans = _played(stages)
    count = len(stages.forward)
    ways = [Action("forward", stage, 0) for stage in range(count)] + [Action("backward", stage, 0) for stage in reversed(range(count))]
    return [Done(rank, ways[piece]._replace(micro_batch=index), *span) for (rank, piece, index), span in zip(order, spans, strict=True)]


def _played(stages: Stages) -> tuple[list[tuple[int, int, int]], list[int], list[tuple[float, float]]]:
    """What :func:`_order` says, and when each action begins and ends: as soon as its rank is free and its input has arrived."""
    ranks = stages.ranks
    edges = (
        list(zip(stages.sends, stages.held or (0.0,) * len(stages.sends), strict=True)) if ranks > 1 else [(0.0, 0.0)] * len(stages.sends)
    )
    links = [(0.0, 0.0), *edges, (0.0, 0.0), *reversed(edges), (0.0, 0.0)]  # before each piece, and after the last
    work = *stages.forward, *reversed(stages.backward)
    costs = [(alone, seconds, *link) for (_, alone), seconds, link in zip(links[:-1], work, links[1:], strict=True)]
    of_size = {size: [tuple(part * size for part in cost) for cost in costs] for size in {1.0, *stages.sizes}}
    of_each = [of_size[size] for size in stages.sizes or (1.0,) * stages.micro_batches]
    order, last = _order(stages.schedule, ranks, len(stages.forward), stages.micro_batches)
    clocks, arrived, spans = [0.0] * ranks, [0.0] * stages.micro_batches, list[tuple[float, float]]()
    for rank, piece, index in order:
        alone, seconds, sent, alone_after = of_each[index][piece]
        start, there = clocks[rank] + alone, arrived[index]
        start = there if there > start else start
        end = start + seconds
        spans.append((start, end))
        arrived[index], clocks[rank] = end + sent, end + alone_after
    return order, last, spans


@lru_cache(maxsize=8)  # a search plays many cuts of one shape, one after the other
def _order(schedule: Schedule, ranks: int, count: int, micro_batches: int) -> tuple[list[tuple[int, int, int]], list[int]]:
    """A step's actions, each after those that it waits for, whatever they take: its rank, its piece of a micro-batch's way through all
    stages and back, and the micro-batch. And where each rank's last one is.
    """
    queues = [
        [(one.stage if one.work == "forward" else 2 * count - 1 - one.stage, one.micro_batch) for one in reversed(actions)]
        for actions in (rank_actions(schedule, rank, ranks, count, micro_batches) for rank in range(ranks))
    ]
    ready, last, following = list(range(ranks)), [0] * ranks, [0] * micro_batches
    waiting: dict[tuple[int, int], int] = {}
    order: list[tuple[int, int, int]] = []
    while ready:
        rank = ready.pop()
        while queue := queues[rank]:
            piece, index = queue[-1]
            if following[index] != piece:
                waiting[piece, index] = rank
                break
            queue.pop()
            last[rank] = len(order)
            order.append((rank, piece, index))
            following[index] += 1
            if (piece + 1, index) in waiting:
                ready.append(waiting.pop((piece + 1, index)))
    assert not any(queues), "a schedule waits for itself"
    return order, last


def averaging_seconds(
    rates: Rates, replicas: Sequence[Device], inventory: Inventory, gradient_bytes: int, parameter_bytes: int | None = None
) -> float:
    """Seconds in which a rank's replicas average their gradients; with ``parameter_bytes``, for stages whose states are sharded."""
    if len(replicas) < 2 or not gradient_bytes:
        return 0.0
    if parameter_bytes is None:
        return rates.collective_seconds("all_reduce", gradient_bytes, replicas, inventory)
    gathered = rates.collective_seconds("all_gather", parameter_bytes, replicas, inventory)
    return gathered + rates.collective_seconds("reduce_scatter", gradient_bytes, replicas, inventory)


#: torch interprets some schedules action by action (``_PipelineScheduleRuntime``): 1.33 ms an action where 1F1B took 0.89 (a module with
#: hardly any operations on two CPU devices, two and four stages).
_INTERPRETED = {"interleaved_1f1b": 1.5}


class PipelineStep(Step):
    """A step of a pipeline."""

    @property
    def parts(self) -> int:
        """Micro-batches of a step: one where there are no gradients, even if the plan has more in training."""
        return self.plan.micro_batches if self.training else 1

    @cached_property
    def stage_layers(self) -> list[range]:
        """The layers of each stage."""
        places = {layer.fqn: number for number, layer in enumerate(self.layout.layers) if layer.fqn is not None}
        for fqn in self.plan.cuts:
            if fqn not in places:
                raise ValueError(
                    f"the plan names the block {fqn!r}, but the footprint has {', '.join(map(str, places)) or 'no blocks'}; "
                    "plan again for this module"
                )
        starts = [0, *(places[fqn] for fqn in self.plan.cuts), len(self.layout.layers)]
        return [range(begin, end) for begin, end in pairwise(starts)]

    def stage_runs(self) -> list[RankWork]:
        """Each stage's work, on the slowest of the devices that run it in some replica."""
        plan = self.plan
        count = plan.devices_per_replica
        held = 1 / plan.replicas if plan.shard else 1.0
        gradients = [sum(layer.gradients) for layer in self.layout.layers]
        whole = sum(gradients)
        runs = []
        for stage, layers in enumerate(self.stage_layers):
            own = sum(gradients[layers.start : layers.stop])
            found: dict[tuple[Hashable, ...], RankWork] = {}
            for rank in range(stage % count, plan.world_size, count):
                device = self.devices[rank]
                key = self.rates.device_class(device), device.utilization, self.rows[rank]
                if key not in found:
                    found[key] = work_of(
                        self.footprint,
                        self.layout,
                        plan,
                        device,
                        self.rates,
                        share=self.rows[rank] / self.batch,
                        parts=self.parts,
                        held=held * own / whole if whole else held,
                        layers=layers,
                    )
            # Where hosts are slower than the devices, all take equally long alone.
            runs.append(max(found.values(), key=lambda run: (float(f"{run.alone:.9g}"), run.busy)))
        return runs

    def sends(self, runs: Sequence[RankWork]) -> tuple[float, ...]:
        """Seconds from each stage to the next, of what enters the next one's first block."""
        out = []
        for run, following, layers in zip(runs, runs[1:], self.stage_layers[1:], strict=False):
            share = max(self.rows) / self.batch / self.parts
            size = round(self.layout.layers[layers.start].received * share)
            same = run.device.id == following.device.id
            out.append(0.0 if same else self.rates.collective_seconds("send", size, (run.device, following.device), self.inventory))
        return tuple(out)

    def stages(self, runs: Sequence[RankWork]) -> Stages:
        """The schedule with its seconds."""
        plan = self.plan
        assert plan.schedule is not None
        besides = [self.action(run) if run.device.kind == "cpu" else 0.0 for run in runs]
        sends = self.sends(runs)
        # Measured was there and back, of which each end does a half; what the same cores do, as with gloo, doesn't overlap with computing.
        held = tuple((1 - self.rates.overlap(run.device)) * seconds / 2 for run, seconds in zip(runs, sends, strict=False))
        return Stages(
            plan.schedule,
            plan.devices_per_replica,
            self.parts,
            tuple(sum(run.forward) + action for run, action in zip(runs, besides, strict=True)),
            tuple(sum(run.backwards()) + action for run, action in zip(runs, besides, strict=True)),
            sends,
            held,
            self.sizes(),
        )

    def sizes(self) -> tuple[float, ...]:
        """Each micro-batch's samples, as a multiple of their average, for the largest share of the batch; none where all are equal."""
        rows = max(self.rows)
        found = parts_of(rows, self.parts)
        return tuple(part * self.parts / rows for part in found) if rows % self.parts and len(found) == self.parts else ()

    def action(self, run: RankWork) -> float:
        """What a stage's forward or backward of a micro-batch takes the host beside its operations; a GPU's runs ahead of it."""
        assert self.plan.schedule is not None
        return self.rates.python_seconds(run.device, "action") * _INTERPRETED.get(self.plan.schedule, 1.0)

    def synced(self, position: int, runs: Sequence[RankWork]) -> float:
        """Seconds that a rank's gradients take after its last backward: among replicas, and for a parameter that another stage uses, too.
        They don't overlap with the rank's own work. The later a stage, the earlier it is done: it has averaged its gradients when the first
        stage is done.
        """
        plan = self.plan
        count = plan.devices_per_replica
        layers = self.stage_layers
        own = [layers[stage] for stage in range(position, plan.stages, count)]
        gradients = sum(sum(self.layout.layers[number].gradients) for part in own for number in part)
        parameters = sum(self.layout.layers[number].parameters for part in own for number in part)
        group = self.devices[position::count]
        seconds = averaging_seconds(self.rates, group, self.inventory, gradients, parameters if plan.shard else None)
        pairs: dict[tuple[str, int, int], int] = {}
        for index, name, _, size_bytes, _ in self.footprint.also_uses:
            holder, user = (self._stage_of(part, layers) % count for part in (self.footprint.holders.get(name, 0), 2 * index))
            pairs[name, holder, user] = size_bytes
        for (_, holder, user), size_bytes in pairs.items():
            if size_bytes and user != holder and position in (holder, user):
                ends = self.devices[holder], self.devices[user]
                seconds += self.rates.collective_seconds("all_reduce", size_bytes, ends, self.inventory)
        return seconds

    @staticmethod
    def _stage_of(number: int, layers: Sequence[range]) -> int:
        return next((stage for stage, part in enumerate(layers) if number in part), len(layers) - 1)

    def seconds(self) -> Seconds:
        """The seconds of the rank that is done last; the time in which it doesn't compute or send, it waits."""
        plan = self.plan
        count = plan.devices_per_replica
        runs = self.stage_runs()
        stages = self.stages(runs)
        unsent = self._ends(replace(stages, sends=(0.0,) * len(stages.sends), held=()))
        ends = self._ends(stages)
        mine = [runs[position::count] for position in range(count)]
        updates = [sum(run.update for run in own) for own in mine]
        synced = [self.synced(position, runs) for position in range(count)]
        busy = [sum(parts) for parts in zip(ends, updates, synced, strict=True)]
        actions = [(2 if self.training else 1) * self.parts * sum(map(self.action, own)) for own in mine]
        waits = [self._overhead(own, total, asked) for own, total, asked in zip(mine, busy, actions, strict=True)]
        last = max(range(count), key=lambda position: busy[position] + waits[position])
        compute, recompute = (sum(getattr(run, part) for run in mine[last]) for part in ("compute", "recompute"))
        played = actions[last] if mine[last][0].device.kind == "cpu" else 0.0
        return Seconds(
            compute=compute,
            recompute=recompute,
            optimizer=updates[last],
            communication=synced[last] + ends[last] - unsent[last],
            bubble=unsent[last] - compute - recompute - played,
            input=runs[0].copied,
            overhead=waits[last] + played,
        )

    def _ends(self, stages: Stages) -> tuple[float, ...]:
        """When each rank is done. Without gradients, all are done together, as each gets the last stage's output."""
        if self.training:
            return pipeline_ends(stages)
        return (sum(stages.forward) + sum(stages.sends),) * stages.ranks

    @staticmethod
    def _overhead(own: Sequence[RankWork], busy: float, actions: float) -> float:
        """What the host of a rank adds, which issues the work of all its stages, action by action, and runs one loop."""
        loop = max(run.host_seconds for run in own)
        if own[0].device.kind == "cpu":
            return loop
        return max(0.0, sum(run.issued + run.issued_update for run in own) + actions + loop - busy)

    def events(self, ranks: int) -> list[list[LaneSpan]]:
        """Each rank's actions; those of all replicas are equal."""
        plan = self.plan
        count = plan.devices_per_replica
        runs = self.stage_runs()
        stages = self.stages(runs)
        events: list[list[LaneSpan]] = [[] for _ in range(count)]
        for rank, action, start, end in play(stages):
            label = f"stage {action.stage}, micro-batch {action.micro_batch}"
            again = runs[action.stage].again
            if action.work == "forward":
                events[rank].append(LaneSpan("compute", start, end, "forward", label))
                if action.stage + 1 < plan.stages and (sent := stages.sends[action.stage]):
                    events[rank].append(LaneSpan("communication", end, end + sent, "communication", f"send {label}"))
                continue
            second = min(sum(again), end - start)
            if second:
                events[rank].append(LaneSpan("compute", start, start + second, "recompute", label))
            events[rank].append(LaneSpan("compute", start + second, end, "backward", label))
            if action.stage and (sent := stages.sends[action.stage - 1]):
                events[rank].append(LaneSpan("communication", end, end + sent, "communication", f"send gradients of {label}"))
        for position, found in enumerate(events):
            clock = max(event.end for event in found if event.lane == "compute")
            if (talk := self.synced(position, runs)) > 0:
                found.append(LaneSpan("communication", clock, clock + talk, "communication", "gradients"))
                clock += talk
            if (update := sum(run.update for run in runs[position::count])) > 0:
                found.append(LaneSpan("compute", clock, clock + update, "optimizer", "update"))
        return [events[rank % count] for rank in range(ranks)]
