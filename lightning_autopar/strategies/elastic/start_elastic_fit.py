"""Puts together an elastic call of ``fit``: what its agent needs of the trainer, the strategy and the host.

It recognises the callbacks that make a run elastic by their attributes. It doesn't decide where the run should be.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from lightning_autopar._lightning import Trainer, rank_zero_info, rank_zero_warn
from lightning_autopar._lightning_compat import SIGTERMException, TrainerFn
from lightning_autopar.report.report import NothingFits
from lightning_autopar.sharing.runs.own_status import RunDisplay
from lightning_autopar.sharing.runs.status import Request
from lightning_autopar.state.snapshot_folder import is_snapshot
from lightning_autopar.strategies.base.run_plan import BatchRule
from lightning_autopar.strategies.elastic.agent import Agent, Watcher
from lightning_autopar.strategies.elastic.generation_progress import RunningGeneration, own_bytes
from lightning_autopar.strategies.elastic.kept_leases import Promises
from lightning_autopar.strategies.elastic.snapshot_schedule import SnapshotSettings
from lightning_autopar.strategies.elastic.snapshot_store import SnapshotStore, run_key
from lightning_autopar.strategies.elastic.yielding import Yielding
from lightning_autopar.strategies.preparation.decision import Decision, MoveRequest
from lightning_autopar.strategies.preparation.more_parts import in_more_parts, in_parts_of
from lightning_autopar.strategies.preparation.planning_inputs import decide_again
from lightning_autopar.strategies.processes.handover import back_to_script as handover
from lightning_autopar.strategies.processes.worker import WorkerJob
from lightning_autopar.strategies.processes.worker_supervisor import Outcome, noted_interrupts, run_folder

if TYPE_CHECKING:
    from lightning_autopar.devices.inventory import Inventory
    from lightning_autopar.strategies.base.strategy_protocol import RunHost

#: How long a run stays off a device that it was asked to leave, unless it is told otherwise.
YIELD_SECONDS = 600.0
_DOOR_SECONDS = 0.1

#: Counts this process's elastic runs: a script may call ``fit`` several times.
_runs = 0


def asked_for(trainer: Trainer) -> SnapshotSettings | None:
    """How the user wants the run to be saved and moved; None where no callback says so."""
    callbacks: Sequence[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    found = (getattr(callback, "autopar_moving", None) for callback in callbacks)
    return next((how for how in found if isinstance(how, SnapshotSettings)), None)


def snapshot_settings(trainer: Trainer, batch: BatchRule) -> SnapshotSettings | None:
    """How the run is to be saved and moved; None where no callback asks for it, or nothing is trained.

    Raises:
        ValueError: if each device draws batches of its own.
    """
    asked = asked_for(trainer)
    if trainer.state.fn != TrainerFn.FITTING or not (asked or watchers(trainer)):
        return None
    if batch == "per_device":
        raise ValueError(
            "batch='per_device' gives each device batches of its own, so that a run on other devices would have other batches; use "
            "batch='global', or leave out CheckpointMigrate and ElasticReplan"
        )
    return asked or SnapshotSettings()


def watchers(trainer: Trainer) -> list[Watcher]:
    """The trainer's callbacks that decide where the run should be."""
    callbacks: Sequence[Any] = trainer.callbacks  # type: ignore[attr-defined]  # as above
    # A callback that has every attribute (a mock) has no number for the interval.
    return [
        callback
        for callback in callbacks
        if callable(getattr(callback, "look", None)) and isinstance(getattr(callback, "interval_seconds", "none"), (int, float, type(None)))
    ]


