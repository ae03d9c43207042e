"""Footprint × Plan × Inventory → bytes per device by category. Arithmetic only: imports neither torch nor Lightning, and measures nothing.

The footprint is of one device and the whole batch; here is what each engine makes of it. The footprint's margin isn't added: the planner
does that. By moments, in well under a millisecond a plan; :mod:`replay` is slower, and knows the allocator.

Fullest moments outside of a training step: before the first one, in validation, while a checkpoint is saved; and the host's memory.

Arithmetic only: neither torch nor Lightning. Each function gives a rank's bytes then, None where a step always holds more.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from lightning_autopar.devices.inventory import Device, Inventory
from lightning_autopar.memory.device_bytes import DeviceBytes, HostBytes
from lightning_autopar.memory.footprint import Footprint, Remembered
from lightning_autopar.memory.moments import RNG_STATE_BYTES, Moments, moments_of
from lightning_autopar.memory.workspace import context_bytes, nccl_bytes, workspace_bytes
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.fsdp.memory import Widths, evaluation_communication, fsdp_bytes, resident_bytes, sharding_of
from lightning_autopar.strategies.pipeline.memory import pipeline_bytes, pipeline_evaluation
from lightning_autopar.strategies.zero.memory import zero_bytes, zero_host_bytes
from lightning_autopar.strategies.zero.settings import ZeroSettings

MIB = 1 << 20
#: DDP sends rank 0's weights in buffers of that size, two at a time (torch ``distributed.py``, ``broadcast_bucket_size``; ``comm.cpp``,
#: ``broadcast_coalesced``), where the ranks aren't forked from one process that has them.
_BROADCAST_BYTES = 250 * MIB
_BROADCASTS = 2


def start_bytes(footprint: Footprint, plan: Plan, step: DeviceBytes, *, rank: int, share: float, on_cpu: bool) -> DeviceBytes | None:
    """While replicas take over rank 0's weights."""
    if plan.engine != "ddp" or on_cpu:
        return None
    whole = footprint.parameter_bytes + footprint.buffer_bytes
    sent = min(whole, _BROADCASTS * _BROADCAST_BYTES)
    return DeviceBytes(parameters=footprint.parameter_bytes, buffers=footprint.buffer_bytes, communication=sent, occasion="start")


def validation_bytes(footprint: Footprint, plan: Plan, step: DeviceBytes, *, rank: int, share: float, on_cpu: bool) -> DeviceBytes | None:
    """A validation step between two training steps. Lightning has set the gradients to None (``on_validation_model_zero_grad``).

    DDP's buckets stay, and so does that of ZeRO's stage 3. A pipeline takes its part of the batch through its stages whole. None where the
    footprint knows of no validation.
    """
    if footprint.evaluation_bytes is None or not footprint.training:
        return None
    if plan.engine == "pipeline":
        runs, received = pipeline_evaluation(footprint, plan, rank, share)
        return replace(step, gradients=0, activations=0, temporary=runs, input=0, communication=received, occasion="validation")
    runs = round(footprint.evaluation_bytes * share)
    if plan.engine == "fsdp":
        sharding = sharding_of(footprint, plan, rank)
        begins, computes = evaluation_communication(sharding, reshard=bool(plan.reshard_after_forward))
        # While a block is gathered, what enters it is there, not what it makes.
        enters = round((max((block.input_bytes for block in footprint.blocks), default=0) + footprint.input_bytes) * share)
        communication, temporary = max((begins, min(enters, runs)), (computes, runs), key=sum)
        held = replace(resident_bytes(footprint, plan, sharding, share=0), communication=communication)
    elif plan.engine == "zero":
        # At stages 1 and 2 buckets and gradients are of a backward, but for the buffer through which one gradient goes to the host.
        passed = footprint.largest_parameter_bytes if "optimizer" in plan.offload else 0
        held, temporary = (step if plan.zero_stage == 3 else replace(step, gradients=0, communication=passed)), runs
    else:
        held, temporary = replace(step, gradients=footprint.gradient_bytes if plan.engine == "ddp" else 0), runs
    return replace(held, activations=0, temporary=temporary, input=0, occasion="validation")


def checkpoint_bytes(footprint: Footprint, plan: Plan, step: DeviceBytes, *, rank: int, share: float, on_cpu: bool) -> DeviceBytes | None:
    """While a checkpoint is saved after a step: shards are made whole, one tensor at a time (``state/checkpoint.py``).

    Gradients are there. ``DTensor.full_tensor`` pads a rank's part where it is shorter than the others', and gathers into a buffer of equal
    parts; gloo makes a copy of that. Other engines write what they hold as it is.
    """
    if plan.engine != "fsdp" or not footprint.training:
        return None
    sharding = sharding_of(footprint, plan, rank)
    held = resident_bytes(footprint, plan, sharding, share=share)
    gradients = 0 if "optimizer" in plan.offload else sharding.total.kept
    gathered = max(
        (_gathered_bytes(rows, row_bytes, sharding.shards, rank, on_cpu) for rows, row_bytes in _parameters(footprint)), default=0
    )
    return replace(held, gradients=gradients, communication=gathered, occasion="checkpoint")


def _parameters(footprint: Footprint) -> set[tuple[int, int]]:
    """Rows and bytes of a row of each parameter; the largest one as a single column where they aren't known."""
    layers = (*footprint.blocks, *footprint.outer)
    return _ROWS.get(
        footprint,
        None,
        lambda: (
            {(rows, row_bytes) for layer in layers for rows, row_bytes, _ in layer.parameter_rows}
            or {(footprint.largest_parameter_bytes, 1)}
        ),
    )


