"""Advice: which one change would make a plan fit, or the run much faster. It asks the search again with that change, and predicts nothing
itself.

A change is advised only where its effect is predicted as any plan's is. Another precision's isn't, as the step was traced under this one:
such advice says so, and promises nothing.
:mod:`lightning_autopar.planning.what_if` makes the question with one thing changed.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal, Protocol

from lightning_autopar import engines
from lightning_autopar.devices.inventory import Device, device_label, devices_label
from lightning_autopar.engines import Question
from lightning_autopar.memory.batch_scaling import drawn_by_rank, draws_whole, scaled
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.planning import what_if
from lightning_autopar.planning.block_units import recomputable_order
from lightning_autopar.planning.refusals import split_refusal
from lightning_autopar.plans import Plan, all_engines, offered_engines
from lightning_autopar.report.report import Advice, Candidate
from lightning_autopar.text import counted, format_bytes, format_seconds
from lightning_autopar.timing.collectives import known_model

#: How many times as fast a sample must be for a change to be worth a sentence.
_LEAST_SPEEDUP = 1.2
#: A small change is at most this share of a device's memory, or a batch of at least this share of the present one.
_LEAST_MEMORY_SHARE, _LEAST_BATCH_SHARE = 0.25, 0.5
#: At most so many faster plans that don't fit are looked at; where nothing fits, so many plans are tried with a smaller batch.
_MOST_TARGETS, _MOST_TRIED = 4, 6
_MOST_SENTENCES = 5
#: No further search is begun after so many, or so many seconds: somebody waits for the report; more where nothing fits, as no run waits.
_MOST_SEARCHES, _MOST_SECONDS = 10, 4.0
MOST_SEARCHES_UNFIT, _MOST_SECONDS_UNFIT = 60, 10.0
#: Validation that takes a smaller share of a device isn't what is lacking; and the batches that are tried, as shares of the present one.
_LEAST_VALIDATION_SHARE = 0.02
_VALIDATION_SHARES = (0.5, 0.25, 0.125, 0.0625)
#: The most devices that advice adds, and the largest host that it names, in GiB.
_MOST_DEVICES, _MOST_HOST_GIB = 7, 4096
#: Precisions under which weights, gradients and the optimizer's states lie in 32 bits, the one with 16 bits, and their names.
_WIDE, _NARROW, _STATES = ("32-true", "bf16-mixed", "16-mixed"), "bf16-true", ("parameters", "gradients", "optimizer")

Kind = Literal["memory", "batch_size", "setting", "others", "module", "devices"]


class Ask(Protocol):
    """The search, for another question. Neither method raises where nothing fits, nor asks for advice."""

    def best(self, asked: Question) -> Candidate | None:
        """The best candidate; if nothing fits, the one that lacks least memory; None if there is none at all."""

    def evaluate(self, asked: Question, plan: Plan, *, confirm: bool = False) -> Candidate:
        """One plan's prediction; with ``confirm`` its allocations are replayed where possible."""


