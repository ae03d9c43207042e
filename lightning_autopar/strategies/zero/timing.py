"""ZeRO on the lanes of a step: what DeepSpeed gathers and reduces, by the module and by the bucket. It knows no other engine, no rate.

Which parameters ZeRO-3 gathers together, and which stay gathered: bytes by part of the step. It knows no seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from lightning_autopar.devices.inventory import Device
from lightning_autopar.memory.footprint import Footprint, LayerFootprint
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.zero.settings import ZeroSettings
from lightning_autopar.timing.lanes import Played, Unit, Wires, copy_seconds, note, note_computing
from lightning_autopar.timing.rank import Event, Run
from lightning_autopar.timing.rates import Collective
from lightning_autopar.timing.roofline import Layout


def gathered_modules(footprint: Footprint, layout: Layout, persistence: int) -> list[tuple[int, ...]]:
    """For each layer of a layout the bytes of each gather: a module is gathered with what it holds directly.

    Args:
        footprint: of the module.
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
            # Where it isn't known which module holds a parameter, one with a weight has a bias besides.
            module = part.parameter_modules[index][0] if part.parameter_modules else index // 2
            found[module] = found.get(module, 0) + rows * row_bytes
    return tuple(found.values())


def persistent_bytes(footprint: Footprint, persistence: int) -> int:
    """Of those parameters that stay gathered.

    Args:
        footprint: of the module.
        persistence: elements up to which a parameter stays gathered.
    """
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
    wires: Wires,
    device: Device,
    *,
    width: Callable[[int], float],
    settings: ZeroSettings,
) -> tuple[list[Unit | None], Unit]:
    """ZeRO-3: every module's parameters are gathered by themselves, but for small ones that stay so; gradients are reduced by the bucket.

    Args:
        footprint: of the module.
        layout: of the step.
        plan: a zero plan.
        wires: between the ranks.
        device: on which buffers are copied.
        width: bytes that so many bytes at rest have as they are computed with and sent.
        settings: DeepSpeed's.
    """
    offloaded, rates = "parameters" in plan.offload, wires.rates
    ranks = len(wires.shards)
    element = footprint.parameter_bytes / max(1, footprint.parameters)
    bucket = width(round(min(settings.reduce_bucket_elements, max(1, footprint.trainable_parameters)) * element))
    reduced = wires.over_shards("reduce_scatter", bucket)
    known: dict[object, Unit | None] = {}

    def unit(modules: tuple[int, ...], gradients: int) -> Unit | None:
        wide, back = width(sum(modules)), width(gradients)
        if not wide and not back:
            return None
        fetch = rates.host_copy_seconds(device, round(wide / ranks)) if offloaded and wide else 0.0
        if offloaded and device.kind == "cpu":
            fetch = copy_seconds(rates, device, 2 * wide / ranks)
        return Unit(
            gather=sum(wires.over_shards("all_gather", width(size)) for size in modules),
            unpack=0.0,
            # Into the bucket, divided, and out of it.
            reduce=reduced * back / bucket + 3 * copy_seconds(rates, device, 2 * back),
            fetch=fetch,
        )

    units: list[Unit | None] = []
    for layer, modules in zip(layout.layers, gathered_modules(footprint, layout, settings.persistence_elements), strict=True):
        key = modules, sum(layer.gradients)
        if key not in known:
            known[key] = unit(*key)
        units.append(known[key])
    return units, Unit(0.0, 0.0, 0.0)


def play_partitions(
    layout: Layout,
    run: Run,
    wires: Wires,
    width: Callable[[int], float],
    events: list[Event] | None = None,
    *,
    bucket: int,
    collective: Collective,
) -> Played:
    """ZeRO-1 and 2: gradients are reduced in large buckets as they come, and every rank's part of the parameters is gathered at the end.

    Args:
        layout: of the step.
        run: the rank's own work.
        wires: between the ranks.
        width: bytes that so many bytes at rest have as they are sent.
        events: where what happens is written down.
        bucket: its elements.
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
            seconds = wires.over_shards(collective, size)
            if run.device.kind == "cpu":  # into the bucket, divided, and laid flat; a GPU does so beside computing
                seconds += 3 * copy_seconds(wires.rates, run.device, 2 * size)
            link = note(events, max(link, before + done[index]), seconds, "communication", collective.replace("_", "-"), "communication")
            carried, size = carried + seconds, 0.0
    if events is not None:
        note_computing(layout, run, events)
    return Played(max(link, before + done[-1] if done else before), carried)
