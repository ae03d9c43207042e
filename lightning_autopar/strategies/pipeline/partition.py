"""Bytes and seconds of every stage that a pipeline could have, as sums over its blocks, and the best cuts: the search asks thousands of
times.

The bytes mean what :mod:`.memory`'s mean, without what doesn't add up: tensors that live across a cut count where they are made, and
buffers that a schedule holds for a moment don't count. The exact prediction then checks the chosen cut. Cuts come from a dynamic programme
over blocks, in the manner of PipeDream (https://arxiv.org/abs/1806.03377). Arithmetic only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lightning_autopar.memory.footprint import Footprint, FootprintCache, LayerFootprint
from lightning_autopar.memory.step_parts import StepPart, parts_of
from lightning_autopar.plans import INTERLEAVED, Schedule
from lightning_autopar.strategies.pipeline.memory import micro_batch_copy_bytes

Table = npt.NDArray[np.float64]
Column = npt.NDArray[np.float64]
#: Stages a rank has under the interleaved schedule.
LOCAL = 2


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Stages of a pipeline.

    Args:
        starts: index of the block with which each stage begins; the first is 0.
        slowest_seconds: of the stage that takes longest.
        total_seconds: of all stages together.
    """

    starts: tuple[int, ...]
    slowest_seconds: float
    total_seconds: float


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A pipeline before its cuts and its recomputed blocks are chosen."""

    schedule: Schedule
    ranks: int
    replicas: int
    micro_batches: int
    sharded: bool

    @property
    def local(self) -> int:
        """The stages of a rank."""
        return LOCAL if self.schedule in INTERLEAVED else 1

    @property
    def stages(self) -> int:
        """The stages of all ranks."""
        return self.ranks * self.local

    def seconds(self, found: Partition) -> float:
        """Seconds of a step: the slowest stage works without a pause, between filling and draining."""
        more = self.micro_batches - 1
        if self.schedule in INTERLEAVED:
            return found.total_seconds / LOCAL + more * found.slowest_seconds * LOCAL
        return found.total_seconds + more * found.slowest_seconds

    def least_seconds(self, total_seconds: float) -> float:
        """A lower bound for every cut: the seconds of a step whose stages are equally fast and send nothing."""
        return self.seconds(Partition(starts=(), slowest_seconds=total_seconds / self.stages, total_seconds=total_seconds))


def partition(seconds: Sequence[Table], cuttable: Sequence[bool] | None = None) -> Partition | None:
    """The stages whose slowest is fastest, and among those the ones with the least total; None where there are none. Takes time
    proportional to the stages and to the square of the blocks.

    Args:
        seconds: for each stage, in order, a table of ``blocks + 1`` rows and columns: its seconds for the blocks from row up to, not
            including, column; infinite where the device lacks the memory. A stage has at least one block.
        cuttable: for each block, whether a stage may begin with it; all unless given. The first one's isn't read.
    """
    blocks, most = len(seconds[0]) - 1, len(seconds[0]) - len(seconds)
    if most < 1:
        return None
    barred = np.zeros(blocks + 1)
    if cuttable is not None:
        barred[1:blocks] = np.where(cuttable, 0.0, np.inf)[1:]
    # As each other stage has a block at least, a stage begins with one of so many blocks.
    later = np.where(np.triu(np.ones((most, most), dtype=bool)), 0.0, np.inf)
    tables = [table[stage : stage + most, stage + 1 : stage + 1 + most] + later for stage, table in enumerate(seconds)]
    slowest = total = np.where(np.arange(most), np.inf, 0.0)
    for stage, table in enumerate(tables, 1):
        slowest = np.maximum(slowest[:, None], table).min(axis=0) + barred[stage : stage + most]
    bound = slowest[-1]
    if not np.isfinite(bound):
        return None
    came_from = []
    for stage, table in enumerate(tables, 1):
        sums = total[:, None] + np.where(table <= bound, table, np.inf)
        came_from.append(sums.argmin(axis=0))
        total = sums.min(axis=0) + barred[stage : stage + most]
    starts, end = [], most - 1
    for stage, chosen in reversed([*enumerate(came_from)]):
        end = int(chosen[end])
        starts.append(stage + end)
    return Partition(starts=tuple(reversed(starts)), slowest_seconds=float(bound), total_seconds=float(total[-1]))


def moves(starts: Sequence[int], until: Column, pace: Sequence[float], cuttable: Sequence[bool]) -> Iterator[list[int]]:
    """Cuts with one or two blocks moved from one stage to another. The stages between them keep their size.

    Those come first that leave the busiest rank least work; of these, those that leave least to the busiest round, the first stages of
    all ranks or their second. For this order, a moved block takes as long as one does on the average.

    Args:
        starts: the block with which each stage but the first begins.
        until: the seconds of all blocks before each one, and of all.
        pace: by how much longer each rank takes.
    """
    ends = np.array([0, *starts, len(until) - 1])
    sizes, work, ranks = np.diff(ends), np.diff(until[ends]), len(pace)
    stages = len(work)
    giver, taker, count = (axis.ravel() for axis in np.indices((stages, stages, 3)))
    giver, taker, count = (axis[(giver != taker) & (count > 0) & (sizes[giver] > count)] for axis in (giver, taker, count))

    def busiest(owner: npt.NDArray[np.int64], pace: Column) -> Column:
        """The largest sum of work after each move, where stages are summed by their owner."""
        sums = np.repeat(np.bincount(owner, work)[None], len(giver), axis=0)
        moved, each = count * until[-1] / (len(until) - 1), np.arange(len(giver))
        sums[each, owner[giver]] -= moved
        sums[each, owner[taker]] += moved
        found: Column = (sums * pace).max(axis=1).round(9)
        return found

    numbers = np.arange(stages)
    rounds = busiest(numbers // ranks, np.ones(-(-stages // ranks)))
    for move in np.lexsort((abs(giver - taker), rounds, busiest(numbers % ranks, np.array(pace)))):
        a, b, blocks = int(giver[move]), int(taker[move]), int(count[move])
        moved = [start - blocks * (a <= cut < b) + blocks * (b <= cut < a) for cut, start in enumerate(starts)]
        if all(cuttable[start] for start in moved):
            yield moved


def in_flight(schedule: Schedule, stage: int, stages: int, ranks: int, micro_batches: int) -> int:
    """How many micro-batches a stage holds at once, at most.

    Args:
        stage: counted from the front.
        ranks: of the pipeline; several stages a rank under the interleaved schedule.
    """
    if schedule == "gpipe":
        return micro_batches
    if schedule in INTERLEAVED:
        local = stages // ranks
        ahead = min(local * micro_batches, (local - 1) * ranks + 2 * (ranks - 1 - stage % ranks) + 1)
        return max(1, -(-ahead // local))
    return min(micro_batches, stages - stage)


def lingers(schedule: Schedule, stage: int, stages: int, micro_batches: int) -> bool:
    """Whether what a stage has sent on of a micro-batch stays on when that is over (:mod:`.memory`)."""
    return schedule == "1f1b" and stage < stages - 1 and micro_batches > 2 * (stages - stage) - 2


@dataclass(frozen=True, kw_only=True)
class StageTables:
    """The bytes of stages, by their first block (row) and the one after their last (column); activations are those of a micro-batch.

    Args:
        parameters: of the module, tied copies included.
        states: these and the optimizer's state.
        gradients: complete ones.
        held: between a micro-batch's forward and its backward, with what the stage received.
        peak: at the fullest moment of a forward or a backward, complete gradients not counted.
        passed: what is received and sent of a micro-batch, by the first block and the one after the last.
        sent: the latter alone, by the one after the last.
        whole: what is whole on every rank of a replica: its batch, and what belongs to no part.
        known: what :meth:`needs` has worked out, by its arguments but the first.
    """

    parameters: Table
    states: Table
    gradients: Table
    buffers: Table
    held: Table
    peak: Table
    passed: Table
    sent: Table
    whole: float
    known: dict[tuple[int, bool], Table] = field(default_factory=dict)

    def needs(
        self,
        flight: int,
        shards: int = 1,
        *,
        whole: bool = False,
        lingers: bool = False,
        blocks: tuple[int, int] | slice = slice(None),
    ) -> Table:
        """Bytes of a stage at a place of a schedule.

        Args:
            flight: how many micro-batches it holds at once (:func:`in_flight`).
            shards: over how many replicas its states are cut.
            whole: whether the batch is a single micro-batch. Then gradients are complete as activations go, and not there before: the
                larger of both counts, which is the least that may be.
            blocks: the first block and the one after the last; the whole table unless given.
        """
        found: Table = self._once(shards, whole)[blocks] + (flight - 1) * self.held[blocks]
        return found + self.sent[blocks] if lingers else found

    def _once(self, shards: int, whole: bool) -> Table:
        """Bytes of a stage that holds one micro-batch at once, worked out once."""
        if (shards, whole) not in self.known:
            beyond = np.maximum(self.peak - self.held, 0)
            saved = np.minimum(self.gradients, self.held + beyond) if whole else 0
            self.known[shards, whole] = self.holding(shards) + beyond + self.passed - saved
        return self.known[shards, whole]

    def holding(self, shards: int = 1) -> Table:
        """The part of that which a stage holds between a single micro-batch's forward and its backward."""
        found: Table = self.states / shards + self.gradients + self.buffers + self.held + self.whole
        return found if shards == 1 else found + self.parameters  # they stay gathered during the step


