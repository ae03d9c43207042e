"""The search: every candidate predicted, put in order and explained.

Must not know how a plan is executed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol

from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.inventory import Inventory
from lightning_autopar.planning.advice import advise
from lightning_autopar.planning.candidates import (
    Constraints,
    Option,
    engine_refusal,
    enumerate_candidates,
    recomputable_order,
    split_notes,
    with_recompute,
)
from lightning_autopar.planning.finalists import Finalists
from lightning_autopar.planning.report import Candidate, DeviceNeed, NothingFits, Report, device_label
from lightning_autopar.planning.scaling import scaled
from lightning_autopar.planning.timing import RateSource, predict_seconds
from lightning_autopar.plans import BUILT_ENGINES, ENGINES, Plan
from lightning_autopar.units import format_bytes, format_seconds


class Predict(Protocol):
    """How many bytes a plan needs, by device id."""

    def __call__(self, footprint: Footprint, plan: Plan, inventory: Inventory) -> Mapping[str, DeviceNeed]:
        """The prediction."""


def make_report(
    footprint: Footprint,
    inventory: Inventory,
    constraints: Constraints,
    *,
    predict: Predict | None = None,
    rates: RateSource | None = None,
) -> Report:
    """Every candidate with its prediction, in order, and the best of those that fit.

    The best is found by the step's fullest moments, and confirmed by a replay of its allocations where the step was taped.
    A plan fits if on each of its devices the larger of what it allocates and reserves, with the footprint's margin,
    stays within what is free (or the limit), less the memory margin; and if on CPU devices all ranks together stay within the
    host's free memory. With ``objective="speed"`` the order is by seconds a step, then fewer devices, then the simpler
    engine; with ``"memory"`` by bytes allocated on the fullest device, then by speed.

    Args:
        footprint: what one step needs.
        inventory: the devices; at least one.
        constraints: what a plan must keep to.
        predict: bytes of a plan; :func:`lightning_autopar.memory.predict.predict` unless given.
        rates: rates of devices, for the seconds; the catalogue unless given.

    Raises:
        NothingFits: if no plan fits, the pinned one included; it holds the report, with advice.
        ValueError: if there is no device, or the pinned plan can't be run here, saying why.
    """
    if not inventory.devices:
        raise ValueError("there is no device to plan for; see `lightning-autopar devices` for what was found, or give devices='2xcpu:4GiB'")
    search = _Search(footprint, inventory, constraints, predict or partial(_predict_bytes, precision=constraints.precision), rates)
    if constraints.pinned is not None:
        candidates = [search.pinned(constraints.pinned)]
    else:
        candidates = search.all()
    best = 0 if candidates and candidates[0].fits else None
    if best is not None and constraints.pinned is None:
        candidates[best] = _explained(candidates)
    advice: tuple[str, ...] = ()
    if best is None:
        advice = advise(footprint, inventory, constraints, candidates, lambda f, i, c: _Search(f, i, c, search.predict, rates).best())
    report = Report(
        inventory=inventory,
        footprint=footprint,
        candidates=tuple(candidates),
        best_index=best,
        advice=advice,
        budgets=search.budget,
        residuals=constraints.residuals,
    )
    if best is None:
        raise NothingFits(report)
    return report


def _predict_bytes(footprint: Footprint, plan: Plan, inventory: Inventory, *, precision: str) -> Mapping[str, DeviceNeed]:
    """The default: what memory/ predicts."""
    from lightning_autopar.memory.predict import predict

    return predict(footprint, plan, inventory, precision=precision)


class _Search:
    """One question: this footprint, these devices, these constraints."""

    def __init__(
        self, footprint: Footprint, inventory: Inventory, constraints: Constraints, predict: Predict, rates: RateSource | None
    ) -> None:
        self.footprint = footprint
        self.inventory = inventory
        self.constraints = constraints
        self.predict = predict
        self.rates = rates
        self.device = {device.id: device for device in inventory.devices}
        self.budget = {device.id: constraints.budget_bytes(device) for device in inventory.devices}
        self.finalists = Finalists(footprint, inventory, constraints, self.budget)

    def best(self) -> Candidate | None:
        """The best that fits."""
        candidates = self.all()
        return candidates[0] if candidates and candidates[0].fits else None

    def all(self) -> list[Candidate]:
        """Of each configuration the best choice of devices, in order; what is ruled out at the end."""
        kept: dict[tuple[object, ...], Candidate] = {}
        ruled_out: list[Candidate] = []
        plain: Candidate | None = None
        for option in enumerate_candidates(self.footprint, self.inventory, self.constraints, rates=self.rates):
            if option.rejection is not None:
                ruled_out.append(Candidate(plan=option.plan, fits=False, reason=option.rejection, notes=option.notes))
                continue
            candidate = self.evaluate(option)
            tried = [candidate]
            if not option.plan.recompute:
                plain = candidate
            elif plain is not None and candidate.fits and not plain.fits:
                tried += self.least_recompute(plain)
            for one in tried:
                key = self._configuration(one.plan)
                if key not in kept or self.order(one) < self.order(kept[key]):
                    kept[key] = one
        return self.finalists.decide(kept.values(), self.order, self._shortage) + ruled_out

    def least_recompute(self, plain: Candidate) -> list[Candidate]:
        """The plan with as few recomputed blocks as let it fit, where that is fewer than all; found by bisection."""
        least, most = 0, len(recomputable_order(self.footprint))
        found: list[Candidate] = []
        while most - least > 1:
            count = (least + most) // 2
            candidate = self.evaluate(Option(plan=with_recompute(plain.plan, self.footprint, count), notes=plain.notes))
            if candidate.fits:
                most, found = count, [candidate]
            else:
                least = count
        return found

    def evaluate(self, option: Option) -> Candidate:
        """A plan's prediction, and whether it fits."""
        footprint = self._footprint_of(option.plan)
        raw = self.predict(footprint, option.plan, self.inventory)
        sizes, learned = self.constraints.residuals.corrected(option.plan, raw)
        needs = {device: math.ceil(max(size.allocated, size.reserved) * (1 + footprint.margin)) for device, size in sizes.items()}
        seconds = predict_seconds(footprint, option.plan, self.inventory, precision=self.constraints.precision, rates=self.rates)
        reason = self._shortage(needs)
        return Candidate(
            plan=option.plan,
            fits=reason is None,
            reason=reason,
            bytes=sizes,
            raw=raw,
            needs=needs,
            seconds=seconds,
            notes=option.notes,
            learned=learned,
        )

    def _footprint_of(self, plan: Plan) -> Footprint:
        """Of the global batch, which is as many as there are ranks where each takes one of its own."""
        if self.constraints.split_batch or plan.world_size == 1:
            return self.footprint
        return scaled(self.footprint, max(1, self.footprint.batch_size) * plan.world_size)

    def _shortage(self, needs: Mapping[str, int]) -> str | None:
        """Where memory is missing, by the device that misses most; None where it suffices."""
        short, device_id = max((need - self.budget[device], device) for device, need in needs.items())
        if short > 0:
            return self._shortage_words(needs[device_id], device_id)
        # CPU devices share one memory; their budgets may come to more than there is.
        on_host: dict[int, int] = {}
        for device, need in needs.items():
            if self.device[device].kind == "cpu":
                on_host[self.device[device].node] = on_host.get(self.device[device].node, 0) + need
        host = int(self.inventory.host_free_bytes * (1 - self.constraints.memory_margin))
        if host and (most := max(on_host.values(), default=0)) > host:
            return f"needs {format_bytes(most)} of the host's memory over all its ranks, which has {format_bytes(host)}"
        return None

    def _shortage_words(self, need: int, device_id: str) -> str:
        """The sentence with the numbers: what is needed, what is there, and how that came to be."""
        device, budget, limit = self.device[device_id], self.budget[device_id], self.constraints.memory_limit_bytes
        limited = limit is not None and limit < device.free_bytes
        there = f"{format_bytes(limit)} by the memory limit" if limited and limit else f"{format_bytes(device.free_bytes)} free"
        if self.constraints.memory_margin:
            there += f" less the {self.constraints.memory_margin * 100:.3g} % margin"
        missing = ""
        if format_bytes(need) == format_bytes(budget):
            missing = f", {format_bytes(need - budget)} too little"
        return f"needs {format_bytes(need)} on {device_label(device)}, which has {format_bytes(budget)} ({there}){missing}"

    def order(self, candidate: Candidate) -> tuple[object, ...]:
        """Fitting first; those by the objective, the others by what they lack; then the simpler one."""
        plan, seconds = candidate.plan, candidate.seconds
        assert seconds is not None, "only predicted candidates have an order"
        # Ranks with a batch each get through more samples a step. Sums in another order differ in the last digits.
        step = float(f"{seconds.step / (1 if self.constraints.split_batch else plan.world_size):.9g}")
        simpler = (plan.world_size, ENGINES.index(plan.engine), len(plan.recompute), plan.devices)
        if not candidate.fits:
            lack = max(need - self.budget[device] for device, need in candidate.needs.items())
            return (1, lack, step, *simpler)
        fullest = max(size.allocated for size in candidate.bytes.values())
        if self.constraints.objective == "memory":
            return (0, fullest, step, *simpler)
        return (0, step, *simpler[:2], fullest, *simpler[2:])

    def _configuration(self, plan: Plan) -> tuple[object, ...]:
        """What of a plan is more than the choice of equal devices: one candidate of each is enough to read."""
        whole = len(plan.recompute) == len(recomputable_order(self.footprint))
        recompute = "none" if not plan.recompute else "all" if whole else "some"
        return (plan.engine, plan.devices if plan.world_size == 1 else plan.world_size, plan.reshard_after_forward, recompute)

    def pinned(self, plan: Plan) -> Candidate:
        """The pinned plan's prediction.

        Raises:
            ValueError: if it can't be run here whatever the memory.
        """
        self._check_pinned(plan)
        candidate = self.evaluate(Option(plan=plan, notes=() if plan.world_size == 1 else split_notes(self.constraints)))
        return self.finalists.decide([candidate], self.order, self._shortage)[0]

    def _check_pinned(self, plan: Plan) -> None:
        """What speaks against a pinned plan other than memory."""
        there = ", ".join(self.device)
        if missing := [device for device in plan.devices if device not in self.device]:
            raise ValueError(f"the pinned plan names {', '.join(map(repr, missing))}, which isn't there; there are: {there}")
        if plan.engine not in BUILT_ENGINES:
            raise ValueError(f"the pinned plan's engine {plan.engine!r} is not built yet; choose one of {', '.join(BUILT_ENGINES)}")
        unbuilt = {"micro_batches": plan.micro_batches > 1, "replicas": plan.replicas > 1, "offload": bool(plan.offload)}
        for name in (name for name, asked in unbuilt.items() if asked):
            value = getattr(plan, name)
            can = "which can be predicted, but not run yet; leave it out"
            raise ValueError(f"the pinned plan {plan.title()!r} has {name}={value!r}, {can}")
        # One rank of DDP or FSDP needs none of what several do.
        engine = "single" if plan.world_size == 1 and plan.engine in self.constraints.allow else plan.engine
        constraints = self.constraints if engine == plan.engine else replace(self.constraints, allow=("single", plan.engine))
        refusal = self.constraints.excluded.get(plan.engine) or engine_refusal(engine, self.footprint, self.inventory, constraints)
        if refusal is not None:
            raise ValueError(f"the pinned plan {plan.title()!r} can't be taken: {refusal}; unpin it, or change that")
        most = self.constraints.max_devices
        if most is not None and plan.world_size > most:
            raise ValueError(f"the pinned plan runs on {plan.world_size} devices, but the run may use {most}; raise devices=")
        if plan.world_size < (self.constraints.min_devices or 1):
            started = self.constraints.min_devices
            raise ValueError(f"the pinned plan runs on {plan.world_size} devices, but {started} processes were started; start as many")
        if len(kinds := {self.device[device].kind for device in plan.devices}) > 1:
            raise ValueError(f"the pinned plan mixes devices of kinds {', '.join(sorted(kinds))}; name devices of one kind")
        batch = self.footprint.batch_size
        if self.constraints.split_batch and plan.world_size > max(1, batch):
            raise ValueError(f"the pinned plan has {plan.world_size} ranks for a batch of {batch}; name at most a device for each sample")
        if not self.footprint.traced:
            return
        recomputable = {block.fqn: block.recomputable for block in self.footprint.blocks}
        if wrong := [fqn for fqn in plan.recompute if not recomputable.get(fqn, False)]:
            why = "must not run twice" if wrong[0] in recomputable else "is none of the module's blocks"
            can = ", ".join(fqn for fqn, yes in recomputable.items() if yes) or "none"
            raise ValueError(f"the pinned plan recomputes {wrong[0]!r}, which {why}; blocks that can be recomputed: {can}")


