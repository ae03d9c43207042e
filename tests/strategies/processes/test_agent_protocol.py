"""All ranks stop at the same boundary, whatever the moment of asking, and never inside of an accumulation window."""

from __future__ import annotations

import os
import random
import threading
import time
from typing import Any

import pytest

from lightning_autopar._lightning_compat import SIGTERMException
from lightning_autopar.strategies.processes import agent_protocol
from lightning_autopar.strategies.processes.agent_protocol import Ask, ShortageRendezvous, SnapshotRendezvous, StopRendezvous


def _arrive(rendezvous: SnapshotRendezvous, rank: int, *, step: int = 0, in_window: bool = False) -> Ask | None:
    return rendezvous.arrive(rank, step=step, batches_left=None, in_window=in_window)


@pytest.mark.parametrize(("others", "leaves"), [(3, True), (4, False), (None, False)], ids=["same batch", "ahead", "stepped"])
def test_ranks_leave_a_step_that_all_of_them_can_leave(others: int | None, leaves: bool) -> None:
    rendezvous, said = ShortageRendezvous(2), list[bool]()
    rendezvous.enter(1, 77)
    assert not rendezvous.noted
    rendezvous.note()
    assert rendezvous.noted
    peer = threading.Thread(target=lambda: said.append(rendezvous.leave(1, others, 60.0, hear_seconds=60.0)))
    peer.start()
    said.append(rendezvous.leave(0, 3, 60.0, hear_seconds=60.0))
    peer.join()
    assert said == [leaves, leaves]
    assert rendezvous.peers(0) == [77]


def test_nobody_waits_for_ever_for_a_rank_that_is_gone() -> None:
    rendezvous = ShortageRendezvous(2)
    rendezvous.hear(1)
    assert not rendezvous.leave(0, 3, 0.01, hear_seconds=60.0)


def test_a_rank_that_cant_even_hear_isnt_waited_for_as_long_as_one_that_answers_late() -> None:
    assert not ShortageRendezvous(2).leave(0, 3, float("inf"), hear_seconds=0.01)
    rendezvous, said = ShortageRendezvous(2), list[bool]()
    rendezvous.hear(1)
    patient = threading.Thread(target=lambda: said.append(rendezvous.leave(0, 3, 60.0, hear_seconds=0.0)))
    patient.start()
    rendezvous.answer(1, 3)
    patient.join()
    assert said == [True]


def test_nobody_is_held_without_a_request() -> None:
    rendezvous = SnapshotRendezvous(1)
    assert [_arrive(rendezvous, 0) for _ in range(3)] == [None] * 3
    assert rendezvous.progress().boundaries == 3


class AskedBetween:
    """A rendezvous's shared numbers, of which the parent begins a request right after a rank has read that there is none."""

    def __init__(self, cells: Any) -> None:
        self.cells, self.begun = cells, False

    def __getitem__(self, place: int) -> int:
        value = int(self.cells[place])
        if place == agent_protocol._HOLD and not self.begun:
            self.begun = True
            self.cells[agent_protocol._STOP_AT], self.cells[agent_protocol._NUMBER], self.cells[place] = 0, 1, 1
        return value

    def __setitem__(self, place: int, value: int) -> None:
        self.cells[place] = value


def test_a_request_that_begins_while_a_rank_looks_is_for_a_later_boundary() -> None:
    rendezvous = SnapshotRendezvous(1)
    rendezvous._cells = AskedBetween(rendezvous._cells)  # type: ignore[assignment]
    assert _arrive(rendezvous, 0) is None


@pytest.mark.parametrize("seed", range(5))
def test_all_ranks_do_it_at_the_same_boundary(seed: int) -> None:
    """Ranks of separate processes come at times of their own; each reports the boundary at which it was told."""
    draw = random.Random(seed)
    rendezvous, world, children, pipes = SnapshotRendezvous(3), 3, [], []
    for rank in range(world):
        read, write = os.pipe()
        pauses = [draw.uniform(0, 0.004) for _ in range(400)]
        pid = os.fork()
        if pid == 0:
            for number, pause in enumerate(pauses):
                time.sleep(pause)
                if _arrive(rendezvous, rank, step=number) == "pause":
                    rendezvous.answer(rank, done=True, save_seconds=0.0)
                    os.write(write, f"{number}\n".encode())
                    os._exit(0)
            os._exit(1)
        os.close(write)
        children.append(pid)
        pipes.append(read)
    while rendezvous.progress().boundaries < draw.randint(1, 20):
        time.sleep(1e-3)
    rendezvous.ask("pause")
    where = [os.read(pipe, 100) for pipe in pipes]
    assert len(set(where)) == 1
    assert where[0]
    assert rendezvous.answered() is True
    for pid in children:
        os.waitpid(pid, 0)


