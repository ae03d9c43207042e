"""Which plans exist for a footprint and an inventory, and why others don't.

Must not know how many bytes a plan needs: whether it fits is the planner's question.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from lightning_autopar.memory.allocator_options import AllocatorOptions
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.inventory import Device, Inventory
from lightning_autopar.memory.residuals import Residuals
from lightning_autopar.planning.timing import RateSource, catalogue_rates, idle_share, pair_bandwidths
from lightning_autopar.plans import BUILT_ENGINES, ENGINES, Engine, Plan

Objective = Literal["speed", "memory"]
#: A relative difference of losses up to this is floating-point reassociation.
SPLIT_TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True)
class SplitFinding:
    """What was found out about splitting the first batch over ranks.

    Args:
        difference: by how much the loss of the split batch differs from the whole batch's, relative to it; NaN where
            either isn't finite.
        reason: why it can't be split, or couldn't be probed, or differs: one sentence.
        splittable: whether the batch can be taken apart into samples.
        probed: whether the losses were compared. If not, the difference is unknown where there is a reason, and of no
            interest where there is none: the step has no loss to compare.
        subject: what differs: the loss, or something that the step writes.
        log_rules: how ranks' logged values make the whole batch's, by hook and name.
        notes: further sentences for whoever reads of a plan that splits the batch.
        uneven_calls: FQNs of the submodules that a part of the batch calls more or less often than the whole.
    """

    difference: float = 0.0
    reason: str | None = None
    splittable: bool = True
    probed: bool = True
    log_rules: Mapping[tuple[str, str], str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    uneven_calls: tuple[str, ...] = ()
    subject: str = "loss"


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """What a plan must keep to.

    Args:
        allow: engines that may be chosen.
        max_devices: at most so many devices at once; None for all there are.
        min_devices: at least so many, where so many processes were started already.
        memory_limit_bytes: at most so much of each device; None for all that is free.
        memory_margin: share of each device's free memory (or of the limit) that is left alone, 0 to below 1.
        objective: ``"speed"``: fewest seconds a step; ``"memory"``: fewest bytes on the fullest device.
        exact: whether a plan may be chosen that is not known to compute the whole batch's loss.
        pinned: the plan to take; nothing else is considered.
        excluded: engines that this run can't use, with the sentence that says why; ``"multi"`` stands for every plan
            with several devices.
        split: what was found out about splitting the batch; None where there was nothing to find out.
        split_batch: whether ranks share the batch; if not, each takes a whole one, as in Lightning's own strategies.
        precision: Lightning's name of the precision, for the speed of devices.
        residuals: what earlier runs of the module were measured to take, by which predictions are corrected.
        allocator: settings of torch's allocator on the devices.

    Raises:
        ValueError: if a value is out of its bounds.
    """

    allow: tuple[Engine, ...] = BUILT_ENGINES
    max_devices: int | None = None
    min_devices: int | None = None
    memory_limit_bytes: int | None = None
    memory_margin: float = 0.05
    objective: Objective = "speed"
    exact: bool = False
    pinned: Plan | None = None
    excluded: Mapping[str, str] = field(default_factory=dict)
    split: SplitFinding | None = None
    split_batch: bool = True
    precision: str = "32-true"
    allocator: AllocatorOptions = field(default_factory=AllocatorOptions)
    residuals: Residuals = field(default_factory=Residuals)

    def __post_init__(self) -> None:
        check_allow(self.allow)
        if self.max_devices is not None and self.max_devices < 1:
            raise ValueError(f"max_devices={self.max_devices} leaves no device; it must be at least 1, or None for all")
        if self.min_devices is not None and self.max_devices is not None and self.min_devices > self.max_devices:
            raise ValueError(f"{self.min_devices} processes were started, but the run may use {self.max_devices} devices; start as many")
        if self.memory_limit_bytes is not None and self.memory_limit_bytes <= 0:
            raise ValueError(f"a memory limit must be positive, but is {self.memory_limit_bytes} bytes; None means no limit")
        if not 0 <= self.memory_margin < 1:
            raise ValueError(f"memory_margin={self.memory_margin!r} must be at least 0 and below 1; 0.05 leaves 5 % of each device alone")
        if self.objective not in ("speed", "memory"):
            raise ValueError(f"objective={self.objective!r} is unknown; choose 'speed' or 'memory'")
        if unknown := sorted(set(self.excluded) - {*ENGINES, "multi"}):
            raise AssertionError(f"excluded names {unknown[0]!r}, which is no engine")

    def budget_bytes(self, device: Device) -> int:
        """What a plan may use of a device: what is free, or the limit if that is less, less the margin."""
        limit = device.free_bytes if self.memory_limit_bytes is None else min(device.free_bytes, self.memory_limit_bytes)
        return int(limit * (1 - self.memory_margin))


@dataclass(frozen=True, kw_only=True)
class Option:
    """A plan that could be meant, and in ``rejection`` the sentence that says why it can't be taken, if it can't."""

    plan: Plan
    rejection: str | None = None
    notes: tuple[str, ...] = ()


def check_allow(allow: str | Sequence[str]) -> tuple[Engine, ...]:
    """The engines of a user's ``allow``, each once, in order; a single name may stand by itself.

    Raises:
        ValueError: if it is empty or names an unknown engine, saying which there are.
    """
    names = (allow,) if isinstance(allow, str) else tuple(allow)
    choices = ", ".join(repr(engine) for engine in ENGINES)
    known: dict[str, Engine] = {engine: engine for engine in ENGINES}
    if not names:
        raise ValueError(f"allow={allow!r} leaves no engine; name at least one of {choices}, or leave it out for all that are built")
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(str(name).lower(), ENGINES, n=1)
            remedy = f"did you mean {close[0]!r}?" if close else "name one of those, or leave allow out"
            raise ValueError(f"allow={list(names)!r} names the unknown engine {name!r}; the engines are {choices}: {remedy}")
    return tuple(dict.fromkeys(known[name] for name in names))


def enumerate_candidates(
    footprint: Footprint, inventory: Inventory, constraints: Constraints, *, rates: RateSource | None = None
) -> Iterator[Option]:
    """Every plan worth a prediction, without recomputation and with all of it, and what is ruled out from the start.

    Where ranks have the same need, of all sets of n devices that are at least so fast and linked at least so well, the n
    freest fit if any do. So for each speed and each bandwidth that occurs, the prefixes of the devices in order of their
    budgets hold a best set.

    Args:
        footprint: what a step needs.
        inventory: the devices; at least one.
        constraints: whose ``pinned`` is the planner's business, not read here.
        rates: as for :func:`lightning_autopar.planning.timing.predict_seconds`.
    """
    speed = device_speeds(inventory, constraints, rates)
    for engine in ENGINES:
        refusal = engine_refusal(engine, footprint, inventory, constraints)
        if refusal is not None:
            if engine in BUILT_ENGINES or engine in constraints.allow:
                yield Option(plan=_widest(engine, footprint, inventory, constraints), rejection=refusal)
            continue
        sets = single_sets(inventory, constraints, speed) if engine == "single" else device_sets(footprint, inventory, constraints, speed)
        notes = () if engine == "single" else (*split_notes(constraints), *_world_notes(footprint, constraints))
        for devices in sets:
            for reshard in (True, False) if engine == "fsdp" else (None,):
                plan = build_plan(engine, devices, footprint, inventory, constraints, reshard=reshard)
                yield Option(plan=plan, notes=notes)
                if everything := recomputable_order(footprint):
                    yield Option(plan=with_recompute(plan, footprint, len(everything)), notes=notes)


def engine_refusal(engine: Engine, footprint: Footprint, inventory: Inventory, constraints: Constraints) -> str | None:
    """Why no plan of this engine is a candidate; None if some are."""
    if engine not in constraints.allow:
        return f"not in allow={list(constraints.allow)!r}"
    if engine not in BUILT_ENGINES:
        return f"engine {engine!r} is not built yet"
    if engine in constraints.excluded:
        return constraints.excluded[engine]
    if engine != "single":
        return multi_refusal(footprint, inventory, constraints)
    if (constraints.min_devices or 1) > 1:
        return f"{constraints.min_devices} processes were started, and each has to have a device"
    return None


def multi_refusal(footprint: Footprint, inventory: Inventory, constraints: Constraints) -> str | None:
    """Why no plan with several devices is a candidate; None if some are."""
    if "multi" in constraints.excluded:
        return constraints.excluded["multi"]
    kinds = [device.kind for device in inventory.devices]
    if max(kinds.count(kind) for kind in kinds) < 2:
        one = inventory.devices[0].id if len(kinds) == 1 else "of each kind"
        return f"needs at least two devices of one kind, but there is one: {one}"
    if constraints.max_devices == 1:
        return "needs at least two devices, but the run may use only one"
    if not constraints.split_batch:
        return None
    if footprint.batch_size == 0:
        return "the batch has no batch dimension, so it can't be split over ranks"
    if footprint.batch_size == 1:
        return "a batch of 1 sample can't be split over ranks"
    if footprint.batch_size < (constraints.min_devices or 1):
        return f"a batch of {footprint.batch_size} samples can't be split over the {constraints.min_devices} processes that were started"
    return split_refusal(constraints)


def split_refusal(constraints: Constraints) -> str | None:
    """Why the batch must not be split; None if it may."""
    split = constraints.split
    if split is None:
        return None
    if not split.splittable:
        return split.reason or "the batch can't be taken apart into samples"
    if not constraints.exact:
        return None
    if not split.probed:
        return f"exact=True, and whether splitting the batch changes its loss is not known ({split.reason})" if split.reason else None
    if not split.difference <= SPLIT_TOLERANCE:  # NaN is a difference too
        return f"exact=True, and {_difference_words(split)}"
    return None


def split_notes(constraints: Constraints) -> tuple[str, ...]:
    """What a reader should know of a plan that splits the batch."""
    split = constraints.split
    if split is None or not constraints.split_batch:
        return ()
    if not split.probed:
        return (f"whether splitting the batch changes its loss is not known ({split.reason})",) if split.reason else ()
    if not split.difference <= SPLIT_TOLERANCE:
        return (f"{_difference_words(split)}; exact=True rules such plans out", *split.notes)
    return split.notes


def _world_notes(footprint: Footprint, constraints: Constraints) -> tuple[str, ...]:
    """What a reader should know where the module computes with the number of devices."""
    if not footprint.asks_for_world or not constraints.split_batch:
        return ()
    return (
        "the module asks its trainer for world_size or num_devices, which is 1 on one device and not here; the batch is split, not "
        "multiplied, so that a learning rate needs no scaling by it",
    )


def _difference_words(split: SplitFinding) -> str:
    """By how much the loss changes, and why if that is known."""
    size = f"the split batch's {split.subject} differs from the whole batch's by {split.difference:.2g} of it"
    if split.difference != split.difference:
        size = "the split batch's loss and the whole batch's can't be compared, as one isn't finite"
    return f"{size} ({split.reason})" if split.reason else size


def build_plan(
    engine: Engine,
    devices: Sequence[Device],
    footprint: Footprint,
    inventory: Inventory,
    constraints: Constraints,
    *,
    reshard: bool | None = None,
) -> Plan:
    """The plan of an engine on these devices, ranks in the inventory's order.

    Where the batch can't be shared evenly the first ranks get a sample more; then the freest devices of a node come first,
    unless the ranks have their devices already.
    """
    chosen = {device.id for device in devices}
    ranks = [device for device in inventory.devices if device.id in chosen]
    if constraints.split_batch and constraints.min_devices is None and footprint.batch_size % len(ranks):
        ranks.sort(key=lambda device: (device.node, -constraints.budget_bytes(device)))
    reasons = [_ENGINE_REASONS[engine]]
    if len(ranks) > 1 and not constraints.split_batch:
        reasons.append(f"each rank takes a batch of its own, so that a step is over {len(ranks)} batches")
    if len(ranks) > 1 and footprint.batch_norm:
        reasons.append(f"the statistics of {len(footprint.batch_norm)} batch norms are taken over all ranks, as over the whole batch")
    shard: tuple[str, ...] = ()
    if engine == "fsdp":
        shard, left_out = shardable(footprint)
        if left_out:
            reasons.append(f"{', '.join(left_out)} not sharded as units of their own: they share parameters with other modules")
        if reshard:
            reasons.append("parameters are freed between forward and backward, for memory, and gathered a second time")
        else:
            reasons.append("gathered parameters are kept for backward, which saves gathering them a second time")
    return Plan(
        engine=engine,
        devices=tuple(device.id for device in ranks),
        reshard_after_forward=reshard if engine == "fsdp" else None,
        shard=shard,
        zero_stage=2 if engine == "zero" else None,
        reasons=tuple(reasons),
    )


_ENGINE_REASONS: Mapping[Engine, str] = {
    "single": "one device: nothing to communicate",
    "ddp": "a replica on each device: gradients alone are communicated",
    "fsdp": "parameters, gradients and optimizer state are sharded: each device holds its part",
    "zero": "optimizer state is partitioned",
    "pipeline": "blocks are spread over the devices",
}


def shardable(footprint: Footprint) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Blocks that can be units of FSDP, and those that can't: one that shares a parameter with what lies outside it."""
    units: list[str] = []
    left_out: list[str] = []
    for block in footprint.blocks:
        inside = f"{block.fqn}."
        crosses = any(0 < sum(f"{fqn}.".startswith(inside) for fqn in group) < len(group) for group in footprint.tied)
        (left_out if crosses else units).append(block.fqn)
    return tuple(units), tuple(left_out)


