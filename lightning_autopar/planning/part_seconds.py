"""Seconds of the step's parts on one device: what the search weighs, while :func:`timing.predict_seconds` judges whole plans."""

from __future__ import annotations

from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.inventory import Device, Inventory
from lightning_autopar.planning.data_sheet import DataSheet
from lightning_autopar.planning.rates import Phase, Rates
from lightning_autopar.planning.roofline import idle_share, layout_of, part_load
from lightning_autopar.planning.slowed import slowed

_DATA_SHEET = DataSheet()


def part_seconds(
    footprint: Footprint, device: Device, share: float, *, precision: str = "32-true", rates: Rates | None = None
) -> list[tuple[str | None, float, float]]:
    """Of each part in running order the block's FQN, None of what lies between blocks, and the seconds of its forward and its backward.

    Args:
        footprint: at the whole batch.
        device: on which.
        share: of the batch that it works off at a time.
        precision: Lightning's name of it.
        rates: of single operations; data sheets' unless given.
    """
    source = slowed(rates or _DATA_SHEET, (device,))
    layout = layout_of(footprint, precision)
    idle = idle_share(device)

    known: dict[tuple[int, Phase], float] = {}  # most parts are alike

    def seconds(index: int, phase: Phase) -> float:
        found = known.get((index, phase))
        if found is None:
            load = part_load(layout, index, share, device, source, phase)
            found = load.stream / idle + load.issue if device.kind == "cpu" else max(load.stream / idle, load.issue)
            known[index, phase] = found
        return found

    return [(layer.fqn, seconds(layer.forward, "forward"), seconds(layer.backward, "backward")) for layer in layout.layers]


def block_seconds(
    footprint: Footprint, device: Device, share: float, *, precision: str = "32-true", rates: Rates | None = None
) -> dict[str, float]:
    """Seconds of each block's forward, by FQN. Arguments as :func:`part_seconds`'s."""
    parts = part_seconds(footprint, device, share, precision=precision, rates=rates)
    return {fqn: forward for fqn, forward, _ in parts if fqn is not None}


def busy_seconds(footprint: Footprint, device: Device, *, precision: str = "32-true", rates: Rates | None = None) -> float:
    """Seconds for which a device runs operations of the whole batch, the host's part not counted. Arguments as :func:`part_seconds`'s."""
    source = slowed(rates or _DATA_SHEET, (device,))
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
    known: dict[tuple[object, ...], float] = {}
    found: dict[str, float] = {}
    for device in inventory.devices:
        key = (device.kind, device.name, device.threads, idle_share(device), device.slowdown)
        if key not in known:
            parts = part_seconds(footprint, device, 1.0, precision=precision, rates=rates)
            total = sum(forward + backward for _, forward, backward in parts)
            known[key] = float(f"{1 / max(total, 1e-12):.9g}")
        found[device.id] = known[key]
    return found
