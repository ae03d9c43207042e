"""How bytes grow with a batch's length, and how much longer the longest of all is than the longest that was seen."""

from __future__ import annotations

import random

import pytest

from lightning_autopar.memory.batch_scaling import longer
from lightning_autopar.memory.length_spread import Lengths, reach_of
from lightning_autopar.memory.tape import Tape
from tests.fakes.values import footprint


def seen(of: tuple[int, int], taken: tuple[int, int], **more: object) -> Lengths:
    """A batch of 8 rows, of these two lengths, and what they take."""
    shapes = {"usual": (8, of[0]), "longest": (8, of[1]), "usual_bytes": taken[0], "longest_bytes": taken[1]}
    return Lengths(name="ids", looked=9, of=9, **shapes, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("curve", "times"),
    [
        (lambda n: 5 * n, (0.5, 2, 3)),
        (lambda n: 5 * n + 7 * n * n, (0.5, 2, 3)),
        (lambda n: 7 * n * n, (0.5, 2, 3)),
        (lambda n: n**3, (0.5, 2)),
        (lambda n: 9000 + 5 * n, (0.5, 2)),
    ],
    ids=["linear", "attention", "square", "cube", "with a fixed part"],
)
def test_bytes_grow_as_the_two_traced_batches_say(curve: object, times: tuple[float, ...]) -> None:
    lengths = seen((100, 400), (curve(100), curve(400)))  # type: ignore[operator]
    assert lengths.growth_at(1) == pytest.approx(1)
    for each in times:
        assert lengths.growth_at(each) == pytest.approx(curve(400 * each) / curve(400), rel=1e-6)  # type: ignore[operator]


def test_where_most_of_a_size_does_not_vary_bytes_grow_as_the_rest_does() -> None:
    """Images with boxes: 2,000,000 numbers are pixels in each batch, and nearly all of a step's bytes come from the few boxes."""
    lengths = seen((2_000_020, 2_000_040), (20**3, 40**3))
    assert lengths.growth_at(1) == pytest.approx(1)
    assert lengths.growth_at(2_000_080 / 2_000_040) == pytest.approx(8, rel=1e-3)
    assert lengths.growth_at(16) < 1e19, "a power that goes through both has 16 times the size take 16 ** 208_000 times the bytes"


def test_a_footprint_may_grow_beyond_what_fits_anywhere() -> None:
    tape = Tape()
    tape.add("allocate", 0, 10**10, "activations")
    for growth in (12_345.6, 1e18, 1e40):
        found = longer(footprint(tape=tape), growth)
        assert found.tape is not None, growth
        assert found.tape.sizes[0] > 1.2e14, growth


def test_the_margin_covers_what_was_not_looked_at() -> None:
    chance, covered = random.Random(1), 0
    for _ in range(100):
        every = [10 + int(chance.expovariate(1 / 300)) for _ in range(5000)]
        some = every[:1000]
        covered += max(every) <= max(some) * reach_of(some, len(every))
    assert covered >= 80, "nine of ten, where lengths fall off exponentially"


def test_no_margin_where_samples_are_cut_off_or_all_were_seen() -> None:
    chance = random.Random(1)
    cut = [min(128, 10 + int(chance.expovariate(1 / 300))) for _ in range(200)]
    assert reach_of(cut, 100_000) == 1
    assert reach_of(list(range(1, 300)), 299) == 1


def test_few_samples_give_a_margin_that_is_bounded() -> None:
    assert reach_of([1, 2, 3, 90, 1000], 10**9) == 2


def test_the_sentence_says_what_was_seen_and_what_the_plan_counts_with() -> None:
    assert Lengths(looked=9, of=9).sentence() == "", "all of one size"
    assert "only time to look at 9 of 500 samples" in Lengths(looked=9, of=500).sentence()
    assert "weren't looked at, as the dataset is a stream" in Lengths(unseen="the dataset is a stream").sentence()
    all_seen = seen((100, 400), (1, 4)).sentence()
    assert all_seen.startswith("all 9 samples were looked at, and the longest batch has size 400 (of ids), a usual one 100.")
    some = Lengths(name="ids", looked=9, of=50, usual=(8, 100), longest=(8, 400), reach=1.25, usual_bytes=1, longest_bytes=4).sentence()
    assert "9 of 50 samples" in some
    assert "for size 500, 25 % more, as not all were looked at" in some
    assert "counts with the first batch all the same, as x" in seen((100, 400), (1, 4), uncounted="x").sentence()
