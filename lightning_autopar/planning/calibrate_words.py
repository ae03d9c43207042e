"""Measured rates in a few words, for people: products, memory, collectives. It measures and predicts nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from lightning_autopar.memory.inventory import Device, Inventory
from lightning_autopar.planning.calibrate import device_key, group_key
from lightning_autopar.planning.calibrate_curves import Calibration, Curve
from lightning_autopar.planning.rates import COLLECTIVES
from lightning_autopar.units import format_bytes, format_seconds

#: Of matrices with this smallest dimension; the widest that was measured.
_SMALLEST = 512
_LARGE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """What a device reaches; None where it wasn't measured.

    Args:
        flops_per_second: in large products of fp32 matrices.
        bytes_per_second: in large additions.
        issue_seconds: of one operation's issuing in a forward.
    """

    flops_per_second: float | None
    bytes_per_second: float | None
    issue_seconds: float | None

    def to_dict(self) -> dict[str, float | None]:
        """By name."""
        return asdict(self)

    def __str__(self) -> str:
        words = []
        if self.flops_per_second is not None:
            words.append(f"{self.flops_per_second / 1e9:.3g} GFLOP/s")
        if self.bytes_per_second is not None:
            words.append(f"{format_bytes(self.bytes_per_second)}/s")
        if self.issue_seconds is not None:
            words.append(f"{format_seconds(self.issue_seconds)} an operation")
        return ", ".join(words)


def speeds(calibration: Calibration, device: Device) -> Speeds:
    """What a device was measured to reach."""
    key = device_key(device)
    product, added, issue = (
        _curve(calibration, key, *which) for which in ((f"matmul/{_SMALLEST}", "fp32"), ("add", "fp32"), ("issue/forward", ""))
    )
    flops = None
    if product is not None:
        wide = product.sizes[-1]
        flops = 2 * _SMALLEST * wide * wide / product.seconds[-1]
    return Speeds(
        flops_per_second=flops,
        bytes_per_second=None if added is None else added.sizes[-1] / added.seconds[-1],
        issue_seconds=None if issue is None else issue.seconds[0],
    )


def collective_lines(calibration: Calibration, inventory: Inventory) -> Iterator[str]:
    """A line for each collective between devices of this host: its latency, and its rate in large messages."""
    here = [device for device in inventory.devices if device.kind != "catalogue" and device.node == 0]
    for count in range(2, len(here) + 1):
        for collective in COLLECTIVES:
            curve = calibration.curves.get((group_key(here[:count], inventory), collective, ""), {}).get(count)
            if curve is not None:
                large = max(curve.sizes[-1], _LARGE_BYTES)
                rate = format_bytes(large / curve.at(large))
                yield f"  {collective} of {count} ranks: {format_seconds(curve.seconds[0])}, {rate}/s in large messages"


def _curve(calibration: Calibration, subject: str, thing: str, dtype: str) -> Curve | None:
    by_ranks = calibration.curves.get((subject, thing, dtype), {})
    return by_ranks[min(by_ranks)] if by_ranks else None