def recomputable_order(footprint: Footprint) -> tuple[str, ...]:
    """FQNs of the blocks that recomputation may take, those first that save most bytes for their FLOPs.

    Among equals the earlier block comes first: its activations are kept longest, and at the peak, when forward ends, every
    block counts the same, while what a later block recomputes would lie on top of what the earlier ones still hold.
    """
    if not footprint.training:
        return ()
    saving = [block for block in footprint.blocks if block.recomputable and block.activation_bytes > block.input_bytes]
    saving.sort(key=lambda block: -(block.activation_bytes - block.input_bytes) / max(1, block.flops))
    return tuple(block.fqn for block in saving)


def with_recompute(plan: Plan, footprint: Footprint, count: int) -> Plan:
    """The plan with the first ``count`` blocks of :func:`recomputable_order` recomputed, in the order in which they run."""
    order = recomputable_order(footprint)
    chosen = set(order[:count])
    whole = "all" if count == len(order) else "only so many as it takes to fit"
    reason = f"activations of {count} of {len(footprint.blocks)} blocks are recomputed in backward ({whole}), for memory"
    recompute = tuple(block.fqn for block in footprint.blocks if block.fqn in chosen)
    return replace(plan, recompute=recompute, reasons=(*plan.reasons, reason) if recompute else plan.reasons)


