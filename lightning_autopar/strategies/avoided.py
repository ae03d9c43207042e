"""What of its devices a run keeps away from: those that it was asked to leave, for a while, and memory that it has run out of.

Decides nothing, and knows no plan.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning.pytorch.utilities import rank_zero_info

from lightning_autopar.units import format_bytes

if TYPE_CHECKING:
    from lightning_autopar.memory.inventory import Inventory

#: Of what a plan was predicted to take of a device and that was too much.
_LESS = 0.95


class Avoided:
    """Devices, and memory of devices, that no plan of this run is to use."""

    def __init__(self) -> None:
        self._left_until: dict[str, float] = {}
        self._limits: dict[str, int] = {}

    def leave(self, devices: Iterable[str], seconds: float) -> None:
        """No plan uses these devices for so long."""
        until = time.monotonic() + seconds
        self._left_until.update(dict.fromkeys(devices, until))

    def allow_again(self) -> None:
        """Devices that were left count again."""
        self._left_until.clear()

    def lower(self, reserved_bytes: Mapping[str, int]) -> None:
        """A plan that was predicted to fit in this didn't: no plan may take as much of its devices again."""
        for device, size in reserved_bytes.items():
            self._limits[device] = int(_LESS * size)
            rank_zero_info(f"autopar: {device} is planned for with {format_bytes(self._limits[device])} from now on")

    def lift(self) -> None:
        """Memory that the run has run out of counts again."""
        if self._limits:
            rank_zero_info("autopar: nothing fits in that, so that the run is planned for as before")
        self._limits.clear()

    def without(self, found: Inventory) -> Inventory:
        """What is left of the devices."""
        now = time.monotonic()
        self._left_until = {device: until for device, until in self._left_until.items() if until > now}
        devices = tuple(
            replace(device, free_bytes=min(device.free_bytes, self._limits.get(device.id, device.free_bytes)))
            for device in found.devices
            if device.id not in self._left_until
        )
        ids = {device.id for device in devices}
        return replace(found, devices=devices, links=tuple(link for link in found.links if link.a in ids and link.b in ids))
