"""Why the chosen plan is the best, in sentences that compare it with the others. Must not know how plans are found or predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_autopar.memory.inventory import Device
from lightning_autopar.planning.labels import device_label
from lightning_autopar.planning.report import Candidate
from lightning_autopar.planning.roofline import busy_share
from lightning_autopar.plans import Plan
from lightning_autopar.units import format_bytes, format_seconds

_MOST_NAMED = 3


def explained(
    candidates: Sequence[Candidate], *, by_speed: bool = True, split_batch: bool = True, devices: Sequence[Device] = ()
) -> Candidate:
    """The first candidate with the reasons that come from comparing: why no simpler plan, and what came next.

    Args:
        candidates: the best one first, the others in order.
        by_speed: whether the fastest was asked for.
        split_batch: whether all plans take the same batch a step, so that their seconds compare.
        devices: those that there were to choose from.
    """
    best = candidates[0]
    plan, fitting = best.plan, [candidate for candidate in candidates if candidate.fits]
    reasons = list(plan.reasons)
    if plan.engine != "single" and (alone := next((one for one in candidates if one.plan.engine == "single"), None)):
        reasons.append(f"one device alone {_against(alone)}")
    if plan.engine == "fsdp" and (replicas := next((one for one in candidates if one.plan.engine == "ddp"), None)):
        reasons.append(f"replicas: {replicas.plan.title()} {_against(replicas)}")
    if plan.recompute and (without := next((one for one in candidates if _without_recompute(plan, one.plan)), None)):
        reasons.append(f"without recomputation it {_against(without)}")
    if best.replayed:
        lost = max(size.reserved - size.allocated - getattr(size, "context", 0) for size in best.bytes.values())
        reasons.append(f"its allocations were replayed: the allocator holds {format_bytes(lost)} beside its tensors")
    busy = {device.id: share for device in devices if (share := busy_share(device))}
    faster = min(fitting, key=lambda one: one.step_seconds) if split_batch and by_speed else best
    gain = 1 - faster.step_seconds / best.step_seconds
    if gain > 0:
        disturbs = max(busy.get(device, 0.0) for device in faster.plan.devices) > max(busy.get(device, 0.0) for device in plan.devices)
        worth = "disturbing others" if disturbs else "more than the simpler plan"
        reasons.append(f"{faster.plan.title()} would be {gain * 100:.2g} % faster, which is too little to be worth {worth}")
    reasons += _beside_others(plan, [device for device in devices if device.id in busy])
    only = "the only plan that fits" if len(fitting) == 1 else f"the best of {len(fitting)} plans that fit"
    reasons.append(f"{only}: {format_seconds(best.step_seconds)} a step" + (f"; next: {_next(fitting[1])}" if len(fitting) > 1 else ""))
    return replace(best, plan=replace(plan, reasons=tuple(reasons)))


def _beside_others(plan: Plan, busy: Sequence[Device]) -> list[str]:
    """What the plan does about devices on which others compute."""
    left = [device for device in busy if device.id not in plan.devices]
    used = [device for device in busy if device.id in plan.devices]
    found = []
    if left:
        found.append(f"others compute on {_with_shares(left)}, which {'is' if len(left) == 1 else 'are'} left to them")
    if used:
        found.append(f"others compute on {_with_shares(used)} as well, by which the plan is reckoned to be slower")
    return found


def _with_shares(devices: Sequence[Device]) -> str:
    """Devices with how busy they are; many of them in one."""
    if len(devices) > _MOST_NAMED:
        return f"{len(devices)} devices ({min(map(busy_share, devices)):.0%} busy or more)"
    return ", ".join(f"{device_label(device)} ({device.utilization or 0.0:.0%} busy)" for device in devices)


def _without_recompute(plan: Plan, other: Plan) -> bool:
    """Whether the other is the same configuration without recomputation."""
    names = ("engine", "world_size", "reshard_after_forward", "micro_batches", "replicas", "offload")
    same = all(getattr(plan, name) == getattr(other, name) for name in names)
    return same and not other.recompute and (plan.world_size > 1 or plan.devices == other.devices)


def _against(candidate: Candidate) -> str:
    """What speaks against it: its reason, or its figures."""
    if candidate.reason is not None:
        return candidate.reason if candidate.needs else f"is ruled out: {candidate.reason}"
    return f"takes {format_seconds(candidate.step_seconds)} a step and {format_bytes(max(candidate.needs.values()))}"


def _next(candidate: Candidate) -> str:
    """A runner-up in a few words."""
    return f"{candidate.plan.title()} with {format_seconds(candidate.step_seconds)}"
