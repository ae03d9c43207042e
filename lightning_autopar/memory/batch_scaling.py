"""The footprint of a step at another batch than the traced one. Knows what grows with the batch, nothing of plans."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np

from lightning_autopar.memory.footprint import Footprint, LayerFootprint
from lightning_autopar.memory.tape import KINDS, Tape
from lightning_autopar.memory.work.work import Work, flops, moved_bytes

#: The kinds of a tape that grow with the batch.
_GROWING = tuple(KINDS.index(kind) for kind in ("input", "activations", "temporary"))


def scaled(footprint: Footprint, batch_size: int) -> Footprint:
    """The footprint at a batch of so many samples: activations, input and FLOPs in proportion; bytes of fixed size stay. Temporaries never
    get smaller than the parameters: an optimizer's don't depend on the batch. A batch without a batch dimension counts as one sample. A
    validation step grows in proportion, but doesn't shrink: its loader has a batch size of its own.

    Args:
        batch_size: samples, at least one.
    """
    share = Fraction(batch_size, max(1, footprint.batch_size))
    return replace(_times(footprint, share), batch_size=batch_size, longest_samples=math.ceil(footprint.longest_samples * share))


def longer(footprint: Footprint, growth: float) -> Footprint:
    """The footprint of a batch of as many samples with so many times the bytes of what grows with it, and with the same work."""
    return _with_work(_times(footprint, Fraction(growth).limit_denominator(10_000)), footprint)


def at_lengths(first: Footprint, usual: Footprint, longest: Footprint) -> Footprint:
    """The footprint with the longest batch's bytes and the usual one's work; what the step does is told by the first batch's.

    Where the longest batch's step has other parts than the usual one's, it has its work as well.
    """
    same = [[layer.fqn for layer in (*each.blocks, *each.outer)] for each in (usual, longest)]
    found = replace(
        longest,
        batch_size=first.batch_size,
        longest_samples=0 if longest.batch_size == first.batch_size else longest.batch_size,
        conduct=first.conduct,
        random_draws=tuple(dict.fromkeys((*first.random_draws, *longest.random_draws))),
        unused_parameters=first.unused_parameters,
        evaluation_bytes=first.evaluation_bytes,
        evaluation_parts=first.evaluation_parts,
        evaluation_repeats=first.evaluation_repeats,
        evaluation_failed=first.evaluation_failed or longest.evaluation_failed,
        margin=max(first.margin, longest.margin),
        assumptions=tuple(dict.fromkeys((*first.assumptions, *longest.assumptions))),
    )
    return _with_work(found, usual) if same[0] == same[1] else found


def for_rank(footprint: Footprint, parts: int) -> Footprint:
    """The footprint as a part of its batch is to be counted, one of so many: of a longest batch with fewer samples than others a part is
    larger, as it has at least one, and of one with more samples smaller.
    """
    if not footprint.longest_samples or not footprint.batch_size:
        return footprint
    shares = [-(-samples // parts) / samples for samples in (footprint.longest_samples, footprint.batch_size)]
    return longer(footprint, shares[0] / shares[1])


def growing_bytes(footprint: Footprint) -> int:
    """What grows with the batch, at the fullest moment of a step on one device."""
    moments = [moment.activation_bytes + moment.temporary_bytes for moment in footprint.moments]
    return footprint.input_bytes + max(moments, default=footprint.activation_bytes + footprint.temporary_bytes)


def _with_work(footprint: Footprint, other: Footprint) -> Footprint:
    """The footprint with another one's operations, which has the same parts."""

    def taken(layer: LayerFootprint, of: LayerFootprint) -> LayerFootprint:
        return replace(
            layer,
            flops=of.flops,
            backward_flops=of.backward_flops,
            moved_bytes=of.moved_bytes,
            backward_moved_bytes=of.backward_moved_bytes,
            work=of.work,
            backward_work=of.backward_work,
        )

    return replace(
        footprint,
        flops=other.flops,
        moved_bytes=other.moved_bytes,
        blocks=tuple(map(taken, footprint.blocks, other.blocks)),
        outer=tuple(map(taken, footprint.outer, other.outer)),
    )


