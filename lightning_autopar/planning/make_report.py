"""Makes the report from footprint, devices and constraints: the search's candidates, and why the best is the best; or the pinned plan,
checked.

Must not know how a plan is executed, nor how plans are found.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from lightning_autopar import engines
from lightning_autopar.constraints import Constraints
from lightning_autopar.devices.inventory import Device, Inventory, busy_share, device_label
from lightning_autopar.engines import Question
from lightning_autopar.memory.batch_scaling import longer
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.planning.advice import advise
from lightning_autopar.planning.device_sets import one_of_each_gpu
from lightning_autopar.planning.enumerate_plans import ruled_out
from lightning_autopar.planning.plan_cost import Appraiser, Predict, Predictions, first_of_each_configuration
from lightning_autopar.planning.refusals import (
    engine_refusal,
    feature_refusal,
    micro_batch_refusal,
    multi_refusal,
    own_refusal,
    recompute_refusal,
    undivided,
)
from lightning_autopar.planning.replayed_candidates import Finalists
from lightning_autopar.planning.search import Search
from lightning_autopar.plans import Plan
from lightning_autopar.report.report import Candidate, NothingFits, Report
from lightning_autopar.text import format_bytes, format_seconds
from lightning_autopar.timing.rates import Rates

#: A batch that is so many times as long as the longest that was seen isn't looked for.
_MOST_TIMES = 16.0

_MOST_NAMED = 3


def explained(
    candidates: Sequence[Candidate], *, by_speed: bool = True, split_batch: bool = True, devices: Sequence[Device] = ()
) -> Candidate:
    """The first candidate, with the reasons that come from comparing: why no simpler plan was taken, and which plan came next.

    Args:
        candidates: the best one first, the others in order.
        by_speed: whether the objective is speed.
        split_batch: whether all plans take the same batch a step, so that their seconds compare.
    """
    best = candidates[0]
    plan, fitting = best.plan, [candidate for candidate in candidates if candidate.fits]
    reasons = list(plan.reasons)
    alone = next((one for one in candidates if not engines.of(one.plan).several), None)
    if alone is not None and engines.of(plan).several:
        reasons.append(f"{'one device alone' if plan.world_size > 1 else alone.plan.title()} {_against(alone)}")
    other = engines.of(plan).plainer if plan.world_size > 1 else None
    if other is not None and (plainer := next((one for one in candidates if one.plan.engine == other[0]), None)):
        reasons.append(f"{other[1]}: {plainer.plan.title()} {_against(plainer)}")
    if plan.recompute and (without := next((one for one in candidates if _without_recompute(plan, one.plan)), None)):
        reasons.append(f"without recomputation it {_against(without)}")
    if best.replayed:
        lost = max(size.reserved - size.allocated - size.context for size in best.bytes.values())
        reasons.append(f"a replay of its allocations: the allocator holds {format_bytes(lost)} more than its tensors take")
    busy = {device.id: share for device in devices if (share := busy_share(device))}
    faster = min(fitting, key=lambda one: one.step_seconds) if split_batch and by_speed else best
    gain = 1 - faster.step_seconds / best.step_seconds
    if gain > 0:
        disturbs = max(busy.get(device, 0.0) for device in faster.plan.devices) > max(busy.get(device, 0.0) for device in plan.devices)
        worth = "disturbing others" if disturbs else "more than the simpler plan"
        reasons.append(f"{faster.plan.title()} would be {gain * 100:.2g} % faster, too little to be worth {worth}")
    reasons += _beside_others(plan, [device for device in devices if device.id in busy])
    only = "no other plan that was looked at fits" if len(fitting) == 1 else f"the best of {len(fitting)} plans that fit"
    reasons.append(f"{only}: {format_seconds(best.step_seconds)} a step" + (f"; next: {_next(fitting[1])}" if len(fitting) > 1 else ""))
    return replace(best, plan=replace(plan, reasons=tuple(reasons)))


def _beside_others(plan: Plan, busy: Sequence[Device]) -> list[str]:
    """What the plan does about devices on which others compute."""
    left = [device for device in busy if device.id not in plan.devices]
    used = [device for device in busy if device.id in plan.devices]
    found = []
    if left:
        found.append(f"others compute on {_with_shares(left)}, which the plan leaves to them")
    if used:
        found.append(f"others compute on {_with_shares(used)} as well, which the plan's time includes")
    return found


def _with_shares(devices: Sequence[Device]) -> str:
    """Devices in words, with how busy they are; many are summed up."""
    if len(devices) > _MOST_NAMED:
        return f"{len(devices)} devices ({min(map(busy_share, devices)):.0%} busy or more)"
    return ", ".join(f"{device_label(device)} ({device.utilization or 0.0:.0%} busy)" for device in devices)


def _without_recompute(plan: Plan, other: Plan) -> bool:
    """Whether the other is the same configuration without recomputation."""
    names = ("engine", "world_size", "reshard_after_forward", "micro_batches", "replicas", "offload")
    same = all(getattr(plan, name) == getattr(other, name) for name in names)
    return same and not other.recompute and (plan.world_size > 1 or plan.devices == other.devices)


def _against(candidate: Candidate) -> str:
    """What speaks against a candidate: its reason, or its figures."""
    if candidate.reason is not None:
        return candidate.reason if candidate.needs else f"is ruled out: {candidate.reason}"
    return f"takes {format_seconds(candidate.step_seconds)} a step and {format_bytes(max(candidate.needs.values()))}"


def _next(candidate: Candidate) -> str:
    """A runner-up in a few words."""
    return f"{candidate.plan.title()} with {format_seconds(candidate.step_seconds)}"


@contextmanager
def _no_collection() -> Iterator[None]:
    """While open, Python doesn't collect cycles. A search makes hundreds of thousands of small objects, none in a cycle. They would start
    collections that go through all of torch's and Lightning's objects: a third of the time of a process's first search.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@_no_collection()
