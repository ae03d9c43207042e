"""What planning asks of rates, whether they come from a data sheet or from measurements; and rates of devices that are slow for now.

Data and a contract; it measures nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal, Protocol

from lightning_autopar.devices.inventory import Device, Inventory
from lightning_autopar.memory.work.work import Work
from lightning_autopar.plans import Engine

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "send"]
COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "send")
Phase = Literal["forward", "backward", "optimizer"]
Python = Literal["call", "unit", "action"]


class _Token:
    """Equal only for the same object, which it keeps alive as long as anything is cached under it."""

    __slots__ = ("_rates",)

    def __init__(self, rates: object) -> None:
        self._rates = rates

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Token) and other._rates is self._rates

    def __hash__(self) -> int:
        return id(self._rates)


class Rates(Protocol):
    """Seconds of single things, on devices that nobody else uses. Calls are fast and may be made thousands of times. Results are cached: an
    object always returns the same ones. Implementations subclass this.
    """

    @property
    def token(self) -> Hashable:
        """The identity of these rates: objects with equal tokens give equal results. By default each object has its own."""
        return _Token(self)

    def device_class(self, device: Device) -> Hashable:
        """Devices of one class have the same rates."""
        return device.id

    def among(self, devices: Sequence[Device], inventory: Inventory) -> Rates:
        """The rates while a rank works on each of these devices at once: CPU devices share the host's cores and its memory."""
        return self

    def work_seconds(self, device: Device, work: Work) -> float:
        """Seconds of one run of an operation (its ``count`` isn't read), without the host's part."""

    def issue_seconds(self, device: Device, phase: Phase = "forward") -> float:
        """What the host needs to issue one operation; on a CPU device it comes on top of the operation, on a GPU it runs ahead of it."""

    def loop_seconds(self, device: Device, engine: Engine) -> float:
        """Host seconds of a rank's step besides operations and collectives: of the trainer's loop and hooks, and of the engine."""

    def slowest_of(self, device: Device, count: int) -> float:
        """How much longer the slowest of so many devices takes than these rates say of one, if they don't know each device."""
        return 1.0

    def python_seconds(self, device: Device, of: Python) -> float:
        """Host seconds of a framework's own Python.

        Args:
            of: ``"call"`` for a call, builtins included, of which engines give the number; ``"unit"`` for the hooks of a unit of FSDP in
                one step; ``"action"`` for a micro-batch's forward or backward in a pipeline's rank, beside its operations and the sending.
        """

    def collective_seconds(self, collective: Collective, size_bytes: int, devices: Sequence[Device], inventory: Inventory) -> float:
        """One collective between ranks on these devices, its latency included.

        Args:
            size_bytes: of the whole result of an all_gather, the whole input of a reduce_scatter, the tensor of the others.
            devices: one a rank.
        """

    def host_copy_seconds(self, device: Device, size_bytes: int) -> float:
        """Between pinned host memory and the device, in one direction; 0 on a CPU device."""

    def host_adam_seconds(self, elements: int, device: Device) -> float:
        """AdamW's update of so many fp32 elements by torch's fused kernel: on all of a GPU's host's cores, on a CPU device's threads."""

    def overlap(self, device: Device) -> float:
        """Which share of computing can hide communication: 0 where the same cores do both (gloo), near 1 with copy engines and NCCL."""


def slowed(rates: Rates, devices: Sequence[Device]) -> Rates:
    """The rates of these devices with their slowdowns; the same object if none is slowed."""
    return rates if all(device.slowdown == 1 for device in devices) else _Slowed(rates)


class _Slowed(Rates):
    """Other rates, multiplied by each device's slowdown.

    A CPU device is slow in everything: it is its own host, and gloo runs on it. On a GPU only operations are slow: its host and its links
    aren't slowed.

    Args:
        rates: of devices that nothing slows.
    """

    def __init__(self, rates: Rates) -> None:
        self._rates = rates

    @property
    def token(self) -> Hashable:
        """The token of the other rates: the slowdowns are in :meth:`device_class`."""
        return "slowed", self._rates.token

    def device_class(self, device: Device) -> Hashable:
        return self._rates.device_class(device), device.slowdown

    def among(self, devices: Sequence[Device], inventory: Inventory) -> Rates:
        return _Slowed(self._rates.among(devices, inventory))

    def work_seconds(self, device: Device, work: Work) -> float:
        return device.slowdown * self._rates.work_seconds(device, work)

    def issue_seconds(self, device: Device, phase: Phase = "forward") -> float:
        return _of_host(device) * self._rates.issue_seconds(device, phase)

    def loop_seconds(self, device: Device, engine: Engine) -> float:
        return _of_host(device) * self._rates.loop_seconds(device, engine)

    def slowest_of(self, device: Device, count: int) -> float:
        return self._rates.slowest_of(device, count)

    def python_seconds(self, device: Device, of: Python) -> float:
        return _of_host(device) * self._rates.python_seconds(device, of)

    def collective_seconds(self, collective: Collective, size_bytes: int, devices: Sequence[Device], inventory: Inventory) -> float:
        """One collective, as fast as the slowest of the ranks' hosts."""
        slowest = max(map(_of_host, devices), default=1.0)
        return slowest * self._rates.collective_seconds(collective, size_bytes, devices, inventory)

    def host_copy_seconds(self, device: Device, size_bytes: int) -> float:
        """The other rates' value: 0 for a CPU device, and a link isn't slowed."""
        return self._rates.host_copy_seconds(device, size_bytes)

    def host_adam_seconds(self, elements: int, device: Device) -> float:
        return _of_host(device) * self._rates.host_adam_seconds(elements, device)

    def overlap(self, device: Device) -> float:
        return self._rates.overlap(device)


def _of_host(device: Device) -> float:
    """The slowdown of a device's host."""
    return device.slowdown if device.kind == "cpu" else 1.0
