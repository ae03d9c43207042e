"""The exact loader against the plain DataLoader: same order, same random states, nothing lost or repeated, resumable anywhere."""

import copy
import functools
import logging
import random
from dataclasses import dataclass

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from lightning_autopar.exact.data import batch_order as order_module
from lightning_autopar.exact.data.loader import ExactLoader, is_loader_state
from lightning_autopar.exact.data.pass_record import EpochProgress
from lightning_autopar.exact.data.rank_share import BatchShare, Dealing
from lightning_autopar.plans import deal


class Numbers(Dataset):
    """Sample i is the number i; remembers what was asked for."""

    def __init__(self, size):
        self.size = size
        self.asked = []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.asked.append(index)
        return torch.tensor(index)


class Augmented(Numbers):
    """Each sample draws from all of the process's generators."""

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()).item(), random.random(), numpy.random.rand()], dtype=torch.float64)


class Batches(Numbers):
    """Item i is a whole batch: 3i, 3i+1, 3i+2, but the last is shorter."""

    def __getitem__(self, index):
        rows = torch.arange(3 * index, 3 * index + (1 if index == self.size - 1 else 3))
        return {"x": rows, "names": [f"s{row}" for row in rows.tolist()], "scale": 0.5, "shape": torch.tensor(7)}


class Stream(IterableDataset):
    """The numbers below ``size``, sharded over workers by the dataset itself."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        yield from (torch.tensor(number) for number in range(first, self.size, step))


class ShuffledStream(IterableDataset):
    """A shuffle buffer of 4 that draws from the global random state at every sample."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        buffer = []
        for number in range(self.size):
            buffer.append(number)
            if len(buffer) == 4:
                yield torch.tensor(buffer.pop(int(torch.randint(4, ()))))
        while buffer:
            yield torch.tensor(buffer.pop(random.randrange(len(buffer))))


class LateSampler(Sampler):
    """Draws each index, without replacement, only when it is asked for."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __iter__(self):
        left = list(range(self.size))
        while left:
            yield left.pop(int(torch.randint(len(left), ())))


class EagerSampler(LateSampler):
    """Draws the whole order when its iterator is made."""

    def __iter__(self):
        return iter(torch.randperm(self.size).tolist())


class NumpySampler(LateSampler):
    """Has a generator of its own, which goes on from epoch to epoch."""

    def __init__(self, size):
        super().__init__(size)
        self.chance = numpy.random.default_rng(3)

    def __iter__(self):
        return iter(self.chance.permutation(self.size).tolist())


class PairSampler(Sampler):
    """A batch sampler of batches of unequal sizes, in tuples."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return 4

    def __iter__(self):
        order = torch.randperm(self.size).tolist()
        yield from (tuple(order[:3]), tuple(order[3:4]), tuple(order[4:9]), tuple(order[9:]))


class OwnIteration(DataLoader):
    """A loader that isn't a plain DataLoader any more."""

    def __iter__(self):
        for batch in super().__iter__():
            yield {"x": batch}


def _seeded(seed):
    generator = torch.Generator()
    generator.manual_seed(seed)
    return generator


def _shared_generator():
    generator = _seeded(4)
    return DataLoader(Numbers(17), batch_size=3, shuffle=True, generator=generator)