def make_report(
    footprint: Footprint,
    inventory: Inventory,
    constraints: Constraints,
    *,
    predict: Predict | None = None,
    rates: Rates | None = None,
    plans: Sequence[Plan] | None = None,
) -> Report:
    """Every candidate with its prediction, in order, and the best of those that fit.

    The best is found by the step's fullest moments, and confirmed by a replay of its allocations where the step was taped. A plan fits if
    on each of its devices the larger of what it allocates and reserves, with the footprint's margin, stays within what is free (or the
    limit), less the memory margin; and if on CPU devices all ranks together stay within the host's free memory. With ``objective="speed"``
    the fastest is best, or a simpler plan that is hardly slower; the others follow by seconds a step. With ``"memory"`` the order is by
    bytes allocated on the fullest device, then by speed. Plans that would fit but can't be run by this version come after those that can.

    Args:
        inventory: the devices; at least one.
        plans: what runs the step can take no others; unless given, the search finds them.

    Raises:
        NothingFits: if no plan fits, the pinned one included; it holds the report, with advice.
        ValueError: if there is no device, or the pinned plan can't be run here, saying why.
    """
    if not inventory.devices:
        raise ValueError("there is no device to plan for; see `lightning-autopar devices` for what was found, or give devices='2xcpu:4GiB'")
    ask = _Ask(predict, rates)
    asked = Question(footprint=footprint, inventory=inventory, constraints=constraints)
    if constraints.pinned is not None:
        candidates = [_pinned(asked, constraints.pinned, ask)]
    elif plans is not None:
        candidates = ask.order(asked, plans)
    else:
        candidates = Search(ask.appraiser(asked)).all()
    best = 0 if candidates and candidates[0].fits else None
    lengths = "" if best is None else _lengths_that_fit(asked, candidates[best], ask, reruns=plans is None)
    if best is not None and constraints.pinned is None:
        candidates[best] = explained(
            candidates,
            by_speed=constraints.objective == "speed",
            split_batch=constraints.split_batch,
            devices=inventory.devices,
        )
    report = Report(
        inventory=inventory,
        footprint=footprint,
        candidates=tuple(candidates),
        best_index=best,
        adviser=partial(advise, asked, tuple(candidates), lambda: _Ask(predict, rates, Predictions())),
        precision=constraints.precision,
        rates=rates,
        budgets={device.id: constraints.budget_bytes(device) for device in inventory.devices},
        residuals=constraints.residuals,
        lengths=lengths,
    )
    if best is None:
        raise NothingFits(report)
    return report


@_no_collection()
def best_candidate(footprint: Footprint, inventory: Inventory, constraints: Constraints, *, rates: Rates | None = None) -> Candidate | None:
    """The best candidate that fits, or None: :func:`make_report` without the others, and without advice. Arguments as there.

    Raises:
        ValueError: if the pinned plan can't be run here whatever the memory, saying why.
    """
    if not inventory.devices:
        return None
    if constraints.pinned is None:
        first = Search(Appraiser(footprint, inventory, constraints, rates=rates)).first()
        return first if first is not None and first.fits else None
    asked = Question(footprint=footprint, inventory=inventory, constraints=constraints)
    found = _pinned(asked, constraints.pinned, _Ask(None, rates))
    return found if found.fits else None


