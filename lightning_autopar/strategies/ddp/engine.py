"""The contract for one device, and for DDP: replicas of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lightning_autopar.devices.inventory import Device, Inventory
from lightning_autopar.engines import Engine, Question, Rank, recomputed
from lightning_autopar.memory.allocator.options import MIB
from lightning_autopar.memory.allocator.played_device import PlayedDevice
from lightning_autopar.memory.allocator.tape_parts import TapeParts
from lightning_autopar.memory.allocator.tape_player import DDPPlayer, Player
from lightning_autopar.memory.device_bytes import DeviceBytes
from lightning_autopar.memory.footprint import CREATE_GRAPH, Footprint
from lightning_autopar.planning.enumerate_plans import build_plan
from lightning_autopar.plans import Plan
from lightning_autopar.timing.overlap import LaneSeconds, Links, play_replicas
from lightning_autopar.timing.rank_compute import LaneSpan, RankWork
from lightning_autopar.timing.rates import Rates
from lightning_autopar.timing.step_seconds import Step


class DDPStep(Step):
    """One step of a DDP plan.

    Attributes:
        gradient_scale: bytes of a gradient on the wire over those that it has at rest.
    """

    gradient_scale = 1.0

    def played(self, run: RankWork, events: list[LaneSpan] | None = None) -> LaneSeconds:
        """Play the step: each bucket is reduced when backward has filled it."""
        return play_replicas(self.layout, run, self.links(), self.gradient_scale, events)

    def links(self) -> Links:
        """Each rank has a whole copy."""
        return Links(self.devices[:1], self.devices, self.inventory, self.rates)


#: The size of the buffers in which DDP sends rank 0's weights, two at a time (torch ``distributed.py``, ``broadcast_bucket_size``;
#: ``comm.cpp``, ``broadcast_coalesced``), unless the ranks were forked from one process that has them.
_BROADCAST_BYTES = 250 * MIB
_BROADCASTS = 2


def whole_bytes(rank: Rank, *, buckets: bool) -> Iterator[DeviceBytes]:
    """Bytes of one device, or of each replica: it holds everything. DDP's buckets hold every gradient all the time
    (``gradient_as_bucket_view``), and are reduced in place. They are built once: with ``find_unused_parameters`` they aren't rebuilt after
    the first step (``reducer.hpp``, ``should_rebuild_buckets``). Under ``no_sync`` (Lightning's accumulation) gradients lie beside the
    buckets until the last batch's backward moves them there. Where a batch runs in parts, the first part's gradients stay in memory, too;
    the parts add up in DDP's buckets.

    Args:
        buckets: whether there are DDP's buckets.
    """
    footprint, moments = rank.footprint, rank.moments()
    gradients = moments.gradients
    in_parts = rank.plan.micro_batches > 1
    if buckets or in_parts:
        waiting = np.where(moments.waiting, moments.gradients, 0) if buckets and not in_parts else 0
        gradients = footprint.gradient_bytes + np.zeros_like(moments.gradients) + waiting
    place = int(np.argmax(gradients + moments.activations + moments.temporary))
    step = DeviceBytes(
        parameters=footprint.parameter_bytes,
        gradients=int(gradients[place]),
        optimizer=footprint.optimizer_bytes,
        activations=int(moments.activations[place]),
        temporary=int(moments.temporary[place]),
        buffers=footprint.buffer_bytes + footprint.copied_bytes,
        input=round(footprint.input_bytes * rank.share),
        updates=not (moments.forward[place] or moments.backward[place]),
    )
    yield step
    if buckets and not rank.on_cpu:  # while replicas receive rank 0's weights
        sent = min(footprint.parameter_bytes + footprint.buffer_bytes, _BROADCASTS * _BROADCAST_BYTES)
        yield DeviceBytes(parameters=footprint.parameter_bytes, buffers=footprint.buffer_bytes, communication=sent, occasion="start")
    if (runs := rank.evaluation_bytes) is not None:  # Lightning has set the gradients to None; buckets stay
        kept = footprint.gradient_bytes if buckets else 0
        held = step.buffers + footprint.set_aside_bytes
        yield replace(step, gradients=kept, activations=0, temporary=runs, buffers=held, input=0, occasion="validation")


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
        sent = "only gradients are communicated" if question.footprint.training else "each takes its share of the samples"
        return (build_plan(question, devices, self.name, f"a replica on each device: {sent}"),)

    def refusal(self, question: Question) -> str | None:
        """Refuse backward passes within the backward pass, whose parameters DDP takes for unused ones, and then gets their gradients; and
        gradients that have a graph, as the means that DDP puts in their place have none.
        """
        if not (function := question.footprint.reentrant):
            return None
        if function == CREATE_GRAPH:
            return (
                "backward(create_graph=True) keeps the graph of gradients for gradients of these, and what DDP puts in their place, "
                "the mean over all ranks, has no graph; take what needs it within the loss (torch.autograd.grad(..., create_graph=True))"
            )
        return (
            f"the backward of {function} runs a backward pass of its own, in which parameters get gradients that DDP doesn't "
            "wait for; use torch.utils.checkpoint with use_reentrant=False, or layers that aren't reversible"
        )

    def unfit(self, trainer: Any, kinds: Mapping[str, str]) -> str | None:
        """Refuse sparse gradients on GPUs, which exchange gradients by NCCL."""
        from lightning_autopar._lightning_compat import TrainerFn
        from lightning_autopar.strategies.base.refused_parameters import sparse_gradients

        if trainer.state.fn != TrainerFn.FITTING or trainer.strategy.root_device.type != "cuda":
            return None
        return sparse_gradients(trainer.lightning_module, "which NCCL can't reduce")

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
