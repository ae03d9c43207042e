"""What earlier runs of a module took beside what was predicted, and how that corrects the next prediction.

Values and arithmetic: it reads no file and knows no run. :mod:`lightning_autopar.memory.learned.memory_records` keeps the records.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lightning_autopar.memory.device_bytes import DeviceBytes
from lightning_autopar.memory.learned.cache_files import from_json
from lightning_autopar.memory.learned.step_times import StepTimes, TimeFactors
from lightning_autopar.plans import Plan
from lightning_autopar.text import format_change

#: The limits of a correction, as multiples of the prediction, by the same plan's figures and by another's: beyond them it was another job.
LEAST, MOST, MOST_BY_OTHERS = 0.5, 16.0, 4.0
#: Predictions that differ by less are for the same step: they depend on the batch's shapes and the optimizer.
_SAME = 1e-3
#: The share of another plan's miss that is assumed for this one.
_BELIEVED = 0.5
#: By how much more is assumed than the bytes that weren't enough: nobody knows how much was missing.
_BEYOND = 0.05
#: Smaller corrections aren't worth a sentence.
_WORTH_TELLING = 5e-4


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """One rank's bytes at the peak of a step.

    Args:
        predicted: what was predicted, uncorrected.
        variable: activations and temporaries of that.
        measured: what tensors took.
        reserved: what the allocator of a GPU held, None on other devices.
        context: what the process held of a GPU besides; None where it isn't known.
    """

    predicted: int
    variable: int
    measured: int
    reserved: int | None = None
    context: int | None = None

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured / self.predicted

    @property
    def missed(self) -> float:
        """The bytes measured beyond the prediction, as a share of activations and temporaries."""
        return (self.measured - self.predicted) / self.variable if self.variable else 0.0


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run's.

    Args:
        shape: :func:`plan_shape` of its plan.
        title: that plan's title.
        devices: what each rank's device was: :func:`device_name`.
        day: when, as "2026-11-21".
        short: whether memory ran out: then the run needs more than was measured.
    """

    shape: str
    title: str
    devices: tuple[str, ...]
    ranks: tuple[RankRecord, ...]
    day: str
    short: bool = False

    @classmethod
    def from_dict(cls, data: Any) -> RunRecord:
        """The record of such values.

        Raises:
            ValueError: if they aren't those of a record.
        """
        record = from_json(cls, data)
        sizes = [size or 0 for rank in record.ranks for size in dataclasses.astuple(rank)]
        if min(sizes, default=-1) < 0 or len(record.ranks) != len(record.devices) or not all(rank.predicted for rank in record.ranks):
            raise ValueError("not a record of a run: its bytes can't be")
        return record

    @property
    def how(self) -> str:
        """Where the record is from, in words that follow a plan's name."""
        return f"ran out of memory on {self.day}" if self.short else f"was measured on {self.day}"

    def same_as(self, other: RunRecord) -> bool:
        """Whether both records are of the same step under the same plan on the same devices."""
        return self.of(other.shape, other.devices, [rank.predicted for rank in other.ranks])

    def of(self, shape: str, devices: Sequence[str], predicted: Sequence[int]) -> bool:
        """Whether it is of this plan and this step."""
        if (self.shape, self.devices) != (shape, tuple(devices)):
            return False
        return all(abs(rank.predicted - size) <= _SAME * rank.predicted for rank, size in zip(self.ranks, predicted, strict=True))


def make_record(
    plan: Plan, devices: Sequence[str], held: Sequence[DeviceBytes], measured: Sequence[Mapping[str, Any]], day: str
) -> RunRecord | None:
    """The record of a run; None where it shows nothing: some rank's run was too short to be measured, or its step isn't the predicted one.

    Args:
        devices: each rank's :func:`device_name`.
        held: each rank's uncorrected prediction.
        measured: each rank's, as ``strategy.measured`` has it.
    """
    ranks = []
    for predicted, values in zip(held, measured, strict=True):
        step_bytes = sum(values["bytes"].values())
        if not step_bytes or not predicted.allocated or predicted.occasion != "step":
            return None
        ranks.append(
            RankRecord(
                predicted=predicted.allocated,
                variable=_variable(predicted),
                measured=step_bytes,
                reserved=values["reserved_bytes"],
                context=values["context_bytes"],
            )
        )
    return RunRecord(shape=plan_shape(plan), title=plan.title(), devices=tuple(devices), ranks=tuple(ranks), day=day)


def make_shortage(
    plan: Plan, devices: Sequence[str], held: Sequence[DeviceBytes], lacked: Sequence[int | None], day: str
) -> RunRecord | None:
    """The record of a run whose memory ran out; None where no rank had as much as was predicted, so that the prediction wasn't wrong.

    Args:
        lacked: for each rank, the bytes of its device that weren't enough; None where it didn't run out of memory.
    """
    if any(not predicted.allocated or predicted.occasion != "step" for predicted in held):
        return None
    ranks, more = [], False
    for predicted, bound in zip(held, lacked, strict=True):
        beyond = 0 if bound is None else max(0, round(bound * (1 + _BEYOND)) - predicted.reserved)
        more = more or beyond > 0
        ranks.append(RankRecord(predicted=predicted.allocated, variable=_variable(predicted), measured=predicted.allocated + beyond))
    if not more:
        return None
    return RunRecord(shape=plan_shape(plan), title=plan.title(), devices=tuple(devices), ranks=tuple(ranks), day=day, short=True)


