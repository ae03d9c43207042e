"""The contract for one device, and for DDP: replicas of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_autopar.devices.inventory import Device, Inventory
from lightning_autopar.engines import Engine, Question, Rank, recomputed
from lightning_autopar.memory.allocator.device import PlayedDevice
from lightning_autopar.memory.allocator.play import DDPPlayer, Player
from lightning_autopar.memory.allocator.tape_parts import TapeParts
from lightning_autopar.memory.device_bytes import DeviceBytes
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.planning.candidates import build_plan
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.ddp.memory import whole_bytes
from lightning_autopar.strategies.ddp.timing import DDPStep
from lightning_autopar.timing.rates import Rates
from lightning_autopar.timing.step import Step


class Single(Engine):
    """One device runs everything."""

    name = "single"
    several = False
    replays = True
    reruns = True
    measured = ()

    def check(self, plan: Plan) -> None:
        """Raise unless it has one device."""
        if plan.world_size != 1:
            raise ValueError(f"engine 'single' runs on one device, but the plan names {plan.world_size}: {plan.devices!r}")

    def refusal(self, question: Question) -> str | None:
        """Refuse where several processes were started, each of which needs a device."""
        least = question.constraints.min_devices or 1
        return f"{least} processes were started, and each needs a device" if least > 1 else None

    def plans(self, question: Question, devices: Sequence[Device]) -> Iterable[Plan]:
        """One plan."""
        return (build_plan(question, devices, self.name, "one device: nothing to communicate"),)

    def bytes(self, rank: Rank) -> Iterable[DeviceBytes]:
        """All of the state and of the step."""
        return whole_bytes(rank, buckets=False)

    def step(self, footprint: Footprint, plan: Plan, inventory: Inventory, precision: str, rates: Rates) -> Step:
        """A step without communication."""
        return Step(footprint, plan, inventory, precision, rates)

    def communicators(self, plan: Plan) -> tuple[int, ...]:
        """None: one device has nobody to talk to."""
        return ()

    def player(self, machine: PlayedDevice, script: TapeParts, footprint: Footprint, plan: Plan, rank: int, rows: Sequence[int]) -> Player:
        """The player of a rank that holds everything."""
        return Player(machine, script, footprint, rows, recomputed(footprint, plan))

    def strategy(self, run: Any, *, forked: bool) -> Any:
        """Lightning's ``SingleDeviceStrategy`` with the mixin."""
        from lightning_autopar.strategies.ddp.strategy import SingleEngine

        return SingleEngine(run)


@dataclass(frozen=True)
class DDP(Engine):
    """A replica of the module on each device."""

    name = "ddp"
    shares = True
    shares_network = True
    replays = True
    reruns = True
    measured = ("all_reduce", "loop/ddp")

    def plans(self, question: Question, devices: Sequence[Device]) -> Iterable[Plan]:
        """One plan; uneven shares are a remedy."""
        sent = "gradients alone are communicated" if question.footprint.training else "each takes its share of the samples"
        return (build_plan(question, devices, self.name, f"a replica on each device: {sent}"),)

    def bytes(self, rank: Rank) -> Iterable[DeviceBytes]:
        """All of the state and of the step; DDP's buckets hold the gradients."""
        return whole_bytes(rank, buckets=True)

    def step(self, footprint: Footprint, plan: Plan, inventory: Inventory, precision: str, rates: Rates) -> Step:
        """A step that reduces buckets of gradients during backward."""
        return DDPStep(footprint, plan, inventory, precision, rates)

    def player(self, machine: PlayedDevice, script: TapeParts, footprint: Footprint, plan: Plan, rank: int, rows: Sequence[int]) -> Player:
        """The player of a rank that holds everything, with DDP's buckets."""
        return DDPPlayer(machine, script, footprint, rows, recomputed(footprint, plan))

    def strategy(self, run: Any, *, forked: bool) -> Any:
        """Lightning's ``DDPStrategy`` with the mixin."""
        from lightning_autopar.strategies.ddp.strategy import DDPEngine

        return DDPEngine(run, forked=forked)
