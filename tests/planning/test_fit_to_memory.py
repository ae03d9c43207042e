import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_autopar.planning.fit_to_memory import largest_rows, share_out

RANKS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 8)), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(1, 9), RANKS)
def test_no_other_split_is_done_sooner(rows: int, ranks: list[tuple[int, int]]) -> None:
    row_seconds, most = [float(one[0]) for one in ranks], [one[1] for one in ranks]
    found = share_out(rows, row_seconds, most)
    splits = [split for split in itertools.product(*(range(1, limit + 1) for limit in most)) if sum(split) == rows]
    assert (found is None) == (not splits)
    if found is None:
        return

    def done(split: tuple[int, ...]) -> float:
        return max(each * count for each, count in zip(row_seconds, split, strict=True))

    assert found in splits
    assert done(found) <= min(map(done, splits)) + 1e-9


def test_equal_ranks_get_as_much_and_the_first_what_is_left() -> None:
    assert share_out(8, [1.0] * 4, [8] * 4) == (2, 2, 2, 2)
    assert share_out(9, [1.0] * 4, [8] * 4) == (3, 2, 2, 2)
    assert share_out(12, [1.0, 0.5], [12, 12]) == (4, 8)
    assert share_out(12, [1.0, 0.5], [12, 5]) == (7, 5)
    assert share_out(2, [1.0] * 3, [6] * 3) is None


def test_a_thousand_ranks_are_no_trouble() -> None:
    found = share_out(8192, [1.0 + rank % 7 / 10 for rank in range(1024)], [64] * 1024)
    assert found is not None
    assert sum(found) == 8192


def test_how_much_memory_holds_by_a_straight_line() -> None:
    assert largest_rows((2, 6), (30, 70), 55, 16) == 4
    assert largest_rows((2, 6), (30, 70), 1000, 16) == 16
    assert largest_rows((2, 6), (30, 70), 9, 16) == 0
    assert largest_rows((2, 2), (30, 30), 30, 16) == 16
    assert largest_rows((2, 6), (30, 30), 29, 16) == 0
