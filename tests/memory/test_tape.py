"""The tape as data: what goes in comes out, in order and in the field's terms."""

from __future__ import annotations

import pickle

import pytest

from lightning_autopar.memory.tape import ACTIONS, KINDS, MARKS, NOTES, Event, Tape


def test_events_come_back_in_order() -> None:
    events = [
        Event("allocate", 7, 12, "parameters"),
        Event("leave", -1, 0, None),
        Event("allocate", 2**40, 2**50, "temporary"),
        Event("become", 2**40, 2**50, "gradients"),
        Event("resize", 7, 0, "parameters"),
        Event("free", 2**40, 0, "gradients"),
    ]
    tape = Tape(batches=2)
    for event in events:
        tape.add(*event)
    assert list(tape) == events
    assert len(tape) == 6
    again = pickle.loads(pickle.dumps(tape))
    assert again == tape
    assert again.batches == 2


@pytest.mark.parametrize("kind", [*KINDS, None])
@pytest.mark.parametrize("action", ACTIONS)
def test_every_action_and_kind_is_kept(action: str, kind: str | None) -> None:
    tape = Tape()
    tape.add(action, 3, 4, kind)  # type: ignore[arg-type]
    assert list(tape) == [(action, 3, 4, kind)]


def test_a_tape_is_small() -> None:
    tape = Tape()
    for number in range(10_000):
        tape.add("allocate", number, 4, "activations")
    assert len(pickle.dumps(tape)) < 250_000


def test_marks_and_notes_are_no_changes() -> None:
    assert set(ACTIONS) - MARKS - NOTES == {"allocate", "free", "become", "resize"}
    assert not MARKS & NOTES
