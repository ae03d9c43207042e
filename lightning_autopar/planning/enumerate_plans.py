"""Which plans exist for a footprint and an inventory, and why others don't.

Must not know how many bytes a plan needs: the search decides whether a plan fits, and what to do where it doesn't. Pipelines, whose cuts
depend on both, are the engine's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from lightning_autopar import engines
from lightning_autopar.constraints import Constraints
from lightning_autopar.devices.inventory import Device, Inventory
from lightning_autopar.engines import Engine, Question
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.planning.device_sets import device_sets, freest_first, islands, one_of_each_gpu, single_sets
from lightning_autopar.planning.refusals import (
    apart_notes,
    engine_refusal,
    feature_refusal,
    half_notes,
    multi_refusal,
    norm_notes,
    own_refusal,
    sharing_words,
    split_notes,
    split_refusal,
    world_notes,
)
from lightning_autopar.plans import Plan, all_engines
from lightning_autopar.text import counted


@dataclass(frozen=True, kw_only=True)
class Option:
    """A plan to consider; where it can't be taken, ``rejection`` is the sentence that says why."""

    plan: Plan
    rejection: str | None = None
    notes: tuple[str, ...] = ()


def enumerate_candidates(
    question: Question,
    *,
    speed: Mapping[str, float] | None = None,
    keep: Callable[[str], bool] = lambda _: True,
    sets: Sequence[Sequence[Device]] | None = None,
) -> Iterator[Option]:
    """Every engine's plans on every set of devices worth a look, without those that a search finds. :func:`ruled_out` gives the plans that
    are ruled out.

    Args:
        question: what is asked; a pinned plan is the planner's business, not read here.
        speed: of each device by id, in any unit; unless given, devices count as equally fast.
        keep: which engines' plans are wanted.
        sets: of devices; unless given, all that are worth a look.
    """
    footprint, inventory, constraints = question.footprint, question.inventory, question.constraints
    speed = speed or {device.id: 1.0 for device in inventory.devices}
    alone: Sequence[Sequence[Device]] = single_sets(inventory, constraints, speed)
    several = sets
    if several is None:
        several = device_sets(footprint.batch_size, inventory, constraints, speed)
    else:
        alone = [devices for devices in sets or () if len(devices) == 1]
    # Offload needs no second device. But a user who allows no engine of one device wants several.
    alone_too = len(inventory.devices) == 1 or any(not engines.named(name).several for name in constraints.allow)
    for name in all_engines():
        if not keep(name) or own_refusal(name, question) is not None:
            continue
        engine = engines.named(name)
        together = multi_refusal(question, engine) is None
        for devices in (*alone, *(several if together and engine.several else ())):
            if len(devices) < (constraints.min_devices or 1):
                continue
            for plan in engine.plans(question, devices):
                if len(devices) > 1 or not engine.several or (plan.offload and alone_too):
                    yield Option(plan=plan, notes=notes_of(plan, footprint, constraints))


def ruled_out(question: Question) -> Iterator[Option]:
    """What no plan may be or do, a plan that stands for all of them with the sentence that says why."""
    footprint, constraints = question.footprint, question.constraints
    for name, entry in all_engines().items():
        engine, refusal = engines.named(name), engine_refusal(name, question)
        if refusal is not None and (entry.offered or name in constraints.allow):
            plan = _widest(engine, question)
            # There is no pipeline on one device, and a user who allows other engines doesn't miss its row.
            if plan.engine == name or len(constraints.allow) == 1:
                yield Option(plan=plan, rejection=refusal if plan.engine == name else f"no {name}: {refusal}")
        if refusal is None:
            for plan, reason in engine.refused_parts(question, _most_devices(engine, question)):
                yield Option(plan=plan, rejection=reason)
    alone = next((engine for name in constraints.allow if not (engine := engines.named(name)).several), None)
    if footprint.batch_size > 1 and footprint.training and alone is not None:
        refusal = feature_refusal("micro_batches", footprint, constraints)
        if refusal is not None and split_refusal(constraints) is None and constraints.split_batch:
            plan = replace(_widest(alone, question), micro_batches=2)
            yield Option(plan=plan, rejection=refusal)


