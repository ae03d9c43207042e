"""The scenarios: a model, a batch, devices with budgets; and every plan that is worth a run there. It runs nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from lightning_autopar.devices.inventory import Device, Inventory
from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.planning.block_units import cuttable, recomputable_order, shardable
from lightning_autopar.planning.refusals import cannot_run
from lightning_autopar.plans import Plan

#: Into how many parts a batch is taken where it doesn't fit whole.
MICRO_BATCHES = (2, 4)
#: Of an even pipeline's batch, for each stage: enough to keep bubbles small, as its users are told.
_PARTS_A_STAGE = 2
#: What no budget of a scenario comes near to: under it every plan may be tried.
_AMPLE = "8GiB"


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One question to the planner.

    Args:
        model: a key of :data:`decisions.models.MODELS`.
        batch: samples.
        devices: the spec, budgets in it.
    """

    model: str
    batch: int
    devices: str

    @property
    def name(self) -> str:
        """``"gpt 16 on 2xcpu:40MiB"``."""
        return f"{self.model} {self.batch} on {self.devices}"

    @property
    def inventory(self) -> Inventory:
        """Its devices."""
        return parse_spec(self.devices)

    @property
    def uneven(self) -> bool:
        """Whether its devices have different budgets."""
        return len({device.free_bytes for device in self.inventory.devices}) > 1

    @property
    def ample_devices(self) -> str:
        """The same devices, with as many threads each, with so much memory that any plan may be pinned."""
        return f"{len(self.inventory.devices)}xcpu:{_AMPLE}"


def _scenarios() -> Iterator[Scenario]:
    table: dict[tuple[str, int], tuple[str, ...]] = {
        ("gpt", 16): (
            "1xcpu:128MiB",
            "2xcpu:128MiB",
            "2xcpu:40MiB",
            "2xcpu:30MiB",
            "2xcpu:21MiB",
            "4xcpu:128MiB",
            "cpu:32MiB,cpu:64MiB",
            "cpu:24MiB,cpu:48MiB",
        ),
        ("gpt", 2): ("2xcpu:128MiB",),
        ("wide", 8): ("2xcpu:128MiB",),
        # Of the uneven ones no device holds all states.
        ("wide", 64): ("2xcpu:128MiB", "2xcpu:76MiB", "4xcpu:52MiB", "2xcpu:45MiB,cpu:90MiB", "2xcpu:30MiB,cpu:90MiB"),
        ("wide", 512): ("2xcpu:104MiB",),
        ("resnet", 16): ("2xcpu:64MiB", "2xcpu:9MiB", "cpu:7MiB,cpu:14MiB"),
        ("resnet-bn", 16): ("cpu:8MiB,cpu:16MiB", "cpu:5.5MiB,cpu:16.5MiB"),
        ("lstm", 32): ("1xcpu:64MiB", "2xcpu:128MiB", "2xcpu:54MiB", "4xcpu:30MiB"),
        ("bert", 16): ("2xcpu:128MiB", "2xcpu:54MiB", "3xcpu:48MiB", "cpu:40MiB,cpu:80MiB", "cpu:32MiB,cpu:96MiB"),
        ("vit", 16): ("1xcpu:32MiB", "2xcpu:128MiB", "2xcpu:26MiB", "2xcpu:13MiB,2xcpu:26MiB"),
    }
    # A part of them, if time is short, is of all models.
    for place in range(max(map(len, table.values()))):
        for (model, batch), specs in table.items():
            if place < len(specs):
                yield Scenario(model=model, batch=batch, devices=specs[place])


SCENARIOS: tuple[Scenario, ...] = tuple(_scenarios())


def key(plan: Plan) -> Plan:
    """What of a plan decides how it runs: everything but the reasons."""
    return replace(plan, reasons=())


