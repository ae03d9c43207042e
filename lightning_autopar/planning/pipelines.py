"""Pipelines worth a prediction: for each schedule the ranks, replicas, micro-batches and cuts that promise to be fastest.

The cuts are :mod:`partition`'s, by the tables of :mod:`stages`; here is what there is to choose, and the check by the exact prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_autopar.memory.inventory import Device
from lightning_autopar.planning.appraisal import Appraiser
from lightning_autopar.planning.blocks import recomputable, shardable, with_recompute
from lightning_autopar.planning.candidates import ENGINE_REASONS
from lightning_autopar.planning.data_sheet import DataSheet
from lightning_autopar.planning.part_seconds import part_seconds
from lightning_autopar.planning.partition import Partition, Table, partition
from lightning_autopar.planning.rates import Rates
from lightning_autopar.planning.refusals import recompute_refusal
from lightning_autopar.planning.stages import StageTables, cuttable, stage_seconds, stage_tables
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


def pipeline_plans(
    appraiser: Appraiser, sets: Sequence[Sequence[Device]], speed: Mapping[str, float], rates: Rates | None = None
) -> Iterator[Plan]:
    """Of each set of devices and schedule the pipeline that promises to be fastest, of those that memory suffices for if there are any.

    Args:
        appraiser: who predicts.
        sets: of devices, at least two each.
        speed: of each device by id.
        rates: of single operations; data sheets' unless given.
    """
    for devices in sets:
        maker = _Maker(appraiser, devices, speed, rates)
        for schedule in SCHEDULES:
            plan = maker.best(schedule)
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
        self.cuttable = cuttable(self.footprint)
        self._tables: dict[tuple[float, float, bool], StageTables] = {}
        self._seconds: dict[tuple[object, ...], Table] = {}

    def best(self, schedule: Schedule) -> Plan | None:
        """The fastest by the tables, made to fit by the exact prediction."""
        promising: list[tuple[float, int, _Shape]] = []
        lacking: _Shape | None = None
        for number, shape in enumerate(self._shapes(schedule)):
            if shape.recompute and promising:
                break
            # Shards cost time, and are for where memory doesn't suffice without.
            if shape.sharded and lacking != replace(shape, sharded=False):
                continue
            found = self._cut(shape, self._caps(shape))
            if found is not None:
                promising.append((shape.seconds(found), number, shape))
            else:
                lacking = shape
        if not promising:
            shapes = list(self._shapes(schedule))
            return None if not shapes else self._anyhow(shapes[-1])
        return self._fitted(min(promising)[2])

    def _shapes(self, schedule: Schedule) -> Iterator[_Shape]:
        """Ranks by replicas that use all devices, and micro-batches; with all that saves memory last."""
        appraiser, count = self.appraiser, len(self.devices)
        blocks = len(self.footprint.blocks)
        local = _LOCAL if schedule in INTERLEAVED else 1
        saving = [False]
        if recompute_refusal(appraiser.constraints) is None and recomputable(self.footprint):
            saving.append(True)
        for recompute in saving:
            for ranks in range(2, min(count, blocks // local, _MOST_RANKS) + 1):
                if count % ranks:
                    continue
                rows = -(-self.footprint.batch_size // (count // ranks))
                for rounds in _ROUNDS:
                    parts = ranks * rounds
                    if parts > rows or (schedule == "gpipe" and rounds > 1):
                        break
                    shape = _Shape(
                        schedule=schedule, ranks=ranks, replicas=count // ranks, micro_batches=parts, recompute=recompute, sharded=False
                    )
                    yield shape
                    if shape.replicas > 1 and schedule != "interleaved_1f1b":
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
        whole = max(1, self.footprint.batch_size)
        rows = -(-self.footprint.batch_size // shape.replicas)
        share = -(-rows // shape.micro_batches) / whole
        tables = self._stage_tables(share, rows / whole, shape.recompute)
        groups = self._groups(shape)
        costs = []
        local = shape.stages // shape.ranks
        shards = shape.replicas if shape.sharded else 1
        for stage in range(shape.stages):
            rank = stage % shape.ranks
            needs = tables.needs(shape.schedule, stage, shape.stages, shape.ranks, shape.micro_batches, shards)
            slowest = min(groups[rank], key=lambda device: self.speed[device.id])
            following = groups[(rank + 1) % shape.ranks][0]
            seconds = self._stage_seconds(slowest, following, share, shape.recompute)
            costs.append(np.where(needs <= caps[rank] / local, seconds, np.inf))
        return partition(costs, self.cuttable)

    def _stage_tables(self, share: float, rows_share: float, recompute: bool) -> StageTables:
        key = (share, rows_share, recompute)
        if key not in self._tables:
            self._tables[key] = stage_tables(self.footprint, share, rows_share, recompute=recompute)
        return self._tables[key]

    def _stage_seconds(self, device: Device, following: Device, share: float, recompute: bool) -> Table:
        key = (self.speed[device.id], device.node == following.node, share, recompute)
        if key not in self._seconds:
            constraints = self.appraiser.constraints
            parts = part_seconds(self.footprint, device, share, precision=constraints.precision, rates=self.rates)
            again = {block.fqn for block in recomputable(self.footprint)} if recompute else set()
            seconds = [forward * (2 if fqn in again else 1) + backward for fqn, forward, backward in parts]
            self._seconds[key] = stage_seconds(seconds, self._send(device, following), self.footprint, share)
        return self._seconds[key]

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
                break
            caps = [cap - max(0, more) for cap, more in zip(caps, over, strict=True)]
        return plan

    def _anyhow(self, shape: _Shape) -> Plan:
        """Stages of as many blocks each, where memory suffices for none."""
        blocks = len(self.footprint.blocks)
        return self._plan(shape, tuple(blocks * stage // shape.stages for stage in range(shape.stages)))

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
