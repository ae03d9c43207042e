"""Which plans exist for a footprint and an inventory, and why others don't.

Must not know how many bytes a plan needs: whether it fits is the search's question, and so is what to do where it doesn't. Pipelines, whose
cuts depend on both, are :mod:`pipelines`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_autopar.constraints import Constraints, Objective, SplitFinding, check_allow
from lightning_autopar.devices.inventory import Device, Inventory
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.planning import refusals as runnable
from lightning_autopar.planning.block_units import recomputable_order, shardable, with_recompute
from lightning_autopar.planning.device_sets import device_sets, freest_first, islands, one_of_each_gpu, single_sets
from lightning_autopar.planning.refusals import (
    Feature,
    engine_refusal,
    feature_refusal,
    multi_refusal,
    norm_notes,
    own_refusal,
    split_notes,
    split_refusal,
    world_notes,
)
from lightning_autopar.plans import BUILT_ENGINES, ENGINES, OFFLOADS, ZERO_STAGES, Engine, Offload, Plan

__all__ = [
    "Constraints",
    "Objective",
    "Option",
    "SplitFinding",
    "Variant",
    "build_plan",
    "check_allow",
    "enumerate_candidates",
    "micro_batch_counts",
    "notes_of",
    "recomputable_order",
    "ruled_out",
    "shardable",
    "variant_runs",
    "variants",
    "with_recompute",
]

#: Up to how many devices any number of copies of the model is tried.
_FEW_DEVICES = 16


@dataclass(frozen=True, kw_only=True)
class Option:
    """A plan that could be meant, and in ``rejection`` the sentence that says why it can't be taken, if it can't."""

    plan: Plan
    rejection: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to run on given devices, but for what is done where memory is short. Arguments as a plan's."""

    engine: Engine
    reshard_after_forward: bool | None = None
    zero_stage: int | None = None
    offload: tuple[Offload, ...] = ()
    replicas: int = 1


def enumerate_candidates(
    footprint: Footprint,
    inventory: Inventory,
    constraints: Constraints,
    *,
    speed: Mapping[str, float] | None = None,
    keep: Callable[[Variant], bool] = lambda _: True,
    sets: Sequence[Sequence[Device]] | None = None,
) -> Iterator[Option]:
    """Every engine's variants on every set of devices worth a look; pipelines aren't among them. What is ruled out is :func:`ruled_out`'s.

    Args:
        footprint: what a step needs.
        inventory: the devices; at least one.
        constraints: whose ``pinned`` is the planner's business, not read here.
        speed: of each device by id, in any unit; unless given, devices count as equally fast.
        keep: which variants are wanted.
        sets: of devices; unless given, all that are worth a look.
    """
    speed = speed or {device.id: 1.0 for device in inventory.devices}
    alone: Sequence[Sequence[Device]] = single_sets(inventory, constraints, speed)
    several = sets
    if several is None:
        several = device_sets(footprint.batch_size, inventory, constraints, speed)
    else:
        alone = [devices for devices in sets or () if len(devices) == 1]
    together = multi_refusal(footprint, inventory, constraints) is None
    for engine in ENGINES:
        if own_refusal(engine, footprint, inventory, constraints) is not None:
            continue
        for devices in (*alone, *(several if together and engine != "single" else ())):
            if len(devices) < (constraints.min_devices or 1):
                continue
            for variant in variants(engine, devices, footprint, inventory, constraints):
                # What lies in host memory needs no second device. Who leaves "single" out of allow wants the several that there are.
                alone_too = engine == "single" or (variant.offload and ("single" in constraints.allow or len(inventory.devices) == 1))
                if keep(variant) and (len(devices) > 1 or alone_too):
                    plan = build_plan(variant, devices, footprint, inventory, constraints)
                    yield Option(plan=plan, notes=notes_of(plan, footprint, constraints))


def ruled_out(footprint: Footprint, inventory: Inventory, constraints: Constraints) -> Iterator[Option]:
    """What no plan may be or do, a plan that stands for all of them with the sentence that says why."""
    for engine in ENGINES:
        refusal = engine_refusal(engine, footprint, inventory, constraints)
        if refusal is not None and (engine in BUILT_ENGINES or engine in constraints.allow):
            plan = _widest(engine, footprint, inventory, constraints)
            # On one device no pipeline can be written down: nobody misses it who allows other engines.
            if plan.engine == engine or len(constraints.allow) == 1:
                yield Option(plan=plan, rejection=refusal)
        if engine == "zero" and refusal is None and "zero_3" in constraints.excluded:
            plan = replace(_widest(engine, footprint, inventory, constraints), zero_stage=3)
            yield Option(plan=plan, rejection=constraints.excluded["zero_3"])
    if footprint.batch_size > 1 and footprint.training and "single" in constraints.allow:
        refusal = feature_refusal("micro_batches", footprint, constraints)
        if refusal is not None and split_refusal(constraints) is None and constraints.split_batch:
            plan = replace(_widest("single", footprint, inventory, constraints), micro_batches=2)
            yield Option(plan=plan, rejection=refusal)