def device_speeds(inventory: Inventory, constraints: Constraints, rates: RateSource | None = None) -> dict[str, float]:
    """FLOP/s that each device has to spare, by id."""
    source = rates or catalogue_rates
    return {device.id: source(device, constraints.precision).flops_per_second * idle_share(device) for device in inventory.devices}


def single_sets(inventory: Inventory, constraints: Constraints, speed: Mapping[str, float]) -> list[tuple[Device, ...]]:
    """Of the devices that are alike, the freest; each by itself."""
    best: dict[tuple[object, ...], Device] = {}
    for device in _freest_first(inventory.devices, constraints):
        best.setdefault((device.kind, device.name, device.total_bytes, speed[device.id]), device)
    return [(device,) for device in best.values()]


def device_sets(
    footprint: Footprint, inventory: Inventory, constraints: Constraints, speed: Mapping[str, float]
) -> list[tuple[Device, ...]]:
    """Sets of two or more devices of one kind among which is a best one, smaller sets first."""
    most = min(len(inventory.devices), constraints.max_devices or len(inventory.devices))
    if constraints.split_batch:
        most = min(most, footprint.batch_size)
    least = max(2, constraints.min_devices or 2)
    sets: dict[frozenset[str], tuple[Device, ...]] = {}
    for kind in dict.fromkeys(device.kind for device in inventory.devices):
        ordered = _freest_first([device for device in inventory.devices if device.kind == kind], constraints)
        for pool in _pools(ordered, inventory, speed):
            for size in range(least, min(most, len(pool)) + 1):
                chosen = tuple(pool[:size])
                sets.setdefault(frozenset(device.id for device in chosen), chosen)
    return sorted(sets.values(), key=len)