MAP_LOADERS = {
    "in sequence": lambda: DataLoader(Numbers(14), batch_size=3),
    "shuffle": lambda: DataLoader(Numbers(14), batch_size=3, shuffle=True),
    "drop_last": lambda: DataLoader(Numbers(14), batch_size=3, shuffle=True, drop_last=True),
    "sampler": lambda: DataLoader(Numbers(14), batch_size=3, sampler=SubsetRandomSampler([1, 3, 5, 7, 9, 11, 13])),
    "weighted": lambda: DataLoader(Numbers(14), batch_size=3, sampler=WeightedRandomSampler(torch.arange(1.0, 15.0), 14)),
    "replacement": lambda: DataLoader(Numbers(14), batch_size=3, sampler=RandomSampler(range(14), replacement=True, num_samples=40)),
    "replacement from a generator": lambda: DataLoader(
        Numbers(14), batch_size=9, sampler=RandomSampler(range(14), replacement=True, num_samples=100, generator=_seeded(1))
    ),
    "batch_sampler": lambda: DataLoader(Numbers(14), batch_sampler=BatchSampler(RandomSampler(range(14)), 4, False)),
    "own batch_sampler": lambda: DataLoader(Numbers(14), batch_sampler=PairSampler(14)),
    "late sampler": lambda: DataLoader(Numbers(14), batch_size=3, sampler=LateSampler(14)),
    "eager sampler": lambda: DataLoader(Numbers(14), batch_size=3, sampler=EagerSampler(14)),
    "numpy sampler": lambda: DataLoader(Numbers(14), batch_size=3, sampler=NumpySampler(14)),
    "generator": _shared_generator,
    "augmented": lambda: DataLoader(Augmented(14), batch_size=3, shuffle=True),
    "batch_size=None": lambda: DataLoader(Batches(5), batch_size=None, shuffle=True),
    "distributed sampler of one": lambda: DataLoader(
        Numbers(14), batch_size=3, sampler=DistributedSampler(Numbers(14), num_replicas=1, rank=0)
    ),
}
STREAM_LOADERS = {
    "iterable": lambda: DataLoader(Stream(14), batch_size=3),
    "iterable, drop_last": lambda: DataLoader(Stream(14), batch_size=3, drop_last=True),
    "shuffled iterable": lambda: DataLoader(ShuffledStream(14), batch_size=3),
    "own iteration": lambda: OwnIteration(Numbers(14), batch_size=3, shuffle=True),
}
WORKER_LOADERS = {
    "workers": lambda: DataLoader(Augmented(14), batch_size=3, shuffle=True, num_workers=2),
    "persistent workers": lambda: DataLoader(Augmented(14), batch_size=3, shuffle=True, num_workers=2, persistent_workers=True),
    "persistent workers, eager": lambda: DataLoader(
        Numbers(14), batch_size=3, sampler=EagerSampler(14), num_workers=1, persistent_workers=True
    ),
    "workers, late sampler": lambda: DataLoader(Numbers(20), batch_size=3, sampler=LateSampler(20), num_workers=2, prefetch_factor=1),
    "workers, generator": lambda: DataLoader(Augmented(14), batch_size=3, shuffle=True, num_workers=1, generator=_seeded(9)),
    "workers, iterable": lambda: DataLoader(Stream(14), batch_size=3, num_workers=2),
}
LOADERS = MAP_LOADERS | STREAM_LOADERS


def _seed(seed):
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def _rng():
    state = numpy.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), (state[0], state[1].tolist(), *state[2:])


def _plain(batch):
    """Tensors as lists, for comparison."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {name: _plain(value) for name, value in batch.items()}
    return [_plain(item) for item in batch] if isinstance(batch, (list, tuple)) else batch


def _step():
    """What a training step draws."""
    torch.rand(3)
    random.random()
    numpy.random.rand()


def _epoch(loader, epoch=0):
    """The batches of an epoch with a step's draws after each, as Lightning runs it: a sized loader isn't asked for one more batch."""
    _set_sampler_epoch(loader, epoch)
    iterator = iter(loader)
    torch.rand(2)  # a hook between iter() and the first batch
    try:
        length = len(loader)
    except TypeError:
        length = 10**9
    batches = []
    while len(batches) < length and (batch := next(iterator, iterator)) is not iterator:
        batches.append(_plain(batch))
        _step()
    return batches


class Lockstep:
    """Ranks run one after another: rank 0's broadcasts are kept for the others."""

    def __init__(self):
        self.sent = []

    def of(self, rank):
        if rank == 0:
            return self._send
        return functools.partial(self._receive, iter(list(self.sent)))

    def _send(self, value):
        self.sent.append(copy.deepcopy(value))
        return value

    def _receive(self, sent, value):
        return copy.deepcopy(next(sent))


