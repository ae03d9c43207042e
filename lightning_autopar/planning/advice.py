"""Advice: which one change would make a plan fit, or the run much faster. It asks the search again with that change, and predicts nothing
itself.

A change is advised only where its effect is predicted as any plan's is. Another precision is not: the step was traced under this one.
:mod:`lightning_autopar.planning.what_if` makes the question with one thing changed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

from lightning_autopar import engines
from lightning_autopar.constraints import Constraints
from lightning_autopar.devices.inventory import Device, Inventory, device_label
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.scaling import drawn_by_rank, draws_whole, scaled
from lightning_autopar.planning import what_if
from lightning_autopar.planning.block_units import recomputable_order
from lightning_autopar.planning.refusals import lacks_package_alone
from lightning_autopar.plans import Plan, all_engines, offered_engines
from lightning_autopar.report.report import Advice, Candidate
from lightning_autopar.text import format_bytes, format_seconds

#: How much faster a sample must be done for a change to be worth a sentence.
_LEAST_SPEEDUP = 1.2
#: What counts as a small change: this share of a device's memory, a batch of at least this share of the present one.
_LEAST_MEMORY_SHARE, _LEAST_BATCH_SHARE = 0.25, 0.5
#: Plans that don't fit and would be faster, looked at for what they lack; and plans tried for a smaller batch where nothing fits.
_MOST_TARGETS, _MOST_TRIED = 4, 6
_MOST_SENTENCES = 5
#: No further search is begun after so many, or so long: somebody waits for the report.
_MOST_SEARCHES, _MOST_SECONDS = 10, 4.0
#: Validation that takes a smaller share of a device is in nobody's way; batches that are tried, beside the present one.
_LEAST_VALIDATION_SHARE = 0.02
_VALIDATION_SHARES = (0.5, 0.25, 0.125, 0.0625)

Kind = Literal["memory", "batch_size", "setting", "others", "package", "module", "devices"]


class Ask(Protocol):
    """The search, for another footprint, inventory or constraints. Neither method raises where nothing fits, nor asks for advice."""

    def best(self, footprint: Footprint, inventory: Inventory, constraints: Constraints) -> Candidate | None:
        """The best candidate that fits, or None."""

    def evaluate(
        self, footprint: Footprint, inventory: Inventory, constraints: Constraints, plan: Plan, *, confirm: bool = False
    ) -> Candidate:
        """One plan's prediction; with ``confirm`` its allocations are replayed where they can be."""


def advise(
    footprint: Footprint, inventory: Inventory, constraints: Constraints, candidates: Sequence[Candidate], ask: Ask
) -> tuple[Advice, ...]:
    """What would make a plan fit where none does, the least change first; else what would make the run much faster, the fastest first.

    The whole search is asked again at most ten times, no more once four seconds are over, and only for what can matter here. The rest is
    arithmetic on candidates, and some thirty predictions of single plans.

    Args:
        footprint: what was planned for.
        inventory: the devices.
        constraints: what ruled the search.
        candidates: what it found, in order.
        ask: the search.
    """
    if not candidates:
        return ()
    question = _Question(footprint, inventory, replace(constraints, pinned=None), candidates, ask)
    if candidates[0].fits:
        if constraints.objective == "memory":
            return ()
        found = [*question.more_memory(), *question.smaller_batch(), *question.settings(unpin=constraints.pinned is not None)]
        found += [*question.step_changes(), *question.machine_changes()]
        return tuple(sorted(found, key=lambda advice: -(advice.speedup or 0))[:_MOST_SENTENCES])
    found = [*question.settings(unpin=constraints.pinned is not None), *question.step_changes()]
    found += [*question.largest_batch(), *question.machine_changes()]
    missing = question.missing_memory()
    # A device that would have to be twice as large is no small change.
    within = [
        one for one in missing if all(lack <= inventory.device(name).total_bytes for name, lack in one.change["more_free_bytes"].items())
    ]
    return (*within, *found, *(one for one in missing if one not in within), *_no_recomputation(footprint))


