"""ZeRO on the lanes of a step: what DeepSpeed gathers and reduces, by module and by bucket, and which parameters stay gathered.

It knows no other engine and no rate. Most counts of calls are by ``benchmarks/python_calls.py`` (``sys.setprofile`` in real steps of
modules of several shapes, taken apart by least squares) with torch 2.13 and DeepSpeed 0.19.8: the same on every machine; other versions
make others, about as many. Estimated, and yet to be counted: stages 1 and 2 without offload; stage 3 without offload by its count with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from lightning_autopar.devices.inventory import Device, Inventory
from lightning_autopar.memory.footprint import Footprint, LayerFootprint
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.zero.settings import ZeroSettings, settings_of
from lightning_autopar.timing.overlap import LaneSeconds, Links, UnitSeconds, copy_seconds, note, note_computing, play_replicas, play_shards
from lightning_autopar.timing.rank_compute import LaneSpan, Layout, RankWork
from lightning_autopar.timing.rates import Collective, Rates
from lightning_autopar.timing.step_seconds import Step


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Calls of functions and builtins in one step.

    Args:
        step: however large the module is.
        parameter: for each parameter that is trained.
        module: for each module.
        bucket: for each bucket of gradients that fills.
    """

    step: int
    parameter: int
    module: int
    bucket: int


#: The calls by ZeRO's stage, and by whether the optimizer is offloaded.
ZERO: Mapping[tuple[int, bool], Calls] = {
    (1, False): Calls(step=1100, parameter=200, module=25, bucket=300),
    (2, False): Calls(step=1100, parameter=185, module=25, bucket=300),
    (2, True): Calls(step=1780, parameter=435, module=49, bucket=276),
    (3, False): Calls(step=3292, parameter=1397, module=895, bucket=669),
    (3, True): Calls(step=3292, parameter=1497, module=900, bucket=669),
}


class ZeroStep(Step):
    """One step of partitions.

    Args:
        settings: DeepSpeed's, where another program's run is predicted; None for our engine's. The others are those of :class:`Step`.
    """

    def __init__(
        self, footprint: Footprint, plan: Plan, inventory: Inventory, precision: str, rates: Rates, settings: ZeroSettings | None
    ) -> None:
        super().__init__(footprint, plan, inventory, precision, rates)
        self.ours = settings is None
        self.zero = settings or settings_of(footprint, plan, on_cpu=self.on_cpu)

    @property
    def shards(self) -> int:
        """Each rank updates its own part."""
        return self.plan.world_size

    def calls(self) -> int:
        """Calls of our engine's and DeepSpeed's Python in a step."""
        if not self.ours:
            return 0
        layers = self.layout.layers
        parameters = sum(len(layer.gradients) for layer in layers)
        elements = self.footprint.trainable_parameters
        buckets = elements // max(1, min(elements, self.zero.reduce_bucket_elements)) if elements else 0
        modules = len(layers) + modules_with_parameters(self.footprint)
        return zero_calls(self.plan, parameters=parameters, modules=modules, buckets=buckets)

    def played(self, run: RankWork, events: list[LaneSpan] | None = None) -> LaneSeconds:
        """Play the step: stage 3 gathers parameters as FSDP2 does; the others reduce gradients by the bucket."""
        plan = self.plan
        if plan.zero_stage == 3:
            units, root = zero_units(self.footprint, self.layout, plan, self.links(), run.device, width=self.width, settings=self.zero)
            return play_shards(self.layout, run, units, root, again=True, training=self.training, events=events)
        if plan.world_size == 1:
            return play_replicas(self.layout, run, self.links(), 0.0, events)
        collective: Collective = "all_reduce" if self.ours else "reduce_scatter"
        bucket = self.zero.reduce_bucket_elements
        return play_partitions(self.layout, run, self.links(), self.width, events, bucket=bucket, collective=collective)

    def width(self, size_bytes: int) -> float:
        """Bytes on the wire under DeepSpeed, which may have converted the model to the precision's dtype, even under mixed precision."""
        if not self.zero.converts:
            return float(size_bytes)
        stored = self.footprint.parameter_bytes / max(1, self.footprint.parameters)
        return size_bytes * 2 / stored if self.half and stored > 2 else float(size_bytes)

    def after(self) -> float:
        """Communication that overlaps with nothing: every rank's updated part of the parameters goes to all others, at stage 3 of those
        that stay gathered. Our engine also asks all ranks which parameters had a gradient.
        """
        if not self.training:
            return 0.0
        links, width = self.links(), self.width
        asked = links.over_shards("all_reduce", sum(len(layer.gradients) for layer in self.layout.layers)) if self.ours else 0.0
        if self.plan.zero_stage == 3:
            staying = persistent_bytes(self.footprint, self.zero.persistence_elements)
            return asked + links.over_shards("all_gather", width(staying))
        return asked + links.over_shards("all_gather", width(self.footprint.parameter_bytes))

    def offload(self, run: RankWork) -> float:
        """Besides the update: gradients down, and parameters up."""
        plan, rates = self.plan, self.rates
        if "optimizer" not in plan.offload or not self.training:
            return 0.0
        part = round(self.width(self.footprint.gradient_bytes) / plan.world_size)
        copied = 2 * (copy_seconds(rates, run.device, 2 * part) if self.on_cpu else rates.host_copy_seconds(run.device, part))
        return super().offload(run) + copied


