"""Captured states are those of the generators, and hardly cost anything where nobody has drawn."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from lightning_autopar.exact.random import generator_states as rng


@pytest.mark.filterwarnings("ignore:get_state and legacy")
def test_captured_is_what_the_generators_say() -> None:
    """After each of these, and a second time: whatever of the generator's state it changes, be it one flag."""
    began, bits = rng.capture({}), numpy.random.get_bit_generator()
    pair = numpy.random.RandomState(3)
    pair.standard_normal()
    waits = pair.get_state()
    pair.standard_normal()
    spent = pair.get_state()
    assert waits[2] == spent[2]
    assert (waits[1] == spent[1]).all(), "they differ in the second number of a pair alone"
    steps: list[Callable[[], Any]] = [
        random.random,
        lambda: random.gauss(0, 1),
        lambda: random.gauss(0, 1),
        lambda: random.seed(1),
        lambda: [random.random() for _ in range(312)],  # 624 numbers: the same place in other numbers
        numpy.random.random,
        lambda: numpy.random.set_state(spent),
        lambda: numpy.random.set_state(waits),
        numpy.random.standard_normal,
        lambda: numpy.random.random(312),
        lambda: rng.restore(began, {}),
        lambda: numpy.random.set_bit_generator(numpy.random.MT19937(5)),
        lambda: numpy.random.set_bit_generator(numpy.random.PCG64(5)),
        numpy.random.random,
    ]
    try:
        for number, step in enumerate(steps):
            step()
            for _ in range(2):
                captured = rng.capture({})
                assert captured["python"] == random.getstate(), number
                assert not rng.changed({"numpy": captured["numpy"]}, {"numpy": numpy.random.get_state()}), number
    finally:
        numpy.random.set_bit_generator(bits)
        rng.restore(began, {})


def test_a_state_is_put_together_only_where_it_has_changed() -> None:
    """Putting them together took a twentieth of a small module's step."""
    first, second = rng.capture({}), rng.capture({})
    assert first["numpy"] is second["numpy"]
    assert first["python"] is second["python"]
    random.random()
    numpy.random.random()
    third = rng.capture({})
    assert rng.changed(second, third).keys() == {"numpy", "python"}
    for state in (first, third, first):  # a rank's own stream, and back
        rng.restore(state, {})
        again = rng.capture({})
        assert again["numpy"] is state["numpy"]
        assert again["python"] is state["python"]
