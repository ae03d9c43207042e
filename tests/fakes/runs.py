"""A run with settable state, as its agent would show it: the devices are as they are set, and plans are really planned."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_autopar.constraints import Constraints
from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.planning.make_report import make_report
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.base.run_plan import RunPlan
from lightning_autopar.strategies.preparation.decision import Decision, MoveRequest
from tests.fakes.rates import PlainRates
from tests.fakes.values import inventory as make_inventory


def planned(footprint: Footprint, inventory: Inventory, **constraints: Any) -> Decision:
    """The decision that a run would take there, at a TFLOP/s a device."""
    report = make_report(footprint, inventory, Constraints(**{"allow": ("single", "ddp"), **constraints}), rates=PlainRates())
    assert report.best is not None
    devices = tuple(inventory.device(device) for device in report.best.devices)
    return Decision(report=report, run_plan=RunPlan(plan=report.best, devices=devices, candidate=report.best_candidate))


class FakeRun:
    """Every attribute may be set at any time; ``follow`` does what the agent would do with a wish.

    Args:
        footprint: of the module.
        inventory: the devices at the beginning.
        constraints: of every planning.
    """

    def __init__(self, footprint: Footprint, inventory: Inventory, **constraints: Any) -> None:
        self.footprint, self.there, self.constraints = footprint, inventory, constraints
        self.decision = planned(footprint, inventory, **constraints)
        self.step_seconds: float | None = self.decision.candidate.step_seconds
        self.remaining_steps = math.inf
        self.state_bytes = 3 * footprint.parameter_bytes
        self.move_seconds = 2.0
        self.moved_at: float | None = None
        self.parked = False
        self.measured_bytes: Mapping[str, int] = {}
        self.asked: list[Inventory] = []

    @property
    def plan(self) -> Plan:
        return self.decision.run_plan.plan

    def inventory(self) -> Inventory:
        return self.there

    def replan(self, inventory: Inventory) -> Decision:
        self.asked.append(inventory)
        return planned(self.footprint, inventory, **self.constraints)

    def set(self, device_id: str, **figures: Any) -> None:
        """Change a device; ``gone=True`` takes it away, and it comes back with what else is given."""
        devices = [device for device in self.there.devices if device.id != device_id]
        if not figures.pop("gone", False):
            old = next(device for device in (*self.there.devices, *self._gone) if device.id == device_id)
            devices.append(replace(old, **figures))
        self._gone = (*self._gone, *(device for device in self.there.devices if device.id == device_id))
        devices.sort(key=lambda device: device.id)
        self.there = make_inventory(*devices, host_free_bytes=self.there.host_free_bytes, host_total_bytes=self.there.host_total_bytes)

    _gone: tuple[Any, ...] = ()

    def follow(self, move: MoveRequest | None, now: float) -> None:
        """Move or park at once; the new plan takes what was predicted."""
        if move is None:
            return
        self.moved_at, self.parked = now, move.action == "park"
        if move.decision is not None:
            self.decision = move.decision
            self.step_seconds = move.decision.candidate.step_seconds