def test_a_window_of_accumulation_ends_first() -> None:
    rendezvous = SnapshotRendezvous(1)
    _arrive(rendezvous, 0)
    rendezvous.ask("snapshot")
    assert _arrive(rendezvous, 0, in_window=True) is None
    assert rendezvous.answered() is None
    assert _arrive(rendezvous, 0) == "snapshot"


def test_a_request_is_handed_out_once_and_the_next_one_again() -> None:
    rendezvous = SnapshotRendezvous(1)
    for number, done in ((1, True), (2, False), (3, True)):
        assert rendezvous.ask("snapshot") == number
        assert _arrive(rendezvous, 0) == "snapshot"
        rendezvous.answer(0, done=done, save_seconds=0.25)
        assert rendezvous.answered() is done
        assert rendezvous.progress().save_seconds == 0.25
        assert _arrive(rendezvous, 0) is None


def test_a_rank_that_waits_is_let_go_when_the_request_is_void() -> None:
    """Its agent withdraws what other ranks can't answer any more."""
    rendezvous = SnapshotRendezvous(2)
    rendezvous.ask("pause")
    told: list[Ask | None] = []
    thread = threading.Thread(target=lambda: told.append(_arrive(rendezvous, 0)))
    rendezvous.withdraw()
    thread.start()
    thread.join(5)
    assert told == [None]


def test_the_pace_is_rank_0s() -> None:
    rendezvous = SnapshotRendezvous(2)
    pace = rendezvous.progress()
    assert (pace.boundaries, pace.step, pace.batches_left, pace.batch_seconds, pace.save_seconds, pace.at) == (
        0,
        -1,
        None,
        None,
        None,
        None,
    )
    began = time.monotonic()
    rendezvous.arrive(0, step=4, batches_left=10, in_window=False)
    assert rendezvous.progress().boundaries == 0  # the other one hasn't come
    rendezvous.arrive(1, step=4, batches_left=10, in_window=False)
    time.sleep(0.01)
    rendezvous.arrive(0, step=5, batches_left=9, in_window=False)
    pace = rendezvous.progress()
    assert (pace.boundaries, pace.step, pace.batches_left) == (1, 5, 9)
    assert pace.batch_seconds is not None
    assert 0.01 <= pace.batch_seconds <= time.monotonic() - began
    rendezvous.tell_memory(1, 7, None)
    assert rendezvous.used_bytes() == [0, 7]


def test_a_failure_counts_where_the_rank_that_failed_was() -> None:
    """Another rank may not have come there when it is ended, one time so, another time not."""
    rendezvous = SnapshotRendezvous(2)
    assert rendezvous.furthest_step() == -1
    rendezvous.arrive(0, step=4, batches_left=None, in_window=False)
    rendezvous.arrive(1, step=5, batches_left=None, in_window=False)
    assert rendezvous.furthest_step() == 5


def test_whether_a_failure_is_final_is_the_agents_to_say() -> None:
    rendezvous = SnapshotRendezvous(1)
    assert not rendezvous.final
    rendezvous.final = True
    assert rendezvous.final


# -- the brake --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", [KeyboardInterrupt, SIGTERMException])
@pytest.mark.parametrize("seed", range(3))
def test_ranks_of_any_pace_leave_at_the_same_boundary(seed: int, reason: type[BaseException]) -> None:
    stop_rendezvous = StopRendezvous(4)
    left_at: dict[int, tuple[int, type[BaseException]]] = {}
    running = threading.Barrier(5)

    def run(rank: int) -> None:
        dice = random.Random(100 * seed + rank)
        for count in range(1, 10_000):
            try:
                stop_rendezvous.boundary(rank)
            except BaseException as error:
                left_at[rank] = count, type(error)
                return
            if count == 5:
                running.wait()
            time.sleep(dice.random() * 0.003)

    began = time.monotonic()
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    running.wait()
    assert not stop_rendezvous.stopping
    stop_rendezvous.stop(reason)
    for thread in threads:
        thread.join()
    assert len(left_at) == 4
    assert len(set(left_at.values())) == 1
    assert left_at[0][0] > 5
    assert left_at[0][1] is reason
    assert stop_rendezvous.stopping
    assert 0 < stop_rendezvous.longest_seconds < time.monotonic() - began