def _ranks(make, world_size, *, state=None, epochs=1, **settings):
    """Every rank's loader, batches (with their shares) and final random state."""
    lockstep = Lockstep()
    runs = []
    for rank in range(world_size):
        _seed(7 if rank == 0 else 1000 + rank)
        loader = ExactLoader(make(), rank=rank, world_size=world_size, sync=lockstep.of(rank) if world_size > 1 else None, **settings)
        if state is not None:
            loader.load_state_dict(state)
        batches = []
        for epoch in range(epochs):
            for batch in _epoch(loader, epoch):
                batches.append((batch, loader.shares.popleft()))
        runs.append((loader, batches, _rng()))
    return runs


def _numbers(batch):
    """The samples' numbers of a batch of any of the datasets above."""
    rows = batch["x"] if isinstance(batch, dict) else batch
    return [int(row[0]) if isinstance(row, list) else row for row in rows]


def _merge(parts):
    """The global batch of the ranks' parts, each with its share."""
    of = parts[0][1].of
    whole = [None] * of
    for batch, share in parts:
        assert share.of == of
        numbers = _numbers(batch)
        if share.rows == 0:
            assert len(numbers) == 1
            continue
        assert len(numbers) == share.rows
        for place, number in zip(share.indices, numbers, strict=True):
            whole[place] = number
    return whole


@pytest.mark.parametrize("name", LOADERS | WORKER_LOADERS)
def test_one_process_gets_the_plain_loaders_batches_and_random_state(name):
    make = (LOADERS | WORKER_LOADERS)[name]
    _seed(7)
    plain = make()
    expected = [_epoch(plain, epoch) for epoch in range(3)], _rng()
    _seed(7)
    loader = ExactLoader(make())
    assert [_epoch(loader, epoch) for epoch in range(3)] == expected[0]
    assert _rng() == expected[1]


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("shares", [(1, 1), (1, 1, 1), (1, 1, 1, 1), (1, 2), (3, 1, 2)])
def test_ranks_parts_make_up_the_global_batches(name, shares):
    make = LOADERS[name]
    _seed(7)
    plain = make()
    expected = [_numbers(batch) for epoch in range(2) for batch in _epoch(plain, epoch)]
    world_size = len(shares)
    runs = _ranks(make, world_size, epochs=2, dealing=Dealing(deal(shares)))
    rounds = list(zip(*(batches for _, batches, _ in runs), strict=True))
    if name != "augmented":  # whose draws in this process ranks can't share: see the two tests below
        assert [_merge(parts) for parts in rounds] == expected
    for parts in rounds:
        assert sum(share.weight for _, share in parts) == pytest.approx(world_size)
    assert all(state == runs[0][2] for _, _, state in runs)


def test_an_iterable_that_is_no_dataloader_answers_what_lightning_asks():
    class Batches:
        def __iter__(self):
            return iter([torch.zeros(4)])

    loader = ExactLoader(Batches())
    assert (loader.num_workers, loader.multiprocessing_context, loader.persistent_workers, loader.pin_memory) == (0, None, False, False)
    with pytest.raises(AttributeError, match="batch_size"):
        loader.batch_size  # noqa: B018


def test_augmentation_leaves_the_ranks_random_state_equal_and_differs_between_them():
    def make():
        return DataLoader(Augmented(8), batch_size=4)

    (_, first, one), (_, second, two) = _ranks(make, 2)
    assert one == two
    draws = [row[1] for batches in (first, second) for batch, _ in batches for row in batch]
    assert len(set(draws)) == 8


def test_load_all_draws_as_one_process():
    make = MAP_LOADERS["augmented"]
    _seed(7)
    expected = _epoch(make()), _rng()
    for dealing in (Dealing.even(3), Dealing(deal((1, 3, 2)))):
        runs = _ranks(make, 3, load_all=True, dealing=dealing)
        for rank, (_, batches, state) in enumerate(runs):
            assert state == expected[1]
            own = [[batch[index] for index in dealing.indices(len(batch), rank)] for batch in expected[0]]
            assert [batch for batch, share in batches if share.rows] == [batch for batch in own if batch]


def test_only_the_ranks_own_samples_are_loaded():
    loader, _, _ = _ranks(lambda: DataLoader(Numbers(12), batch_size=4), 2)[1]
    assert loader.dataset.asked == [1, 3, 5, 7, 9, 11]


