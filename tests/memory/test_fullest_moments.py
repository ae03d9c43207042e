"""Moments as columns: shares of the batch, recomputed blocks, and where blocks end."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from lightning_autopar.memory.footprint import Moment
from lightning_autopar.memory.fullest_moments import moments_of
from tests.planning.test_plan_bytes import FOOTPRINT, one, plan


def backward(held: int, **values: int | bool) -> Moment:
    return Moment(phase="backward", held=held, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [Fraction(1), Fraction(1, 2), Fraction(1, 8)])
def test_what_grows_with_the_batch_is_shared(share: Fraction) -> None:
    found = moments_of(FOOTPRINT, (), float(share))
    assert found.activations.tolist() == [round(moment.activation_bytes * share) for moment in FOOTPRINT.moments]
    assert found.temporary.tolist() == [round(moment.temporary_bytes * share) + moment.fixed_bytes for moment in FOOTPRINT.moments]
    assert found.gradients.tolist() == [moment.gradient_bytes for moment in FOOTPRINT.moments]
    assert found.forward.tolist() == [True, True, False, False, False]
    assert found.backward.tolist() == [False, False, True, True, False]


def test_a_footprint_is_told_from_another_one() -> None:
    # Columns are remembered by identity.
    assert moments_of(FOOTPRINT, (), 1.0).gradients.tolist() == moments_of(replace(FOOTPRINT), (), 1.0).gradients.tolist()
    assert moments_of(replace(FOOTPRINT, moments=FOOTPRINT.moments[:1]), (), 1.0).held.tolist() == [1]


def test_recomputed_blocks() -> None:
    blocks = (replace(FOOTPRINT.blocks[0], fixed_bytes=100, input_extra_bytes=40), replace(FOOTPRINT.blocks[1], forward_peak_bytes=500))
    moments = (
        Moment(phase="forward", held=2, activation_bytes=800, fixed_bytes=100),
        backward(1, running=True, boundary=True, activation_bytes=900, fixed_bytes=100),
        backward(1, running=True, activation_bytes=850, fixed_bytes=130),
        backward(0, running=True, activation_bytes=450, fixed_bytes=130),
    )
    found = moments_of(replace(FOOTPRINT, blocks=blocks, moments=moments), (0, 1), 1.0)
    # Block 0 gives up 300 that grow with the batch and 100 that don't, and keeps its input of 40; block 1 gives up 400.
    assert found.activations.tolist() == [800 - 260 - 400, 900 - 260 - 400, 850 - 260, 450 + 40, 900 - 260 - 400 + 500]
    assert found.temporary.tolist() == [0, 0, 30, 130, 0]
    assert found.boundary.tolist() == [False, True, False, False, False]
    # Each keeps a state of random numbers until its backward is over; while a forward runs again, there is that of the time beside it.
    kept = moments_of(replace(FOOTPRINT, blocks=blocks, moments=moments), (0, 1), 0.5, random_bytes=7)
    without = moments_of(replace(FOOTPRINT, blocks=blocks, moments=moments), (0, 1), 0.5)
    assert (kept.activations - without.activations).tolist() == [14, 14, 14, 7, 21]
    one = moments_of(replace(FOOTPRINT, blocks=blocks, moments=moments), (1,), 1.0, random_bytes=7)
    assert (one.activations - moments_of(replace(FOOTPRINT, blocks=blocks, moments=moments), (1,), 1.0).activations).tolist() == [
        7,
        7,
        7,
        0,
        14,
    ]


def test_a_blocks_backward_ends_where_the_next_part_begins() -> None:
    moments = (
        backward(2, boundary=True),
        backward(2),
        backward(1, running=True, boundary=True),
        backward(1, running=True),
        backward(0, running=True, boundary=True),  # nothing runs between the blocks
        backward(0, boundary=True),
        backward(0),
        Moment(phase="optimizer"),
    )
    assert moments_of(replace(FOOTPRINT, moments=moments), (), 1.0).ended.tolist() == [-1, -1, -1, -1, 1, 0, -1, -1]


def test_gradients_of_an_earlier_batch() -> None:
    moments = (
        Moment(phase="forward", held=2, gradient_bytes=2500),
        backward(2, boundary=True),
        backward(0, running=True, gradient_bytes=2000),
        Moment(phase="forward", held=2, gradient_bytes=2500),
        backward(2, boundary=True, gradient_bytes=2500),
        backward(0, running=True, gradient_bytes=2500),
        Moment(phase="optimizer", gradient_bytes=2500),
    )
    footprint = replace(FOOTPRINT, moments=moments)
    found = moments_of(footprint, (), 1.0)
    assert found.accumulated.tolist() == [False, False, False, False, True, True, False]
    assert found.waiting.tolist() == [False, True, True, True, True, True, False]
    # DDP leaves them beside its buckets until the last batch's backward.
    assert one(footprint, plan("ddp", 2)).gradients == 2 * 2500
    assert one(footprint, plan()).gradients == 2500
    assert not moments_of(FOOTPRINT, (), 1.0).waiting.any()


def test_without_a_trace_each_block_may_be_the_fullest() -> None:
    found = moments_of(replace(FOOTPRINT, moments=(), temporary_bytes=100), (0, 1), 1.0)
    assert found.activations.tolist() == [80, 480, 480, 480, 480]
    assert found.gradients.tolist() == [2500, 2500, 1000, 2500, 2000]
    assert set(found.temporary.tolist()) == {100}