class _Question:
    """What was planned for, and the search to ask about it."""

    def __init__(
        self, footprint: Footprint, inventory: Inventory, constraints: Constraints, candidates: Sequence[Candidate], ask: Ask
    ) -> None:
        self.footprint = footprint
        self.inventory = inventory
        self.constraints = constraints
        self.candidates = candidates
        self.ask = ask
        self.now = candidates[0] if candidates[0].fits else None
        self.budget = {device.id: constraints.budget_bytes(device) for device in inventory.devices}
        self._searches, self._until = 0, time.perf_counter() + _MOST_SECONDS

    # -- where something fits ----------------------------------------------------------------------------------------------------------

    def more_memory(self) -> list[Advice]:
        """The fastest plan that a little more memory would let fit."""
        for target in self._targets():
            lack = self._lack(target)
            if not lack or not all(self._can_have(self.inventory.device(device), size) for device, size in lack.items()):
                continue
            speedup = self._speedup(target)
            better = f"{target.plan.title()} would fit, {_times(speedup)} faster than {self._now_title()}{self._gain_words(target)}"
            text = f"{self._lack_words(lack)}: {better}"
            return [Advice(kind="memory", text=text, change={"more_free_bytes": lack}, plan=target.plan, **self._gains(target))]
        return []

    def smaller_batch(self) -> list[Advice]:
        """The batch, a little smaller, with which a plan fits that gets through more samples a second."""
        found: list[Advice] = []
        whole = self.footprint.batch_size
        for target in self._targets():
            batch = self._largest_for([target.plan], least=max(1, int(whole * _LEAST_BATCH_SHARE)))
            if batch is None:
                continue
            smaller = scaled(self.footprint, batch)
            then = self.ask.evaluate(smaller, self.inventory, self.constraints, target.plan, confirm=True)
            if not then.fits or (speedup := self._speedup(then, batch)) < _LEAST_SPEEDUP:
                continue
            text = (
                f"a batch of {batch} instead of {whole}: {target.plan.title()} would fit, {_times(speedup)} faster a sample than "
                f"{self._now_title()}"
            )
            found.append(Advice(kind="batch_size", text=text, change={"batch_size": batch}, plan=target.plan, **self._gains(then, batch)))
        return sorted(found, key=lambda advice: -(advice.speedup or 0))[:1]

    def _targets(self) -> list[Candidate]:
        """Plans that lack memory alone and would be much faster, the fastest first."""
        unfit = [one for one in self.candidates if not one.fits and _lacks_devices_alone(one) and one.seconds is not None]
        worth = [one for one in unfit if self._speedup(one) >= _LEAST_SPEEDUP]
        return sorted(worth, key=self._seconds_a_sample)[:_MOST_TARGETS]

    def _can_have(self, device: Device, lack_bytes: int) -> bool:
        """Whether it is a small change, and there to be had: held by others, or a budget that somebody set."""
        if lack_bytes > _LEAST_MEMORY_SHARE * device.total_bytes:
            return False
        return device.kind == "cpu" or (device.kind == "cuda" and device.free_bytes + lack_bytes <= device.total_bytes)

    def _seconds_a_sample(self, candidate: Candidate, batch_size: int | None = None) -> float:
        """Of a step over the batch, or over one batch a rank where ranks don't share it."""
        samples = self.footprint.batch_size if batch_size is None else batch_size
        return candidate.step_seconds / max(1, samples) / (1 if self.constraints.split_batch else candidate.plan.world_size)

    def _speedup(self, candidate: Candidate, batch_size: int | None = None) -> float:
        """How many times as fast as the best that fits now."""
        assert self.now is not None, "nothing to compare with"
        return self._seconds_a_sample(self.now) / self._seconds_a_sample(candidate, batch_size)

    def _gains(self, then: Candidate, batch_size: int | None = None) -> dict[str, Any]:
        """What a change would gain beside the best that fits now, as an advice's values; nothing where nothing fits now."""
        if self.now is None:
            return {}
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
        """The plan of today, by name."""
        assert self.now is not None, "nothing fits"
        return self.now.plan.title()

    # -- in either case ----------------------------------------------------------------------------------------------------------------

    def settings(self, *, unpin: bool) -> list[Advice]:
        """What the user, or somebody else, excludes; each asked for where it can matter."""
        inventory, constraints = self.inventory, self.constraints
        found: list[Advice | None] = []
        if unpin:
            found.append(self._suppose("leave the plan unpinned", change={"plan": None}))
        found.append(self._wider())
        if constraints.exact:
            found.append(self._suppose("exact=False, which accepts the changed loss", change={"exact": False}, exact=False))
        elif constraints.split_batch and draws_whole(self.footprint):
            words = "batch=Batch(draws='per-rank'), which is another run than one device's"
            found.append(self._suppose(words, change={"draws": "per-rank"}, footprint=drawn_by_rank(self.footprint)))
        if constraints.max_devices is not None and constraints.max_devices < len(inventory.devices) and constraints.min_devices is None:
            many = len(inventory.devices)
            found.append(self._suppose(f"let it use all {many} devices", change={"devices": many}, max_devices=None))
        if constraints.memory_limit_bytes is not None:
            found.append(self._suppose("lift the memory limit", change={"memory_limit": None}, memory_limit_bytes=None))
        if constraints.memory_margin and (self.now is None or self._targets()):
            found.append(self._suppose("memory_margin=0.0", change={"memory_margin": 0.0}, memory_margin=0.0))
        found += [self._others(), *self._packages()]
        return [advice for advice in found if advice is not None]

    def _wider(self) -> Advice | None:
        """Engines that the user doesn't allow; what is asked for by name, only where it is what would help."""
        asked = tuple(engine for engine, entry in all_engines().items() if not entry.offered and engine not in self.constraints.excluded)
        if set(self.constraints.allow) >= {*offered_engines(), *asked}:
            return None
        best = self._best(self.footprint, self.inventory, replace(self.constraints, allow=(*offered_engines(), *asked)))
        if best is None:
            return None
        allow = [*offered_engines(), *(engine for engine in asked if engine == best.plan.engine or engine in self.constraints.allow)]
        return self._advice(best, f"allow={allow!r}", kind="setting", change={"allow": allow})

    def step_changes(self) -> list[Advice]:
        """Another optimizer, or a smaller validation batch."""
        found: list[Advice | None] = []
        classes = " and ".join(self.footprint.optimizer_classes)
        if (changed := what_if.fused(self.footprint)) is not None and self.constraints.precision != "16-mixed":
            # Lightning clips no gradients for a fused optimizer that unscales them itself (``MixedPrecision.clip_gradients``).
            change: dict[str, Any] = {"optimizer": {"fused": True}}
            found.append(self._suppose(f"fused=True in {classes}", kind="module", change=change, footprint=changed))
        if (changed := what_if.eight_bit(self.footprint)) is not None:
            allow = tuple(engine for engine in self.constraints.allow if engines.named(engine).whole)
            if allow and not all(device.kind == "cpu" for device in self.inventory.devices):
                excluded = {**self.constraints.excluded, "offload": "bitsandbytes updates on the GPU"}
                words = f"bitsandbytes' {classes}8bit, whose steps are not those of {classes}"
                change = {"optimizer": {"bits": 8}}
                found.append(self._suppose(words, kind="module", change=change, footprint=changed, allow=allow, excluded=excluded))
        if self._validation_may_be_in_the_way():
            found.append(self._smaller_validation())
        return [advice for advice in found if advice is not None]

    def machine_changes(self) -> list[Advice]:
        """More memory of the host, or one device more."""
        found: list[Advice | None] = []
        if any(one.host is not None and not one.host.fits for one in self.candidates):
            found.append(self._more_host())
        narrowed = self.constraints.max_devices is not None or self.constraints.min_devices is not None
        if not narrowed and (more := what_if.one_more(self.inventory)) is not None:
            inventory, device = more
            words, change = f"one {device.name} more", {"more_devices": 1}
            found.append(self._suppose(words, kind="devices", change=change, inventory=inventory))
        return [advice for advice in found if advice is not None]

    def _more_host(self) -> Advice | None:
        """The host's memory with which a plan fits that offloads."""
        boundless = what_if.unbounded_host(self.inventory)
        best = self._best(self.footprint, boundless, self.constraints)
        if best is None or best.host is None:
            return None
        need = math.ceil(best.host.total / (1 - self.constraints.memory_margin))
        have = self.inventory.host_free_on(best.host.node)
        if need <= have:
            return None
        where = f" on node {best.host.node}" if len(self.inventory.node_host_bytes) > 1 else ""
        words = f"{format_bytes(need)} of host memory{where} instead of {format_bytes(have)}"
        return self._advice(best, words, kind="memory", change={"host_bytes": need})

    def _validation_may_be_in_the_way(self) -> bool:
        """Whether a plan lacks memory that would be faster, or nothing fits, and validation takes as much that it may be what is lacking.

        The search doesn't show all that it tried: a plan that lacks memory in its step may have a remedy for that, and none for validation.
        """
        evaluation = self.footprint.evaluation_bytes or 0
        worth = self.footprint.training and evaluation > _LEAST_VALIDATION_SHARE * min(self.budget.values())
        return worth and (self.now is None or bool(self._targets()))

    def _smaller_validation(self) -> Advice | None:
        """The largest validation batch with which the plan fits that is best without any."""
        least = what_if.validated(self.footprint, _VALIDATION_SHARES[-1])
        best = self._best(least, self.inventory, self.constraints)
        if best is None or (self.now is not None and self._speedup(best) < _LEAST_SPEEDUP):
            return None
        for share in _VALIDATION_SHARES:
            changed = what_if.validated(self.footprint, share)
            then = self.ask.evaluate(changed, self.inventory, self.constraints, best.plan, confirm=True)
            if then.fits:
                words = f"a validation batch of {share:g} of its size"
                return self._advice(then, words, kind="module", change={"validation_batch": share})
        return None

    def _others(self) -> Advice | None:
        """If nobody else were on the GPUs."""
        held = [
            device
            for device in self.inventory.devices
            if device.kind == "cuda" and (device.free_bytes < device.total_bytes or (self.now is not None and device.utilization))
        ]
        if not held:
            return None
        names = ", ".join(map(device_label, held))
        emptied = tuple(
            replace(device, free_bytes=device.total_bytes, utilization=None, processes=()) if device.kind == "cuda" else device
            for device in self.inventory.devices
        )
        change = {"free": [device.id for device in held]}
        inventory = replace(self.inventory, devices=emptied)
        return self._suppose(f"free what others hold on {names}", kind="others", change=change, inventory=inventory)

    def _packages(self) -> list[Advice | None]:
        """Engines that only lack a package."""
        found = []
        for engine, entry in all_engines().items():
            if entry.package and entry.offered and engine in self.constraints.allow and lacks_package_alone(engine, self.constraints):
                package, extra = entry.package
                excluded = {name: why for name, why in self.constraints.excluded.items() if name != engine}
                words = f"pip install 'lightning-autopar[{extra}]'"
                found.append(self._suppose(words, kind="package", change={"install": package}, excluded=excluded))
        return found

    def _suppose(
        self,
        words: str,
        *,
        change: Mapping[str, Any],
        kind: Kind = "setting",
        footprint: Footprint | None = None,
        inventory: Inventory | None = None,
        **changes: Any,
    ) -> Advice | None:
        """The advice to change that, if it would help."""
        constraints = replace(self.constraints, **changes)
        best = self._best(footprint or self.footprint, inventory or self.inventory, constraints)
        return None if best is None else self._advice(best, words, kind=kind, change=change)

    def _best(self, footprint: Footprint, inventory: Inventory, constraints: Constraints) -> Candidate | None:
        """The best that would fit then; None also where enough has been asked."""
        if self._searches >= _MOST_SEARCHES or time.perf_counter() > self._until:
            return None
        self._searches += 1
        return self.ask.best(footprint, inventory, constraints)

    def _advice(self, best: Candidate, words: str, *, kind: Kind, change: Mapping[str, Any]) -> Advice | None:
        """The advice that leads to this plan, if that is worth it."""
        if self.now is None:
            return Advice(kind=kind, text=f"{words}: {best.plan.title()} would fit", change=change, plan=best.plan)
        if (speedup := self._speedup(best)) < _LEAST_SPEEDUP:
            return None
        than = "now" if best.plan.title() == self._now_title() else self._now_title()
        text = f"{words}: {best.plan.title()} would be {_times(speedup)} faster than {than}{self._gain_words(best)}"
        return Advice(kind=kind, text=text, change=change, plan=best.plan, **self._gains(best))

    # -- where nothing fits ------------------------------------------------------------------------------------------------------------

    def missing_memory(self) -> list[Advice]:
        """How much more would do, for the candidate that lacks least."""
        lacking = [(lack, one) for one in self.candidates if _lacks_devices_alone(one) and (lack := self._lack(one))]
        if not lacking:
            return []  # the host's memory is what lacks; its candidate's reason says so
        # What a single device lacks is the harder to come by, the more it is.
        lack, nearest = min(lacking, key=lambda item: (max(item[0].values()), sum(item[0].values())))
        text = f"{self._lack_words(lack)}: {nearest.plan.title()} would fit"
        return [Advice(kind="memory", text=text, change={"more_free_bytes": lack}, plan=nearest.plan)]

    def largest_batch(self) -> list[Advice]:
        """The largest batch, smaller than the present one, for which something fits."""
        nearest = sorted(filter(_lacks_devices_alone, self.candidates), key=lambda one: sum(self._lack(one).values()))[:_MOST_TRIED]
        batch = self._largest_for([one.plan for one in nearest], least=1)
        best = None if batch is None else self._best(scaled(self.footprint, batch), self.inventory, self.constraints)
        if batch is None or best is None:
            return []
        text = (
            f"a batch of {batch} instead of {self.footprint.batch_size} would fit with {best.plan.title()} "
            "(accumulate_grad_batches keeps the effective size)"
        )
        return [Advice(kind="batch_size", text=text, change={"batch_size": batch}, plan=best.plan)]

    def _largest_for(self, plans: Sequence[Plan], *, least: int) -> int | None:
        """The largest batch below the present one, and at least ``least``, with which one of the plans fits; by bisection."""

        def fits(batch: int) -> bool:
            smaller = scaled(self.footprint, batch)
            able = [plan for plan in plans if not self.constraints.split_batch or plan.world_size <= batch]
            return any(self.ask.evaluate(smaller, self.inventory, self.constraints, plan).fits for plan in able)

        return _largest(fits, least, self.footprint.batch_size - 1)

    def _lack(self, candidate: Candidate) -> dict[str, int]:
        """Free bytes missing by device, the margin's share of them included."""
        short = {device: need - self.budget[device] for device, need in candidate.needs.items()}
        return {device: int(size / (1 - self.constraints.memory_margin)) + 1 for device, size in short.items() if size > 0}

    def _lack_words(self, lack: Mapping[str, int]) -> str:
        """``"1.2 GiB more on cuda:1"``, the devices that lack most first."""
        missing = sorted(lack.items(), key=lambda item: -item[1])
        where = [f"{format_bytes(size)} more on {device_label(self.inventory.device(device))}" for device, size in missing[:3]]
        if len(missing) > 3:
            where.append(f"at most {format_bytes(missing[3][1])} more on {len(missing) - 3} others")
        return ", ".join(where)


