"""The search for the best plan: every configuration at least once, and the remedies of those that may still win.

Seconds of a plain plan bound those of the same plan with blocks recomputed or the batch in parts; so what is slower than the best one so
far even without them isn't looked at further. It must not know how bytes and seconds are predicted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property

from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.inventory import Device, Inventory
from lightning_autopar.planning.appraisal import WORTH_DISTURBING, WORTHWHILE, Appraiser, Predict, alike_first, configuration
from lightning_autopar.planning.blocks import recomputable, with_recompute
from lightning_autopar.planning.candidates import Variant, enumerate_candidates, ruled_out, variant_runs
from lightning_autopar.planning.constraints import Constraints
from lightning_autopar.planning.device_sets import device_sets, largest_size, single_sets, sizes_between
from lightning_autopar.planning.finalists import Finalists
from lightning_autopar.planning.part_seconds import block_seconds, device_speeds
from lightning_autopar.planning.pipelines import pipeline_plans
from lightning_autopar.planning.rates import Rates
from lightning_autopar.planning.refusals import engine_refusal
from lightning_autopar.planning.remedies import Remedies, in_parts, without_recompute
from lightning_autopar.planning.report import Candidate
from lightning_autopar.planning.roofline import busy_share
from lightning_autopar.plans import Plan

#: Of each engine's plans that can't be the best so many are predicted all the same.
_MOST_SHOWN = 12


class Search:
    """One question: this footprint, these devices, these constraints. Arguments as an :class:`Appraiser`'s."""

    def __init__(
        self,
        footprint: Footprint,
        inventory: Inventory,
        constraints: Constraints,
        predict: Predict | None = None,
        rates: Rates | None = None,
    ) -> None:
        self.footprint = footprint
        self.inventory = inventory
        self.constraints = constraints
        self.rates = rates
        self.appraiser = Appraiser(footprint, inventory, constraints, predict, rates)
        self.finalists = Finalists(footprint, inventory, constraints, self.appraiser.budget)
        self.best_seconds = math.inf
        self._found: list[Candidate] = []
        self._seen: dict[Plan, Candidate] = {}

    @cached_property
    def speed(self) -> dict[str, float]:
        """Of each device by id."""
        return device_speeds(self.footprint, self.inventory, precision=self.constraints.precision, rates=self.rates)

    @cached_property
    def remedies(self) -> Remedies:
        """What helps where memory is short."""

        def seconds(plan: Plan) -> dict[str, float]:
            device = self.appraiser.device[plan.devices[0]]
            share = 1.0 / (plan.world_size * plan.micro_batches)
            return block_seconds(self.footprint, device, share, precision=self.constraints.precision, rates=self.rates)

        return Remedies(self.appraiser, seconds, self.speed)

    def best(self) -> Candidate | None:
        """The best that fits, without a look at what can't be run."""
        self._explore()
        candidates = self._decided()
        return candidates[0] if candidates and candidates[0].fits else None

    def all(self) -> list[Candidate]:
        """Of each configuration the best choice of devices, the best of all first; what is ruled out at the end."""
        self._explore()
        self._beyond()
        refused = [
            Candidate(plan=option.plan, fits=False, reason=option.rejection, notes=option.notes)
            for option in ruled_out(self.footprint, self.inventory, self.constraints)
        ]
        return self._decided() + refused

    def _decided(self) -> list[Candidate]:
        """What was found, in order, with the allocations of those that may be the best replayed."""
        order = self.appraiser.order
        found = sorted(self._found, key=order)
        kept = list(alike_first(found).values())
        known = {id(one) for one in kept}
        if self.constraints.objective == "speed":
            # A simpler plan that is hardly slower may stand behind one of its own configuration.
            limit = self.best_seconds * (1 + self._worth)
            kept += [one for one in found if one.fits and id(one) not in known and self.appraiser.batch_seconds(one) <= limit]
        decided = self.finalists.decide(kept, order, self.appraiser.shortage, self.appraiser.preferred)
        return decided[:1] + list(alike_first(decided[1:]).values())

    @cached_property
    def _worth(self) -> float:
        """How much slower than the best a plan may be that is still of interest: one on idler devices, where others compute on some."""
        return WORTH_DISTURBING if any(map(busy_share, self.inventory.devices)) else WORTHWHILE

    def _runs(self, variant: Variant) -> bool:
        return variant_runs(variant, self.constraints)

    def _explore(self) -> None:
        """Everything that can be run."""
        if self._found:
            return
        options = self._options()
        self._look_at_all(options)
        self._between(options)
        if engine_refusal("pipeline", self.footprint, self.inventory, self.constraints) is None:
            self._add_pipelines()
        if self.constraints.objective == "speed":
            if math.isinf(self.best_seconds):
                self._least()
            self._polish()

    def _options(self, sets: Sequence[Sequence[Device]] | None = None) -> list[Plan]:
        """Plain plans that can be run."""
        found = enumerate_candidates(self.footprint, self.inventory, self.constraints, speed=self.speed, keep=self._runs, sets=sets)
        return [option.plan for option in found]

    def _look_at_all(self, plans: Iterable[Plan]) -> None:
        """The fastest first, so that most of the others needn't be looked at closely."""
        if self.constraints.objective == "memory":
            for plan in plans:
                self._save_most(plan)
            return
        decided: dict[tuple[object, ...], float] = {}
        shown: Counter[tuple[object, ...]] = Counter()
        busy = self.appraiser.busy
        for least, _, _, plan in sorted((self.remedies.least_seconds(plan), busy(plan), number, plan) for number, plan in enumerate(plans)):
            key, family = configuration(plan), (plan.engine, plan.reshard_after_forward, plan.replicas > 1)
            known = decided.get(key, math.inf) <= busy(plan)  # one that disturbs nobody more
            if least > self.best_seconds * (1 + self._worth) and (known or shown[family] >= _MOST_SHOWN):
                # What is slower than the best even if it fits is there to be read, and nobody reads a hundred of one sort.
                continue
            if known and least >= self.best_seconds:
                continue
            shown[family] += 1
            if self._add(plan).fits:
                decided[key] = min(busy(plan), decided.get(key, math.inf))
            if least < self.best_seconds:
                self._add_all(self.remedies.ways(plan, lambda: self.best_seconds))

    def _save_most(self, plan: Plan) -> None:
        """A plain plan, and the same with all that saves memory."""
        parts = self.remedies.parts(plan)
        for count in dict.fromkeys((1, parts[-1])):
            divided = in_parts(plan, count)
            self._add(divided)
            if self.remedies.recompute:
                self._add(with_recompute(divided, self.footprint, [block.fqn for block in recomputable(self.footprint)]))

    def _between(self, plans: Sequence[Plan]) -> None:
        """Numbers of devices next to the best one, where not every number was tried."""
        best = self._best_fitting()
        if best is None or best.plan.world_size <= 1:
            return
        tried = sorted({plan.world_size for plan in plans if plan.world_size > 1})
        batch = self.footprint.batch_size if self.constraints.split_batch else 0
        sizes = sizes_between(batch, tried, best.plan.world_size)
        if sizes:
            sets = device_sets(self.footprint.batch_size, self.inventory, self.constraints, self.speed, sizes=sizes)
            self._look_at_all(self._options(sets))

    def _add_pipelines(self) -> None:
        """On as many devices as may be, on the best plan's, and on ever half as many while those promise to be faster than all so far."""
        # The ranks of a pipeline have their samples in common, so that there may be more of them than samples.
        count = len(self.inventory.devices)
        most = largest_size(count, self.inventory, self.constraints)
        best = self._best_fitting()
        sizes = {most, best.plan.world_size if best is not None else most}
        while most > 2:
            most = (most + 1) // 2
            sizes.add(most)
        by_speed = self.constraints.objective == "speed"
        sets = device_sets(count, self.inventory, self.constraints, self.speed, sizes=sizes)
        shown = max((len(devices) for devices in sets), default=0)
        for devices in reversed(sets):
            # Those on most devices are there to be read, too.
            limit = self.best_seconds * (1 + WORTHWHILE) if by_speed and len(devices) < shown else math.inf
            self._add_all(pipeline_plans(self.appraiser, [devices], self.speed, self.rates, limit))

    def _least(self) -> None:
        """Where nothing fits: what needs least, for whoever asks how much is missing."""
        nearest: dict[str, Candidate] = {}
        for candidate in sorted(self._found, key=self.appraiser.order):
            nearest.setdefault(candidate.plan.engine, candidate)
        for candidate in nearest.values():
            if candidate.plan.engine == "pipeline":  # it saves what it can where it lacks memory
                continue
            self._save_most(in_parts(without_recompute(candidate.plan), 1))

    def _polish(self) -> None:
        """The best one without what it can do without, and with samples where they are worked off soonest."""
        best = self._best_fitting()
        if best is None:
            return
        plan = best.plan
        devices = map(self.appraiser.device.__getitem__, plan.devices)
        kinds = {(device.name, device.threads, device.utilization, device.slowdown) for device in devices}
        if plan.shares or (len(kinds) > 1 and self.remedies.shares and plan.engine in ("ddp", "fsdp")):
            plan = self.remedies.better_shares(plan)
        if plan.recompute and plan.engine != "pipeline":
            plan = self.remedies.cheaper_blocks(plan)
        if plan != best.plan:
            self._found = [one for one in self._found if one is not best]
            self._add(plan)

    def _best_fitting(self) -> Candidate | None:
        fitting = [one for one in self._found if one.fits]
        return self.appraiser.preferred(fitting) if fitting else None

    def _beyond(self) -> None:
        """What can't be run by this version yet: on the best devices, on as many as may be, and on one."""
        sets = self._notable_sets()
        hidden = enumerate_candidates(
            self.footprint, self.inventory, self.constraints, speed=self.speed, keep=lambda variant: not self._runs(variant), sets=sets
        )
        blocks = [block.fqn for block in recomputable(self.footprint)]
        for option in hidden:
            candidate = self._add(option.plan)
            if self.appraiser.lack(candidate.needs) > 0 and self.remedies.recompute:
                saving = with_recompute(option.plan, self.footprint, blocks)
                if self.appraiser.holds(saving):
                    self._add(saving)

    def _notable_sets(self) -> list[Sequence[Device]]:
        """Sets of devices on which plans that can't be run are shown: the best plan's, or else as many as may be; and one by itself."""
        found: list[Sequence[Device]] = []
        best = self._best_fitting()
        if best is not None and best.plan.world_size > 1:
            found.append([self.appraiser.device[device] for device in best.plan.devices])
        elif (most := largest_size(self.footprint.batch_size, self.inventory, self.constraints)) > 1:
            found += device_sets(self.footprint.batch_size, self.inventory, self.constraints, self.speed, sizes=[most])[-1:]
        return [*found, *single_sets(self.inventory, self.constraints, self.speed)[:1]]

    def _add_all(self, plans: Iterable[Plan]) -> None:
        for plan in plans:
            self._add(plan)

    def _add(self, plan: Plan) -> Candidate:
        """The plan's prediction, once for each."""
        key = replace(plan, reasons=())
        known = self._seen.get(key)
        if known is not None:
            return known
        candidate = self._seen[key] = self.appraiser.candidate(plan)
        self._found.append(candidate)
        if candidate.fits:
            self.best_seconds = min(self.best_seconds, self.appraiser.batch_seconds(candidate))
        return candidate