@dataclass(frozen=True, kw_only=True)
class Corrections:
    """What is known of one module under one precision.

    Args:
        records: the newest first.
        devices: by device id what each device is: :func:`device_name`.
        key: under which the cache keeps them; None where nothing is kept.
        times: how long steps took on this machine.
    """

    records: tuple[RunRecord, ...] = ()
    devices: Mapping[str, str] = field(default_factory=dict)
    key: str | None = None
    times: StepTimes = field(default_factory=StepTimes)

    @cached_property
    def time_factors(self) -> TimeFactors:
        """The factors for the predicted seconds of any plan on these devices, from measured runs."""
        return self.times.factors(set(self.devices.values()))

    def corrected(self, plan: Plan, sizes: Mapping[str, DeviceBytes]) -> tuple[Mapping[str, DeviceBytes], tuple[str, ...]]:
        """A prediction corrected by measured runs, with a sentence that says so. If this plan was measured in this step, the result is
        never less than that measurement. If another plan of the module took more than predicted, half of the excess is added, as a
        share of activations and temporaries. If it took less, nothing is subtracted.

        Args:
            sizes: the prediction by device id; what isn't of a step's peak stays as it is.
        """
        if not self.records:
            return sizes, ()
        held = [sizes[device] for device in plan.devices]
        names = [self.devices.get(device, "") for device in plan.devices]
        ranks = [each for each in held if each.occasion == "step" and each.allocated]
        if len(ranks) < len(held):
            return sizes, ()
        shape, predicted = plan_shape(plan), [each.allocated for each in ranks]
        same = [record for record in self.records if record.of(shape, names, predicted)]
        if same:
            found = [_exactly(each, [record.ranks[rank] for record in same]) for rank, each in enumerate(ranks)]
            because = f"as this plan {same[0].how}"
        else:
            near = [record for record in self.records if set(record.devices) == set(names)]
            if not near:
                return sizes, ()
            alike = [record for record in near if record.shape == shape]
            told = (alike or near)[0]
            missed = max(0.0, statistics.median(rank.missed for rank in told.ranks)) * (1.0 if alike else _BELIEVED)
            several = [rank for record in near if (len(record.ranks) > 1) == (len(ranks) > 1) for rank in record.ranks]
            found = [_cautiously(each, missed, several) for each in ranks]
            because = f"as {'it' if alike else told.title} {told.how}" + (" at another batch" if alike else "")
        return {**sizes, **dict(zip(plan.devices, found, strict=True))}, _notes(ranks, found, because)


def plan_shape(plan: Plan) -> str:
    """A digest of all that a plan does, on any devices."""
    values = {name: value for name, value in plan.to_dict().items() if name not in ("devices", "reasons")}
    return hashlib.sha256(json.dumps([values, plan.world_size], sort_keys=True).encode()).hexdigest()[:16]


def device_name(device: Any) -> str:
    """What a :class:`lightning_autopar.devices.inventory.Device` is, the same for all of its kind."""
    return f"{device.kind}: {device.name}"


def _variable(held: DeviceBytes) -> int:
    return held.activations + held.temporary


def _exactly(held: DeviceBytes, ranks: Sequence[RankRecord]) -> DeviceBytes:
    """The rank's measured bytes, the most of several runs."""
    ratio = min(MOST, max(LEAST, *(rank.ratio for rank in ranks)))
    reserved = [rank.reserved - rank.measured for rank in ranks if rank.reserved is not None]
    contexts = [rank.context for rank in ranks if rank.context is not None]
    return dataclasses.replace(
        held,
        correction=round(held.allocated * (ratio - 1)),
        rounding=max(0, *reserved) if reserved else held.rounding,
        context=max(contexts) if contexts else held.context,
    )


def _cautiously(held: DeviceBytes, missed: float, ranks: Sequence[RankRecord]) -> DeviceBytes:
    """The rank's bytes with what other plans missed, only upwards; bytes outside of the allocator depend on the device, not on the plan."""
    extra = min(missed * _variable(held), (MOST_BY_OTHERS - 1) * held.allocated)
    context = max((rank.context or 0 for rank in ranks), default=0)
    return dataclasses.replace(held, correction=round(extra), context=max(held.context, context))


def _notes(before: Sequence[DeviceBytes], after: Sequence[DeviceBytes], because: str) -> tuple[str, ...]:
    """A sentence about the rank that is corrected most."""
    pairs = [(new.allocated, old.allocated) for old, new in zip(before, after, strict=True)]
    most, share = max(((pair, pair[0] / pair[1] - 1) for pair in pairs), key=lambda each: abs(each[1]))
    around = [new.reserved - new.allocated - old.reserved + old.allocated for old, new in zip(before, after, strict=True)]
    words = [f"by {format_change(*most)}"] if abs(share) >= _WORTH_TELLING else []
    if aside := max(around, key=abs):
        words.append(f"around tensors by {aside / 2**20:+.0f} MiB")
    return (f"memory corrected {' and '.join(words)}, {because}",) if words else ()
