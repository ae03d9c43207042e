"""What a rank under DeepSpeed's ZeRO holds, on its device and in host memory. Arithmetic only: imports neither torch nor DeepSpeed.

As DeepSpeed 0.19.8 does it (``runtime/zero/stage_1_and_2.py``, ``stage3.py``, ``partitioned_param_coordinator.py``,
``runtime/comm/coalesced_collectives.py``), under the configuration of our engine, or that which Lightning's ``DeepSpeedStrategy`` writes:

- Under Lightning's configuration a rank keeps a copy of its part in fp32, and the optimizer's state for it; in 16 bits, which Lightning has
  it compute in under ``bf16-mixed`` as well, and in 32 bits, too. Our engine's optimizer steps the parameters' own part, or a copy of it
  on the host where that isn't on the host already.
- Stages 1 and 2: parameters lie in one flat buffer. During backward gradients move into a bucket, or two that take turns
  (``overlap_comm``); a full one is flattened once more, and reduced. Gradients of which the rank has a part are copied out whole.
- Stage 3: one bucket is always there, and so is the rank's part of the gradients. Parameters of few elements stay gathered. A gathered
  parameter is kept if it is used again within ``max_reuse_elements`` of parameters. Others are gathered ahead, a bucket at each module that
  runs, up to ``max_live_elements`` in all; the flat buffer of each such gather stays until the last of its parameters is used. Where
  nothing is gathered ahead, a module's parameters are there while it runs; several of them are copied out of one buffer.
- gloo makes a copy of what it gathers, and at stage 3 of what it reduces (``ProcessGroupGloo.cpp``, ``_reduce_scatter_base``).
- Where a block's forward runs again in backward, parameters that it gathers are there until the backward of their module is over.
- Offloaded, the optimizer's copy, its gradients and its state lie in host memory, and so do the parameters' parts between uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from lightning_autopar.engines import Rank
from lightning_autopar.memory.device_bytes import DeviceBytes, Occasion
from lightning_autopar.memory.footprint import Footprint, FootprintCache
from lightning_autopar.memory.fullest_moments import RNG_STATE_BYTES
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.zero.gather_groups import course_of, layers_of
from lightning_autopar.strategies.zero.settings import ZeroSettings, settings_of

_FP32_BYTES = 4
_CAST_BYTES = 2


def zero_bytes(
    footprint: Footprint,
    plan: Plan,
    *,
    share: float,
    precision: str = "32-true",
    on_cpu: bool = False,
    settings: ZeroSettings | None = None,
) -> DeviceBytes:
    """The bytes that the fullest rank's device holds at the fullest moment of start or step.

    Args:
        share: of the batch that the rank takes, all its micro-batches together.

    Raises:
        ValueError: if the plan names a block that isn't there.
    """
    assert plan.zero_stage is not None
    zero = _Zero(footprint, plan, precision, on_cpu, settings or settings_of(footprint, plan, on_cpu=on_cpu))
    micro = share / plan.micro_batches
    moments = [zero.fullest(micro)]
    if on_cpu:  # If a GPU lacks the room, the flat buffer is made on the host.
        moments.append(zero.start())
    fullest = max(moments, key=_total)
    return zero.with_states(fullest, round(footprint.input_bytes * share))


def rank_bytes(rank: Rank, settings: ZeroSettings | None = None) -> Iterator[DeviceBytes]:
    """A rank's fullest moments: of start or step, and of a validation between two steps.

    Args:
        settings: DeepSpeed's; our engine's, unless given.
    """
    footprint, plan = rank.footprint, rank.plan
    step = zero_bytes(footprint, plan, share=rank.share, precision=rank.precision, on_cpu=rank.on_cpu, settings=settings)
    yield step
    if (runs := rank.evaluation_bytes) is not None:
        # Stage 3's bucket stays. At stages 1 and 2 buckets and gradients last for a backward, except the buffer through which one gradient
        # goes to the host.
        passed = footprint.largest_parameter_bytes if "optimizer" in plan.offload else 0
        held = step if plan.zero_stage == 3 else replace(step, gradients=0, communication=passed)
        buffers = held.buffers + footprint.set_aside_bytes
        yield replace(held, activations=0, temporary=runs, buffers=buffers, input=0, occasion="validation")


def zero_host_bytes(
    footprint: Footprint, plan: Plan, *, precision: str = "32-true", on_cpu: bool = False, settings: ZeroSettings | None = None
) -> tuple[int, int]:
    """The bytes of one rank in host memory: pageable and page-locked.

    Args:
        on_cpu: whether the devices are CPUs, which lock no pages.

    Returns:
        Bytes of pageable and of page-locked memory; zeros without offload.
    """
    return _Zero(footprint, plan, precision, on_cpu, settings or settings_of(footprint, plan, on_cpu=on_cpu)).host()


class _Moment(NamedTuple):
    """The bytes at one moment of a step, without the states: a plan has hundreds of moments, of which one becomes ``DeviceBytes``."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    temporary: int = 0
    communication: int = 0
    occasion: Occasion = "step"


