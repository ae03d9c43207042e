"""Predicts a plan's seconds a step, by part, and the seconds of single parts, which the search weighs.

:func:`predict_seconds` is the entrance. ``timing/rank_compute`` says what a rank computes, ``timing/overlap`` how much of its collectives
that hides, the engine in which order it all runs. It measures nothing, and must not know how memory is predicted or plans are found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lightning_autopar import engines
from lightning_autopar.devices.inventory import Device, Inventory, idle_share
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.plans import Plan
from lightning_autopar.timing.data_sheet import DATA_SHEET
from lightning_autopar.timing.rank_compute import layout_of, part_load
from lightning_autopar.timing.rates import Phase, Rates, slowed
from lightning_autopar.timing.step_seconds import Seconds


def predict_seconds(
    footprint: Footprint,
    plan: Plan,
    inventory: Inventory,
    *,
    precision: str = "32-true",
    rates: Rates | None = None,
) -> Seconds:
    """Seconds of one step of the traced batch under a plan; the slowest rank decides.

    Args:
        footprint: of the whole batch, which the ranks share as the plan says.
        plan: its devices must be in the inventory.
        precision: Lightning's name of the precision, where the footprint's operations aren't known.
        rates: of single operations and collectives; by data sheet, unless given.

    Raises:
        ValueError: if a device of the plan isn't in the inventory, or the plan names blocks that the footprint hasn't.
    """
    return engines.of(plan).step(footprint, plan, inventory, precision, rates or DATA_SHEET).seconds()


def part_seconds(
    footprint: Footprint, device: Device, share: float, *, precision: str = "32-true", rates: Rates | None = None, issued: bool = True
) -> list[tuple[str | None, float, float]]:
    """For each part in running order: the block's FQN, or None between blocks, and the seconds of its forward and its backward.

    Args:
        footprint: at the whole batch.
        share: of the batch that it runs at a time.
        issued: whether a part of a GPU's work takes as long as its host issues it, where that is longer.
    """
    source = slowed(rates or DATA_SHEET, (device,))
    layout = layout_of(footprint, precision)
    idle = idle_share(device)

    def seconds(index: int, phase: Phase) -> float:
        load = part_load(layout, index, share, device, source, phase)
        return load.stream / idle + load.issue if device.kind == "cpu" else max(load.stream / idle, load.issue if issued else 0.0)

    # Most parts are alike.
    forwards = {index: seconds(index, "forward") for index in {layer.forward for layer in layout.layers}}
    backwards = {index: seconds(index, "backward") for index in {layer.backward for layer in layout.layers}}
    return [(layer.fqn, forwards[layer.forward], backwards[layer.backward]) for layer in layout.layers]


def block_seconds(
    footprint: Footprint, device: Device, share: float, *, precision: str = "32-true", rates: Rates | None = None
) -> dict[str, float]:
    """Seconds of each block's forward, by FQN. Arguments as :func:`part_seconds`'s."""
    parts = part_seconds(footprint, device, share, precision=precision, rates=rates)
    return {fqn: forward for fqn, forward, _ in parts if fqn is not None}


def busy_seconds(footprint: Footprint, device: Device, *, precision: str = "32-true", rates: Rates | None = None) -> float:
    """Seconds for which a device runs operations of the whole batch, the host's part not counted. Arguments as :func:`part_seconds`'s."""
    source = slowed(rates or DATA_SHEET, (device,))
    layout = layout_of(footprint, precision)
    found = 0.0
    for layer in layout.layers:
        found += part_load(layout, layer.forward, 1.0, device, source, "forward").stream
        found += part_load(layout, layer.backward, 1.0, device, source, "backward").stream
    return found / idle_share(device)


def device_speeds(
    footprint: Footprint, inventory: Inventory, *, precision: str = "32-true", rates: Rates | None = None
) -> dict[str, float]:
    """Steps per second of the whole batch on each device, by id; to nine digits, as sums in another order differ in the last ones."""

    def speed(device: Device) -> float:
        parts = part_seconds(footprint, device, 1.0, precision=precision, rates=rates)
        return float(f"{1 / max(sum(forward + backward for _, forward, backward in parts), 1e-12):.9g}")

    return by_sort(inventory.devices, speed)


def by_sort(devices: Iterable[Device], measure: Callable[[Device], float]) -> dict[str, float]:
    """The figure that ``measure`` gives for each device, by id; computed once for devices that are equally fast and equally busy."""
    known: dict[tuple[object, ...], float] = {}
    found: dict[str, float] = {}
    for device in devices:
        key = (device.kind, device.name, device.threads, idle_share(device), device.slowdown)
        if key not in known:
            known[key] = measure(device)
        found[device.id] = known[key]
    return found