def variants(
    engine: Engine, devices: Sequence[Device], footprint: Footprint, inventory: Inventory, constraints: Constraints
) -> list[Variant]:
    """An engine's on these devices, those that take more memory and less time first; none of a pipeline.

    Args:
        engine: one that isn't refused.
        devices: of one kind.
        footprint: what a step needs.
        inventory: whose links say where copies of the model should lie.
        constraints: what is ruled out.
    """
    if engine in ("single", "ddp"):
        return [Variant(engine=engine)]
    offloads = feature_refusal("offload", footprint, constraints) is None
    if engine == "zero":
        found = [Variant(engine=engine, zero_stage=stage) for stage in ZERO_STAGES]
        if offloads:
            found += [Variant(engine=engine, zero_stage=stage, offload=("optimizer",)) for stage in (2, 3)]
            found.append(Variant(engine=engine, zero_stage=3, offload=OFFLOADS))
        return [variant for variant in found if variant.zero_stage != 3 or "zero_3" not in constraints.excluded]
    if engine != "fsdp":
        return []
    copies = [1]
    if feature_refusal("replicas", footprint, constraints) is None:
        copies += _copies(devices, inventory)
    return [
        Variant(engine=engine, reshard_after_forward=reshard, replicas=count, offload=offload)
        for offload in (((), OFFLOADS) if offloads else ((),))
        for count in copies
        for reshard in (False, True)
    ]


def variant_runs(variant: Variant, constraints: Constraints) -> bool:
    """Whether this version can run it."""
    needed: tuple[tuple[bool, Feature], ...] = ((variant.replicas > 1, "replicas"), (bool(variant.offload), "offload"))
    return runnable.engine_runs(variant.engine, constraints.allow) and all(feature in runnable.RUNS for asked, feature in needed if asked)


