"""The policy of default settings in one loop: against the allocator's model, which is held to torch's sources in ``test_allocator.py``."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_autopar.memory.allocator import CachingAllocator, OutOfDeviceMemory
from lightning_autopar.memory.allocator_options import AllocatorOptions
from lightning_autopar.memory.best_fit import BestFit, is_plain
from lightning_autopar.memory.free_blocks import Block

KIB, MIB = 1 << 10, 1 << 20
#: On either side of what the policy tells apart: a block's 512 bytes, 1 MiB, a segment of 20 MiB, 10 MiB, rests of 1 MiB.
SIZES = [1, 512, 513, 700 * KIB, MIB - 512, MIB, MIB + 1, 3 * MIB, 10 * MIB - 1, 10 * MIB, 11 * MIB, 13 * MIB, 19 * MIB, 19 * MIB - 512]
#: Whether something is freed, which of what is there, the size, the stream, and whether the orders so far are played before what follows.
STEPS = st.lists(
    st.tuples(
        st.booleans(),
        st.integers(0, 10**6),
        st.one_of(st.sampled_from(SIZES), st.integers(1, 30 * MIB), st.integers(1, MIB)),
        st.sampled_from([0, 0, 0, 1, 2]),
        st.booleans(),
    ),
    max_size=120,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(limit_bytes=st.one_of(st.none(), st.integers(MIB, 400 * MIB)), segment=st.sampled_from([20, 32]), steps=STEPS)
def test_as_the_allocator(limit_bytes: int | None, segment: int, steps: list[tuple[bool, int, int, int, bool]]) -> None:
    options = AllocatorOptions(large_segment_bytes=segment * MIB)
    model, loop = CachingAllocator(limit_bytes=limit_bytes, options=options), BestFit(limit_bytes=limit_bytes, options=options)
    live: list[tuple[int, int, Block]] = []
    orders: list[int] = []
    count = 0
    error: OutOfDeviceMemory | None = None
    for frees, which, size_bytes, stream, settle in steps:
        if frees and live:
            number, of, block = live.pop(which % len(live))
            model.free(block)
            orders += 0, of, -number, 0, 0
        else:
            count += 1
            orders += 0, stream, size_bytes, 0, 0
            try:
                live.append((count, stream, model.allocate(size_bytes, stream)))
            except OutOfDeviceMemory as raised:
                error = raised
                break
        if settle:
            loop.play(orders)
            orders = []
            _same(model, loop)
    if error is None:
        loop.play(orders)
    else:
        with pytest.raises(OutOfDeviceMemory) as caught:
            loop.play(orders)
        assert vars(caught.value) == vars(error)
    _same(model, loop)


def _same(model: CachingAllocator, loop: BestFit) -> None:
    for name in ("allocated_bytes", "reserved_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "retries", "limit_bytes"):
        assert getattr(loop, name) == getattr(model, name), name


def test_a_segment_given_back_is_reserved_again() -> None:
    loop = BestFit(limit_bytes=64 * MIB)
    loop.play([40 * MIB, -1, 12 * MIB])  # the second is cut from the 40
    assert (loop.reserved_bytes, loop.retries) == (40 * MIB, 0)
    with pytest.raises(OutOfDeviceMemory):
        loop.play([30 * MIB])
    assert (loop.reserved_bytes, loop.retries) == (40 * MIB, 1)
    loop.play([-2, 64 * MIB])
    assert (loop.reserved_bytes, loop.peak_reserved_bytes, loop.retries) == (64 * MIB, 64 * MIB, 2)


@pytest.mark.parametrize(
    "options",
    [
        AllocatorOptions(expandable_segments=True),
        AllocatorOptions(max_split_bytes=32 * MIB),
        AllocatorOptions(garbage_collection_threshold=0.5),
        AllocatorOptions(roundup_power2_divisions=(8,) * 16),
    ],
)
def test_other_settings_have_another_policy(options: AllocatorOptions) -> None:
    assert not is_plain(options)
    with pytest.raises(AssertionError, match="another policy"):
        BestFit(options=options)


def test_speed() -> None:
    """Sizes as a step has them, few and often: 40,000 orders in less than 0.1 s of one core."""
    orders = [1 + (number % 30) * 97 * KIB for number in range(600)]
    for number in range(19_700):
        orders += -(number + 1), 1 + (number * 7 % 30) * 97 * KIB
    best = float("inf")
    for _ in range(3):
        loop = BestFit()
        begin = time.process_time()
        loop.play(orders)
        best = min(best, time.process_time() - begin)
    assert best < 0.1
