"""The columns: the plans that every model is tried under, and which cells there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_autopar.plans import Plan
from tests.conformance.devices import CPUS, Devices
from tests.conformance.verdict import autopar

#: The columns: how many processes each has. What isn't pinned, the planner chooses, with that engine alone allowed.
PLANS: dict[str, int] = {"single": 1, "micro-batches": 1, "ddp": 2, "fsdp": 2, "pipeline": 2, "zero-3": 2}
_PINNED = {"micro-batches": Plan(engine="single", devices=CPUS.ids(1), micro_batches=2)}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A model under a plan, against plain Lightning."""

    member: str
    plan: str

    @property
    def id(self) -> str:
        return f"{self.member}-{self.plan}"


def strategy(plan: str, devices: Devices = CPUS) -> Callable[[], Any]:
    """Makes a column's strategy."""
    if pinned := _PINNED.get(plan):
        return autopar(pinned.engine, devices, plan=devices.place(pinned), **devices.strategy(pinned.world_size))
    return autopar(plan, devices)


def engine(plan: str) -> str:
    """The engine that a refusal must name."""
    return _PINNED[plan].engine if plan in _PINNED else plan.partition("-")[0]
