"""Reading tapes by brute force: what is alive after each event, and the peak on a share of the batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.tape import KINDS, MARKS, NOTES, Event

SCALED = ("input", "activations", "temporary")


def levels(events: Iterable[Event], share: float = 1.0) -> Iterator[dict[str, float]]:
    """Live bytes by kind after each event, every storage looked up by its number; fails where the tape contradicts itself."""
    alive: dict[int, tuple[float, str]] = {}
    by_kind: dict[str, float] = dict.fromkeys(KINDS, 0)
    used: set[int] = set()
    for action, storage, size_bytes, kind in events:
        if action in MARKS:
            assert (size_bytes, kind) == (0, None)
        elif action in NOTES:
            assert storage in alive
        elif action == "free":
            size, held = alive.pop(storage)
            assert kind == held
            by_kind[held] -= size
        else:
            assert kind is not None
            if action == "allocate":
                assert storage not in used
                used.add(storage)
            else:
                size, held = alive[storage]
                by_kind[held] -= size
            alive[storage] = size_bytes * (share if kind in SCALED else 1), kind
            by_kind[kind] += alive[storage][0]
        yield by_kind


def peak_of(events: Iterable[Event], share: float = 1.0) -> float:
    """The most that is alive at any time."""
    return max(sum(by_kind.values()) for by_kind in levels(events, share))


def marks(events: Iterable[Event]) -> list[tuple[str, int]]:
    """The marks in order."""
    return [(event.action, event.storage) for event in events if event.action in MARKS]


def drawing(footprint: Footprint, size_bytes: int) -> Footprint:
    """The same, where forward draws so much for the samples whenever it makes something."""
    assert footprint.tape is not None
    made = [event.storage for event in footprint.tape if (event.action, event.kind) == ("allocate", "activations")]
    return replace(footprint, tape=replace(footprint.tape, draws=dict.fromkeys(made, (size_bytes,))))
