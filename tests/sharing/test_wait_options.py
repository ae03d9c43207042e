"""Whose turn it is: whoever is behind takes nothing that delays one ahead, by everybody's predictions, and no less than it may."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_autopar.devices.inventory import Device, DeviceProcess, Inventory
from lightning_autopar.sharing.lease_files import Lease
from lightning_autopar.sharing.queue import Place
from lightning_autopar.sharing.queue_order import SILENT_SECONDS, ahead, idle, left_for_later, moments, without
from tests.sharing.hosts import DEVICES, SECOND, TOTAL, inventory, lease, place


def free(found: Inventory) -> list[int]:
    return [device.free_bytes for device in found.devices]


def test_the_order_is_by_priority_then_by_age() -> None:
    places = [place("d", priority=-1, since_ns=1), place("b", since_ns=5), place("a", priority=2, since_ns=9), place("c", since_ns=7)]
    assert [one.name for one in ahead(places, (0, 7, "c"), 0)] == ["a", "b"]
    assert [one.name for one in ahead(places, (5, 0, ""), 0)] == ["a", "b", "c", "d"]
    assert ahead(places, (-5, 0, ""), 0) == []


def test_whoever_is_silent_is_passed_over() -> None:
    silent, there = place("s", seen_ns=0), place("t", seen_ns=SECOND)
    now_ns = int(SILENT_SECONDS * SECOND) + 1
    assert ahead([silent, there], (9, 0, ""), now_ns) == [there]
    assert ahead([silent, there], (9, 0, ""), now_ns - 1) == [silent, there]


@pytest.mark.parametrize(
    ("wants", "start", "ends", "left"),
    [
        pytest.param(4, 20, None, 6, id="what is given back by then is more than is wanted"),
        pytest.param(8, 20, None, 2, id="the wanted is kept for it"),
        pytest.param(10, 20, None, 0, id="nothing is left"),
        pytest.param(10, 20, 15, 6, id="it has ended by then"),
        pytest.param(10, 20, 21, 0, id="it hasn't ended by then"),
        pytest.param(8, 5, None, 0, id="nothing is given back by then"),
        pytest.param(7, None, None, 3, id="nobody knows when: of the idle device"),
        pytest.param(7, None, 1, 3, id="nobody knows when: however short it is"),
        pytest.param(0, 20, None, 6, id="it wants nothing here"),
    ],
)
def test_what_one_leaves(wants: int, start: int | None, ends: int | None, left: int) -> None:
    first = place(wants={"a": wants} if wants else {"b": 1}, start=start)
    found = left_for_later(inventory(6, 6), [lease(a=4, ends=10)], [first], 0, ends_ns=None if ends is None else ends * SECOND)
    assert free(found)[0] == left


def test_several_ahead_add_up_while_they_run_at_once() -> None:
    first, second = place("1", wants={"a": 4}, start=0, seconds=10), place("2", wants={"a": 4}, start=5)
    assert free(left_for_later(inventory(10, 10), [], [first, second], 0)) == [2, 10]
    later = place("2", wants={"a": 4}, start=10)
    assert free(left_for_later(inventory(10, 10), [], [first, later], 0)) == [6, 10]
    assert free(left_for_later(inventory(10, 10), [], [first, later], 0, from_ns=6 * SECOND)) == [6, 10]
    assert free(left_for_later(inventory(10, 10), [], [first, later], 0, from_ns=6 * SECOND, ends_ns=8 * SECOND)) == [6, 10]


def test_the_moments_at_which_something_comes_free() -> None:
    leases = [lease(a=1, ends=3), lease(a=1), lease(a=1, ends=9), lease(a=1, ends=1)]
    places = [place(start=4, seconds=2), place(start=4), place(seconds=5), place(start=0, seconds=1)]
    assert moments(leases, places, 2 * SECOND) == [3 * SECOND] * 1 + [6 * SECOND, 9 * SECOND]


def test_idle_devices() -> None:
    own = Device(id="a", kind="cuda", name="GPU", total_bytes=10, free_bytes=2, processes=(DeviceProcess(pid=1, used_bytes=3, own=True),))
    assert free(idle(Inventory(devices=(own,), host_total_bytes=1, host_free_bytes=1, source="nvml"), [])) == [7], "its own stays"
    assert free(idle(inventory(2, 0), [lease(a=1)])) == [10, 10]
    assert free(idle(inventory(2, 0, source="cpu"), [lease(a=1)])) == [3, 0], "the host has others than runs"
    assert free(without(inventory(2, 9), [lease(a=1, b=5)])) == [3, 10]


# -- for all ---------------------------------------------------------------------------------------------------------------------------

_sizes = st.fixed_dictionaries({}, optional=dict.fromkeys(DEVICES, st.integers(1, TOTAL)))
_leases = st.lists(st.builds(lambda sizes, ends: lease(ends=ends, **sizes), _sizes, st.none() | st.integers(0, 12)), max_size=4)
_places = st.lists(
    st.builds(
        lambda wants, start, seconds: place(wants=wants, start=start, seconds=seconds),
        _sizes,
        st.none() | st.integers(0, 12),
        st.none() | st.integers(1, 6),
    ),
    max_size=4,
)


def level(device: str, at: int, there: int, leases: list[Lease], places: list[Place]) -> int:
    """What is free at a second, by counting: leases that have ended, places that run."""
    found = there
    for one in leases:
        if one.ends_ns is not None and one.ends_ns <= at * SECOND:
            found += one.bytes.get(device, 0)
    for one in places:
        start = one.start_ns
        if start is not None and start <= at * SECOND and (one.seconds is None or at * SECOND < start + one.seconds * SECOND):
            found -= one.wants.get(device, 0)
    return found


@settings(max_examples=300, deadline=None)
@given(_leases, _places, st.integers(0, TOTAL), st.integers(0, TOTAL), st.none() | st.integers(1, 30))
def test_who_is_behind_delays_nobody_ahead(leases: list[Lease], places: list[Place], a: int, b: int, ends: int | None) -> None:
    found = left_for_later(inventory(a, b), leases, places, 0, ends_ns=None if ends is None else ends * SECOND)
    for device, there in zip(found.devices, (a, b), strict=True):
        taken = device.free_bytes
        assert 0 <= taken <= there
        for one in places:
            if not one.wants.get(device.id):
                continue
            if one.start_ns is None:
                assert taken == 0 or taken + sum(each.wants.get(device.id, 0) for each in places) <= TOTAL
                continue
            at = one.start_ns // SECOND
            if ends is not None and ends <= at:
                continue
            before = level(device.id, at, there, leases, places)
            assert before < 0 or before - taken >= 0, "it would have had room, and has"
            if before < 0:
                assert taken == 0, "nobody adds to a shortage"


@settings(max_examples=300, deadline=None)
@given(_leases, _places, st.integers(0, TOTAL))
def test_no_less_is_left_than_could_be(leases: list[Lease], places: list[Place], there: int) -> None:
    """One byte more would be missing to somebody, at some second, by trying all."""
    known = [one for one in places if one.start_ns is not None]
    (found, _) = left_for_later(inventory(there, 0), leases, known, 0).devices
    starts = [one.start_ns // SECOND for one in known if one.start_ns is not None and one.wants.get("a")]
    most = max((size for size in range(there + 1) if all(level("a", at, there, leases, known) >= size for at in starts)), default=0)
    assert found.free_bytes == most


@settings(max_examples=200, deadline=None)
@given(_leases, _places, st.integers(0, TOTAL), st.integers(0, TOTAL))
def test_what_is_left_grows_from_moment_to_moment(leases: list[Lease], places: list[Place], a: int, b: int) -> None:
    """So that the first moment at which a plan fits can be found by halves."""
    times = moments(leases, places, 0)
    found = [free(left_for_later(inventory(a, b), leases, places, 0, from_ns=at)) for at in times]
    assert all(x <= y for before, after in pairwise(found) for x, y in zip(before, after, strict=True))