def stage_tables(footprint: Footprint, share: float, rows_share: float, *, recompute: bool) -> StageTables:
    """The tables of a footprint that was traced.

    Args:
        share: a micro-batch's part of it.
        rows_share: a replica's part of it.
        recompute: whether all blocks that can be are recomputed.
    """
    assert footprint.tape is not None, "asked before"
    blocks = len(footprint.blocks)
    parts = parts_of(footprint.tape, blocks)
    layers = [(footprint.blocks[number // 2] if number % 2 else footprint.outer[number // 2]) for number in range(len(parts))]
    kept, running = _COLUMNS.get(footprint, (share, recompute), lambda: _part_bytes(parts, layers, share, recompute))
    also = np.zeros((3, len(parts)))
    for use in footprint.also_uses:
        also[:, 2 * use[0]] += use[2:5]
    edges = np.array([0, *(2 * index + 1 for index in range(1, blocks)), len(parts)])
    before = np.concatenate([[0.0], np.cumsum(kept)])

    def between(values: Sequence[float] | Column) -> Table:
        sums = np.concatenate([[0.0], np.cumsum(values)])[edges]
        return np.asarray(sums[None, :] - sums[:, None], dtype=np.float64)

    # A row for each block: the fullest moment from there up to each part.
    later = np.where(np.arange(len(parts)) >= edges[:-1, None], before[:-1] - before[edges[:-1], None] + running, -np.inf)
    peak = np.zeros((blocks + 1, blocks + 1))
    peak[:-1, 1:] = np.triu(np.maximum.accumulate(later, axis=1)[:, edges[1:] - 1])
    received = np.array([0.0, *(sum(one.size.at(share) for one in parts[edge].crossing) for edge in edges[1:-1]), 0.0])
    anew = np.array([0.0, *(parts[edge].anew.at(share) for edge in edges[1:-1]), 0.0])
    enters = anew + received
    if footprint.training and share < rows_share:
        enters[0] += micro_batch_copy_bytes(footprint, round(share * footprint.batch_size))
    parameters = np.array([layer.parameter_bytes for layer in layers]) + also[0]
    return StageTables(
        parameters=between(parameters),
        states=between(parameters + [layer.optimizer_bytes for layer in layers] + also[2]),
        gradients=between(np.array([layer.gradient_bytes for layer in layers]) + also[1]),
        buffers=between([layer.buffer_bytes for layer in layers]),
        held=between(kept) + enters[:, None],
        peak=peak + enters[:, None],
        passed=received[:, None] + received[None, :],
        sent=np.broadcast_to(received, (blocks + 1, blocks + 1)),
        whole=footprint.partless_buffer_bytes + round(footprint.input_bytes * rows_share),
    )


#: Pipelines on other numbers of devices have micro-batches of the same sizes.
_COLUMNS: FootprintCache[tuple[Column, Column]] = FootprintCache(2048)


def _part_bytes(parts: Sequence[StepPart], layers: Sequence[LayerFootprint], share: float, recompute: bool) -> tuple[Column, Column]:
    """For each part, the bytes that it keeps for backward, and those of its fullest moment beyond what earlier parts keep."""
    lent_to = np.zeros(len(parts))
    for part in parts:
        for until, size in part.lent.items():
            lent_to[until] += size.at(share)
    kept, running = np.zeros(len(parts)), np.zeros(len(parts))
    for number, (part, layer) in enumerate(zip(parts, layers, strict=True)):
        inner = part.inner.at(share)
        forward, backward = part.forward_given.at(share), part.backward[True, True].at(share) - lent_to[number]
        if recompute and number % 2 and layer.recomputable:
            inner = round(layer.input_extra_bytes * share)
            backward = max(backward + inner, inner + part.forward.at(share) + part.returns.at(share))
        kept[number] = inner + sum(size.at(share) for size in part.lent.values())
        running[number] = max(forward, backward)
    return kept, running


def stage_seconds(part_seconds: Sequence[float], send_seconds: Callable[[int], float], footprint: Footprint, share: float) -> Table:
    """Seconds of stages for one micro-batch, forward and backward: of their parts, and of sending what they received, there and back.

    Args:
        part_seconds: of each part of the step, for one micro-batch, on the stage's device.
        send_seconds: of so many bytes to the next stage.
    """
    assert footprint.tape is not None, "asked before"
    blocks = len(footprint.blocks)
    parts = parts_of(footprint.tape, blocks)
    edges = np.array([0, *(2 * index + 1 for index in range(1, blocks)), len(parts)])
    sums = np.concatenate([[0.0], np.cumsum(part_seconds)])[edges]
    sizes = [sum(one.size.at(share) for one in parts[edge].crossing) for edge in edges[1:-1]]
    known = {size: 2 * send_seconds(size) for size in set(sizes)}
    received = np.array([0.0, *(known[size] for size in sizes), 0.0])
    found: Table = sums[None, :] - sums[:, None] + received[:, None]
    return found
