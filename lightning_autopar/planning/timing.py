"""Seconds a step that a plan would take: a first model of rates and bandwidths, good enough to put plans in order.

The seam is :func:`predict_seconds`. It must not know how memory is predicted or how plans are found, and it measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from lightning_autopar.memory import catalogue
from lightning_autopar.memory.footprint import Footprint, LayerFootprint
from lightning_autopar.memory.inventory import Device, Inventory
from lightning_autopar.plans import Plan

# Constants of the model. They order plans; none of them is a promise.
_CPU_FLOPS_PER_THREAD = 30e9  # fp32 matrix products of one core with AVX2
_CPU_MEMORY_BYTES_PER_SECOND = 10e9
_CPU_OVERHEAD_SECONDS = 1e-3
_GPU_OVERHEAD_SECONDS = 2e-3
_RANK_OVERHEAD_SECONDS = 0.5e-3  # hooks, sampler and the wait for the slowest, in every rank of a plan with several
_UNIT_OVERHEAD_SECONDS = 0.1e-3  # one FSDP unit's hooks and copies in and out, a step
_GLOO_BYTES_PER_SECOND = 1.5e9
_GLOO_LATENCY_SECONDS = 0.3e-3
_NCCL_LATENCY_SECONDS = 30e-6
_HOST_COPY_BYTES_PER_SECOND = 12e9  # PCIe 3 x16, pinned
_BUCKET_BYTES = 25 * 1024**2  # DDP's default bucket_cap_mb
_BACKWARD_SHARE = 2 / 3
_OVERLAP = 0.8  # share of the time beside it that can hide a GPU's communication
_LINK_BYTES_PER_SECOND = {"nvlink": 150e9, "p2p": 20e9, "pcie": 12e9, "host": 8e9, "network": 1.25e9}
_LINK_EFFICIENCY = 0.7  # of a nominal bandwidth, in large messages
_GPU_FLOPS_EFFICIENCY = 0.4
_GPU_MEMORY_EFFICIENCY = 0.7
# A GPU that the catalogue doesn't know, a MIG instance, say: about a T4, so that it isn't preferred to a known one.
_UNKNOWN_GPU = catalogue.KNOWN_DEVICES["T4-16GB"]
_SLOWEST_RATE_SHARE = 0.1  # of a device that somebody else keeps fully busy: the driver shares it out in turns


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a device reaches in practice, when nobody else uses it."""

    flops_per_second: float
    memory_bytes_per_second: float


class RateSource(Protocol):
    """Where rates come from: a catalogue, a measurement."""

    def __call__(self, device: Device, precision: str) -> Rates:
        """The rates of a device under a Lightning precision such as ``"32-true"`` or ``"bf16-mixed"``."""


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Predicted seconds of one training step on the slowest rank, by part; the parts add up to :attr:`step`.

    Args:
        compute: forward, backward and the optimizers' update.
        recompute: forwards that run a second time.
        communication: what communication adds, beyond what hides behind computing.
        input: copying the batch to the device.
        overhead: launching, hooks, waiting.
    """

    compute: float
    recompute: float = 0.0
    communication: float = 0.0
    input: float = 0.0
    overhead: float = 0.0

    @property
    def step(self) -> float:
        """Seconds of the whole step."""
        return self.compute + self.recompute + self.communication + self.input + self.overhead

    def to_dict(self) -> dict[str, float]:
        """The parts and ``step``, by name."""
        return {
            "compute": self.compute,
            "recompute": self.recompute,
            "communication": self.communication,
            "input": self.input,
            "overhead": self.overhead,
            "step": self.step,
        }


def catalogue_rates(device: Device, precision: str) -> Rates:
    """Rates by the catalogue's peaks for a GPU, by the number of threads for a CPU device.

    Args:
        device: a GPU that the catalogue doesn't know is taken for a slow one.
        precision: Lightning's name; full precision is fp32 without TF32, PyTorch's default.
    """
    if device.kind == "cpu":
        return Rates(
            flops_per_second=_CPU_FLOPS_PER_THREAD * (device.threads or 1) / (2 if precision.startswith("64") else 1),
            memory_bytes_per_second=_CPU_MEMORY_BYTES_PER_SECOND,
        )
    if device.kind == "catalogue":
        known = catalogue.KNOWN_DEVICES.get(device.name, _UNKNOWN_GPU)
    else:
        known = catalogue.find_by_device_name(device.name) or _UNKNOWN_GPU
    dtype = "bf16" if precision.startswith("bf16") else "fp16" if precision.startswith("16") else "fp32"
    return Rates(
        flops_per_second=known.peak_flops(dtype) * _GPU_FLOPS_EFFICIENCY / (2 if precision.startswith("64") else 1),
        memory_bytes_per_second=known.memory_bytes_per_second * _GPU_MEMORY_EFFICIENCY,
    )


def idle_share(device: Device) -> float:
    """The share of a device that others leave to us, in tenths: what NVML samples over a second isn't finer than that."""
    return max(_SLOWEST_RATE_SHARE, 1 - round(device.utilization or 0.0, 1))


