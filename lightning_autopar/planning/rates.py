"""What planning asks of whoever knows how fast devices are: a data sheet, or measurements. Data and a contract; it measures nothing."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal, Protocol

from lightning_autopar.memory.inventory import Device, Inventory
from lightning_autopar.memory.work import Work
from lightning_autopar.plans import Engine

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "send"]
COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")
Phase = Literal["forward", "backward", "optimizer"]


class _Token:
    """Equal for the same object alone, which it keeps alive as long as anything is remembered by it."""

    __slots__ = ("_rates",)

    def __init__(self, rates: object) -> None:
        self._rates = rates

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Token) and other._rates is self._rates

    def __hash__(self) -> int:
        return id(self._rates)


class Rates(Protocol):
    """Seconds of single things, on devices that nobody else uses. Answers are quick and may be asked thousands of times.

    Answers are remembered: an object gives the same ones as long as it lives. Implementations subclass this.
    """

    @property
    def token(self) -> Hashable:
        """What tells these rates from others: objects with equal tokens give equal answers. By default each object has its own."""
        return _Token(self)

    def device_class(self, device: Device) -> Hashable:
        """Devices of one class have the same rates."""
        return device.id

    def among(self, devices: Sequence[Device], inventory: Inventory) -> Rates:
        """The rates while a rank works on each of these devices at once: CPU devices share the host's cores and its memory."""
        return self

    def work_seconds(self, device: Device, work: Work) -> float:
        """One run of an operation (its ``count`` isn't read), without the host's part."""

    def issue_seconds(self, device: Device, phase: Phase = "forward") -> float:
        """What the host needs to issue one operation; on a CPU device it comes on top of the operation, on a GPU it runs ahead of it."""

    def loop_seconds(self, device: Device, engine: Engine) -> float:
        """What a step costs the host of a rank beside its operations and collectives: the trainer's loop and hooks, the engine's own."""

    def unit_seconds(self, device: Device) -> float:
        """What the hooks of one unit of FSDP cost the host in one step."""

    def slowest_of(self, device: Device, count: int) -> float:
        """How much longer the slowest of so many devices takes than what these rates say of one, where they don't know each by itself."""
        return 1.0

    def call_seconds(self, device: Device) -> float:
        """What a call costs the host in a framework's own Python, one of a builtin included: engines are known by how many they make."""

    def action_seconds(self, device: Device) -> float:
        """What a micro-batch's forward or backward costs a rank of a pipeline beside its operations and the sending: on CPU devices."""

    def collective_seconds(self, collective: Collective, size_bytes: int, devices: Sequence[Device], inventory: Inventory) -> float:
        """One collective between ranks on these devices, its latency included.

        Args:
            collective: which.
            size_bytes: of the whole result of an all_gather, the whole input of a reduce_scatter, the tensor of the others.
            devices: one a rank.
            inventory: whose links count.
        """

    def host_copy_seconds(self, device: Device, size_bytes: int) -> float:
        """Between pinned host memory and the device, in one direction; 0 on a CPU device."""

    def host_adam_seconds(self, elements: int, device: Device) -> float:
        """AdamW's update of so many fp32 elements by torch's fused kernel: on all of a GPU's host's cores, on a CPU device's threads."""

    def disk_seconds(self, size_bytes: int, *, write: bool) -> float | None:
        """Writing so many bytes through to the disk, or reading them from there; None where it wasn't measured."""
        return None

    def overlap(self, device: Device) -> float:
        """Which share of computing can hide communication: 0 where the same cores do both (gloo), near 1 with copy engines and NCCL."""