def _pinned(asked: Question, plan: Plan, ask: _Ask) -> Candidate:
    """The pinned plan's candidate; raises ValueError as :func:`check_pinned`. An evaluation runs whole batches, even if training splits
    them. A pipeline's schedule keeps its micro-batches.
    """
    if not asked.footprint.training and engines.of(plan).takes_remedies:
        plan = replace(plan, micro_batches=1)
    check_pinned(plan, asked.footprint, asked.inventory, asked.constraints)
    return ask.evaluate(asked, plan, confirm=True)


def _lengths_that_fit(asked: Question, best: Candidate, ask: _Ask, *, reruns: bool) -> str:
    """How long a batch may be under a plan as it is, and run again in more parts, as a sentence; empty where sizes don't vary."""
    footprint, constraints, plan = asked.footprint, asked.constraints, best.plan
    lengths = footprint.lengths
    if lengths is None or not lengths.vary:
        return ""
    planned, uncorrected = lengths.growth, ask.evaluate(asked, plan).needs
    replayed = {device: need - uncorrected[device] for device, need in best.needs.items()}

    def longest(parts: int) -> float:
        """How many times as large as the longest batch that was seen; searched by halves to one in a hundred, up to :data:`_MOST_TIMES`."""
        least, most = 0.0, _MOST_TIMES
        cut = replace(plan, micro_batches=parts)
        while most - least > 0.01 * most:
            middle = (least + most) / 2
            at = longer(footprint, lengths.growth_at(middle) / planned)
            found = ask.evaluate(replace(asked, footprint=at), cut)
            fits = found.fits or all(
                replayed[device] < 0 and need + replayed[device] <= constraints.budget_bytes(asked.inventory.device(device))
                for device, need in found.needs.items()
            )
            least, most = (middle, most) if fits else (least, middle)
        return least

    times = longest(plan.micro_batches)
    if times > 0.98 * _MOST_TIMES:
        return f"a batch {_MOST_TIMES:g} times as large as the longest that was seen fits as planned"
    told = [f"a batch of up to {lengths.size(times)} ({lengths.label}) fits as planned"]
    rows = max(plan.rows(footprint.batch_size), default=1)
    if reruns and engines.of(plan).reruns and rows > plan.micro_batches and undivided(footprint, constraints) is None:
        steps = dict.fromkeys((min(2 * plan.micro_batches, rows), rows))
        parts = ", and in ".join(f"{parts} parts, which fits up to {lengths.size(longest(parts))}" for parts in steps)
        told.append(f"where memory runs out it is run again in {parts}")
    told.append("a longer one doesn't fit")
    return "; ".join(told)


class _Ask:
    """The search, for advice."""

    def __init__(self, predict: Predict | None, rates: Rates | None, predictions: Predictions | None = None) -> None:
        self.predict, self.rates, self.predictions = predict, rates, predictions

    def appraiser(self, asked: Question) -> Appraiser:
        """What predicts plans for a question."""
        return Appraiser(asked.footprint, asked.inventory, asked.constraints, self.predict, self.rates, self.predictions)

    def best(self, asked: Question) -> Candidate | None:
        """The best candidate, or where nothing fits the one that lacks least; None where there is none at all."""
        return Search(self.appraiser(asked)).first()

    def evaluate(self, asked: Question, plan: Plan, *, confirm: bool = False) -> Candidate:
        """One plan's prediction; with ``confirm`` its allocations are replayed where possible."""
        appraiser = self.appraiser(asked)
        return self._decided(appraiser, [appraiser.candidate(plan)])[0] if confirm else appraiser.candidate(plan)

    def order(self, asked: Question, plans: Sequence[Plan]) -> list[Candidate]:
        """The best of these plans, then the best of each configuration; and what is ruled out."""
        appraiser = self.appraiser(asked)
        decided = self._decided(appraiser, [appraiser.candidate(plan) for plan in plans])
        refused = [Candidate(plan=one.plan, fits=False, reason=one.rejection, notes=one.notes) for one in ruled_out(asked)]
        return list(first_of_each_configuration(decided).values()) + refused

    def _decided(self, appraiser: Appraiser, found: list[Candidate]) -> list[Candidate]:
        """The candidates, the best first; those that may be the best are replayed where possible."""
        return Finalists(appraiser).decide(found, appraiser.order, appraiser.shortage, appraiser.preferred)