def micro_batch_counts(rows: int) -> list[int]:
    """The numbers of parts to split so many samples into: the smallest one of those whose largest part is equally large."""
    return sorted({-(-rows // size) for size in range(1, rows + 1)}) or [1]


def notes_of(plan: Plan, footprint: Footprint, constraints: Constraints) -> tuple[str, ...]:
    """What a reader should know about a plan, a sentence each."""
    own, splits = engines.of(plan).notes(constraints), plan.data_ranks > 1 or plan.micro_batches > 1
    if splits:
        own = (*half_notes(footprint, constraints), *own)
    if plan.micro_batches > 1:
        own = (*norm_notes(footprint, constraints), *own)
    if plan.world_size > 1:
        own = (*own, *world_notes(footprint, constraints))
    if footprint.shares_network(plan):
        return (*own, *apart_notes(constraints.split))
    return (*own, *(split_notes(constraints, ranks=plan.data_ranks > 1) if splits else ()))


def build_plan(question: Question, devices: Sequence[Device], engine: str, *reasons: str, **values: Any) -> Plan:
    """A plan on these devices, ranks in the inventory's order; the ranks of a copy of the model next to each other.

    Where the batch can't be shared evenly, the first ranks get one sample more; then a node's devices with most free memory come first,
    unless the ranks have their devices already.

    Args:
        reasons: why this plan is as it is; the first says what the engine does.
    """
    footprint, inventory, constraints = question.footprint, question.inventory, question.constraints
    ranks = inventory.in_order(devices)
    if values.get("replicas", 1) > 1:
        ranks = _by_copies(ranks, inventory)
    elif constraints.split_batch and constraints.min_devices is None and footprint.batch_size % len(ranks):
        ranks.sort(key=lambda device: (device.node, -constraints.budget_bytes(device)))
    told = [*reasons[:1]]
    if len(ranks) > 1 and not constraints.split_batch:
        told.append(f"each rank takes a batch of its own: a step trains on {len(ranks)} batches")
    if len(ranks) > 1 and footprint.sharing is not None and engines.named(engine).shares_network:
        told.append(sharing_words(footprint.sharing))
    if len(ranks) > 1 and footprint.batch_norm:
        norms = counted(len(footprint.batch_norm), "batch norm")
        told.append(f"the statistics of {norms} are taken over all ranks, as over the whole batch")
    told += reasons[1:]
    if offload := values.get("offload"):
        lies = "lie" if len(offload) > 1 else "lies"
        kinds = " and ".join(f"torch's {kind}" for kind in footprint.optimizer_classes)
        told.append(f"{' and '.join(offload)} {lies} in host memory between uses" + (f"; {kinds} updates there" if kinds else ""))
    return Plan(engine=engine, devices=tuple([device.id for device in ranks]), reasons=tuple(told), **values)


def _by_copies(ranks: Sequence[Device], inventory: Inventory) -> list[Device]:
    """Sorts devices so that those of a node lie together, and within a node those of an island."""
    if len({device.node for device in ranks}) > 1:
        return sorted(ranks, key=attrgetter("node"))
    return [device for island in islands(inventory, ranks) for device in island]


def _most_devices(engine: Engine, question: Question) -> list[Device]:
    """As many devices of one kind as a plan of an engine may have, those with most free memory first."""
    freest = freest_first(question.inventory.devices, question.constraints)
    same = one_of_each_gpu([device for device in freest if device.kind == freest[0].kind])
    return same[: question.constraints.max_devices or len(same)] if engine.several else same[:1]


def _widest(engine: Engine, question: Question) -> Plan:
    """The plan that stands in the report for all ruled-out plans of an engine."""
    return engine.example(question, _most_devices(engine, question))