class ElasticRun:
    """One elastic call of ``fit``.

    Args:
        trainer: as before the run.
        call: of the trainer's function, with its arguments by name.
        shown: where the run is shown, and asked for something.
    """

    def __init__(
        self,
        strategy: RunHost,
        trainer: Trainer,
        decision: Decision,
        call: partial[Any],
        how: SnapshotSettings,
        shown: RunDisplay,
    ) -> None:
        global _runs
        _runs += 1
        self._strategy, self._trainer, self._decision, self._how = strategy, trainer, decision, how
        self._call, self._shown = call, shown
        self.before = handover.survey(trainer)
        self.number = _runs
        footprint = decision.report.footprint
        self.state_bytes = footprint.parameter_bytes + footprint.optimizer_bytes
        self.agent: Agent | None = None

    def run(self, restore: Callable[[Outcome, WorkerJob], Any]) -> Any:
        """Train; returns what ``restore`` makes of the outcome, while the results' files are there."""
        keep = False
        snapshots = SnapshotStore(self.key(), self._how.home(self._trainer.default_root_dir), self.state_bytes)
        try:
            with run_folder(self.state_bytes) as folder, noted_interrupts() as noted, _told_to_move() as told:
                self.agent = Agent(
                    make_job=self._job,
                    decision=self._decision,
                    moving=self._how,
                    watchers=watchers(self._trainer),
                    handler=Requests(self._shown, told, self._trainer),
                    snapshots=snapshots,
                    folder=folder,
                    inventory=self._inventory,
                    replan=self._replan,
                    in_more_parts=partial(in_more_parts, self._trainer),
                    state_bytes=self.state_bytes,
                    on_change=self._changed,
                    promises=Promises(self._strategy.leases, self._devices_now),
                    preempt=Yielding(self._strategy.leases),
                )
                try:
                    ended = self.agent.run(noted)
                except Exception:  # an error of the agent or a watcher, not of code in the workers
                    keep = True
                    raise
                return restore(*ended)
        except SIGTERMException:  # also a second interruption, which doesn't wait
            keep = True
            raise
        finally:
            snapshots.close(keep=keep)

    def key(self) -> str:
        """The key by which the next start of the same script finds this run."""
        module, trainer = self._trainer.lightning_module, self._trainer
        shapes = [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]
        limits = trainer.max_epochs, trainer.max_steps, trainer.limit_train_batches, trainer.accumulate_grad_batches
        path = self._call.keywords.get("ckpt_path")
        where = os.getcwd(), trainer.default_root_dir
        return run_key(sys.argv, where, self.number, type(module).__qualname__, shapes, limits, str(path), str(trainer.precision))

    def _job(self, decision: Decision, folder: Path) -> WorkerJob:
        resumed = self.agent is not None and self.agent.has_snapshot
        path = self._call.keywords.get("ckpt_path")
        return WorkerJob(
            run_plan=replace(decision.run_plan, from_snapshot=resumed or is_snapshot(path), elastic=True),
            make_engine=self._strategy.make_engine,
            trainer=self._trainer,
            call=self._call,
            folder=folder,
            before=self.before,
        )

    def _inventory(self, running: RunningGeneration | None) -> Inventory:
        host_bytes = 0 if running is None else host_bytes_of(running.generation.pids())
        found, _ = self._strategy.inventory(fewer=True, own_host_bytes=host_bytes)
        return _with_own(found, running)

    def _devices_now(self, running: RunningGeneration | None) -> Inventory:
        host_bytes = 0 if running is None else host_bytes_of(running.generation.pids())
        return _with_own(self._strategy.devices_now(own_host_bytes=host_bytes), running)

    def _replan(self, inventory: Inventory, samples_at_once: int | None) -> Decision:
        return in_parts_of(samples_at_once, self._trainer, decide_again(self._trainer, self._decision, inventory), inventory)

    def _changed(self, decision: Decision) -> None:
        self._strategy.report, self._strategy.plan = decision.report, decision.run_plan.plan


def _with_own(found: Inventory, running: RunningGeneration | None) -> Inventory:
    """The inventory, with what the run itself holds counted as free."""
    devices = tuple(replace(device, free_bytes=device.free_bytes + own_bytes(running, device)) for device in found.devices)
    return replace(found, devices=devices)


def host_bytes_of(pids: Sequence[int]) -> int:
    """Bytes of the host's memory that processes hold by themselves: resident, without files and shared memory."""
    held_bytes = 0
    for pid in pids:
        with suppress(psutil.Error):  # the process has just ended
            memory = psutil.Process(pid).memory_info()
            held_bytes += max(0, memory.rss - getattr(memory, "shared", 0))
    return held_bytes


