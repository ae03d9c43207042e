"""What a plan that offloads takes of a host's memory, and whether the host has it. Knows no engine by name, and not how plans are found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from lightning_autopar import engines
from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.memory.device_bytes import HostNeed
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.planning.memory import host_bytes
from lightning_autopar.plans import Plan


def host_need(
    footprint: Footprint, plan: Plan, inventory: Inventory, needs: Mapping[str, int], *, precision: str, margin: float
) -> HostNeed | None:
    """What a plan takes of the host that has least to spare; None where nothing is offloaded, or the host's memory isn't known. The free
    memory is what the tightest cgroup leaves (``devices/host.py``): the kernel kills a job that exceeds it. The planning process holds the
    module already, and forked ranks share its pages. A host that is only planned for must hold the module, too.

    Args:
        footprint: that of the plan's batch.
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
            module = footprint.parameter_bytes * (ranks if engines.of(plan).builds_on_each else 1)
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
