"""What each device of a plan holds, as the bars that every picture of a report draws. Draws nothing itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_autopar.memory.inventory import Device
from lightning_autopar.planning.labels import devices_label
from lightning_autopar.planning.page_style import CATEGORIES
from lightning_autopar.planning.report import Candidate, Report

_SUMS = ("allocated", "reserved")


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Devices that hold the same, as one bar.

    Args:
        devices: in rank order.
        sizes: bytes by category on each of them; the sums aren't among them.
        need: bytes that must be there: the prediction with what it may miss.
        budget: bytes that may be used.
    """

    devices: tuple[Device, ...]
    sizes: Mapping[str, int]
    need: int
    budget: int

    @property
    def label(self) -> str:
        """Their names, and how many there are."""
        many = f" ({len(self.devices)} alike)" if len(self.devices) > 1 else ""
        return devices_label(self.devices) + many

    @property
    def headroom(self) -> int:
        """Bytes left of what may be used; below 0 where they are missing."""
        return self.budget - self.need

    @property
    def frame(self) -> int:
        """The most bytes that the bar shows: on a GPU all of the device, else what may be used."""
        return max(self.need, self.budget, self.devices[0].total_bytes if self.devices[0].kind != "cpu" else 0)


def bars_of(report: Report, candidate: Candidate, *, most: int) -> list[Bar]:
    """The plan's devices, those alike as one, in the order of their first ranks.

    Args:
        report: has the candidate's devices.
        candidate: one with a prediction.
        most: so many bars at most; of more those that have least left.
    """
    left = report.headroom_bytes(candidate)
    alike: dict[Any, list[Device]] = {}
    for device_id in candidate.plan.devices:
        device = report.inventory.device(device_id)
        sizes = {name: size for name, size in candidate.bytes[device_id].to_dict().items() if isinstance(size, int) and name not in _SUMS}
        need = candidate.needs.get(device_id, candidate.bytes[device_id].reserved)
        budget = need + left.get(device_id, 0)
        alike.setdefault((tuple(sizes.items()), need, budget, device.free_bytes, device.total_bytes), []).append(device)
    bars = [Bar(devices=tuple(found), sizes=dict(key[0]), need=key[1], budget=key[2]) for key, found in alike.items()]
    return sorted(sorted(bars, key=lambda bar: bar.headroom)[:most], key=bars.index)


def by_color(sizes: Mapping[str, int]) -> dict[str, int]:
    """Those with a colour of their own, and the others together. A correction below nothing is taken off the activations."""
    found = {category: sizes.get(category, 0) for category in CATEGORIES}
    other = sum(size for name, size in sizes.items() if name not in CATEGORIES)
    if other < 0:
        found["activations"], other = max(0, found["activations"] + other), 0
    return {**found, "other": other}


def unit_of(most_bytes: int) -> tuple[int, str]:
    """The unit in which an axis up to so many bytes reads well, in bytes, and its name."""
    power = min(4, int(math.log(max(1, most_bytes), 1024)))
    return 1024**power, ("bytes", "KiB", "MiB", "GiB", "TiB")[power]
