"""A batch's number, and what happens where ranks of a pipeline have different ones."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from lightning_autopar.exact.data.fingerprint import fingerprint
from lightning_autopar.strategies.pipeline.run.stage_shapes import SameBatch
from tests.ranks import run_ranks


@dataclass
class Pair:
    left: Any
    right: Any


class Own:
    def __init__(self, value: Any) -> None:
        self.value = value


LARGE = torch.randn(300, 500, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("batch", "other"),
    [
        (torch.arange(6.0), torch.arange(6.0).flip(0)),
        (torch.zeros(3, dtype=torch.bool), torch.tensor([False, True, False])),
        (torch.zeros(3, dtype=torch.bfloat16), torch.zeros(1, 3, dtype=torch.bfloat16)),
        (torch.tensor([1 + 2j]), torch.tensor([2 + 1j])),
        (LARGE, LARGE + torch.randn(300, 500, generator=torch.Generator().manual_seed(1)).gt(0)),
        (numpy.arange(3), numpy.arange(3)[::-1]),
        ({"x": [1, 2, None]}, {"x": [1, 3, None]}),
        (("a", b"b"), ("b", b"a")),
        (Pair(torch.ones(2), 1), Pair(torch.ones(2), 2)),
        (Own(torch.ones(2)), Own(torch.zeros(2))),
        ({"x": 1, "y": 2}, {"x": 2, "y": 1}),
    ],
)
def test_different_batches_have_different_numbers(batch: Any, other: Any) -> None:
    assert fingerprint(batch) == fingerprint(batch) != fingerprint(other)
    assert 0 <= fingerprint(batch) < 2**62


class Guarded(torch.Tensor):
    """Lets itself be sliced by samples only, as MONAI's batches with different metadata do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            raise ValueError("inconsistent metadata")
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def test_a_tensors_subclass_is_not_asked() -> None:
    assert fingerprint(LARGE.as_subclass(Guarded)) == fingerprint(LARGE)


def test_what_cannot_be_looked_at_counts_nothing() -> None:
    assert fingerprint(object()) == 0
    assert fingerprint({"seconds": 0.5}) == fingerprint({"seconds": 0.7})
    assert fingerprint(numpy.array(["a"], dtype=object)) == fingerprint(numpy.array(["b"], dtype=object))
    assert fingerprint(torch.empty(0)) == fingerprint(torch.empty(0))
    fingerprint(torch.ones(2, 2).to_sparse())


def _compare(rank: int, ranks: int) -> list[str]:
    same = SameBatch(torch.distributed.group.WORLD)  # type: ignore[arg-type]
    said = []
    for number in (5, 2**62 - 1, 7 + rank, 0):
        same.begin(number)
        try:
            same.finish()
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
    same.finish()
    return said


def test_ranks_with_different_batches_all_say_so() -> None:
    for said in run_ranks(_compare, 3):
        assert [bool(each) for each in said] == [False, False, True, False]
        assert "different batches" in said[2]


def test_a_batch_that_holds_itself() -> None:
    """As the stores of a graph of several kinds, which know the graph that they belong to."""
    one, other = SimpleNamespace(x=torch.ones(2)), SimpleNamespace(x=torch.zeros(2))
    one.parent, one.kind = one, Pair
    other.parent = other
    assert fingerprint(one) == fingerprint(one) != fingerprint(other)
