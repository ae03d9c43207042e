"""What a plan must keep to: the user's settings, and what was found out about the module and its batch.

Must not know which plans there are.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_autopar.devices.inventory import Device
from lightning_autopar.memory.allocator.options import AllocatorOptions
from lightning_autopar.memory.learned.corrections import Corrections
from lightning_autopar.plans import Engine, Plan, all_engines, offered_engines
from lightning_autopar.text import format_bytes, is_number, parse_memory

#: Where :attr:`SplitFinding.log_rules` says how the losses of a batch's parts make the whole batch's.
LOSS = ("training_step", "")

#: The least memory limit: a CUDA context alone takes hundreds of times as much, so a bare number below this lacks its unit.
_LEAST_MEMORY = 1 << 20

Objective = Literal["speed", "memory"]
#: Refusals that a user may overrule: such plans run, but break the promise of the same run.
REFUSALS = ("batch_norm", "buffers", "kept", "later_entries")
#: A relative difference of losses up to this is floating-point reassociation. A larger one isn't: the step shows it in double precision as
#: well, if it runs in that. An adaptive solver has such a difference, as it chooses its steps by the whole batch; it grows in a run.
SPLIT_TOLERANCE = 1e-6
_BESIDES = ("micro_batches", "pipeline_parts", "pipeline_replicas", "rerun", "shares", "replicas", "recompute", "offload")


def excludable() -> frozenset[str]:
    """The names that a run can rule out: engines, parts of engines, every plan with several devices, and features of any engine's plans."""
    return frozenset((*all_engines(), *(part for entry in all_engines().values() for part in entry.parts), "multi", *_BESIDES))


