"""What a plan that offloads takes of a host's memory, and whether the host has it. Knows neither engines nor how plans are found."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.planning.memory import host_bytes
from lightning_autopar.plans import Plan
from lightning_autopar.text import format_bytes, format_of


@dataclass(frozen=True, kw_only=True)
class HostNeed:
    """What a plan takes of the memory of the host that has least to spare for it, in bytes.

    Args:
        node: which host that is.
        offload: what all ranks there keep in pageable memory.
        pinned: what they keep in page-locked memory.
        module: the module in the process that starts the run, or in each rank that builds it.
        checkpoint: the state on its way to a file.
        devices: what the CPU devices hold there, which are the host's memory.
        budget: what the plan may use: what is free, less the margin.
        assumed: whether nobody said what the host has.
    """

    node: int
    offload: int
    pinned: int = 0
    module: int = 0
    checkpoint: int = 0
    devices: int = 0
    budget: int
    assumed: bool = False

    @property
    def total(self) -> int:
        """At the fullest moment: while the module is built, or while a checkpoint is saved."""
        return self.offload + self.pinned + max(self.module, self.checkpoint + self.devices)

    @property
    def fits(self) -> bool:
        """Whether the host has it."""
        return self.total <= self.budget

    def words(self) -> str:
        """``"121 / 45.6 GiB"``."""
        return format_of(self.total, self.budget)

    def shortage(self, inventory: Inventory, margin: float) -> str:
        """The sentence with the figures and the remedy, of a plan that doesn't fit.

        Args:
            inventory: where the plan was to run.
            margin: share of the free memory that is left alone.
        """
        told = [f"{format_bytes(self.offload + self.pinned)} offloaded"]
        told += [f"{format_bytes(self.pinned)} of it page-locked"] if self.pinned else []
        besides = {"for the module": self.module, "for a checkpoint": self.checkpoint, "on its CPU devices": self.devices}
        told += [f"{format_bytes(size)} {what}" for what, size in besides.items() if size]
        whole = format_bytes(inventory.host_free_on(self.node))
        there = f"{whole} assumed" if self.assumed else f"{whole} free"
        less = f" less the {margin * 100:.3g} % margin" if margin else ""
        where = f" of node {self.node}" if len({device.node for device in inventory.devices}) > 1 else ""
        if (device := inventory.devices[0]).kind == "catalogue":
            enough_gib = 1 << (math.ceil(self.total / (1 - margin) / 2**30) - 1).bit_length()
            remedy = f"if it has more, say so in the spec, as in '{device.name}@{enough_gib}GiB'"
        else:
            remedy = "free as much, as the system would kill the job, or choose an optimizer with less state"
        return (
            f"needs {format_bytes(self.total)} of the host's memory{where}, which has {format_bytes(self.budget)} "
            f"({there}{less}; {', '.join(told)}); {remedy}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with ``total``."""
        return {**dataclasses.asdict(self), "total": self.total}


def host_need(
    footprint: Footprint, plan: Plan, inventory: Inventory, needs: Mapping[str, int], *, precision: str, margin: float
) -> HostNeed | None:
    """What a plan takes of the host that has least to spare; None where nothing is offloaded, or it isn't known what the host has.

    The free memory is what the tightest cgroup leaves (``devices/host.py``): the kernel kills a job that goes beyond it. The module of the
    process that plans is there already, and forked ranks share its pages. A host that is only planned for has to hold that, too.

    Args:
        footprint: of the batch that the plan takes.
        plan: of any engine.
        inventory: with the plan's devices.
        needs: bytes that must be there, by device id.
        precision: the Trainer's.
        margin: share of the free memory that is left alone.
    """
    if not plan.offload or not inventory.host_free_bytes:
        return None
    kind = inventory.device(plan.devices[0]).kind
    held = host_bytes(footprint, plan, precision=precision, on_cpu=kind == "cpu")
    ranks_on = Counter(inventory.device(device).node for device in plan.devices)
    on_cpu = dict.fromkeys(ranks_on, 0)
    if kind == "cpu":
        for device in plan.devices:
            on_cpu[inventory.device(device).node] += needs[device]
    found = []
    for node, ranks in ranks_on.items():
        module = held.module if kind == "catalogue" else 0
        if footprint.configures_model:
            module = footprint.parameter_bytes * (ranks if plan.engine == "zero" else 1)
        found.append(
            HostNeed(
                node=node,
                offload=held.offload * ranks // plan.world_size,
                pinned=held.pinned * ranks // plan.world_size,
                module=module,
                checkpoint=held.checkpoint,
                devices=on_cpu[node],
                budget=int(inventory.host_free_on(node) * (1 - margin)),
                assumed=node in inventory.assumed_hosts,
            )
        )
    return max(found, key=lambda need: (need.total - need.budget, need.total, -need.node))
