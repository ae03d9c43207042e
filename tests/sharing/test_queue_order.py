"""What a run that waits reserves, and whom it asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.sharing.lease_files import Lease
from lightning_autopar.sharing.queue_order import Asking, Need, least, may_ask, quantum_seconds, reserve
from tests.sharing.hosts import SECOND, inventory, lease, place


def needs(size: int, devices: int = 1) -> Callable[[Inventory], Need | None]:
    def plan(there: Inventory) -> Need | None:
        fitting = [device.id for device in there.devices if device.free_bytes >= size][:devices]
        return Need(bytes=dict.fromkeys(fitting, size), seconds=5.0) if len(fitting) == devices else None

    return plan


def elastic(name: str, *, made: int = 0, priority: int = 0, **sizes: int) -> Lease:
    return Lease(name=name, uid=0, pid=1, run=name, bytes=sizes, elastic=True, made_ns=made * SECOND, priority=priority)


def test_the_earliest_moment_that_is_known() -> None:
    leases = [lease("x", a=4, ends=30), lease("y", b=8, ends=10), lease("z", a=6, ends=20)]
    made = reserve(needs(7), inventory(0, 2), leases, [], now_ns=0)
    assert made is not None
    assert (dict(made.wants), made.start_ns, made.seconds, made.asks) == ({"b": 7}, 10 * SECOND, 5.0, ())
    made = reserve(needs(7, devices=2), inventory(0, 2), leases, [], now_ns=0)
    assert made is not None
    assert (dict(made.wants), made.start_ns) == ({"a": 7, "b": 7}, 30 * SECOND)


def test_behind_those_ahead() -> None:
    leases = [lease("y", b=8, ends=10)]
    first = place(wants={"b": 10}, start=10, seconds=15)
    made = reserve(needs(7), inventory(0, 2), leases, [first], now_ns=0)
    assert made is not None
    assert (dict(made.wants), made.start_ns) == ({"b": 7}, 25 * SECOND)


def test_nobody_knows_when() -> None:
    made = reserve(needs(7), inventory(0, 2), [lease(a=10)], [place(wants={"a": 6})], now_ns=0)
    assert made is not None
    assert (dict(made.wants), made.start_ns) == ({"b": 7}, None), "not where somebody else waits"
    assert reserve(needs(11), inventory(0, 2), [], [], now_ns=0) is None


def test_who_is_asked() -> None:
    there = [elastic("x", a=4), elastic("y", b=9), elastic("same", a=4, priority=1), lease("fixed", a=2)]
    made = reserve(needs(7), inventory(0, 1), there, [], now_ns=100 * SECOND, priority=1, quantum=60)
    assert made is not None
    assert (made.asks, dict(made.wants), made.start_ns) == (("y",), {"b": 7}, 100 * SECOND), "what it gets when they have gone"
    without = reserve(needs(7), inventory(0, 1), there, [], now_ns=100 * SECOND, priority=1, quantum=60, refused={"y"})
    assert without is not None
    assert (without.asks, without.start_ns) == ((), None)
    assert [each.name for each in may_ask(there, 1, 100 * SECOND, 60)] == ["x", "y"]
    assert may_ask(there, 1, 59 * SECOND, 60) == [], "each has its quantum"
    assert may_ask(there, 0, 100 * SECOND, 60) == []


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 9), max_size=6), st.integers(1, 20))
def test_as_few_as_it_takes(sizes: list[int], wanted: int) -> None:
    leases = [elastic(f"{number}", a=size) for number, size in enumerate(sizes)]

    def fits(given: Sequence[Lease]) -> bool:
        return sum(each.bytes["a"] for each in given) >= wanted

    found = least(leases, fits)
    if sum(sizes) < wanted:
        assert found == ()
        return
    assert fits(found)
    assert not any(fits(fewer) for count in range(len(found)) for fewer in combinations(found, count)), "each of them is needed"
    if any(size >= wanted for size in sizes):
        assert len(found) == 1


def test_who_does_not_answer_is_left_alone_for_a_while() -> None:
    asking = Asking()
    asking.ask(["x"], 0)
    asking.ask(["x", "y"], 20 * SECOND)
    assert asking.refused(30 * SECOND) == set()
    assert asking.refused(31 * SECOND) == {"x"}
    asking.ask(["y"], 31 * SECOND)
    asking.ask([], 40 * SECOND)
    assert asking.refused(60 * SECOND) == {"x"}, "y isn't asked any more"
    assert asking.refused(632 * SECOND) == set()


def test_the_quantum(monkeypatch: pytest.MonkeyPatch) -> None:
    assert quantum_seconds() == 60
    monkeypatch.setenv("AUTOPAR_QUANTUM", "0.5")
    assert quantum_seconds() == 0.5
    for wrong in ("-1", "soon", "nan"):
        monkeypatch.setenv("AUTOPAR_QUANTUM", wrong)
        with pytest.raises(ValueError, match=f"AUTOPAR_QUANTUM is '{wrong}', but must be seconds, at least 0, such as 60"):
            quantum_seconds()
