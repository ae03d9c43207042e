"""Who gets which sample: every sample once, in order, in proportion to the shares."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_autopar.exact.data.rank_share import Dealing
from lightning_autopar.plans import deal

SHARES = st.lists(st.integers(1, 9), min_size=1, max_size=6).map(tuple)


@given(shares=SHARES, of=st.integers(0, 60))
def test_every_sample_is_one_ranks_and_each_rank_has_its_share(shares: tuple[int, ...], of: int) -> None:
    dealing = Dealing(deal(shares))
    parts = [list(dealing.indices(of, rank)) for rank in range(len(shares))]
    assert sorted(sample for part in parts for sample in part) == list(range(of))
    for rank, part in enumerate(parts):
        assert part == sorted(part)
        assert len(part) == dealing.rows(of, rank)
        assert all(dealing.turns[sample % len(dealing.turns)] == rank for sample in part)
        assert abs(len(part) - of * shares[rank] / sum(shares)) < 1


@given(shares=SHARES, of=st.integers(0, 60), fewer=st.integers(0, 60))
def test_a_samples_rank_depends_on_its_place_alone(shares: tuple[int, ...], of: int, fewer: int) -> None:
    dealing = Dealing(deal(shares))
    for rank in range(len(shares)):
        whole = dealing.indices(of, rank)
        assert list(dealing.indices(min(of, fewer), rank)) == [sample for sample in whole if sample < fewer]


@given(shares=SHARES, of=st.integers(0, 60), parts=st.integers(1, 5))
def test_a_ranks_samples_are_dealt_out_to_its_parts(shares: tuple[int, ...], of: int, parts: int) -> None:
    dealing = Dealing(deal(shares))
    split = dealing.split(parts)
    assert split.holders == len(shares) * parts
    for rank in range(len(shares)):
        whole = list(dealing.indices(of, rank))
        assert [list(split.indices(of, rank * parts + part)) for part in range(parts)] == [whole[part::parts] for part in range(parts)]


@pytest.mark.parametrize(
    ("dealing", "slices"),
    [
        (Dealing.even(3), [range(0, 10, 3), range(1, 10, 3), range(2, 10, 3)]),
        (Dealing(deal((1, 2))), [range(1, 10, 3), (0, 2, 3, 5, 6, 8, 9)]),
        (Dealing(deal((2, 1, 1))), [(0, 3, 4, 7, 8), range(1, 10, 4), range(2, 10, 4)]),
        (Dealing.even(2).split(2), [range(0, 10, 4), range(2, 10, 4), range(1, 10, 4), range(3, 10, 4)]),
        (Dealing.even(1), [range(10)]),
    ],
)
def test_samples_at_equal_distances_are_a_slice(dealing: Dealing, slices: list[object]) -> None:
    assert [dealing.indices(10, holder) for holder in range(dealing.holders)] == slices


def test_a_batch_smaller_than_the_ranks_leaves_some_without() -> None:
    assert [list(Dealing.even(3).indices(1, rank)) for rank in range(3)] == [[0], [], []]
    assert [list(Dealing(deal((1, 3))).indices(1, rank)) for rank in range(2)] == [[], [0]]
