"""What a plan is worth: its predicted bytes and seconds, whether it fits its devices and their host, and how plans are ordered. Doesn't
know how plans are found.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from lightning_autopar import engines
from lightning_autopar.constraints import Constraints
from lightning_autopar.devices.inventory import Inventory, busy_share
from lightning_autopar.engines import Question
from lightning_autopar.memory.allocator.replay import Replayed
from lightning_autopar.memory.batch_scaling import for_rank, scaled
from lightning_autopar.memory.device_bytes import DeviceBytes, HostNeed
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.learned.step_times import TimeFactors
from lightning_autopar.planning import plan_bytes
from lightning_autopar.planning.enumerate_plans import notes_of
from lightning_autopar.planning.plan_bytes import host_bytes
from lightning_autopar.planning.plan_seconds import predict_seconds
from lightning_autopar.planning.refusals import cannot_run, host_refusal, memory_refusal
from lightning_autopar.plans import Plan, order_of
from lightning_autopar.report.report import Candidate
from lightning_autopar.text import format_seconds
from lightning_autopar.timing.rates import Rates
from lightning_autopar.timing.step_seconds import Seconds

#: By how much a plan must be faster than a simpler one to be taken instead: predictions miss by more than a smaller share from run to run.
WORTHWHILE = 0.01
#: The same for a pipeline against a plan that splits the batch. Their seconds consist of other parts, which are predicted less well than
#: this. A choice may be 2 % slower than the best plan (``benchmarks/search_against_all.py``), of which the search's own misses need some.
WORTH_STAGES = 0.015
#: The same for a plan of another library against one of torch's own: at least the mean error of predicted seconds over published runs
#: (``benchmarks/results/published.json``).
WORTH_A_LIBRARY = 0.15
#: By how much a plan on devices that others keep busy must be faster than one on idler devices. How busy they are counts in tenths
#: (``inventory.idle_share``), so that seconds on them are known to half of that.
WORTH_DISTURBING = 0.05
#: After a failed replay, at least so many times the loss that failed is assumed.
_LEAST_LOST = 2 << 20
#: Of so many questions predictions are kept.
_MOST_QUESTIONS = 3
#: Parts of a step that use links, between devices or to the host.
_LINKS = ("communication", "offload")


#: How many bytes a plan needs, by device id.
Predict = Callable[[Footprint, Plan, Inventory], Mapping[str, DeviceBytes]]


class _Bytes(NamedTuple):
    """A plan's predicted bytes: as predicted, corrected by earlier runs with a sentence that says so, and with the margin."""

    raw: Mapping[str, DeviceBytes]
    sizes: Mapping[str, DeviceBytes]
    learned: tuple[str, ...]
    needs: Mapping[str, int]


#: A plan's predicted seconds: corrected by earlier runs, and uncorrected; and a sentence on the correction.
_Timed = tuple[Seconds, Seconds, tuple[str, ...]]


#: Bytes and seconds by plan, and replays by what decides them.
_Known = tuple[dict[Plan, _Bytes], dict[Plan, _Timed], dict[tuple[object, ...], Replayed]]


