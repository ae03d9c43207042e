"""The agent of an elastic run: it keeps one generation of workers at work, and takes the run from plan to plan by snapshots.

It lives in the main process, which stays as it was before the run, so that each generation is forked from the same state. After a failure
it decides with which plan and which memory the run goes on. Callbacks (:class:`Watcher`) decide what to move to and whether;
how a rank saves and resumes is :mod:`lightning_autopar.strategies.processes.between_batches`'s matter.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Protocol

from rich.console import Console

from lightning_autopar._lightning import rank_zero_info, rank_zero_warn
from lightning_autopar._lightning_compat import SIGTERMException
from lightning_autopar.devices.inventory import Inventory, usable
from lightning_autopar.report.report import NothingFits
from lightning_autopar.strategies.base.out_of_memory.gpu_limit import limit_after_out_of_memory
from lightning_autopar.strategies.base.worker_exception import IN_STEP, WorkerFailed, out_of_memory
from lightning_autopar.strategies.elastic.generation_progress import RunningGeneration
from lightning_autopar.strategies.elastic.kept_leases import ParkedPlace, Promises
from lightning_autopar.strategies.elastic.run_state import RunState
from lightning_autopar.strategies.elastic.snapshot_schedule import Saver, SnapshotSettings
from lightning_autopar.strategies.elastic.snapshot_store import SnapshotStore
from lightning_autopar.strategies.elastic.yielding import Yielding
from lightning_autopar.strategies.preparation.decision import Decision, MoveRequest
from lightning_autopar.strategies.preparation.finished_run import learn_shortage
from lightning_autopar.strategies.preparation.more_parts import in_more_evaluation_parts, samples_at_once
from lightning_autopar.strategies.processes.agent_protocol import GenerationFiles, SnapshotRendezvous
from lightning_autopar.strategies.processes.worker import WorkerJob
from lightning_autopar.strategies.processes.worker_supervisor import Generation, Outcome
from lightning_autopar.text import format_bytes, format_seconds


def with_more(decision: Decision, promises: Promises) -> Decision | None:
    """The same plan with more memory promised, where its devices have more; None where they don't. Then no other plan need take its place.

    Args:
        decision: the one under which memory ran out.
        promises: those of the run; no workers of it run now.
    """
    run_plan = decision.run_plan
    wants = limit_after_out_of_memory(run_plan)
    if not wants or not promises.held_bytes or promises.take(wants, None) is not None:
        return None
    most = max(wants, key=lambda device: wants[device])
    rank_zero_info(f"autopar: the run ran out of the memory that it had leased; it now leases {format_bytes(wants[most])} of {most}")
    return replace(decision, run_plan=replace(run_plan, at_least=wants))


def is_still_there(decision: Decision, inventory: Inventory) -> bool:
    """Whether a plan's devices are still there and have room for it."""
    there = {device.id: device.free_bytes for device in usable(inventory).devices}
    needed = decision.run_plan.reserved_bytes
    return all(device in there and needed.get(device, 0) <= there[device] for device in decision.run_plan.plan.devices)


#: How often a parked run without watchers looks whether it fits.
_PARKED_LOOK_SECONDS = 5.0
#: How often a run tells when it expects to end.
_EXPECT_SECONDS = 1.0
#: How long a move waits for its new workers; the old ones go on meanwhile.
_READY_SECONDS = 300.0
#: How long a generation that must leave for good may take from the agent's request to its pause.
_LEAVE_SECONDS = 25.0


class Watcher(Protocol):
    """Decides where the run should be; called in the main process, every ``interval_seconds``."""

    interval_seconds: float

    def look(self, run: RunState) -> MoveRequest | None:
        """What to do now, if anything."""


class RequestHandler(Protocol):
    """Answers what others ask of a run, before any watcher; called in the main process at every round."""

    def look(self, agent: Agent) -> MoveRequest | None:
        """What to do now, if anything."""

    def show(self, agent: Agent) -> None:
        """Show the run's status."""