def gathered_modules(footprint: Footprint, layout: Layout, persistence: int) -> list[tuple[int, ...]]:
    """For each layer of a layout, the bytes of each gather: a module is gathered with the parameters that it holds directly.

    Args:
        layout: its parts; more than the footprint's where that wasn't traced.
        persistence: elements up to which a parameter stays gathered.
    """
    parts = [part for _, part in footprint.parts()]
    if len(parts) != len(layout.layers):
        return [(layer.parameters,) if layer.parameters else () for layer in layout.layers]
    element = footprint.parameter_bytes / max(1, footprint.parameters)
    return [_modules(part, persistence * element) for part in parts]


def _modules(part: LayerFootprint, persistent_bytes: float) -> tuple[int, ...]:
    if not part.parameter_rows:
        return (part.parameter_bytes,) if part.parameter_bytes else ()
    found: dict[int, int] = {}
    for index, (rows, row_bytes, _) in enumerate(part.parameter_rows):
        if rows * row_bytes > persistent_bytes:
            # Where it isn't known which module holds a parameter, each weight is assumed to have a bias with it.
            module = part.parameter_modules[index][0] if part.parameter_modules else index // 2
            found[module] = found.get(module, 0) + rows * row_bytes
    return tuple(found.values())


def persistent_bytes(footprint: Footprint, persistence: int) -> int:
    """Bytes of the parameters that stay gathered."""
    element = footprint.parameter_bytes / max(1, footprint.parameters)
    sizes = (rows * row_bytes for _, part in footprint.parts() for rows, row_bytes, _ in part.parameter_rows)
    return sum(size for size in sizes if size <= persistence * element)


def modules_with_parameters(footprint: Footprint) -> int:
    """How many modules hold parameters directly."""
    count = 0
    for _, part in footprint.parts():
        known = len({number for number, _ in part.parameter_modules})
        count += known or -(-len(part.parameter_rows) // 2)
    return count


def zero_units(
    footprint: Footprint,
    layout: Layout,
    plan: Plan,
    links: Links,
    device: Device,
    *,
    width: Callable[[int], float],
    settings: ZeroSettings,
) -> tuple[list[UnitSeconds | None], UnitSeconds]:
    """ZeRO-3: each module's parameters are gathered alone, but small ones stay gathered; gradients are reduced by the bucket.

    Args:
        device: on which buffers are copied.
        width: gives the bytes that so many bytes at rest have when they are computed with and sent.
    """
    offloaded, rates = "parameters" in plan.offload, links.rates
    ranks = len(links.shards)
    element = footprint.parameter_bytes / max(1, footprint.parameters)
    bucket = width(round(min(settings.reduce_bucket_elements, max(1, footprint.trainable_parameters)) * element))
    reduced = links.over_shards("reduce_scatter", bucket)
    known: dict[object, UnitSeconds | None] = {}

    def unit(modules: tuple[int, ...], gradients: int) -> UnitSeconds | None:
        wide, back = width(sum(modules)), width(gradients)
        if not wide and not back:
            return None
        fetch = rates.host_copy_seconds(device, round(wide / ranks)) if offloaded and wide else 0.0
        if offloaded and device.kind == "cpu":
            fetch = copy_seconds(rates, device, 2 * wide / ranks)
        return UnitSeconds(
            gather=sum(links.over_shards("all_gather", width(size)) for size in modules),
            unpack=0.0,
            # Into the bucket, divided, and out of it.
            reduce=reduced * back / bucket + 3 * copy_seconds(rates, device, 2 * back),
            fetch=fetch,
        )

    units: list[UnitSeconds | None] = []
    for layer, modules in zip(layout.layers, gathered_modules(footprint, layout, settings.persistence_elements), strict=True):
        key = modules, sum(layer.gradients)
        if key not in known:
            known[key] = unit(*key)
        units.append(known[key])
    return units, UnitSeconds(0.0, 0.0, 0.0)


def play_partitions(
    layout: Layout,
    run: RankWork,
    links: Links,
    width: Callable[[int], float],
    events: list[LaneSpan] | None = None,
    *,
    bucket: int,
    collective: Collective,
) -> LaneSeconds:
    """ZeRO-1 and 2: gradients are reduced in large buckets as they come, and every rank's part of the parameters is gathered at the end.

    Args:
        width: gives the bytes that so many bytes at rest have when they are sent.
        collective: how a bucket is reduced. DeepSpeed 0.19.8 gives every rank all of it (``use_multi_rank_bucket_allreduce``); earlier ones
            reduced each rank's part to it.
    """
    backwards = run.backwards()
    before = run.copied + run.parts * sum(run.forward) + (run.parts - 1) * sum(backwards)
    done = list(accumulate(reversed(backwards)))
    most = width(4 * bucket)
    size = link = carried = 0.0
    last = len(layout.layers) - 1
    for index, number in enumerate(range(last, -1, -1)):
        size += width(sum(layout.layers[number].gradients))
        if size and (size >= most or number == 0):
            seconds = links.over_shards(collective, size)
            if run.device.kind == "cpu":  # into the bucket, divided, and laid flat; a GPU does so while computing
                seconds += 3 * copy_seconds(links.rates, run.device, 2 * size)
            link = note(events, max(link, before + done[index]), seconds, "communication", collective.replace("_", "-"), "communication")
            carried, size = carried + seconds, 0.0
    if events is not None:
        note_computing(layout, run, events)
    return LaneSeconds(max(link, before + done[-1] if done else before), carried)


def zero_calls(plan: Plan, *, parameters: int, modules: int, buckets: int) -> int:
    """Calls of a step under ZeRO.

    Args:
        buckets: of gradients that fill in a step.
    """
    assert plan.zero_stage is not None
    offloads = "optimizer" in plan.offload and plan.zero_stage > 1
    calls = ZERO[plan.zero_stage, offloads]
    return calls.step + calls.parameter * parameters + calls.module * modules + calls.bucket * buckets
