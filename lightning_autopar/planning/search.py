"""The search for the best plan: it tries every configuration at least once, and adds remedies to those that may still win.

A plain plan's seconds are a lower bound for the same plan with recomputed blocks or micro-batches. So a plan that is slower than the best
one so far even without them isn't looked at further. It must not know how bytes and seconds are predicted.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import count, islice
from typing import Literal

from lightning_autopar import engines
from lightning_autopar.devices.inventory import Device, busy_share
from lightning_autopar.engines import Engine, Searching
from lightning_autopar.planning.block_units import recomputable, with_recompute
from lightning_autopar.planning.device_sets import device_sets, largest_size, single_sets, sizes_between
from lightning_autopar.planning.enumerate_plans import enumerate_candidates, ruled_out
from lightning_autopar.planning.fit_to_memory import Remedies, in_parts, without_recompute
from lightning_autopar.planning.plan_cost import (
    WORTH_DISTURBING,
    WORTHWHILE,
    Appraiser,
    configuration,
    first_of_each_configuration,
    sort_of,
)
from lightning_autopar.planning.plan_seconds import block_seconds, busy_seconds, by_sort, device_speeds
from lightning_autopar.planning.refusals import engine_refusal, engine_runs
from lightning_autopar.planning.replayed_candidates import Finalists, as_fitting
from lightning_autopar.plans import Plan, all_engines
from lightning_autopar.report.report import Candidate

#: How many of each engine's plans that can't be the best are still predicted, for the report.
_MOST_SHOWN = 12
#: From this number of equally fast ranks on, few plans get shares by memory alone; and how many plans.
_MANY_RANKS, _MOST_SPLITS = 8, 8
#: At most so many plans are replayed before the search looks again for better ones; none that is by more than this share slower.
_REPLAYS_A_LOOK, _NEAR = 4, 0.02
#: A lower bound for a part of a batch, as a share of the seconds by its size: shapes suit kernels better or worse.
_CERTAIN = 0.7
#: So many of the best plans of an engine that searches by itself are improved, of those that are by no more than this share slower.
_MOST_POLISHED, _POLISHED = 3, 0.05
#: An engine's own search looks at each number of devices up to the first, then at the second's multiples and around the best of them:
#: between them, a stage's share of the blocks hardly changes.
_EACH, _SOME = 16, 4


@dataclass(frozen=True, kw_only=True)
class _Prospect:
    """A plan to look at in its turn, and what to do with it.

    Args:
        plan: a plain one, or for ``"split"`` and ``"shares"`` one in parts.
        step: what to do: predict the ``"plain"`` plan, once its ``"devices"`` are known to be fast enough; split its batch into the next
            number of ``"parts"``; see whether a ``"split"`` by uneven shares is fast enough, and find the ``"shares"``.
        left: numbers of parts still to look at.
    """

    plan: Plan
    step: Literal["devices", "plain", "parts", "split", "shares"]
    left: tuple[int, ...] = ()


def _family(plan: Plan) -> tuple[object, ...]:
    """The sort of a plan, for the report."""
    return plan.engine, plan.reshard_after_forward, plan.replicas > 1


class Search:
    """The search for the best plan that answers the question of an :class:`Appraiser`."""

    def __init__(self, appraiser: Appraiser) -> None:
        self.appraiser = appraiser
        self.footprint, self.inventory, self.constraints = appraiser.footprint, appraiser.inventory, appraiser.constraints
        self.rates = appraiser.rates
        self.finalists = Finalists(appraiser)
        appraiser.replays = self.finalists.replays
        self.best_seconds = math.inf
        self._found: list[Candidate] = []
        self._seen: dict[Plan, Candidate] = {}
        self._decided: dict[tuple[object, ...], float] = {}
        self._computing: dict[tuple[tuple[str, ...], int, bool], float] = {}
        self._around: set[int] = set()
        #: By engine that searches by itself, the seconds below which it found nothing more.
        self._searched_below: dict[str, float] = {}
        self._splits = 0
        self._shown: Counter[tuple[object, ...]] = Counter()

    @cached_property
    def speed(self) -> dict[str, float]:
        """Each device's speed, by its id."""
        return device_speeds(self.footprint, self.inventory, precision=self.constraints.precision, rates=self.rates)

    @cached_property
    def remedies(self) -> Remedies:
        """The remedies where memory is short."""
        footprint, devices, precision, rates = self.footprint, self.appraiser.device, self.constraints.precision, self.rates

        def seconds(plan: Plan) -> dict[str, float]:
            share = 1.0 / (plan.world_size * plan.micro_batches)
            return block_seconds(footprint, devices[plan.devices[0]], share, precision=precision, rates=rates)

        return Remedies(self.appraiser, seconds, self.speed)

    def first(self) -> Candidate | None:
        """The best candidate, or if nothing fits the one that lacks least; leaves out what can't be run."""
        self._explore()
        return next(iter(self._in_order()), None)

    def all(self) -> list[Candidate]:
        """For each configuration the best choice of devices, the best of all first; ruled-out plans at the end."""
        self._explore()
        self._beyond()
        refused = [
            Candidate(plan=option.plan, fits=False, reason=option.rejection, notes=option.notes)
            for option in ruled_out(self.appraiser.question)
        ]
        return self._in_order() + refused

    def _in_order(self) -> list[Candidate]:
        """The found candidates in order; those that may be the best are replayed."""
        order = self.appraiser.order
        found = sorted(self._found, key=order)
        kept = list(first_of_each_configuration(found).values())
        known = {id(one) for one in kept}
        if self.constraints.objective == "speed":
            # A simpler plan that is hardly slower may come after one of its own configuration.
            limit = self.best_seconds * (1 + self._worth)
            kept += [one for one in found if one.fits and id(one) not in known and self.appraiser.batch_seconds(one) <= limit]
        decided = self.finalists.decide(kept, order, self.appraiser.shortage, self.appraiser.preferred)
        return decided[:1] + list(first_of_each_configuration(decided[1:]).values())

    @cached_property
    def _worth(self) -> float:
        """By how much a plan may be slower than the best and still be of interest; more where others compute on some devices."""
        return WORTH_DISTURBING if any(map(busy_share, self.inventory.devices)) else WORTHWHILE

    def _runs(self, engine: str) -> bool:
        return engine_runs(engine, self.constraints.allow)

    def _explore(self) -> None:
        """Look at everything that can be run."""
        if self._found:
            return
        options = self._options()
        self._look_at_all(options)
        while True:
            while self.constraints.objective == "speed" and self._refuted():
                self._look_at_all(options)
            if between := self._between(options):
                self._look_at_all(between)
                options += between
                continue
            for name in all_engines():
                if not engines.named(name).takes_remedies and self._runs(name):
                    self._add_searched(engines.named(name))
            if self.constraints.objective != "speed":
                return
            self._try_more_recompute(options)
            if math.isinf(self.best_seconds):
                self._least()
            self._refine()
            if self._refuted():
                self._look_at_all(options)
            elif between := self._between(options):
                self._look_at_all(between)
                options += between
            else:
                return

    def _refuted(self) -> bool:
        """Whether replays show that the best plan so far doesn't fit: then the search goes on with what they taught."""
        refuted, near = False, math.inf
        for _ in range(_REPLAYS_A_LOOK):
            best = self._best_fitting()
            if best is None or not self.finalists.can_replay(best) or self.appraiser.batch_seconds(best) > near:
                break
            near = min(near, self.appraiser.batch_seconds(best) * (1 + _NEAR))
            if best.plan in self.finalists.lasting:
                break
            if best.replayed:  # so far by a first look
                if (lasting := self._replayed(best.plan, lasting=True)).fits:
                    # Plans were left because of seconds that it doesn't keep to
                    refuted |= self.appraiser.batch_seconds(lasting) > self.appraiser.batch_seconds(best) * (1 + WORTHWHILE)
                    continue
            elif self._is_hardly_faster(best):
                self._found = [one for one in self._found if one is not best]
            elif self.finalists.is_tired and self.appraiser.hopeful:
                self.appraiser.hopeful = self.finalists.hopeful = False  # from now on, plans are left that lack what others have lost
            elif self.finalists.is_spent:
                break
            elif self.appraiser.goes_through(self._replayed(best.plan)):
                continue
            if not self.appraiser.hopeful:
                # Replays may have shown since whether a plan fits that was not replayed itself
                for key, one in self._seen.items():
                    if not one.replayed and self.finalists.can_replay(one):
                        self._seen[key] = self.appraiser.candidate(one.plan)
                self._found = [self._seen[replace(one.plan, reasons=())] for one in self._found]
            refuted = True
        if refuted:
            fitting = [self.appraiser.batch_seconds(one) for one in self._found if self.finalists.may_fit(one)]
            self.best_seconds = min(fitting, default=math.inf)
        return refuted

    def _is_hardly_faster(self, best: Candidate) -> bool:
        """Whether a plan of its sort, whose replay showed that it fits, is hardly slower."""
        limit, sort = self.appraiser.batch_seconds(best) * (1 + WORTHWHILE), sort_of(best.plan)
        confirmed = (one for one in self._found if one.replayed and one.fits and sort_of(one.plan) == sort)
        return any(self.appraiser.batch_seconds(one) <= limit for one in confirmed)

    def _replayed(self, plan: Plan, *, learns: bool = True, lasting: bool = False) -> Candidate:
        """The plan's candidate, replayed; the search learns from it, also what the allocator would hold without a limit if ``learns``."""
        key = replace(plan, reasons=())
        before = self._seen.get(key) or self.appraiser.candidate(plan)
        if lasting:
            self.finalists.lasting.add(before.plan)
        elif before.replayed:
            return before
        checked = self._seen[key] = self.finalists.check(before, self.appraiser.shortage, learns=learns)
        self.appraiser.learn(before.plan, *self.finalists.lost[before.plan], failed=not checked.fits)
        if any(one is before for one in self._found):
            self._found = [checked if one is before else one for one in self._found]
        else:
            self._found.append(checked)
        if checked.fits:
            self.best_seconds = min(self.best_seconds, self.appraiser.batch_seconds(checked))
        return checked

    def _try_more_recompute(self, options: Sequence[Plan]) -> None:
        """Replay plans like those whose replay failed or that wait for the allocator, with more recomputed blocks or in some more parts,
        where they would be faster than the best one.

        The search has passed them over, as it assumes that the allocator loses as much in them. But what it loses goes up and down with the
        number of recomputed blocks, and with the sizes of the parts.
        """
        failed, fitting = defaultdict[object, list[Candidate]](list), defaultdict[object, list[Plan]](list)
        for one in filter(operator.attrgetter("replayed"), self._found):
            if self.appraiser.goes_through(one):
                fitting[sort_of(one.plan)].append(one.plan)
            else:
                failed[sort_of(one.plan)].append(one)
        with self.finalists.some_more():
            for key, ones in sorted(failed.items(), key=lambda item: self.appraiser.step_seconds(without_recompute(item[1][0].plan))):
                if engines.of(ones[0].plan).takes_remedies:
                    self._fewest_replayed(ones, fitting.get(key, ()))
                else:
                    self._relieve(ones)
            plans = [one.plan for ones in failed.values() for one in ones if engines.of(one.plan).takes_remedies]
            for plan in sorted(plans, key=self.appraiser.step_seconds):
                for parts in self.remedies.parts_as_large(plan):
                    self._replay_if_faster(self.remedies.apart(plan, parts))

        with self.finalists.some_more():
            self._keep_others()
        with self.finalists.some_more():
            self._try_left_out(options if not self.appraiser.hopeful else ())

    def _try_left_out(self, options: Sequence[Plan]) -> None:
        """Replay a few plans that recompute all blocks, would be faster than the best one, and have room for their own tensors. The search
        left them out because other plans of their kind lost much to the allocator. Of each sort it replays the one with most room.
        """
        blocks = [block.fqn for block in recomputable(self.footprint)] if self.remedies.recompute else []
        roomiest: dict[tuple[object, ...], tuple[float, Plan]] = {}
        near = (one for one in options if self._computing_seconds(one) < self.best_seconds)
        for plan in (in_parts(one, parts) for one in near for parts in self.remedies.parts(one)):
            sort = self.appraiser.judged_by_others(plan)
            if sort is not None and self.appraiser.step_seconds(plan) < self.best_seconds:
                whole = with_recompute(plan, self.footprint, blocks)
                room = self.finalists.room(self.appraiser.bytes_of(whole).sizes)
                roomiest[sort] = max(roomiest.get(sort, (0.0, whole)), (room, whole), key=operator.itemgetter(0))
        ordered = (plan for room, plan in sorted(roomiest.values(), key=lambda one: -one[0]) if room > 0)
        for plan in islice(filter(self._is_faster, ordered), _REPLAYS_A_LOOK):
            self._replay_if_faster(plan)

    def _keep_others(self) -> None:
        """Where the best plan waits for the allocator, replay it with about as many recomputed blocks, but others: those that it keeps
        decide where the allocator finds room.
        """
        best = self._best_fitting()
        if best is None or not best.replayed or not best.plan.recompute or not self.appraiser.waits(best):
            return
        plain, count = without_recompute(best.plan), len(best.plan.recompute)
        by_saving, by_place = self.remedies.order(plain), [block.fqn for block in recomputable(self.footprint)]
        for number in (number for number in (count, count - 1, count + 1) if 0 < number <= len(by_place)):
            for blocks in (by_saving[-number:], by_saving[:number], by_place[-number:], by_place[:number]):
                self._replay_if_faster(with_recompute(plain, self.footprint, blocks))

    def _replay_if_faster(self, plan: Plan) -> None:
        """Replay a plan that would be faster than the best one."""
        if not self.finalists.is_tired and self._is_faster(plan):
            self._replayed(plan, learns=False)

    def _is_faster(self, plan: Plan) -> bool:
        return self.appraiser.step_seconds(plan) * (1 + WORTHWHILE) < self.best_seconds

    def _fewest_replayed(self, failed: Sequence[Candidate], fitting: Sequence[Plan]) -> None:
        """Replay plans of one sort with more recomputed blocks than those that failed: the most that may win, then half of what is left,
        even of a tired search as long as it gains by that. More blocks than fit may lack memory again.
        """
        plain = without_recompute(failed[0].plan)
        order = self.remedies.order(plain) if self.remedies.recompute else ()

        def recomputing(count: int) -> Plan:
            return with_recompute(plain, self.footprint, order[:count])

        tried = {len(one.plan.recompute): one.fits for one in failed}
        low = max(tried)
        below = max((number for number in tried if number < low), default=low)
        # A plan that fits but waits for the allocator may not do so with some blocks fewer.
        for number in range(low - 1, below, -1) if tried[low] and not fitting else ():
            self._replay_if_faster(recomputing(number))
        high = min((len(plan.recompute) for plan in fitting if len(plan.recompute) > low), default=0)
        middle = high or bisect_left(range(1, len(order) + 1), self.best_seconds, key=lambda n: self.appraiser.step_seconds(recomputing(n)))
        gained = False
        while middle > low and (gained or not self.finalists.is_tired):
            if self.appraiser.step_seconds(recomputing(low + 1)) * (1 + WORTHWHILE) >= self.best_seconds:
                return
            if gained := self.appraiser.goes_through(self._replayed(recomputing(middle), learns=False)):
                high = middle
            elif high:
                low = middle
            middle = (low + (high or middle)) // 2

    def _relieve(self, narrow: Sequence[Candidate]) -> None:
        """Replay plans whose engine adds remedies by itself, with some more recomputed blocks on each device that is short or waits."""
        for one in narrow:
            for number in range(_REPLAYS_A_LOOK):
                more = self.remedies.relieved(one.plan, self.finalists.narrow[one.plan], 1 << number)
                if self.appraiser.goes_through(one) or more == one.plan or self.finalists.is_tired or not self._is_faster(more):
                    break
                one = self._replayed(more, learns=False)

    def _options(self, sets: Sequence[Sequence[Device]] | None = None) -> list[Plan]:
        """Plain plans that can be run."""
        return [option.plan for option in enumerate_candidates(self.appraiser.question, speed=self.speed, keep=self._runs, sets=sets)]

    def _look_at_all(self, plans: Iterable[Plan]) -> None:
        """Look at all plans that can be faster than the best so far, those first that can be fastest. At first, a plan's bound is the
        seconds that its devices compute. Once predicted, it is its own seconds; with more parts or with shares, the seconds that it has
        then; recomputed blocks only add to them. Plans whose bound isn't below the best are left.
        """
        if self.constraints.objective == "memory":
            self._add_all(saving for plan in plans for saving in self.remedies.saving(plan))
            return
        queue: list[tuple[float, float, int, _Prospect]] = []
        numbers = count()

        def push(seconds: float, prospect: _Prospect) -> None:
            heappush(queue, (seconds, self.appraiser.busy(prospect.plan), next(numbers), prospect))

        for plan in plans:
            push(self._computing_seconds(plan), _Prospect(plan=plan, step="devices"))
        while queue:
            seconds, _, _, prospect = heappop(queue)
            for promised, following in self._followed(seconds, prospect):
                push(promised, following)

    def _followed(self, seconds: float, prospect: _Prospect) -> Iterator[tuple[float, _Prospect]]:
        """Look at a plan; yields the next things to look at, each with its bound of seconds."""
        plan, remedies = prospect.plan, self.remedies
        if prospect.step == "devices":
            if self._is_worth_a_look(plan, seconds):
                yield self.appraiser.step_seconds(plan), replace(prospect, step="plain")
                if remedies.uneven(plan) and remedies.may_share(plan):
                    for parts in remedies.shared_parts(plan):
                        yield seconds, _Prospect(plan=in_parts(plan, parts), step="split")
        elif prospect.step == "plain":
            if not self._is_worth_a_look(plan, seconds):
                return
            candidate = self._add(plan)
            self._shown[_family(plan)] += 1
            if self.finalists.may_fit(candidate):
                key = configuration(plan)
                self._decided[key] = min(self.appraiser.busy(plan), self._decided.get(key, math.inf))
            if not self.finalists.may_fit(candidate) and (self.appraiser.never_holds(candidate) or remedies.is_hopeless(plan)):
                return
            yield seconds, replace(prospect, step="parts", left=tuple(remedies.parts(plan)))
        elif prospect.step == "parts" and seconds >= self.best_seconds:
            # Uneven parts take longer than more that are even.
            rows, (first, *left) = max(plan.rows(self.footprint.batch_size)), prospect.left
            even = [number for number in left if rows % number == 0] if rows % first else []
            if even and (promised := self.appraiser.step_seconds(in_parts(plan, even[0]))) < self.best_seconds:
                yield promised, replace(prospect, left=tuple(left[left.index(even[0]) :]))
        elif prospect.step == "parts":
            first, *left = prospect.left
            divided = in_parts(plan, first)
            found = remedies.way(divided, self._limit)
            if found is not None:
                self._add(found)
            if found is not divided and remedies.may_share(plan) and not remedies.uneven(plan):
                yield seconds, _Prospect(plan=divided, step="split")
            promised = self.appraiser.step_seconds(in_parts(plan, left[0])) if left else math.inf
            if left and (found is not divided or promised < seconds):
                yield promised, replace(prospect, left=tuple(left))
        elif prospect.step == "split" and seconds < self.best_seconds:
            if plan.world_size > _MANY_RANKS and not remedies.uneven(plan):
                # With many equally fast ranks, those with little memory can just as well be left out.
                self._splits += 1
                if self._splits > _MOST_SPLITS:
                    return
            if not remedies.is_crowded(plan) and (promised := remedies.least_shared_seconds(plan)) < self.best_seconds:
                yield promised, replace(prospect, step="shares")
        elif prospect.step == "shares" and seconds < self.best_seconds:
            self._add_all(remedies.shared_out(plan, self._limit))

    def _is_worth_a_look(self, plan: Plan, seconds: float) -> bool:
        """Whether a plain plan with this bound of seconds may be chosen, or is one of the first of its sort, for the report."""
        if seconds < self.best_seconds:
            return True
        known = self._decided.get(configuration(plan), math.inf) <= self.appraiser.busy(plan)  # a known plan that disturbs others no more
        return not known and (seconds <= self.best_seconds * (1 + self._worth) or self._shown[_family(plan)] < _MOST_SHOWN)

    def _limit(self) -> float:
        return self.best_seconds

    def _computing_seconds(self, plan: Plan) -> float:
        """A lower bound of a plan's seconds: its devices compute at least so long, however the batch is shared out."""
        if not (self.constraints.split_batch and self.footprint.batch_size):
            return 0.0
        key = plan.devices, plan.data_ranks, self.remedies.may_share(plan)
        if key not in self._computing:
            busy = [self._busy_seconds[device] for device in plan.devices]
            if key[-1]:
                least = 1 / sum(1 / seconds for seconds in busy)
            else:
                least = max(map(operator.mul, plan.rows(self.footprint.batch_size), busy)) / self.footprint.batch_size
            self._computing[key] = _CERTAIN * least
        return self._computing[key]

    @cached_property
    def _busy_seconds(self) -> dict[str, float]:
        """The seconds that each device would compute for the whole batch, by id."""
        precision, factor = self.constraints.precision, self.appraiser.factors.compute
        return by_sort(
            self.inventory.devices,
            lambda device: factor * busy_seconds(self.footprint, device, precision=precision, rates=self.rates),
        )

    def _between(self, plans: Sequence[Plan]) -> list[Plan]:
        """Plans on numbers of devices near the best one, where not every number was tried."""
        best = self._best_fitting()
        if best is None or best.plan.world_size in (1, *self._around) or self.constraints.objective != "speed":
            return []
        self._around.add(best.plan.world_size)
        tried = sorted({plan.world_size for plan in plans if plan.world_size > 1})
        batch = self.footprint.batch_size if self.constraints.split_batch else 0
        sizes = sizes_between(batch, tried, best.plan.world_size)
        if not sizes:
            return []
        sets = device_sets(self.footprint.batch_size, self.inventory, self.constraints, self.speed, sizes=sizes)
        return self._options(sets)

    def _add_searched(self, engine: Engine) -> None:
        """Add the plans that an engine searches itself, on numbers of devices with which a plan may be faster than all so far: on each
        number up to so many, then on some, and on each near the best of these. Plans on the most devices are added for the report, too.
        The ranks of a pipeline share their samples, so there may be more ranks than samples.
        """
        if engine_refusal(engine.name, self.appraiser.question) is not None:
            return
        by_speed = self.constraints.objective == "speed"
        if by_speed and self.best_seconds <= self._searched_below.get(engine.name, -1.0):
            return
        search = self._lent(self._limit if by_speed else lambda: math.inf)
        samples = self.footprint.batch_size if engine.splits else len(self.inventory.devices)
        sets = device_sets(samples, self.inventory, self.constraints, self.speed)
        most = max((len(devices) for devices in sets), default=0)

        def look(chosen: Iterable[Sequence[Device]]) -> None:
            for devices in chosen:
                least = _CERTAIN / sum(1 / self._busy_seconds[device.id] for device in devices)
                if len(devices) == most or least < self.best_seconds:
                    self._add_all(engine.searched(search, devices, len(devices) == most))

        coarse = [devices for devices in reversed(sets) if len(devices) <= _EACH or len(devices) == most or not len(devices) % _SOME]
        look(coarse)
        own = [one for one in self._found if one.plan.engine == engine.name and self.finalists.may_fit(one)]
        if own:
            near = min(own, key=self.appraiser.batch_seconds).plan.world_size
            looked = {len(devices) for devices in coarse}
            look(devices for devices in reversed(sets) if abs(len(devices) - near) < _SOME and len(devices) not in looked)
        self._searched_below[engine.name] = self.best_seconds

    def _lent(self, limit: Callable[[], float]) -> Searching:
        return Searching(appraiser=self.appraiser, speed=self.speed, rates=self.rates, limit=limit)

    def _least(self) -> None:
        """Where nothing fits, add the plans that need least, which show how much is missing."""
        nearest: dict[str, Candidate] = {}
        for candidate in sorted(self._found, key=self.appraiser.order):
            nearest.setdefault(candidate.plan.engine, candidate)
        for candidate in nearest.values():
            if engines.of(candidate.plan).takes_remedies:  # others save memory by themselves where they lack some
                self._add_all(self.remedies.saving(in_parts(without_recompute(candidate.plan), 1)))

    def _refine(self) -> None:
        """Improve the best plan: drop remedies that it doesn't need, and move samples to where they are done soonest."""
        best = self._best_fitting()
        if best is None:
            return
        if not engines.of(best.plan).takes_remedies:
            self._polish_near(best)
            best = self._best_fitting() or best
        if engines.of(best.plan).takes_remedies:
            for parts in self.remedies.parts_near(best.plan):
                near = self.remedies.apart(without_recompute(best.plan), parts)
                if self.appraiser.step_seconds(near) < self.best_seconds and (found := self.remedies.way(near, self._limit)) is not None:
                    self._add(found)
            best = self._best_fitting() or best
        plan = best.plan
        devices = map(self.appraiser.device.__getitem__, plan.devices)
        kinds = {(device.name, device.threads, device.utilization, device.slowdown) for device in devices}
        if plan.shares or (len(kinds) > 1 and self.remedies.shares and engines.of(plan).shares):
            plan = self.remedies.better_shares(plan)
        if engines.of(plan).takes_remedies and plan.recompute:
            plan = self.remedies.cheaper_blocks(plan)
        plan = engines.of(plan).polished(self._lent(self._limit), plan)
        if plan != best.plan:
            if not self.finalists.can_replay(best):
                self._found = [one for one in self._found if one is not best]
            self._add(plan)

    def _polish_near(self, best: Candidate) -> None:
        """Improve the plans of the best one's engine that aren't much slower: one of them may gain more."""
        limit = self.appraiser.batch_seconds(best) * (1 + _POLISHED)
        own = [one for one in self._found if one.plan.engine == best.plan.engine and self.finalists.may_fit(one)]
        near = [one.plan for one in own if self.appraiser.batch_seconds(one) <= limit]
        for plan in sorted(near, key=self.appraiser.step_seconds)[:_MOST_POLISHED]:
            self._add(engines.of(plan).polished(self._lent(self._limit), plan))

    def _best_fitting(self) -> Candidate | None:
        hopeful = [(one, as_fitting(one)) for one in self._found if self.finalists.may_fit(one)]
        if not hopeful:
            return None
        best = self.appraiser.preferred([other for _, other in hopeful])
        return next(one for one, other in hopeful if other is best)

    def _beyond(self) -> None:
        """What can't be run by this version yet: on the best devices, on as many as may be, and on one."""
        sets, question = self._notable_sets(), self.appraiser.question
        hidden = enumerate_candidates(question, speed=self.speed, keep=lambda engine: not self._runs(engine), sets=sets)
        blocks = [block.fqn for block in recomputable(self.footprint)]
        for option in hidden:
            candidate = self._add(option.plan)
            if self.appraiser.lack(candidate.needs) > 0 and self.remedies.recompute:
                saving = with_recompute(option.plan, self.footprint, blocks)
                if self.appraiser.holds(saving):
                    self._add(saving)

    def _notable_sets(self) -> list[Sequence[Device]]:
        """The sets of devices for plans that can't be run: the best plan's, or else as many as allowed; and a single device."""
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
        """Add the plan with its prediction, which is made once."""
        key = replace(plan, reasons=())
        known = self._seen.get(key)
        if known is not None:
            return known
        candidate = self._seen[key] = self.appraiser.candidate(plan)
        self._found.append(candidate)
        if self.finalists.may_fit(candidate):
            self.best_seconds = min(self.best_seconds, self.appraiser.batch_seconds(candidate))
        return candidate
