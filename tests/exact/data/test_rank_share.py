"""A rank's rows of a batch: cut out of whatever a batch is made of."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_autopar.exact.data.batch_structure import take_rows
from lightning_autopar.exact.data.collate import CollateAll, CollateRows, CollateSamples
from lightning_autopar.exact.data.rank_share import BatchShare, Dealing, KnownTensors, Tally, cut, share_of
from lightning_autopar.plans import deal

UNEVEN = Dealing(deal((1, 2)))
Pair = namedtuple("Pair", "x y")


@dataclass
class Graph:
    nodes: Tensor
    names: list[str]
    scale: float = 2.0


def batch(rows: int) -> dict[str, Any]:
    numbers = torch.arange(rows)
    return {
        "tensor": numbers * 10,
        "image": torch.arange(rows * 12).view(rows, 2, 3, 2).contiguous(memory_format=torch.channels_last),
        "array": numpy.arange(rows),
        "names": [f"sample {index}" for index in range(rows)],
        "labels": tuple(range(rows)),
        "pair": Pair(numbers, [numbers + 1, numbers.double()]),
        "graph": Graph(numbers, [str(index) for index in range(rows)]),
        "whole": (torch.tensor(3.0), 4, None),
    }


def without_rows(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in tree.items() if name != "whole"}


@given(shares=st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple), rows=st.integers(1, 13))
def test_the_ranks_rows_make_up_the_batch(shares: tuple[int, ...], rows: int) -> None:
    dealing, whole = Dealing(deal(shares)), without_rows(batch(rows))
    for rank in range(len(shares)):
        share = share_of(rows, rank, dealing)
        of, part = take_rows(whole, rank, dealing)
        own = list(share.indices)
        assert of == rows
        assert len(own) == max(share.rows, 1)
        assert part["tensor"].tolist() == [index * 10 for index in own]
        assert torch.equal(part["image"], whole["image"][own])
        assert part["array"].tolist() == own
        assert part["names"] == [f"sample {index}" for index in own]
        assert part["labels"] == tuple(own)
        assert isinstance(part["pair"], Pair)
        assert part["pair"].y[0].tolist() == [index + 1 for index in own]
        assert part["graph"].names == [str(index) for index in own]
        assert part["graph"].scale == 2.0


@given(shares=st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple), rows=st.integers(1, 20), parts=st.integers(1, 4))
def test_the_shares_weights_add_up_to_the_ranks(shares: tuple[int, ...], rows: int, parts: int) -> None:
    dealing = Dealing(deal(shares))
    whole = [share_of(rows, rank, dealing) for rank in range(len(shares))]
    assert sum(share.weight for share in whole) == pytest.approx(len(shares))
    for share in whole:
        pieces = [share.part(number, parts) for number in range(parts)]
        assert sum(piece.rows for piece in pieces) == share.rows
        assert sum(piece.weight for piece in pieces) == pytest.approx(share.weight)
        if share.rows:
            assert sorted(index for piece in pieces if piece.rows for index in piece.indices) == list(share.indices)


@pytest.mark.parametrize(
    "whole",
    [
        torch.arange(12.0),
        torch.arange(7.0).view(7, 1, 1),
        torch.arange(240.0).view(6, 2, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.arange(24.0).view(4, 6).t(),
        torch.arange(24.0).view(2, 6, 2).transpose(0, 1),
    ],
    ids=["flat", "single", "channels last", "transposed", "sequence first"],
)
def test_a_ranks_rows_lie_in_memory_as_the_whole_batchs_do(whole: Tensor) -> None:
    def order(tensor: Tensor) -> list[int]:
        return sorted(range(tensor.ndim), key=lambda dim: (-tensor.stride(dim), dim))

    for dealing in (UNEVEN, Dealing.even(2)):
        for rank in range(2):
            part = cut(whole, rank, dealing)
            assert torch.equal(part, whole[list(dealing.indices(len(whole), rank))])
            assert order(part) == order(whole)
            if whole.is_contiguous():
                assert part.is_contiguous()  # a user's step may say view(-1)


def test_a_rank_without_samples_gets_the_first() -> None:
    assert cut([7], 0, UNEVEN) == cut([7], 1, UNEVEN) == [7]
    assert share_of(1, 0, UNEVEN).rows == 0
    assert list(share_of(1, 0, UNEVEN).indices) == [0]
    assert BatchShare(rows=0, of=1, rank=0, world_size=2).weight == 0


def test_what_belongs_to_the_batch_as_a_whole_stays() -> None:
    _, part = take_rows(batch(5), 1, UNEVEN)
    assert part["whole"][0] == 3.0
    assert part["whole"][1:] == (4, None)


def test_collated_by_samples_all_or_rows_a_rank_has_the_same() -> None:
    samples = list(torch.arange(14.0).view(7, 2))
    for rank in range(2):
        rows = [CollateSamples(torch.stack, rank, UNEVEN)(samples), CollateAll(torch.stack, rank, UNEVEN)(samples)]
        rows.append(CollateRows(None, rank, UNEVEN)(torch.stack(samples)))
        for of, part in rows:
            assert of == 7
            assert torch.equal(part, torch.stack(samples)[list(UNEVEN.indices(7, rank))])


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="a list of 3 values in a batch of 4 samples can't be split"):
        take_rows([torch.zeros(4), ["a", "b", "c"]], 0, UNEVEN)
    with pytest.raises(ValueError, match="a set in a batch can't be split: it is no tensor"):
        take_rows([torch.zeros(4), {1, 2}], 0, UNEVEN)
    with pytest.raises(ValueError, match="has no batch dimension"):
        take_rows([torch.zeros(4), torch.zeros(3)], 0, UNEVEN)


def test_batches_with_other_tensors_than_those_that_were_tried_are_named() -> None:
    x, y = torch.ones(4, 3), torch.ones(4)
    known = KnownTensors.of([({"x": x, "boxes": [{"at": x}] * 4, "name": "a", "pair": (x, y)}, 4), ({"x": x}, 4)])
    for batch in ({"x": y[:, None]}, {"x": x, "boxes": [{"at": x}] * 2, "name": 3, "pair": (x, y), "number": 5.0}):
        known.check(batch)
    with pytest.raises(ValueError, match=r"^this batch has batch\['w'\] of 1 dimensions, unlike"):
        known.check({"x": x, "w": y})
    with pytest.raises(ValueError, match=r"^this batch has batch\['x'\] of 1 dimensions and lacks batch\['x'\] of 2 dimensions, unlike"):
        known.check({"x": y})


def test_a_batch_that_runs_in_one_part_has_its_tally_whatever_its_rows_are() -> None:
    boxes = Tally(own=19.0, of_all=lambda: 19.0, samples=lambda: [1.0] * 19)
    assert boxes.part(0, 1, 8) is boxes
    with pytest.raises(ValueError, match="counts for 19 rows, but 8 samples"):
        boxes.part(0, 2, 8)