def _explained(candidates: list[Candidate]) -> Candidate:
    """The best candidate with the reasons that come from comparing: why no simpler plan, and what came next."""
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
    only = "the only plan that fits" if len(fitting) == 1 else f"the best of {len(fitting)} plans that fit"
    reasons.append(f"{only}: {format_seconds(best.step_seconds)} a step" + (f"; next: {_next(fitting[1])}" if len(fitting) > 1 else ""))
    return replace(best, plan=replace(plan, reasons=tuple(reasons)))


def _without_recompute(plan: Plan, other: Plan) -> bool:
    """Whether the other is the same configuration without recomputation."""
    same = (plan.engine, plan.world_size, plan.reshard_after_forward) == (other.engine, other.world_size, other.reshard_after_forward)
    return same and not other.recompute and (plan.world_size > 1 or plan.devices == other.devices)


def _against(candidate: Candidate) -> str:
    """What speaks against it: its reason, or its figures."""
    if candidate.reason is not None:
        return candidate.reason if candidate.needs else f"is ruled out: {candidate.reason}"
    return f"takes {format_seconds(candidate.step_seconds)} a step and {format_bytes(max(candidate.needs.values()))}"


def _next(candidate: Candidate) -> str:
    """A runner-up in a few words."""
    return f"{candidate.plan.title()} with {format_seconds(candidate.step_seconds)}"