def test_rank_without_a_sample_is_fed_the_first_and_weighs_nothing():
    runs = _ranks(lambda: DataLoader(Numbers(5), batch_size=4), 3)
    assert [share.rows for _, batches, _ in runs for _, share in batches[-1:]] == [1, 0, 0]
    assert [batches[-1][0] for _, batches, _ in runs] == [[4], [4], [4]]
    assert runs[1][1][1][1] == BatchShare(rows=0, of=1, rank=1, world_size=3)
    assert runs[0][1][1][1].weight == 3


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 40),
    batch_size=st.integers(1, 9),
    before=st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple),
    after=st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple),
    shuffle=st.booleans(),
    data=st.data(),
)
def test_nothing_is_lost_or_repeated_over_a_resume_with_other_shares(size, batch_size, before, after, shuffle, data):
    def make():
        return DataLoader(Numbers(size), batch_size=batch_size, shuffle=shuffle)

    stop = data.draw(st.integers(0, len(make()) - 1))
    lockstep, done, state = Lockstep(), [], None
    for rank in range(len(before)):
        _seed(7 if rank == 0 else rank)
        loader = ExactLoader(make(), rank=rank, world_size=len(before), dealing=Dealing(deal(before)), sync=lockstep.of(rank))
        iterator = iter(loader)
        for _ in range(stop):
            batch = next(iterator).tolist()
            done += batch if loader.shares.popleft().rows else []
        state = state or loader.state_dict()
    for loader, batches, _ in _ranks(make, len(after), state=state, dealing=Dealing(deal(after))):
        done += [number for batch, share in batches if share.rows for number in batch]
        assert len(batches) + stop == len(loader)
    assert sorted(done) == list(range(size))


@pytest.mark.parametrize("name", LOADERS | {name: make for name, make in WORKER_LOADERS.items() if "Augmented" not in repr(make)})
def test_resume_at_every_position_is_the_uninterrupted_run(name, tmp_path):
    make = (LOADERS | WORKER_LOADERS)[name]
    augments_in_workers = name in ("workers", "persistent workers", "workers, generator")
    _seed(7)
    loader = ExactLoader(make())
    expected, states, count = [_epoch(loader, 0)], [], 0
    iterator = _steps(loader, 1)
    second = []
    while True:
        states.append(loader.state_dict())
        batch = next(iterator, None)
        if batch is None:
            break
        second.append(batch)
        count += 1
    expected += [second, _epoch(loader, 2)]
    end = _rng()
    stops = range(count) if name not in WORKER_LOADERS else (1, count - 1)
    for stop in stops:
        path = tmp_path / f"{stop}.pt"
        torch.save(states[stop], path)
        _seed(99)
        resumed = ExactLoader(make())
        resumed.load_state_dict(torch.load(path, weights_only=True))
        assert resumed.state_dict()["finished"] == stop
        rest = list(_steps(resumed, 1))
        last = _epoch(resumed, 2)
        if augments_in_workers:
            assert [[_numbers(batch) for batch in epoch] for epoch in (rest, last)] == [
                [_numbers(batch) for batch in epoch] for epoch in (second[stop:], expected[2])
            ]
        else:
            assert (rest, last) == (second[stop:], expected[2])
        if not name.startswith("persistent"):  # a new process must start its workers, which draws a seed from the random state
            assert _rng() == end


def _steps(loader, epoch):
    """The batches of an epoch, a step's draws after each; the state may be asked for whenever this stands still."""
    _set_sampler_epoch(loader, epoch)
    iterator = iter(loader)
    length = len(loader) if not isinstance(loader.dataset, IterableDataset) else 10**9
    skipped = loader.state_dict()["finished"]
    for _ in range(length - skipped):
        batch = next(iterator, None)
        if batch is None:
            return
        batch = _plain(batch)
        _step()
        yield batch


def test_resume_finds_the_random_state_of_the_boundary():
    _seed(7)
    loader = ExactLoader(MAP_LOADERS["shuffle"]())
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
        _step()
    state, at_boundary = loader.state_dict(), _rng()
    seen = []
    _seed(3)
    resumed = ExactLoader(MAP_LOADERS["shuffle"](), boundary=lambda position: seen.append((position, _rng())))
    resumed.load_state_dict(state)
    rest = iter(resumed)
    torch.rand(5)  # whatever a start-up draws
    next(rest)
    assert seen == [(2, at_boundary)]


