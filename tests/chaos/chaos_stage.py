"""How a chaotic run is driven: what happens at which batch, in memory that agent and workers share; and what each worker writes down.

Workers wait at the batch at which something is to happen until it does, so that a schedule is the same at each run of the test.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch

from lightning_autopar.plans import Plan
from lightning_autopar.state import snapshot
from lightning_autopar.strategies.base.engine_mixin import EngineMixin
from lightning_autopar.strategies.base.process_group import RENDEZVOUS_FILE
from lightning_autopar.strategies.elastic.snapshot_store import SnapshotStore
from lightning_autopar.strategies.preparation.decision import Decision, MoveRequest
from lightning_autopar.strategies.preparation.planning_inputs import decide_again
from lightning_autopar.strategies.processes import between_batches
from lightning_autopar.strategies.processes.agent_protocol import SnapshotRendezvous

#: Where a worker may be killed. ``outside``: by its agent's process, some time after the batch.
KILLED = (
    "outside",
    "before_carrying",
    "before_saving",
    "tensors_saved",
    "saved",
    "preparing",
    "during_preparation",
    "starting",
    "batch_start",
    "validation",
)
#: And where something else may happen to it.
PLACES = (*KILLED, "stopped", "out_of_memory", "exception", "no_space", "damaged", "interrupt")
_NEXT, _PENDING, _REACHED, _ARMED, _VICTIM, _FAULTS, _LEFT, _AT, _RANKS, _PIDS = range(10)
_MOST_RANKS = 8
_WAIT_SECONDS = 60.0


#: So long a worker is looked for that is to be killed.
_KILL_SECONDS = 5.0
_ANSWERED = SnapshotRendezvous.answered


@dataclass(frozen=True, kw_only=True)
class Action:
    """What happens to the run.

    Args:
        at: after so many batches of the run.
        plan: to move to, with "park" through a time without devices.
        what: ``move``, ``park`` or ``fault``.
        where: of a fault, one of :data:`PLACES`.
        rank: of a fault: its victim, modulo the ranks there are.
        after_seconds: of a fault from outside: how long after the batch.
        times: of an exception: how many times it is raised.
    """

    at: int
    what: str
    plan: Plan | None = None
    where: str = ""
    rank: int = 0
    after_seconds: float = 0.0
    times: int = 1


@dataclass(kw_only=True)
class Stage:
    """One chaotic run, in its agent's process.

    Args:
        actions: in their order.
        decisions: what planning said of a plan, for all runs of one variant.
    """

    actions: list[Action]
    decisions: dict[Plan, Decision] = field(default_factory=dict)
    trainer: Any = None
    run: Any = None
    moving: Action | None = None
    doomed: Any = None
    tries: int = 0
    done: list[Action] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    cells: Any = None
    kept: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cells = memoryview(mmap.mmap(-1, 8 * (_PIDS + _MOST_RANKS))).cast("q")
        self._announce()

    def _announce(self) -> None:
        self.cells[_NEXT] = self.actions[0].at if self.actions else -1

    def finish(self) -> None:
        """The first action is over."""
        self.done.append(self.actions.pop(0))
        self._announce()

    def asked(self, what: str, number: int) -> None:
        """The agent has asked its workers for something."""
        self.cells[_PENDING] = number
        if what == "pause" and self.moving is not None:
            self.finish()
            self.moving = None

    @property
    def faults(self) -> int:
        """How many faults there really were."""
        return int(self.cells[_FAULTS])

    # -- in a worker -------------------------------------------------------------------------------------------------------------------

    def enter(self, rank: int, ranks: int) -> None:
        """A worker begins."""
        self.cells[_PIDS + rank], self.cells[_RANKS] = os.getpid(), ranks

    def reach(self, batches: int) -> None:
        """So many batches are done: wait where something is to happen, until the agent has asked for it."""
        cells = self.cells
        cells[_REACHED] = max(cells[_REACHED], batches)
        upcoming, until = cells[_NEXT], time.monotonic() + _WAIT_SECONDS
        while 0 <= upcoming <= batches and cells[_NEXT] == upcoming and not cells[_PENDING]:
            if time.monotonic() > until:
                raise AssertionError(f"nothing happened at batch {batches}")
            time.sleep(1e-3)

    def place(self, name: str, batches: int | None = None) -> None:
        """This worker is at a place where it may be struck, with so many batches begun."""
        cells = self.cells
        if batches is not None and batches <= cells[_AT]:
            return
        if cells[_ARMED] != PLACES.index(name) or cells[_VICTIM] != int(os.environ.get("LOCAL_RANK", "0")):
            return
        if batches is not None:
            cells[_AT] = batches - 1  # again at this batch, not at one before it that is done again
        cells[_LEFT] -= 1
        if cells[_LEFT] <= 0:
            cells[_ARMED] = -1
        cells[_FAULTS] += 1
        if name == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif name == "out_of_memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        elif name == "exception":
            raise ArithmeticError("the user's own")
        elif name == "no_space":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    # -- in the agent ------------------------------------------------------------------------------------------------------------------

    def arm(self, action: Action, ranks: int) -> None:
        """The next worker that comes to the place is struck."""
        self.cells[_VICTIM], self.cells[_LEFT] = action.rank % ranks, action.times
        self.cells[_AT] = action.at
        self.cells[_ARMED] = PLACES.index(action.where)

    def look(self, run: Any) -> MoveRequest | None:
        """What the agent is to do now."""
        self.run = run
        if self.doomed is not None and self.doomed is run._run:
            return None  # one of its workers is to be killed: what comes next happens to those that come after it
        if not self.actions or (not run.parked and self.cells[_REACHED] < self.actions[0].at):
            return None
        action = self.actions[0]
        if run.parked:
            assert action.what == "park", f"the run is parked at {action}"
            move = self._move(run, action)
            self.finish()
            self.moving = None
            return move
        if action.what == "park":
            return MoveRequest(action="park", decision=None, reason="a test")
        if action.what == "move":
            return self._move(run, action)
        ranks = run.decision.run_plan.plan.world_size
        if action.where in ("preparing", "during_preparation", "starting"):
            assert action.plan is not None, "such a fault comes with a move"
            if action.where == "preparing" and self.moving is action and self.cells[_ARMED] == -1:
                self.finish()  # it was struck, and the old workers waited for that: they may be at the run's end
                self.moving = None
                return None
            if run._run.elastic.rendezvous.progress().boundaries == 0:
                return None  # its own workers, forked anew after an earlier fault, would be struck instead
            self.arm(action, action.plan.world_size if action.where != "during_preparation" else ranks)
            if action.where == "during_preparation":
                self._kill_soon(action)
            move = self._move(run, action)
            if action.where == "during_preparation":  # the move may come to nothing
                self.finish()
                self.moving = None
            return move
        if action.where == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        elif action.where == "damaged":
            run.save_soon()  # until `has_kept` finds a second one
            return None
        elif action.where == "outside":
            self._kill_soon(action)
        else:
            self.arm(action, ranks)
            if action.where in ("before_carrying", "before_saving", "tensors_saved", "saved", "no_space"):
                run.save_soon()
        self.finish()
        return None

    def has_kept(self, path: Path) -> None:
        """The agent has kept this snapshot. One that is to be damaged is so before any newer one can be asked for."""
        self.kept = [each for each in (*self.kept, path) if each.exists()]
        if not self.actions or self.actions[0].where != "damaged" or self.cells[_REACHED] < self.actions[0].at or len(self.kept) < 2:
            return
        largest = max((each for each in path.rglob("*") if each.is_file()), key=lambda each: each.stat().st_size)
        os.truncate(largest, largest.stat().st_size - 1)
        self.cells[_FAULTS] += 1
        os.kill(int(self.cells[_PIDS + self.actions[0].rank % self.cells[_RANKS]]), signal.SIGKILL)
        self.finish()

    def _kill_soon(self, action: Action) -> None:
        self.doomed = self.run._run

        def kill() -> None:
            until = time.monotonic() + _KILL_SECONDS
            while time.monotonic() < until:  # a worker may just have left, and the next one not be known yet
                pid = int(self.cells[_PIDS + action.rank % self.cells[_RANKS]])
                with suppress(psutil.NoSuchProcess):
                    if psutil.Process(pid).ppid() == os.getpid():
                        self.cells[_FAULTS] += 1
                        os.kill(pid, signal.SIGKILL)
                        return
                time.sleep(0.005)
            self.doomed = None

        timer = threading.Timer(action.after_seconds, kill)
        timer.daemon = True
        timer.start()

    def _move(self, run: Any, action: Action) -> MoveRequest | None:
        plan = action.plan
        assert plan is not None
        self.tries = self.tries + 1 if self.moving is action else 1
        assert self.tries <= 3, f"a move was given up {self.tries} times: {action}"
        self.moving = action
        if plan not in self.decisions:
            self.decisions[plan] = decide_again(self.trainer, run.decision, run.inventory(), plan=plan)
        return MoveRequest(action="move", decision=self.decisions[plan], reason=f"a test at batch {action.at}")


#: The run that is going on in this process, or in the one that forked it. No attribute of a callback, which would be carried.
current: Stage | None = None


class Watching(pl.Callback):
    """Asks the stage what is to happen, in the main process."""

    interval_seconds = 0.005

    def look(self, run: Any) -> MoveRequest | None:
        assert current is not None
        return current.look(run)


class Notes(pl.Callback):
    """Each worker writes down what it trained on, and what came of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if current is not None:
            current.enter(trainer.global_rank, trainer.world_size)
        _place("starting")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        for name in ("batch_start", "stopped", "out_of_memory", "exception"):
            _place(name, trainer.fit_loop.epoch_loop.batch_progress.total.ready)

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        _place("validation")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        samples = []
        for number, (xs, _, indices) in enumerate(parts):
            samples += [[number, int(index), float(x.double().sum())] for x, index in zip(xs, indices, strict=True)]
        row = {
            "generation": os.path.dirname(os.environ.get(RENDEZVOUS_FILE, "")),
            "rank": trainer.global_rank,
            "ranks": trainer.world_size,
            "epoch": trainer.current_epoch,
            "batch": batch_idx,
            "step": trainer.global_step,
            "loss": float(trainer.callback_metrics["loss_step"]),
            "rate": trainer.optimizers[0].param_groups[0]["lr"],
            "samples": samples,
        }
        with (self.folder / f"notes-{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if current is not None:
            current.reach(trainer.fit_loop.epoch_loop.batch_progress.total.ready)


def _place(name: str, batches: int | None = None) -> None:
    if current is not None:
        current.place(name, batches)


def _at(name: str, function: Callable[..., Any], *, after: bool = False) -> Callable[..., Any]:
    def struck(*args: Any, **kwargs: Any) -> Any:
        if not after:
            _place(name)
        value = function(*args, **kwargs)
        if after:
            _place(name)
        return value

    return struck


@contextmanager
def on_stage(stage: Stage) -> Iterator[None]:
    """While open, this stage's actions happen to the run of this process."""
    global current
    patched: list[tuple[Any, str, Any]] = [
        (between_batches, "write_objects", _at("no_space", _at("before_carrying", between_batches.write_objects)))
    ]
    patched.append((snapshot, "save_snapshot", _at("saved", _at("before_saving", snapshot.save_snapshot), after=True)))
    patched.append((snapshot.dcp, "save", _at("tensors_saved", snapshot.dcp.save, after=True)))
    patched.append((EngineMixin, "prepare", _at("preparing", EngineMixin.prepare)))
    for name in ("ask", "answer", "answered", "withdraw"):
        patched.append((SnapshotRendezvous, name, _told(stage, name, getattr(SnapshotRendezvous, name))))
    patched.append((SnapshotStore, "keep", _kept(stage, SnapshotStore.keep)))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in patched]
    last = current
    for owner, name, value in patched:
        setattr(owner, name, value)
    current = stage
    try:
        yield
    finally:
        current = last
        for owner, name, value in before:
            setattr(owner, name, value)


def _kept(stage: Stage, keep: Callable[..., Any]) -> Callable[..., Any]:
    """``SnapshotStore.keep`` that tells the stage which snapshots there are."""

    def told(snapshots: SnapshotStore, path: Path, step: int) -> Any:
        snapshot = keep(snapshots, path, step)
        stage.has_kept(path)
        return snapshot

    return told


def _told(stage: Stage, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """The gate's method that tells the stage whether ranks are asked for something."""

    def told(rendezvous: SnapshotRendezvous, *arguments: Any, **options: Any) -> Any:
        number = rendezvous.number
        value = method(rendezvous, *arguments, **options)
        if name == "ask":
            stage.asked(arguments[0], value)
        elif name == "answer":
            # The last worker's answer. On a busy machine the agent looks only when the workers have run on, to the run's end.
            if _ANSWERED(rendezvous) is not None and stage.cells[_PENDING] == number:
                stage.cells[_PENDING] = 0
        elif name == "withdraw" or value is not None:
            stage.cells[_PENDING] = 0
        return value

    return told