@dataclass(frozen=True, kw_only=True)
class SplitFinding:
    """What was found out about splitting the first batch over ranks.

    Args:
        difference: by how much the loss of the split batch differs from the whole batch's, relative to it; NaN where
            either isn't finite.
        reason: why it can't be split, or couldn't be probed, or differs: one sentence.
        splittable: whether the batch can be split into samples.
        probed: whether the losses were compared. If not, and there is a reason, the difference is unknown; without a reason the step has no
            loss to compare.
        part_reason: why one rank can't run a batch in parts one after the other, though ranks may each run one part; None where it can.
        counted: FQNs of the buffers that the step changes whatever the batch, so that each part of a batch would change them again.
        log_rules: how the ranks' logged values may combine into the whole batch's, by hook and name, likelier rules first; none for a value
            that no rule fits. The loss of ``training_step`` has the name ``""``.
        real_rules: the same by batches as they are alone, without those that were changed to have entries that don't count.
        kept_rules: how the values that a batch's parts leave on the module combine into the whole batch's, by step and path.
        metric_rules: which states of metrics a step adds a value of its batch to, by step and by the names of both.
        unweighed: entries that may come in a later batch, of which no rule says what the parts of it weigh in its loss.
        notes: further sentences for a report on a plan that splits the batch.
        rank_notes: the same where ranks have the parts; else hooks at a batch's start and end see the whole of it.
        uneven_calls: FQNs of the submodules that a part of the batch calls more or less often than the whole.
        drawn_apart: what draws other random numbers on each rank, and in each part of a batch, than on one device: operations that draw
            inside of their kernels, and generators that a step leaves in another state after a part of the batch than after the whole.
        raised: whether the user's step raised an exception when it was tried.
        skips: whether an automatic step returned None when it was tried.
        even: the counts of which parts of the batch have as many as of samples.
    """

    difference: float = 0.0
    reason: str | None = None
    splittable: bool = True
    probed: bool = True
    log_rules: Mapping[tuple[str, str], tuple[Any, ...]] = field(default_factory=dict)
    real_rules: Mapping[tuple[str, str], tuple[Any, ...]] = field(default_factory=dict)
    kept_rules: Mapping[str, Mapping[tuple[Any, ...], Any]] = field(default_factory=dict)
    metric_rules: Mapping[str, Mapping[tuple[str, str], str]] = field(default_factory=dict)
    unweighed: tuple[Any, ...] = ()
    notes: tuple[str, ...] = ()
    rank_notes: tuple[str, ...] = ()
    uneven_calls: tuple[str, ...] = ()
    part_reason: str | None = None
    counted: tuple[str, ...] = ()
    drawn_apart: tuple[str, ...] = ()
    raised: bool = False
    skips: bool = False
    even: tuple[Any, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether splitting the batch is known to change the loss, or can't be done."""
        return not self.raised and (not self.splittable or (self.probed and not self.difference <= SPLIT_TOLERANCE))


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """What a plan must keep to.

    Args:
        allow: engines that may be chosen.
        max_devices: at most so many devices at once; None for all there are.
        min_devices: at least so many, as so many processes were started already.
        memory_limit_bytes: at most so many bytes of each device; None for all that is free.
        memory_margin: share of each device's free memory (or of the limit) that is left alone, 0 to below 1.
        objective: ``"speed"``: fewest seconds a step; ``"memory"``: fewest bytes on the fullest device.
        exact: whether a plan may be chosen that is not known to compute the whole batch's loss.
        pinned: the plan to take; nothing else is considered.
        excluded: the names of :func:`excludable` that this run can't use, with the sentence that says why; ``"multi"`` stands for every
            plan with several devices.
        uncuttable: FQNs of the blocks with which no stage of a pipeline may begin, with the sentence that says why.
        notes: what a reader should know of any plan of an engine, a sentence each, by the engine's name.
        split: what was found out about splitting the batch; None where there was nothing to find out.
        despite: refusals that are overruled, of ``REFUSALS``.
        split_batch: whether ranks share the batch; if not, each takes a whole one, as in Lightning's own strategies.
        precision: Lightning's name of the precision, for the speed of devices.
        residuals: measurements of the module's earlier runs, which correct the predictions.
        allocator: settings of torch's allocator on the devices.

    Raises:
        ValueError: if a value is out of its bounds.
    """

    allow: tuple[Engine, ...] = field(default_factory=offered_engines)
    max_devices: int | None = None
    min_devices: int | None = None
    memory_limit_bytes: int | None = None
    memory_margin: float = 0.05
    objective: Objective = "speed"
    exact: bool = False
    pinned: Plan | None = None
    excluded: Mapping[str, str] = field(default_factory=dict)
    uncuttable: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    split: SplitFinding | None = None
    despite: tuple[str, ...] = ()
    split_batch: bool = True
    precision: str = "32-true"
    allocator: AllocatorOptions = field(default_factory=AllocatorOptions)
    residuals: Corrections = field(default_factory=Corrections)

    def __post_init__(self) -> None:
        check_allow(self.allow)
        if self.max_devices is not None and self.max_devices < 1:
            raise ValueError(f"max_devices={self.max_devices} leaves no device; it must be at least 1, or None for all")
        if self.min_devices is not None and self.max_devices is not None and self.min_devices > self.max_devices:
            raise ValueError(f"{self.min_devices} processes were started, but the run may use {self.max_devices} devices; start as many")
        if self.memory_limit_bytes is not None and self.memory_limit_bytes <= 0:
            raise ValueError(f"a memory limit must be positive, but is {self.memory_limit_bytes} bytes; None means no limit")
        check_memory_margin(self.memory_margin)
        if self.objective not in ("speed", "memory"):
            raise ValueError(f"objective={self.objective!r} is unknown; choose 'speed' or 'memory'")
        if unknown := sorted(set(self.excluded) - excludable()):
            raise AssertionError(f"excluded names {unknown[0]!r}, which is neither an engine nor a feature")

    def budget_bytes(self, device: Device) -> int:
        """The bytes of a device that a plan may use: the free ones, or the limit if that is less; minus the margin."""
        limit = device.free_bytes if self.memory_limit_bytes is None else min(device.free_bytes, self.memory_limit_bytes)
        return int(limit * (1 - self.memory_margin))


def overruled(name: str, sentence: str) -> str:
    """The note of a plan that is taken although a refusal was overruled."""
    return f"despite=[{name!r}]: {sentence}, so results differ from one device's"


def overrule(name: str) -> str:
    """How to overrule a refusal, as the end of its sentence."""
    return f"; batch=Batch(despite=[{name!r}]) takes such plans all the same"


def check_memory_margin(margin: float) -> float:
    """The user's ``memory_margin``, as it is.

    Raises:
        ValueError: if it is no share.
    """
    if not is_number(margin) or not 0 <= margin < 1:
        raise ValueError(f"memory_margin={margin!r} must be a share from 0 up to but not including 1, such as 0.05")
    return float(margin)


def check_memory_limit(limit: int | str) -> int:
    """The bytes of a user's ``memory_limit``.

    Raises:
        ValueError: if it is no size, or less than any plan could use.
    """
    try:
        size = parse_memory(limit)
    except ValueError as error:
        raise ValueError(f"memory_limit: {error}; to leave a share of each device free, set memory_margin=0.2") from error
    if size < _LEAST_MEMORY:
        remedy = f"write the unit, such as '{limit}GiB'" if str(limit).isdigit() else "write a larger size, such as '4GiB'"
        raise ValueError(f"memory_limit={limit!r} is {size} bytes, and less than {format_bytes(_LEAST_MEMORY)} is of no use; {remedy}")
    return size


def check_allow(allow: str | Sequence[str]) -> tuple[Engine, ...]:
    """The engines of a user's ``allow``, each once, in order; a single name needn't be in a list.

    Raises:
        ValueError: if it is empty or names an unknown engine, saying which there are.
    """
    choices = ", ".join(repr(engine) for engine in all_engines())
    if isinstance(allow, Mapping) or not isinstance(allow, Collection):  # hydra's lists are none of Python's
        raise ValueError(f"allow={allow!r} must be a list of names of engines; the engines are {choices}")
    names = (allow,) if isinstance(allow, str) else tuple(allow)
    known: dict[str, Engine] = {engine: engine for engine in all_engines()}
    if not names:
        raise ValueError(f"allow={allow!r} leaves no engine; name at least one of {choices}, or leave it out for all that are built")
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(str(name).lower(), all_engines(), n=1)
            remedy = f"did you mean {close[0]!r}?" if close else "name one of those, or leave allow out"
            raise ValueError(f"allow={list(names)!r} names the unknown engine {name!r}; the engines are {choices}: {remedy}")
    return tuple(dict.fromkeys(known[name] for name in names))