def test_pause_at_the_boundary_is_a_state_before_that_batch():
    class Pause(BaseException):
        pass

    def stop(position):
        if position == 3 and armed:
            raise Pause

    armed = True
    _seed(7)
    loader = ExactLoader(MAP_LOADERS["late sampler"](), boundary=stop)
    with pytest.raises(Pause):
        _epoch(loader)
    state = loader.state_dict()
    assert state["finished"] == 3
    # At once again, at the first boundary after the resume: the state is still the same.
    again = ExactLoader(MAP_LOADERS["late sampler"](), boundary=stop)
    again.load_state_dict(state)
    _seed(1)
    with pytest.raises(Pause):
        _epoch(again)
    second = again.state_dict()
    armed = False
    _seed(7)
    expected = _epoch(MAP_LOADERS["late sampler"]())
    end = _rng()
    for saved in (state, second):
        _seed(5)
        resumed = ExactLoader(MAP_LOADERS["late sampler"](), boundary=stop)
        resumed.load_state_dict(saved)
        assert list(_steps(resumed, 0)) == expected[3:]
        assert _rng() == end


@dataclass
class Counter:
    """A trainer's counters, set by hand."""

    started: int = 0
    finished: int = 0
    last: bool = False

    def __call__(self):
        return EpochProgress(started=self.started, finished=self.finished, last=self.last)


@pytest.mark.parametrize("name", ["augmented", "late sampler", "shuffled iterable", "workers, late sampler"])
@pytest.mark.parametrize("running", [False, True])
def test_batches_fetched_ahead_are_not_lost(name, running):
    """The trainer fetches a batch ahead, as Lightning does for a loader without a length; the state is asked for in or after a step."""
    make = (LOADERS | WORKER_LOADERS)[name]

    def run(loader, counter, stop=None):
        batches, state = [], None
        iterator = iter(loader)
        ahead = next(iterator, None)
        while ahead is not None:
            batch, ahead = ahead, next(iterator, None)
            counter.started += 1
            if running and counter.started == stop:
                torch.rand(1)  # in the middle of the step
                return batches, loader.state_dict()
            batches.append(_plain(batch))
            _step()
            counter.finished += 1
            if not running and counter.finished == stop:
                return batches, loader.state_dict()
        return batches, state

    _seed(7)
    expected = run(ExactLoader(make(), progress=(counter := Counter())), counter)[0], _rng()
    for stop in (1, 2, 4):
        _seed(7)
        done, state = run(ExactLoader(make(), progress=(counter := Counter())), counter, stop)
        _seed(55)
        counter = Counter(started=len(done), finished=len(done))
        resumed = ExactLoader(make(), progress=counter)
        resumed.load_state_dict(state)
        rest, _ = run(resumed, counter)
        assert (done + rest, _rng()) == expected


def test_state_at_an_epochs_end_begins_the_next():
    _seed(7)
    make = MAP_LOADERS["shuffle"]
    counter = Counter()
    loader = ExactLoader(make(), progress=counter)
    iterator = iter(loader)
    for number in range(3):  # an epoch cut short, as limit_train_batches does
        next(iterator)
        counter.started = counter.finished = number + 1
    counter.last = True
    state = loader.state_dict()
    counter.started, counter.finished, counter.last = 0, 0, False
    expected = [_plain(batch) for batch in loader]
    _seed(1)
    resumed = ExactLoader(make(), progress=counter)
    resumed.load_state_dict(state)
    assert [_plain(batch) for batch in resumed] == expected
    assert len(expected) == len(loader)


@pytest.mark.parametrize("progress", [None, lambda: EpochProgress(started=5, finished=5, last=True)])
def test_state_after_a_sized_loaders_last_batch_is_an_epochs_end(progress):
    loader = ExactLoader(MAP_LOADERS["shuffle"](), progress=progress)
    iterator = iter(loader)
    for _ in range(len(loader)):
        next(iterator)
    resumed = ExactLoader(MAP_LOADERS["shuffle"]())
    resumed.load_state_dict(loader.state_dict())
    assert len(list(resumed)) == len(loader)


