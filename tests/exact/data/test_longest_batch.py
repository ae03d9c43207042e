"""The longest batch of a loader, found without using the loader up."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from lightning_autopar.exact.data.longest_batch import between, look, shapes_in
from lightning_autopar.memory.trace.first_batch import FirstBatch, indexed


class Texts(Dataset[Tensor]):
    """Texts of given lengths; loading one takes some of the time of a clock."""

    def __init__(self, lengths: list[int], seconds: float = 0.0) -> None:
        self.lengths, self.seconds, self.now, self.loaded = lengths, seconds, 0.0, 0
        self.own = numpy.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        self.now += self.seconds
        self.loaded += 1
        torch.rand(1), random.random(), numpy.random.rand(), self.own.random()
        return torch.ones(self.lengths[index])

    def clock(self) -> float:
        return self.now


def padded(samples: list[Tensor]) -> Tensor:
    return pad_sequence(samples, batch_first=True)


def first_of(loader: DataLoader[Any], indices: list[int]) -> FirstBatch:
    batch = indexed(loader, indices)
    assert batch is not None
    return replace(batch, loaders=(loader,), epoch_batches=len(loader))


def some_lengths(count: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [4, 4, 4, 4] + [3 + int(chance.expovariate(1 / 40)) for _ in range(count - 4)]


def test_the_longest_samples_make_the_longest_batch() -> None:
    texts = Texts(some_lengths(500))
    loader = DataLoader(texts, batch_size=4, shuffle=True, collate_fn=padded)
    first = first_of(loader, [0, 1, 2, 3])
    found = look(first)
    (longest,) = found.longest
    assert longest.batch.shape == (4, max(texts.lengths))
    assert (found.lengths.looked, found.lengths.of, found.lengths.reach) == (500, 500, 1)
    told = between(found.lengths, first, longest)
    assert (told.usual, told.longest, told.name) == ((4, 4), (4, max(texts.lengths)), "")


def test_a_look_leaves_every_generator_as_it_was() -> None:
    texts = Texts(some_lengths(200))
    loader = DataLoader(texts, batch_size=4, shuffle=True, collate_fn=padded, generator=torch.Generator().manual_seed(3))
    first = first_of(loader, [0, 1, 2, 3])

    def states() -> list[Any]:
        return [torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state()), texts.own.bit_generator.state]

    before, order = states(), loader.generator.get_state()
    look(first)
    assert states() == before
    assert torch.equal(loader.generator.get_state(), order)


def test_a_slow_dataset_is_looked_at_until_the_time_is_over() -> None:
    texts = Texts([4] * 8 + some_lengths(1000), seconds=0.3)
    loader = DataLoader(texts, batch_size=4, shuffle=True, collate_fn=padded)
    first = first_of(loader, [0, 1, 2, 3])
    texts.loaded, texts.now = 0, 0.0
    found = look(first, seconds=0.7, clock=texts.clock)
    assert texts.loaded <= 6, "three for their sizes, and some again, to see whether they keep them"
    assert found.lengths.looked == 7, "with the first batch's"
    assert found.lengths.of == 1008
    assert found.lengths.reach > 1


def test_equal_samples_take_less_time() -> None:
    texts = Texts([9] * 5000, seconds=0.001)
    loader = DataLoader(texts, batch_size=4, shuffle=True)
    first = first_of(loader, [0, 1, 2, 3])
    texts.now = 0.0
    found = look(first, clock=texts.clock)
    assert texts.now < 0.2
    assert not found.longest
    assert found.lengths.sentence() == ""


def test_samples_of_other_sizes_each_time_get_a_margin_though_all_were_seen() -> None:
    class Cropped(Texts):
        def __getitem__(self, index: int) -> Tensor:
            return torch.ones(5 + int(torch.randint(100, (1,))))

    loader = DataLoader(Cropped([0] * 50), batch_size=4, collate_fn=padded)
    torch.manual_seed(0)
    found = look(first_of(loader, [0, 1, 2, 3]))
    assert found.lengths.drawn
    assert found.lengths.reach > 1


def test_where_the_first_batch_is_the_longest_a_usual_one_is_made() -> None:
    lengths = [500, *some_lengths(300)]
    loader = DataLoader(Texts(lengths), batch_size=4, shuffle=True, collate_fn=padded)
    found = look(first_of(loader, [0, 1, 2, 3]))
    assert not found.longest
    assert found.usual is not None
    assert found.usual.batch.shape[1] < 500


class Budget(Sampler[list[int]]):
    """Batches of at most so many tokens."""

    def __init__(self, lengths: list[int], most: int) -> None:
        self.batches: list[list[int]] = [[]]
        for index in sorted(range(len(lengths)), key=lengths.__getitem__):
            if self.batches[-1] and lengths[index] * (len(self.batches[-1]) + 1) > most:
                self.batches.append([])
            self.batches[-1].append(index)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def test_a_samplers_own_batches_are_made_as_they_are() -> None:
    texts = Texts(some_lengths(400))
    sampler = Budget(texts.lengths, 600)
    loader = DataLoader(texts, batch_sampler=sampler, collate_fn=padded)
    found = look(first_of(loader, sampler.batches[0]), seconds=60)
    assert (found.lengths.unit, found.lengths.looked) == ("batches", len(sampler))
    made, shapes = {tuple(each.batch.shape) for each in found.longest}, [tuple(batch.shape) for batch in loader]
    assert max(shapes, key=lambda shape: shape[0] * shape[1] ** 2) in made, "what attention takes most for"
    assert max(rows * length for rows, length in shapes) in {rows * length for rows, length in made}


def test_samples_that_only_their_sampler_can_put_together() -> None:
    lengths = [4] * 10 + [9] * 10 + [6] * 10
    in_order = [*range(10), *range(20, 30), *range(10, 20)]
    loader = DataLoader(Texts(lengths), batch_size=5, sampler=in_order)  # default_collate takes equal lengths only
    found = look(first_of(loader, in_order[:5]), seconds=60)
    assert found.lengths.unit == "batches"
    assert found.longest[0].batch.shape == (5, 9)


class Tasks(Texts):
    """Equal texts, each of a task; those of a later task have labels that don't count."""

    def __init__(self, tasks: list[int], seconds: float = 0.0) -> None:
        super().__init__([3] * len(tasks), seconds)
        self.tasks = tasks

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index).long() * (-100 if self.tasks[index] else 1), self.tasks[index]


