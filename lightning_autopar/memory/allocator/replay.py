"""Footprint × Plan × rank → what torch's allocator holds, by playing the tape of the step to a model of it.

Slower than :mod:`~lightning_autopar.planning.memory` (tenths of a second instead of microseconds), for the plans that matter: what is
reserved depends on the order of allocations, and fragments are left by the steps before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_autopar.memory.allocator.caching_allocator import CachingAllocator, OutOfDeviceMemory
from lightning_autopar.memory.allocator.device import Category, Machine
from lightning_autopar.memory.allocator.options import AllocatorOptions
from lightning_autopar.memory.allocator.play import Buckets, Whole, parts_of
from lightning_autopar.memory.allocator.tape_parts import Script, read_script
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.play_stages import Stages
from lightning_autopar.plans import Engine, Plan
from lightning_autopar.strategies.fsdp.memory import Widths
from lightning_autopar.strategies.fsdp.replay import Shards
from lightning_autopar.strategies.pipeline.schedules import rank_actions

#: The engines whose ranks can be played.
REPLAYED_ENGINES: tuple[Engine, ...] = ("single", "ddp", "fsdp", "pipeline")
#: The first step finds no optimizer state. The free blocks that a step leaves scattered may force a later step to reserve one more segment.
#: So steps are played until one leaves the allocator as it found it, and at most so many.
_MOST_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What came of a replay.

    Args:
        allocated_peak_bytes: the most that was allocated, rounded as torch counts it; where it doesn't fit, up to then.
        reserved_peak_bytes: the most that was reserved.
        by_category: of the allocated peak.
        fits: whether the steps went through under the limit.
        retries: how often the allocator had to give back all its unused segments, each of which costs a synchronisation.
        missing_bytes: by how much what was asked for went over the limit; 0 where it fits.
    """

    allocated_peak_bytes: int
    reserved_peak_bytes: int
    by_category: Mapping[Category, int] = field(default_factory=dict)
    fits: bool = True
    retries: int = 0
    missing_bytes: int = 0


def replay(
    footprint: Footprint,
    plan: Plan,
    rank: int,
    *,
    limit_bytes: int | None = None,
    options: AllocatorOptions | None = None,
    rows: int | None = None,
    workspaces: Sequence[int] = (),
    script: Script | None = None,
    widths: Widths | None = None,
) -> Replayed:
    """Play a rank's start and its first steps to the allocator.

    Args:
        footprint: with its tape, at the traced batch.
        plan: of one of :data:`REPLAYED_ENGINES`.
        rank: whose.
        limit_bytes: the most that may be reserved; None: no limit.
        options: the allocator's settings; torch's defaults unless given.
        rows: samples that the rank takes; by default its share of the traced batch.
        workspaces: what libraries take of the allocator beside the tape: forward's thread, then backward's.
        script: the footprint's tape as :func:`~lightning_autopar.memory.allocator.tape_parts.read_script` gives it, where it is at hand.
        widths: what FSDP2's mixed precision makes of parameters and gradients; as they were traced, unless given.

    Raises:
        ValueError: if the footprint has no tape, or the plan can't be played.
    """
    if footprint.tape is None:
        raise ValueError("the step wasn't traced, so there is nothing to replay; use memory.predict")
    if plan.engine not in REPLAYED_ENGINES:
        raise ValueError(f"a rank of engine {plan.engine!r} can't be replayed; only of {', '.join(REPLAYED_ENGINES)}")
    if plan.engine == "pipeline" and plan.replicas > 1:
        raise ValueError("pipelines side by side can't be replayed; use memory.predict")
    assert 0 <= rank < plan.world_size, "a rank of the plan"
    if rows is None:
        rows = max(1, plan.rows(footprint.batch_size)[rank]) if footprint.batch_size else 0
    allocator = CachingAllocator(limit_bytes=limit_bytes, options=options)
    machine = Machine(allocator)
    player = _player(machine, script or read_script(footprint.tape), footprint, plan, rank, rows, widths or Widths())
    player.workspaces = workspaces
    missing = 0
    try:
        player.start()
        layout: object = None
        for _ in range(_MOST_STEPS):
            player.step()
            before, layout = layout, allocator.layout()
            if layout == before:
                break
    except OutOfDeviceMemory as error:
        missing = max(1, error.reserved_bytes + error.requested_bytes - error.limit_bytes)
    return Replayed(
        allocated_peak_bytes=allocator.peak_allocated_bytes,
        reserved_peak_bytes=allocator.peak_reserved_bytes,
        by_category=machine.fullest,
        fits=not missing,
        retries=allocator.retries,
        missing_bytes=missing,
    )


def _player(machine: Machine, script: Script, footprint: Footprint, plan: Plan, rank: int, rows: int, widths: Widths) -> Whole:
    """The rank, by the plan's engine."""
    index = {block.fqn: number for number, block in enumerate(footprint.blocks)}
    recompute = frozenset(index[fqn] for fqn in plan.recompute)
    micro = parts_of(rows, plan.micro_batches)
    if plan.engine == "fsdp":
        group = plan.world_size // plan.replicas
        return Shards(
            machine,
            script,
            footprint,
            micro,
            recompute,
            units=[index[fqn] for fqn in plan.shard],
            rank=rank % group,
            world_size=group,
            reshard=bool(plan.reshard_after_forward),
            widths=widths,
        )
    if plan.engine == "pipeline":
        assert plan.schedule is not None, "a pipeline has one"
        borders = [0, *(2 * index[fqn] + 1 for fqn in plan.cuts), 2 * len(footprint.blocks) + 1]
        actions = rank_actions(plan.schedule, rank, plan.world_size, len(plan.cuts) + 1, len(micro))
        return Stages(machine, script, footprint, micro, recompute, borders=borders, actions=actions, schedule=plan.schedule)
    engine = Buckets if plan.engine == "ddp" else Whole
    return engine(machine, script, footprint, micro, recompute)