def test_shares_that_nobody_took_are_forgotten_with_their_epoch():
    loader = ExactLoader(MAP_LOADERS["shuffle"]())
    _epoch(loader)
    assert len(loader.shares) == len(loader)
    next(iter(loader))
    assert len(loader.shares) == 1


def test_positions_go_on_after_a_resume_and_begin_again_with_an_epoch():
    seen = []
    loader = ExactLoader(MAP_LOADERS["shuffle"](), boundary=seen.append)
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    resumed = ExactLoader(MAP_LOADERS["shuffle"](), boundary=seen.append)
    resumed.load_state_dict(loader.state_dict())
    _epoch(resumed)
    list(resumed)
    assert seen == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5][: len(seen)]
    assert resumed.shares[0].of == 3


def test_positions_count_on_where_a_shorter_loader_is_cycled():
    counter, seen = Counter(), []
    loader = ExactLoader(DataLoader(Numbers(4), batch_size=2), progress=counter, boundary=seen.append)
    for _ in range(2):
        for _ in loader:
            counter.started += 1
            counter.finished += 1
    assert seen == [0, 1, 2, 2, 3, 4]  # a boundary also stands before the end is found
    assert [share.rows for share in loader.shares] == [2] * 4, "the epoch is one, though the loader has begun anew in it"


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", ["in sequence", "shuffle", "own batch_sampler", "batch_size=None", "iterable", "own iteration"])
def test_whole_batches_go_round(name, world_size):
    make = LOADERS[name]
    _seed(7)
    expected = [_numbers(batch) for batch in _epoch(make())]
    found = {}
    for _, batches, _ in _ranks(make, world_size, whole_batches=True):
        assert len(batches) == -(-len(expected) // world_size)
        for position, (batch, share) in enumerate(batches):
            index = min(position * world_size + share.rank, len(expected) - 1)
            assert _numbers(batch) == expected[index]
            if share.rows:
                assert index == position * world_size + share.rank
                assert share.rows == share.of == len(expected[index])
                found[index] = True
    assert sorted(found) == list(range(len(expected)))


def test_loader_looks_like_the_users():
    dataset, collate = Numbers(9), list
    plain = DataLoader(dataset, batch_size=4, shuffle=True, collate_fn=collate, drop_last=True, generator=_seeded(2), timeout=0)
    loader = ExactLoader(plain)
    assert isinstance(loader, DataLoader)
    for name in ("dataset", "sampler", "batch_sampler", "batch_size", "num_workers", "collate_fn", "drop_last", "generator", "pin_memory"):
        assert getattr(loader, name) is getattr(plain, name)
    assert loader.multiprocessing_context is None
    assert len(loader) == len(plain) == 2
    loader.worker_init_fn = print  # Lightning sets it after the strategy wrapped the loader
    assert plain.worker_init_fn is print
    with pytest.raises(AttributeError, match="no_such"):
        _ = loader.no_such
    assert copy.copy(loader).dataset is dataset
    assert ExactLoader(loader).wrapped is plain
    with pytest.raises(TypeError):
        len(ExactLoader(DataLoader(Stream(3))))


def test_set_epoch_reaches_the_sampler_also_on_a_resume():
    def make():
        return DataLoader(Numbers(14), batch_size=3, sampler=DistributedSampler(Numbers(14), num_replicas=1, rank=0))

    loader = ExactLoader(make())
    iterator = _steps(loader, 5)
    next(iterator)
    state = loader.state_dict()
    expected = list(iterator)
    resumed = ExactLoader(make())
    resumed.load_state_dict(state)
    assert [_plain(batch) for batch in resumed] == expected


def test_worker_settings_are_honoured():
    def init(worker_id):
        torch.manual_seed(worker_id)

    plain = DataLoader(
        Augmented(8), batch_size=2, num_workers=2, prefetch_factor=3, worker_init_fn=init, timeout=30, multiprocessing_context="fork"
    )
    loader = ExactLoader(plain)
    inner = loader._make_inner()
    assert (inner.num_workers, inner.prefetch_factor, inner.worker_init_fn, inner.timeout) == (2, 3, init, 30)
    assert inner.multiprocessing_context.get_start_method() == "fork"
    _seed(7)
    expected = [_plain(batch) for batch in plain]
    _seed(7)
    assert [_plain(batch) for batch in loader] == expected


def test_persistent_workers_stay_and_are_found_by_lightning():
    loader = ExactLoader(DataLoader(Numbers(6), batch_size=2, num_workers=1, persistent_workers=True))
    list(loader)
    first = loader._iterator
    list(loader)
    assert loader._iterator is first is not None
    loader._iterator._shutdown_workers()
    loader._iterator = None
    assert [_plain(batch) for batch in loader] == [[0, 1], [2, 3], [4, 5]]


class _OwnIterator(DataLoader):
    """A loader that makes its iterator itself, which nobody else can then."""

    def _get_iterator(self):
        return super()._get_iterator()


def test_persistent_workers_of_a_loader_that_is_iterated_as_it_is_are_found_by_lightning():
    plain = _OwnIterator(Numbers(6), batch_size=2, num_workers=1, persistent_workers=True)
    loader = ExactLoader(plain)
    list(loader)
    assert loader._iterator is plain._iterator is not None
    workers = plain._iterator._workers
    loader._iterator._shutdown_workers()
    loader._iterator = None
    assert plain._iterator is None
    assert not any(worker.is_alive() for worker in workers)
    assert [_plain(batch) for batch in loader] == [[0, 1], [2, 3], [4, 5]]


def test_workers_of_different_ranks_augment_differently_those_of_a_stream_alike():
    runs = _ranks(lambda: DataLoader(Augmented(8), batch_size=4, num_workers=1), 2)
    draws = [row[1] for _, batches, _ in runs for batch, _ in batches for row in batch]
    assert len(set(draws)) == 8
    ranked = functools.partial(pl_worker_init_function, rank=1)
    stream = ExactLoader(DataLoader(Stream(4), num_workers=1, worker_init_fn=ranked), rank=1, world_size=2, sync=lambda value: value)
    assert stream._make_inner().worker_init_fn.keywords == {"rank": 0}


def test_workers_of_a_stream_shard_it_as_ever():
    make = WORKER_LOADERS["workers, iterable"]
    _seed(7)
    expected = [_numbers(batch) for batch in make()]
    runs = _ranks(make, 2)
    assert [_merge(parts) for parts in zip(*(batches for _, batches, _ in runs), strict=True)] == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DataLoader(Numbers(8), sampler=DistributedSampler(Numbers(8), num_replicas=2, rank=0)), "remove it"),
        (lambda: DataLoader(Numbers(8), shuffle=True), "give sync"),
    ],
)
def test_loaders_that_would_give_ranks_different_data_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        ExactLoader(make(), rank=0, world_size=2)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": torch.zeros(4, 2), "y": torch.zeros(3)}, r"\(4, 2\), \(3,\)"),
        ([torch.tensor(1.0)], "no batch dimension"),
        ("text", "no tensors"),
        ({"x": torch.zeros(4), "graph": object()}, "a object in a batch"),
        ({"x": torch.zeros(4), "names": ["a", "b"]}, "list of 2 values in a batch of 4"),
    ],
)
def test_batches_without_rows_are_refused(batch, message):
    loader = ExactLoader(DataLoader([batch], batch_size=None), rank=0, world_size=2, sync=lambda value: value)
    with pytest.raises(ValueError, match=message):
        next(iter(loader))
    next(iter(ExactLoader(DataLoader([batch], batch_size=None))))  # one rank takes any batch


