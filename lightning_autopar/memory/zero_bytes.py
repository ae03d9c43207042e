"""What a rank under DeepSpeed's ZeRO holds, on its device and in host memory. Arithmetic only: imports neither torch nor DeepSpeed.

As DeepSpeed 0.19.8 does it (``runtime/zero/stage_1_and_2.py``, ``stage3.py``, ``partitioned_param_coordinator.py``,
``runtime/comm/coalesced_collectives.py``), under the configuration that Lightning's ``DeepSpeedStrategy`` writes:

- In 16 bits the model itself is converted, under ``bf16-mixed`` as well. A rank keeps a copy of its part in fp32, and the optimizer's state
  for it; in 32 bits, too (stage 3 means not to, but compares a device with its name).
- Stages 1 and 2: parameters lie in one flat buffer. During backward gradients move into a bucket, or two that take turns
  (``overlap_comm``); a full one is flattened once more, and reduced. The rank's own part is copied out.
- Stage 3: one bucket is always there, and so is the rank's part of the gradients. Parameters of few elements stay gathered. A gathered
  parameter is kept if it is used again within ``max_reuse_elements`` of parameters. Others are gathered ahead, a bucket at each module that
  runs, up to ``max_live_elements`` in all; the flat buffer of each such gather stays until the last of its parameters is used.
- Offloaded, the optimizer's copy, its gradients and its state lie in host memory, and so do the parameters' parts between uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from lightning_autopar.memory.device_bytes import DeviceBytes
from lightning_autopar.memory.footprint import Footprint, LayerFootprint
from lightning_autopar.memory.parts import parts_of
from lightning_autopar.memory.remembered import Remembered
from lightning_autopar.plans import Plan

_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class ZeroSettings:
    """Of DeepSpeed's configuration what takes memory. Elements, not bytes; the defaults are those of Lightning and DeepSpeed.

    Args:
        reduce_bucket_elements: of a bucket of gradients (``reduce_bucket_size``).
        overlap_comm: whether stages 1 and 2 have two buckets.
        prefetch_elements: of parameters that are gathered ahead (``stage3_prefetch_bucket_size``).
        max_live_elements: of gathered parameters beyond which none is gathered ahead (``stage3_max_live_parameters``).
        max_reuse_elements: how far ahead a use keeps a parameter gathered (``stage3_max_reuse_distance``).
        persistence_elements: up to which a parameter always stays gathered (``stage3_param_persistence_threshold``).
        pin_memory: whether host memory is page-locked. Parts of offloaded parameters always are.
    """

    reduce_bucket_elements: int = 200_000_000
    overlap_comm: bool = True
    prefetch_elements: int = 50_000_000
    max_live_elements: int = 1_000_000_000
    max_reuse_elements: int = 1_000_000_000
    persistence_elements: int = 100_000
    pin_memory: bool = False


def zero_bytes(
    footprint: Footprint,
    plan: Plan,
    *,
    share: float,
    precision: str = "32-true",
    on_cpu: bool = False,
    settings: ZeroSettings | None = None,
) -> DeviceBytes:
    """What a rank's device holds at the fullest moment of start or step: that of the rank with most.

    Args:
        footprint: of the module, at the whole batch.
        plan: a ZeRO plan.
        share: of the batch that the rank takes, all its micro-batches together.
        precision: the Trainer's.
        on_cpu: whether the device is a CPU.
        settings: DeepSpeed's.

    Raises:
        ValueError: if the plan names a block that isn't there.
    """
    assert plan.zero_stage is not None
    zero = _Zero(footprint, plan, precision, on_cpu, settings or ZeroSettings())
    micro = share / plan.micro_batches
    moments = list(zero.step(micro))
    if on_cpu:  # A GPU that lacks the room makes the flat buffer on the host.
        moments.append(zero.start())
    fullest = max(moments, key=lambda held: held.parameters + held.gradients + held.activations + held.temporary + held.communication)
    return zero.with_states(fullest, round(footprint.input_bytes * share))


def zero_host_bytes(
    footprint: Footprint, plan: Plan, *, precision: str = "32-true", settings: ZeroSettings | None = None
) -> tuple[int, int]:
    """What one rank offloads to host memory, and how much more of it is page-locked.

    Returns:
        Bytes of pageable and of page-locked memory; zeros without offload.
    """
    return _Zero(footprint, plan, precision, False, settings or ZeroSettings()).host()


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
        self.accumulates = plan.micro_batches > 1
        self.offload = "optimizer" in plan.offload
        self.offload_parameters = "parameters" in plan.offload
        #: Whether parameters are used where they lie: one rank has all of them, and they are on its device.
        self.whole = plan.world_size == 1 and (on_cpu or not self.offload_parameters)
        self.recomputed = frozenset(2 * known[fqn] + 1 for fqn in plan.recompute)
        self.element = _FP32_BYTES if precision.startswith("32") else 2
        #: Autocast's casts of parameters, which aren't made where the parameters themselves are of 16 bits.
        self.casts = not precision.endswith("mixed")
        self.parameters = footprint.parameters
        self.trainable = footprint.trainable_parameters
        persistence = settings.persistence_elements
        self.layers = _LAYERS.get(footprint, persistence, lambda: _layers(footprint, persistence))
        #: Elements of parameters that are gathered for their use only, of the parts before each one and of all.
        self.passing = [*accumulate((layer.passing for layer in self.layers), initial=0)]
        #: From which part on a parameter stays gathered for backward: what runs in between has few enough parameters, counted twice.
        after = [*accumulate((layer.elements for layer in reversed(self.layers)), initial=0)][::-1]
        self.reused = next((index for index, elements in enumerate(after[1:]) if 2 * elements < settings.max_reuse_elements), len(after))
        self.largest = max((elements for layer in self.layers for elements in layer.gradients), default=0)
        traced = max(1, footprint.gradient_bytes)
        self.state = round(footprint.optimizer_bytes / traced * self.part(_FP32_BYTES))
        self.shrink = self.element * footprint.parameters / max(1, footprint.parameter_bytes)

    def part(self, element: int) -> int:
        """A rank's part of the trainable parameters, in elements of so many bytes."""
        return -(-self.trainable // self.ranks) * element

    @property
    def bucket(self) -> int:
        """Bytes of a bucket of gradients."""
        return self.settings.reduce_bucket_elements * self.element

    def states(self) -> dict[str, int]:
        """What is on the device from the first step to the last."""
        optimizer = 0 if self.offload else self.state
        optimizer += 0 if self.offload else self.part(_FP32_BYTES)
        if self.stage < 3:
            return {"parameters": self.parameters * self.element, "optimizer": optimizer, "gradients": 0}
        parameters = 0 if self.offload_parameters else -(-self.parameters // self.ranks) * self.element
        return {"parameters": parameters, "optimizer": optimizer, "gradients": 0 if self.offload else self.part(self.element)}

    def with_states(self, moment: DeviceBytes, input_bytes: int) -> DeviceBytes:
        """A moment, with what is there at any."""
        held = self.states()
        return DeviceBytes(
            parameters=held["parameters"] + moment.parameters,
            gradients=held["gradients"] + moment.gradients,
            optimizer=(0 if moment.occasion == "start" and self.stage < 3 else held["optimizer"]) + moment.optimizer,
            activations=moment.activations,
            temporary=moment.temporary,
            buffers=self.footprint.buffer_bytes,
            input=input_bytes if moment.occasion == "step" else 0,
            communication=moment.communication + (self._resident() if moment.occasion == "step" else 0),
            occasion=moment.occasion,
        )

    def _resident(self) -> int:
        """Buffers that are always there."""
        if self.stage == 3:
            return self.bucket + self._persistent()
        return self.largest * self.element if self.offload else 0

    def start(self) -> DeviceBytes:
        """The parameters as they were built, beside those that are partitioned already or flattened."""
        again = self.parameters * self.element
        return DeviceBytes(parameters=again if self.stage < 3 else 0, occasion="start")

    def step(self, share: float) -> Iterator[DeviceBytes]:
        """The moments of a step, beside the states."""
        flushed = 0  # elements of gradients that have been reduced
        filled = 0  # elements in the bucket
        kept = self.part(self.element) if self.accumulates and self.stage == 2 and not self.offload else 0
        waiting = self.trainable if self.accumulates and self.stage == 1 else 0  # elements of gradients of earlier micro-batches
        buckets = 0
        key = share, self.recomputed, self.casts, self.shrink
        for phase, number, size_bytes, end_bytes in _COURSES.get(self.footprint, key, lambda: list(self._course(share))):
            gathered = self._gathered(phase, number) if self.stage == 3 else 0
            if phase == "backward" and self.stage < 3:
                buckets = self.bucket * (2 if self.settings.overlap_comm else 1)
            yield DeviceBytes(
                gradients=kept + self._own(flushed) + waiting * self.element,
                activations=size_bytes if phase == "forward" else 0,
                temporary=size_bytes if phase == "backward" else 0,
                communication=buckets + gathered,
            )
            if phase == "forward":
                continue
            done = 0
            for elements in reversed(self.layers[number].gradients):
                if filled and filled + elements > self.settings.reduce_bucket_elements:
                    flushed += filled
                    progress = done / sum(self.layers[number].gradients)
                    yield DeviceBytes(
                        gradients=kept + self._own(flushed) + waiting * self.element,
                        temporary=round(size_bytes * (1 - progress) + end_bytes * progress),
                        communication=buckets + gathered + self._flat(filled),
                    )
                    filled = 0
                filled += elements
                done += elements
                waiting = max(0, waiting - elements)
        yield DeviceBytes(gradients=kept + self._own(self.trainable), communication=buckets + self._flat(filled))
        yield from self._update(kept)

    def _flat(self, elements: int) -> int:
        """The copy through which a bucket is reduced."""
        return elements * self.element if self.ranks > 1 else 0

    def _own(self, flushed: int) -> int:
        """The rank's own part of the gradients, under stages 1 and 2: there from the first reduction that brings any of it."""
        return self.part(self.element) if flushed and self.stage < 3 and not self.offload else 0

    def _update(self, kept: int) -> Iterator[DeviceBytes]:
        """The optimizer's step on the rank's part: the gradients are flattened, and cast; then its own scratch."""
        if self.offload:
            return
        cast = self.part(_FP32_BYTES) if self.element != _FP32_BYTES else 0
        flat = self.part(self.element)
        own = self.part(self.element) if self.stage < 3 else 0
        yield DeviceBytes(gradients=kept + own, temporary=flat + cast)
        fixed = max((moment.fixed_bytes for moment in self.footprint.moments if moment.phase == "optimizer"), default=0)
        largest_bytes = max(1, self.footprint.largest_parameter_bytes)
        # Traced parameter by parameter, or for all of them at once; here the part is one parameter.
        ratio = fixed / (largest_bytes if fixed <= 4 * largest_bytes else max(1, self.footprint.gradient_bytes))
        yield DeviceBytes(temporary=round((1 + ratio) * self.part(_FP32_BYTES)))

    def _course(self, share: float) -> Iterator[tuple[str, int, int, int]]:
        """Every part in forward and backward, in order: phase, number, bytes of activations and temporaries when fullest and at its end."""
        footprint = self.footprint
        if footprint.tape is None or not footprint.outer:
            most = round((footprint.activation_bytes + footprint.temporary_bytes) * share)
            yield from (("backward", number, most, 0) for number in reversed(range(len(self.layers))))
            return
        parts = parts_of(footprint.tape, len(footprint.blocks))
        fixed = 1.0 if self.casts else 0.0

        def at(scaled: int, constant: int) -> int:
            return round(scaled * share) + round(constant * fixed)

        held = 0
        inner: list[int] = []
        until = [0] * len(parts)
        for number, part in enumerate(parts):
            most = held + max(at(size.scaled, size.fixed) for size in part.forward_given.sizes)
            for last, size in part.lent.items():
                until[last] += at(size.scaled, size.fixed)
                held += at(size.scaled, size.fixed)
            kept = at(part.inner.scaled, part.inner.fixed)
            if number in self.recomputed:
                kept = round(footprint.blocks[number // 2].input_extra_bytes * share)
            inner.append(kept)
            held += kept
            yield "forward", number, most, held
        for number in reversed(range(len(parts))):
            part = parts[number]
            held -= until[number] + inner[number]
            most = max(round(size.scaled * share + size.fixed * self.shrink) for size in part.backward[True, True].sizes)
            if number in self.recomputed:
                most += inner[number]
            yield "backward", number, held + most, held + round(part.returns.scaled * share)

    def _persistent(self) -> int:
        """Gathered parameters that stay."""
        if self.stage < 3 or self.whole:
            return 0
        return sum(layer.persistent for layer in self.layers) * self.element

    def _gathered(self, phase: str, number: int) -> int:
        """Gathered parameters while a part runs: its own, those kept for a later use, those gathered ahead, and flat buffers."""
        if self.whole:
            return 0
        settings, before = self.settings, self.passing
        kept = before[number] - before[min(number, self.reused)]
        live = kept + before[number + 1] - before[number]
        coming = before[-1] - before[number + 1] if phase == "forward" else before[number]
        if phase == "backward":
            coming -= kept
        ahead = min(coming, max(0, settings.max_live_elements - live)) if settings.prefetch_elements else 0
        flat = 0
        if ahead and self.ranks > 1:
            # Where there is room for all, what is used now lies in a buffer of its own gather; else gathers are as small as what was freed.
            flat = ahead if ahead < coming else min(before[-1], ahead + settings.prefetch_elements)
        return (live + ahead + flat) * self.element

    def host(self) -> tuple[int, int]:
        """Pageable and page-locked bytes."""
        states = parameters = 0
        if self.offload:
            # The optimizer's copy of the parameters, its gradients, its state, and in 16 bits a buffer between them.
            states = 2 * self.part(_FP32_BYTES) + self.state + self.part(self.element)
            if self.stage < 3:
                states += self.largest * self.element
                if self.accumulates:
                    states += self.part(self.element)
        if self.offload_parameters:
            parameters = -(-self.parameters // self.ranks) * self.element
        return (0, states + parameters) if self.settings.pin_memory else (states, parameters)


@dataclass(frozen=True)
class _Layer:
    """Elements of a part's parameters.

    Args:
        elements: all of them.
        passing: those that are gathered for their use only.
        persistent: those that stay gathered.
        gradients: of each parameter that is trained.
    """

    elements: int
    passing: int
    persistent: int
    gradients: tuple[int, ...]


#: A search asks for every stage and offload of one module.
_LAYERS: Remembered[list[_Layer]] = Remembered()
_COURSES: Remembered[list[tuple[str, int, int, int]]] = Remembered()


def _layers(footprint: Footprint, persistence: int) -> list[_Layer]:
    """The parts of the module, in running order; the module as a whole where it wasn't traced."""
    if not footprint.outer:
        return [_Layer(footprint.parameters, footprint.parameters, 0, (footprint.trainable_parameters,))]
    order: list[LayerFootprint] = [footprint.outer[0]]
    for block, after in zip(footprint.blocks, footprint.outer[1:], strict=True):
        order += [block, after]
    element = max(1, footprint.parameter_bytes // max(1, footprint.parameters))
    found = []
    for layer in order:
        sizes = [(rows * row_bytes // element, trained) for rows, row_bytes, trained in layer.parameter_rows]
        small = sum(size for size, _ in sizes if size <= persistence)
        elements = sum(size for size, _ in sizes)
        found.append(_Layer(elements, elements - small, small, tuple(size for size, trained in sizes if trained)))
    return found
