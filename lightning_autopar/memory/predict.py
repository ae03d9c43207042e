"""Footprint × Plan × Inventory → bytes per device by category. Arithmetic only: imports neither torch nor Lightning, and measures nothing.

The footprint is of one device and the whole batch; here is what each engine makes of it. The footprint's margin isn't added: the planner
does that.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from lightning_autopar.memory.footprint import Footprint, LayerFootprint, Moment
from lightning_autopar.memory.inventory import Inventory
from lightning_autopar.plans import Plan

MIB = 1 << 20

#: Of a process on a GPU before its first tensor: CUDA context, cuBLAS and cuDNN handles. Seen: 400 to 600 MiB from A100 to H200.
CONTEXT_BYTES = 500 * MIB
#: NCCL's buffers, outside of torch's allocator: 544 MB for a group of two GPUs, 688 MB beyond (https://github.com/NVIDIA/nccl/issues/964).
NCCL_BYTES = 600 * MIB
#: What the caching allocator holds beyond what it hands out. A replay of its policy on traces of 124M to 7B models gave 1.03 to 1.21 times
#: the allocated bytes; tiny models more, for which a constant stands (the segments are of 2 and 20 MiB).
ROUNDING_SHARE = 0.1
ROUNDING_BYTES = 22 * MIB


@dataclass(frozen=True, kw_only=True)
class DeviceBytes:
    """What one device holds at the fullest moment of a step, by category.

    Args:
        parameters: its part of the parameters, as they are between steps.
        gradients: complete gradients at that moment; there may be none of them yet, if forward's end is the peak.
        optimizer: its part of the optimizers' state.
        activations: tensors that forward made and that are still there.
        temporary: the rest of the peak: gradients of activations, gradients in the making, the optimizer's scratch.
        buffers: the module's buffers.
        input: its part of the batch.
        communication: FSDP's gathered parameters and its buffers for collectives.
        context: what lies outside of torch's allocator: the CUDA context and NCCL's buffers.
        rounding: what the allocator holds and can't hand out.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    temporary: int = 0
    buffers: int = 0
    input: int = 0
    communication: int = 0
    context: int = 0
    rounding: int = 0

    @property
    def allocated(self) -> int:
        """Bytes of tensors at the peak: ``torch.cuda.max_memory_allocated`` on a GPU."""
        everything: int = sum(getattr(self, field.name) for field in dataclasses.fields(self))
        return everything - self.context - self.rounding

    @property
    def reserved(self) -> int:
        """Bytes that the device must have free for the process: all of it."""
        return self.allocated + self.rounding + self.context

    def to_dict(self) -> dict[str, Any]:
        """The categories by name, with ``allocated`` and ``reserved``."""
        return {**dataclasses.asdict(self), "allocated": self.allocated, "reserved": self.reserved}


def predict(footprint: Footprint, plan: Plan, inventory: Inventory) -> dict[str, DeviceBytes]:
    """What each device of the plan holds at the peak of a step.

    Args:
        footprint: of the module, at the whole batch.
        plan: single, ddp or fsdp.
        inventory: has the plan's devices.

    Returns:
        The bytes by device id, in the plan's order.

    Raises:
        ValueError: if the plan's engine isn't one of those, or it names a block or a device that isn't there.
    """
    if plan.engine not in _ENGINES:
        raise ValueError(f"the memory of engine {plan.engine!r} can't be predicted; only that of {', '.join(_ENGINES)}")
    known = {block.fqn: index for index, block in enumerate(footprint.blocks)}
    for fqn in (*plan.recompute, *plan.shard):
        if fqn not in known:
            raise ValueError(
                f"the plan names the block {fqn!r}, but the footprint has {', '.join(known) or 'no blocks'}; plan again for this module"
            )
    recomputed = frozenset(known[fqn] for fqn in plan.recompute)
    found: dict[tuple[int, bool], DeviceBytes] = {}
    result = {}
    for rank, device_id in enumerate(plan.devices):
        kind = inventory.device(device_id).kind
        key = _rows(footprint.batch_size, rank, plan.world_size), kind == "cpu"
        if key not in found:
            share = key[0] / footprint.batch_size if footprint.batch_size else 1.0
            moments = [_recompute(moment, footprint, recomputed, share) for moment in _moments(footprint, recomputed)]
            engine = _ENGINES[plan.engine]
            found[key] = max((engine(footprint, plan, moment, share, key[1]) for moment in moments), key=lambda held: held.allocated)
        result[device_id] = _on_device(found[key], kind, plan.world_size)
    return result