def test_state_of_another_loader_is_refused():
    loader = ExactLoader(DataLoader(Numbers(4)))
    with pytest.raises(ValueError, match="holds position"):
        loader.load_state_dict({"position": 3})
    assert is_loader_state(loader.state_dict())
    assert not is_loader_state({"position": 3})


def test_shrunk_dataset_is_refused_on_a_resume():
    for make in (lambda size: DataLoader(Numbers(size)), lambda size: DataLoader(Stream(size))):
        loader = ExactLoader(make(8))
        iterator = iter(loader)
        for _ in range(6):
            next(iterator)
        resumed = ExactLoader(make(4))
        resumed.load_state_dict(loader.state_dict())
        with pytest.raises(ValueError, match="now gives only 4"):
            next(iter(resumed))


def test_draws_at_every_batch_are_given_up_beyond_the_limit_and_said_so(monkeypatch, caplog):
    monkeypatch.setattr(order_module, "LOG_LIMIT", 2)
    loader = ExactLoader(MAP_LOADERS["late sampler"]())
    with caplog.at_level(logging.WARNING):
        _epoch(loader)
        iterator = _steps(loader, 0)
        for _ in range(4):
            next(iterator)
    assert "won't resume exactly" in caplog.text
    assert loader.state_dict()["exact"] is False