def _most_owned(sizes: list[int], part: int) -> int:
    """The most elements that a rank holds of reduced gradients at stages 1 and 2: whole ones, also where only some of it is the rank's.

    Args:
        sizes: of the gradients, in the order in which parameters are laid into parts; assumed is that in which they run.
        part: elements of a rank's part.
    """
    owned: dict[int, int] = {}
    begin = 0
    for size in sizes:
        for rank in range(begin // max(1, part), (begin + max(size, 1) - 1) // max(1, part) + 1):
            owned[rank] = owned.get(rank, 0) + size
        begin += size
    return max(owned.values(), default=0)


#: A search asks for each number of ranks at two stages, with and without offload.
_OWNED: FootprintCache[int] = FootprintCache()


def _total(held: _Moment) -> int:
    return held.parameters + held.gradients + held.activations + held.temporary + held.communication


class _Zero:
    """A module under a stage: sizes in bytes, of one rank."""

    def __init__(self, footprint: Footprint, plan: Plan, precision: str, on_cpu: bool, settings: ZeroSettings) -> None:
        known = {block.fqn: index for index, block in enumerate(footprint.blocks)}
        for fqn in plan.recompute:
            if fqn not in known:
                raise ValueError(
                    f"the plan names the block {fqn!r}, but the footprint has {', '.join(known) or 'no blocks'}; plan again for this module"
                )
        assert plan.zero_stage is not None
        self.footprint = footprint
        self.settings = settings
        self.stage = plan.zero_stage
        self.ranks = plan.world_size
        self.on_cpu = on_cpu
        self.accumulates = plan.micro_batches > 1 or (footprint.tape is not None and footprint.tape.batches > 1)
        self.offload = "optimizer" in plan.offload
        self.offload_parameters = "parameters" in plan.offload
        #: Whether parameters are used where they lie: one rank has all of them, on its device.
        self.whole = plan.world_size == 1 and not self.offload_parameters
        self.recomputed = frozenset(2 * known[fqn] + 1 for fqn in plan.recompute)
        converted = precision.endswith("mixed") and settings.converts
        self.element = _FP32_BYTES if precision.startswith("32") or (precision.endswith("mixed") and not converted) else 2
        #: Autocast's casts of parameters until backward. They aren't made where the parameters themselves have 16 bits, and not kept at
        #: stage 3 (``deepspeed._linear``), where each lasts while its module runs.
        self.casts = not (precision.endswith("mixed") and (converted or self.stage == 3))
        self.passing_casts = self.stage == 3 and precision.endswith("mixed") and not converted
        self.parameters = footprint.parameters
        self.trainable = footprint.trainable_parameters
        self.layers = layers_of(footprint, settings.persistence_elements)
        #: Bytes an element of what the optimizer steps, of its gradient and its state. DeepSpeed's own copy is in 32 bits; our engine steps
        #: the parameters' own part, or with a step on the host a copy of it there, unless it lies there already.
        self.stepped = _FP32_BYTES if settings.converts else self.element
        self.copies = settings.converts or (self.offload and not self.offload_parameters)
        #: Elements of modules that contain all others.
        self.around = sum(layer.around for layer in self.layers[::2])
        #: Elements of parameters that are gathered only for their use: of the parts before each part, and of all.
        self.passing = [*accumulate((layer.passing for layer in self.layers), initial=0)]
        #: The part from which on a parameter stays gathered for backward: the parts in between have few enough parameters, counted twice.
        after = [*accumulate((layer.elements for layer in reversed(self.layers)), initial=0)][::-1]
        self.reused = next((index for index, elements in enumerate(after[1:]) if 2 * elements < settings.max_reuse_elements), len(after))
        sizes = [elements for layer in self.layers for elements in layer.gradients]
        self.largest = max(sizes, default=0)
        part = -(-self.trainable // self.ranks)
        self.reduced = _OWNED.get(footprint, part, lambda: _most_owned(sizes, part)) if self.stage < 3 else 0
        traced = max(1, footprint.gradient_bytes)
        self.state = round(footprint.optimizer_bytes / traced * self.part(self.stepped))
        self.shrink = self.element * footprint.parameters / max(1, footprint.parameter_bytes)

    def part(self, element: int) -> int:
        """Bytes of a rank's part of the trainable parameters, in elements of so many bytes."""
        return -(-self.trainable // self.ranks) * element

    @property
    def bucket(self) -> int:
        """Bytes of a bucket of gradients."""
        return self.settings.reduce_bucket_elements * self.element

    def states(self) -> dict[str, int]:
        """The bytes on the device from the first step to the last."""
        optimizer = 0 if self.offload else self.state + (self.part(self.stepped) if self.copies else 0)
        if self.stage < 3:
            return {"parameters": self.parameters * self.element, "optimizer": optimizer, "gradients": 0}
        parameters = 0 if self.offload_parameters else -(-self.parameters // self.ranks) * self.element
        return {"parameters": parameters, "optimizer": optimizer, "gradients": 0 if self.offload else self.part(self.element)}

    def with_states(self, moment: _Moment, input_bytes: int) -> DeviceBytes:
        """A moment's bytes, with those that are there at every moment."""
        held = self.states()
        return DeviceBytes(
            parameters=held["parameters"] + moment.parameters,
            gradients=held["gradients"] + moment.gradients,
            optimizer=(0 if moment.occasion == "start" and self.stage < 3 else held["optimizer"]) + moment.optimizer,
            activations=moment.activations,
            temporary=moment.temporary,
            buffers=self.footprint.buffer_bytes + self.footprint.copied_bytes,
            input=input_bytes if moment.occasion == "step" else 0,
            communication=moment.communication + (self._resident() if moment.occasion == "step" else 0),
            occasion=moment.occasion,
        )

    def _resident(self) -> int:
        """Buffers that always stay."""
        if self.stage == 3:
            return self.bucket + self._persistent()
        return self.largest * self.element if self.offload else 0

    def start(self) -> _Moment:
        """The moment of the start: parameters as they were built, besides those that are flattened already."""
        again = (self.parameters if self.settings.converts else self.trainable) * self.element
        return _Moment(parameters=again if self.stage < 3 else 0, occasion="start")

    def fullest(self, share: float) -> _Moment:
        """The first of a step's fullest moments, without the states. Of hundreds, only those fuller than all before are built."""
        most, fullest = -1, _Moment()
        bucket = self.settings.reduce_bucket_elements
        flushed = 0  # elements of gradients that have been reduced
        filled = 0  # elements that wait for their reduction
        several = 0  # the gradients to which these belong
        beside = 0  # of those, the ones in a gradient that is larger than the bucket, and stays where it is
        kept = self.reduced * self.element if self.accumulates and self.stage == 2 and not self.offload else 0
        waiting = self.trainable if self.accumulates and self.stage == 1 else 0  # elements of gradients of earlier micro-batches
        buckets = 0
        size = self.bucket * (2 if self.settings.overlap_comm else 1) if self.stage < 3 else 0
        random_bytes = RNG_STATE_BYTES if self.on_cpu else 0
        course = course_of(self.footprint, share, self.recomputed, casts=self.casts, shrink=self.shrink, random_bytes=random_bytes)
        for step_phase in course:
            number, phase = step_phase.number, step_phase.phase
            gathered = self.gathered(phase, number)
            if self.passing_casts and phase != "backward":
                gathered += self.layers[number].leaf * _CAST_BYTES
            if phase != "forward" and self.settings.converts:
                buckets = size
            gradients = kept + self._own(flushed) + (waiting + beside) * self.element
            for level, more in ((step_phase.begin, self._gathering(number)), (step_phase.most, gathered)):
                if gradients + level + buckets + more > most:
                    most = gradients + level + buckets + more
                    fullest = _Moment(
                        gradients=gradients,
                        activations=level if phase == "forward" else 0,
                        temporary=level if phase != "forward" else 0,
                        communication=buckets + more,
                    )
            if phase != "backward":
                continue
            done = 0
            layer = self.layers[number]
            if layer.trained and filled + layer.trained <= bucket:  # none of its gradients is reduced yet
                buckets = size
                filled += layer.trained
                several += len(layer.gradients)
                waiting = max(0, waiting - layer.trained)
                continue
            for position in layer.arrivals if self.stage == 3 else reversed(range(len(layer.gradients))):
                elements = layer.gradients[position]
                if filled and filled + elements > bucket:
                    flushed += filled
                    progress = done / (layer.trained or 1)
                    moment = _Moment(
                        gradients=kept + self._own(flushed) + (waiting + beside) * self.element,
                        # The gradient that has just arrived still lies where backward made it.
                        temporary=min(
                            step_phase.most,
                            round(step_phase.without * (1 - progress) + step_phase.end * progress) + elements * self.element,
                        ),
                        communication=buckets + self.gathered(phase, number, position) + self._flat(filled, several),
                    )
                    if _total(moment) > most:
                        most, fullest = _total(moment), moment
                    filled = beside = several = 0
                buckets = size  # the buffers are made for the first gradient
                filled += elements
                several += 1
                beside += elements if elements > bucket and not self.settings.converts else 0
                done += elements
                waiting = max(0, waiting - elements)
        flat = buckets + self._flat(filled, several)
        last = _Moment(gradients=kept + self._own(self.trainable) + beside * self.element, communication=flat)
        return max((fullest, last, *self._update(kept)), key=_total)

    def _flat(self, elements: int, gradients: int) -> int:
        """Copies through which a bucket with so many gradients is reduced. Stage 3 makes one of several gradients, or of one that must be
        padded, even on a single rank; gloo makes another.
        """
        if self.stage < 3:
            return elements * self.element if self.ranks > 1 else 0
        return elements * self.element * ((gradients > 1 or elements % self.ranks > 0) + self.on_cpu)

    def _own(self, flushed: int) -> int:
        """The gradients of which the rank has a part, at stages 1 and 2: held from the first reduction that gives some of it."""
        return self.reduced * self.element if flushed and self.stage < 3 and not self.offload else 0

    def _update(self, kept: int) -> Iterator[_Moment]:
        """The optimizer's step on the rank's part: the gradients are flattened, and cast; then its own scratch."""
        if self.offload:
            return
        cast = self.part(self.stepped) if self.element != self.stepped else 0
        flat = self.part(self.element)
        own = self._own(self.trainable)
        yield _Moment(gradients=kept + own, temporary=flat + cast)
        fixed = max((moment.fixed_bytes for moment in self.footprint.moments if moment.phase == "optimizer"), default=0)
        largest_bytes = max(1, self.footprint.largest_parameter_bytes)
        at_once = fixed > 4 * largest_bytes  # the update was traced for all parameters at once, or one by one
        ratio = fixed / (max(1, self.footprint.gradient_bytes) if at_once else largest_bytes)
        scratch = ratio * self.part(self.stepped)
        if not self.settings.converts and not at_once:  # one by one here, too; DeepSpeed's own optimizer sees the part as one parameter
            scratch = min(scratch, fixed // (self.ranks if self.stage == 3 else 1))
        yield _Moment(temporary=round(self.part(self.stepped) + scratch))

    def _persistent(self) -> int:
        """Gathered parameters that stay."""
        if self.stage < 3 or self.whole:
            return 0
        return sum(layer.persistent for layer in self.layers) * self.element

    def _gathering(self, number: int) -> int:
        """Gathered parameters and buffers while a part begins, where nothing is gathered ahead."""
        if self.stage < 3 or self.whole or not self._one_by_one:
            return 0
        layer = self.layers[number]
        passing = layer.leaf
        if self.ranks > 1:
            passing = max(layer.leaf * (2 if self.on_cpu else 1), 2 * layer.several)
        return (self._around(number) + passing) * self.element

    @property
    def _one_by_one(self) -> bool:
        return not self.settings.prefetch_elements and not self.settings.max_reuse_elements

    def _around(self, number: int) -> int:
        return self.around + (self.layers[number].around if number % 2 else 0)

    def gathered(self, phase: str, number: int, gradient: int | None = None) -> int:
        """Gathered parameters while a part runs: its own, those kept for a later use, those gathered ahead, and flat buffers.

        Args:
            gradient: the part's gradient that is being made, if any.
        """
        if self.stage < 3 or self.whole:
            return 0
        if self._one_by_one:
            if number in self.recomputed and phase != "forward":
                layer = self.layers[number]
                there = layer.passing - layer.around if gradient is None else layer.again[gradient]
                return (self._around(number) + there) * self.element
            return (self._around(number) + self.layers[number].leaf) * self.element
        settings, before = self.settings, self.passing
        kept = before[number] - before[min(number, self.reused)]
        live = kept + before[number + 1] - before[number]
        coming = before[-1] - before[number + 1] if phase == "forward" else before[number]
        if phase != "forward":
            coming -= kept
        ahead = min(coming, max(0, settings.max_live_elements - live)) if settings.prefetch_elements else 0
        flat = 0
        if ahead and self.ranks > 1:
            # With room for all, the parameters in use lie in their own gather's buffer; else gathers are as small as what was freed.
            flat = ahead if ahead < coming else min(before[-1], ahead + settings.prefetch_elements)
        return (live + ahead + flat) * self.element

    def host(self) -> tuple[int, int]:
        """Pageable and page-locked bytes."""
        pageable: list[int] = []
        locked: list[int] = []  # torch's allocator of such memory rounds each up to a power of two
        pinned = locked if self.settings.pin_memory and not self.on_cpu else pageable
        if self.offload:
            # The optimizer's copy of the parameters, its gradients, its state, and in 16 bits a buffer between them.
            master, part = self.part(self.stepped), self.part(self.element)
            pageable.append(self.state)
            if self.copies:
                (pinned if self.stage < 3 else pageable).append(master)
            pinned += [master, part]
            if self.stage < 3:
                pinned.append(self.largest * self.element)
                if self.accumulates:
                    gradients = (elements for layer in self.layers for elements in layer.gradients)
                    pinned += [-(-elements // self.ranks) * self.element for elements in gradients]
        if self.offload_parameters:
            frozen = -(-(self.parameters - self.trainable) // self.ranks) * self.element
            (pageable if self.on_cpu else locked).append(self.part(self.element))
            pageable.append(frozen)
        if self.settings.converts:
            return (0, sum(pageable) + sum(locked)) if self.settings.pin_memory else (sum(pageable), sum(locked))
        return sum(pageable), sum(1 << (size - 1).bit_length() for size in locked if size)
