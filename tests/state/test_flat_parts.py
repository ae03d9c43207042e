"""Flat parts of tensors: the boxes that make them up, and what torch.distributed.checkpoint does with these."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from lightning_autopar.state.flat_parts import FlatPart, Fragment, boxes
from tests.ranks import run_ranks


@given(shape=st.lists(st.integers(1, 5), max_size=4), data=st.data())
def test_boxes_make_up_the_range_in_order(shape: list[int], data: st.DataObject) -> None:
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    whole = torch.arange(count).view(shape)
    found = boxes(shape, start, stop)
    assert len(found) <= max(1, 2 * len(shape) - 1)
    values: list[int] = []
    for box in found:
        cut = whole[tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))]
        assert cut.numel() == math.prod(box.sizes)
        assert cut.reshape(-1)[0] == box.start
        values += cut.reshape(-1).tolist()
    assert values == list(range(start, stop))


def test_a_range_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="a tensor of 6 elements has no range from 4 to 7"):
        boxes((2, 3), 4, 7)


SHAPES = {"matrix": (5, 7), "cube": (3, 4, 5), "row": (11,), "number": (), "one": (1, 1)}


def ranges(count: int, world_size: int) -> list[tuple[int, int]]:
    size = -(-count // world_size)
    return [(min(rank * size, count), min((rank + 1) * size, count)) for rank in range(world_size)]


def whole(name: str) -> torch.Tensor:
    return torch.arange(float(math.prod(SHAPES[name]))).view(SHAPES[name]) + 0.5


def test_ranks_write_and_read_their_own_parts(tmp_path: Path) -> None:
    def write(rank: int, world_size: int) -> None:
        state = {}
        for name in SHAPES:
            start, stop = ranges(whole(name).numel(), world_size)[rank]
            if stop > start:
                state[name] = Fragment(whole(name).reshape(-1)[start:stop].clone(), shape=SHAPES[name], start=start)
        dcp.save(state, checkpoint_id=tmp_path / "parts")

    def read(rank: int, world_size: int) -> bool:
        state = {}
        for name in SHAPES:
            start, stop = ranges(whole(name).numel(), world_size)[rank]
            if stop > start:
                state[name] = Fragment(torch.zeros(stop - start), shape=SHAPES[name], start=start)
        dcp.load(state, checkpoint_id=tmp_path / "parts")
        return all(
            torch.equal(part.flat, whole(name).reshape(-1)[slice(*ranges(whole(name).numel(), world_size)[rank])])
            for name, part in state.items()
        )

    run_ranks(write, 3)
    assert run_ranks(read, 2) == [True, True]
    plain = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(plain, checkpoint_id=tmp_path / "parts", no_dist=True)
    for name, value in plain.items():
        assert torch.equal(value, whole(name))


def test_nothing_can_be_computed_with_a_fragment() -> None:
    fragment = Fragment(torch.ones(3), shape=(2, 4), start=2)
    assert tuple(fragment.shape) == (2, 4)
    assert repr(fragment) == "Fragment(elements 2 to 5 of (2, 4))"
    with pytest.raises(TypeError, match="can't be computed with a part of a tensor"):
        fragment.sum()


def test_a_part_knows_its_states_by_shape_and_name() -> None:
    number = FlatPart(parameter=torch.nn.Parameter(torch.tensor(2.0)), shape=(), flat=torch.ones(1), start=0)
    assert number.has_all_of("exp_avg", ())
    assert not number.has_all_of("step", ())
    assert number.is_like(torch.ones(1))
    assert not number.is_like(torch.tensor(1.0))
    row = FlatPart(parameter=torch.nn.Parameter(torch.ones(2, 3)), shape=(2, 3), flat=torch.ones(2), start=3)
    assert row.cut(torch.arange(6.0).view(2, 3)).tolist() == [3, 4]
    assert row.has_all_of("exp_avg", (2, 3))
    assert not row.has_all_of("exp_avg", (3, 2))