class Predictions:
    """Predictions that several questions share, as long as they are about one step on the same devices. How much memory is free there
    changes none of them, nor does what plans are allowed.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[_Known, tuple[object, ...]]] = {}

    def of(self, footprint: Footprint, inventory: Inventory, constraints: Constraints) -> _Known:
        """The bytes and the seconds of plans, and the replays, that are known for such a question; what is added is known from then on."""
        devices = tuple(replace(device, free_bytes=0, processes=()) for device in inventory.devices)
        kept = footprint, inventory.links, constraints.residuals  # alive, so that no other object gets their identities
        key = (*map(id, kept), devices, constraints.precision, constraints.split_batch, constraints.allocator)
        if key not in self._known:
            while len(self._known) >= _MOST_QUESTIONS:
                del self._known[next(iter(self._known))]
            self._known[key] = ({}, {}, {}), kept
        return self._known[key][0]


class Appraiser:
    """Predicts and ranks plans for one question: this footprint, these devices, these constraints.

    Args:
        predict: bytes of a plan; :func:`lightning_autopar.planning.plan_bytes.predict` unless given.
        rates: rates of devices, for the seconds; data sheets' unless given.
        predictions: what is known from other questions, to the same ``predict`` and ``rates``.
    """

    def __init__(
        self,
        footprint: Footprint,
        inventory: Inventory,
        constraints: Constraints,
        predict: Predict | None = None,
        rates: Rates | None = None,
        predictions: Predictions | None = None,
    ) -> None:
        self.footprint = footprint
        self.inventory = inventory
        self.constraints = constraints
        self.question = Question(footprint=footprint, inventory=inventory, constraints=constraints)
        self.predict = predict or partial(plan_bytes.predict, precision=constraints.precision)
        self.rates = rates
        self.device = {device.id: device for device in inventory.devices}
        self.budget = {device.id: constraints.budget_bytes(device) for device in inventory.devices}
        #: By what earlier runs multiply predicted seconds: a search's bounds as well, or else it passes over plans that they make faster.
        self.factors = constraints.residuals.time_factors
        self._busy = {device.id: share for device in inventory.devices if (share := busy_share(device))}
        self._on_cpu = any(device.kind == "cpu" for device in inventory.devices)
        self._scaled: dict[int, Footprint] = {}
        self._in_parts: dict[int, Footprint] = {}
        self._known_bytes, self._known_seconds, self.known_replays = (predictions or Predictions()).of(footprint, inventory, constraints)
        #: The plans whose allocations can be replayed. For them the search assumes the loss of the allocator that replays of plans of their
        #: sort have shown. Before the first replay it assumes none, or, no longer ``hopeful``, the rule of thumb, or what failed replays of
        #: plans of their kind have shown, if that is more.
        self.replays: Callable[[Plan], bool] = lambda plan: False
        self.hopeful = True
        self._lost: dict[tuple[object, ...], int] = {}
        self._lost_by_kind: dict[tuple[object, ...], int] = {}

    def candidate(self, plan: Plan) -> Candidate:
        """A plan's prediction, and whether it fits and can be run."""
        found = self.bytes_of(plan)
        seconds, raw_seconds, told = self._seconds(plan)
        needs = found.needs if self.hopeful else self.needs(plan)
        host = self._host_need(plan, needs)
        reason = self.shortage(needs) or self._host_shortage(host)
        missing = cannot_run(plan, allow=self.constraints.allow, pinned=self.constraints.pinned is not None)
        if reason is None and missing is not None:
            reason = f"{missing}; it would take {format_seconds(seconds.step)} a step"
        return Candidate(
            plan=plan,
            fits=reason is None,
            reason=reason,
            held_back=missing is not None,
            bytes=found.sizes,
            raw=found.raw,
            needs=needs,
            host=host,
            seconds=seconds,
            raw_seconds=raw_seconds,
            notes=notes_of(plan, self.footprint, self.constraints),
            learned=(*found.learned, *told),
        )

    def needs(self, plan: Plan) -> Mapping[str, int]:
        """The bytes that must be there for a plan, by device id."""
        found = self.bytes_of(plan)
        if not self.replays(plan):
            return found.needs
        sort = self._sort(plan)
        lost = self._lost.get(sort, 0)
        of_kind = None if self.hopeful or sort in self._lost else self._lost_by_kind.get(kind_of(plan), 0)
        margin = 1 + self.footprint_of(plan).margin

        def needed(size: DeviceBytes) -> int:
            return math.ceil((size.reserved - size.rounding + (lost if of_kind is None else max(size.rounding, of_kind))) * margin)

        return of_each(found.sizes, needed)

    def learn(self, plan: Plan, lost_bytes: int, free_bytes: int, *, failed: bool) -> None:
        """From a plan's replay on, assume for all plans of its sort the loss of an allocator that gives nothing back; after a failed
        replay, more than before. All plans of its kind are then assumed to lose as much as it did.
        """
        sort = self._sort(plan)
        known, before, of_kind = sort in self._lost, self._lost.get(sort, 0), self._lost_by_kind.get(kind_of(plan), 0)
        self._lost[sort] = max(free_bytes, before + before // 2 + _LEAST_LOST if failed else 0)
        if failed:
            more = 0 if self.hopeful or known else of_kind + of_kind // 4 + _LEAST_LOST
            self._lost_by_kind[kind_of(plan)] = max(lost_bytes, of_kind, more)

    def judged_by_others(self, plan: Plan) -> tuple[object, ...] | None:
        """The sort of a plan that is assumed to lose what others of its kind have lost; None where its own sort's loss is known."""
        sort = self._sort(plan)
        return sort if self.replays(plan) and sort not in self._lost and kind_of(plan) in self._lost_by_kind else None

    def _sort(self, plan: Plan) -> tuple[object, ...]:
        """Of plans that differ only in how much they recompute, and in which devices run equally many samples at a time."""
        rows = -(-max(plan.rows(self.footprint.batch_size), default=1) // plan.micro_batches)
        return (*kind_of(plan), plan.devices_per_replica, plan.micro_batches > 1, rows)

    def bytes_of(self, plan: Plan) -> _Bytes:
        """A plan's predicted bytes, computed once."""
        if plan not in self._known_bytes:
            footprint = self.footprint_of(plan)
            raw = self.predict(footprint, plan, self.inventory)
            sizes, learned = self.constraints.residuals.corrected(plan, raw)
            needs = of_each(sizes, lambda size: math.ceil(size.reserved * (1 + footprint.margin)))
            self._known_bytes[plan] = _Bytes(raw, sizes, learned, needs)
        return self._known_bytes[plan]

    def _seconds(self, plan: Plan) -> _Timed:
        """A plan's predicted seconds, computed once: corrected by earlier runs, and uncorrected; and a sentence on the correction."""
        if plan not in self._known_seconds:
            footprint, precision = self.footprint_of(plan), self.constraints.precision
            raw = predict_seconds(footprint, plan, self.inventory, precision=precision, rates=self.rates)
            self._known_seconds[plan] = corrected(raw, self.factors) if self.factors.told else raw, raw, self.factors.told
        return self._known_seconds[plan]

    def holds(self, plan: Plan) -> bool:
        """Whether a plan fits into memory."""
        needs = self.needs(plan)
        return self.lack(needs) <= 0 and self.shortage(needs) is None and self._host_shortage(self._host_need(plan, needs)) is None

    def never_holds(self, candidate: Candidate) -> bool:
        """Whether a device lacks memory for what a plan keeps even with all micro-batches and all recomputation."""
        margin = 1 + self.footprint.margin
        return any(
            (size.parameters + size.optimizer + size.buffers + size.context + size.workspace) * margin > self.budget[device]
            for device, size in candidate.bytes.items()
            if size.occasion == "step" and size.correction == 0
        )

    def step_seconds(self, plan: Plan) -> float:
        """Seconds a batch under a plan: where each rank has a batch of its own, a step runs several batches."""
        return self.of_a_batch(self._seconds(plan)[0].step, plan)

    def of_a_batch(self, seconds: float, plan: Plan) -> float:
        """A step's seconds for each batch in it. Rounded, as sums in another order differ in the last digits."""
        return float(f"{seconds / (1 if self.constraints.split_batch else plan.world_size):.9g}")

    def footprint_of(self, plan: Plan) -> Footprint:
        """The footprint of the global batch; where each rank takes a batch of its own, that is all of them."""
        if self.constraints.split_batch and self.footprint.longest_samples:
            parts = plan.data_ranks * plan.micro_batches
            if parts not in self._in_parts:
                self._in_parts[parts] = for_rank(self.footprint, parts)
            return self._in_parts[parts]
        if self.constraints.split_batch or plan.world_size == 1:
            return self.footprint
        if plan.world_size not in self._scaled:
            self._scaled[plan.world_size] = scaled(self.footprint, max(1, self.footprint.batch_size) * plan.world_size)
        return self._scaled[plan.world_size]

    def lack(self, needs: Mapping[str, int]) -> int:
        """Bytes missing on the device that lacks most; 0 or negative where there are enough."""
        most: int = max(map(operator.sub, needs.values(), map(self.budget.__getitem__, needs)))
        return most

    def shortage(self, needs: Mapping[str, int]) -> str | None:
        """Where memory is missing, on the device that lacks most; None where there is enough."""
        if self.lack(needs) > 0:
            _, device_id = max(zip(map(operator.sub, needs.values(), map(self.budget.__getitem__, needs)), needs, strict=True))
            return memory_refusal(self.device[device_id], needs[device_id], self.budget[device_id], self.constraints)
        if not self._on_cpu:
            return None
        # CPU devices share one memory; their budgets may come to more than there is.
        on_host: dict[int, int] = {}
        for device, need in needs.items():
            if self.device[device].kind == "cpu":
                on_host[self.device[device].node] = on_host.get(self.device[device].node, 0) + need
        host = int(self.inventory.host_free_bytes * (1 - self.constraints.memory_margin))
        if host and (most := max(on_host.values(), default=0)) > host:
            return host_refusal(most, host)
        return None

    def _host_need(self, plan: Plan, needs: Mapping[str, int]) -> HostNeed | None:
        """What a plan takes of a host's memory; None where it offloads nothing."""
        precision, margin = self.constraints.precision, self.constraints.memory_margin
        return host_need(self.footprint_of(plan), plan, self.inventory, needs, precision=precision, margin=margin)

    def _host_shortage(self, need: HostNeed | None) -> str | None:
        """Why a host's memory is too small for it; None where it is large enough."""
        return None if need is None or need.fits else need.shortage(self.inventory, self.constraints.memory_margin)

    def order(self, candidate: Candidate) -> tuple[object, ...]:
        """The sort key: fitting plans, then those that would fit but can't be run, both by the objective; the others by what they lack."""
        plan, seconds = candidate.plan, candidate.seconds
        assert seconds is not None, "only predicted candidates have an order"
        step = self.of_a_batch(seconds.step, plan)
        simpler = simplicity(plan)
        lack = 0 if candidate.fits else max(0, self.lack(candidate.needs))
        if not candidate.fits and (lack > 0 or candidate.runnable):
            return (2, lack, step, *simpler)
        fullest = max(size.allocated for size in _distinct(candidate.bytes).values())
        place = 0 if candidate.fits else 1
        if self.constraints.objective == "memory":
            return (place, fullest, step, self.busy(plan), *simpler)
        return (place, step, self.busy(plan), *simpler, fullest)

    def preferred(self, hopeful: Sequence[Candidate]) -> Candidate:
        """The candidate to take, of several that may all be taken: the first by order, or a simpler one that is hardly slower."""
        first = min(hopeful, key=self.order)
        if self.constraints.objective != "speed":
            return first
        if engines.of(first.plan).another_library:
            limit = self.batch_seconds(first) * (1 + WORTH_A_LIBRARY)
            near = [one for one in hopeful if not engines.of(one.plan).another_library and self.batch_seconds(one) <= limit]
            first = min(near, key=self.order, default=first)
        if not engines.of(first.plan).another_library:
            hopeful = [one for one in hopeful if not engines.of(one.plan).another_library]
        first = self._idlest(first, hopeful)
        fastest, busy, staged = self.batch_seconds(first), self.busy(first.plan), not engines.of(first.plan).splits

        def is_near(one: Candidate) -> bool:
            worth = WORTH_STAGES if staged and engines.of(one.plan).splits else WORTHWHILE
            return self.batch_seconds(one) <= fastest * (1 + worth) and self.busy(one.plan) <= busy

        near = list(filter(is_near, hopeful))
        return min(near, key=lambda one: (simplicity(one.plan), self.order(one)))

    def busy(self, plan: Plan) -> float:
        """The share that others use of the plan's busiest device."""
        return max(self._busy.get(device, 0.0) for device in plan.devices) if self._busy else 0.0

    def _idlest(self, first: Candidate, hopeful: Sequence[Candidate]) -> Candidate:
        """The first candidate, or one that is hardly slower and disturbs others less."""
        if not self.busy(first.plan):
            return first
        limit = self.batch_seconds(first) * (1 + WORTH_DISTURBING)
        near = [one for one in hopeful if self.batch_seconds(one) <= limit]
        return min(near, key=lambda one: (self.busy(one.plan), self.order(one)))

    def batch_seconds(self, candidate: Candidate) -> float:
        """A candidate's seconds a batch."""
        return self.of_a_batch(candidate.step_seconds, candidate.plan)

    def waits(self, replayed: Candidate) -> bool:
        """Whether its replay showed that a plan waits for the allocator in each step."""
        return self.batch_seconds(replayed) > self.step_seconds(replayed.plan)

    def goes_through(self, replayed: Candidate) -> bool:
        """Whether its replay showed that a plan fits without waiting."""
        return replayed.fits and not self.waits(replayed)


def of_each(sizes: Mapping[str, DeviceBytes], needed: Callable[[DeviceBytes], int]) -> dict[str, int]:
    """The bytes needed of each device, by id; equal ranks share an object, which is computed once."""
    known = {key: needed(size) for key, size in _distinct(sizes).items()}
    return dict(zip(sizes, map(known.__getitem__, map(id, sizes.values())), strict=True))


def _distinct(sizes: Mapping[str, DeviceBytes]) -> dict[int, DeviceBytes]:
    """The sizes by their identity; equal ranks share an object."""
    return dict(zip(map(id, sizes.values()), sizes.values(), strict=True))


def links_seconds(seconds: Seconds) -> float:
    """The seconds of a step that are spent on links."""
    return sum(part for name, part in seconds.parts().items() if name in _LINKS)


def corrected(seconds: Seconds, factors: TimeFactors) -> Seconds:
    """The predicted seconds, corrected by the factors that measured runs have shown."""
    return Seconds(**{name: part * (factors.links if name in _LINKS else factors.compute) for name, part in seconds.parts().items()})


def sort_of(plan: Plan) -> tuple[object, ...]:
    """The sort of a plan: plans that differ only in how much they recompute are of one sort."""
    return (*kind_of(plan), plan.devices, plan.replicas, plan.micro_batches, plan.shares)


def kind_of(plan: Plan) -> tuple[object, ...]:
    """The kind of a plan: plans in which the allocator loses about as many bytes, on however many devices and in however many parts."""
    return plan.engine, plan.options, plan.reshard_after_forward, plan.offload, plan.schedule


def simplicity(plan: Plan) -> tuple[object, ...]:
    """The sort key by which simpler plans come first: fewer devices, then fewer features, then the simpler engine."""
    besides = sum((plan.micro_batches > 1, bool(plan.shares), plan.replicas > 1, bool(plan.offload), bool(plan.recompute)))
    return (plan.world_size, besides, order_of(plan.engine), len(plan.recompute), plan.micro_batches, plan.devices)


def first_of_each_configuration(candidates: Iterable[Candidate]) -> dict[tuple[object, ...], Candidate]:
    """The first candidate of each configuration: only plans that differ by more than a choice of equal devices get a line in the report."""
    found: dict[tuple[object, ...], Candidate] = {}
    for candidate in candidates:
        found.setdefault(configuration(candidate.plan), candidate)
    return found


def configuration(plan: Plan) -> tuple[object, ...]:
    """What tells plans apart in the report: not which equal devices they use, nor how much of a remedy they take."""
    return (
        plan.engine,
        plan.devices if plan.world_size == 1 else plan.world_size,
        plan.reshard_after_forward,
        plan.replicas,
        plan.zero_stage,
        plan.offload,
        plan.schedule,
        plan.micro_batches > 1,
        bool(plan.shares),
        bool(plan.recompute),
        plan.options,
    )


def host_need(
    footprint: Footprint, plan: Plan, inventory: Inventory, needs: Mapping[str, int], *, precision: str, margin: float
) -> HostNeed | None:
    """What a plan takes of the host that has least to spare; None where nothing is offloaded, or the host's memory isn't known. The free
    memory is what the tightest cgroup leaves (``devices/host.py``): the kernel kills a job that exceeds it. The planning process holds the
    module already, and forked ranks share its pages. A host that is only planned for must hold the module, too.

    Args:
        footprint: that of the plan's batch.
        needs: bytes that must be there, by device id.
        margin: share of the free memory that is left alone.
    """
    if not plan.offload or not inventory.host_free_bytes:
        return None
    kind = inventory.device(plan.devices[0]).kind
    held = host_bytes(footprint, plan, precision=precision, on_cpu=kind == "cpu")
    ranks_on = Counter(inventory.device(device).node for device in plan.devices)
    on_cpu = dict.fromkeys(ranks_on, 0)
    if kind == "cpu":
        for device in plan.devices:
            on_cpu[inventory.device(device).node] += needs[device]
    found = []
    for node, ranks in ranks_on.items():
        module = held.module if kind == "catalogue" else 0
        if footprint.configures_model:
            module = footprint.parameter_bytes * (ranks if engines.of(plan).builds_on_each else 1)
        found.append(
            HostNeed(
                node=node,
                offload=held.offload * ranks // plan.world_size,
                pinned=held.pinned * ranks // plan.world_size,
                module=module,
                checkpoint=held.checkpoint,
                devices=on_cpu[node],
                budget=int(inventory.host_free_on(node) * (1 - margin)),
                assumed=node in inventory.assumed_hosts,
            )
        )
    return max(found, key=lambda need: (need.total - need.budget, need.total, -need.node))
