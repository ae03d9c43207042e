"""Rates of devices of which somebody knows that they are slow for now: each takes longer by its own slowdown. It measures nothing."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from lightning_autopar.memory.inventory import Device, Inventory
from lightning_autopar.memory.work import Work
from lightning_autopar.planning.rates import Collective, Phase, Rates
from lightning_autopar.plans import Engine


def slowed(rates: Rates, devices: Sequence[Device]) -> Rates:
    """The rates of these devices with their slowdowns; the very same where none is slowed."""
    return rates if all(device.slowdown == 1 for device in devices) else _Slowed(rates)


class _Slowed(Rates):
    """Other rates, multiplied by each device's slowdown.

    A CPU device is slow in all that it does: it is its own host, and gloo runs on it. Of a GPU the operations are; its host and its links
    have nothing to do with what slows it.

    Args:
        rates: of devices that nothing slows.
    """

    def __init__(self, rates: Rates) -> None:
        self._rates = rates

    @property
    def token(self) -> Hashable:
        """Equal slowdowns of equal rates are equal: the rest is in :meth:`device_class`."""
        return "slowed", self._rates.token

    def device_class(self, device: Device) -> Hashable:
        """Devices of one class that are slowed alike."""
        return self._rates.device_class(device), device.slowdown

    def among(self, devices: Sequence[Device], inventory: Inventory) -> Rates:
        """The other rates among these devices, slowed."""
        return _Slowed(self._rates.among(devices, inventory))

    def work_seconds(self, device: Device, work: Work) -> float:
        """An operation on a slowed device."""
        return device.slowdown * self._rates.work_seconds(device, work)

    def issue_seconds(self, device: Device, phase: Phase = "forward") -> float:
        """What the host needs for an operation."""
        return _of_host(device) * self._rates.issue_seconds(device, phase)

    def loop_seconds(self, device: Device, engine: Engine) -> float:
        """What a step costs the host besides."""
        return _of_host(device) * self._rates.loop_seconds(device, engine)

    def unit_seconds(self, device: Device) -> float:
        """What a unit's hooks cost the host."""
        return _of_host(device) * self._rates.unit_seconds(device)

    def slowest_of(self, device: Device, count: int) -> float:
        """As the other rates say."""
        return self._rates.slowest_of(device, count)

    def call_seconds(self, device: Device) -> float:
        """What a call costs the host."""
        return _of_host(device) * self._rates.call_seconds(device)

    def action_seconds(self, device: Device) -> float:
        """What a micro-batch costs a rank besides."""
        return _of_host(device) * self._rates.action_seconds(device)

    def collective_seconds(self, collective: Collective, size_bytes: int, devices: Sequence[Device], inventory: Inventory) -> float:
        """One collective, as fast as the slowest of the ranks' hosts."""
        slowest = max(map(_of_host, devices), default=1.0)
        return slowest * self._rates.collective_seconds(collective, size_bytes, devices, inventory)

    def host_copy_seconds(self, device: Device, size_bytes: int) -> float:
        """As the other rates say: of a CPU device it is nothing, and a link isn't slowed."""
        return self._rates.host_copy_seconds(device, size_bytes)

    def host_adam_seconds(self, elements: int, device: Device) -> float:
        """An update on the host."""
        return _of_host(device) * self._rates.host_adam_seconds(elements, device)

    def disk_seconds(self, size_bytes: int, *, write: bool) -> float | None:
        """As the other rates say."""
        return self._rates.disk_seconds(size_bytes, write=write)

    def overlap(self, device: Device) -> float:
        """As the other rates say."""
        return self._rates.overlap(device)


def _of_host(device: Device) -> float:
    """By what a device's host is slowed with it."""
    return device.slowdown if device.kind == "cpu" else 1.0