def check_pinned(plan: Plan, footprint: Footprint, inventory: Inventory, constraints: Constraints) -> None:
    """Check a pinned plan for everything but memory.

    Raises:
        ValueError: if it can't be run here whatever the memory, saying why.
    """
    known = {device.id: device for device in inventory.devices}
    if missing := [device for device in plan.devices if device not in known]:
        raise ValueError(f"the pinned plan names {', '.join(map(repr, missing))}, which isn't there; there are: {', '.join(known)}")
    question = Question(footprint=footprint, inventory=inventory, constraints=constraints)
    if (refusal := _refusal(plan, question)) is not None:
        raise ValueError(f"the pinned plan {plan.title()!r} can't be taken: {refusal}; unpin it, or change that")
    most = constraints.max_devices
    if most is not None and plan.world_size > most:
        raise ValueError(f"the pinned plan runs on {plan.world_size} devices, but the run may use {most}; raise devices=")
    if plan.world_size < (constraints.min_devices or 1):
        started = constraints.min_devices
        raise ValueError(f"the pinned plan runs on {plan.world_size} devices, but {started} processes were started; start as many")
    if len(kinds := {known[device].kind for device in plan.devices}) > 1:
        raise ValueError(f"the pinned plan mixes devices of kinds {', '.join(sorted(kinds))}; name devices of one kind")
    if len(one_of_each_gpu([known[device] for device in plan.devices])) < plan.world_size:
        raise ValueError("the pinned plan has two MIG instances of one GPU, between which NCCL can't communicate; name one of each GPU")
    batch = footprint.batch_size
    if constraints.split_batch and plan.data_ranks > max(1, batch):
        each = "ranks" if engines.of(plan).splits else "pipelines"
        raise ValueError(f"the pinned plan has {plan.data_ranks} {each} for a batch of {batch}; name at most a device for each sample")
    rows = max(plan.rows(batch)) if constraints.split_batch else batch
    if footprint.training and plan.micro_batches > max(1, rows):
        raise ValueError(f"the pinned plan splits {rows} samples into {plan.micro_batches} micro-batches; use at most {max(1, rows)}")
    if (words := engines.of(plan).against(plan, question)) is not None:
        raise ValueError(f"the pinned plan {words}")
    if not footprint.traced:
        return
    recomputable = {block.fqn: block.recomputable for block in footprint.blocks if block.repeated}
    if wrong := [fqn for fqn in plan.recompute if not recomputable.get(fqn, False)]:
        why = "must not run twice" if wrong[0] in recomputable else "is none of the module's blocks"
        can = ", ".join(fqn for fqn, yes in recomputable.items() if yes) or "none"
        raise ValueError(f"the pinned plan recomputes {wrong[0]!r}, which {why}; blocks that can be recomputed: {can}")


def _refusal(plan: Plan, question: Question) -> str | None:
    """The sentence that refuses the plan's engine, or one of its features."""
    footprint, constraints = question.footprint, question.constraints
    refusal = constraints.excluded.get(plan.engine, constraints.excluded.get(engines.of(plan).part(plan)))
    if refusal is None:
        # A plan with one rank doesn't need what several ranks need.
        ask = own_refusal if plan.world_size == 1 else engine_refusal
        refusal = ask(plan.engine, question)
    if refusal is None and plan.offload:
        refusal = constraints.excluded.get("offload")
    if refusal is None and plan.micro_batches > 1 and not engines.of(plan).runs_parts:
        refusal = f"engine {plan.engine!r} has no micro-batches; accumulate smaller batches, or take engine 'fsdp'"
    if refusal is None and plan.micro_batches > 1 and footprint.training:
        refusal = micro_batch_refusal(footprint, constraints, staged=not engines.of(plan).splits)
    if refusal is None and plan.recompute:
        refusal = recompute_refusal(constraints)
    if refusal is None and plan.shares:
        refusal = feature_refusal("shares", footprint, constraints)
    if refusal is None and plan.replicas > 1 and not engines.of(plan).splits:
        refusal = constraints.excluded.get("pipeline_replicas")
    if refusal is None and plan.replicas > 1:
        refusal = multi_refusal(question, engines.of(plan)) or feature_refusal("replicas", footprint, constraints)
    return refusal