@dataclass(frozen=True, kw_only=True)
class _Change:
    """One thing that may be changed, by as little as will do.

    Args:
        kind: as an advice's.
        said: gives, for a size and the best candidate then, the beginning of a sentence, and the same for a program.
        made: gives, for a question and a size, the question after the change; None where nothing would change.
        sizes: of the change, the smallest first; a single one where there is nothing to choose.
        searched: whether plans differ from size to size, so that one that fits at some is no guide to others.
    """

    kind: Kind
    said: Callable[[Any, Candidate], tuple[str, Mapping[str, Any]]]
    made: Callable[[Question, Any], Question | None]
    sizes: Sequence[Any] = (None,)
    searched: bool = False

    def and_(self, other: _Change) -> _Change:
        """Both changes in one, whose sizes grow together."""
        count = max(len(self.sizes), len(other.sizes))
        both = [tuple(one.sizes[-(-(index + 1) * len(one.sizes) // count) - 1] for one in (self, other)) for index in range(count)]

        def made(asked: Question, sizes: Any) -> Question | None:
            between = self.made(asked, sizes[0])
            return None if between is None else other.made(between, sizes[1])

        def said(sizes: Any, best: Candidate) -> tuple[str, Mapping[str, Any]]:
            (words, change), (more, further) = self.said(sizes[0], best), other.said(sizes[1], best)
            return f"{words}, and {more}", {**change, **further}

        return _Change(kind=self.kind, said=said, made=made, sizes=both, searched=self.searched or other.searched)


def advise(asked: Question, candidates: Sequence[Candidate], asking: Callable[[], Ask]) -> tuple[Advice, ...]:
    """What would make a plan fit where none does, the least change first; else what would make the run much faster, the fastest first.

    Where something fits, the whole search is asked again at most ten times, no more once four seconds are over; where nothing does, sixty
    times in ten seconds. If no single change lets a plan fit, the first pair of changes does that is found, the smallest first.

    Args:
        candidates: what it found, in order.
        asking: makes the search, whose questions share what they predict; it is forgotten afterwards, as a report may be kept for long.
    """
    if not candidates:
        return ()
    question = _Adviser(asked, candidates, asking())
    if not candidates[0].fits:
        return question.least_changes()
    if asked.constraints.objective == "memory":
        return ()
    found = [*question.more_memory(), *question.smaller_batch(), *filter(None, map(question.suppose, question.changes()))]
    found += question.narrow_products()
    return tuple(sorted(found, key=lambda advice: -(advice.speedup or 0))[:_MOST_SENTENCES])


class _Adviser:
    """What was planned for, and the search that answers for changes of it."""

    def __init__(self, asked: Question, candidates: Sequence[Candidate], ask: Ask) -> None:
        #: The pinned plan, which stays pinned unless advice says otherwise.
        self.pinned = None if asked.constraints.pinned is None else candidates[0].plan
        self.asked = asked
        self.footprint, self.inventory, self.constraints = asked.footprint, asked.inventory, asked.constraints
        self.candidates = candidates
        self.ask = ask
        self.now = candidates[0] if candidates[0].fits else None
        self.budget = {device.id: self.constraints.budget_bytes(device) for device in self.inventory.devices}
        self._searches = _MOST_SEARCHES if self.now else MOST_SEARCHES_UNFIT
        self._until = time.perf_counter() + (_MOST_SECONDS if self.now else _MOST_SECONDS_UNFIT)

    # -- where something fits ----------------------------------------------------------------------------------------------------------

    def more_memory(self) -> list[Advice]:
        """Advice on the fastest plan that would fit with a little more memory."""
        for target in self._targets():
            lack = self._lack(target)
            if not lack or not all(map(self._can_have, lack.items())):
                continue
            speedup = self._speedup(target)
            better = f"{target.plan.title()} would fit, {_times(speedup)} faster than {self._now_title()}{self._gain_words(target)}"
            text = f"{self._lack_words(lack)}: {better}"
            return [Advice(kind="memory", text=text, change={"more_free_bytes": lack}, plan=target.plan, **self._gains(target))]
        return []

    def smaller_batch(self) -> list[Advice]:
        """A slightly smaller batch with which another plan fits and trains more samples a second."""
        found: list[Advice] = []
        whole = self.footprint.batch_size
        for target in self._targets():
            sizes = range(whole - 1, max(1, int(whole * _LEAST_BATCH_SHARE)) - 1, -1)
            index = self._first_that_fits([target.plan], _batch_of(whole, sizes), self.asked, 0, len(sizes))
            if index == len(sizes):
                continue
            batch = sizes[index]
            smaller = replace(self.asked, footprint=scaled(self.footprint, batch))
            then = self.ask.evaluate(smaller, target.plan, confirm=True)
            if not then.fits or (speedup := self._speedup(then, batch)) < _LEAST_SPEEDUP:
                continue
            gain = f"{_times(speedup)} faster a sample than {self._now_title()}"
            text = f"a batch of {batch} instead of {whole}: {target.plan.title()} would fit, {gain}"
            found.append(Advice(kind="batch_size", text=text, change={"batch_size": batch}, plan=target.plan, **self._gains(then, batch)))
        return sorted(found, key=lambda advice: -(advice.speedup or 0))[:1]

    def narrow_products(self) -> list[Advice]:
        """Advice on matrix products in 16 bits, where the plan that fits now would be much faster by them alone: a guess, as nothing was
        traced so.
        """
        assert self.now is not None, "nothing to compare with"
        models = [known_model(self.inventory.device(device)) for device in self.now.plan.devices]
        dtype, precision = ("bf16", "bf16-mixed") if self._knows_bf16(self.now.plan) else ("fp16", "16-mixed")
        if self.constraints.precision not in {"32-true", "bf16-mixed"} - {precision} or None in models:
            return []
        footprint = what_if.narrow_products(self.footprint, dtype)
        if footprint is None:
            return []
        then = self.ask.evaluate(replace(self.asked, footprint=footprint), self.now.plan)
        if (speedup := self._speedup(then)) < _LEAST_SPEEDUP:
            return []
        text = (
            f"precision={precision!r}: {self._now_title()} may be {_times(speedup)} faster, as its matrix products then run in {dtype} "
            f"(not predicted: the step was traced in {self.constraints.precision})"
        )
        gained = self._gains(then) | {"gained_bytes": None}
        return [Advice(kind="setting", text=text, change={"precision": precision}, **gained)]

    def _knows_bf16(self, plan: Plan) -> bool:
        """Whether none of a plan's devices is of a model that has no bf16."""
        models = (known_model(self.inventory.device(device)) for device in plan.devices)
        return all(model is None or "bf16" in model.flops for model in models)

    def _targets(self) -> list[Candidate]:
        """Plans that lack memory alone and would be much faster, the fastest first."""
        unfit = [one for one in self.candidates if not one.fits and _lacks_devices_alone(one) and one.seconds is not None]
        worth = [one for one in unfit if self._speedup(one) >= _LEAST_SPEEDUP]
        return sorted(worth, key=self._seconds_a_sample)[:_MOST_TARGETS]

    def _is_there(self, lack: tuple[str, int]) -> bool:
        """Whether a device has what is lacking, so that it could be free; a CPU device's budget may be raised."""
        device = self.inventory.device(lack[0])
        return device.kind == "cpu" or device.free_bytes + lack[1] <= device.total_bytes

    def _can_have(self, lack: tuple[str, int]) -> bool:
        """Whether a device's lack is a small change, and there to be had: held by others, or a budget that somebody set."""
        device, lack_bytes = self.inventory.device(lack[0]), lack[1]
        if lack_bytes > (_LEAST_MEMORY_SHARE if self.now is not None or device.kind != "cpu" else 1) * device.total_bytes:
            return False
        return device.kind in ("cpu", "cuda") and self._is_there(lack)

    def _seconds_a_sample(self, candidate: Candidate, batch_size: int | None = None) -> float:
        """Seconds a sample: of a step over the batch, or over one batch a rank where ranks don't share a batch."""
        samples = self.footprint.batch_size if batch_size is None else batch_size
        return candidate.step_seconds / max(1, samples) / (1 if self.constraints.split_batch else candidate.plan.world_size)

    def _speedup(self, candidate: Candidate, batch_size: int | None = None) -> float:
        """How many times as fast a candidate is as the best one that fits now."""
        assert self.now is not None, "nothing to compare with"
        return self._seconds_a_sample(self.now) / self._seconds_a_sample(candidate, batch_size)

    def _gains(self, then: Candidate, batch_size: int | None = None) -> dict[str, Any]:
        """What a change would gain beside the best that fits now, as an advice's values."""
        assert self.now is not None, "nothing to compare with"
        samples = self.footprint.batch_size if batch_size is None else batch_size
        now, after = self._seconds_a_sample(self.now), self._seconds_a_sample(then, batch_size)
        return {
            "speedup": now / after,
            "gained_seconds": (now - after) * max(1, samples),
            "gained_bytes": max(self.now.needs.values(), default=0) - max(then.needs.values(), default=0),
        }

    def _gain_words(self, then: Candidate) -> str:
        """``" (1.9 s a step instead of 3.7 s, 20.1 GiB instead of 36)"``: on the fullest device."""
        assert self.now is not None, "nothing to compare with"
        now, after = (format_bytes(max(one.needs.values())) for one in (self.now, then))
        seconds = f"{format_seconds(then.step_seconds)} a step instead of {format_seconds(self.now.step_seconds)}"
        return f" ({seconds}, {after} instead of {now})" if after != now else f" ({seconds})"

    def _now_title(self) -> str:
        """The title of the best plan that fits now."""
        assert self.now is not None, "nothing fits"
        return self.now.plan.title()

    # -- in either case ----------------------------------------------------------------------------------------------------------------

    def changes(self) -> Iterator[_Change]:
        """Changes that can matter here, the easiest for the user first."""
        unfit, constraints = self.now is None, self.constraints
        if self.pinned is not None:
            yield _setting("leave the plan unpinned", {"plan": None}, pinned=None)
        named = tuple(engine for engine, entry in all_engines().items() if not entry.offered and engine not in constraints.excluded)
        others = {*offered_engines(), *named}.difference(constraints.allow)
        if others and (unfit or self._may_gain_by(others)):
            allow = (*offered_engines(), *named)
            yield replace(_setting("", {}, allow=allow), said=lambda _, best: self._allow_words(named, best))
        if constraints.max_devices is not None and constraints.max_devices < len(self.inventory.devices) and not constraints.min_devices:
            many = len(self.inventory.devices)
            yield _setting(f"let it use all {many} devices", {"devices": many}, max_devices=None)
        if constraints.memory_limit_bytes is not None:
            yield _setting("lift the memory limit", {"memory_limit": None}, memory_limit_bytes=None)
        if constraints.memory_margin and (unfit or self._targets()):
            yield _setting("memory_margin=0.0", {"memory_margin": 0.0}, memory_margin=0.0)
        if (held := self._held()) is not None:
            yield held
        if what_if.fused(self.footprint) is not None and constraints.precision != "16-mixed":
            # Lightning clips no gradients for a fused optimizer that unscales them itself (``MixedPrecision.clip_gradients``).
            words = f"fused=True in {' and '.join(self.footprint.optimizer_classes)}"
            yield _step(words, {"optimizer": {"fused": True}}, what_if.fused)
        if self._validation_may_be_in_the_way():
            yield _Change(
                kind="module",
                said=lambda share, _: (f"a validation batch of {share:g} of its size", {"validation_batch": share}),
                made=lambda asked, share: replace(asked, footprint=what_if.validated(asked.footprint, share)),
                sizes=_VALIDATION_SHARES,
            )
        if constraints.exact:
            if split_refusal(constraints, ranks=True) is not None and split_refusal(replace(constraints, exact=False)) is None:
                yield _setting("exact=False, which accepts the changed loss", {"exact": False}, exact=False)
        elif constraints.split_batch and draws_whole(self.footprint):
            words = "batch=Batch(draws='per-rank'), with other random numbers than one device's"
            yield replace(_step(words, {"draws": "per-rank"}, drawn_by_rank), kind="setting")
        whole = self.footprint.batch_size
        if unfit and whole > 1:
            yield _batch_of(whole, range(whole - 1, 0, -1))
        if unfit and self.footprint.batch_norm and "batch_norm" not in constraints.despite:
            words = "batch=Batch(despite=['batch_norm']), with batch norms over micro-batches"
            yield _setting(words, {"despite": ["batch_norm"]}, despite=(*constraints.despite, "batch_norm"))
        if what_if.eight_bit(self.footprint) is not None and not all(device.kind == "cpu" for device in self.inventory.devices):
            classes = " and ".join(self.footprint.optimizer_classes)
            words = f"bitsandbytes' {classes}8bit, whose updates differ from {classes}'s"
            yield replace(_step(words, {"optimizer": {"bits": 8}}, what_if.eight_bit), made=_eight_bit)
        may_offload = unfit and self.inventory.host_free_bytes and "offload" not in constraints.excluded
        if may_offload or any(one.host is not None and not one.host.fits for one in self.candidates):
            have = min(map(self.inventory.host_free_on, {device.node for device in self.inventory.devices}))
            yield _Change(
                kind="memory",
                said=self._host_words,
                made=lambda asked, size: replace(asked, inventory=what_if.with_host(asked.inventory, size)),
                sizes=[size << 30 for size in range((have >> 30) + 1, _MOST_HOST_GIB + 1)],
            )
        first = self.inventory.devices[0]
        bounded = constraints.max_devices or constraints.min_devices or (first.kind != "catalogue" and not unfit)
        if not bounded and what_if.more_devices(self.inventory, 1) is not None:
            yield _Change(
                kind="devices",
                said=lambda count, _: (f"{'one' if count == 1 else count} {first.name} more", {"more_devices": count}),
                made=lambda asked, count: replace(asked, inventory=what_if.more_devices(asked.inventory, count) or asked.inventory),
                sizes=range(1, _MOST_DEVICES + 1) if unfit else (1,),
                searched=True,
            )

    def suppose(self, change: _Change) -> Advice | None:
        """Advice to make that change, by the least size that helps; None if none helps."""
        found = self._least(change, self.asked)
        if found is None:
            return None
        size, best = found
        words, changed = change.said(size, best)
        if self.now is None:
            return _promise(change.kind, words, changed, best)
        than = "now" if best.plan.title() == self._now_title() else self._now_title()
        text = f"{words}: {best.plan.title()} would be {_times(self._speedup(best))} faster than {than}{self._gain_words(best)}"
        return Advice(kind=change.kind, text=text, change=changed, plan=best.plan, **self._gains(best))

    def _least(self, change: _Change, asked: Question) -> tuple[Any, Candidate] | None:
        """The least size of a change that helps, and the best candidate then; None if not even the largest helps."""
        low, most = 0, len(change.sizes) - 1
        best = self._best(change.made(asked, change.sizes[most]))
        if best is None:
            return None
        nearest: list[Candidate] = []
        if self.now is None:
            nearest = sorted(filter(_lacks_devices_alone, self.candidates), key=lambda one: sum(self._lack(one).values()))[:_MOST_TRIED]
        while low < most:
            plans = [best.plan, *(one.plan for one in nearest)]
            # Moments by which no plan fits even at a size that does say nothing about smaller ones.
            first = most + 1 if change.searched else self._first_that_fits(plans, change, asked, low, most + 1)
            guess = min(most - 1, first) if first <= most else (low + most) // 2
            made = change.made(asked, change.sizes[guess])
            then = self._best(made)
            if then is None and self.is_cut_short:  # that no search may begin says nothing about the size; plans that are known do
                known = (self.ask.evaluate(made, plan, confirm=True) for plan in plans if made is not None and _can_take(plan, made))
                return next(((change.sizes[guess], one) for one in known if one.fits), (change.sizes[most], best))
            if then is None:
                low = guess + 1
            else:
                best, most = then, guess
        return change.sizes[most], best

    def _first_that_fits(self, plans: Sequence[Plan], change: _Change, asked: Question, low: int, most: int) -> int:
        """Which of a change's sizes, from ``low`` on, is the first with which one of the plans fits by its moments; ``most`` for none."""

        def fits(index: int) -> bool:
            made = change.made(asked, change.sizes[index])
            return made is not None and any(_can_take(plan, made) and self.ask.evaluate(made, plan).fits for plan in plans)

        return low + bisect_left(range(low, most), True, key=fits)

    def _best(self, asked: Question | None) -> Candidate | None:
        """The best candidate for that question, if it fits and is much faster than now; None also after the last search."""
        if asked is None or self.is_cut_short:
            return None
        self._searches -= 1
        if self.pinned is None or asked.constraints.pinned is None:
            best = self.ask.best(asked)
        else:
            best = self.ask.evaluate(asked, self.pinned, confirm=True) if _can_take(self.pinned, asked) else None
        return best if best is not None and best.fits and (self.now is None or self._speedup(best) >= _LEAST_SPEEDUP) else None

    @property
    def is_cut_short(self) -> bool:
        """Whether no further search may begin."""
        return self._searches <= 0 or time.perf_counter() > self._until

    def _may_gain_by(self, others: Set[str]) -> bool:
        """Whether a plan of one of these engines may be much faster: those that the report holds back say so, if each has one."""
        held = [one for one in self.candidates if one.held_back and one.seconds is not None]
        return not others <= {one.plan.engine for one in held} or any(self._speedup(one) >= _LEAST_SPEEDUP for one in held)

    def _allow_words(self, named: Sequence[str], best: Candidate) -> tuple[str, Mapping[str, Any]]:
        """``allow`` with all offered engines; one that has to be named, only if its plan is the best."""
        allow = [*offered_engines(), *(engine for engine in named if engine == best.plan.engine or engine in self.constraints.allow)]
        return f"allow={allow!r}", {"allow": allow}

    def _host_words(self, size: int, best: Candidate) -> tuple[str, Mapping[str, Any]]:
        """The host memory that is needed, instead of what is free."""
        node = 0 if best.host is None else best.host.node
        where = f" on node {node}" if len(self.inventory.node_host_bytes) > 1 else ""
        have = format_bytes(self.inventory.host_free_on(node))
        return f"{format_bytes(size)} of host memory{where} instead of {have}", {"host_bytes": size}

    def _validation_may_be_in_the_way(self) -> bool:
        """Whether validation may be why a faster plan, or every plan, lacks memory: it takes enough for that. The search doesn't show all
        that it tried: a plan that lacks memory in its step may have a remedy for the step, and none for validation.
        """
        evaluation = self.footprint.evaluation_bytes or 0
        worth = self.footprint.training and evaluation > _LEAST_VALIDATION_SHARE * min(self.budget.values())
        return worth and (self.now is None or bool(self._targets()))

    def _held(self) -> _Change | None:
        """The change that frees what others hold on GPUs; None if they hold nothing."""
        held = [
            device
            for device in self.inventory.devices
            if device.kind == "cuda" and (device.free_bytes < device.total_bytes or (self.now is not None and device.utilization))
        ]
        if not held:
            return None
        emptied = tuple(
            replace(device, free_bytes=device.total_bytes, utilization=None, processes=()) if device.kind == "cuda" else device
            for device in self.inventory.devices
        )
        words = f"free what others hold on {', '.join(map(device_label, held))}"
        return _Change(
            kind="others",
            said=lambda *_: (words, {"free": [device.id for device in held]}),
            made=lambda asked, _: replace(asked, inventory=replace(asked.inventory, devices=emptied)),
        )

    # -- where nothing fits ------------------------------------------------------------------------------------------------------------

    def least_changes(self) -> tuple[Advice, ...]:
        """Changes that let a plan fit: a little memory, one change, a pair of changes; last, how much memory is missing."""
        missing = self.missing_memory()
        small = [one for one in missing if all(map(self._can_have, one.change["more_free_bytes"].items()))]
        changes = list(self.changes())
        found = [*small, *filter(None, map(self.suppose, changes))]
        for first, second in sorted(combinations(range(len(changes)), 2), key=sum) if not found else ():
            if (both := self.suppose(changes[first].and_(changes[second]))) is not None:
                found.append(both)
                break
        if self.is_cut_short:
            words = f"other changes weren't tried: advice ends after {MOST_SEARCHES_UNFIT} searches or {_MOST_SECONDS_UNFIT:g} s"
            found.append(Advice(kind="setting", text=words))
        found += self.half_as_wide()
        for one in missing:
            if one not in small and all(map(self._is_there, one.change["more_free_bytes"].items())):
                found.append(one)
        return (*found, *(self.nearest_words() if not found else ()), *_no_recomputation(self.footprint))

    def nearest_words(self) -> list[Advice]:
        """What the candidate needs that lacks least, where its devices haven't so much and no change helps."""
        if (nearest := self.nearest(self.candidates)) is None:
            return []
        lack, best = nearest
        device = self.inventory.device(max(lack, key=lack.__getitem__))
        need = f"{format_bytes(best.needs[device.id])} on {device_label(device)}, which has {format_bytes(device.total_bytes)}"
        text = f"no change that was tried lets a plan fit; {best.plan.title()} comes nearest, and needs {need}"
        return [Advice(kind="devices", text=text, plan=best.plan)]

    def nearest(self, candidates: Sequence[Candidate]) -> tuple[dict[str, int], Candidate] | None:
        """The candidate whose largest lack on one device is least, and what it lacks."""
        lacking = [(lack, one) for one in candidates if _lacks_devices_alone(one) and (lack := self._lack(one))]
        return min(lacking, key=lambda item: (max(item[0].values()), sum(item[0].values()))) if lacking else None

    def missing_memory(self) -> list[Advice]:
        """How much more memory the candidate needs that lacks least; if no plan was predicted, one of any offered engine."""
        words, change, nearest = "", {}, self.nearest(self.candidates)
        if nearest is None and not any(one.needs for one in self.candidates):
            allow = offered_engines()
            best = self.ask.best(replace(self.asked, constraints=replace(self.constraints, allow=allow)))
            words, change, nearest = f"allow={list(allow)!r}, and ", {"allow": list(allow)}, self.nearest([best] if best else [])
        if nearest is None:
            return []  # the host's memory is what lacks; its candidate's reason says so
        lack, best = nearest
        return [_promise("memory", words + self._lack_words(lack), {**change, "more_free_bytes": lack}, best)]

    def half_as_wide(self) -> list[Advice]:
        """Advice on 16 bits for weights, gradients and states, if that would save what is missing: a guess, as nothing was traced so."""
        if (nearest := self.nearest(self.candidates)) is None or self.constraints.precision not in _WIDE:
            return []
        _, best = nearest
        if not self._knows_bf16(best.plan):
            return []
        states = {device: sum(map(need.to_dict().__getitem__, _STATES)) for device, need in best.bytes.items()}
        if any(best.needs[device] - size // 2 > self.budget[device] for device, size in states.items()):
            return []
        before = max(states.values())
        text = (
            f"precision={_NARROW!r}, in which weights, gradients and the optimizer's states take {format_bytes(before // 2)} instead of "
            f"{format_bytes(before)}: {best.plan.title()} may fit (not predicted: the step was traced in {self.constraints.precision})"
        )
        return [Advice(kind="setting", text=text, change={"precision": _NARROW})]

    def _lack(self, candidate: Candidate) -> dict[str, int]:
        """Free bytes missing by device, the margin's share of them included."""
        short = {device: need - self.budget[device] for device, need in candidate.needs.items()}
        return {device: int(size / (1 - self.constraints.memory_margin)) + 1 for device, size in short.items() if size > 0}

    def _lack_words(self, lack: Mapping[str, int]) -> str:
        """``"1.2 GiB more on cuda:1"``, the devices that lack most first."""
        missing: dict[str, list[Device]] = {}
        for device, size in sorted(lack.items(), key=lambda item: -item[1]):
            missing.setdefault(format_bytes(size), []).append(self.inventory.device(device))
        where = [f"{size} more on {'each of ' * (len(devices) > 1)}{devices_label(devices)}" for size, devices in missing.items()]
        if len(where) > 3:
            where[3:] = [f"at most {[*missing][3]} more on {counted(sum(map(len, [*missing.values()][3:])), 'other')}"]
        return ", ".join(where)


def _setting(words: str, change: Mapping[str, Any], **changes: Any) -> _Change:
    """A change that replaces constraints."""
    return _Change(
        kind="setting",
        said=lambda *_: (words, change),
        made=lambda asked, _: replace(asked, constraints=replace(asked.constraints, **changes)),
    )


def _step(words: str, change: Mapping[str, Any], changed: Callable[[Footprint], Footprint | None]) -> _Change:

    def made(asked: Question, _: Any) -> Question | None:
        footprint = changed(asked.footprint)
        return None if footprint is None else replace(asked, footprint=footprint)

    return _Change(kind="module", said=lambda *_: (words, change), made=made)


def _batch_of(whole: int, sizes: Sequence[int]) -> _Change:
    keeps = "accumulate_grad_batches keeps the effective size"
    return _Change(
        kind="batch_size",
        said=lambda batch, _: (f"a batch of {batch} instead of {whole} ({keeps})", {"batch_size": batch}),
        made=lambda asked, batch: replace(asked, footprint=scaled(asked.footprint, batch)),
        sizes=sizes,
    )


def _eight_bit(asked: Question, _: Any) -> Question | None:
    """The question with bitsandbytes' Adam, which needs whole parameters on the GPU; None if no allowed engine has them."""
    footprint, constraints = what_if.eight_bit(asked.footprint), asked.constraints
    allow = tuple(engine for engine in constraints.allow if engines.named(engine).whole)
    pinned = constraints.pinned
    if footprint is None or not allow or (pinned is not None and (pinned.offload or not engines.of(pinned).whole)):
        return None
    excluded = {**constraints.excluded, "offload": "bitsandbytes updates on the GPU"}
    return replace(asked, footprint=footprint, constraints=replace(constraints, allow=allow, excluded=excluded))


def _can_take(plan: Plan, asked: Question) -> bool:
    """Whether a plan that was found for another question makes sense for this one: its devices are there, and a sample for each part."""
    batch = asked.footprint.batch_size
    there = {device.id for device in asked.inventory.devices}
    if not there.issuperset(plan.devices):
        return False
    return not asked.constraints.split_batch or (plan.data_ranks <= batch and plan.micro_batches <= max(plan.rows(batch)))


def _promise(kind: Kind, words: str, change: Mapping[str, Any], then: Candidate) -> Advice:
    """The advice that a plan would fit, with its memory and seconds."""
    text = f"{words}: {then.plan.title()} would fit, with {format_bytes(max(then.needs.values()))} on the fullest device"
    text += f" and {format_seconds(then.step_seconds)} a step" if then.seconds is not None else ""
    return Advice(kind=kind, text=text, change=change, plan=then.plan)


def _lacks_devices_alone(candidate: Candidate) -> bool:
    """Whether only its devices lack memory: its host has enough."""
    return bool(candidate.needs) and candidate.runnable and (candidate.host is None or candidate.host.fits)


def _times(speedup: float) -> str:
    """``2.13`` → ``"2.1 ×"``."""
    return f"{speedup:.0f} ×" if speedup >= 10 else f"{speedup:.1f} ×"


def _no_recomputation(footprint: Footprint) -> list[Advice]:
    """Why recomputation, which saves most, isn't possible."""
    if not footprint.training or recomputable_order(footprint):
        return []
    why = "the blocks keep nothing for backward but their inputs"
    repeated = [block for block in footprint.blocks if block.repeated]
    if not repeated:
        why = "the module has no repeated blocks"
    elif barred := [block.fqn for block in repeated if not block.recomputable]:
        why = f"running a block's forward twice would change the run: {barred[0]} changes a buffer, or an object that it is given"
        why += " (such as a cache of transformers', which use_cache=False in the model's configuration turns off)"
    return [Advice(kind="module", text=f"recomputation can't help, as {why}")]
