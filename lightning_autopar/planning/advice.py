"""Advice: which change would make something fit. Asks the search again with one thing changed; knows nothing of predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.inventory import Inventory
from lightning_autopar.planning.candidates import Constraints, recomputable_order
from lightning_autopar.planning.report import Candidate, device_label
from lightning_autopar.planning.scaling import scaled
from lightning_autopar.plans import BUILT_ENGINES
from lightning_autopar.units import format_bytes

#: The best candidate that fits, or None.
Ask = Callable[[Footprint, Inventory, Constraints], Candidate | None]


def advise(
    footprint: Footprint, inventory: Inventory, constraints: Constraints, candidates: Sequence[Candidate], ask: Ask
) -> tuple[str, ...]:
    """What would make a plan fit where none does, a sentence each, the least change first.

    Args:
        footprint: what was planned for.
        inventory: the devices.
        constraints: what ruled the search.
        candidates: what it found, none of which fits.
        ask: the search, for another footprint, inventory or constraints.
    """
    free = replace(constraints, pinned=None)
    found: list[str] = []

    def suppose(change: str, inventory: Inventory = inventory, **changes: object) -> None:
        """Say it if it would help."""
        best = ask(footprint, inventory, replace(free, **changes))  # type: ignore[arg-type]
        if best is not None:
            found.append(f"{change}: {best.plan.title()} would fit")

    found += _missing_memory(inventory, constraints, candidates)
    if constraints.pinned is not None:
        suppose("leave the plan unpinned")
    if not set(BUILT_ENGINES) <= set(constraints.allow):
        suppose(f"allow={list(BUILT_ENGINES)!r}", allow=BUILT_ENGINES)
    if constraints.exact:
        suppose("exact=False, which accepts the changed loss", exact=False)
    if constraints.max_devices is not None and constraints.max_devices < len(inventory.devices):
        suppose(f"let it use all {len(inventory.devices)} devices", max_devices=None)
    if constraints.memory_limit_bytes is not None:
        suppose("lift the memory limit", memory_limit_bytes=None)
    if constraints.memory_margin:
        suppose("memory_margin=0.0", memory_margin=0.0)
    if held := [device for device in inventory.devices if device.kind == "cuda" and device.free_bytes < device.total_bytes]:
        names = ", ".join(map(device_label, held))
        emptied = tuple(replace(device, free_bytes=device.total_bytes) for device in inventory.devices)
        suppose(f"free what others hold on {names}", inventory=replace(inventory, devices=emptied))
    if (batch := largest_batch(footprint, inventory, free, ask)) is not None:
        found.append(f"a batch of {batch} instead of {footprint.batch_size} would fit (accumulate_grad_batches keeps the effective size)")
    found += _no_recomputation(footprint)
    return tuple(found)


def largest_batch(footprint: Footprint, inventory: Inventory, constraints: Constraints, ask: Ask) -> int | None:
    """The largest batch smaller than the traced one for which something fits, by scaling what depends on it; None for none."""
    fits, too_large = 0, footprint.batch_size
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        if ask(scaled(footprint, middle), inventory, constraints) is not None:
            fits = middle
        else:
            too_large = middle
    return fits or None


def _missing_memory(inventory: Inventory, constraints: Constraints, candidates: Sequence[Candidate]) -> list[str]:
    """How much more would do, for the candidate that lacks least."""
    predicted = [candidate for candidate in candidates if candidate.needs]
    if not predicted:
        return []
    budget = {device.id: constraints.budget_bytes(device) for device in inventory.devices}

    def lack(candidate: Candidate) -> dict[str, int]:
        """Free bytes missing by device, the margin's share of them included."""
        short = {device: need - budget[device] for device, need in candidate.needs.items()}
        return {device: int(size / (1 - constraints.memory_margin)) + 1 for device, size in short.items() if size > 0}

    nearest = min(predicted, key=lambda candidate: sum(lack(candidate).values()))
    if not lack(nearest):
        return []  # the host's memory is what lacks; its candidate's reason says so
    missing = sorted(lack(nearest).items(), key=lambda item: -item[1])
    where = [f"{format_bytes(size)} more on {device_label(inventory.device(device))}" for device, size in missing[:3]]
    if len(missing) > 3:
        where.append(f"at most {format_bytes(missing[3][1])} more on {len(missing) - 3} others")
    return [f"{', '.join(where)}: {nearest.plan.title()} would fit"]


def _no_recomputation(footprint: Footprint) -> list[str]:
    """Why recomputation, which saves most, is not to be had."""
    if not footprint.training or recomputable_order(footprint):
        return []
    if not footprint.blocks:
        return ["recomputation can't help, as the module has no repeated blocks"]
    if barred := [block.fqn for block in footprint.blocks if not block.recomputable]:
        return [f"recomputation can't help, as running a block's forward twice would change the run ({barred[0]} moves a buffer)"]
    return ["recomputation can't help, as the blocks save no more than what enters them"]