class Requests:
    """Takes the requests of others on the run's host, and shows the run's status.

    Args:
        told: signals that came.
        trainer: for the number of steps.
    """

    def __init__(self, shown: RunDisplay, told: list[int], trainer: Trainer) -> None:
        self._shown, self._told, self._trainer = shown, told, trainer
        self._looked = 0.0

    def look(self, agent: Agent) -> MoveRequest | None:
        """Show the run's status, take the requests, and return the move that follows from them."""
        now = time.monotonic()
        if now - self._looked < _DOOR_SECONDS:
            return None
        self._looked = now
        self.show(agent)
        requests = self._shown.requests()
        while self._told:
            self._told.pop()
            requests.append(Request(ask="yield", device=None, at=time.time(), by="SIGUSR1"))
        move: MoveRequest | None = None
        for request in requests:
            made, words = self._answer(agent, request)
            rank_zero_info(f"autopar: asked by {request.by} to {request.ask}: {words}")
            self._shown.answer(request, words)
            if made is not None and (move is None or move.action != "park"):  # a run that parks leaves every device
                move = made
        return move

    def _answer(self, agent: Agent, request: Request) -> tuple[MoveRequest | None, str]:
        if request.ask == "snapshot":
            agent.save_soon()
            return None, "it writes a snapshot after this batch"
        if request.ask == "resume":
            was_held = agent.paused_by_user
            agent.allow_again()
            if agent.parked:
                return None, "it goes on as soon as there is room for it"
            return None, "it doesn't park" if was_held else "the run isn't paused; it uses any device again"
        if request.ask == "park":
            agent.paused_by_user = True
            if agent.parked:
                return None, "it is parked already, and stays parked until it is resumed"
            words = "it saves a snapshot after this batch, releases its devices, and stays parked until it is resumed"
            return MoveRequest(action="park", decision=None, reason=f"{request.by} asked for it", urgent=True), words
        held = agent.decision.run_plan.plan.devices
        leaves = held if request.device is None else tuple(device for device in held if device == request.device)
        agent.leave(held if request.device is None else (request.device,), YIELD_SECONDS)
        if agent.parked or not leaves:
            return None, "it is parked, and uses no device now" if agent.parked else f"it doesn't use {request.device}"
        reason = f"{request.by} asked it to leave {', '.join(leaves)}"
        try:
            decision = agent.replan(agent.inventory())
        except NothingFits:
            return MoveRequest(
                action="park", decision=None, reason=f"{reason}, and nothing else fits", urgent=True
            ), "it saves a snapshot and parks, as no other plan fits"
        plan = decision.run_plan.plan
        words = f"it moves to {plan.title()} on {', '.join(plan.devices)}"
        return MoveRequest(action="move", decision=decision, reason=reason, urgent=True), words

    def show(self, agent: Agent) -> None:
        """Show the run's status."""
        plan, accumulated = agent.decision.run_plan.plan, self._trainer.accumulate_grad_batches
        spans = agent.recorder.spans
        span = spans[-1] if spans else None
        left, step, batch_seconds = agent.remaining_steps, agent.step, agent.step_seconds
        known = left < float("inf")
        since = {} if span is None else {"since": time.time() - (agent.recorder.seconds() - span.start_seconds)}
        self._shown.show(
            state="parked" if agent.parked else "moving" if agent.moving else "running",
            plan="" if agent.parked else plan.title(),
            devices=() if agent.parked else plan.devices,
            predicted_bytes={} if agent.parked else agent.decision.run_plan.reserved_bytes,
            used_bytes=agent.measured_bytes,
            step=step,
            steps=None if not known or step is None else step + -(-int(left) // accumulated),
            step_seconds=None if batch_seconds is None else batch_seconds * accumulated,
            ends_at=None if not known or batch_seconds is None or agent.parked else time.time() + left * batch_seconds,
            generation=len(spans),
            reason="" if span is None else span.reason,
            elastic=True,
            waits_for="",
            **since,
        )


@contextmanager
def _told_to_move() -> Iterator[list[int]]:
    """While open, SIGUSR1 asks the run to move off its devices; the user's own handler is called first."""
    told: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        rank_zero_warn("autopar: fit isn't called from the main thread, so that SIGUSR1 can't ask this run to move")
        yield told
        return
    before = signal.getsignal(signal.SIGUSR1)
    if before not in (signal.SIG_DFL, None):
        yield told
        return
    signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
    try:
        yield told
    finally:
        signal.signal(signal.SIGUSR1, before)
