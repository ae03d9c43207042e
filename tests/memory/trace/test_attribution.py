"""A tape written by hand, read by the package: every figure worked out on paper."""

from __future__ import annotations

import pytest

from lightning_autopar.memory.footprint import Moment
from lightning_autopar.memory.tape import Event, Tape
from lightning_autopar.memory.trace.attribution import Places, account
from tests.memory.tapes import marks

#: Two candidates; all sizes differ, so that every sum tells what is in it.
STEP = (
    ("allocate", 0, 1000, "parameters"),
    ("leave", -1),
    ("allocate", 1, 1, "activations"),  # enters block 0
    ("forward", 0),
    ("input", 1),
    ("allocate", 2, 2, "activations"),  # saved
    ("allocate", 3, 4, "fixed"),  # a cast, saved
    ("allocate", 4, 8, "activations"),  # scratch
    ("free", 4, 0, "activations"),
    ("allocate", 5, 16, "activations"),  # leaves it
    ("output", 5),
    ("leave", 0),
    ("allocate", 6, 32, "activations"),  # made and kept between the blocks
    ("forward", 1),
    ("input", 5),
    ("input", 6),
    ("allocate", 7, 64, "activations"),
    ("output", 7),
    ("leave", 1),
    ("free", 5, 0, "activations"),  # not saved by block 1
    ("allocate", 8, 128, "activations"),
    ("return", 2),
    ("allocate", 9, 256, "temporary"),
    ("backward", 1),
    ("allocate", 10, 512, "temporary"),  # a gradient of a parameter, as it turns out
    ("free", 9, 0, "temporary"),
    ("become", 10, 512, "gradients"),
    ("allocate", 11, 2048, "temporary"),
    ("free", 7, 0, "activations"),
    ("backward", 0),
    ("free", 11, 0, "temporary"),
    ("free", 2, 0, "activations"),
    ("free", 3, 0, "fixed"),
    ("optimizer", -1),
    ("allocate", 12, 4096, "fixed"),
    ("free", 12, 0, "fixed"),
)


def tape_of(events: tuple[tuple[object, ...], ...]) -> Tape:
    tape = Tape()
    for event in events:
        tape.add(*event)  # type: ignore[arg-type]
    return tape


def test_what_each_part_takes() -> None:
    tape = tape_of(STEP)
    settled = Places(tape, {0, 1}).settled(tape, {10}, {2: 10, 3: 7})
    found = account(settled, 2)
    before, first, between, second, after = found.parts
    assert (before.output_bytes, before.activation_bytes, before.forward_peak_bytes) == (1, 0, 1)
    assert (first.activation_bytes, first.fixed_bytes, first.input_bytes, first.output_bytes) == (2 + 4, 4, 1, 16)
    assert first.forward_peak_bytes == 2 + 4 + 16
    assert first.forward_unsaved_bytes == 2 + 16  # 3 is used last before 4 is made, 2 by what makes 5
    assert (between.output_bytes, between.activation_bytes, between.forward_peak_bytes) == (32, 0, 32)
    assert (second.activation_bytes, second.input_bytes, second.input_extra_bytes, second.output_bytes) == (0, 16 + 32, 16, 64)
    assert second.backward_peak_bytes == 2048  # the gradient is complete before, and left out
    assert (after.activation_bytes, after.input_bytes, after.forward_peak_bytes, after.backward_peak_bytes) == (128, 64, 128, 256)
    assert first.backward_peak_bytes == 0
    assert found.activation_bytes == 1 + 2 + 4 + 32 + 64 + 128


def test_the_fullest_moments() -> None:
    tape = tape_of(STEP)
    found = account(Places(tape, {0, 1}).settled(tape, {10}, {}), 2).moments
    assert Moment(phase="forward", held=0, running=True, activation_bytes=1 + 2 + 16, fixed_bytes=4) in found
    assert Moment(phase="forward", held=1, running=False, boundary=True, activation_bytes=1 + 2 + 16, fixed_bytes=4) in found
    saved = 1 + 2 + 32 + 64 + 128
    assert Moment(phase="backward", held=2, running=False, boundary=True, activation_bytes=saved, fixed_bytes=4) in found
    assert Moment(phase="backward", held=2, running=False, activation_bytes=saved, fixed_bytes=4, temporary_bytes=256) in found
    full = Moment(phase="backward", held=1, running=True, activation_bytes=saved, fixed_bytes=4, temporary_bytes=2048, gradient_bytes=512)
    assert full in found
    assert full.total_bytes == max(moment.total_bytes for moment in found if moment.phase == "backward")
    assert (
        Moment(
            phase="backward", held=1, boundary=True, activation_bytes=saved - 64, fixed_bytes=4, temporary_bytes=2048, gradient_bytes=512
        )
        in found
    )
    assert Moment(phase="optimizer", activation_bytes=1 + 32 + 128, fixed_bytes=4096, gradient_bytes=512) in found
    phases = [moment.phase for moment in found]
    assert phases == sorted(phases, key=["forward", "backward", "optimizer"].index)


