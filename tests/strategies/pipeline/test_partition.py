"""The dynamic programme against all cuts there are."""

import itertools

import numpy as np
import pytest

from lightning_autopar.strategies.pipeline.partition import Table, moves, partition
from tests.work import counted


def by_hand(seconds: list[Table], cuttable: list[bool]) -> tuple[float, float] | None:
    """The slowest stage and the sum of all, of the best of all cuts."""
    blocks = len(seconds[0]) - 1
    found = []
    for cuts in itertools.combinations(range(1, blocks), len(seconds) - 1):
        ends = (0, *cuts, blocks)
        stages = [table[ends[stage], ends[stage + 1]] for stage, table in enumerate(seconds)]
        if all(cuttable[cut] for cut in cuts) and np.isfinite(stages).all():
            found.append((float(max(stages)), float(sum(stages))))
    return min(found, default=None)


@pytest.mark.parametrize("seed", range(200))
def test_no_cuts_are_better(seed: int) -> None:
    draw = np.random.default_rng(seed)
    blocks = int(draw.integers(1, 8))
    stages = int(draw.integers(1, blocks + 1))
    shape = (blocks + 1, blocks + 1)
    # Some stages lack the memory for some blocks; whole numbers, so that there are ties.
    seconds = [np.where(draw.random(shape) < 0.25, np.inf, draw.integers(1, 9, shape).astype(float)) for _ in range(stages)]
    cuttable = [bool(draw.random() < 0.8) for _ in range(blocks)]
    found = partition(seconds, cuttable)
    best = by_hand(seconds, cuttable)
    assert (found is None) == (best is None)
    if found is not None:
        assert (found.slowest_seconds, found.total_seconds) == best
        ends = (*found.starts, blocks)
        assert found.starts[0] == 0
        assert sum(table[ends[stage], ends[stage + 1]] for stage, table in enumerate(seconds)) == found.total_seconds


def test_more_stages_than_blocks_are_none() -> None:
    assert partition([np.ones((3, 3))] * 3) is None


def test_a_hundred_blocks_in_sixty_stages_take_no_time() -> None:
    sums = np.cumsum(np.ones(97))
    table = np.abs(sums[None, :] - sums[:, None])
    found, calls = counted(partition, [table] * 48)
    assert found is not None
    assert found.slowest_seconds == 2
    assert calls < 1500


def test_cuts_are_moved_first_where_they_relieve_the_busiest_rank() -> None:
    """Of stages of a block each, and one of five that is the last rank's second, that one gives away two."""
    starts = next(moves([1, 2, 3, 4, 5, 6, 7], np.arange(13.0), [1.0] * 4, [True] * 12))
    sizes = [end - start for start, end in itertools.pairwise((0, *starts, 12))]
    assert (sizes[7], sorted(sizes)) == (3, [1, 1, 1, 1, 1, 1, 3, 3])
    assert sizes[3] == 1, "the same rank's first stage"