def _copies(devices: Sequence[Device], inventory: Inventory) -> list[int]:
    """How many copies of the model hybrid sharding may have: one a node, or one an island of well linked devices, and half as many; of few
    devices on one node any number that divides theirs.
    """
    found: list[int] = []
    nodes: dict[int, list[Device]] = {}
    for device in devices:
        nodes.setdefault(device.node, []).append(device)
    groups: list[list[Device]] = list(nodes.values())
    if len(groups) == 1:
        groups = islands(inventory, devices)
    if len(groups) == 1 and len(devices) <= _FEW_DEVICES:
        return [count for count in range(len(devices) // 2, 1, -1) if len(devices) % count == 0]
    if len({len(group) for group in groups}) != 1:
        return []
    count = len(groups)
    while count > 1 and count < len(devices):
        found.append(count)
        if count % 2:
            break
        count //= 2
    return found[:2]


def micro_batch_counts(rows: int) -> list[int]:
    """Into how many parts so many samples may be taken apart: of those with which the largest part is as large, the fewest."""
    return sorted({-(-rows // size) for size in range(1, rows + 1)}) or [1]


def notes_of(plan: Plan, footprint: Footprint, constraints: Constraints) -> tuple[str, ...]:
    """What a reader should know of a plan, a sentence each."""
    own = constraints.pipeline_notes if plan.engine == "pipeline" else ()
    if plan.micro_batches > 1:
        own = (*norm_notes(footprint, constraints), *own)
    if plan.data_ranks == 1:
        return (*(split_notes(constraints) if plan.micro_batches > 1 else ()), *own)
    return (*own, *split_notes(constraints), *world_notes(footprint, constraints))


def build_plan(variant: Variant, devices: Sequence[Device], footprint: Footprint, inventory: Inventory, constraints: Constraints) -> Plan:
    """The plan of a variant on these devices, ranks in the inventory's order; the ranks of a copy of the model next to each other.

    Where the batch can't be shared evenly the first ranks get a sample more; then the freest devices of a node come first,
    unless the ranks have their devices already.
    """
    chosen = {device.id for device in devices}
    ranks = [device for device in inventory.devices if device.id in chosen]
    if variant.replicas > 1:
        ranks = _by_copies(ranks, inventory)
    elif constraints.split_batch and constraints.min_devices is None and footprint.batch_size % len(ranks):
        ranks.sort(key=lambda device: (device.node, -constraints.budget_bytes(device)))
    reasons = [ENGINE_REASONS[variant.engine] if variant.zero_stage is None else _STAGE_REASONS[variant.zero_stage]]
    if len(ranks) > 1 and not constraints.split_batch:
        reasons.append(f"each rank takes a batch of its own, so that a step is over {len(ranks)} batches")
    if len(ranks) > 1 and footprint.batch_norm:
        reasons.append(f"the statistics of {len(footprint.batch_norm)} batch norms are taken over all ranks, as over the whole batch")
    shard: tuple[str, ...] = ()
    if variant.engine == "fsdp":
        shard, left_out = shardable(footprint)
        if left_out:
            reasons.append(f"{', '.join(left_out)} not sharded as units of their own: other code has or uses their parameters")
        if variant.reshard_after_forward:
            reasons.append("parameters are freed between forward and backward, for memory, and gathered a second time")
        else:
            reasons.append("gathered parameters are kept for backward, which saves gathering them a second time")
        if variant.replicas > 1:
            reasons.append(
                f"{variant.replicas} copies of the model: parameters are gathered where links are fast, gradients alone go further"
            )
    if variant.offload:
        lies = "lie" if len(variant.offload) > 1 else "lies"
        kinds = " and ".join(f"torch's {kind}" for kind in footprint.optimizer_classes)
        reasons.append(
            f"{' and '.join(variant.offload)} {lies} in host memory between uses" + (f"; {kinds} updates there" if kinds else "")
        )
    return Plan(
        engine=variant.engine,
        devices=tuple(device.id for device in ranks),
        reshard_after_forward=variant.reshard_after_forward,
        shard=shard,
        zero_stage=variant.zero_stage,
        offload=variant.offload,
        replicas=variant.replicas,
        reasons=tuple(reasons),
    )


def _by_copies(ranks: Sequence[Device], inventory: Inventory) -> list[Device]:
    """Devices of a node together, and on one node those of an island."""
    if len({device.node for device in ranks}) > 1:
        return sorted(ranks, key=lambda device: device.node)
    return [device for island in islands(inventory, ranks) for device in island]


ENGINE_REASONS: Mapping[Engine, str] = {
    "single": "one device: nothing to communicate",
    "ddp": "a replica on each device: gradients alone are communicated",
    "fsdp": "parameters, gradients and optimizer state are sharded: each device holds its part",
    "zero": "DeepSpeed partitions the optimizer's state",
    "pipeline": "blocks are spread over the devices",
}
_STAGE_REASONS: Mapping[int, str] = {
    1: "DeepSpeed partitions the optimizer's state: each device updates its part of the parameters",
    2: "DeepSpeed partitions the optimizer's state and the gradients: each device updates its part of the parameters",
    3: "DeepSpeed partitions parameters, gradients and the optimizer's state, and gathers parameters module by module",
}


def _widest(engine: Engine, footprint: Footprint, inventory: Inventory, constraints: Constraints) -> Plan:
    """A plan that stands in the report for all of an engine's that are ruled out."""
    freest = freest_first(inventory.devices, constraints)
    same = one_of_each_gpu([device for device in freest if device.kind == freest[0].kind])
    devices = same[:1] if engine == "single" else same[: constraints.max_devices or len(same)]
    blocks = footprint.blocks
    if engine == "pipeline":
        devices = devices[: max(2, len(blocks))]
        plan = build_plan(Variant(engine="single"), devices[:1], footprint, inventory, constraints)
        if len(devices) == 1:  # No pipeline can be written down.
            return plan
        names = [block.fqn for block in blocks] if len(blocks) > 1 else ["", "(no block)"]
        cuts = tuple(names[len(names) * stage // len(devices)] for stage in range(1, len(devices)))
        ids = tuple(device.id for device in devices)
        return replace(plan, engine=engine, devices=ids, cuts=cuts, schedule="gpipe", reasons=(ENGINE_REASONS[engine],))
    settings = {"fsdp": Variant(engine=engine, reshard_after_forward=True), "zero": Variant(engine=engine, zero_stage=2)}
    return build_plan(settings.get(engine, Variant(engine=engine)), devices, footprint, inventory, constraints)