def test_batch_sampler_as_sampler_loads_only_own_rows():
    class Table(Numbers):
        def __getitem__(self, indices):
            self.asked.append(list(indices))
            return torch.tensor(indices)

    def make():
        return DataLoader(Table(7), batch_size=None, sampler=BatchSampler(SequentialSampler(range(7)), 4, False))

    loader, batches, _ = _ranks(make, 2)[1]
    assert [batch for batch, _ in batches] == [[1, 3], [5]]
    assert loader.dataset.asked == [[1, 3], [5]]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("rank", [0, 1])
def test_parts_are_collated_beside_the_batch(workers, rank):
    def graphs(samples):
        return torch.cat([torch.full((int(sample),), int(sample)) for sample in samples]), len(samples)

    loader = ExactLoader(DataLoader(Numbers(7), 5, collate_fn=graphs, num_workers=workers), rank=rank, world_size=2, parts=2)
    told = []
    for batch in loader:
        share = loader.shares.popleft()
        told.append((share.rows, *((nodes.tolist(), count) for nodes, count in (batch, *share.parts))))
    if rank == 0:
        assert told == [
            (3, ([2, 2, 4, 4, 4, 4], 3), ([4, 4, 4, 4], 2), ([2, 2], 1)),
            (1, ([5] * 5, 1), ([5] * 5, 1)),
        ]
    else:
        assert told == [(2, ([1, 3, 3, 3], 2), ([1], 1), ([3, 3, 3], 1)), (1, ([6] * 6, 1), ([6] * 6, 1))]


def test_users_who_iterate_over_a_trainers_loader_have_whole_batches():
    loader = ExactLoader(DataLoader(torch.arange(6), batch_size=4), rank=1, world_size=2, of_trainer=True)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5]]
    assert [batch.tolist() for batch, _, _ in CombinedLoader(loader, "sequential")] == [[1, 3], [5]]


class Sharded(IterableDataset):
    """Takes every ``world_size``-th number, as the launcher told it where it was made."""

    def __init__(self, world_size, held):
        self.environment = type("Environment", (), {})()
        vars(self.environment if held else self)["world_size"] = world_size

    def __iter__(self):
        yield from range(8)


@pytest.mark.parametrize("held", [False, True])
def test_a_dataset_that_takes_a_launchers_part_by_itself_is_refused(monkeypatch, held):
    def made(count, **options):
        return ExactLoader(DataLoader(Sharded(count, held), batch_size=4), rank=0, world_size=1, **options)

    made(2)  # no launcher told it
    monkeypatch.setenv("WORLD_SIZE", "2")
    made(2)  # as it is in this package's own workers
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    made(1)
    made(3)
    path = "dataset.environment.world_size" if held else "dataset.world_size"
    with pytest.raises(
        ValueError, match=rf"the loader's {path} is 2: it takes 1 of 2 parts of the data, .* make it in train_dataloader\(\)"
    ):
        made(2)
    with pytest.raises(ValueError, match=r"the loader's sampler\.num_replicas is 2"):
        ExactLoader(DataLoader(Numbers(8), sampler=DistributedSampler(Numbers(8), num_replicas=2, rank=0)), rank=0, world_size=1)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    with pytest.raises(ValueError, match="are told of one process"):
        made(2)
