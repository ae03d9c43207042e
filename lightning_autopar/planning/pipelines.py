"""Pipelines worth a prediction: for each schedule the ranks, replicas, micro-batches and cuts that promise to be fastest.

The cuts are :mod:`partition`'s, by the tables of :mod:`stages`; here is what there is to choose, and the check by the exact prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_autopar.memory.inventory import Device
from lightning_autopar.planning.appraisal import Appraiser
from lightning_autopar.planning.blocks import cuttable, recomputable, shardable, with_recompute
from lightning_autopar.planning.candidates import ENGINE_REASONS
from lightning_autopar.planning.data_sheet import DataSheet
from lightning_autopar.planning.part_seconds import part_seconds
from lightning_autopar.planning.partition import Partition, Table, partition
from lightning_autopar.planning.rates import Rates
from lightning_autopar.planning.refusals import micro_batch_refusal, multi_refusal, recompute_refusal
from lightning_autopar.planning.remedies import without_recompute
from lightning_autopar.planning.stages import StageTables, in_flight, stage_seconds, stage_tables
from lightning_autopar.plans import INTERLEAVED, SCHEDULES, Plan, Schedule

#: Stages beyond these are all bubble.
_MOST_RANKS = 64
#: Micro-batches, as multiples of the ranks.
_ROUNDS = (1, 2, 4, 8)
#: Stages a rank under the interleaved schedule.
_LOCAL = 2
#: How often cuts are made anew because the exact prediction was over a device's memory.
_CORRECTIONS = 3
_DATA_SHEET = DataSheet()


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """A pipeline without its cuts."""

    schedule: Schedule
    ranks: int
    replicas: int
    micro_batches: int
    recompute: bool
    sharded: bool

    @property
    def stages(self) -> int:
        return self.ranks * (_LOCAL if self.schedule in INTERLEAVED else 1)

    def seconds(self, found: Partition) -> float:
        """Of a step: the slowest stage works without a pause, between filling and draining."""
        more = self.micro_batches - 1
        if self.schedule in INTERLEAVED:
            return found.total_seconds / _LOCAL + more * found.slowest_seconds * _LOCAL
        if self.schedule == "zero_bubble":  # of a backward's three equal parts, weights fill two thirds of the bubble
            return self.micro_batches * found.slowest_seconds + (found.total_seconds - found.slowest_seconds) / 3
        return found.total_seconds + more * found.slowest_seconds

    def least_seconds(self, total_seconds: float) -> float:
        """Of a step with stages that are all as fast, and nothing to be sent: what no cut stays below."""
        return self.seconds(Partition(starts=(), slowest_seconds=total_seconds / self.stages, total_seconds=total_seconds))


def pipeline_plans(
    appraiser: Appraiser,
    sets: Sequence[Sequence[Device]],
    speed: Mapping[str, float],
    rates: Rates | None = None,
    limit: float = math.inf,
) -> Iterator[Plan]:
    """Of each set of devices and schedule the pipeline that promises to be fastest, of those that memory suffices for if there are any.

    Args:
        appraiser: who predicts.
        sets: of devices, at least two each.
        speed: of each device by id.
        rates: of single operations; data sheets' unless given.
        limit: seconds of a batch that a plan must stay below to be of interest.
    """
    for devices in sets:
        maker = _Maker(appraiser, devices, speed, rates)
        # On CPU devices backward in halves was measured to gain nothing: 206 ms a step beside 1F1B's 200, on a machine that others used.
        on_cpu = any(device.kind == "cpu" for device in devices)
        for schedule in SCHEDULES:
            if schedule == "zero_bubble" and (on_cpu or schedule in appraiser.constraints.excluded):
                continue
            plan = maker.best(schedule, limit)
            if plan is not None:
                yield plan


class _Maker:
    """Pipelines on one set of devices."""

    def __init__(self, appraiser: Appraiser, devices: Sequence[Device], speed: Mapping[str, float], rates: Rates | None) -> None:
        self.appraiser = appraiser
        self.footprint = appraiser.footprint
        self.devices = list(devices)
        self.rates = rates
        budgets = {appraiser.budget[device.id] for device in devices}
        self.alike = len(budgets) == 1 and len({speed[device.id] for device in devices}) == 1
        if not self.alike:
            # A stage holds the more micro-batches the nearer it is to the front.
            self.devices.sort(key=lambda device: (-appraiser.budget[device.id], -speed[device.id], device.id))
        self.speed = speed
        self.training = self.footprint.training
        #: Whether a batch may be taken apart over replicas, and over micro-batches.
        self.copies = multi_refusal(self.footprint, appraiser.inventory, appraiser.constraints) is None
        self.parts = micro_batch_refusal(self.footprint, appraiser.constraints, staged=True) is None
        self.cuttable = cuttable(self.footprint, appraiser.constraints.uncuttable)
        self._tables: dict[tuple[float, float, bool], StageTables] = {}
        self._seconds: dict[tuple[object, ...], Table] = {}
        self._of_parts: dict[tuple[float, float, bool], list[float]] = {}
        self._totals: dict[tuple[float, bool], float] = {}
        self.fastest = max(devices, key=lambda device: (speed[device.id], device.id))

    def best(self, schedule: Schedule, limit: float = math.inf) -> Plan | None:
        """The fastest by the tables, made to fit by the exact prediction; None where there is none, or all are slower than the limit.

        Where memory suffices for none, one is given all the same, if it were fast enough.
        """
        shapes = list(self._shapes(schedule))
        least = {shape: shape.least_seconds(self._total_seconds(shape)) for shape in shapes}
        promising: list[tuple[float, int, _Shape]] = []
        lacking: set[_Shape] = set()
        for number, shape in sorted(enumerate(shapes), key=lambda one: (one[1].recompute, least[one[1]], one[0])):
            if least[shape] >= limit or (promising and (shape.recompute or least[shape] > min(promising)[0])):
                continue
            # Shards cost time, and are for where memory doesn't suffice without.
            if shape.sharded and replace(shape, sharded=False) not in lacking:
                continue
            found = self._cut(shape, self._caps(shape))
            if found is not None:
                promising.append((shape.seconds(found), number, shape))
            else:
                lacking.add(shape)
        if promising:
            return self._fitted(min(promising)[2])
        return self._anyhow(shapes[-1]) if shapes and least[shapes[-1]] < limit else None

    def _total_seconds(self, shape: _Shape) -> float:
        """Of all of a micro-batch's forwards and backwards, on the fastest device."""
        share = self._share(shape)
        key = share, shape.recompute
        if key not in self._totals:
            self._totals[key] = sum(self._seconds_of_parts(self.fastest, share, shape.recompute))
        return self._totals[key]

    def _shapes(self, schedule: Schedule) -> Iterator[_Shape]:
        """Ranks by replicas that use all devices, and micro-batches; with all that saves memory last.

        A batch that isn't taken apart runs through the stages as it is, one after the other, and so does one of a step without gradients:
        under any schedule the same, GPipe's.
        """
        appraiser, count = self.appraiser, len(self.devices)
        if not self.parts and schedule != "gpipe":
            return
        blocks = sum(self.cuttable[1:]) + 1
        local = _LOCAL if schedule in INTERLEAVED else 1
        saving = [False]
        # Recomputation keeps backward from being cut in halves: then there is nothing to gain by a zero bubble.
        halves = schedule == "zero_bubble"
        if not halves and recompute_refusal(appraiser.constraints) is None and recomputable(self.footprint):
            saving.append(True)
        for recompute in saving:
            for ranks in range(2, min(count, blocks // local, _MOST_RANKS) + 1):
                if count % ranks or (count > ranks and not self.copies):
                    continue
                rows = -(-self.footprint.batch_size // (count // ranks))
                for rounds in _ROUNDS if self.parts else (1,):
                    parts = ranks * rounds if self.parts else 1
                    if parts > rows or (schedule == "gpipe" and rounds > 1):
                        break
                    shape = _Shape(
                        schedule=schedule, ranks=ranks, replicas=count // ranks, micro_batches=parts, recompute=recompute, sharded=False
                    )
                    yield shape
                    if shape.replicas > 1 and schedule != "interleaved_1f1b" and self.training:
                        yield replace(shape, sharded=True)

    def _caps(self, shape: _Shape) -> list[float]:
        """Bytes that each rank of a pipeline may take, its replicas' smallest."""
        margin = 1 + self.footprint.margin
        return [min(self.appraiser.budget[device.id] for device in group) / margin for group in self._groups(shape)]

    def _groups(self, shape: _Shape) -> list[list[Device]]:
        """The devices of each rank, one of each replica. Where devices are alike, a replica's are next to each other."""
        if self.alike:
            return [self.devices[rank :: shape.ranks] for rank in range(shape.ranks)]
        return [self.devices[rank * shape.replicas : (rank + 1) * shape.replicas] for rank in range(shape.ranks)]

    def _cut(self, shape: _Shape, caps: Sequence[float]) -> Partition | None:
        """The stages by the tables."""
        rows = -(-self.footprint.batch_size // shape.replicas)
        share = self._share(shape)
        tables = self._stage_tables(share, rows / max(1, self.footprint.batch_size), shape.recompute)
        groups = self._groups(shape)
        costs = []
        local = shape.stages // shape.ranks
        shards = shape.replicas if shape.sharded else 1
        slowest = [group[0] if self.alike else min(group, key=lambda device: self.speed[device.id]) for group in groups]
        known: dict[tuple[int, int, float, int], Table] = {}  # most stages are like others of theirs
        for stage in range(shape.stages):
            rank = stage % shape.ranks
            flight = in_flight(shape.schedule, stage, shape.stages, shape.ranks, shape.micro_batches)
            later = min(stage + 1, shape.micro_batches) if shape.schedule == "zero_bubble" else 0
            seconds = self._stage_seconds(slowest[rank], groups[(rank + 1) % shape.ranks][0], share, shape.recompute)
            key = flight, later, caps[rank], id(seconds)
            if key not in known:
                known[key] = np.where(tables.needs(flight, later, shards) <= caps[rank] / local, seconds, np.inf)
            costs.append(known[key])
        return partition(costs, self.cuttable)

    def _share(self, shape: _Shape) -> float:
        """A micro-batch's part of the batch."""
        rows = -(-self.footprint.batch_size // shape.replicas)
        return -(-rows // shape.micro_batches) / max(1, self.footprint.batch_size)

    def _stage_tables(self, share: float, rows_share: float, recompute: bool) -> StageTables:
        key = (share, rows_share, recompute)
        if key not in self._tables:
            self._tables[key] = stage_tables(self.footprint, share, rows_share, recompute=recompute)
        return self._tables[key]

    def _stage_seconds(self, device: Device, following: Device, share: float, recompute: bool) -> Table:
        key = (self.speed[device.id], device.node == following.node, share, recompute)
        if key not in self._seconds:
            seconds = self._seconds_of_parts(device, share, recompute)
            self._seconds[key] = stage_seconds(seconds, self._send(device, following), self.footprint, share)
        return self._seconds[key]

    def _seconds_of_parts(self, device: Device, share: float, recompute: bool) -> list[float]:
        """Of each part of the step, for one micro-batch, forward and backward."""
        key = (self.speed[device.id], share, recompute)
        if key not in self._of_parts:
            parts = part_seconds(self.footprint, device, share, precision=self.appraiser.constraints.precision, rates=self.rates)
            again = {block.fqn for block in recomputable(self.footprint)} if recompute else set()
            self._of_parts[key] = [forward * (2 if fqn in again else 1) + backward for fqn, forward, backward in parts]
        return self._of_parts[key]

    def _send(self, a: Device, b: Device) -> Callable[[int], float]:
        source = self.rates or _DATA_SHEET
        if a.id == b.id:
            return lambda size_bytes: 0.0
        return lambda size_bytes: source.collective_seconds("send", size_bytes, (a, b), self.appraiser.inventory)

    def _fitted(self, shape: _Shape) -> Plan | None:
        """Cut with what the exact prediction says beyond the tables taken off each device's memory, until it fits, or a few times."""
        caps = self._caps(shape)
        plan: Plan | None = None
        for _ in range(_CORRECTIONS):
            found = self._cut(shape, caps)
            if found is None:
                break
            plan = self._plan(shape, found.starts)
            needs = self.appraiser.needs(plan)
            groups = self._groups(shape)
            over = [max(needs[device.id] - self.appraiser.budget[device.id] for device in group) for group in groups]
            if max(over) <= 0:
                return self._relieved(plan, groups) if shape.recompute else plan
            caps = [cap - max(0, more) for cap, more in zip(caps, over, strict=True)]
        return plan

    def _relieved(self, plan: Plan, groups: Sequence[Sequence[Device]]) -> Plan:
        """The plan with only so many blocks of each rank recomputed as it takes to fit: its first ones, whose activations it keeps longest.

        What a rank holds depends on its own stages alone, so that all are halved at once.
        """
        ranks = plan.devices_per_replica
        order = {block.fqn: index for index, block in enumerate(self.footprint.blocks)}
        cuts = [order[fqn] for fqn in plan.cuts]
        own: list[list[str]] = [[] for _ in range(ranks)]
        for fqn in plan.recompute:
            own[sum(cut <= order[fqn] for cut in cuts) % ranks].append(fqn)
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

    def _anyhow(self, shape: _Shape) -> Plan:
        """Stages of about as many blocks each, where memory suffices for none."""
        starts = [0, *(index for index, allowed in enumerate(self.cuttable) if allowed and index)]
        return self._plan(shape, tuple(starts[len(starts) * stage // shape.stages] for stage in range(shape.stages)))

    def _plan(self, shape: _Shape, starts: Sequence[int]) -> Plan:
        blocks = self.footprint.blocks
        groups = self._groups(shape)
        devices = tuple(groups[rank][replica].id for replica in range(shape.replicas) for rank in range(shape.ranks))
        sizes = [end - begin for begin, end in zip(starts, [*starts[1:], len(blocks)], strict=True)]
        reasons = [ENGINE_REASONS["pipeline"], f"stages of {', '.join(map(str, sizes))} blocks, cut so that the slowest one is fastest"]
        if not self.alike:
            reasons.append("devices with most memory come first, as the first stages hold most micro-batches")
        if self.footprint.also_uses:
            names = sorted({use[1] for use in self.footprint.also_uses})
            reasons.append(f"stages that share a parameter ({', '.join(names)}) hold a copy each, and add up its gradients")
        plan = Plan(
            engine="pipeline",
            devices=devices,
            replicas=shape.replicas,
            micro_batches=shape.micro_batches,
            cuts=tuple(blocks[start].fqn for start in starts[1:]),
            schedule=shape.schedule,
            shard=shardable(self.footprint)[0] if shape.sharded else (),
            reasons=tuple(reasons),
        )
        return with_recompute(plan, self.footprint, [block.fqn for block in recomputable(self.footprint)]) if shape.recompute else plan