def group_bandwidth(inventory: Inventory, devices: Iterable[str]) -> float:
    """Bytes per second of the slowest hop by which these devices can all reach each other (bottleneck of the best spanning tree).

    Args:
        inventory: whose links count; a pair without one is assumed to have the slowest kind there is.
        devices: ids, at least two.
    """
    bandwidth = pair_bandwidths(inventory, tuple(devices))
    ids = sorted({device for pair in bandwidth for device in pair})
    reached, slowest = {ids[0]}, float("inf")
    while len(reached) < len(ids):
        speed, nearest = max((bandwidth[a, b], b) for a in reached for b in ids if b not in reached)
        slowest = min(slowest, speed)
        reached.add(nearest)
    return slowest


def pair_bandwidths(inventory: Inventory, devices: tuple[str, ...]) -> dict[tuple[str, str], float]:
    """Bytes per second between each two of the devices, keyed both ways round."""
    node = {device.id: device.node for device in inventory.devices}
    known: dict[tuple[str, str], float] = {}
    for link in inventory.links:
        speed = link.bytes_per_second or _LINK_BYTES_PER_SECOND[link.kind]
        known[link.a, link.b] = known[link.b, link.a] = speed * _LINK_EFFICIENCY
    local = [speed for (a, b), speed in known.items() if node.get(a) == node.get(b)]
    unknown = min(local, default=_LINK_BYTES_PER_SECOND["host"] * _LINK_EFFICIENCY)
    across = _LINK_BYTES_PER_SECOND["network"] * _LINK_EFFICIENCY
    return {(a, b): known.get((a, b), unknown if node[a] == node[b] else across) for a in devices for b in devices if a != b}


def predict_seconds(
    footprint: Footprint,
    plan: Plan,
    inventory: Inventory,
    *,
    precision: str = "32-true",
    rates: RateSource | None = None,
) -> Seconds:
    """Seconds of one step of the traced batch under a plan; the slowest rank decides.

    Computing is FLOPs over the reached rate of the device, the update is bound by its memory, communication is what a
    ring moves ((W − 1) / W of the bytes for a gather or a scatter, twice that for an all-reduce) over the slowest link.

    Args:
        footprint: of the whole batch, which the ranks share evenly.
        plan: its devices must be in the inventory.
        inventory: the devices and the links between them.
        precision: Lightning's name of the precision, which decides on the peak rate.
        rates: where rates come from; the catalogue, unless given.

    Raises:
        ValueError: if a device of the plan isn't in the inventory.
    """
    source = rates or catalogue_rates
    ranks = [_rank_seconds(footprint, plan, inventory.device(device), source, precision) for device in plan.devices]
    slowest = max(ranks, key=lambda seconds: seconds.step)
    if plan.world_size == 1:
        return slowest
    communication = _communication_seconds(footprint, plan, inventory, slowest)
    units = 0.0
    if plan.engine == "fsdp":
        memory = min(source(inventory.device(device), precision).memory_bytes_per_second for device in plan.devices)
        units = (len(plan.shard) + 1) * _UNIT_OVERHEAD_SECONDS + _flat_copies_bytes(footprint, plan) / memory
    return Seconds(
        compute=slowest.compute,
        recompute=slowest.recompute,
        communication=communication,
        input=slowest.input,
        overhead=slowest.overhead + _RANK_OVERHEAD_SECONDS + units,
    )