def _times(footprint: Footprint, share: Fraction) -> Footprint:
    """The footprint at so large a share of its batch."""

    def part(size: int, fixed: int = 0) -> int:
        """That share of the bytes that aren't fixed, rounded up."""
        fixed = min(fixed, size)
        return fixed + -(-(size - fixed) * share.numerator // share.denominator)

    evaluation = footprint.evaluation_bytes
    moved = sum(layer.moved_bytes + layer.backward_moved_bytes for layer in (*footprint.blocks, *footprint.outer))
    optimizer_moved = max(0, footprint.moved_bytes - moved) if footprint.outer else 0
    works: dict[int, tuple[Work, ...]] = {}

    def rescale(work: tuple[Work, ...]) -> tuple[Work, ...]:
        """Operations at the new batch; equal blocks share theirs."""
        if id(work) not in works:
            works[id(work)] = tuple(one.at(float(share)) for one in work)
        return works[id(work)]

    blocks, outer = (tuple(_layer(layer, part, rescale) for layer in layers) for layers in (footprint.blocks, footprint.outer))
    layers = (*blocks, *outer)
    counted = any(layer.work for layer in layers)
    moved_after = sum(layer.moved_bytes + layer.backward_moved_bytes for layer in layers)
    moments = tuple(
        replace(
            moment,
            activation_bytes=part(moment.activation_bytes),
            temporary_bytes=part(moment.temporary_bytes),
            slope_bytes=part(moment.slope_bytes),
            draw_bytes=part(moment.draw_bytes),
        )
        for moment in footprint.moments
    )
    return replace(
        footprint,
        activation_bytes=part(footprint.activation_bytes, sum(block.fixed_bytes for block in footprint.blocks)),
        temporary_bytes=max(part(footprint.temporary_bytes), min(footprint.temporary_bytes, footprint.parameter_bytes)),
        input_bytes=part(footprint.input_bytes),
        flops=sum(layer.flops + layer.backward_flops for layer in layers) if counted else part(footprint.flops),
        moved_bytes=moved_after + optimizer_moved if footprint.outer else part(footprint.moved_bytes),
        blocks=blocks,
        outer=outer,
        moments=moments,
        tape=None if footprint.tape is None else _tape(footprint.tape, share),
        evaluation_bytes=None if evaluation is None else max(evaluation, part(evaluation)),
    )


def drawn_by_rank(footprint: Footprint) -> Footprint:
    """The footprint if each rank, and each part of a batch, draws random numbers only for its own samples."""

    def own(layer: LayerFootprint) -> LayerFootprint:
        works = (tuple(replace(one, drawn=False) if one.drawn else one for one in works) for works in (layer.work, layer.backward_work))
        work, backward_work = works
        return replace(layer, draw_bytes=(), work=work, backward_work=backward_work)

    return replace(
        footprint,
        blocks=tuple(map(own, footprint.blocks)),
        outer=tuple(map(own, footprint.outer)),
        moments=tuple(replace(moment, draw_bytes=0) for moment in footprint.moments),
        tape=None if footprint.tape is None else replace(footprint.tape, draws={}),
    )


def draws_whole(footprint: Footprint) -> bool:
    """Whether a part of the step's batch draws random numbers for the whole batch."""
    return any(work.drawn for layer in (*footprint.blocks, *footprint.outer) for work in (*layer.work, *layer.backward_work))


def _layer(layer: LayerFootprint, part: Callable[..., int], rescale: Callable[[tuple[Work, ...]], tuple[Work, ...]]) -> LayerFootprint:
    """A block or an outer part.

    FLOPs and bytes moved are those of its operations; where those aren't known, its reads and writes of parameters and gradients are
    assumed to be equal at any batch.
    """
    weights = layer.parameter_bytes
    work, backward_work = rescale(layer.work), rescale(layer.backward_work)
    return replace(
        layer,
        activation_bytes=part(layer.activation_bytes, layer.fixed_bytes),
        input_bytes=part(layer.input_bytes),
        input_extra_bytes=part(layer.input_extra_bytes),
        output_bytes=part(layer.output_bytes),
        draw_bytes=tuple(map(part, layer.draw_bytes)),
        flops=flops(work) if work else part(layer.flops),
        backward_flops=flops(backward_work) if backward_work else part(layer.backward_flops),
        forward_peak_bytes=part(layer.forward_peak_bytes, layer.fixed_bytes),
        forward_unsaved_bytes=part(layer.forward_unsaved_bytes, layer.fixed_bytes),
        backward_peak_bytes=part(layer.backward_peak_bytes, layer.fixed_bytes),
        moved_bytes=moved_bytes(work) if work else part(layer.moved_bytes, weights),
        backward_moved_bytes=(
            moved_bytes(backward_work) if backward_work else part(layer.backward_moved_bytes, weights + layer.gradient_bytes)
        ),
        work=work,
        backward_work=backward_work,
    )


def _tape(tape: Tape, share: Fraction) -> Tape:
    """The same events with other sizes."""
    sizes, kinds = np.array(tape.sizes, dtype=np.int64), np.array(tape.kinds, dtype=np.int8)
    growing = np.isin(kinds, _GROWING)
    whole, rest = np.divmod(sizes[growing], share.denominator)  # the products of all sizes may have too many digits
    sizes[growing] = whole * share.numerator - (-rest * share.numerator // share.denominator)
    slopes = {storage: -(-slope * share.numerator // share.denominator) for storage, slope in tape.slopes.items()}
    draws = {storage: tuple(-(-size * share.numerator // share.denominator) for size in drawn) for storage, drawn in tape.draws.items()}
    return replace(tape, sizes=array("q", sizes.tobytes()), slopes=slopes, draws=draws)
