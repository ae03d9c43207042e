"""The footprint of a step at another batch than the traced one. Knows what grows with the batch, nothing of plans."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from lightning_autopar.memory.footprint import Footprint


def scaled(footprint: Footprint, batch_size: int) -> Footprint:
    """The footprint at a batch of so many samples: activations, input and FLOPs in proportion, what has a fixed size left as it is.

    Temporaries go down to no less than the parameters' size: an optimizer's don't depend on the batch. A batch without a
    batch dimension counts as one sample.

    Args:
        footprint: as traced.
        batch_size: samples, at least one.
    """
    share = Fraction(batch_size, max(1, footprint.batch_size))

    def part(size: int, fixed: int = 0) -> int:
        """That share of what isn't fixed, rounded up."""
        return fixed + -(-(size - fixed) * share.numerator // share.denominator)

    fixed = min(sum(block.fixed_bytes for block in footprint.blocks), footprint.activation_bytes)
    blocks = tuple(
        replace(
            block,
            activation_bytes=part(block.activation_bytes, block.fixed_bytes),
            input_bytes=part(block.input_bytes),
            input_extra_bytes=part(block.input_extra_bytes),
            flops=part(block.flops),
        )
        for block in footprint.blocks
    )
    moments = tuple(
        replace(moment, activation_bytes=part(moment.activation_bytes), temporary_bytes=part(moment.temporary_bytes))
        for moment in footprint.moments
    )
    return replace(
        footprint,
        batch_size=batch_size,
        activation_bytes=part(footprint.activation_bytes, fixed),
        temporary_bytes=max(part(footprint.temporary_bytes), min(footprint.temporary_bytes, footprint.parameter_bytes)),
        input_bytes=part(footprint.input_bytes),
        flops=part(footprint.flops),
        blocks=blocks,
        moments=moments,
    )