def _rank_seconds(footprint: Footprint, plan: Plan, device: Device, source: RateSource, precision: str) -> Seconds:
    """What one rank does by itself: everything but communication."""
    world = plan.world_size
    # The rank with the most samples: a batch of 5 on 2 ranks gives one of them 3.
    share = -(-footprint.batch_size // world) / footprint.batch_size if footprint.batch_size else 1 / world
    reached = source(device, precision)
    idle = idle_share(device)
    flops = footprint.flops or 2 * footprint.parameters * max(1, footprint.batch_size) * (3 if footprint.training else 1)
    compute = flops * share / (reached.flops_per_second * idle)
    if footprint.training:
        held = 1 / world if plan.engine == "fsdp" else 1.0
        # Gradient and state are read, state and parameters written, parameters read.
        moved = 2 * footprint.parameter_bytes + footprint.gradient_bytes + 2 * footprint.optimizer_bytes
        compute += moved * held / (reached.memory_bytes_per_second * idle)
    again = set(plan.recompute)
    recomputed = sum(_forward_flops(footprint, block, flops) for block in footprint.blocks if block.fqn in again)
    on_cpu = device.kind == "cpu"
    return Seconds(
        compute=compute,
        recompute=recomputed * share / (reached.flops_per_second * idle),
        input=0.0 if on_cpu else footprint.input_bytes * share / _HOST_COPY_BYTES_PER_SECOND,
        overhead=_CPU_OVERHEAD_SECONDS if on_cpu else _GPU_OVERHEAD_SECONDS,
    )


def _forward_flops(footprint: Footprint, block: LayerFootprint, flops: float) -> float:
    """A block's forward; where it wasn't counted, its even part of the third of a step that forwards take."""
    return block.flops or flops / 3 / len(footprint.blocks)


def _gathers(footprint: Footprint, plan: Plan) -> int:
    """How often FSDP gathers the parameters in a step."""
    return 2 if footprint.training and plan.reshard_after_forward else 1


def _flat_copies_bytes(footprint: Footprint, plan: Plan) -> int:
    """What FSDP reads and writes to copy parameters out of its flat buffers and gradients into them."""
    return 2 * (_gathers(footprint, plan) * footprint.parameter_bytes + (footprint.gradient_bytes if footprint.training else 0))


def _communication_seconds(footprint: Footprint, plan: Plan, inventory: Inventory, rank: Seconds) -> float:
    """What communication adds to the slowest rank's step."""
    on_cpu = any(inventory.device(device).kind == "cpu" for device in plan.devices)
    across_nodes = len({inventory.device(device).node for device in plan.devices}) > 1
    bandwidth = _GLOO_BYTES_PER_SECOND if on_cpu and not across_nodes else group_bandwidth(inventory, plan.devices)
    latency = _GLOO_LATENCY_SECONDS if on_cpu else _NCCL_LATENCY_SECONDS
    part = (plan.world_size - 1) / plan.world_size
    gradients = footprint.gradient_bytes if footprint.training else 0
    # Statistics of the whole batch: one exchange forward, one backward, at once waited for.
    waiting = len(footprint.batch_norm) * (2 if footprint.training else 1) * latency
    if plan.engine == "fsdp":
        gathers = _gathers(footprint, plan)
        # Gloo's reduce-scatter is an all-reduce of which each rank keeps its part.
        moved = part * (gathers * footprint.parameter_bytes + gradients * (2 if on_cpu else 1))
        calls = (len(plan.shard) + 1) * (gathers + (1 if footprint.training else 0))
        beside = rank.compute + rank.recompute
        exposed = moved / bandwidth / (len(plan.shard) + 1)  # the first unit's, which has nothing to hide behind
    else:
        moved = 2 * part * gradients
        calls = -(-gradients // _BUCKET_BYTES)
        beside = _BACKWARD_SHARE * rank.compute + rank.recompute
        exposed = 2 * part * min(gradients, _BUCKET_BYTES) / bandwidth  # the last bucket's
    total = moved / bandwidth + calls * latency
    if on_cpu:  # gloo's copies run on the cores that compute
        return total + waiting
    return max(total - _OVERLAP * beside, min(total, exposed + latency)) + waiting
