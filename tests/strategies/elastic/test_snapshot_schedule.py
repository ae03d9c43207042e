"""Snapshots are asked for as often as their cost allows, one at a time, and what couldn't be written costs nothing but a warning."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_autopar.strategies.elastic.snapshot_schedule import Saver, SnapshotSettings
from lightning_autopar.strategies.processes.agent_protocol import SnapshotRendezvous


class Clock:
    """Time as the test sets it."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Shelf:
    """Keeps what it is given to keep."""

    def __init__(self) -> None:
        self.kept: list[Path] = []
        self.discarded: list[Path] = []
        self.targets = 0

    def latest(self) -> Any:
        return None

    def target(self, *, on_disk: bool = False) -> Path:
        self.targets += 1
        return Path(f"{'disk' if on_disk else 'memory'}/s{self.targets}")

    def keep(self, path: Path, step: int) -> Any:
        self.kept.append(path)
        return SimpleNamespace(path=path, step=step)

    def discard(self, path: Path) -> None:
        self.discarded.append(path)


class Run:
    """A generation of one rank that comes to a boundary when it is told to, and saves in ``takes`` seconds."""

    def __init__(self, saver: Saver, clock: Clock, takes: float) -> None:
        self.rendezvous = SnapshotRendezvous(1)
        self.saver, self.clock, self.takes = saver, clock, takes
        self.elastic = SimpleNamespace(rendezvous=self.rendezvous, request=lambda target: None, refusal=lambda: "the disk is full")
        self.saves: list[float] = []

    def until(self, now: float, *, done: bool = True) -> None:
        """Batches of a second each."""
        while self.clock.now < now:
            self.clock.now += 1.0
            if self.rendezvous.arrive(0, step=int(self.clock.now), batches_left=None, in_window=False):
                self.saves.append(self.clock.now)
                self.rendezvous.answer(0, done=done, save_seconds=self.takes)
            self.saver.watch(self.elastic)  # type: ignore[arg-type]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("lightning_autopar.strategies.elastic.snapshot_schedule.time", clock)
    return clock


def begun(clock: Clock, moving: SnapshotSettings, takes: float = 0.5) -> tuple[Saver, Shelf, Run]:
    snapshots = Shelf()
    saver = Saver(snapshots, moving, 10**9)  # type: ignore[arg-type]
    saver.begin()
    return saver, snapshots, Run(saver, clock, takes)


def test_the_first_one_comes_at_once_and_all_of_them_cost_their_share(clock: Clock) -> None:
    _, snapshots, run = begun(clock, SnapshotSettings(overhead=0.01))
    run.until(1100.0)
    assert run.saves[0] == 102.0, "at the second boundary, as nothing is asked before the first"
    assert run.saves[1] >= 200.0, "the second one pays for the first as well"
    for number, at in enumerate(run.saves[1:], 2):
        assert number * run.takes <= 0.011 * (at - 100.0)
    assert len(run.saves) >= 18, "and no more seldom than that"
    assert len(snapshots.kept) == len(run.saves)


def test_a_fixed_time_is_kept(clock: Clock) -> None:
    _, _, run = begun(clock, SnapshotSettings(snapshot_seconds=10.0))
    run.until(150.0)
    gaps = [after - before for before, after in pairwise(run.saves)]
    assert gaps
    assert all(10 < gap <= 12 for gap in gaps)


def test_what_could_not_be_written_is_said_and_removed(clock: Clock) -> None:
    saver, snapshots, run = begun(clock, SnapshotSettings(snapshot_seconds=10.0))
    with pytest.warns(UserWarning, match="the disk is full"):
        run.until(105.0, done=False)
    assert snapshots.kept == []
    assert len(snapshots.discarded) == 1
    assert saver.latest is None
    run.until(130.0)
    assert snapshots.kept, "the next one is tried again"


def test_a_full_disk_that_has_no_room_for_the_request_is_said(clock: Clock) -> None:
    def full(target: Path) -> None:
        raise OSError(28, "No space left on device")

    saver, snapshots, run = begun(clock, SnapshotSettings(snapshot_seconds=10.0))
    said: list[str] = []
    saver._say = said.append
    works, run.elastic.request = run.elastic.request, full
    run.until(105)
    assert said == ["autopar: a snapshot couldn't be asked for: [Errno 28] No space left on device"]
    assert len(snapshots.discarded) == 1
    run.elastic.request = works
    run.until(130)
    assert run.saves, "it is tried again"


def test_one_that_is_asked_for_comes_soon(clock: Clock) -> None:
    saver, _, run = begun(clock, SnapshotSettings(snapshot_seconds=1000.0))
    run.until(110.0)
    assert len(run.saves) == 1
    saver.soon()
    run.until(113.0)
    assert len(run.saves) == 2


def test_what_ranks_that_ended_had_begun_is_removed(clock: Clock) -> None:
    saver, snapshots, run = begun(clock, SnapshotSettings())
    run.rendezvous.arrive(0, step=1, batches_left=None, in_window=False)
    saver.watch(run.elastic)  # type: ignore[arg-type]
    assert saver.waits
    saver.give_up(run.elastic)  # type: ignore[arg-type]
    assert not saver.waits
    assert len(snapshots.discarded) == 1


def test_a_pause_that_a_hung_worker_never_comes_to_is_given_up() -> None:
    saver = Saver(Shelf(), SnapshotSettings(), 0)  # type: ignore[arg-type]
    hung = SimpleNamespace(gone=False, paused=False)
    run: Any = Run(saver, Clock(), 0.0)
    run.generation, run.round = hung, lambda noted, **_: None
    assert saver.pause(run, [], within_seconds=0.05) is False
