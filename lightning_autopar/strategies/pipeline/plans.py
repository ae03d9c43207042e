"""Pipelines that deserve a prediction: for each schedule the ranks, replicas, micro-batches and cuts that promise to be fastest.

:mod:`.partition` has the cuts; this module has the choices, and the check by the exact prediction.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lightning_autopar.devices.inventory import Device
from lightning_autopar.planning.block_units import cuttable, recomputable, shardable, with_recompute
from lightning_autopar.planning.enumerate_plans import micro_batch_counts
from lightning_autopar.planning.fit_to_memory import without_recompute
from lightning_autopar.planning.plan_cost import Appraiser
from lightning_autopar.planning.plan_seconds import part_seconds
from lightning_autopar.planning.refusals import micro_batch_refusal, multi_refusal, recompute_refusal
from lightning_autopar.plans import INTERLEAVED, SCHEDULES, Plan, Schedule
from lightning_autopar.strategies.pipeline.memory import own_blocks
from lightning_autopar.strategies.pipeline.partition import (
    LOCAL,
    Partition,
    Shape,
    StageTables,
    Table,
    in_flight,
    lingers,
    moves,
    partition,
    stage_seconds,
    stage_tables,
)
from lightning_autopar.strategies.pipeline.timing import averaging_seconds
from lightning_autopar.timing.collectives import topology
from lightning_autopar.timing.data_sheet import DATA_SHEET
from lightning_autopar.timing.rank_compute import Layer, layout_of
from lightning_autopar.timing.rates import Rates

#: The most stages: more would mostly wait.
_MOST_RANKS = 64
#: How often cuts are made anew because the exact prediction's bytes differ from the tables'.
_CORRECTIONS = 3
#: A lower bound of the exact prediction, as a share of the tables' seconds: it also has the update and the replicas' gradients.
_CERTAIN = 0.97
#: Sizes are rounded for each micro-batch, so their sum may be smaller than the whole batch's size by this share.
_ROUNDED = 1e-6
#: How often cuts of a pipeline are moved; less often where stages times blocks are more than this, as each move takes longer then.
_MOVES, _MOVED_FREELY = 100, 4000
#: While pipelines are compared, a pipeline's cuts stay after so many moves in vain. A later one gained at most 1.6 % where it was looked
#: at, and the best pipeline's cuts are moved further.
_PATIENCE = 20
#: By how much slower cuts may be that are moved; and with few stages times blocks, where a block is much of a stage. With several stages a
#: rank, the programme's slowest stage isn't the slowest rank's.
_GAINED, _GAINED_OF_FEW, _FEW = 0.1, 0.25, 100
#: What the engine does.
REASON = "blocks are spread over the devices"


class _Room(NamedTuple):
    """The bytes that a stage may take by the tables, which miss by others where it recomputes.

    Args:
        plain: without recomputed blocks.
        again: with all blocks recomputed.
    """

    plain: float
    again: float


def pipeline_plans(
    appraiser: Appraiser,
    sets: Sequence[Sequence[Device]],
    speed: Mapping[str, float],
    rates: Rates | None = None,
    limit: Callable[[], float] = lambda: math.inf,
    shown: bool = True,
) -> Iterator[Plan]:
    """For each set of devices and each schedule, the fastest pipeline that fits into memory.

    Args:
        sets: of devices, at least two each.
        speed: each device's, by its id.
        rates: of single operations; data sheets' unless given.
        limit: gives the seconds a batch that a plan must stay below to be of interest at that time.
        shown: whether to give one of each schedule for the report even if all are slower or lack memory.
    """
    for devices in sets:
        maker = PipelineMaker(appraiser, devices, speed, rates)
        for schedule in SCHEDULES:
            plan = maker.best(schedule, limit)
            if plan is None and shown:
                plan = maker.example(schedule)
            if plan is not None:
                yield plan


def with_better_cuts(appraiser: Appraiser, plan: Plan, speed: Mapping[str, float], rates: Rates | None = None) -> Plan:
    """A pipeline with its cuts moved as long as that makes it faster and it fits. Arguments as above."""
    maker = PipelineMaker(appraiser, [appraiser.device[device] for device in plan.devices], speed, rates)
    return maker.moved(plan)


class PipelineMaker:
    """Makes pipelines on one set of devices."""

    def __init__(self, appraiser: Appraiser, devices: Sequence[Device], speed: Mapping[str, float], rates: Rates | None) -> None:
        self.appraiser = appraiser
        self.footprint = appraiser.footprint
        self.devices = list(devices)
        self.rates = rates
        budgets = {appraiser.budget[device.id] for device in devices}
        self.alike = len(budgets) == 1 and len({speed[device.id] for device in devices}) == 1
        if not self.alike:
            # The nearer a stage is to the front, the more micro-batches it holds.
            self.devices.sort(key=lambda device: (-appraiser.budget[device.id], -speed[device.id], device.id))
        self.speed = speed
        self.training = self.footprint.training
        #: Whether a batch may be split over replicas, and over micro-batches.
        self.copies = multi_refusal(appraiser.question) is None and "pipeline_replicas" not in appraiser.constraints.excluded
        self.parts = micro_batch_refusal(self.footprint, appraiser.constraints, staged=True) is None
        self.again = [block.fqn for block in recomputable(self.footprint)] if recompute_refusal(appraiser.constraints) is None else []
        self.cuttable = cuttable(self.footprint, appraiser.constraints.uncuttable)
        self._tables: dict[tuple[float, float, bool], StageTables] = {}
        self._lacking: dict[Shape, int] = {}
        self._free: dict[tuple[int, int, int, float], Partition | None] = {}
        self._seconds: dict[tuple[object, ...], Table] = {}
        self._of_parts: dict[tuple[float, float, bool], list[float]] = {}
        self._totals: dict[float, float] = {}
        self._after: dict[tuple[int, bool], float] = {}
        self._paces: dict[float, float] = {}
        #: Of its uncorrected seconds, a corrected prediction has at least this share.
        self._least_factor = min(appraiser.factors.compute, appraiser.factors.links)
        self.fastest = max(devices, key=lambda device: (speed[device.id], device.id))

    def best(self, schedule: Schedule, limit: Callable[[], float]) -> Plan | None:
        """The fastest pipeline that fits by the exact prediction; None where there is none below the limit. Shapes with the lowest bound
        come first. A shape whose bound isn't below the best so far isn't cut.
        """
        found: Plan | None = None
        seconds = math.inf
        for least, shape in self._promising(schedule):
            movable = schedule in INTERLEAVED or shape.micro_batches == 1
            below = min(limit(), seconds)
            if least >= below:
                break
            gained = 1 + (_GAINED_OF_FEW if shape.stages * len(self.footprint.blocks) <= _FEW else _GAINED) if movable else 1.0
            if replace(shape, micro_batches=1) in self._lacking and self._lacks(shape):
                continue
            free = self._free_cut(shape)
            if free is None or self._least_of_cut(shape, free) >= below * gained:
                continue
            plan = self._plan(shape, free.starts) if self._seems_to_fit(shape, free) else None
            if plan is None or not self.appraiser.holds(plan):
                plan = None if self._lacks(shape) else self._fitted(shape, below, gained)
            elif self.appraiser.step_seconds(plan) >= below * gained:
                continue
            if plan is not None and movable:
                plan = self.moved(plan, _PATIENCE)
            if plan is not None and (exact := self.appraiser.step_seconds(plan)) < seconds:
                found, seconds = plan, exact
        return found

    def example(self, schedule: Schedule) -> Plan | None:
        """A pipeline for the report where none is of interest: of lowest bound if it fits, or else of least memory."""
        promising = self._promising(schedule)
        if not promising:
            return None
        plan = self._fitted(promising[0][1], math.inf, any_will_do=True)
        return plan if plan is not None else self._anyhow(list(self._shapes(schedule))[-1])

    def _lacks(self, shape: Shape) -> bool:
        """Whether no cut of it fits, as none fitted of a shape that takes no more memory. With fewer, larger micro-batches, a stage that
        holds as many at once takes no less. Under GPipe it holds all: the activations of the replica's whole batch, whatever their number.
        Nothing follows for a batch in one part: its gradients aren't there before activations go.
        """
        if shape.micro_batches == 1:
            return False
        family = replace(shape, micro_batches=1)
        if shape.schedule == "gpipe":
            if family not in self._lacking:
                held = [
                    self._table(family, recompute).holding(family.replicas if shape.sharded else 1)
                    for recompute in {False, bool(self.again)}
                ]
                least = np.minimum.reduce(held)
                fits = [np.where(least * (1 - _ROUNDED) <= cap, 0.0, np.inf) for cap in self._caps(shape)]
                self._lacking[family] = 0 if partition(fits, self.cuttable) is not None else max(1, self.footprint.batch_size)
            return shape.micro_batches <= self._lacking[family]

        def flight(parts: int) -> int:
            return in_flight(shape.schedule, 0, shape.stages, shape.ranks, parts)

        if family not in self._lacking:
            most = self._parts(shape.schedule, shape.ranks, -(-self.footprint.batch_size // shape.replicas))[-1]
            room = self._even_room(shape, self._caps(shape))
            self._lacking[family] = most if self._cut(replace(shape, micro_batches=most), room) is None else 0
        lacking = self._lacking[family]
        return shape.micro_batches <= lacking and flight(shape.micro_batches) == flight(lacking)

    def _promising(self, schedule: Schedule) -> list[tuple[float, Shape]]:
        """Shapes with their lower bounds of seconds, the fastest first."""
        factor = self._least_factor
        found = [
            (factor * max(shape.least_seconds(self._total_seconds(shape)), self._least_with_averaging(shape)), shape)
            for shape in self._shapes(schedule)
        ]
        return sorted(found, key=lambda one: one[0])

    def _least_with_averaging(self, shape: Shape) -> float:
        """A lower bound for every cut where replicas average gradients: some rank has its even part of the blocks' gradients or more. It
        computes these blocks for every micro-batch, and then averages their gradients.
        """
        gradients, parameters = self._trained
        if shape.replicas == 1 or not gradients:
            return 0.0
        key = shape.ranks, shape.sharded
        if key not in self._after:
            own = [part // shape.ranks for part in (gradients, parameters)]
            self._after[key] = min(self._averaging_seconds(shape, rank, *own) for rank in range(shape.ranks))
        share = self._share(shape)
        if share not in self._paces:
            seconds = self._seconds_of_parts(self.fastest, share, recompute=False)
            self._paces[share] = min(seconds[number] / size for number, size in self._block_gradients.items())
        return self._average_size(shape) * shape.micro_batches * self._paces[share] * gradients / shape.ranks + self._after[key]

    @cached_property
    def _layers(self) -> tuple[Layer, ...]:
        return layout_of(self.footprint, self.appraiser.constraints.precision).layers

    @cached_property
    def _block_gradients(self) -> dict[int, int]:
        """Bytes of gradients of each layer that is a block and has some."""
        sizes = {number: sum(layer.gradients) for number, layer in enumerate(self._layers) if layer.fqn is not None}
        return {number: size for number, size in sizes.items() if size}

    @cached_property
    def _trained(self) -> tuple[int, int]:
        """Bytes of all blocks' gradients, and of as many of their parameters as a rank with an even part of the former has at least."""
        gradients = self._block_gradients
        least = min((self._layers[number].parameters / size for number, size in gradients.items()), default=0.0)
        return sum(gradients.values()), int(sum(gradients.values()) * least)

    def _averaging_seconds(self, shape: Shape, rank: int, gradients: int, parameters: int) -> float:
        """What a rank's replicas take to average so many bytes of gradients."""
        here, sharded = self.appraiser.inventory, parameters if shape.sharded else None
        return averaging_seconds(self._crew_rates, self._groups(shape)[rank], here, gradients, sharded)

    @cached_property
    def _crew_rates(self) -> Rates:
        ids, here = tuple(device.id for device in self.devices), self.appraiser.inventory
        return topology(here).crew(ids, self.rates or DATA_SHEET, here)[1]

    def _first_averages(self, shape: Shape, starts: Sequence[int]) -> float:
        """The seconds in which the first rank's replicas average its gradients, with stages that begin with these blocks. The first rank is
        the last to end its last backward.
        """
        if shape.replicas == 1:
            return 0.0
        places = [0, *(2 * start + 1 for start in starts[1:]), len(self._layers)]
        own = [layer for stage in range(0, shape.stages, shape.ranks) for layer in self._layers[places[stage] : places[stage + 1]]]
        return self._averaging_seconds(shape, 0, sum(sum(layer.gradients) for layer in own), sum(layer.parameters for layer in own))

    def _total_seconds(self, shape: Shape) -> float:
        """Of all of a micro-batch's forwards and backwards, on the fastest device; no more than one of average size takes."""
        share = self._share(shape)
        if share not in self._totals:
            self._totals[share] = sum(self._seconds_of_parts(self.fastest, share, recompute=False))
        return self._totals[share] * self._average_size(shape)

    def _average_size(self, shape: Shape) -> float:
        """The size of a micro-batch on the average, as a part of the largest."""
        rows = -(-self.footprint.batch_size // shape.replicas)
        return rows / shape.micro_batches / max(1, -(-rows // shape.micro_batches))

    def _shapes(self, schedule: Schedule) -> Iterator[Shape]:
        """Numbers of ranks and replicas that use all devices, and of micro-batches; those that save memory last. A batch that isn't split
        runs through the stages whole, one after the other, and so does a step without gradients: then all schedules equal GPipe.
        """
        count = len(self.devices)
        if not self.parts and schedule != "gpipe":
            return
        blocks = sum(self.cuttable[1:]) + 1
        local = LOCAL if schedule in INTERLEAVED else 1
        for ranks in range(2, min(count, blocks // local, _MOST_RANKS) + 1):
            if count % ranks or (count > ranks and not self.copies) or count // ranks > max(1, self.footprint.batch_size):
                continue
            for parts in self._parts(schedule, ranks, -(-self.footprint.batch_size // (count // ranks))):
                shape = Shape(schedule=schedule, ranks=ranks, replicas=count // ranks, micro_batches=parts, sharded=False)
                yield shape
                if shape.replicas > 1 and self.training:
                    yield replace(shape, sharded=True)

    def _parts(self, schedule: Schedule, ranks: int, rows: int) -> list[int]:
        """Numbers of micro-batches that a schedule takes: the smallest of those whose largest micro-batch is equally large."""
        if not self.parts:
            return [1]
        found = micro_batch_counts(rows)
        if schedule == "1f1b":
            return [parts for parts in found if parts >= ranks] if rows >= ranks else []
        if schedule in INTERLEAVED:  # equal rounds, see ``Plan``; fewer than ranks are one
            even = {parts + (-parts) % max(1, parts // ranks) for parts in found if parts > 1}
            return sorted(parts for parts in even if parts <= rows and parts % max(1, parts // ranks) == 0)
        return found

    def _caps(self, shape: Shape) -> list[float]:
        """The bytes that each rank of a pipeline may take: the smallest budget of its replicas."""
        margin = 1 + self.footprint.margin
        return [min(self.appraiser.budget[device.id] for device in group) / margin for group in self._groups(shape)]

    def _groups(self, shape: Shape) -> list[list[Device]]:
        """The devices of each rank, one for each replica. If devices are alike, a replica's are neighbours."""
        if self.alike:
            return [self.devices[rank :: shape.ranks] for rank in range(shape.ranks)]
        return [self.devices[rank * shape.replicas : (rank + 1) * shape.replicas] for rank in range(shape.ranks)]

    def _needs(self, shape: Shape, stage: int, recompute: bool, blocks: tuple[int, int] | slice = slice(None)) -> Table:
        """Bytes of a stage at its place, by the tables: of all blocks that it could have, or of these alone."""
        flight = in_flight(shape.schedule, stage, shape.stages, shape.ranks, shape.micro_batches)
        shards = shape.replicas if shape.sharded else 1
        stays = lingers(shape.schedule, stage, shape.stages, shape.micro_batches)
        return self._table(shape, recompute).needs(flight, shards, whole=shape.micro_batches == 1, lingers=stays, blocks=blocks)

    def _table(self, shape: Shape, recompute: bool) -> StageTables:
        rows = -(-self.footprint.batch_size // shape.replicas)
        key = self._share(shape), rows / max(1, self.footprint.batch_size), recompute
        if key not in self._tables:
            self._tables[key] = stage_tables(self.footprint, key[0], key[1], recompute=recompute)
        return self._tables[key]

    def _cut(self, shape: Shape, room: Sequence[_Room]) -> Partition | None:
        """The stages by the tables, each with enough recomputed blocks to stay within the bytes that it may take."""
        places, share = self._places(shape), self._share(shape)
        known: dict[tuple[int, _Room, int], Table] = {}  # most stages equal others of their rank
        costs = []
        for stage in range(shape.stages):
            place = places[stage % shape.ranks]
            flight = in_flight(shape.schedule, stage, shape.stages, shape.ranks, shape.micro_batches)
            plain = self._stage_seconds(*place, share, recompute=False)
            key = flight, room[stage], id(plain)
            if key not in known:
                again = self._stage_seconds(*place, share, recompute=True)
                known[key] = self._affordable(shape, stage, room[stage], plain, again)
            costs.append(known[key])
        return self._balanced(shape, costs)

    def _balanced(self, shape: Shape, costs: Sequence[Table]) -> Partition | None:
        """The stages whose slowest is fastest, with the slowest rank's seconds where a rank has several.

        Args:
            costs: each stage's seconds, by its blocks.
        """
        found = partition(costs, self.cuttable)
        if found is None or shape.local == 1:
            return found
        ends = [*found.starts[1:], len(self.footprint.blocks)]
        taken = [float(cost[start, end]) for cost, start, end in zip(costs, found.starts, ends, strict=True)]
        return replace(found, slowest_seconds=max(sum(taken[rank :: shape.ranks]) for rank in range(shape.ranks)) / shape.local)

    def _places(self, shape: Shape) -> list[tuple[Device, Device]]:
        """For each rank the slowest device of its replicas, and one that it sends to."""
        groups = self._groups(shape)
        slowest = [group[0] if self.alike else min(group, key=lambda device: self.speed[device.id]) for group in groups]
        return [(device, following[0]) for device, following in zip(slowest, groups[1:] + groups[:1], strict=True)]

    def _free_cut(self, shape: Shape) -> Partition | None:
        """The stages as if memory had no end: by the tables, no cut that has to recompute is faster."""
        share = self._share(shape)
        key = shape.ranks, shape.replicas, shape.local, share
        if key not in self._free:
            costs = [self._stage_seconds(*place, share, recompute=False) for place in self._places(shape)] * shape.local
            self._free[key] = self._balanced(shape, costs)
        return self._free[key]

    def _seems_to_fit(self, shape: Shape, cut: Partition) -> bool:
        """Whether the tables say that a cut fits without recomputed blocks."""
        told = self._told(shape, cut, recompute=False)
        return all(sum(told[rank :: shape.ranks]) <= cap for rank, cap in enumerate(self._caps(shape)))

    def _told(self, shape: Shape, cut: Partition, recompute: bool) -> list[float]:
        """The bytes of each stage of a cut, by the tables."""
        ends = [*cut.starts[1:], len(self.footprint.blocks)]
        return [
            float(self._needs(shape, stage, recompute, (start, end)))
            for stage, (start, end) in enumerate(zip(cut.starts, ends, strict=True))
        ]

    def _least_of_cut(self, shape: Shape, cut: Partition) -> float:
        """A lower bound of the exact prediction for these stages."""
        return self._least_factor * (shape.seconds(cut) * _CERTAIN + self._first_averages(shape, cut.starts))

    def _affordable(self, shape: Shape, stage: int, room: _Room, plain: Table, again: Table) -> Table:
        """Seconds of a stage with as few recomputed blocks, to a fraction, as find room; infinite where all don't."""
        needs = self._needs(shape, stage, recompute=False)
        short = needs > room.plain
        if not self.again:
            return np.where(short, np.inf, plain)
        fewest = self._needs(shape, stage, recompute=True)
        partly = np.flatnonzero(short & (fewest <= room.again))
        found: Table = np.where(short, np.inf, plain)
        lack = needs.ravel()[partly] - room.plain
        part = lack / (lack + room.again - fewest.ravel()[partly])
        without = plain.ravel()[partly]
        found.ravel()[partly] = without + part * (again.ravel()[partly] - without)
        return found

    def _share(self, shape: Shape) -> float:
        """A micro-batch's part of the batch."""
        rows = -(-self.footprint.batch_size // shape.replicas)
        return -(-rows // shape.micro_batches) / max(1, self.footprint.batch_size)

    def _stage_seconds(self, device: Device, following: Device, share: float, recompute: bool) -> Table:
        key = (self.speed[device.id], device.node == following.node, share, recompute)
        if key not in self._seconds:
            seconds = self._seconds_of_parts(device, share, recompute)
            self._seconds[key] = stage_seconds(seconds, self._send(device, following), self.footprint, share)
        return self._seconds[key]

    def _seconds_of_parts(self, device: Device, share: float, recompute: bool) -> list[float]:
        """Seconds of each part of the step, for one micro-batch, forward and backward."""
        key = (self.speed[device.id], share, recompute)
        if key not in self._of_parts:
            # The hosts of all ranks issue their parts at once, ahead of what the ranks wait for.
            precision = self.appraiser.constraints.precision
            parts = part_seconds(self.footprint, device, share, precision=precision, rates=self.rates, issued=False)
            again = set(self.again) if recompute else set()
            self._of_parts[key] = [forward * (2 if fqn in again else 1) + backward for fqn, forward, backward in parts]
        return self._of_parts[key]

    def _send(self, a: Device, b: Device) -> Callable[[int], float]:
        source = self.rates or DATA_SHEET
        if a.id == b.id:
            return lambda size_bytes: 0.0
        return lambda size_bytes: source.collective_seconds("send", size_bytes, (a, b), self.appraiser.inventory)

    def _fitted(self, shape: Shape, limit: float, gained: float = 1.0, *, any_will_do: bool = False) -> Plan | None:
        """The fastest of a few cuts that fits by the exact prediction, or the first; None where none is below the limit, times what moving
        it may gain. The difference between the exact prediction and the tables is subtracted from each rank's bytes, and the cut is made
        anew.
        """
        margin = 1 + self.footprint.margin
        groups = self._groups(shape)
        caps = self._caps(shape)
        room, best, seconds = self._even_room(shape, caps), None, limit * gained
        for turn in range(_CORRECTIONS):
            cut = self._cut(shape, room)
            # Where a rank has several stages, room that was shared out anew isn't all that a stage may take.
            if cut is None and (not turn or shape.local == 1) and best is None and shape.micro_batches > 1:
                family = replace(shape, micro_batches=1)
                self._lacking[family] = max(shape.micro_batches, self._lacking.get(family, 0))
            if cut is None:
                break
            slow = self._least_of_cut(shape, cut) >= min(limit, seconds) * gained
            # Where a rank has several stages, room that they share evenly has some recompute more than they need.
            if slow and (turn or shape.local == 1):
                break
            bare = self._plan(shape, cut.starts)
            most = with_recompute(bare, self.footprint, self.again)
            plan = None if slow else bare if self.appraiser.holds(bare) else self._relieved(most, groups)
            if plan is not None and (exact := self.appraiser.step_seconds(plan)) < seconds:
                best, seconds = plan, exact
            if turn + 1 == _CORRECTIONS or (any_will_do and best is not None):
                break
            off = {one: self._beyond(shape, cut, one, groups) for one in (bare, most)}
            left = ([cap - more / margin for cap, more in zip(caps, off[one], strict=True)] for one in (bare, most))
            before, room = room, self._shared_room(shape, cut, *left)
            pairs = itertools.chain.from_iterable(zip(*both, strict=True) for both in zip(room, before, strict=True))
            if all(abs(new - old) <= 0.01 * old for new, old in pairs):
                break
        return best

    @staticmethod
    def _even_room(shape: Shape, caps: Sequence[float]) -> list[_Room]:
        """The bytes that each stage may take, where a rank's stages share them evenly."""
        return [_Room(*(caps[stage % shape.ranks] / shape.local,) * 2) for stage in range(shape.stages)]

    def _shared_room(self, shape: Shape, cut: Partition, plain: Sequence[float], again: Sequence[float]) -> list[_Room]:
        """The same, where each stage has what it needs in a cut, and an even part of what its rank has beyond.

        Args:
            plain: the bytes that each rank may take by the tables, where it recomputes nothing.
            again: the same, where it recomputes all blocks.
        """
        return [_Room(*both) for both in zip(*(self._shared(shape, cut, caps) for caps in (plain, again)), strict=True)]

    def _shared(self, shape: Shape, cut: Partition, caps: Sequence[float]) -> list[float]:
        needs = self._told(shape, cut, recompute=False)
        beyond = [(cap - sum(needs[rank :: shape.ranks])) / shape.local for rank, cap in enumerate(caps)]
        return [need + beyond[stage % shape.ranks] for stage, need in enumerate(needs)]

    def _beyond(self, shape: Shape, cut: Partition, plan: Plan, groups: Sequence[Sequence[Device]]) -> list[float]:
        """By how many bytes each rank needs more than the tables say."""
        margin = 1 + self.footprint.margin
        told = self._told(shape, cut, bool(plan.recompute))
        needs = self.appraiser.needs(plan)
        return [max(needs[device.id] for device in group) - sum(told[rank :: shape.ranks]) * margin for rank, group in enumerate(groups)]

    def _relieved(self, plan: Plan, groups: Sequence[Sequence[Device]]) -> Plan | None:
        """The plan with only as many recomputed blocks of each rank as it needs to fit: the first ones, whose activations it keeps longest.
        A rank's bytes depend only on its own stages, so all ranks are bisected at once. None where all blocks don't suffice.
        """
        if not plan.recompute or not self.appraiser.holds(plan):
            return None
        ranks, again = plan.devices_per_replica, frozenset(plan.recompute)
        own = [[fqn for fqn in own_blocks(self.footprint, plan, rank) if fqn in again] for rank in range(ranks)]
        bare = without_recompute(plan)

        def recomputing(counts: Sequence[int]) -> Plan:
            return with_recompute(bare, self.footprint, [fqn for blocks, count in zip(own, counts, strict=True) for fqn in blocks[:count]])

        low, high = [-1] * ranks, [len(blocks) for blocks in own]
        while any(more - less > 1 for less, more in zip(low, high, strict=True)):
            middle = [(less + more) // 2 if more - less > 1 else more for less, more in zip(low, high, strict=True)]
            needs = self.appraiser.needs(recomputing(middle))
            for rank, group in enumerate(groups):
                if all(needs[device.id] <= self.appraiser.budget[device.id] for device in group):
                    high[rank] = middle[rank]
                else:
                    low[rank] = middle[rank]
        fewer = recomputing(high)
        return fewer if self.appraiser.holds(fewer) else plan

    def moved(self, plan: Plan, patience: int = _MOVES) -> Plan:
        """The plan with its cuts moved as long as that makes it faster and it fits, until so many moves one after the other didn't."""
        names = [block.fqn for block in self.footprint.blocks]
        ranks = plan.devices_per_replica
        groups = [[self.appraiser.device[device] for device in plan.devices[rank::ranks]] for rank in range(ranks)]
        seconds = self.appraiser.step_seconds(plan)
        most = max(1, min(_MOVES, _MOVES * _MOVED_FREELY // (plan.stages * len(names))))
        before = [0.0, *itertools.accumulate(self._seconds_of_parts(self.fastest, 1.0, recompute=False))]
        work = np.array([0.0, *before[3:-1:2], before[-1]])  # what lies between blocks goes with the block before
        pace = [1 / min(self.speed[device.id] for device in group) for group in groups]
        tries = itertools.count()
        while True:
            for vain, starts in enumerate(moves([names.index(fqn) for fqn in plan.cuts], work, pace, self.cuttable)):
                if vain == patience or next(tries) == most:
                    return plan
                trial: Plan | None = replace(plan, cuts=tuple(names[start] for start in starts))
                assert trial is not None
                if self.appraiser.step_seconds(without_recompute(trial)) >= seconds:
                    continue
                if trial.recompute or not self.appraiser.holds(trial):  # other cuts may have to recompute more, or less
                    trial = self._relieved(with_recompute(without_recompute(trial), self.footprint, self.again), groups)
                if trial is not None and self.appraiser.step_seconds(trial) < seconds * (1 - 1e-9):
                    plan, seconds = trial, self.appraiser.step_seconds(trial)
                    break
            else:
                return plan

    def _anyhow(self, shape: Shape) -> Plan:
        """A plan whose stages have about equally many blocks, where none fits into memory."""
        starts = [0, *(index for index, allowed in enumerate(self.cuttable) if allowed and index)]
        plan = self._plan(shape, tuple(starts[len(starts) * stage // shape.stages] for stage in range(shape.stages)))
        return with_recompute(plan, self.footprint, self.again)

    def _plan(self, shape: Shape, starts: Sequence[int]) -> Plan:
        blocks = self.footprint.blocks
        groups = self._groups(shape)
        devices = tuple(groups[rank][replica].id for replica in range(shape.replicas) for rank in range(shape.ranks))
        sizes = [end - begin for begin, end in zip(starts, [*starts[1:], len(blocks)], strict=True)]
        reasons = [REASON, f"stages of {', '.join(map(str, sizes))} blocks, cut so that the slowest one is fastest"]
        if not self.alike:
            reasons.append("devices with most memory come first, as the first stages hold most micro-batches")
        if self.footprint.also_uses:
            names = sorted({use[1] for use in self.footprint.also_uses})
            reasons.append(f"stages that share a parameter ({', '.join(names)}) hold a copy each, and add up its gradients")
        return Plan(
            engine="pipeline",
            devices=devices,
            replicas=shape.replicas,
            micro_batches=shape.micro_batches,
            cuts=tuple(blocks[start].fqn for start in starts[1:]),
            schedule=shape.schedule,
            shard=shardable(self.footprint, self.appraiser.constraints.split)[0] if shape.sharded else (),
            reasons=tuple(reasons),
        )
