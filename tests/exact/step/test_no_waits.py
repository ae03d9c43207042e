"""What a step does on a device doesn't have the host wait for it: shown on ``meta`` tensors, without a GPU."""

from __future__ import annotations

import pytest
import torch

from lightning_autopar.exact.data.rank_share import Dealing, cut, index_of, share_of
from lightning_autopar.exact.logs.combined_values import OPTIONS, Combiner, Entry
from lightning_autopar.exact.random.whole_batch_draws import GlobalDraws, Rows, pick_rows, scatter_rows
from lightning_autopar.exact.step.micro_batches import joined
from lightning_autopar.plans import deal
from tests.blocking import Blocking

UNEVEN = Dealing(deal((3, 1)))


def test_the_counter_sees_a_blocking_copy() -> None:
    with Blocking() as blocking:
        torch.tensor([1.0]).to("meta")
    assert blocking.found


def entry(name: str, reduce_fx: str, rows: int) -> Entry:
    options = tuple(reduce_fx if option == "reduce_fx" else False for option in OPTIONS)
    return Entry(
        collection=0, fx="training_step", name=name, options=options, dataloader_idx=None, is_metric=False,
        value=torch.zeros((), device="meta"), rows=rows, of=5, batch_size=rows,
    )  # fmt: skip


def test_what_parts_log_is_brought_together_on_the_device() -> None:
    parts = [[entry(kind, kind, rows) for kind in ("mean", "sum", "max", "min")] for rows in (3, 2)]
    with Blocking() as blocking:
        found = Combiner().fold(parts)
    assert all(each.value is not None and each.value.is_meta for each in found)
    assert not blocking.found


def test_what_parts_return_is_brought_together_on_the_device() -> None:
    parts = [{"prediction": torch.zeros(rows, 2, device="meta"), "number": torch.zeros((), device="meta")} for rows in (3, 2)]
    with Blocking() as blocking:
        whole = joined(parts, [3, 2])
    assert whole["prediction"].shape == (5, 2)
    assert not blocking.found


def test_a_ranks_rows_of_a_draw_are_picked_on_the_device() -> None:
    share = share_of(8, 0, UNEVEN)
    assert isinstance(share.indices, tuple), "a slice would need no index"
    whole, part = torch.zeros(8, 3, device="meta"), torch.zeros(share.rows, 3, device="meta")
    with Blocking() as blocking:
        pick_rows(whole, part, Rows(dim=0), share)
        scatter_rows(part, whole, Rows(dim=0), share)
        cut(whole, 0, UNEVEN)
    assert not blocking.found
    assert index_of(share.indices, whole.device) is index_of(share.indices, whole.device), "copied to the device once"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_permutation_of_the_samples_asks_for_no_number(rank: int) -> None:
    share = share_of(8, rank, UNEVEN)
    torch.manual_seed(3)
    whole = torch.randperm(8).tolist()
    torch.manual_seed(3)
    with GlobalDraws(lambda: share), Blocking() as blocking:
        own = torch.randperm(share.rows)
    places = list(share.indices)
    assert own.tolist() == [places.index(sample) for sample in whole if sample in places]
    assert not blocking.found
