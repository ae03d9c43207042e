"""Replays the best candidates' allocations: does the allocator get through their steps in the memory that the devices have?

The search predicts by a step's fullest moments and a rule of thumb for the allocator. CPU devices need no replay: their allocator gives
back what is freed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lightning_autopar import engines
from lightning_autopar.memory.allocator.replay import Replayed
from lightning_autopar.memory.allocator.tape_parts import script_of
from lightning_autopar.memory.cuda_overhead import workspaces
from lightning_autopar.memory.device_bytes import DeviceBytes
from lightning_autopar.planning.plan_bytes import replay
from lightning_autopar.planning.plan_cost import Appraiser, kind_of, of_each
from lightning_autopar.plans import Plan
from lightning_autopar.report.report import Candidate
from lightning_autopar.text import format_bytes, format_seconds
from lightning_autopar.timing.step_seconds import Seconds

#: How many allocations one search may replay, three microseconds each, while it still hopes that plans lose nothing to the allocator.
_MOST_ALLOCATIONS = 60_000
#: So many more for plans that the search passed over after failed replays, however many those were.
_MORE_ALLOCATIONS = 40_000
#: And so many more until the plan that is chosen has been replayed. The best candidate is replayed in any case.
_LAST_ALLOCATIONS = 300_000
#: A replay's preparation takes as long as this many of its allocations.
_ALLOCATIONS_A_REPLAY = 500

#: So many of the last replays of a question are kept for the next one.
_MOST_KNOWN = 32

#: The time to give one segment back to the driver by ``cudaFree``, which waits for the device, and to take one by ``cudaMalloc``. Published
#: figures are 0.05 to 1.2 ms a call, more for larger segments; not measured here.
_SEGMENT_SECONDS = 1e-3

#: A search looks for plans whose allocator gives nothing back, if it would hold at most so many times what there is: plans with more room
#: than that are slow.
_MOST_WITHOUT_LIMIT = 1.1

#: Of a plan that is taken once a search has replayed as much as it may.
_UNREPLAYED = (
    "its allocations weren't replayed, as the search had used up its replays: the memory that the allocator reserves is a rule of thumb"
)

Order = Callable[[Candidate], tuple[object, ...]]
#: Says where memory is missing, given the bytes needed by device; None where there is enough.
Shortage = Callable[[Mapping[str, int]], str | None]
#: Chooses the candidate to take among those that fit.
Preferred = Callable[[Sequence[Candidate]], Candidate]


def as_fitting(candidate: Candidate) -> Candidate:
    """The candidate as it is if its plan fits."""
    return candidate if candidate.fits else replace(candidate, fits=True, reason=None)


class Finalists:
    """Replays for one search, each configuration once.

    A replay that an earlier search has made isn't made again. It uses up as many of this search's allocations as if it were: so what a
    search finds doesn't depend on the searches before it.
    """

    def __init__(self, appraiser: Appraiser) -> None:
        self.footprint, self.inventory, self.constraints = appraiser.footprint, appraiser.inventory, appraiser.constraints
        self.budget, self._known = appraiser.budget, appraiser.known_replays
        self._played: dict[tuple[object, ...], Replayed] = {}
        #: By replayed plan, the candidate as the moments predict it.
        self._predicted: dict[Plan, Candidate] = {}
        #: Plans that are replayed until their steps are alike; of others a first look is enough.
        self.lasting: set[Plan] = set()
        self._left = _MOST_ALLOCATIONS
        #: Kinds of plans whose allocator would hold much more than there is, if it gave nothing back.
        self._scattering: set[tuple[object, ...]] = set()
        #: What :meth:`room` has said, by the identity of the bytes, which are kept.
        self._rooms: dict[int, tuple[float, Mapping[str, DeviceBytes]]] = {}
        #: Whether a plan may be taken for one that fits as long as its tensors do.
        self.hopeful = True
        #: By replayed plan, what the allocator holds beyond its tensors on the tightest device (a lower bound if the replay failed), and
        #: what it would hold if it never had to give anything back, if a search learns that.
        self.lost: dict[Plan, tuple[int, int]] = {}
        #: By replayed plan, a device for each replayed rank that lacks memory, or waits for the allocator in each step.
        self.narrow: dict[Plan, list[str]] = {}

    def decide(self, candidates: Iterable[Candidate], order: Order, shortage: Shortage, preferred: Preferred) -> list[Candidate]:
        """The candidates, the best first and the others in order; it replays those that may be the best until one fits.

        Args:
            candidates: predicted by moments.
            order: best first.
            shortage: says what is missing for one that doesn't fit.
            preferred: chooses the best of those that fit.
        """
        decided = list(candidates)
        hopeful = {number: as_fitting(one) for number, one in enumerate(decided) if self.may_fit(one)}
        chosen: Candidate | None = None
        while hopeful:
            best = preferred(list(hopeful.values()))
            number = next(number for number, one in hopeful.items() if one is best)
            if self.can_replay(decided[number]) and not decided[number].replayed:
                if self._played and self.is_spent:
                    break
                decided[number] = self.check(decided[number], shortage)
                if decided[number].fits:  # perhaps it is no longer the fastest
                    hopeful[number] = decided[number]
                    continue
            if decided[number].fits:
                if decided[number].replayed and decided[number].plan not in self.lasting:
                    self.lasting.add(decided[number].plan)
                    decided[number] = hopeful[number] = self.check(decided[number], shortage)
                    continue
                chosen = decided[number]
                break
            del hopeful[number]
        ordered = sorted(decided, key=order)
        if chosen is None and (fitting := [one for one in ordered if one.fits]):
            chosen = preferred(fitting)
        if chosen is None:
            return ordered
        others = [one for one in ordered if one is not chosen]
        told = not chosen.replayed and self.can_replay(chosen)
        return [replace(chosen, notes=(*chosen.notes, _UNREPLAYED)) if told else chosen, *others]

    @property
    def is_tired(self) -> bool:
        """Whether the search has replayed as much as it may while it hopes."""
        return self._left <= 0

    @property
    def is_spent(self) -> bool:
        """Whether the search has replayed as much as it may at all."""
        return self._left <= -_LAST_ALLOCATIONS

    @contextmanager
    def some_more(self) -> Iterator[None]:
        """Let it replay some more meanwhile."""
        before = self._left
        self._left = max(0, before) + _MORE_ALLOCATIONS
        try:
            yield
        finally:
            self._left = min(before, self._left)

    def can_replay(self, candidate: Candidate) -> bool:
        """Whether a candidate can be replayed: :meth:`replays` says so of its plan, and its bytes are known by category."""
        return self.replays(candidate.plan) and {DeviceBytes}.issuperset(map(type, candidate.bytes.values()))

    def replays(self, plan: Plan) -> bool:
        """Whether a plan's step was taped at as many samples as a batch has, its engine has a player for it, and its allocator caches freed
        memory.
        """
        if self.footprint.tape is None or self.footprint.longest_samples or self.inventory.device(plan.devices[0]).kind == "cpu":
            return False
        return len(engines.of(plan).replayed(self.footprint, plan)) > 0

    def check(self, candidate: Candidate, shortage: Shortage, *, learns: bool = False) -> Candidate:
        """The candidate with the bytes that the allocator would hold for it, and whether they fit. It needs the larger of the two
        predictions, with the footprint's margin: a plan that fits does so by both. A search that learns from it also gets to know what the
        allocator would hold without a limit.
        """
        candidate = self._predicted.setdefault(candidate.plan, candidate)
        margin = 1 + self.footprint.margin
        sizes = candidate.bytes
        around = {device: size.context + max(0, size.correction) for device, size in sizes.items()}
        played: dict[str, Replayed] = {}
        held: dict[str, int] = {}
        rank, limit, tight, kind = 0, 0, "", kind_of(candidate.plan)
        learns = learns and kind not in self._scattering
        for first, devices in self._spoken_for(candidate):
            most = min(self._limit(device, around[device], margin) for device in devices)
            found = self.replayed(candidate, first, most, beyond=learns)
            if not played or not found.fits:
                rank, limit, tight = first, most, devices[0]
            played |= dict.fromkeys(devices, found)
            held |= dict.fromkeys(devices, found.reserved_peak_bytes if found.fits else most + found.missing_bytes)
            if not found.fits:
                break
        fits, released = played[tight].fits, max(found.released for found in played.values())
        self.narrow[candidate.plan] = list(
            {id(found): device for device, found in played.items() if found.released or not found.fits}.values()
        )
        tensors = sizes[tight].reserved - sizes[tight].rounding - around[tight]
        free = held[tight]
        if learns and (released or not fits):
            without_limit = self.replayed(candidate, rank, None).reserved_peak_bytes
            if without_limit <= limit * _MOST_WITHOUT_LIMIT:
                free = without_limit
            else:
                self._scattering.add(kind)
        self.lost[candidate.plan] = held[tight] - tensors, free - tensors
        raw = {device: _played(size, played[device]) if device in played else size for device, size in candidate.raw.items()}
        checked, _ = self.constraints.residuals.corrected(candidate.plan, raw)
        needs: dict[str, int] = {}
        for device in sizes:
            reserved = held[device] + around[device] if device in held else 0
            needs[device] = math.ceil(max(checked[device].reserved, reserved) * margin)
        reason = shortage(needs)
        if reason is None and candidate.host is not None and not candidate.host.fits:
            reason = candidate.host.shortage(self.inventory, self.constraints.memory_margin)
        if reason is None and not fits:
            reason = f"needs more than {format_bytes(limit)}, the limit of torch's allocator"
        notes = candidate.notes
        waiting = _SEGMENT_SECONDS * released if fits else 0.0
        if waiting:
            times = "once" if released == 1 else f"{released} times"
            told = f"in each step the allocator has to give memory back to the driver {times}, which takes about {format_seconds(waiting)}"
            notes = (*notes, f"fits narrowly: {told}")
        return replace(
            candidate,
            fits=reason is None,
            reason=reason,
            bytes=checked,
            raw=raw,
            needs=needs,
            seconds=_slower(candidate.seconds, waiting),
            raw_seconds=_slower(candidate.raw_seconds, waiting),
            replayed=True,
            notes=notes,
        )

    def _spoken_for(self, candidate: Candidate) -> list[tuple[int, list[str]]]:
        """The ranks to play, the one with least to spare first, each with the devices for which it speaks. Of ranks with uneven shares the
        tightest is played alone.
        """
        plan = candidate.plan
        place = {device: number for number, device in enumerate(plan.devices)}
        order = sorted(place, key=lambda device: -candidate.needs[device] / max(1, self.budget[device]))
        if plan.shares:
            return [(place[order[0]], order[:1])]
        numbers, found = engines.of(plan).replayed(self.footprint, plan), dict[int, list[str]]()
        for device in order:
            found.setdefault(numbers[place[device]], []).append(device)
        return [(min(map(place.__getitem__, devices)), devices) for devices in found.values()]

    def _limit(self, device_id: str, around_bytes: int, margin: float) -> int:
        """The most bytes that the allocator may hold on a device."""
        total = int(self.inventory.device(device_id).total_bytes * self.constraints.allocator.memory_fraction)
        return max(0, min(int(self.budget[device_id] / margin) - around_bytes, total))

    def may_fit(self, candidate: Candidate) -> bool:
        """Whether a candidate fits by the search's prediction, or, while it hopes, would if the allocator lost nothing; a replayed one, by
        its replay. A candidate whose host lacks memory doesn't fit, whatever its devices have.
        """
        if candidate.fits or candidate.replayed or not self.hopeful:
            return candidate.fits
        hosted = candidate.host is None or candidate.host.fits
        return hosted and candidate.runnable and self.can_replay(candidate) and self.room(candidate.bytes) >= 0

    def room(self, sizes: Mapping[str, DeviceBytes]) -> float:
        """The bytes that the allocator may lose on the device with least to spare, as a share of what is there for the step's tensors."""
        if id(sizes) not in self._rooms:
            margin = 1 + self.footprint.margin
            held = of_each(sizes, lambda size: size.reserved - size.rounding)
            self._rooms[id(sizes)] = min(1 - size * margin / max(1, self.budget[device]) for device, size in held.items()), sizes
        return self._rooms[id(sizes)][0]

    def replayed(self, candidate: Candidate, rank: int, limit: int | None, *, beyond: bool = False) -> Replayed:
        """The replay of one of its ranks, limited to what the allocator may hold. One that fails may find what it holds without, too."""
        plan = candidate.plan
        device = self.inventory.device(plan.devices[rank]).name
        again = frozenset(plan.recompute)
        recompute = again and again.intersection(engines.of(plan).own_blocks(self.footprint, plan, rank))
        how = *kind_of(plan), plan.zero_stage, recompute, plan.shard, plan.micro_batches, plan.replicas, plan.cuts
        key = (*how, plan.world_size, plan.shares, rank, device)
        played = self._play(candidate, rank, limit, (*key, limit), beyond)
        if played.beyond is not None:
            self._played.setdefault((*key, None), played.beyond)
        if played.fits or limit is None:
            return played
        # The replay stopped at the first tensor without room; at the peak more is missing.
        more = candidate.bytes[plan.devices[rank]].allocated - limit
        return replace(played, missing_bytes=max(played.missing_bytes, more))

    def _play(self, candidate: Candidate, rank: int, limit: int | None, key: tuple[object, ...], beyond: bool) -> Replayed:
        if key not in self._played:
            assert self.footprint.tape is not None, "asked before"
            if (*key, beyond) not in self._known:
                while len(self._known) >= _MOST_KNOWN:
                    del self._known[next(iter(self._known))]
                self._known[*key, beyond] = replay(
                    self.footprint,
                    candidate.plan,
                    rank,
                    limit_bytes=limit,
                    options=self.constraints.allocator,
                    rows=None if self.constraints.split_batch else self.footprint.batch_size,
                    workspaces=workspaces(self.footprint, self.inventory.device(candidate.plan.devices[rank]).name),
                    script=script_of(self.footprint.tape),
                    first_look=True,
                    beyond=beyond,
                )
            played = self._played[key] = self._known[*key, beyond]
            self._left -= sum(_ALLOCATIONS_A_REPLAY + one.allocations for one in (played, played.beyond) if one is not None)
        if (go_on := self._played[key].go_on) is not None and candidate.plan in self.lasting:
            self._played[key] = go_on()
        return self._played[key]


def _slower(seconds: Seconds | None, waiting: float) -> Seconds | None:
    """The seconds of a step, in which the host also waits for the allocator."""
    return seconds and replace(seconds, overhead=seconds.overhead + waiting)


def _played(size: DeviceBytes, played: Replayed) -> DeviceBytes:
    """What the replay found at its fullest moment, if the step is the fullest moment and the replay completed it."""
    if size.occasion != "step" or not played.fits:
        return size
    rounding = max(0, played.reserved_peak_bytes - played.allocated_peak_bytes)
    parts: dict[str, Any] = dict(played.by_category.items())
    return replace(size, **parts, rounding=rounding)
