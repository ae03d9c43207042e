"""Words about shapes: told while it isn't clear that they stay as they are, and by both sides alike."""

from __future__ import annotations

from lightning_autopar.strategies.pipeline.run.stage_shapes import KEPT, TRIALS, Known, Signature, signature_of


def told(words: list[str]) -> list[bool]:
    """Of the batches of a run, each with two equal micro-batches, whether anything had to be said of them."""
    known, said = Known(), []
    for index, word in enumerate(words):
        for _ in range(2):
            found = known.recall(Signature("alike", index))
            if found is None:
                known.remember(Signature("alike", index), word)
            else:
                assert found == word
            said.append(found is None)
    return said


def test_a_word_that_stays_is_told_a_few_times() -> None:
    assert told(["a"] * 8) == [True, False] * TRIALS + [False] * 2 * (8 - TRIALS)


def test_a_word_that_goes_by_the_batch_is_told_for_each() -> None:
    assert told(list("abababab")) == [True, False] * 8
    assert told(list("aaabaaba")) == [True, False] * 8


def test_other_shapes_are_another_matter() -> None:
    known = Known()
    for index in range(TRIALS):
        known.remember(Signature("short", index), "a")
    assert known.recall(Signature("short", 9)) == "a"
    assert known.recall(Signature("long", 9)) is None
    assert known.recall(None) is None


def test_the_oldest_is_forgotten() -> None:
    known = Known()
    for number in range(KEPT + 1):
        known.remember(Signature(number), "a")
    assert known.recall(Signature(0)) is None
    assert known.recall(Signature(1)) == "a"


def test_a_signature_is_of_shapes_types_and_whole_numbers() -> None:
    assert signature_of({"a": 1, "b": 0.5}) == signature_of({"a": 1, "b": 0.25})
    assert signature_of({"a": 1}) != signature_of({"a": 2})
    assert signature_of([object()]) is None
