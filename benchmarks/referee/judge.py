"""The referee: plans from what :class:`Plan` lets one write down and from the checks of a pinned one, each predicted by itself.

It shares nothing with the search but the two functions that predict one plan's bytes and seconds.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_autopar.constraints import Constraints
from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.planning.block_units import recomputable, shardable
from lightning_autopar.planning.make_report import check_pinned, make_report
from lightning_autopar.planning.plan_bytes import predict
from lightning_autopar.planning.plan_cost import host_need
from lightning_autopar.planning.plan_seconds import predict_seconds
from lightning_autopar.plans import OFFLOADS, SCHEDULES, Plan, Schedule
from lightning_autopar.report.report import NothingFits

#: Of so many of the best plans every neighbour is looked at.
_BEST = 20
#: Plans that fit by their fullest moment and are replayed, until one goes through.
_MOST_REPLAYED = 12


class Shape(NamedTuple):
    """A plan in the words of its fields, before it is one. Cuts are the numbers of the blocks, recomputed ones a number of them."""

    engine: str
    ranks: int
    micro_batches: int
    recompute: int
    reshard: bool = False
    offload: bool = False
    replicas: int = 1
    shares: tuple[int, ...] = ()
    schedule: str = ""
    cuts: tuple[int, ...] = ()
    sharded: bool = False
    last: bool = False  # the last blocks are recomputed rather than the first


@dataclass(frozen=True)
class Verdict:
    """What the referee found.

    Args:
        plans: how many it looked at.
        best: the fastest that fits by its prediction; None where none does.
        seconds: of it.
    """

    plans: int
    best: Plan | None
    seconds: float


class Referee:
    """Everything that can be asked of one case.

    Args:
        footprint: at the global batch.
        inventory: the devices.
        constraints: those that the planner had.
        seed: of what is drawn.
    """

    def __init__(self, footprint: Footprint, inventory: Inventory, constraints: Constraints, seed: int = 0) -> None:
        self.footprint, self.inventory, self.constraints = footprint, inventory, constraints
        self.draw = random.Random(seed)
        self.budget = {device.id: constraints.budget_bytes(device) for device in inventory.devices}
        # The freest first, and among those that are as free the first of a node: other sets are drawn besides.
        self.devices = [device.id for device in sorted(inventory.devices, key=lambda one: (-self.budget[one.id], one.node, one.index or 0))]
        self.batch = footprint.batch_size
        self.blocks = [block.fqn for block in footprint.blocks]
        self.again = [block.fqn for block in recomputable(footprint)]
        self.units = shardable(footprint)[0]
        self.seconds: dict[Shape, float] = {}
        self._fits: dict[Shape, bool] = {}

    # -- from fields to plans ----------------------------------------------------------------------------------------------------------

    def plan(self, shape: Shape) -> Plan | None:
        """The plan of a shape; None where it is none, or couldn't be pinned."""
        chosen = self.devices[: shape.ranks]
        order = [device.id for device in self.inventory.devices]
        # A pipeline's first stages hold most, so that its devices stay in the order of their memory; others go node by node.
        devices = chosen if shape.engine == "pipeline" and shape.replicas == 1 else sorted(chosen, key=order.index)
        recomputed = (self.again[::-1] if shape.last else self.again)[: shape.recompute]
        names = frozenset(recomputed)
        if not all(0 < cut < len(self.blocks) for cut in shape.cuts):
            return None
        try:
            plan = Plan(
                engine=shape.engine,  # type: ignore[arg-type]
                devices=tuple(devices),
                reshard_after_forward=shape.reshard if shape.engine == "fsdp" else None,
                shard=self.units if shape.engine == "fsdp" or shape.sharded else (),
                recompute=tuple(fqn for fqn in self.blocks if fqn in names),
                micro_batches=shape.micro_batches,
                replicas=shape.replicas,
                shares=shape.shares,
                offload=OFFLOADS if shape.offload else (),
                cuts=tuple(self.blocks[number] for number in shape.cuts),
                schedule=shape.schedule or None,  # type: ignore[arg-type]  # shapes are sorted: theirs is a text, empty for none
            )
            check_pinned(plan, self.footprint, self.inventory, self.constraints)
        except ValueError:
            return None
        return plan

    def grid(self) -> int:
        """How many plans there are without uneven shares and with even cuts, no more than are counted."""
        return sum(1 for _ in itertools.islice(self._every(), 20_001))

    def _every(self) -> Iterator[Shape]:
        """All of them, cuts as even as can be and shares too."""
        for ranks in range(1, len(self.devices) + 1):
            rows = -(-self.batch // ranks)
            for parts, count, last in itertools.product(range(1, rows + 1), range(len(self.again) + 1), (False, True)):
                if last and not 0 < count < len(self.again):
                    continue
                common = {"ranks": ranks, "micro_batches": parts, "recompute": count, "last": last}
                yield Shape("single" if ranks == 1 else "ddp", **common)  # type: ignore[arg-type]
                for replicas in _divisors(ranks):
                    yield Shape("fsdp", reshard=True, replicas=replicas, **common)  # type: ignore[arg-type]
                    yield Shape("fsdp", reshard=False, replicas=replicas, **common)  # type: ignore[arg-type]
                    yield Shape("fsdp", reshard=True, offload=True, replicas=replicas, **common)  # type: ignore[arg-type]
            for replicas, schedule in itertools.product(_divisors(ranks), SCHEDULES):
                stages = self._stages(schedule, ranks // replicas)
                if ranks // replicas < 2 or stages > len(self.blocks):
                    continue
                for parts, count in itertools.product(range(1, -(-self.batch // replicas) + 1), range(len(self.again) + 1)):
                    for sharded in (False, True) if replicas > 1 else (False,):
                        yield Shape(
                            "pipeline", ranks, parts, count, replicas=replicas, schedule=schedule, cuts=self._even(stages), sharded=sharded
                        )

    def _drawn(self) -> Shape:
        """One at random, of any number of devices."""
        draw, most = self.draw, len(self.devices)
        ranks = most if draw.random() < 0.5 else draw.randint(1, most)
        count = draw.choice((0, 0, len(self.again), len(self.again), draw.randint(0, len(self.again))))
        kind = draw.random()
        if ranks > 1 and kind < 0.35 and len(self.blocks) > 1:
            replicas = draw.choice(_divisors(ranks))
            schedule: Schedule = draw.choice(SCHEDULES)
            stages = self._stages(schedule, ranks // replicas)
            rows = -(-self.batch // replicas)
            parts = min(rows, max(1, ranks // replicas) * draw.choice((1, 2, 3, 4, 6, 8, 16)))
            cuts = self._even(stages) if stages <= len(self.blocks) else ()
            if cuts and draw.random() < 0.5:
                cuts = tuple(sorted({max(1, min(len(self.blocks) - 1, cut + draw.randint(-2, 2))) for cut in cuts}))
            return Shape(
                "pipeline",
                ranks,
                parts,
                count,
                replicas=replicas,
                schedule=schedule,
                cuts=cuts,
                sharded=replicas > 1 and draw.random() < 0.3,
            )
        rows = -(-self.batch // ranks)
        parts = draw.choice((1, 1, draw.randint(1, rows), rows, min(rows, 2 ** draw.randint(0, 6))))
        shares: tuple[int, ...] = ()
        if ranks > 1 and draw.random() < 0.25:
            shares = self._shares(ranks)
        if ranks == 1:
            return Shape("single" if kind < 0.6 else "fsdp", 1, parts, count, reshard=True, offload=kind >= 0.6, last=draw.random() < 0.2)
        if kind < 0.55:
            return Shape("ddp", ranks, parts, count, shares=shares, last=draw.random() < 0.2)
        offload = draw.random() < 0.15
        return Shape(
            "fsdp",
            ranks,
            parts,
            count,
            reshard=offload or draw.random() < 0.5,
            offload=offload,
            replicas=draw.choice((1, 1, draw.choice(_divisors(ranks)))),
            shares=shares,
            last=draw.random() < 0.2,
        )

    def _shares(self, ranks: int) -> tuple[int, ...]:
        """Samples of each rank: by memory, or some moved at random."""
        order = [device.id for device in self.inventory.devices]
        devices = sorted(self.devices[:ranks], key=order.index)
        if self.batch < ranks:
            return ()
        weights = [self.budget[device] ** self.draw.choice((0.0, 0.5, 1.0, 2.0)) for device in devices]
        rows = [max(1, int(self.batch * weight / sum(weights))) for weight in weights]
        while sum(rows) < self.batch:
            rows[self.draw.randrange(ranks)] += 1
        while sum(rows) > self.batch:
            rows[rows.index(max(rows))] -= 1
        return tuple(rows)

    @staticmethod
    def _stages(schedule: str, ranks: int) -> int:
        return ranks * (2 if schedule == "interleaved_1f1b" else 1)

    def _even(self, stages: int) -> tuple[int, ...]:
        return tuple(round(len(self.blocks) * stage / stages) for stage in range(1, stages))

    def neighbours(self, shape: Shape) -> Iterator[Shape]:
        """Every shape that differs in one field."""
        rows = -(-self.batch // (shape.replicas if shape.engine == "pipeline" else shape.ranks))
        most = max(shape.shares, default=0) * (self.batch // max(1, sum(shape.shares))) if shape.shares else rows
        for parts in _steps(shape.micro_batches, 1, max(rows, most)):
            yield shape._replace(micro_batches=parts)
        for count in _steps(shape.recompute, 0, len(self.again)):
            yield shape._replace(recompute=count)
        if shape.recompute:
            yield shape._replace(last=not shape.last)
        if shape.engine == "fsdp":
            yield shape._replace(reshard=not shape.reshard)
            yield shape._replace(offload=not shape.offload, reshard=True)
            yield shape._replace(engine="single" if shape.ranks == 1 else "ddp", reshard=False, offload=False, replicas=1)
        elif shape.engine in ("single", "ddp"):
            yield from (shape._replace(engine="fsdp", reshard=reshard) for reshard in (False, True))
            yield shape._replace(engine="fsdp", reshard=True, offload=True)
        if shape.engine in ("fsdp", "pipeline"):
            for replicas in _divisors(shape.ranks):
                cuts = shape.cuts
                if shape.engine == "pipeline":
                    stages = self._stages(shape.schedule, shape.ranks // replicas)
                    cuts = self._even(stages) if 1 < stages <= len(self.blocks) else ()
                yield shape._replace(replicas=replicas, cuts=cuts)
        if shape.engine == "pipeline":
            yield shape._replace(sharded=not shape.sharded)
            for schedule in SCHEDULES:
                stages = self._stages(schedule, shape.ranks // shape.replicas)
                even = self._even(stages) if stages <= len(self.blocks) else ()
                yield shape._replace(schedule=schedule, cuts=shape.cuts if stages == len(shape.cuts) + 1 else even)
            for index, cut in enumerate(shape.cuts):
                for other in (cut - 2, cut - 1, cut + 1, cut + 2):
                    yield shape._replace(cuts=tuple(sorted({*shape.cuts[:index], other, *shape.cuts[index + 1 :]} - {0})))
        for ranks in {shape.ranks - 1, shape.ranks + 1, shape.ranks // 2, 2 * shape.ranks, len(self.devices)}:
            if 1 <= ranks <= len(self.devices) and ranks != shape.ranks and shape.engine != "pipeline":
                engine = shape.engine if shape.engine == "fsdp" else "single" if ranks == 1 else "ddp"
                yield shape._replace(ranks=ranks, shares=(), engine=engine, replicas=1)
        if shape.engine in ("ddp", "fsdp") and shape.ranks > 1 and not shape.offload:
            yield shape._replace(shares=())
            for _ in range(4):
                yield shape._replace(shares=self._shares(shape.ranks))
            if shape.shares:
                for giver, taker in itertools.islice(itertools.permutations(range(shape.ranks), 2), 60):
                    moved = [share - (rank == giver) + (rank == taker) for rank, share in enumerate(shape.shares)]
                    yield shape._replace(shares=tuple(moved) if min(moved) > 0 else ())

    # -- what they take ----------------------------------------------------------------------------------------------------------------

    def look(self, shapes: Iterable[Shape]) -> None:
        """Seconds of those that aren't known, infinite of what is no plan."""
        for shape in shapes:
            if shape not in self.seconds:
                plan = self.plan(shape)
                precision = self.constraints.precision
                self.seconds[shape] = (
                    math.inf if plan is None else predict_seconds(self.footprint, plan, self.inventory, precision=precision).step
                )

    def fits(self, shape: Shape) -> bool:
        """Whether each device has what is predicted, with the margin."""
        if shape not in self._fits:
            plan = self.plan(shape)
            assert plan is not None, "has seconds"
            sizes = predict(self.footprint, plan, self.inventory, precision=self.constraints.precision)
            margin = 1 + self.footprint.margin
            host = host_need(
                self.footprint,
                plan,
                self.inventory,
                {device: math.ceil(size.reserved) for device, size in sizes.items()},
                precision=self.constraints.precision,
                margin=self.constraints.memory_margin,
            )
            self._fits[shape] = (host is None or host.fits) and all(
                math.ceil(max(size.allocated, size.reserved) * margin) <= self.budget[device] for device, size in sizes.items()
            )
        return self._fits[shape]

    def best(self, count: int = _BEST, below: float = math.inf) -> list[Shape]:
        """Of all that were looked at, the fastest that fit; those alone that take less than ``below`` seconds."""
        found: list[Shape] = []
        for shape in sorted((one for one, seconds in self.seconds.items() if seconds < below), key=lambda one: self.seconds[one]):
            if self.fits(shape):
                found.append(shape)
                if len(found) == count:
                    break
        return found

    def verdict(self, most: int, below: float = math.inf) -> Verdict:
        """All plans where there are no more than ``most``, or so many at random; and every neighbour of the best, as long as that helps.

        Args:
            most: plans.
            below: seconds that the planner's own choice takes; what is slower is of no interest but as a neighbour.
        """
        if self.grid() <= most:
            self.look(self._every())
        else:
            self.look(self._drawn() for _ in range(most))
        known: set[Shape] = set()
        while fresh := [shape for shape in self.best() if shape not in known][:_BEST]:
            known.update(fresh)
            if len(known) > 5 * _BEST:
                break
            self.look(neighbour for shape in fresh for neighbour in self.neighbours(shape))
        best, seconds = None, below
        for shape in self.best(_MOST_REPLAYED, below):
            plan = self.plan(shape)
            if plan is not None and self.seconds[shape] < seconds and (pinned := self.pinned_seconds(plan)) < seconds:
                best, seconds = plan, pinned
        return Verdict(len(self.seconds), best, math.inf if best is None else seconds)

    def pinned_seconds(self, plan: Plan) -> float:
        """The plan's seconds where it is pinned: its allocations are replayed, which may show that it waits for the allocator; infinite
        where the planner doesn't take it.
        """
        try:
            return make_report(self.footprint, self.inventory, replace(self.constraints, pinned=plan)).candidates[0].step_seconds
        except (NothingFits, ValueError):
            return math.inf

    def cut_to(self, tight: float, samples: int = 400) -> Inventory:
        """The devices with memory cut between the least that one of some plans needs and what the fastest of them needs."""
        self.look(self._drawn() for _ in range(samples))
        timed = sorted((seconds, shape) for shape, seconds in self.seconds.items() if math.isfinite(seconds))
        needs: list[float] = []
        margin = 1 + self.footprint.margin
        for _, shape in timed:
            plan = self.plan(shape)
            assert plan is not None, "has seconds"
            sizes = predict(self.footprint, plan, self.inventory, precision=self.constraints.precision)
            needs.append(max(max(size.allocated, size.reserved) * margin for size in sizes.values()))
        least, fastest = min(needs), needs[0]
        limit = (least + (fastest - least) * tight) * 1.02 / (1 - self.constraints.memory_margin)
        share = limit / max(device.free_bytes for device in self.inventory.devices)
        cut = tuple(replace(device, free_bytes=min(device.free_bytes, int(device.free_bytes * share))) for device in self.inventory.devices)
        return replace(self.inventory, devices=cut)


def _divisors(number: int) -> list[int]:
    return [count for count in range(1, number) if number % count == 0] or [1]


def _steps(value: int, least: int, most: int) -> list[int]:
    """Other values of a field: those next to it, half and double, and the ends; all of a few."""
    if most - least <= 16:
        return [one for one in range(least, most + 1) if one != value]
    near = {value - 2, value - 1, value + 1, value + 2, value // 2, 2 * value, least, most, (value + most) // 2, (value + least) // 2}
    return sorted(one for one in near if least <= one <= most and one != value)
