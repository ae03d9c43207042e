"""Lists from which items are dropped when others are appended, such as a replay buffer, and long lists that are written in their places."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

from lightning_autopar.exact.data.rank_share import BatchShare
from lightning_autopar.exact.step import attribute_rules
from lightning_autopar.exact.step.attribute_rules import MISSING, Evidence, plain, restored, slots, taken

ROWS = 4
SHARES = [BatchShare(rows=ROWS // 2, of=ROWS, rank=rank, world_size=2) for rank in range(2)]


def buffer(*more: Any, kind: Any = deque) -> Any:
    """A replay buffer that is full: what is appended, as many items at its beginning make room for."""
    items = [([float(number), -1.0], number % 3, False) for number in range(1000)] + list(more)
    return deque(items, maxlen=1000) if kind is deque else items[len(more) :]


def seen(before: Any, whole: Any, parts: list[Any]) -> Evidence:
    evidence = Evidence()
    evidence.see({"kept": taken(before)}, {"kept": taken(whole)}, [{"kept": taken(part)} for part in parts], SHARES)
    return evidence


@pytest.mark.parametrize("kind", [deque, list])
def test_of_a_replay_buffer_only_what_is_appended_is_compared(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    combined = attribute_rules.combined
    monkeypatch.setattr(attribute_rules, "combined", lambda rule, *rest: (tried.append(rule), combined(rule, *rest))[1])
    new = ([0.5, 0.25], 1, True)
    found, unknown = seen(buffer(kind=kind), buffer(new, kind=kind), [buffer(new, kind=kind)] * 2).settled()
    assert {path[:2] for path in found} == {("kept", "+")}
    assert set(found.values()) == {"same"}
    assert not unknown
    assert len(tried) < 50, "a rule is tried on what is new, and not on a thousand items"


def test_what_each_sample_appends_to_a_full_buffer_comes_in_the_batchs_order() -> None:
    each = [([0.5 + row, 0.0], row, True) for row in range(ROWS)]
    parts = [buffer(*each[0::2]), buffer(*each[1::2])]
    found, _ = seen(buffer(), buffer(*each), parts).settled()
    assert found == {("kept", "+"): "items"}
    own = buffer()
    before = taken(own, ("kept",), found)
    own.extend(each[0::2])
    (slot,) = slots(("kept",), before, own, found, lambda value: None)
    assert slot.value == each[0::2], "of a full buffer as well"
    slot.put(attribute_rules.combined("items", MISSING, [each[0::2], each[1::2]], SHARES))
    assert list(own) == list(buffer(*each))
    assert list(restored(before)) == list(buffer()), "also what was dropped"


def test_lists_that_the_first_batch_makes_grow_in_later_ones() -> None:
    """As MONAI's metrics keep what they have of each sample."""

    def added(kept: dict[str, Any], rows: Sequence[float]) -> dict[str, Any]:
        kept["lists"] = [list(each) for each in kept["lists"] or [[], []]]
        for each, factor in zip(kept["lists"], (1.0, 10.0), strict=True):
            each.extend(factor * row for row in rows)
        return kept

    new, evidence = [1.0, 2.0, 3.0, 4.0], Evidence()
    for lists in (None, [[7.0], [70.0]]):
        whole, *parts = (added({"lists": lists}, rows) for rows in (new, new[0::2], new[1::2]))
        evidence.see({"kept": taken({"lists": lists})}, {"kept": taken(whole)}, [{"kept": taken(part)} for part in parts], SHARES)
    found, unknown = evidence.settled()
    assert (set(found.values()), unknown) == ({"items"}, ())
    for lists, wanted in ((None, [new, [10.0, 20.0, 30.0, 40.0]]), ([[7.0], [70.0]], [[7.0, *new], [70.0, 10.0, 20.0, 30.0, 40.0]])):
        own = {"lists": None if lists is None else [list(each) for each in lists]}
        before = taken(own, ("kept",), found)
        for each, factor in zip(own["lists"] or own.setdefault("made", [[], []]), (1.0, 10.0), strict=True):
            each.extend(factor * row for row in new[0::2])
        own["lists"] = own.pop("made", own["lists"])
        for slot, theirs in zip(slots(("kept",), before, own, found, lambda value: None), (new[1::2], [20.0, 40.0]), strict=True):
            slot.put(attribute_rules.combined("items", MISSING, [slot.value, theirs], SHARES))
        assert own == {"lists": wanted}
        assert restored(before) == {"lists": lists}


def test_counts_in_a_long_list_are_sums_though_they_begin_alike() -> None:
    def counts(*classes: int) -> list[int]:
        return [classes.count(number) for number in range(1000)]

    whole = [1, 999, 998, 999]
    found, unknown = seen(counts(), counts(*whole), [counts(*whole[0::2]), counts(*whole[1::2])]).settled()
    assert found == {("kept", number): "growth" for number in (1, 998, 999)}
    assert not unknown
    assert plain(taken(counts(3)))[3] == 1


def test_a_tuple_may_refuse_to_tell_its_length() -> None:
    class Irrep(tuple[Any, ...]):  # as e3nn has it
        def __len__(self) -> int:
            raise NotImplementedError

    assert taken([Irrep((1, [2]))]).copy[0].copy[1].copy == [2]
