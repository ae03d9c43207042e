"""Bytes per device by category, from footprint, plan and inventory; the host's bytes; and the full moments outside a training step.

The footprint is of one device and the whole batch; each engine says what it makes of it. The planner, not this module, adds the footprint's
margin. Moments outside a training step are the time before the first one, validation, and the saving of a checkpoint. Arithmetic only, in
well under a millisecond a plan; the allocator's replay is slower and more exact. Imports neither torch nor Lightning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_autopar import engines
from lightning_autopar.devices.inventory import Device, Inventory
from lightning_autopar.engines import Engine, Rank, recomputed
from lightning_autopar.memory.allocator.options import MIB, AllocatorOptions
from lightning_autopar.memory.allocator.played_device import PlayedDevice
from lightning_autopar.memory.allocator.replay import Replayed, played
from lightning_autopar.memory.allocator.tape_parts import TapeParts, read_script
from lightning_autopar.memory.allocator.tape_player import Player, parts_of
from lightning_autopar.memory.cuda_overhead import context_bytes, nccl_bytes, workspace_bytes
from lightning_autopar.memory.device_bytes import DeviceBytes, HostBytes
from lightning_autopar.memory.footprint import Footprint, FootprintCache
from lightning_autopar.memory.fullest_moments import RNG_STATE_BYTES, Moments, moments_of
from lightning_autopar.plans import Plan


def host_bytes(
    footprint: Footprint,
    plan: Plan,
    *,
    precision: str = "32-true",
    on_cpu: bool = False,
    workers: int = 0,
    resumes: bool = False,
) -> HostBytes:
    """What a plan takes of one host's memory at its fullest moment, if all of its ranks run there; CPU devices' own memory isn't counted. A
    checkpoint holds parameters, buffers and optimizer state. Lightning writes it into memory (``_atomic_save``), then into the file. Where
    tensors are sharded, rank 0 gathers one whole tensor after the other into a file that counts against nobody's memory
    (``state/scratch_files.py``), and writes them from there. To read it, each replica loads the whole file; engines that shard map it.

    Args:
        precision: the Trainer's; it decides which copies DeepSpeed keeps.
        on_cpu: whether the devices are CPUs, which lock no pages.
        workers: the DataLoader's, on each rank.
        resumes: whether the run begins with a checkpoint.
    """
    state = footprint.parameter_bytes + footprint.buffer_bytes + (footprint.optimizer_bytes if footprint.training else 0)
    engine = engines.of(plan)
    saving = (state if engine.whole else 0) + footprint.largest_parameter_bytes
    loading = (state * plan.world_size if engine.whole else 0) if resumes else 0
    offload, pinned = engine.host_bytes(footprint, plan, precision=precision, on_cpu=on_cpu)
    return HostBytes(
        # Forked ranks share the pages of the first process's module; a single device takes the module over.
        module=footprint.parameter_bytes + footprint.buffer_bytes if plan.world_size > 1 else 0,
        checkpoint=max(saving if footprint.training else 0, loading),
        # Each worker has two batches ready, and one is page-locked on its way.
        input=footprint.input_bytes * (2 * workers + 1),
        offload=offload,
        pinned=pinned,
    )


#: The caching allocator holds a share more than it hands out (``Engine.lost_share``), and up to these bytes more: its segments have 2 and
#: 20 MiB, which is much of a tiny model.
ROUNDING_BYTES = 22 * MIB


def predict(
    footprint: Footprint,
    plan: Plan,
    inventory: Inventory,
    *,
    precision: str = "32-true",
    engine: Engine | None = None,
) -> dict[str, DeviceBytes]:
    """What each device of the plan holds at its fullest moment: in a step, in a validation, at a checkpoint, or before the first step.

    Args:
        inventory: has the plan's devices.
        engine: what runs the plan; ours of that name, unless given.

    Returns:
        The bytes by device id, in the plan's order.

    Raises:
        ValueError: if the plan names a block or a device that isn't there.
    """
    known = {block.fqn for block in footprint.blocks}
    for fqn in (*plan.recompute, *plan.shard, *plan.cuts):
        if fqn not in known:
            raise ValueError(
                f"the plan names the block {fqn!r}, but the footprint has {', '.join(known) or 'no blocks'}; plan again for this module"
            )
    asked = engine or engines.of(plan)
    rows = [count or _least(footprint) for count in footprint.rows(plan)]
    alike = asked.alike(footprint, plan)
    found: dict[tuple[int, str, int], DeviceBytes] = {}
    devices = inventory.among(plan.devices)
    keys = list(zip(rows, ["cpu" if device.kind == "cpu" else device.name for device in devices], alike, strict=True))
    for number, key in enumerate(keys):
        if key in found:
            continue
        rank = _rank(footprint, plan, number, rows[number], devices[number], precision)
        held = max(asked.bytes(rank), key=lambda held: held.allocated)
        found[key] = _on_device(held, footprint, asked.communicators(plan), devices[number], asked.lost_share(plan))
    return dict(zip(plan.devices, map(found.__getitem__, keys), strict=True))


def _least(footprint: Footprint) -> int:
    """The fewest samples that a rank runs: a rank that gets none is fed one, where there are samples."""
    return 1 if footprint.batch_size else 0


def _rank(footprint: Footprint, plan: Plan, number: int, rows: int, device: Device, precision: str) -> Rank:
    """A rank with its moments, which are computed when its engine asks for them."""

    def moments() -> Moments:
        parts = max(1, plan.micro_batches)
        once = -(-rows // parts) / footprint.batch_size if footprint.batch_size else 1.0 / parts
        # Recomputed blocks on a GPU keep random states in host memory; for a CPU device that is its own memory.
        random_bytes = RNG_STATE_BYTES if device.kind == "cpu" else 0
        again = recomputed(footprint, plan)
        key = again, once, random_bytes
        return _MOMENTS.get(footprint, key, lambda: moments_of(footprint, again, once, random_bytes=random_bytes))

    return Rank(footprint=footprint, plan=plan, number=number, rows=rows, device=device, precision=precision, moments=moments)


#: Ranks that differ only in their shards have the same moments, and so do plans that differ only in their engine.
_MOMENTS: FootprintCache[Moments] = FootprintCache(128)


def _on_device(held: DeviceBytes, footprint: Footprint, communicators: tuple[int, ...], device: Device, lost_share: float) -> DeviceBytes:
    """The bytes with the device's own overhead around them; a CPU's allocator returns freed memory."""
    if device.kind == "cpu":
        return held
    workspace = workspace_bytes(footprint, device.name)
    return replace(
        held,
        workspace=workspace,
        context=context_bytes(device.name) + nccl_bytes(*communicators),
        rounding=int((held.allocated - held.workspace + workspace) * lost_share) + ROUNDING_BYTES,
    )


def replay(
    footprint: Footprint,
    plan: Plan,
    rank: int,
    *,
    limit_bytes: int | None = None,
    options: AllocatorOptions | None = None,
    rows: int | None = None,
    workspaces: Sequence[int] = (),
    script: TapeParts | None = None,
    engine: Engine | None = None,
    first_look: bool = False,
    beyond: bool = False,
) -> Replayed:
    """Replay a rank's start and its steps on the modelled allocator, until they are alike.

    Args:
        footprint: with its tape, at the traced batch.
        plan: of an engine that has a player.
        limit_bytes: the most that may be reserved; None: no limit.
        options: the allocator's settings; torch's defaults unless given.
        rows: samples that the rank takes; by default its share of the traced batch.
        script: the footprint's tape as :func:`~lightning_autopar.memory.allocator.tape_parts.read_script` gives it, where it is at hand.

    Raises:
        ValueError: if the footprint has no tape, or the plan can't be played.
    """
    if footprint.tape is None:
        raise ValueError("the step wasn't traced, so there is nothing to replay; use memory.predict")
    assert 0 <= rank < plan.world_size, "a rank of the plan"
    if rows is None:
        rows = max(1, footprint.rows(plan)[rank]) if footprint.batch_size else 0
    asked, read, parts = engine or engines.of(plan), script or read_script(footprint.tape), parts_of(rows, plan.micro_batches)

    def player(machine: PlayedDevice) -> Player:
        found = asked.player(machine, read, footprint, plan, rank, parts)
        if found is None:
            raise ValueError(f"a rank of the plan {plan.title()!r} can't be replayed; use memory.predict")
        return found

    return played(player, limit_bytes=limit_bytes, options=options, workspaces=workspaces, first_look=first_look, beyond=beyond)
