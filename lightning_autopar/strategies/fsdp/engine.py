"""The contract for FSDP2: parameters, gradients and optimizer state in shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from lightning_autopar.devices.inventory import Device, Inventory
from lightning_autopar.engines import Check, Engine, Finding, FirstStep, Question, Rank, recomputed
from lightning_autopar.memory.allocator.played_device import PlayedDevice
from lightning_autopar.memory.allocator.tape_parts import TapeParts
from lightning_autopar.memory.allocator.tape_player import Player
from lightning_autopar.memory.device_bytes import DeviceBytes
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.planning.block_units import shardable
from lightning_autopar.planning.device_sets import islands
from lightning_autopar.planning.enumerate_plans import build_plan
from lightning_autopar.planning.refusals import feature_refusal
from lightning_autopar.plans import OFFLOADS, Offload, Plan
from lightning_autopar.strategies.fsdp.memory import AS_TRACED, Widths, offloaded_bytes, rank_bytes, sharding_of
from lightning_autopar.strategies.fsdp.tape_player import FSDPPlayer
from lightning_autopar.strategies.fsdp.timing import FSDPStep
from lightning_autopar.timing.rates import Rates
from lightning_autopar.timing.step_seconds import Step

#: Up to this number of devices, every number of copies of the model is tried.
_FEW_DEVICES = 16


@dataclass(frozen=True)
class FSDP(Engine):
    """Shards of the module on each device.

    Args:
        widths: the types of parameters and gradients under mixed precision; in our engine those that were traced.
    """

    widths: Widths = AS_TRACED
    name = "fsdp"
    shares = True
    shares_network = True
    whole = False
    plainer = ("ddp", "replicas")
    replays = True
    looks_long = True
    measured = ("all_reduce", "all_gather", "reduce_scatter", "loop/fsdp", "unit")

    def check(self, plan: Plan) -> None:
        """Raise unless it offloads both or nothing, and each copy of the model has several devices."""
        if not isinstance(plan.reshard_after_forward, bool):
            raise ValueError(f"an fsdp plan needs reshard_after_forward, true or false, but it is {plan.reshard_after_forward!r}")
        if plan.replicas == plan.world_size > 1:
            raise ValueError(
                f"{plan.replicas} replicas leave each one device of {plan.world_size}; choose engine 'ddp', or have fewer replicas"
            )
        if plan.offload not in ((), OFFLOADS):
            raise ValueError(
                f"fsdp offloads {' and '.join(OFFLOADS)} together, but the plan names {plan.offload[0]!r} alone; name both or none"
            )

    def words(self, plan: Plan) -> dict[str, str]:
        """With what becomes of gathered parameters."""
        told = super().words(plan)
        return {**told, "devices": f"{told['devices']}, {'reshard' if plan.reshard_after_forward else 'keep gathered'}"}

    def sample(self, devices: Sequence[Device], blocks: Sequence[str], micro_batches: int) -> Plan:
        """Each block is a unit."""
        ids = tuple(device.id for device in devices)
        return Plan(engine=self.name, devices=ids, reshard_after_forward=True, shard=tuple(blocks))

    def plans(self, question: Question, devices: Sequence[Device]) -> Iterable[Plan]:
        """Plans with and without offload, for any number of copies, with gathered parameters kept or freed."""
        footprint, constraints = question.footprint, question.constraints
        copies, offloads = [1], [(), OFFLOADS]
        if feature_refusal("replicas", footprint, constraints) is None:
            copies += _copies(devices, question.inventory)
        if feature_refusal("offload", footprint, constraints) is not None:
            offloads = [()]
        for offload, count, reshard in product(offloads, copies, (False, True)):
            yield self._plan(question, devices, reshard, count, offload)

    def example(self, question: Question, devices: Sequence[Device]) -> Plan:
        """The plan that takes least of the device's memory."""
        return self._plan(question, devices, True, 1, ())

    def _plan(self, question: Question, devices: Sequence[Device], reshard: bool, copies: int, offload: tuple[Offload, ...]) -> Plan:
        shard, left_out = shardable(question.footprint, question.constraints.split)
        alone = len(devices) == 1
        fetched, fetching = ("copied", "copying") if alone else ("gathered", "gathering")
        shared = "parameters, gradients and optimizer state are sharded: each device holds its part"
        reasons = ["on one device FSDP2 shards nothing, but copies a block's parameters there when the block runs" if alone else shared]
        if left_out:
            reasons.append(
                f"{', '.join(left_out)} not sharded as units of their own: other code has or uses their parameters, or samples decide "
                "whether they are called"
            )
        if reshard:
            reasons.append(f"parameters are freed between forward and backward, for memory, and {fetched} a second time")
        else:
            reasons.append(f"{fetched} parameters are kept for backward, which saves {fetching} them a second time")
        if copies > 1:
            reasons.append(f"{copies} copies of the model: parameters are gathered where links are fast, gradients alone go further")
        values: dict[str, Any] = {"reshard_after_forward": reshard, "shard": shard, "replicas": copies, "offload": offload}
        return build_plan(question, devices, self.name, *reasons, **values)

    def training_arguments(self, plan: Plan, layers: Sequence[str], recomputing: Mapping[str, Any]) -> dict[str, Any]:
        """FSDP2, with accelerate's own recomputation."""
        config: dict[str, Any] = {"version": 2, "reshard_after_forward": bool(plan.reshard_after_forward)}
        config |= {"transformer_layer_cls_to_wrap": list(layers)}
        config |= {"cpu_offload": True} if plan.offload else {}
        config |= {"activation_checkpointing": True} if recomputing else {}
        return {"fsdp": True, "fsdp_config": config}

    def not_by_transformers(self, *, on_cpu: bool, own_optimizer: bool) -> str | None:
        """Refuse CPU devices, where accelerate ignores FSDP, and the script's optimizer, which transformers refuses."""
        if on_cpu:
            return "transformers' Trainer runs FSDP on GPUs only; on CPU devices accelerate would run DDP instead"
        return "transformers refuses FSDP where the script passes optimizers to the Trainer" if own_optimizer else None

    def bytes(self, rank: Rank) -> Iterable[DeviceBytes]:
        """Shards, and gathered parameters."""
        return rank_bytes(rank, self.widths)

    def step(self, footprint: Footprint, plan: Plan, inventory: Inventory, precision: str, rates: Rates) -> Step:
        """A step that gathers each unit's parameters while the unit before computes, and reduces its gradients afterwards."""
        return FSDPStep(footprint, plan, inventory, precision, rates)

    def import_early(self) -> None:
        """FSDP2, with what shards and gathers tensors."""
        import lightning_autopar.strategies.fsdp.rehearsal  # noqa: F401

    def strategy(self, run: Any, *, forked: bool) -> Any:
        """Lightning's ``ModelParallelStrategy`` with the mixin."""
        from lightning_autopar.strategies.fsdp.strategy import FSDPEngine

        return FSDPEngine(run)

    def unfit(self, trainer: Any, kinds: Mapping[str, str]) -> str | None:
        """Refuse by precision, callbacks and compiled parts."""
        from lightning_autopar.strategies.fsdp.refusals import unsharded_run

        return unsharded_run(trainer, kinds)

    def look(self, first: FirstStep) -> Finding:
        """A rehearsal of the training step on two ranks; and what the samples may leave without a gradient on some of them."""
        from lightning_autopar.strategies.fsdp.rehearsal import why_unsharded

        uneven = () if first.split is None else first.split.uneven_calls
        rehearsed = first.trial or self.trial(first)
        untried = "on one device FSDP2 only offloads, which is tried once such a plan is chosen" if rehearsed is None else None
        return Finding(refusals={self.name: why_unsharded(first, rehearsed)}, untried=untried, value=uneven)

    def trial(self, first: FirstStep) -> Any:
        """The rehearsal. On one device, where FSDP2 only offloads, the very plan is rehearsed once it is chosen."""
        from lightning_autopar.strategies.fsdp.rehearsal import rehearse_fsdp

        if first.stage != "fit" or first.untried is not None or not first.several:
            return None
        told: dict[str, Any] = {"flops": first.footprint.flops, "conduct": first.footprint.conduct}
        return rehearse_fsdp(first.trainer.lightning_module, first.trainer, first.batch, shardable(first.footprint, first.split)[0], **told)

    def untried(self, plan: Plan, footprint: Footprint, finding: Finding) -> bool:
        """The step, where it wasn't rehearsed; and a plan's further features in a module that shards itself."""
        besides = bool(plan.offload) or plan.replicas > 1
        return footprint.training and (finding.untried is not None or (besides and footprint.configures_model))

    def rehearse(self, plan: Plan, first: FirstStep, finding: Finding) -> Check:
        """Compares its step on two ranks with one process's."""
        from lightning_autopar.strategies.fsdp.rehearsal import rehearse_fsdp

        told: dict[str, Any] = {"flops": first.footprint.flops, "conduct": first.footprint.conduct}
        by_plan = bool(plan.offload) or plan.replicas > 1
        return rehearse_fsdp(first.trainer.lightning_module, first.trainer, first.batch, plan.shard, by_plan=by_plan, **told)

    def ruled_out(self, plan: Plan) -> tuple[str, ...]:
        """On several devices, only the plan's offload or copies."""
        return (self.name,) if plan.world_size == 1 else ("offload", "replicas")

    def alike(self, footprint: Footprint, plan: Plan) -> Sequence[int]:
        """The ranks after the first are alike. The first may pad its shards less: it has most of each, and the last rank least."""
        last = plan.devices_per_replica - 1
        padded = plan.world_size > 1 and sharding_of(footprint, plan, 0).total.own != sharding_of(footprint, plan, last).total.own
        return (0, *(int(padded),) * (plan.world_size - 1))

    def host_bytes(self, footprint: Footprint, plan: Plan, *, precision: str, on_cpu: bool) -> tuple[int, int]:
        """Shards of parameters and gradients, page-locked for a GPU, and the optimizer's state."""
        return offloaded_bytes(footprint, plan, on_cpu=on_cpu)

    def player(self, machine: PlayedDevice, script: TapeParts, footprint: Footprint, plan: Plan, rank: int, rows: Sequence[int]) -> Player:
        """The player of a rank that holds shards."""
        index = {block.fqn: number for number, block in enumerate(footprint.blocks)}
        return FSDPPlayer(
            machine,
            script,
            footprint,
            rows,
            recomputed(footprint, plan),
            units=[index[fqn] for fqn in plan.shard],
            rank=rank % plan.devices_per_replica,
            world_size=plan.devices_per_replica,
            reshard=bool(plan.reshard_after_forward),
            widths=self.widths,
            offloads=bool(plan.offload),
        )


def _copies(devices: Sequence[Device], inventory: Inventory) -> list[int]:
    """How many copies of the model hybrid sharding may have. With few devices on one node it is any number that divides theirs; else one a
    node, or one an island of well linked devices, and half as many.
    """
    found: list[int] = []
    nodes: dict[int, list[Device]] = {}
    for device in devices:
        nodes.setdefault(device.node, []).append(device)
    if len(nodes) == 1 and len(devices) <= _FEW_DEVICES:
        return [count for count in range(len(devices) // 2, 1, -1) if len(devices) % count == 0]
    groups: list[list[Device]] = list(nodes.values()) if len(nodes) > 1 else islands(inventory, devices)
    if len({len(group) for group in groups}) != 1:
        return []
    count = len(groups)
    while count > 1 and count < len(devices):
        found.append(count)
        if count % 2:
            break
        count //= 2
    return found[:2]
