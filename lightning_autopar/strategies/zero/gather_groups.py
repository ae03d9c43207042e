"""The parts of a module as ZeRO meets them: which of their parameters are gathered together, and what a step holds while each runs.

Arithmetic only; it knows neither stages nor buckets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from lightning_autopar.memory.footprint import Footprint, FootprintCache, LayerFootprint
from lightning_autopar.memory.fullest_moments import drawn_bytes
from lightning_autopar.memory.step_parts import Size, parts_of


@dataclass(frozen=True)
class GatherGroup:
    """Numbers of elements of a part's parameters.

    Args:
        passing: those that are gathered only for their use.
        persistent: those that stay gathered.
        gradients: of each parameter that is trained.
        leaf: of the passing ones, those of the module that has most; a module is gathered with the parameters that it holds directly.
        several: the same among modules with several such parameters, which are gathered into one buffer and copied out of it.
        around: passing ones of modules that contain others, and are gathered while those run.
        again: passing ones that are gathered while each gradient is made, if the part's forward runs again in its backward: that forward's
            gathers last until the module's backward is over.
        arrivals: the order of the gradients at stage 3: the last module's first, a linear's weight before its bias.
    """

    elements: int
    passing: int
    persistent: int
    gradients: tuple[int, ...]
    leaf: int
    several: int
    around: int
    again: tuple[int, ...] = ()
    arrivals: tuple[int, ...] = ()

    @cached_property
    def trained(self) -> int:
        """Elements of all that are trained."""
        return sum(self.gradients)


def layers_of(footprint: Footprint, persistence: int) -> list[GatherGroup]:
    """The parts of the module, in running order; the module as a whole where it wasn't traced.

    Args:
        persistence: elements up to which a parameter stays gathered.
    """
    return _LAYERS.get(footprint, persistence, lambda: _layers(footprint, persistence))


def _layers(footprint: Footprint, persistence: int) -> list[GatherGroup]:
    whole, trained = footprint.parameters, footprint.trainable_parameters
    if not footprint.outer:
        return [GatherGroup(whole, whole, 0, (trained,), leaf=whole, several=whole, around=0, again=(whole,), arrivals=(0,))]
    order: list[LayerFootprint] = [footprint.outer[0]]
    for block, after in zip(footprint.blocks, footprint.outer[1:], strict=True):
        order += [block, after]
    element = max(1, footprint.parameter_bytes // max(1, footprint.parameters))
    found: dict[tuple[object, ...], GatherGroup] = {}  # equal blocks differ in the numbers of their modules
    layers = []
    for layer in order:
        modules = layer.parameter_modules or ((0, False),) * len(layer.parameter_rows)
        first = min((number for number, _ in modules), default=0)
        alike = layer.parameter_rows, tuple((number - first, holds) for number, holds in modules)
        if alike not in found:
            found[alike] = _layer(layer, modules, element, persistence)
        layers.append(found[alike])
    return layers


def _layer(layer: LayerFootprint, modules: tuple[tuple[int, bool], ...], element: int, persistence: int) -> GatherGroup:
    sizes = [(rows * row_bytes // element, trained) for rows, row_bytes, trained in layer.parameter_rows]
    elements = sum(size for size, _ in sizes)
    leaves: dict[int, list[int]] = {}
    around = 0
    for (size, _), (number, holds) in zip(sizes, modules, strict=True):
        if size <= persistence:
            continue
        if holds:
            around += size
        else:
            leaves.setdefault(number, []).append(size)
    passing = sum(size for size, _ in sizes if size > persistence)
    # Modules are assumed to run in the order in which they were made.
    there = {number: sum(sum(leaf) for other, leaf in leaves.items() if other <= number) for number, _ in modules}
    numbers = [number for (_, trained), (number, _) in zip(sizes, modules, strict=True) if trained]
    return GatherGroup(
        elements,
        passing,
        elements - passing,
        tuple(size for size, trained in sizes if trained),
        leaf=max((sum(leaf) for leaf in leaves.values()), default=0),
        several=max((sum(leaf) for leaf in leaves.values() if len(leaf) > 1), default=0),
        around=around,
        again=tuple(there[number] for number in numbers),
        arrivals=tuple(sorted(range(len(numbers)), key=lambda position: (-numbers[position], position))),
    )


@dataclass(frozen=True, slots=True)
class StepPhase:
    """A part in a phase.

    Args:
        phase: ``"forward"``, ``"again"`` for a forward in backward, or ``"backward"``.
        number: of the part.
        begin: bytes of activations and temporaries when it begins.
        most: when they are most.
        without: the same without what has a fixed size, such as gradients in the making.
        end: when it ends.
    """

    phase: str
    number: int
    begin: int
    most: int
    without: int
    end: int


#: All parts of a step, in order.
Course = list[StepPhase]


def course_of(
    footprint: Footprint, share: float, recomputed: frozenset[int], *, casts: bool, shrink: float, random_bytes: int = 0
) -> Course:
    """Every part in forward and backward, in order.

    Args:
        share: of the batch that runs at once.
        recomputed: numbers of parts that keep what enters them only.
        casts: whether autocast's casts of parameters last until backward, as other tensors of fixed size do (weights that a parametrization
            makes, masks).
        shrink: the factor on bytes of fixed size in backward, which are gradients being made.
        random_bytes: of the random state that a recomputed part keeps, and of the one that is saved while its forward runs again.
    """
    key = share, recomputed, casts, shrink, random_bytes
    return _COURSES.get(footprint, key, lambda: list(_course(footprint, share, recomputed, casts, shrink, random_bytes)))


def _course(
    footprint: Footprint, share: float, recomputed: frozenset[int], casts: bool, shrink: float, random_bytes: int
) -> Iterator[StepPhase]:
    if footprint.tape is None or not footprint.outer:
        most = round((footprint.activation_bytes + footprint.temporary_bytes) * share)
        numbers = range(2 * len(footprint.blocks) + 1 if footprint.outer else 1)
        yield from (StepPhase("backward", number, most, most, most, 0) for number in reversed(numbers))
        return
    parts = parts_of(footprint.tape, len(footprint.blocks))
    passing = [0 if casts else _cast_bytes(footprint, number) for number in range(len(parts))]

    def at(size: Size, number: int) -> int:
        return round(size.scaled * share) + max(0, size.fixed_at(share) - passing[number])

    def drawn(whole: int) -> int:
        return drawn_bytes([whole], round(share * footprint.batch_size), footprint.batch_size, on_cpu=random_bytes > 0)

    held = 0
    inner: list[int] = []
    until = [0] * len(parts)
    for number, part in enumerate(parts):
        begin, most = held, held + max(part.drawing(share, drawn, given=True), *(at(size, number) for size in part.forward_given.sizes))
        for last, size in part.lent.items():
            until[last] += at(size, number)
            held += at(size, number)
        kept = at(part.inner, number)
        if number in recomputed:
            kept = round(footprint.blocks[number // 2].input_extra_bytes * share) + random_bytes
        inner.append(kept)
        held += kept
        yield StepPhase("forward", number, begin, most, most, held)
    given = 0
    for number in reversed(range(len(parts))):
        part = parts[number]
        begin = held + given
        held -= until[number] + inner[number]
        sizes = (part.backward_again if number in recomputed else part.backward)[True, True].sizes
        # Without kept casts, the bytes of fixed size are at least the gradient being made and the cast that it needs.
        less = min(part.inner.fixed, passing[number])
        making = _making(footprint, number)
        fixed = [size.fixed_at(share) for size in sizes]
        most = max(round(size.scaled * share + max(own - less, min(own, making)) * shrink) for size, own in zip(sizes, fixed, strict=True))
        without = max(round(size.scaled * share) for size in sizes)
        if number in recomputed:
            again = held + until[number] + inner[number] + random_bytes + given
            again += max(part.drawing(share, drawn, given=False), *(at(size, number) for size in part.again.sizes))
            yield StepPhase("again", number, begin, again, again, begin)
            most += inner[number]
            without += inner[number]
        given = round(part.returns.scaled * share)
        yield StepPhase("backward", number, begin, held + most, held + without, held + given)


def _part(footprint: Footprint, number: int) -> LayerFootprint:
    return footprint.blocks[number // 2] if number % 2 else footprint.outer[number // 2]


def _cast_bytes(footprint: Footprint, number: int) -> int:
    """Bytes of casts of all of a part's parameters, from 32 to 16 bits."""
    return sum(count * row_bytes for count, row_bytes, _ in _part(footprint, number).parameter_rows) // 2


def _making(footprint: Footprint, number: int) -> int:
    """Bytes of a part's largest gradient, and of what making it needs: a cast of its parameter and that cast's gradient."""
    rows = _part(footprint, number).parameter_rows
    return 2 * max((count * row_bytes for count, row_bytes, learns in rows if learns), default=0)


#: A search asks for every stage and offload of one module.
_LAYERS: FootprintCache[list[GatherGroup]] = FootprintCache()
_COURSES: FootprintCache[Course] = FootprintCache()