def _lacks_devices_alone(candidate: Candidate) -> bool:
    """Whether it would fit if its devices had more memory, or it took less of them: its host has what it takes."""
    return bool(candidate.needs) and candidate.runnable and (candidate.host is None or candidate.host.fits)


def _largest(fits: Callable[[int], bool], least: int, most: int) -> int | None:
    """The largest number between the two that fits, where all below one that fits do, too; None for none."""
    if most < least or not fits(least):
        return None
    while least < most:
        middle = (least + most + 1) // 2
        if fits(middle):
            least = middle
        else:
            most = middle - 1
    return least


def _times(speedup: float) -> str:
    """``2.13`` → ``"2.1 ×"``."""
    return f"{speedup:.0f} ×" if speedup >= 10 else f"{speedup:.1f} ×"


def _no_recomputation(footprint: Footprint) -> list[Advice]:
    """Why recomputation, which saves most, is not to be had."""
    if not footprint.training or recomputable_order(footprint):
        return []
    why = "the blocks save no more than what enters them"
    if not footprint.blocks:
        why = "the module has no repeated blocks"
    elif barred := [block.fqn for block in footprint.blocks if not block.recomputable]:
        why = f"running a block's forward twice would change the run ({barred[0]} moves a buffer)"
    return [Advice(kind="module", text=f"recomputation can't help, as {why}")]