def _rows(batch_size: int, rank: int, world_size: int) -> int:
    """Samples of the batch that a rank gets: every ``world_size``-th, and one at least, as a rank without any is fed one all the same."""
    return max(1, -(-(batch_size - rank) // world_size)) if batch_size else 0


def _on_device(held: DeviceBytes, kind: str, world_size: int) -> DeviceBytes:
    """The same with what lies around it on that kind of device; a CPU's allocator gives back what is freed."""
    if kind == "cpu":
        return held
    return dataclasses.replace(
        held,
        context=CONTEXT_BYTES + (NCCL_BYTES if world_size > 1 else 0),
        rounding=int(held.allocated * ROUNDING_SHARE) + ROUNDING_BYTES,
    )


def _moments(footprint: Footprint, recomputed: frozenset[int]) -> tuple[Moment, ...]:
    """The footprint's moments and the end of backward, when FSDP reduces; without them one at which everything is there at once."""
    if footprint.moments:
        return (*footprint.moments, Moment(phase="reduce", gradient_bytes=footprint.gradient_bytes))
    again = max((footprint.blocks[index].activation_bytes for index in recomputed), default=0)
    return (
        Moment(
            phase="forward",
            held=len(footprint.blocks),
            gradient_bytes=footprint.gradient_bytes,
            activation_bytes=footprint.activation_bytes + again,
            temporary_bytes=footprint.temporary_bytes,
        ),
    )


@dataclass(frozen=True)
class _Held:
    """A moment on one rank: activations and temporary are of its share of the batch."""

    phase: str
    held: int
    running: bool
    gradients: int
    activations: int
    temporary: int


def _recompute(moment: Moment, footprint: Footprint, recomputed: frozenset[int], share: float) -> _Held:
    """The moment on a rank's share, with the recomputed blocks' activations gone before their backward and after their forward."""
    scaled = moment.activation_bytes
    fixed = moment.fixed_bytes
    for index in recomputed:
        block = footprint.blocks[index]
        if index < moment.held:
            scaled -= block.activation_bytes - block.fixed_bytes
            scaled += block.input_extra_bytes
            fixed -= block.fixed_bytes
        elif index == moment.held and moment.phase == "backward":
            scaled += block.input_extra_bytes
    activations = max(0, scaled)
    return _Held(
        phase=moment.phase,
        held=moment.held,
        running=moment.running,
        gradients=moment.gradient_bytes,
        activations=round(activations * share),
        temporary=round(moment.temporary_bytes * share) + max(0, fixed),
    )


def _single(footprint: Footprint, plan: Plan, moment: _Held, share: float, cpu: bool) -> DeviceBytes:
    """One device holds everything."""
    return DeviceBytes(
        parameters=footprint.parameter_bytes,
        gradients=moment.gradients,
        optimizer=footprint.optimizer_bytes,
        activations=moment.activations,
        temporary=moment.temporary,
        buffers=footprint.buffer_bytes,
        input=round(footprint.input_bytes * share),
    )


def _ddp(footprint: Footprint, plan: Plan, moment: _Held, share: float, cpu: bool) -> DeviceBytes:
    """Replicas: as one device, but the gradients' buckets (``gradient_as_bucket_view``) are always there; they are reduced in place."""
    return dataclasses.replace(_single(footprint, plan, moment, share, cpu), gradients=footprint.gradient_bytes)


def _fsdp(footprint: Footprint, plan: Plan, moment: _Held, share: float, cpu: bool) -> DeviceBytes:
    """Shards: 1/W of parameters, gradients and state, and what is gathered at the moment.

    As ``fully_shard`` does it (torch 2.13, ``_fsdp_param_group.py``): the root's own parameters stay gathered from its forward to the end
    of backward, a block's until its forward's end if it reshards, and again in its backward. A gather goes through a flat buffer, which
    forward keeps until the next gather, and backward allocates one block ahead. Gradients stay whole until the block's backward ends, then
    go through another flat buffer, kept until the next block's do; the root's own stay whole to the end.
    """
    world_size = plan.world_size
    names = set(plan.shard)
    blocks = [block if block.fqn in names else LayerFootprint(fqn=block.fqn) for block in footprint.blocks]
    root_parameters = footprint.parameter_bytes - sum(block.parameter_bytes for block in blocks)
    root_gradients = footprint.gradient_bytes - sum(block.gradient_bytes for block in blocks)
    gradients = _part(moment.gradients, world_size)
    temporary = moment.temporary
    gathered = buffers = 0
    running = moment.held
    if moment.phase == "optimizer":
        temporary = _part(temporary, world_size)
    elif moment.phase == "reduce":
        gradients = _part(moment.gradients - root_gradients, world_size) + root_gradients
        buffers = root_gradients + _part(root_gradients, world_size)
    else:
        last = running if moment.phase == "forward" and not moment.running else running + 1
        kept = blocks[running:last] if plan.reshard_after_forward else blocks[:last]
        gathered = root_parameters + sum(block.parameter_bytes for block in kept)
        if moment.phase == "forward":
            buffers = next((block.parameter_bytes for block in reversed(blocks[:last]) if block.parameter_bytes), root_parameters)
            if not moment.running:
                # The next block's gather begins before the last one's buffer is let go; gloo takes as much again for itself.
                buffers += sum(block.parameter_bytes for block in blocks[running : running + 1]) * (2 if cpu else 1)
        else:
            done = min(sum(block.gradient_bytes for block in blocks[running + 1 :]), moment.gradients)
            gradients = _part(done, world_size) + moment.gradients - done
            buffers = next((block.gradient_bytes for block in blocks[running + 1 :] if block.gradient_bytes), 0)
            if plan.reshard_after_forward:
                buffers += next((block.parameter_bytes for block in reversed(blocks[:running]) if block.parameter_bytes), 0)
    return DeviceBytes(
        parameters=_part(footprint.parameter_bytes, world_size),
        gradients=gradients,
        optimizer=_part(footprint.optimizer_bytes, world_size),
        activations=moment.activations,
        temporary=temporary,
        buffers=footprint.buffer_bytes,
        input=round(footprint.input_bytes * share),
        communication=gathered + buffers,
    )


def _part(size_bytes: int, world_size: int) -> int:
    """One rank's part of what is split evenly, rounded up."""
    return -(-size_bytes // world_size)


_ENGINES = {"single": _single, "ddp": _ddp, "fsdp": _fsdp}
