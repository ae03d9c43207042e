"""Fullest moments outside of a training step: before the first one, in validation, while a checkpoint is saved; and the host's memory.

Arithmetic only: neither torch nor Lightning. Each function gives a rank's bytes then, None where a step always holds more.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_autopar.memory.device_bytes import DeviceBytes, HostBytes
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.pipeline_bytes import pipeline_evaluation
from lightning_autopar.memory.remembered import Remembered
from lightning_autopar.memory.sharded import evaluation_communication, resident_bytes, sharding_of
from lightning_autopar.memory.zero_bytes import zero_host_bytes
from lightning_autopar.plans import Plan

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


def _all_rows(footprint: Footprint) -> list[tuple[int, int, bool]]:
    """Of each parameter the rows, their bytes, and whether it learns; all as one where they aren't known."""
    layers = (*footprint.blocks, *footprint.outer)
    frozen = footprint.parameter_bytes - footprint.gradient_bytes
    return [row for layer in layers for row in layer.parameter_rows] or [(1, footprint.gradient_bytes, True), (1, frozen, False)]


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
    Where tensors are sharded, rank 0 makes one after the other whole, in a file that counts against nobody's memory (``state/scratch.py``),
    and writes them from there. For reading it, each replica takes the whole file; engines that shard map it.

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
            pinned = ranks * sum(_locked_bytes(*row, sharding.shards) for row in _all_rows(footprint))
    return HostBytes(
        # Forked ranks share the pages of the module that the first process holds; one device takes it over.
        module=footprint.parameter_bytes + footprint.buffer_bytes if plan.world_size > 1 else 0,
        checkpoint=max(saving if footprint.training else 0, loading),
        # Each worker has two batches ready, and one is page-locked on its way.
        input=footprint.input_bytes * (2 * workers + 1),
        offload=offload,
        pinned=pinned,
    )
