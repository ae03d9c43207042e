"""A rank's rows of a GPU's draw, drawn by themselves: those of the whole draw bit for bit, and the generator where that leaves it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_autopar.exact.data.rank_share import BatchShare, Dealing, cut, share_of
from lightning_autopar.exact.random import drawing_operators as random_ops
from lightning_autopar.exact.random import rows_of_gpu_draws
from lightning_autopar.exact.random.rows_of_gpu_draws import Window, pieces
from lightning_autopar.exact.random.whole_batch_draws import GlobalDraws, whole_like
from lightning_autopar.plans import deal

ONE = Window(elements=100, offset=4, least=76)


@pytest.mark.parametrize(
    ("row", "own", "expected"),
    [
        (250, [0], [(0, 250)]),
        (250, [1], [(200, 500)]),  # from the beginning of its window on
        (250, [3], [(700, 1000)]),
        (250, [1, 2], [(200, 750)]),  # neighbours together
        (250, [0, 3], [(0, 250), (700, 1000)]),
        (250, [0, 1, 3], []),  # all of it is simpler
        (20, [0], []),  # nor is a draw that doesn't fill all threads drawn in windows
        (30, [1], [(0, 76)]),
    ],
)
def test_rows_are_drawn_from_their_window_on(row: int, own: list[int], expected: list[tuple[int, int]]) -> None:
    found = pieces(4 * row, row, own, ONE)
    assert found == expected
    assert all(first % ONE.elements == 0 and end - first >= ONE.least for first, end in found)


# -- on a GPU, as many numbers as fill its threads a few times ---------------------------------------------------------------------------


def window() -> int:
    device = torch.cuda.get_device_properties(0)
    return 4 * 256 * device.multi_processor_count * (device.max_threads_per_multi_processor // 256)


def ranks(dealing: Dealing, samples: int, draw: Callable[[Tensor], Tensor], batch: Tensor) -> tuple[list[Tensor], list[int]]:
    """Each rank's numbers, and where its generator ends."""
    made, ends = [], []
    for rank in range(dealing.holders):
        torch.cuda.manual_seed(11)
        torch.cuda.default_generators[0].set_offset(8)
        share: BatchShare = share_of(samples, rank, dealing)
        with GlobalDraws(lambda share=share: share) as draws:  # type: ignore[misc]
            draws.begin()
            made.append(draw(cut(batch, rank, dealing)))
        ends.append(torch.cuda.default_generators[0].get_offset())
    return made, ends


DRAWS: dict[str, tuple[torch.dtype, Callable[[Tensor], Tensor]]] = {
    "dropout": (torch.float32, lambda x: F.dropout(x, 0.3)),
    "dropout in bf16": (torch.bfloat16, lambda x: F.dropout(x, 0.3)),
    "bernoulli": (torch.float32, lambda x: torch.empty_like(x, dtype=torch.bool).bernoulli_(0.4)),
    "normal": (torch.float32, torch.randn_like),
    "uniform in doubles": (torch.float64, torch.rand_like),
    "uniform in bf16": (torch.bfloat16, torch.rand_like),
}


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "shares"), [*((kind, (1, 1)) for kind in DRAWS), ("dropout", (1, 1, 1, 1)), ("normal", (3, 1))])
def test_they_are_the_whole_draws_rows(kind: str, shares: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    dtype, draw = DRAWS[kind]
    torch.cuda.init()
    samples = 4
    batch = torch.ones(samples, 2 * window() + 8 * 777, device="cuda:0", dtype=dtype)
    torch.cuda.manual_seed(11)
    torch.cuda.default_generators[0].set_offset(8)
    whole, end = draw(batch), torch.cuda.default_generators[0].get_offset()
    dealing = Dealing(deal(shares))
    wholes: list[torch.Size] = []

    def counted(part: Tensor, *arguments: Any) -> Tensor:
        wholes.append(part.shape)
        return whole_like(part, *arguments)

    monkeypatch.setattr(random_ops, "whole_like", counted)
    made, ends = ranks(dealing, samples, draw, batch)
    for rank, numbers in enumerate(made):
        assert torch.equal(numbers, cut(whole, rank, dealing)), rank
    assert set(ends) == {end}
    alone = sum(len(dealing.indices(samples, rank)) <= 2 for rank in range(dealing.holders))
    assert len(wholes) == dealing.holders - alone, "who has three of four samples draws all of them, the others their own"


@pytest.mark.gpu
def test_a_gpu_that_draws_otherwise_makes_whole_draws(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Another release's kernel, say: the trial tells, and the numbers are right all the same."""
    torch.cuda.init()
    right = rows_of_gpu_draws._window
    monkeypatch.setattr(rows_of_gpu_draws, "_PROVEN", {})
    wrong = Window(elements=window(), offset=8, least=right(torch.device("cuda:0"), 4, 4).least)
    monkeypatch.setattr(rows_of_gpu_draws, "_window", lambda device, each, offset: wrong)
    batch = torch.ones(4, window() + 8 * 777, device="cuda:0")
    torch.cuda.manual_seed(11)
    torch.cuda.default_generators[0].set_offset(8)
    whole = torch.randn_like(batch)
    with caplog.at_level(logging.WARNING):
        made, _ = ranks(Dealing.even(4), 4, torch.randn_like, batch)
    assert all(torch.equal(numbers, whole[rank : rank + 1]) for rank, numbers in enumerate(made))
    assert [record.message for record in caplog.records if "normal_ on cuda:0 draws otherwise" in record.message]
