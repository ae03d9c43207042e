"""Samples with something that a loss may leave out, picked for a batch that tells planning."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from lightning_autopar.exact.data.unlike_samples import kind, marks, unlike

ONES = torch.ones(3)


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (1, 3),  # a class
        (numpy.int64(1), -1),
        (torch.tensor([4, 2]), torch.tensor([4, -100])),
        (1.0, 0.0),  # a sample's weight
        (0.3, float("nan")),
        (True, False),
        (ONES, torch.tensor([1.0, 0.0, 1.0])),
        (numpy.ones(3, bool), numpy.array([True, False, True])),
        ({"image": torch.rand(4, 4), "mask": [ONES, ONES]}, {"image": torch.rand(4, 4), "mask": [ONES, torch.zeros(3)]}),
    ],
)
def test_a_sample_that_tells_something_new_comes_first(first: Any, other: Any) -> None:
    samples = [first] * 9 + [other] + [first] * 9
    assert unlike(samples, [first], 4) == [9, 0, 1, 2]
    assert unlike(samples, [first, other], 4) == []
    assert unlike(samples[:9], [first], 4) == []
    assert unlike(samples, [first], 40) == []


def test_texts_are_as_unlike_as_those_of_the_first_batch() -> None:
    """Nothing more is tried for another token."""
    texts = list(torch.randint(0, 10**6, (40, 16), generator=torch.Generator().manual_seed(0)))
    assert unlike(texts[4:], texts[:4], 4) == []
    texts[9] = texts[9].index_fill(0, torch.tensor(3), -100)
    assert unlike(texts[4:], texts[:4], 4)[0] == 5


def test_masks_come_before_classes_and_a_quarter_of_the_batch_is_new() -> None:
    samples = [(label, ONES) for label in range(20)] + [(0, torch.tensor([1.0, 0.0, 0.0]))]
    chosen = unlike(samples, [(0, ONES)] * 8, 8)
    assert chosen[0] == 20
    assert len(chosen) == 8
    assert sum(bool(marks(samples[number]) - marks((0, ONES))) for number in chosen[:2]) == 2


def test_the_time_that_it_takes_is_bounded() -> None:
    now = iter(range(100))
    assert unlike([1] * 30 + [2], [1], 4, seconds=10.0, clock=lambda: float(next(now))) == []
    assert next(now) < 15


def test_what_has_no_numbers_has_no_marks() -> None:
    for sample in ("text", None, torch.zeros(0), torch.rand(4), torch.zeros(2, dtype=torch.complex64), torch.zeros(1 << 17), object()):
        assert marks(sample) == set()
    assert kind(((), "nan", 0.0)) < kind(((), "negative", -1.0)) < kind(((), "value", 3.0))
