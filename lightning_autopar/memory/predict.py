"""Footprint × Plan × Inventory → bytes per device by category. Arithmetic only: imports neither torch nor Lightning, and measures nothing.

The footprint is of one device and the whole batch; here is what each engine makes of it. The footprint's margin isn't added: the planner
does that. By moments, in well under a millisecond a plan; :mod:`replay` is slower, and knows the allocator.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lightning_autopar.memory.device_bytes import DeviceBytes
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.inventory import Device, Inventory
from lightning_autopar.memory.moments import RNG_STATE_BYTES, Moments, moments_of
from lightning_autopar.memory.occasions import checkpoint_bytes, start_bytes, validation_bytes
from lightning_autopar.memory.pipeline_bytes import pipeline_bytes
from lightning_autopar.memory.remembered import Remembered
from lightning_autopar.memory.sharded import Widths, fsdp_bytes, sharding_of
from lightning_autopar.memory.workspace import context_bytes, nccl_bytes, workspace_bytes
from lightning_autopar.memory.zero_bytes import zero_bytes
from lightning_autopar.memory.zero_settings import ZeroSettings
from lightning_autopar.plans import Plan

__all__ = ["DeviceBytes", "predict"]

MIB = 1 << 20

#: What the caching allocator holds beyond what it hands out. A replay of its policy on traces of 124M to 7B models gave 1.03 to 1.21 times
#: the allocated bytes; tiny models more, for which a constant stands (the segments are of 2 and 20 MiB).
ROUNDING_SHARE = 0.1
ROUNDING_BYTES = 22 * MIB


def predict(
    footprint: Footprint,
    plan: Plan,
    inventory: Inventory,
    *,
    precision: str = "32-true",
    widths: Widths | None = None,
    zero: ZeroSettings | None = None,
) -> dict[str, DeviceBytes]:
    """What each device of the plan holds at its fullest moment: of a step, a validation, a checkpoint, or before the first step.

    Args:
        footprint: of the module, at the whole batch.
        plan: of any engine.
        inventory: has the plan's devices.
        precision: the Trainer's; it decides which copies DeepSpeed keeps.
        widths: what FSDP2's mixed precision makes of parameters and gradients; as they were traced, unless given.
        zero: DeepSpeed's settings; Lightning's, unless given.

    Returns:
        The bytes by device id, in the plan's order.

    Raises:
        ValueError: if the plan names a block or a device that isn't there.
    """
    known = {block.fqn: index for index, block in enumerate(footprint.blocks)}
    for fqn in (*plan.recompute, *plan.shard, *plan.cuts):
        if fqn not in known:
            raise ValueError(
                f"the plan names the block {fqn!r}, but the footprint has {', '.join(known) or 'no blocks'}; plan again for this module"
            )
    recomputed = frozenset(known[fqn] for fqn in plan.recompute)
    rows = [count or _least(footprint) for count in plan.rows(footprint.batch_size)]
    padded = plan.engine == "fsdp" and plan.world_size > 1 and _padded(footprint, plan)
    found: dict[tuple[int, str, int], DeviceBytes] = {}
    result = {}
    for rank, device_id in enumerate(plan.devices):
        device = inventory.device(device_id)
        key = rows[rank], "cpu" if device.kind == "cpu" else device.name, _alike(plan, rank, padded)
        if key not in found:
            held = _fullest(footprint, plan, rank, rows[rank], recomputed, device, precision, widths or Widths(), zero)
            found[key] = _on_device(held, footprint, plan, device)
        result[device_id] = found[key]
    return result


def _least(footprint: Footprint) -> int:
    """Samples of a rank that gets none: it is fed one all the same, where there are samples."""
    return 1 if footprint.batch_size else 0


def _alike(plan: Plan, rank: int, padded: bool) -> int:
    """Ranks with one number hold the same of as many samples: those in one place of their pipelines; of FSDP's all but the first, whose
    shards may be padded less; otherwise all.
    """
    if plan.engine == "pipeline":
        return rank % plan.devices_per_replica
    return min(rank, 1) if padded else 0


def _padded(footprint: Footprint, plan: Plan) -> bool:
    """Whether the last rank has less of a parameter than the first: nobody has more of any than the first, nor less than the last."""
    last = plan.devices_per_replica - 1
    return sharding_of(footprint, plan, 0).total.own != sharding_of(footprint, plan, last).total.own


def _fullest(
    footprint: Footprint,
    plan: Plan,
    rank: int,
    rows: int,
    recomputed: frozenset[int],
    device: Device,
    precision: str,
    widths: Widths,
    zero: ZeroSettings | None,
) -> DeviceBytes:
    """The fullest of a rank's occasions."""
    on_cpu = device.kind == "cpu"
    share = rows / footprint.batch_size if footprint.batch_size else 1.0
    if plan.engine == "zero":
        step = zero_bytes(footprint, plan, share=share, precision=precision, on_cpu=on_cpu, settings=zero)
    elif plan.engine == "pipeline":
        step = pipeline_bytes(footprint, plan, rank, on_cpu=on_cpu)
    else:
        parts = max(1, plan.micro_batches)
        once = -(-rows // parts) / footprint.batch_size if footprint.batch_size else 1.0 / parts
        # A GPU's recomputed blocks keep the state of random numbers in host memory, which a CPU device's own is.
        random_bytes = RNG_STATE_BYTES if on_cpu else 0
        key = recomputed, once, random_bytes
        moments = _MOMENTS.get(footprint, key, lambda: moments_of(footprint, recomputed, once, random_bytes=random_bytes))
        if plan.engine == "fsdp":
            step = fsdp_bytes(footprint, plan, moments, rank=rank, share=share, copies=on_cpu, widths=widths)
        else:
            step = _whole(footprint, plan, moments, share)
    others = (occasion(footprint, plan, step, rank=rank, share=share, on_cpu=on_cpu) for occasion in _OCCASIONS)
    return max((step, *(held for held in others if held is not None)), key=lambda held: held.allocated)


#: Ranks that differ in their shards alone have the same moments, and so have plans that differ in their engine.
_MOMENTS: Remembered[Moments] = Remembered(8)
_OCCASIONS = (start_bytes, validation_bytes, checkpoint_bytes)


def _whole(footprint: Footprint, plan: Plan, moments: Moments, share: float) -> DeviceBytes:
    """One device, or replicas of it: everything is there.

    DDP's buckets hold every gradient all the time (``gradient_as_bucket_view``), and are reduced in place. They are built once: with
    ``find_unused_parameters`` they aren't rebuilt after the first step (``reducer.hpp``, ``should_rebuild_buckets``). Under ``no_sync``
    (Lightning's accumulation) gradients lie beside the buckets until the last batch's backward moves them there. Where a batch is worked
    off in parts, the gradients of the first are there all the time, too; parts add up in DDP's buckets.
    """
    gradients = moments.gradients
    if plan.engine == "ddp" or plan.micro_batches > 1:
        waiting = np.where(moments.waiting, moments.gradients, 0) if plan.engine == "ddp" and plan.micro_batches == 1 else 0
        gradients = footprint.gradient_bytes + np.zeros_like(moments.gradients) + waiting
    sums = gradients + moments.activations + moments.temporary
    place = int(np.argmax(sums))
    return DeviceBytes(
        parameters=footprint.parameter_bytes,
        gradients=int(gradients[place]),
        optimizer=footprint.optimizer_bytes,
        activations=int(moments.activations[place]),
        temporary=int(moments.temporary[place]),
        buffers=footprint.buffer_bytes,
        input=round(footprint.input_bytes * share),
        updates=not (moments.forward[place] or moments.backward[place]),
    )


def _on_device(held: DeviceBytes, footprint: Footprint, plan: Plan, device: Device) -> DeviceBytes:
    """The same with what lies around it on that kind of device; a CPU's allocator gives back what is freed."""
    if device.kind == "cpu":
        return held
    held = replace(held, workspace=workspace_bytes(footprint, device.name))
    return replace(
        held,
        context=context_bytes(device.name) + nccl_bytes(*communicators(plan)),
        rounding=int(held.allocated * ROUNDING_SHARE) + ROUNDING_BYTES,
    )


def communicators(plan: Plan) -> tuple[int, ...]:
    """How many devices each of NCCL's communicators has that one device of the plan is in.

    All ranks have one. DeepSpeed makes another of all ranks (``groups.py``, ``_clone_world_group``); a mesh of replicas and of what each
    of them consists of has one for each dimension.
    """
    sizes = [plan.world_size]
    if plan.engine == "zero":
        sizes.append(plan.world_size)
    elif plan.engine in ("fsdp", "pipeline") and plan.replicas > 1:
        sizes += [plan.replicas, plan.devices_per_replica]
    return tuple(sizes)