def test_a_gradient_is_fixed_from_its_beginning() -> None:
    tape = tape_of(STEP)
    settled = Places(tape, {0, 1}).settled(tape, {10}, {})
    assert [event.kind for event in settled if event.storage == 10 and event.size_bytes] == ["fixed", "gradients"]


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        (
            {0, 1},
            "leave -1, forward 0, leave 0, forward 1, leave 1, return 2, backward 1, return 1, backward 0, return 0, optimizer -1",
        ),
        ({0}, "leave -1, forward 0, leave 0, return 1, backward 0, return 0, optimizer -1"),
        ({1}, "leave -1, forward 0, leave 0, return 1, backward 0, return 0, optimizer -1"),
        (set(), "leave -1, return 0, optimizer -1"),
    ],
)
def test_marks_of_candidates_that_are_no_blocks_vanish(kept: set[int], expected: str) -> None:
    tape = tape_of(STEP)
    settled = Places(tape, kept).settled(tape, (), {})
    assert ", ".join(f"{action} {index}" for action, index in marks(settled)) == expected
    found = account(settled, len(kept))
    assert len(found.parts) == 2 * len(kept) + 1
    assert found.activation_bytes == 1 + 2 + 4 + 32 + 64 + 128
    notes = [event for event in settled if event.action in ("input", "output")]
    assert len(notes) == sum({0: 2, 1: 3}[index] for index in kept)


def test_what_is_left_out_belongs_to_the_part_around_it() -> None:
    tape = tape_of(STEP)
    places = Places(tape, {1})
    assert [places.part(part) for part in range(5)] == [0, 0, 0, 1, 2]
    found = account(places.settled(tape, {10}, {}), 1)
    assert found.parts[0].activation_bytes == 1 + 2 + 4
    assert found.parts[0].output_bytes == 16 + 32


def test_several_batches_give_the_larger_figures() -> None:
    forward = (
        ("leave", -1),
        ("forward", 0),
        ("allocate", 1, 10, "activations"),
        ("leave", 0),
        ("return", 1),
        ("backward", 0),
        ("free", 1, 0, "activations"),
    )
    second = tuple(("allocate", 2, 30, "activations") if event[0] == "allocate" else event for event in forward[:-1])
    tape = tape_of((*forward, *second, ("free", 2, 0, "activations"), ("optimizer", -1)))
    settled = Places(tape, {0}).settled(tape, (), {})
    assert marks(settled).count(("leave", -1)) == 2
    found = account(settled, 1)
    assert found.parts[1].activation_bytes == found.activation_bytes == 30


#: Both blocks return what they have saved (10, 11) beside what the next one needs (20, 21). Nothing uses the former afterwards.
RETURNS_MORE = (
    ("leave", -1),
    ("forward", 0),
    ("allocate", 10, 1, "activations"),
    ("allocate", 20, 2, "activations"),
    ("output", 10),
    ("output", 20),
    ("leave", 0),
    ("forward", 1),
    ("input", 20),
    ("allocate", 11, 4, "activations"),
    ("allocate", 21, 8, "activations"),
    ("output", 11),
    ("output", 21),
    ("leave", 1),
    ("allocate", 30, 16, "activations"),
    ("return", 2),
    ("backward", 1),
    ("free", 11, 0, "activations"),
    ("backward", 0),
    ("free", 10, 0, "activations"),
    ("optimizer", -1),
)
LAST_USES = {10: 4, 20: 8, 11: 9, 21: 14, 30: 15}


def test_an_output_that_nothing_uses_is_its_blocks_own() -> None:
    settled = Places(tape_of(RETURNS_MORE), {0, 1}).settled(tape_of(RETURNS_MORE), (), LAST_USES)
    notes = [tuple(event)[:2] for event in settled if event.action in ("unsaved", "leave", "return")][:6]
    # Python lets go of each when the next block has run, and of the last one's at backward's beginning at the latest.
    assert notes == [("leave", -1), ("leave", 0), ("unsaved", 10), ("leave", 1), ("unsaved", 11), ("return", 2)]
    _, first, _, second, last = account(settled, 2).parts
    assert (first.activation_bytes, first.output_bytes, second.input_bytes) == (1, 2, 2)
    assert (second.activation_bytes, second.output_bytes, last.input_bytes) == (4, 8, 8)


def test_an_output_that_enters_a_later_block_stays_one() -> None:
    events = (*RETURNS_MORE[:9], ("input", 10), *RETURNS_MORE[9:])
    last_uses = {number: position + (position >= 9) for number, position in LAST_USES.items()}
    settled = Places(tape_of(events), {0, 1}).settled(tape_of(events), (), last_uses)
    assert [event.storage for event in settled if event.action == "unsaved"] == [11]
    assert account(settled, 2).parts[1].output_bytes == 1 + 2


def test_an_evaluation_saves_nothing() -> None:
    tape = tape_of((("leave", -1), ("forward", 0), ("allocate", 1, 10, "activations"), ("output", 1), ("leave", 0)))
    found = account(Places(tape, {0}).settled(tape, (), {}), 1)
    assert found.activation_bytes == 0
    assert found.parts[1].output_bytes == 10
    assert found.parts[2].input_bytes == 10


def test_blocks_are_numbered_as_they_ran_on_the_tape() -> None:
    events = [("leave", -1), ("forward", 1), ("leave", 1), ("forward", 0), ("leave", 0), ("return", 1), ("backward", 0), ("backward", 1)]
    tape = tape_of(tuple(events))
    places = Places(tape, {0, 1})
    assert places.blocks == {1: 0, 0: 1}
    assert marks(places.settled(tape, (), {}))[:5] == [("leave", -1), ("forward", 0), ("leave", 0), ("forward", 1), ("leave", 1)]
    assert isinstance(next(iter(tape)), Event)
