"""What planning asks of whoever knows how fast devices are: a data sheet, or measurements. Data and a contract; it measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from lightning_autopar.memory.inventory import Device, Inventory
from lightning_autopar.memory.work import Work

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "send"]
COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")


class Rates(Protocol):
    """Seconds of single things, on devices that nobody else uses. Answers are quick and may be asked thousands of times."""

    def work_seconds(self, device: Device, work: Work) -> float:
        """One run of an operation (its ``count`` isn't read), without the host's part."""

    def issue_seconds(self, device: Device) -> float:
        """What the host needs to issue one operation; on a CPU device it comes on top of the operation, on a GPU it runs ahead of it."""

    def collective_seconds(self, collective: Collective, size_bytes: int, devices: Sequence[Device], inventory: Inventory) -> float:
        """One collective between ranks on these devices.

        Args:
            collective: which.
            size_bytes: of the whole result of an all_gather, the whole input of a reduce_scatter, the tensor of the others.
            devices: one a rank.
            inventory: whose links count.
        """

    def host_copy_seconds(self, device: Device, size_bytes: int) -> float:
        """Between pinned host memory and the device, in one direction; 0 on a CPU device."""

    def host_adam_seconds(self, elements: int) -> float:
        """AdamW's update of so many fp32 elements on the host's cores."""

    def overlap(self, device: Device) -> float:
        """Which share of computing can hide communication: 0 where the same cores do both (gloo), near 1 with copy engines and NCCL."""