def every_plan(footprint: Footprint, inventory: Inventory) -> list[Plan]:
    """Single, DDP and FSDP2 on one to all of the devices, the freest first, each with the ways to save memory that can be run.

    FSDP2 with and without resharding; nothing or every block that allows it recomputed; the batch whole or in micro-batches; shared evenly
    or, where budgets differ, as the budgets are. A pipeline of as many blocks in each stage, as somebody cuts it who knows nothing of their
    sizes. Which blocks to recompute and where else to cut is the planner's finesse: its own candidates are run, too.
    """
    freest = sorted(inventory.devices, key=lambda device: -device.free_bytes)
    units = shardable(footprint)[0]
    again = set(recomputable_order(footprint))
    everything = tuple(block.fqn for block in footprint.blocks if block.fqn in again)
    found: list[Plan] = []
    for count in range(1, min(len(freest), max(1, footprint.batch_size)) + 1):
        devices = freest[:count]
        ids = tuple(device.id for device in inventory.devices if device in devices)
        if count == 1:
            plain = [Plan(engine="single", devices=ids)]
        else:
            gathered = [Plan(engine="fsdp", devices=ids, shard=units, reshard_after_forward=reshard) for reshard in (False, True)]
            plain = [Plan(engine="ddp", devices=ids), *gathered]
        for plan in plain:
            for shares in _shares(devices, ids):
                shared = replace(plan, shares=shares)
                found.append(shared)
                if everything:
                    found.append(replace(shared, recompute=everything))
                if plan.reshard_after_forward is not False:  # who lacks memory reshards before anything else
                    found += [replace(shared, micro_batches=parts) for parts in MICRO_BATCHES if parts * count <= footprint.batch_size]
        if (cuts := even_cuts(footprint, count)) and _PARTS_A_STAGE * count <= footprint.batch_size:
            found.append(Plan(engine="pipeline", devices=ids, cuts=cuts, schedule="1f1b", micro_batches=_PARTS_A_STAGE * count))
    return [plan for plan in found if cannot_run(plan) is None]


def even_cuts(footprint: Footprint, stages: int) -> tuple[str, ...]:
    """Where a pipeline is cut whose stages have as many blocks each, as nearly as it goes; none where it can't be cut there."""
    count, allowed = len(footprint.blocks), cuttable(footprint)
    starts = [round(stage * count / stages) for stage in range(1, stages)]
    if stages > count or not all(allowed[start] for start in starts):
        return ()
    return tuple(footprint.blocks[start].fqn for start in starts)


def is_even(plan: Plan, blocks: Sequence[str]) -> bool:
    """Whether a plan asks as much of each of its devices, whatever they have free: of a pipeline, as many blocks."""
    if plan.engine != "pipeline":
        return not plan.shares
    borders = [0, *(blocks.index(cut) for cut in plan.cuts), len(blocks)]
    sizes = [after - before for before, after in pairwise(borders)]
    return max(sizes) - min(sizes) <= 1


def _shares(devices: Sequence[Device], ids: Sequence[str]) -> list[tuple[int, ...]]:
    """Even, and as the budgets are, in whole multiples of the least."""
    free = {device.id: device.free_bytes for device in devices}
    least = min(free.values())
    uneven = tuple(round(free[device] / least) for device in ids)
    return [()] if len(set(uneven)) == 1 else [(), uneven]


def does_less(other: Plan, plan: Plan) -> bool:
    """Whether the other does the same with less work, so that it is the faster one wherever it has room.

    Less of it recomputed, fewer micro-batches, the batch shared evenly among ranks with as many threads each. Pipelines are each another
    thing: their micro-batches are what makes them fast.
    """
    if "pipeline" in (other.engine, plan.engine) or key(other) == key(plan) or other.shares not in ((), plan.shares):
        return False
    alike = replace(key(plan), recompute=other.recompute, micro_batches=other.micro_batches, shares=()) == replace(key(other), shares=())
    less = set(other.recompute) <= set(plan.recompute) and other.micro_batches <= plan.micro_batches
    return alike and less


def lightest_first(plans: Sequence[Plan]) -> list[Plan]:
    """In an order in which no plan comes before one that does less."""
    return sorted(plans, key=lambda plan: (len(plan.recompute) + plan.micro_batches + bool(plan.shares), plan.world_size))