def of_one_task(samples: list[Any]) -> Tensor:
    (texts, tasks) = zip(*samples, strict=True)
    if len(set(tasks)) > 1:
        raise ValueError("a batch has one task")
    return torch.stack(texts)


def test_samples_that_make_no_batch_beside_others_are_looked_for_in_the_samplers_own_batches() -> None:
    loader = DataLoader(Tasks([0] * 8 + [1] * 4), batch_size=4, collate_fn=of_one_task)
    found = look(first_of(loader, [0, 1, 2, 3]), seconds=60)
    assert (found.lengths.unseen, found.lengths.looked, found.unmade) == (None, 12, "")
    assert found.unlike is not None
    assert bool((found.unlike.batch == -100).all())


def test_where_none_of_those_is_found_either_it_is_said() -> None:
    texts = Tasks([0] * 8 + [1] * 4 + [0] * 32, seconds=0.1)
    loader = DataLoader(texts, batch_size=4, collate_fn=of_one_task)
    first = first_of(loader, [0, 1, 2, 3])
    found = look(first, seconds=60, clock=texts.clock)
    assert (found.lengths.unseen, found.unlike) == (None, None)
    assert found.unmade.startswith("ValueError: a batch has one task, at ")


def test_shorter_samples_that_make_no_batch_leave_the_longest_to_the_samplers_own_batches() -> None:
    def no_short_ones(samples: list[Tensor]) -> Tensor:
        if len({len(sample) == 2 for sample in samples}) > 1:
            raise ValueError("short ones apart")
        return padded(samples)

    lengths = [9] * 80 + [2] * 80
    found = look(first_of(DataLoader(Texts(lengths), batch_size=4, collate_fn=no_short_ones), [0, 1, 2, 3]), seconds=60)
    assert found.lengths.unseen is None
    assert found.lengths.unit == "batches"


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.ones(9, 2))


class Own(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([torch.ones(2, 2)])


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (DataLoader(Stream(), batch_size=2), "the dataset is a stream"),
        (Own(Texts([1, 2])), "the loader makes its batches by itself"),
        ([torch.ones(2, 2)], "the loader makes its batches by itself"),
    ],
)
def test_what_cannot_be_looked_at_is_said(loader: Any, why: str) -> None:
    found = look(FirstBatch(batch=torch.ones(2, 2), batch_size=2, loaders=(loader,)))
    assert found.lengths.unseen is not None
    assert why in found.lengths.unseen
    assert "weren't looked at" in found.lengths.sentence()


class Together(Texts):
    """Gives several samples at once, in what has no truth value, as a TensorDict."""

    class Samples(list[Tensor]):
        def __bool__(self) -> bool:
            raise RuntimeError("converting it to a boolean value is not permitted")

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return self.Samples(self[index] for index in indices)


def test_samples_without_a_truth_value_are_looked_at() -> None:
    loader = DataLoader(Together([3, 3, 9, 5]), batch_size=2, collate_fn=padded)
    found = look(first_of(loader, [0, 1]))
    assert found.lengths.unseen is None
    assert found.longest[0].batch.shape == (2, 9)


def test_a_dataset_that_fails_says_so() -> None:
    class Broken(Texts):
        def __getitem__(self, index: int) -> Tensor:
            if index > 3:
                raise OSError("no such file")
            return torch.ones(2)

    found = look(first_of(DataLoader(Broken([2] * 9), batch_size=4, shuffle=True), [0, 1, 2, 3]))
    assert found.lengths.unseen == "loading others failed (OSError)"


def test_sizes_lie_where_they_lie() -> None:
    sample = {"ids": [1, 2, 3], "text": "four", "picture": (torch.ones(3, 2), numpy.ones(5)), "label": 1}
    assert shapes_in(sample) == {"ids": (3,), "text": (4,), "picture.0": (3, 2), "picture.1": (5,)}
    assert shapes_in(sample, tensors=True) == {"picture.0": (3, 2)}


class Labelled(Dataset[tuple[Tensor, int]]):
    """Some samples are without a label."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.rand(3), -100 if index >= 30 else 1


def of_one_kind(samples: list[tuple[Tensor, int]]) -> Tensor:
    if len({label for _, label in samples}) > 1:
        raise ValueError("samples with a label and without one")
    return torch.stack([picture for picture, _ in samples])


def test_samples_that_make_no_batch_cost_the_look_nothing_else() -> None:
    loader = DataLoader(Labelled(), batch_size=4, collate_fn=of_one_kind)
    found = look(first_of(loader, [0, 1, 2, 3]))
    assert (found.lengths.unseen, found.lengths.looked) == (None, 40)
    assert (found.unlike is None) == bool(found.unmade)
