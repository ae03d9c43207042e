"""What a running elastic run does for those that wait: it makes room for the more important, once it has had its quantum."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import pytest

from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.sharing.lease_files import Lease
from lightning_autopar.sharing.queue import Place
from lightning_autopar.strategies.elastic import yielding as preempt
from lightning_autopar.strategies.elastic.yielding import Yielding
from lightning_autopar.strategies.preparation.decision import MoveRequest
from tests.fakes.runs import FakeRun
from tests.fakes.traced import traced
from tests.fakes.values import GIB, cpu, inventory

OWN = "autopar-lease-1000-1-00"


class FakeLeases:
    """Who has and wants what, settable."""

    def __init__(self) -> None:
        self.priority, self.since_ns, self.held_names = 0, 1000, {OWN}
        self.waiting: list[Place] = []
        self.granted: list[Lease] = []

    def places(self) -> list[Place]:
        return sorted(self.waiting, key=lambda place: place.order)

    def others(self) -> list[Lease]:
        return self.granted


def place(**figures: Any) -> Place:
    values: dict[str, Any] = {
        "name": "autopar-place-1000-5-00",
        "uid": os.geteuid(),
        "pid": 77,
        "run": "urgent (77)",
        "made_ns": 5,
        "priority": 5,
        "since_ns": 5000,
        "seen_ns": time.monotonic_ns() + 60 * 10**9,  # it is looking all the while
        "asks": (OWN,),
    }
    return Place(**{**values, **figures})


@pytest.fixture
def leases() -> FakeLeases:
    return FakeLeases()


@pytest.fixture
def run() -> FakeRun:
    return FakeRun(traced(), inventory(cpu(0), cpu(1)), allow=("single",))


def look(leases: FakeLeases, run: FakeRun, *, since: float | None = None) -> MoveRequest | None:
    manners = Yielding(leases)  # type: ignore[arg-type]
    began = time.monotonic() - 100 if since is None else since
    return manners.look(since=began, plan=run.replan, seen=run.inventory, decision=run.decision)


def test_it_moves_away_from_what_is_asked_for(leases: FakeLeases, run: FakeRun) -> None:
    leases.waiting = [place(wants={"cpu:0": 4 * GIB})]
    move = look(leases, run)
    assert move is not None
    assert move.action == "move"
    assert move.urgent
    assert move.decision is not None
    assert move.decision.run_plan.plan.devices == ("cpu:1",)
    assert "urgent (77)" in move.reason
    assert "priority 5" in move.reason
    assert "4 GiB of cpu:0" in move.reason


def test_it_parks_where_there_is_nothing_else(leases: FakeLeases, run: FakeRun) -> None:
    leases.waiting = [place(wants={"cpu:0": 4 * GIB, "cpu:1": 4 * GIB})]
    move = look(leases, run)
    assert move is not None
    assert move.action == "park"


def test_it_stays_where_there_is_room_for_both(leases: FakeLeases, run: FakeRun) -> None:
    leases.waiting = [place(wants={"cpu:0": GIB // 1024})]
    assert look(leases, run) is None


@pytest.mark.parametrize(
    "who",
    [
        place(priority=0, wants={"cpu:0": 4 * GIB}),
        place(priority=-5, wants={"cpu:0": 4 * GIB}),
        place(asks=(), wants={"cpu:0": 4 * GIB}),
        place(asks=("autopar-lease-1000-2-00",), wants={"cpu:0": 4 * GIB}),
        place(seen_ns=time.monotonic_ns() - 11 * 10**9, wants={"cpu:0": 4 * GIB}),
    ],
    ids=["as important", "less important", "asks nobody", "asks somebody else", "was stopped"],
)
def test_it_stays_for_others(who: Place, leases: FakeLeases, run: FakeRun) -> None:
    leases.waiting = [who]
    assert look(leases, run) is None


def test_it_stays_for_its_quantum(leases: FakeLeases, run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    leases.waiting = [place(wants={"cpu:0": 4 * GIB})]
    assert look(leases, run, since=time.monotonic() - 30) is None
    assert look(leases, run, since=time.monotonic() - 61) is not None
    monkeypatch.setenv("AUTOPAR_QUANTUM", "3")
    assert look(leases, run, since=time.monotonic() - 30) is not None


def test_whom_it_makes_room_for_is_its_users_choice(leases: FakeLeases, run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = place(wants={"cpu:0": 4 * GIB}), place(uid=os.geteuid() + 1, wants={"cpu:0": 4 * GIB})
    for choice, asking, goes in [
        ("all", theirs, True),
        ("own", theirs, False),
        ("own", mine, True),
        ("none", mine, False),
    ]:
        monkeypatch.setenv(preempt.YIELD_VARIABLE, choice)
        leases.waiting = [asking]
        assert (look(leases, run) is not None) is goes, (choice, asking.uid)
    monkeypatch.setenv(preempt.YIELD_VARIABLE, "nobody")
    with pytest.raises(ValueError, match=r"AUTOPAR_YIELD_TO='nobody' must be 'all', 'own'"):
        Yielding(leases)  # type: ignore[arg-type]


# -- room that others wait for ---------------------------------------------------------------------------------------------------------


def free(there: Inventory) -> dict[str, int]:
    return {device.id: device.free_bytes for device in there.devices}


def test_it_does_not_grow_into_what_others_wait_for(leases: FakeLeases) -> None:
    there, manners = inventory(cpu(0), cpu(1)), Yielding(leases)  # type: ignore[arg-type]
    leases.waiting = [place(priority=0, asks=(), wants={"cpu:1": 3 * GIB}, start_ns=time.monotonic_ns() + 10**12)]
    assert free(manners.leave_room(there, {"cpu:0": 2 * GIB})) == {"cpu:0": 4 * GIB, "cpu:1": GIB}
    leases.priority = 1
    assert free(manners.leave_room(there, {"cpu:0": 2 * GIB})) == {"cpu:0": 4 * GIB, "cpu:1": 4 * GIB}, "of the less important"


def test_what_it_has_nobody_takes_unasked(leases: FakeLeases) -> None:
    there, manners = inventory(cpu(0)), Yielding(leases)  # type: ignore[arg-type]
    leases.waiting = [place(asks=(), wants={"cpu:0": 4 * GIB}, start_ns=time.monotonic_ns() + 10**12)]
    assert free(manners.leave_room(there, {"cpu:0": 2 * GIB})) == {"cpu:0": 2 * GIB}


def test_a_parked_run_waits_its_turn(leases: FakeLeases) -> None:
    there, manners = inventory(cpu(0)), Yielding(leases)  # type: ignore[arg-type]
    first = place(priority=0, since_ns=500, asks=(), wants={"cpu:0": 3 * GIB}, start_ns=time.monotonic_ns() + 10**12)
    leases.waiting = [first]
    assert free(manners.leave_room(there, None)) == {"cpu:0": GIB}
    leases.waiting = [replace(first, since_ns=2000)]
    assert free(manners.leave_room(there, None)) == {"cpu:0": 4 * GIB}, "it asked later"
