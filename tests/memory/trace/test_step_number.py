"""A step's number is a number, and notes where what is asked of it is answered otherwise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_autopar.memory.trace.step_number import LATER, Noted, step_number


@pytest.mark.parametrize(
    ("ask", "other"),
    [
        (lambda n: n > 100_000, [100_001]),
        (lambda n: n % 10_000 == 9_999, [9_999]),
        (lambda n: 1 - n / 8 <= 0.5, [4]),
        (lambda n: 2 * n + 1 >= 1_000_001, [500_000]),
        (lambda n: n // 30_000 > 2, [90_000]),
        (lambda n: n in range(7, 9), [7, 8]),
        (lambda n: n < 0, []),
        (lambda n: n % 3, [1]),
        (lambda n: n * torch.ones(()), list(LATER)),
    ],
)
def test_numbers_at_which_a_step_would_do_something_else(ask: Callable[[Any], Any], other: list[int]) -> None:
    noted = Noted()
    assert bool(ask(step_number(0, noted))) == bool(ask(0))
    assert list(noted.numbers) == other


def test_one_comparison_asks_for_one_number_in_every_direction() -> None:
    noted = Noted()
    for step in (0, 6, 7, 12, 13):
        _ = step_number(step, noted) % 6 == 0
    assert list(noted.numbers) == [1]


def test_it_passes_for_an_int() -> None:
    number = step_number(3, Noted())
    assert (f"{number:02d}", {3: "three"}[number], copy.deepcopy(number) + 1, torch.full((2,), number).tolist()) == (
        "03",
        "three",
        4,
        [3, 3],
    )
    assert isinstance(number % 2, int)
    assert isinstance(number / 2, float)
