"""What a batch counts, and what its parts weigh by it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from lightning_autopar.exact.data.counted_entries import BatchCounts, Count, candidates
from lightning_autopar.exact.data.rank_share import BatchShare, Dealing, share_of

IDS = torch.tensor([[5, 6, 7, 8], [5, 6, 3, 3], [5, 3, 3, 3], [5, 6, 7, 3]])
LABELS = Count(path=("labels",), kind="differs", ignored=3, without="first")
MASK = Count(path=("mask",), kind="sum", without="first")
LOSS = ("training_step", "")


def batch(ids: torch.Tensor = IDS) -> dict[str, Any]:
    return {"labels": ids, "mask": (ids != 3).float()}


@pytest.mark.parametrize(
    ("count", "number", "words"),
    [
        (Count(path=("ids",), kind="differs", ignored=3), 10.0, "batch.ids != 3"),
        (Count(path=("ids",), kind="differs", ignored=3, without="first"), 6.0, "batch.ids[:, 1:] != 3"),
        (Count(path=("ids",), kind="differs", ignored=3, without="last"), 9.0, "batch.ids[:, :-1] != 3"),
        (Count(path=("more", 0), kind="sum"), 4.5, "the sum of batch.more[0]"),
        (Count(path=("more", 1, "y"), kind="finite"), 2.0, "batch.more[1].y that aren't NaN"),
        (Count(path=("more", 1, "y"), kind="rows"), 3.0, "the rows of batch.more[1].y"),
    ],
)
def test_counts_of_whatever_a_batch_is_made_of(count: Count, number: float, words: str) -> None:
    more = [numpy.array([0.5, 4.0]), SimpleNamespace(y=torch.tensor([1.0, torch.nan, 2.0]))]
    assert count.total({"ids": IDS, "more": more}) == number
    assert str(count) == words


def test_labels_come_before_masks_and_other_numbers() -> None:
    found = [str(count) for count in candidates({"mask": (IDS != 3).long(), "labels": IDS}, 4, (3,))]
    assert found.index("batch.labels != 3") < found.index("batch.mask != 0")
    assert "the rows of batch.labels" not in found  # these are the samples


def test_parts_of_a_ranks_samples_weigh_by_what_they_hold() -> None:
    ranks = [batch(IDS[::2]), batch(IDS[1::2])]
    everyones = [[LABELS.total(each)] for each in ranks]
    shares = []
    for rank, own in enumerate(ranks):
        counts = BatchCounts({LOSS: LABELS}, lambda numbers: lambda: everyones)
        share = share_of(4, rank, Dealing.even(2))
        counts.arrives("training_step", own, [share], in_parts=True)
        shares.append(counts.on(share))
    assert [share.weight for share in shares] == [2 * 3 / 6, 2 * 3 / 6]
    assert [shares[0].part(number, 2).fraction() for number in range(2)] == [3 / 6, 0.0]
    assert [shares[1].part(number, 3).weight for number in range(3)] == [2 * 1 / 6, 2 * 2 / 6, 0.0]


def test_a_batch_in_which_nothing_counts_weighs_by_samples() -> None:
    counts = BatchCounts({LOSS: LABELS}, lambda numbers: lambda: [[0.0], [0.0]])
    counts.arrives("training_step", batch(torch.full((2, 4), 3)), [share := share_of(3, 0, Dealing.even(2))], in_parts=False)
    assert counts.on(share).weight == 2 * 2 / 3


def test_a_rank_without_samples_weighs_nothing() -> None:
    counts = BatchCounts({LOSS: LABELS}, lambda numbers: lambda: [[3.0], numbers])
    share = share_of(1, 1, Dealing.even(2))
    counts.arrives("training_step", batch(IDS[:1]), [share], in_parts=False)
    assert counts.on(share).weight == 0.0


def test_a_sum_is_added_up() -> None:
    counts = BatchCounts({LOSS: "sum"}, lambda numbers: list)
    counts.arrives("training_step", batch(), [], in_parts=False)
    assert [counts.on(share_of(3, rank, Dealing.even(4))).weight for rank in range(4)] == [4.0, 4.0, 4.0, 0.0]


def test_only_batches_in_which_something_counts_are_counted() -> None:
    assert not BatchCounts({LOSS: "mean", ("training_step", "accuracy"): "mean"}, None).needed
    assert BatchCounts({LOSS: "sum"}, None).needed
    assert BatchCounts({("validation_step", "accuracy"): LABELS}, None).needed


def test_all_ranks_stop_where_one_lacks_what_counts() -> None:
    counts = BatchCounts({LOSS: LABELS}, lambda numbers: lambda: [numbers, [float("nan")]])
    counts.arrives("training_step", batch(IDS[::2]), [share := share_of(4, 0, Dealing.even(2))], in_parts=False)
    with pytest.raises(ValueError, match=r"a mean over batch.labels\[:, 1:\] != 3, but this batch, or a rank's part of it, has no such"):
        counts.on(share).fraction()


@pytest.mark.parametrize("in_parts", [False, True])
def test_what_planning_could_not_tell_apart_has_to_agree(in_parts: bool) -> None:
    both = Count(path=LABELS.path, kind="differs", ignored=3, without="first", alike=(MASK,))
    gather = None if in_parts else lambda numbers: lambda: [numbers, [3.0, 3.0]]
    whole = share_of(2, 0, Dealing.even(1 if in_parts else 2))
    counts = BatchCounts({LOSS: both}, gather)
    counts.arrives("training_step", batch(IDS[:2]), [whole], in_parts=in_parts)
    assert counts.on(whole).fraction() == (1.0 if in_parts else 4 / 7)
    other = batch(IDS[:2]) | {"mask": torch.ones(2, 4)}

    def counted() -> float:
        counts.arrives("training_step", other, [whole], in_parts=in_parts)
        return counts.on(whole).fraction()

    with pytest.raises(ValueError, match="They had equal counts in all batches that planning looked at"):
        counted()


def test_a_share_of_rows_that_are_no_samples_has_no_parts() -> None:
    counts = BatchCounts({LOSS: Count(path=("x",), kind="rows")}, None)
    counts.arrives("training_step", {"x": torch.ones(7, 2)}, [], in_parts=False)
    share = counts.on(BatchShare(rows=3, of=3, rank=0, world_size=1))
    assert share.fraction() == 1.0
    with pytest.raises(ValueError, match="counts for 7 rows, but 3 samples"):
        share.part(0, 2)