def _freest_first(devices: Sequence[Device], constraints: Constraints) -> list[Device]:
    """By budget; equal ones by who else is busy there, then in a fixed order, so that the inventory's order decides nothing."""
    return sorted(
        devices,
        key=lambda device: (
            -constraints.budget_bytes(device),
            device.utilization or 0.0,
            len(device.processes),
            device.node,
            -1 if device.index is None else device.index,
            device.id,
        ),
    )


def _pools(ordered: Sequence[Device], inventory: Inventory, speed: Mapping[str, float]) -> Iterator[list[Device]]:
    """The devices of at least each speed that occurs, and of those the groups that each bandwidth that occurs connects."""
    bandwidth = pair_bandwidths(inventory, tuple(device.id for device in ordered))
    thresholds = sorted(set(bandwidth.values()), reverse=True)
    seen: set[frozenset[str]] = set()
    for slowest in sorted({speed[device.id] for device in ordered}, reverse=True):
        fast = [device for device in ordered if speed[device.id] >= slowest]
        for threshold in thresholds:
            for pool in _connected(fast, bandwidth, threshold):
                key = frozenset(device.id for device in pool)
                if len(pool) > 1 and key not in seen:
                    seen.add(key)
                    yield pool


def _connected(devices: Sequence[Device], bandwidth: Mapping[tuple[str, str], float], threshold: float) -> list[list[Device]]:
    """Groups within which links of at least the threshold reach everywhere, each in the given order."""
    groups: list[list[Device]] = []
    left = list(devices)
    while left:
        reached = {left[0].id}
        frontier = [left[0].id]
        while frontier:
            here = frontier.pop()
            near = [device.id for device in left if device.id not in reached and bandwidth[here, device.id] >= threshold]
            reached.update(near)
            frontier += near
        groups.append([device for device in left if device.id in reached])
        left = [device for device in left if device.id not in reached]
    return groups


def _widest(engine: Engine, footprint: Footprint, inventory: Inventory, constraints: Constraints) -> Plan:
    """A plan that stands in the report for all of an engine's that are ruled out."""
    freest = _freest_first(inventory.devices, constraints)
    same = [device for device in freest if device.kind == freest[0].kind]
    devices = same[:1] if engine == "single" else same[: constraints.max_devices or len(same)]
    blocks = footprint.blocks
    if engine == "pipeline":
        devices = devices[: max(1, len(blocks))]
        if len(devices) == 1:  # No pipeline can be written down.
            return build_plan("single", devices, footprint, inventory, constraints, reshard=True)
        cuts = tuple(blocks[len(blocks) * stage // len(devices)].fqn for stage in range(1, len(devices)))
        plan = build_plan("single", devices[:1], footprint, inventory, constraints, reshard=True)
        ids = tuple(device.id for device in devices)
        return replace(plan, engine=engine, devices=ids, cuts=cuts, schedule="1f1b", reasons=(_ENGINE_REASONS[engine],))
    return build_plan(engine, devices, footprint, inventory, constraints, reshard=True)
