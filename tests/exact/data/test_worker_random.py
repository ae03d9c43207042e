"""What a dataset draws in loader workers is the same after going on in the middle of an epoch, or at its end."""

from __future__ import annotations

import pickle
import random
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lightning_autopar.exact.data.loader import ExactLoader
from lightning_autopar.exact.data.pass_record import WorkerStates, states_of
from lightning_autopar.exact.random import generator_states as rng


class Drawing(Dataset[Any]):
    """Each sample is its index, the worker's number and draws from every generator."""

    def __init__(self) -> None:
        self.own = torch.Generator().manual_seed(5)

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        own = float(torch.rand((), generator=self.own))
        return index, info.id, float(torch.rand(())), random.random(), float(numpy.random.rand()), own


def _loader(workers: int, *, persistent: bool = False) -> ExactLoader:
    loader = DataLoader(
        Drawing(), 4, shuffle=True, num_workers=workers, persistent_workers=persistent, collate_fn=list, multiprocessing_context="fork"
    )
    return ExactLoader(loader, load_all=True)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(("workers", "done"), [(1, 3), (2, 1), (2, 3), (3, 4), (2, 6)])
def test_a_loader_goes_on_with_what_its_workers_would_have_drawn(workers: int, done: int, persistent: bool) -> None:
    torch.manual_seed(1)
    loader = _loader(workers, persistent=persistent)
    whole: list[Any] = []
    state: Any = None
    for number, batch in enumerate(loader, 1):
        whole.append(batch)
        if number == done:
            state = loader.state_dict()
    for _ in range(2):
        whole += list(loader)
    again = _loader(workers, persistent=persistent)
    again.load_state_dict(state)
    torch.manual_seed(99)
    rest = list(again)
    for _ in range(2 if done < 6 else 1):
        rest += list(again)
    assert rest == whole[done:]


def test_other_workers_than_before_begin_anew() -> None:
    torch.manual_seed(1)
    loader = _loader(2)
    batches = iter(loader)
    first = next(batches)
    state = loader.state_dict()
    again = _loader(1)
    again.load_state_dict(state)
    rest = [index for batch in again for index, *_ in batch]
    assert sorted([*rest, *(index for index, *_ in first)]) == list(range(22))


def test_the_states_of_workers_are_those_before_what_is_not_finished() -> None:
    states = WorkerStates(base=7, states=[None, None])
    told = []
    for position in range(30):
        torch.rand(())
        told.append(rng.capture({}, cuda=False))
        states.note(position, pickle.dumps(told[-1]))
    found = states_of(states.at(27))
    for number, position in enumerate((26, 25)):
        assert found[number] is not None
        assert torch.equal(found[number]["torch"], told[position]["torch"])
    assert states_of(WorkerStates(base=7, states=[None, None]).at(0)) == [None, None]


def test_ranks_that_load_the_same_batches_draw_alike_under_lightnings_seeding() -> None:
    found = []
    for rank in (0, 1):  # two stages of one pipeline
        torch.manual_seed(3)
        loader = _loader(1)
        loader.wrapped.worker_init_fn = partial(pl_worker_init_function, rank=rank)
        found.append(list(ExactLoader(loader, load_all=True)))
    assert found[0] == found[1]
