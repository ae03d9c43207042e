"""Rates that a test can reckon with by head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_autopar.devices.inventory import Device, Inventory
from lightning_autopar.memory.work.work import Work
from lightning_autopar.plans import Engine
from lightning_autopar.timing.rates import Collective, Phase, Python, Rates


@dataclass(frozen=True, kw_only=True)
class PlainRates(Rates):
    """A second for so many FLOPs and bytes; nothing for what isn't asked for."""

    flops_per_second: float = 1e12
    bytes_per_second: float = float("inf")
    wire_bytes_per_second: float = float("inf")
    latency: float = 0.0
    copy_bytes_per_second: float = float("inf")
    adam_seconds: float = 0.0
    issue: float = 0.0
    loop: float = 0.0
    unit: float = 0.0
    call: float = 0.0
    action: float = 0.0
    hides: float = 1.0

    def work_seconds(self, device: Device, work: Work) -> float:
        return work.flops / self.flops_per_second + work.moved_bytes / self.bytes_per_second

    def issue_seconds(self, device: Device, phase: Phase = "forward") -> float:
        return self.issue

    def loop_seconds(self, device: Device, engine: Engine) -> float:
        return self.loop

    def python_seconds(self, device: Device, of: Python) -> float:
        return {"call": self.call, "unit": self.unit, "action": self.action}[of]

    def collective_seconds(self, collective: Collective, size_bytes: int, devices: Sequence[Device], inventory: Inventory) -> float:
        return self.latency + size_bytes / self.wire_bytes_per_second

    def host_copy_seconds(self, device: Device, size_bytes: int) -> float:
        return 0.0 if device.kind == "cpu" else size_bytes / self.copy_bytes_per_second

    def host_adam_seconds(self, elements: int, device: Device) -> float:
        return elements * self.adam_seconds

    def overlap(self, device: Device) -> float:
        return self.hides
