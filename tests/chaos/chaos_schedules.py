"""What happens to a run, drawn from a seed: which plans, at which batches, which faults."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from lightning_autopar.plans import Plan
from tests.chaos.chaos_modules import BLOCKS, Variant
from tests.chaos.chaos_stage import KILLED, Action

#: Faults after which the run goes on from its last snapshot, or a move is given up.
KILLS = ("outside", "outside", *KILLED)


def _devices(*numbers: int) -> tuple[str, ...]:
    return tuple(f"cpu:{number}" for number in numbers)


def single(device: int) -> Plan:
    return Plan(engine="single", devices=_devices(device))


def ddp(*devices: int) -> Plan:
    return Plan(engine="ddp", devices=_devices(*devices))


def fsdp(*devices: int, reshard: bool = True, **more: Any) -> Plan:
    return Plan(engine="fsdp", devices=_devices(*devices), reshard_after_forward=reshard, shard=BLOCKS, **more)


def zero(stage: int, *devices: int, **more: Any) -> Plan:
    return Plan(engine="zero", devices=_devices(*devices), zero_stage=stage, **more)


def offloaded(*devices: int) -> Plan:
    return zero(3, *devices, offload=("optimizer", "parameters"))


def pipeline(*devices: int, micro_batches: int = 3, **more: Any) -> Plan:
    return Plan(engine="pipeline", devices=_devices(*devices), cuts=("net.2",), schedule="1f1b", micro_batches=micro_batches, **more)


def pool(variant: Variant, devices: int) -> list[Plan]:
    """The plans that a variant can run under on so many devices."""
    pairs = [(one, other) for one in range(devices) for other in range(devices) if one < other]
    plans = [*(single(device) for device in range(devices))]
    if variant.data == "two":  # the loaders' batches of one step aren't split
        return plans
    plans += [*(ddp(*pair) for pair in pairs), ddp(0, 1, 2)]
    if variant.ema:  # it reads whole weights
        return plans
    plans += [fsdp(*pair) for pair in pairs] + [fsdp(0, 2, reshard=False)]
    plans += [pipeline(*pair) for pair in pairs] + [pipeline(0, 1, micro_batches=2)]
    plans += [zero(stage, *pair) for stage in (1, 2, 3) for pair in pairs[:2]]
    plans += [offloaded(1), offloaded(1, 2)]
    if devices >= 4:
        plans += [fsdp(0, 1, 2, 3, replicas=2), pipeline(0, 1, 2, 3, replicas=2)]
    return plans


def of_one_device(devices: int) -> list[Plan]:
    """Plans that are alike but for where."""
    return [single(device) for device in range(devices)]


def draw_actions(
    seed: int, variant: Variant, plans: Sequence[Plan], *, moves: int, kills: int = 0, parks: int = 0, every: Sequence[Plan] = ()
) -> list[Action]:
    """Actions at batches all over the run; some at the places where a move could lose most.

    Args:
        seed: what is drawn from.
        variant: how long the run is.
        plans: what to move to.
        moves: how many, without those that a fault brings along.
        kills: how many faults.
        parks: how many times without devices.
        every: plans of which each is moved to, before any other.
    """
    draw = random.Random(seed)
    total = variant.epochs * variant.batches
    kinds = ["move"] * moves + ["fault"] * kills + ["park"] * parks
    draw.shuffle(kinds)
    special = {epoch * variant.batches for epoch in range(1, variant.epochs)}  # an epoch's last batch is done
    special |= set(range(variant.check_every, total, variant.check_every))  # a validation was due
    places = sorted(draw.choice((draw.randint(1, total - 3), draw.choice(sorted(special)))) for _ in kinds)
    first, actions, last = list(every), [], None
    for kind, at in zip(kinds, places, strict=True):
        at = min(at, total - 3)
        choice = [plan for plan in plans if plan != last]
        if kind == "fault":
            where = draw.choice(KILLS)
            brings = where in ("preparing", "during_preparation", "starting")
            plan = draw.choice(choice) if brings else None
            actions.append(
                Action(at=at, what="fault", where=where, plan=plan, rank=draw.randint(0, 3), after_seconds=draw.uniform(0.0, 0.15))
            )
        else:
            plan = first.pop(0) if first else draw.choice(choice)
            actions.append(Action(at=at, what=kind, plan=plan))
        last = plan or last
    return actions