_ROWS: Remembered[set[tuple[int, int]]] = Remembered()


def _gathered_bytes(rows: int, row_bytes: int, shards: int, rank: int, copies: bool) -> int:
    """What it takes to make one tensor whole."""
    part = -(-rows // shards)
    short = rows - (rank % shards) * part < part
    return part * row_bytes * (shards * (1 + copies) + short)


def _locked_bytes(rows: int, row_bytes: int, learns: bool, shards: int) -> int:
    """Page-locked memory for a rank's part of a parameter, and of its gradient where it has one."""
    part = -(-rows // shards) * row_bytes
    return (1 + learns) * (1 << (part - 1).bit_length()) if part else 0


def _all_rows(footprint: Footprint) -> Counter[tuple[int, int, bool]]:
    """The rows of a parameter, their bytes, and whether it learns, with how many are such; all as one where they aren't known."""
    found = Counter(row for layer in (*footprint.blocks, *footprint.outer) for row in layer.parameter_rows)
    frozen = footprint.parameter_bytes - footprint.gradient_bytes
    return found or Counter([(1, footprint.gradient_bytes, True), (1, frozen, False)])


_ROWS_BY_SIZE: Remembered[Counter[tuple[int, int, bool]]] = Remembered()


def host_bytes(
    footprint: Footprint,
    plan: Plan,
    *,
    precision: str = "32-true",
    on_cpu: bool = False,
    workers: int = 0,
    resumes: bool = False,
) -> HostBytes:
    """What a plan takes of one host's memory at its fullest moment, if all of its ranks run there; CPU devices' own part isn't counted.

    A checkpoint holds parameters, buffers and optimizer state. Lightning writes it into memory (``_atomic_save``), then into the file.
    Where tensors are sharded, rank 0 makes one after the other whole, in a file that counts against nobody's memory
    (``state/scratch_files.py``), and writes them from there. For reading it, each replica takes the whole file; engines that shard map
    it.

    torch's allocator of page-locked memory rounds each tensor up to a power of two (``CachingHostAllocator``, ``c10::llvm::PowerOf2Ceil``);
    FSDP2 locks each shard and each gradient by itself.

    Args:
        footprint: of the module.
        plan: of any engine.
        precision: the Trainer's; it decides which copies DeepSpeed keeps.
        on_cpu: whether the devices are CPUs, which lock no pages.
        workers: the DataLoader's, on each rank.
        resumes: whether the run begins with a checkpoint.
    """
    state = footprint.parameter_bytes + footprint.buffer_bytes + (footprint.optimizer_bytes if footprint.training else 0)
    sharded = plan.engine in ("fsdp", "pipeline", "zero")
    saving = (0 if sharded else state) + footprint.largest_parameter_bytes
    loading = (0 if sharded else state * plan.world_size) if resumes else 0
    offload = pinned = 0
    if plan.engine == "zero":
        offload, pinned = (size * plan.world_size for size in zero_host_bytes(footprint, plan, precision=precision, on_cpu=on_cpu))
    if plan.engine == "fsdp" and plan.offload:
        sharding = sharding_of(footprint, plan)
        total, ranks = sharding.total, plan.world_size
        offload = footprint.optimizer_bytes * plan.replicas
        if on_cpu:
            offload += (total.shard + total.kept) * ranks
        else:
            rows = _ROWS_BY_SIZE.get(footprint, None, lambda: _all_rows(footprint))
            pinned = ranks * sum(count * _locked_bytes(*row, sharding.shards) for row, count in rows.items())
    return HostBytes(
        # Forked ranks share the pages of the module that the first process holds; one device takes it over.
        module=footprint.parameter_bytes + footprint.buffer_bytes if plan.world_size > 1 else 0,
        checkpoint=max(saving if footprint.training else 0, loading),
        # Each worker has two batches ready, and one is page-locked on its way.
        input=footprint.input_bytes * (2 * workers + 1),
        offload=offload,
        pinned=pinned,
    )


__all__ = ["DeviceBytes", "predict"]


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
    devices = map(inventory.device, plan.devices)
    models = ("cpu" if device.kind == "cpu" else device.name for device in devices)
    keys = list(zip(rows, models, _alike(plan, padded), strict=True))
    for key in dict.fromkeys(keys):
        rank = keys.index(key)
        device = inventory.device(plan.devices[rank])
        held = _fullest(footprint, plan, rank, rows[rank], recomputed, device, precision, widths or Widths(), zero)
        found[key] = _on_device(held, footprint, plan, device)
    return dict(zip(plan.devices, map(found.__getitem__, keys), strict=True))


def _least(footprint: Footprint) -> int:
    """Samples of a rank that gets none: it is fed one all the same, where there are samples."""
    return 1 if footprint.batch_size else 0


def _alike(plan: Plan, padded: bool) -> list[int]:
    """A number for each rank. Those with one number hold the same of as many samples: those in one place of their pipelines; of FSDP's all
    but the first, whose shards may be padded less; otherwise all.
    """
    if plan.engine == "pipeline":
        return [*range(plan.devices_per_replica)] * plan.replicas
    return [0, *[int(padded)] * (plan.world_size - 1)]


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
