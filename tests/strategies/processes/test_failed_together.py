"""Ranks that have failed ask each other where they are: one answer for all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_autopar.strategies.processes.failed_together import FailedRank
from tests.ranks import run_ranks


def _here() -> None:
    raise ValueError("here")


def _there() -> None:
    raise ValueError("there")


def _failed(rank: int, folder: str, *, batches: int = 3, fails: Callable[[], None] = _here) -> bool:
    try:
        fails()
    except ValueError as error:
        asking = FailedRank(rank=rank, world_size=2, folder=Path(folder))
        return asking.failed_alike(error, batches=batches, timeout_seconds=20)
    raise AssertionError("it should have failed")


def _at_one_place(rank: int, world_size: int, folder: str) -> bool:
    return _failed(rank, folder)


def _in_another_line(rank: int, world_size: int, folder: str) -> bool:
    return _failed(rank, folder, fails=_there if rank else _here)


def _in_another_batch(rank: int, world_size: int, folder: str) -> bool:
    return _failed(rank, folder, batches=3 + rank)


def _with_a_collective_less(rank: int, world_size: int, folder: str) -> bool:
    if rank == 1:
        dist.all_reduce(torch.ones(()), async_op=True)
    return _failed(rank, folder)


@pytest.mark.parametrize(
    ("ranks", "alike"), [(_at_one_place, True), (_in_another_line, False), (_in_another_batch, False), (_with_a_collective_less, False)]
)
def test_ranks_are_at_one_place_or_not(ranks: Callable[..., bool], alike: bool, tmp_path: Path) -> None:
    assert run_ranks(ranks, 2, str(tmp_path)) == [alike, alike]


def test_a_rank_that_comes_too_late_gets_the_answer_of_the_one_that_waited(tmp_path: Path) -> None:
    first, second = (FailedRank(rank=rank, world_size=2, folder=tmp_path) for rank in range(2))
    assert not first.went_on_alike(timeout_seconds=0.01)
    assert not second.went_on_alike(timeout_seconds=20)  # both have said the same by now
