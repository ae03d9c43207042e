"""What helps a plan that lacks memory, at the least cost in time: fewer samples on some devices, micro-batches, recomputed blocks.

It also divides a batch's samples among ranks that differ in speed or free memory. It asks for predictions through an
:class:`~plan_cost.Appraiser`, and knows neither how they are made nor which plans there are.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from math import floor

import numpy as np

from lightning_autopar import engines
from lightning_autopar.planning.block_units import recomputable, recomputable_order, saved_bytes, with_recompute
from lightning_autopar.planning.enumerate_plans import micro_batch_counts
from lightning_autopar.planning.plan_cost import Appraiser
from lightning_autopar.planning.refusals import feature_refusal, recompute_refusal
from lightning_autopar.plans import Plan

#: From this number of ranks on, arrays are faster than lists.
_MANY_RANKS = 32


def share_out(rows: int, row_seconds: Sequence[float], most_rows: Sequence[int]) -> tuple[int, ...] | None:
    """The samples of each rank, at least one, dealt out so that the slowest rank is done soonest; None where the ranks can't take them all.
    Of ranks that would be done at the same time, the first gets the next sample.

    Args:
        row_seconds: seconds of one sample, by rank; above 0.
        most_rows: how many samples each rank's memory holds.
    """
    ranks = len(row_seconds)
    if ranks > rows or sum(most_rows) < rows or min(most_rows) < 1:
        return None
    # Find a deadline that all but the last few samples meet; deal those one by one to the rank that is done first with one more.
    low, high = 0.0, rows * max(row_seconds)
    through = _all_through(row_seconds, most_rows)
    for _ in range(60):
        deadline = (low + high) / 2
        low, high = (low, deadline) if through(deadline) >= rows else (deadline, high)
    given = _until(low, row_seconds, most_rows)
    waiting = [((given[rank] + 1) * row_seconds[rank], rank) for rank in range(ranks) if given[rank] < most_rows[rank]]
    heapq.heapify(waiting)
    for _ in range(rows - sum(given)):
        _, rank = heapq.heappop(waiting)
        given[rank] += 1
        if given[rank] < most_rows[rank]:
            heapq.heappush(waiting, ((given[rank] + 1) * row_seconds[rank], rank))
    return tuple(given)


def _all_through(row_seconds: Sequence[float], most_rows: Sequence[int]) -> Callable[[float], float]:
    """How many samples all ranks finish by a deadline."""
    if len(row_seconds) < _MANY_RANKS:
        return lambda deadline: sum(_until(deadline, row_seconds, most_rows))
    each, most = (np.asarray(values, dtype=np.float64) for values in (row_seconds, most_rows))
    return lambda deadline: float(np.maximum(1, np.minimum(most, np.floor(deadline / each))).sum())


def _until(deadline: float, row_seconds: Sequence[float], most_rows: Sequence[int]) -> list[int]:
    """How many samples each rank finishes by a deadline."""
    return [max(1, min(most, floor(deadline / each))) for each, most in zip(row_seconds, most_rows, strict=True)]


def largest_rows(rows: tuple[int, int], needs: tuple[int, int], budget: int, most: int) -> int:
    """How many samples a device's memory holds, by a straight line through its needs for two numbers of samples.

    Args:
        rows: two numbers of samples.
        needs: bytes for each of them.
    """
    (few, many), (less, more) = rows, needs
    if few == many or more <= less:
        return most if min(needs) <= budget else 0
    each = (more - less) / (many - few)
    return max(0, min(most, few + floor((budget - less) / each)))


#: Dealing out a batch takes as many steps as it has samples, and each looks at every rank; beyond this product it isn't tried.
_MOST_DEALT = 10_000_000
#: How often the straight line's estimate of memory is corrected by a real prediction.
_CORRECTIONS = 6
#: How often the number of recomputed blocks is halved for a plan with uneven shares.
_HALVINGS = 3
#: Up to this number of blocks, other sets are tried than those that save most for their time.
_FEW_BLOCKS = 16
#: Up to this number of ranks, samples are moved between ranks in every plan, not only in the best.
_FEW_RANKS = 8
#: So many numbers of parts are tried after a replay that failed, which have a part as large.
_MOST_AS_LARGE = 3
#: With more ranks, each number of parts is at least so many times the one before.
_FINE = 1.3

#: Seconds of each block's forward by FQN, under a plan.
BlockSeconds = Callable[[Plan], Mapping[str, float]]
#: How fast each device is, by its id, in any unit.
Speeds = Mapping[str, float]


class Remedies:
    """The remedies for one question: recomputed blocks, micro-batches and uneven shares.

    Args:
        block_seconds: gives the seconds that recomputing a block costs.
    """

    def __init__(self, appraiser: Appraiser, block_seconds: BlockSeconds, speed: Speeds) -> None:
        self.appraiser = appraiser
        self.footprint = appraiser.footprint
        self.constraints = appraiser.constraints
        self.block_seconds = block_seconds
        self.speed = speed
        self._orders: dict[tuple[object, ...], tuple[str, ...]] = {}
        self._differing: dict[tuple[tuple[str, ...], bool], bool] = {}
        self._lacking: dict[tuple[Plan, Callable[[Plan], bool]], int] = {}

    @cached_property
    def micro_batches(self) -> bool:
        """Whether a rank may run its samples in parts."""
        return feature_refusal("micro_batches", self.footprint, self.constraints) is None

    @cached_property
    def shares(self) -> bool:
        """Whether ranks may get different numbers of samples."""
        return feature_refusal("shares", self.footprint, self.constraints) is None

    @cached_property
    def recompute(self) -> bool:
        """Whether any block may be recomputed."""
        return recompute_refusal(self.constraints) is None and bool(recomputable(self.footprint))

    def parts(self, plan: Plan) -> list[int]:
        """The numbers of parts into which a plan's batch may be split; with many ranks not all of them, see :meth:`parts_near`."""
        batch = self.footprint.batch_size
        if not self.micro_batches or not batch or not engines.of(plan).runs_parts or self.footprint.shares_network(plan):
            return [1]
        counts = micro_batch_counts(max(plan.rows(batch)))
        if plan.world_size <= _FEW_RANKS:
            return counts
        kept = [1]
        for count in counts:
            if count >= _FINE * kept[-1] or count == counts[-1] > kept[-1]:
                kept.append(count)
        return kept

    def parts_near(self, plan: Plan) -> list[int]:
        """Numbers of parts near a plan's own that :meth:`parts` leaves out."""
        batch = self.footprint.batch_size
        if not self.micro_batches or not batch or plan.world_size <= _FEW_RANKS or plan.shares or not engines.of(plan).runs_parts:
            return []
        counts = micro_batch_counts(max(plan.rows(batch)))
        return [count for count in counts if plan.micro_batches / 2 < count < 2 * plan.micro_batches and count != plan.micro_batches]

    def parts_as_large(self, plan: Plan) -> range:
        """The next few numbers of parts, above a plan's own, of which the largest has as many samples; :meth:`parts` leaves them out."""
        rows = max(plan.rows(self.footprint.batch_size))
        size, first = -(-rows // plan.micro_batches), plan.micro_batches + 1
        return range(first, min(first + _MOST_AS_LARGE, -(-rows // (size - 1)))) if size > 1 else range(0)

    def may_share(self, plan: Plan) -> bool:
        """Whether uneven shares of the batch may help a plan: its devices differ, and there are more samples than ranks."""
        if not self.shares or not engines.of(plan).shares or plan.world_size < 2 or self.footprint.batch_size <= plan.world_size:
            return False
        return self.uneven(plan) or self._differ(plan, self.appraiser.budget)

    def uneven(self, plan: Plan) -> bool:
        """Whether the plan's devices differ in speed."""
        return self._differ(plan, self.speed)

    def _differ(self, plan: Plan, figures: Mapping[str, float]) -> bool:
        """Whether its devices have different figures; cached, as a search asks for each plan but has few sets of devices."""
        key = plan.devices, figures is self.speed
        if key not in self._differing:
            self._differing[key] = len(set(map(figures.__getitem__, plan.devices))) > 1
        return self._differing[key]

    def shared_parts(self, plan: Plan) -> list[int]:
        """The numbers of parts where the batch is shared out by speed: the rank with most samples can have more of them."""
        batch = self.footprint.batch_size
        if not self.micro_batches:
            return [1]
        speeds = [self.speed[device] for device in plan.devices]
        most = min(batch - plan.world_size + 1, math.ceil(batch * max(speeds) / sum(speeds)))
        return sorted({*self.parts(plan), *micro_batch_counts(most)})

    def least_shared_seconds(self, plan: Plan) -> float:
        """A lower bound of seconds for all plans with the same devices, engine and parts, however the batch is shared out. Where devices
        differ in speed: the seconds of a split by speed, to a fraction of a sample. Where they don't: the seconds with one sample moved, as
        any other uneven split takes longer.
        """
        seconds = self.appraiser.step_seconds(plan)
        batch = self.footprint.batch_size
        if not self.uneven(plan):
            if batch % plan.world_size:
                return seconds
            rows = list(plan.rows(batch))
            return self.appraiser.step_seconds(with_shares(plan, [rows[0] + 1, *rows[1:-1], rows[-1] - 1]))
        speeds = [self.speed[device] for device in plan.devices]
        slowest = max(rows / speed for rows, speed in zip(plan.rows(batch), speeds, strict=True))
        return seconds * (batch / sum(speeds)) / slowest

    def is_crowded(self, plan: Plan) -> bool:
        """Whether ranks can't share out a batch in so many parts, even with all blocks recomputed."""
        return self._lacks_in_parts(plan, self.shared_parts, self._has_room)

    def _lacks_in_parts(self, plan: Plan, counts: Callable[[Plan], list[int]], suffices: Callable[[Plan], bool]) -> bool:
        """Whether a batch in so many parts lacks memory even with all blocks recomputed. The fewer the parts, the more a rank holds. So
        where some don't suffice, the fewest that do are found by halving, and no smaller number is asked about again. A batch in one part
        is another matter: it needs no gradients between its parts.
        """
        blocks = self.order(plan) if self.recompute else ()
        whole = self.apart(replace(plan, reasons=()), 1)

        def holds(count: int) -> bool:
            return suffices(with_recompute(in_parts(whole, count), self.footprint, blocks))

        parts, key = plan.micro_batches, (whole, suffices)
        if parts == 1:
            return not holds(1)
        if parts <= self._lacking.get(key, 0):
            return True
        if holds(parts):
            return False
        more = [count for count in counts(plan) if count > parts]
        fewest = bisect_left(more, True, key=holds)
        self._lacking[key] = more[fewest - 1] if fewest else parts
        return True

    def _has_room(self, plan: Plan) -> bool:
        """Whether its devices have room for the batch, however it is shared out."""
        if plan.world_size * self.footprint.batch_size > _MOST_DEALT:
            return False
        most = self._most_rows(plan)
        return min(most) >= 1 and sum(most) >= self.footprint.batch_size

    def is_hopeless(self, plan: Plan) -> bool:
        """Whether a plain plan lacks memory even with all blocks recomputed, with its batch whole and in the most parts.

        Uneven shares may help where devices differ.
        """
        if self.may_share(plan) and (self.uneven(plan) or plan.world_size <= _FEW_RANKS):
            return False
        blocks = [block.fqn for block in recomputable(self.footprint)] if self.recompute else []
        parts = self.parts(plan)
        return not any(self.appraiser.holds(with_recompute(in_parts(plan, count), self.footprint, blocks)) for count in {1, parts[-1]})

    def way(self, plan: Plan, limit: Callable[[], float]) -> Plan | None:
        """The plan itself if it fits, else with as few recomputed blocks as let it fit; None where that takes too long.

        Args:
            plan: with its batch already in parts.
            limit: gives the seconds a batch that a plan must stay below to be of interest at that time.
        """
        if self.appraiser.holds(plan):
            return plan
        return self.least_recompute(plan, limit) if self.recompute else None

    def shared_out(self, plan: Plan, limit: Callable[[], float]) -> Iterator[Plan]:
        """Plans with the samples of each rank by its speed and memory: without recomputation, with some of it, with all."""
        order = self.order(plan) if self.recompute else ()
        even = len({self.speed[device] for device in plan.devices}) == 1
        low, high = 0, len(order)
        shared = self._shared_below(plan, limit, even)
        if shared is not None:
            yield shared
            if even or not order or not self._held_back(shared):
                return
        if not order or (shared := self._shared_below(with_recompute(plan, self.footprint, order), limit, even)) is None:
            return
        yield shared
        for _ in range(_HALVINGS):
            middle = (low + high) // 2
            if middle in (low, high):
                return
            shared = self._shared_below(with_recompute(plan, self.footprint, order[:middle]), limit, even)
            if shared is None:
                low = middle
            else:
                high = middle
                yield shared

    def _held_back(self, plan: Plan) -> bool:
        """Whether memory keeps the plan from sharing out the batch by speed alone."""
        batch = self.footprint.batch_size
        seconds = [1.0 / self.speed[device] for device in plan.devices]
        return plan.rows(batch) != share_out(batch, seconds, [batch] * plan.world_size)

    def _shared_below(self, plan: Plan, limit: Callable[[], float], even: bool) -> Plan | None:
        """The plan with shares, if it can stay below the limit. Equally fast devices aren't faster with uneven shares."""
        if even and self.appraiser.step_seconds(plan) >= limit():
            return None
        return self._shared(plan)

    def _shared(self, plan: Plan) -> Plan | None:
        """The plan with the shares that fit each device's memory and let the slowest rank be done soonest; None where none fit."""
        batch = self.footprint.batch_size
        ranks = plan.world_size
        if ranks > batch or ranks * batch > _MOST_DEALT:
            return None
        seconds = [1.0 / self.speed[device] for device in plan.devices]
        most = self._most_rows(plan)
        for _ in range(_CORRECTIONS):
            rows = share_out(batch, seconds, most)
            if rows is None:
                return None
            shared = with_shares(plan, rows)
            if not shared.shares:
                return None
            needs = self.appraiser.needs(shared)
            over = [rank for rank, device in enumerate(plan.devices) if needs[device] > self.appraiser.budget[device]]
            if not over:
                return self._settled(shared) if self.appraiser.shortage(needs) is None else None
            for rank in over:
                most[rank] = rows[rank] - 1
        return None

    def _settled(self, plan: Plan) -> Plan:
        """A plan with shares, with at most as many parts as samples; with few ranks and blocks, improved further."""
        plan = self.apart(plan, min(plan.micro_batches, max(plan.rows(self.footprint.batch_size))))
        if plan.world_size <= _FEW_RANKS:
            plan = self.better_shares(plan, tries=_FEW_RANKS)
        if plan.recompute and len(self.footprint.blocks) <= _FEW_BLOCKS:
            plan = self.cheaper_blocks(plan)
        return plan

    def _most_rows(self, plan: Plan) -> list[int]:
        """How many samples each device's memory holds, judged by two splits: in one it has more samples, in the other fewer."""
        batch, ranks = self.footprint.batch_size, plan.world_size
        even, little = list(plan.rows(batch)), max(1, batch // (2 * ranks))
        first, second = list(even), list(even)
        for rank in range(0, ranks, 2):
            other = rank + 1 if rank + 1 < ranks else 1
            for rows, giver, taker in ((first, rank, other), (second, other, rank)):
                moved = min(little, rows[giver] - 1)
                rows[giver] -= moved
                rows[taker] += moved
        needs = [self.appraiser.needs(with_shares(plan, rows)) for rows in (first, second)]
        found = []
        for rank, device in enumerate(plan.devices):
            points = sorted((rows[rank], need[device]) for rows, need in zip((first, second), needs, strict=True))
            (few, less), (many, more) = points
            found.append(largest_rows((few, many), (less, more), self.appraiser.budget[device], batch))
        return found

    def order(self, plan: Plan) -> tuple[str, ...]:
        """Blocks, those first that save most for their time on the plan's devices."""
        key = (self.appraiser.device[plan.devices[0]].name, plan.world_size, plan.micro_batches)
        if key not in self._orders:
            self._orders[key] = recomputable_order(self.footprint, self.block_seconds(plan))
        return self._orders[key]

    def least_recompute(self, plan: Plan, limit: Callable[[], float]) -> Plan | None:
        """The plan with the cheapest recomputed blocks that let it fit; None where it would be too slow, or all blocks don't suffice."""
        footprint, order = self.footprint, self.order(plan)

        def recomputing(count: int) -> Plan:
            return with_recompute(plan, footprint, order[:count])

        too_slow = self.appraiser.step_seconds(recomputing(1)) >= limit()
        if too_slow or self._lacks_in_parts(plan, self.parts, self.appraiser.holds):
            return None
        low, high = 0, len(order)
        lacks = {count: self.appraiser.lack(self.appraiser.needs(recomputing(count) if count else plan)) for count in (low, high)}
        probe = self._guess(plan, order, lacks[low])
        halve = False
        while high - low > 1:
            if not low < probe < high or halve:
                probe = (low + high) // 2
            width = high - low
            lacks[probe] = self.appraiser.lack(self.appraiser.needs(recomputing(probe)))
            if self.appraiser.holds(recomputing(probe)):
                high = probe
            else:
                low = probe
                if self.appraiser.step_seconds(recomputing(low)) >= limit():
                    return None
            # Try next where a straight line between the known points saves just enough; halve the interval where that doesn't help.
            slope = (lacks[low] - lacks[high]) / (high - low)
            probe = max(low + 1, min(high - 1, low + math.ceil(lacks[low] / slope))) if slope > 0 else 0
            halve = 2 * (high - low) > width and not halve
        if len(order) <= _FEW_BLOCKS:
            return self.cheaper_blocks(recomputing(high))
        return recomputing(high)

    def _guess(self, plan: Plan, order: Sequence[str], missing: int) -> int:
        """A guess at the number of blocks, by what they save on the rank with most samples."""
        footprint = self.appraiser.footprint_of(plan)
        whole = max(1, footprint.batch_size)
        share = -(-max(plan.rows(footprint.batch_size), default=1) // plan.micro_batches) / whole if footprint.batch_size else 1.0
        saved = {block.fqn: saved_bytes(block) for block in footprint.blocks}
        left = missing / (1 + footprint.margin)
        for count, fqn in enumerate(order, start=1):
            left -= saved[fqn] * share
            if left <= 0:
                return count
        return len(order)

    def cheaper_blocks(self, plan: Plan) -> Plan:
        """The plan with blocks dropped, or exchanged for cheaper ones, as long as it fits; then none can be dropped any more."""
        seconds = self.block_seconds(plan)
        bare = without_recompute(plan)
        chosen = list(plan.recompute)

        def holds(blocks: Sequence[str]) -> bool:
            return self.appraiser.holds(with_recompute(bare, self.footprint, blocks))

        for fqn in self._droppable(plan, seconds):
            rest = [other for other in chosen if other != fqn]
            if holds(rest):
                chosen = rest
        others = [block.fqn for block in recomputable(self.footprint)]
        if len(others) <= _FEW_BLOCKS:
            for fqn in sorted(chosen, key=lambda fqn: -seconds[fqn]):
                rest = [other for other in chosen if other != fqn]
                cheaper = [other for other in others if other not in chosen and seconds[other] < seconds[fqn] * (1 - 1e-9)]
                for other in sorted(cheaper, key=lambda fqn: seconds[fqn]):
                    if holds([*rest, other]):
                        chosen = [*rest, other]
                        break
        return with_recompute(bare, self.footprint, chosen) if set(chosen) != set(plan.recompute) else plan

    def _if_better(self, plan: Plan, rows: Sequence[int], seconds: float) -> Plan | None:
        """The plan with these samples for each rank if it is faster and fits, in as many parts or in more."""
        shared = with_shares(plan, rows)
        parts = [plan.micro_batches, *(count for count in (max(rows),) if 1 < plan.micro_batches < count)]
        for count in parts:
            trial = self.apart(shared, count)
            if self.appraiser.step_seconds(trial) >= seconds * (1 - 1e-9):
                return None
            if self.appraiser.holds(trial):
                return trial
        return None

    def saving(self, plan: Plan) -> Iterator[Plan]:
        """A plain plan, and the same with everything that saves memory."""
        for number in dict.fromkeys((1, self.parts(plan)[-1])):
            yield (divided := in_parts(plan, number))
            if self.recompute:
                yield with_recompute(divided, self.footprint, [block.fqn for block in recomputable(self.footprint)])

    def relieved(self, plan: Plan, devices: Iterable[str], count: int) -> Plan:
        """The plan with so many more recomputed blocks on each of these devices, the first ones: their activations are kept longest."""
        again, may = {*plan.recompute}, {block.fqn for block in recomputable(self.footprint)} if self.recompute else set[str]()
        for device in devices:
            own = engines.of(plan).own_blocks(self.footprint, plan, plan.devices.index(device))
            again.update(islice((fqn for fqn in own if fqn in may - again), count))
        return plan if len(again) == len(plan.recompute) else with_recompute(without_recompute(plan), self.footprint, again)

    @staticmethod
    def apart(plan: Plan, parts: int) -> Plan:
        """The plan with its batch in another number of parts."""
        if parts == plan.micro_batches:
            return plan
        return in_parts(replace(plan, micro_batches=1, reasons=_without(plan, _PARTS_REASON)), parts)

    def _droppable(self, plan: Plan, seconds: Mapping[str, float]) -> list[str]:
        """Recomputed blocks to try to drop, those first that take longest; of many equal ones, the first and the last."""
        if len(plan.recompute) <= _FEW_BLOCKS:
            return sorted(plan.recompute, key=lambda fqn: -seconds[fqn])
        saved = {block.fqn: saved_bytes(block) for block in self.footprint.blocks}
        ends: dict[tuple[float, int], list[str]] = {}
        for fqn in plan.recompute:
            ends.setdefault((seconds[fqn], saved[fqn]), []).append(fqn)
        chosen = [fqn for group in ends.values() for fqn in dict.fromkeys((group[-1], group[0]))]
        return sorted(chosen, key=lambda fqn: -seconds[fqn])[:_FEW_BLOCKS]

    def better_shares(self, plan: Plan, tries: int = 60) -> Plan:
        """The plan with samples moved from rank to rank, one at a time, as long as that makes it faster and it fits."""
        batch = self.footprint.batch_size
        if batch * plan.world_size > _MOST_DEALT:
            return plan
        rows, best = list(plan.rows(batch)), self.appraiser.step_seconds(plan)
        moved = True
        while moved and tries > 0:
            moved = False
            # From ranks with most work to those with least, one of each sort.
            busy = sorted(range(len(rows)), key=lambda rank: -rows[rank] / self.speed[plan.devices[rank]])
            for giver in busy[:3]:
                for taker in reversed(busy[-3:]):
                    if giver == taker or rows[giver] < 2 or tries <= 0:
                        continue
                    trial = [count - (rank == giver) + (rank == taker) for rank, count in enumerate(rows)]
                    tries -= 1
                    better = self._if_better(plan, trial, best)
                    if better is not None:
                        rows, plan, moved = trial, better, True
                        best = self.appraiser.step_seconds(plan)
                        break
                if moved:
                    break
        return plan


def with_shares(plan: Plan, rows: Sequence[int]) -> Plan:
    """The plan with so many samples of a batch for each rank."""
    reasons = _without(plan, _SHARES_REASON)
    if len(set(rows)) == 1:
        return replace(plan, shares=(), reasons=reasons)
    told = ":".join(map(str, rows)) if len(rows) <= 8 else f"{min(rows)} to {max(rows)} samples"
    return replace(plan, shares=tuple(rows), reasons=(*reasons, f"{_SHARES_REASON} by speed and free memory ({told})"))


_SHARES_REASON = "the batch is divided"
_PARTS_REASON = "each rank splits its samples into"


def without_recompute(plan: Plan) -> Plan:
    """The plan with nothing recomputed."""
    return replace(plan, recompute=(), reasons=_without(plan, "activations of "))


def _without(plan: Plan, beginning: str) -> tuple[str, ...]:
    """The plan's reasons, without those that begin with these words."""
    return tuple(reason for reason in plan.reasons if not reason.startswith(beginning))


def in_parts(plan: Plan, parts: int) -> Plan:
    """The plan with its batch in parts."""
    if parts == 1:
        return plan
    return replace(plan, micro_batches=parts, reasons=(*plan.reasons, f"{_PARTS_REASON} {parts} micro-batches, to save memory"))