class Agent(RunState):
    """Runs a call of ``fit`` through as many generations as it takes.

    Args:
        make_job: makes the job of a generation's workers, from decision and folder.
        watchers: asked in their order; the first request counts.
        handler: is asked before the watchers.
        folder: the run's, for files between workers and agent.
        inventory: see :class:`.run_state.RunState`; the same for ``replan``, ``state_bytes``, ``promises`` and ``preempt``.
        in_more_parts: makes the same plan with more micro-batches; None where it can't.
    """

    def __init__(
        self,
        *,
        make_job: Callable[[Decision, Path], WorkerJob],
        decision: Decision,
        moving: SnapshotSettings,
        watchers: Sequence[Watcher],
        handler: RequestHandler | None = None,
        snapshots: SnapshotStore,
        folder: Path,
        inventory: Callable[[RunningGeneration | None], Inventory],
        replan: Callable[[Inventory, int | None], Decision],
        in_more_parts: Callable[[Decision, Inventory], Decision | None],
        state_bytes: int,
        on_change: Callable[[Decision], None],
        promises: Promises,
        preempt: Yielding,
    ) -> None:
        super().__init__(
            decision=decision,
            inventory=inventory,
            replan=replan,
            state_bytes=state_bytes,
            saver=Saver(snapshots, moving, state_bytes),
            promises=promises,
            preempt=preempt,
        )
        self._in_more_parts = in_more_parts
        self._make_job, self._moving, self._watchers, self._handler = make_job, moving, list(watchers), handler
        self._folder, self._on_change = folder, on_change
        self._generations = 0
        self._began = time.monotonic()
        self._looked: dict[int, float] = {}
        self._failures: dict[int, int] = {}
        self._expected_at = -math.inf
        self._seconds_left: float | None = None

    # -- the run -----------------------------------------------------------------------------------------------------------------------

    def run(self, noted: list[type[BaseException]]) -> tuple[Outcome, WorkerJob]:
        """Keep the run going until it is over.

        Args:
            noted: interruptions, as they come.

        Returns:
            the outcome, and the job of the generation that it came from.
        """
        latest = self._saver.latest
        if latest is not None:
            rank_zero_warn(
                f"autopar: an earlier start of this run didn't finish; this start resumes from its snapshot of step {latest.step}. "
                f"To begin anew, remove {latest.path.parent}"
            )
        running = self._begin(self.decision, "the run begins")
        running.elastic.let_begin(None if latest is None else latest.path)
        try:
            while True:
                assert self._run is not None
                running = self._run
                running.round(noted)
                running.note()
                if noted and noted[0] is SIGTERMException:
                    return self._leave(running), running.job
                if running.generation.gone:
                    if running.finished(noted):
                        return running.generation.outcome(noted), running.job
                    outcome = running.generation.outcome(noted)
                    ended = self._recover(running, outcome)
                    if ended is not None:
                        return ended, running.job
                    running.bury()
                    if self._run is None and not self._wait_parked(noted):
                        return self._interrupted(noted[0]), running.job
                    continue
                self._watch_over(running)
                if not self._saver.waits and not noted and (move := self._move()) is not None:
                    self._follow(move, running, noted)
                    if self._run is None and not self._wait_parked(noted):
                        return self._interrupted(noted[0]), running.job
        finally:
            if self._run is not None:
                self._run.generation.end()
            self.recorder.close()

    def save_soon(self) -> None:
        """Write a snapshot at the next boundary."""
        self._saver.soon()

    # -- generations -------------------------------------------------------------------------------------------------------------------

    def _fork(self, decision: Decision) -> RunningGeneration:
        self._generations += 1
        folder = self._folder / f"g{self._generations}"
        folder.mkdir()
        job = self._make_job(decision, folder)
        rendezvous = SnapshotRendezvous(decision.run_plan.plan.world_size)
        elastic = GenerationFiles(rendezvous=rendezvous, begin=get_context("fork").Event(), folder=folder)
        job = replace(job, elastic=elastic)
        in_a_row = max(self._failures.values(), default=0)
        rendezvous.final = in_a_row >= self._moving.failures - 1 or (self._saver.latest is None and not self._failures)
        return RunningGeneration(generation=Generation(job), elastic=elastic, job=job, decision=decision)

    def _begin(self, decision: Decision, reason: str, running: RunningGeneration | None = None) -> RunningGeneration:
        """Let a decision run; its workers may have been forked before."""
        running = running or self._fork(decision)
        self.recorder.begin(decision, reason)
        self._run, self.decision, self.parked = running, decision, False
        self._saver.begin()
        self._on_change(decision)
        return running

    def _watch_over(self, running: RunningGeneration) -> None:
        """Read the generation's progress, have it save when a snapshot is due, and end it when it hangs."""
        rendezvous = running.elastic.rendezvous
        pace = rendezvous.progress()
        if pace.boundaries >= 1 and self._left_at is not None and pace.at is not None:
            pause = pace.at - self._left_at
            self._left_at = None
            self._pauses.append(pause)
            self.recorder.paused(pause)
        if rendezvous.final and pace.boundaries >= 1 and pace.step > max(self._failures, default=-1):
            rendezvous.final = False  # it is past the step where it failed, and has a snapshot to go on from
            self._failures.clear()
        self._saver.watch(running.elastic)
        self._expect(running)
        if running.hangs(self._moving.hang_seconds):
            rank_zero_warn(
                f"autopar: no batch has begun for {format_seconds(self._moving.hang_seconds)} at step {pace.step}; the workers are ended"
            )
            running.generation.end()

    def _expect(self, running: RunningGeneration) -> None:
        """Tell the runs that wait when the devices will be given back."""
        now = time.monotonic()
        if running.step_seconds is not None and now - self._expected_at > _EXPECT_SECONDS:
            self._expected_at = now
            self._seconds_left = self.remaining_steps * running.step_seconds
            self._promises.expect(self._seconds_left)

    # -- moves -------------------------------------------------------------------------------------------------------------------------

    def _move(self) -> MoveRequest | None:
        """The next request: of the handler, of a more important run, or of a watcher whose interval is over; None where there is none."""
        now = time.monotonic()
        if self._handler is not None and (move := self._handler.look(self)) is not None:
            return move
        if self._run is not None and (move := self._make_room()) is not None:
            return move
        for watcher in [] if self.paused_by_user else self._watchers:
            if now - self._looked.get(id(watcher), self._began) >= watcher.interval_seconds:
                self._looked[id(watcher)] = now
                move = watcher.look(self)
                if move is not None:
                    return move
        return None

    def _make_room(self) -> MoveRequest | None:
        """The request to make room for a more important run that waits, if any."""
        since = self._began if self.moved_at is None else self.moved_at
        return self._preempt.look(since=since, plan=self.replan, seen=self._allowed, decision=self.decision)

    def _follow(self, move: MoveRequest, running: RunningGeneration, noted: list[type[BaseException]]) -> None:
        """Move or park. If a failure or the end of training comes first, the caller sees that."""
        if move.action == "park":
            rank_zero_info(f"autopar: the run is parked: {move.reason}")
            if self._saver.pause(running, noted, on_disk=True, within_seconds=self._moving.hang_seconds):
                self._left_at = running.elastic.rendezvous.progress().at
                self._park(move.reason)
                running.bury()
            return
        assert move.decision is not None
        if (why := self._promises.prepare(move.decision.run_plan.needed_bytes, running)) is not None:
            rank_zero_info(f"autopar: the run doesn't move to {move.decision.run_plan.plan.title()}: {why}")
            return
        rank_zero_info(f"autopar: the run moves to {move.decision.run_plan.plan.title()}: {move.reason}")
        self.moving = True
        if self._handler is not None:
            self._handler.show(self)
        following = self._fork(move.decision)
        self._saver.provide(running.decision.run_plan.plan.world_size)
        until = time.monotonic() + _READY_SECONDS
        try:
            while not following.generation.ready and not following.generation.failed and not running.generation.gone:
                following.generation.round([], timeout_seconds=0.005)
                running.round(noted, timeout_seconds=0.005)
                if time.monotonic() > until:
                    rank_zero_warn(f"autopar: the run doesn't move: the new workers weren't ready after {_READY_SECONDS:g} s")
                    return
            if following.generation.failed:
                rank_zero_warn(f"autopar: the run doesn't move: the new workers failed: {following.why()}")
                return
            if running.generation.gone or not self._saver.pause(running, noted, within_seconds=self._moving.hang_seconds):
                return
            assert self._saver.latest is not None, "it was just made"
            self._left_at, self.moved_at = running.elastic.rendezvous.progress().at, time.monotonic()
            following.elastic.let_begin(self._saver.latest.path, self._changes_to(move.decision, move.reason))
            self._begin(move.decision, move.reason, following)
            self._promises.settle()
            running.bury()
        finally:
            self.moving = False
            self._promises.drop()
            if self._run is not following:
                following.bury()

    def _park(self, reason: str) -> None:
        """The run is parked: no workers run, and the devices are free."""
        self.recorder.park(reason)
        self._promises.release()
        self._run, self.parked, self.moved_at = None, True, time.monotonic()

    def _wait_parked(self, noted: list[type[BaseException]]) -> bool:
        """Wait until the run fits again and has begun; False if it was interrupted."""
        console = Console(stderr=True)
        if not console.is_terminal:
            return self._wait_until_it_fits(noted)
        with console.status(f"parked at step {self.step}: {self.recorder.spans[-1].reason}; waiting for room"):
            return self._wait_until_it_fits(noted)

    def _wait_until_it_fits(self, noted: list[type[BaseException]]) -> bool:
        place = ParkedPlace(self._promises, self._preempt, self._seconds_left)
        try:
            return self._wait_in_turn(noted, place)
        finally:
            place.leave()

    def _wait_in_turn(self, noted: list[type[BaseException]], place: ParkedPlace) -> bool:
        looked = 0.0
        while not noted:
            if self.paused_by_user:
                place.leave()  # its owner wants it to stay parked
            else:
                place.look(self._allowed, self.replan)
            move = self._move()
            if move is None and not self._watchers and not self.paused_by_user and time.monotonic() - looked > _PARKED_LOOK_SECONDS:
                looked = time.monotonic()
                try:
                    move = MoveRequest(action="move", decision=self.replan(self.inventory()), reason="it fits again")
                except NothingFits:
                    move = None
            if move is not None and move.decision is not None and self._why_not_promised(move.decision) is None:
                rank_zero_info(f"autopar: the parked run goes on under {move.decision.run_plan.plan.title()}: {move.reason}")
                self.moved_at = time.monotonic()
                self._resume(move.decision, move.reason)
                return True
            time.sleep(0.05)  # the run waits for files, and for memory that others release
        return False

    def _resume(self, decision: Decision, reason: str) -> None:
        snapshot = self._saver.look_back()
        changes = self._changes_to(decision, reason)
        running = self._begin(decision, reason)
        running.elastic.let_begin(None if snapshot is None else snapshot.path, changes)

    def _why_not_promised(self, decision: Decision) -> str | None:
        """Get a decision's memory promised while no workers run; returns why that failed, in words, or None."""
        return self._promises.take(decision.run_plan.needed_bytes, None)

    def _leave(self, running: RunningGeneration) -> Outcome:
        """The run must leave the machine: save on disk and end, within the time that a machine gives."""
        if self._saver.pause(running, [], on_disk=True, within_seconds=_LEAVE_SECONDS):
            assert self._saver.latest is not None, "it was just made"
            rank_zero_info(f"autopar: terminated at step {self._saver.latest.step}; the next start of this run goes on from there")
        running.generation.end()
        return self._interrupted(SIGTERMException)

    def _interrupted(self, kind: type[BaseException]) -> Outcome:
        """The outcome of an interrupted run that has no workers any more."""
        return Outcome(results=[], error=kind(), saved=kind is SIGTERMException and self._saver.latest is not None)

    # -- what wasn't planned -----------------------------------------------------------------------------------------------------------

    def _fitting(self, running: RunningGeneration) -> Decision | None:
        """A decision that fits the devices as they are now, if possible the one that ran; None where nothing fits."""
        inventory = self.inventory()
        if is_still_there(running.decision, inventory):
            return running.decision
        try:
            return self.replan(inventory)
        except NothingFits:
            return None

    def _with_less(self, running: RunningGeneration, error: BaseException, step: int) -> Decision | None:
        """After a plan ran out of memory: it with more memory promised, it with more micro-batches, or a plan that takes less; None where
        there is none of these. Each can follow another only a bounded number of times.
        """
        decision = running.decision
        if (grown := with_more(decision, self._promises)) is not None:
            return grown
        if getattr(error, IN_STEP, False) and (divided := self._in_more_parts(decision, self.inventory())) is not None:
            self.samples_at_once = samples_at_once(divided)
            return divided
        if (divided := in_more_evaluation_parts(decision, error)) is not None:
            return divided
        self._avoided.lower(decision.run_plan.reserved_bytes)
        try:
            return self.replan(self.inventory())
        except NothingFits:
            # Nobody else can lift limits that the run set itself: it would stay parked for ever.
            self._avoided.lift()
            return None

    def _recover(self, running: RunningGeneration, outcome: Outcome) -> Outcome | None:
        """Go on after a failure; returns the outcome if the run is over."""
        error, pace = outcome.error, running.elastic.rendezvous.progress()
        assert error is not None, "else it is finished"
        self._saver.give_up(running.elastic)
        short = out_of_memory(error)
        theirs = not isinstance(error, WorkerFailed) and not short
        step = running.elastic.rendezvous.furthest_step()
        if theirs and (running.elastic.rendezvous.final or pace.boundaries == 0):
            return outcome
        learn_shortage(running.decision.report, error)
        # Once no plan was smaller, the same one is tried again, as another process may have had the memory; and that not for ever.
        less = self._with_less(running, error, step) if short and step not in self._failures else None
        if less is None:
            self._failures = {step: self._failures.get(step, 0) + 1}
            if self._failures[step] >= self._moving.failures:
                return outcome
        snapshot = self._saver.look_back()
        where = "from the beginning" if snapshot is None else f"from the snapshot of step {snapshot.step}"
        under = "" if less is None else f" under {less.run_plan.plan.title()}"
        rank_zero_warn(f"autopar: a failure at step {step}, the run goes on {where}{under}: {type(error).__name__}: {error}")
        self.recorder.failed(f"{type(error).__name__} at step {step}: {error}")
        self._left_at = pace.at
        decision = self._fitting(running) if less is None else less
        why = "" if decision is not None else f"nothing fits after {type(error).__name__}: {error}"
        if decision is not None and decision is not running.decision and (missing := self._why_not_promised(decision)) is not None:
            why = f"after {type(error).__name__} another run took the memory first: {missing}"
        if decision is None or why:
            rank_zero_info(f"autopar: the run is parked: {why}")
            self._park(why)
            return None
        self._resume(decision, f"{type(error).__name__} at step {step}")
        return None
