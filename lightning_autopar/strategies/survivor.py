"""A rank that lives on after another one died, hung or ran out of memory: it saves the run as it was at the last boundary.

Rank 0 writes notes at each boundary (``state.notes``, ``carried``) into the generation's folder, which outlives it. Parameters and
optimizer states any rank of a replicated plan has; one that is left writes them, where it is certain that they are those of the boundary:

- it is at the very boundary that the notes are of (in an accumulation window: the one that the window began at);
- no update has begun since: the end of the optimizer's closure takes a lock, which whoever saves holds;
- the tensors' versions and sums are what they were at that boundary (``guard``).

Otherwise it says why it can't, and the run goes back to its last snapshot. It doesn't know what the agent makes of it.
"""

from __future__ import annotations

import shutil
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torchmetrics import Metric

from lightning_autopar._lightning_compat import bare_optimizer
from lightning_autopar.state.notes import large_tensors, make_snapshot, write_notes
from lightning_autopar.strategies import resume
from lightning_autopar.strategies.carried import carry
from lightning_autopar.strategies.guard import Guard
from lightning_autopar.strategies.journal import Journal
from lightning_autopar.units import format_seconds

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_autopar.strategies.boundary import Elastic
    from lightning_autopar.strategies.results import Before

#: Plans under which each rank has all parameters and optimizer states.
REPLICATED = frozenset({"single", "ddp"})
#: Notes are timed so many at a time, to see whether they are worth it.
_TIMED = 8
#: How often a rank looks whether another one has failed.
_LOOK_SECONDS = 0.05


class Survivor:
    """One rank's notes and what it can save.

    Args:
        trainer: with the engine installed.
        elastic: the generation's.
        before: the survey of before the fork.
        rank: this rank.
    """

    def __init__(self, trainer: Trainer, elastic: Elastic, before: Before, rank: int) -> None:
        self._trainer, self._elastic, self._before, self._rank = trainer, elastic, before, rank
        self._engine: Any = trainer.strategy
        self._guard = Guard()
        #: Held while the state is saved, and while it may not be.
        self._lock = threading.Lock()
        self._dirty = True
        self._noted = 0
        self._saved = False
        self._why: str | None = None
        self._no_notes: str | None = None
        self._off = elastic.notes_share == 0.0
        self._times: deque[tuple[float, float]] = deque(maxlen=_TIMED)
        self._event: Any = None
        if not self._off:
            self._watch_updates()
            threading.Thread(target=self._wait_for_failure, name="autopar-survivor", daemon=True).start()

    # -- while all is well -------------------------------------------------------------------------------------------------------------

    def note(self, boundary: int, journal: Journal | None) -> None:
        """Remember this boundary, outside of an accumulation window; on rank 0, write the notes of it.

        Args:
            boundary: its number, the same on all ranks.
            journal: of rank 0.
        """
        if self._off:
            return
        if self._elastic.gate.noted < 0 or (not self._noted and not self._may_note()):
            self._off = True
            return
        started = time.perf_counter()
        with self._lock:
            self._wait_if_saved()
            self._guard.note(*self._tensors())
            if self._engine.root_device.type == "cuda":
                self._event = torch.cuda.Event()
                self._event.record()
            self._noted, self._dirty = boundary, False
        if self._rank == 0:
            why = self._write(boundary, journal)
            self._say_why_no_notes(why)
            self._times.append((started, time.perf_counter() - started))
            self._weigh()

    def _may_note(self) -> bool:
        """Whether notes make sense in this run at all; where they don't, rank 0 says why."""
        plan, trainer = self._engine.assignment.plan, self._trainer
        module = trainer.lightning_module
        owners: list[Any] = [module, *trainer.callbacks]  # type: ignore[attr-defined]  # set by a connector
        hooks = [type(each).__name__ for each in owners if _is_overridden(each, "on_save_checkpoint")]
        owners = [*trainer.callbacks, *([] if trainer.datamodule is None else [trainer.datamodule])]  # type: ignore[attr-defined]  # as above
        states = [type(each).__name__ for each in owners if _is_users(each, "state_dict")]
        why = None
        if plan.engine not in REPLICATED:
            why = f"under {plan.title()} no worker has all of it"
        elif not module.automatic_optimization:
            why = "the module optimizes manually, so that nobody knows where in a step it was"
        elif hooks:  # it would run at every batch, on one rank alone
            why = f"{', '.join(hooks)} defines on_save_checkpoint, which is to run for checkpoints only"
        elif states and plan.world_size > 1 and self._elastic.notes_share < float("inf"):
            why = f"{', '.join(states)} defines state_dict, which may need all ranks; CheckpointMigrate(survivors=True) says it doesn't"
        if self._rank == 0 and why is not None:
            self._elastic.gate.noted = -1
            self._say_why_no_notes(why)
        return why is None

    def _write(self, boundary: int, journal: Journal | None) -> str | None:
        """Write the notes of this boundary; why not, where they would be none of all ranks."""
        engine, trainer, gate = self._engine, self._trainer, self._elastic.gate
        if engine.splits and self._metrics_are_in_parts():
            return "each worker has a part of the module's metrics"
        slot = (gate.noted + 1) % 2
        folder = self._elastic.notes(slot)

        def complete(checkpoint: dict[str, Any]) -> None:
            resume.lay_aside(trainer, checkpoint, splits=False, at_boundary=True)

        try:
            folder.mkdir(exist_ok=True)
            carry(trainer, self._before, folder, 0)
            where = None if journal is None else journal.position()
            with warnings.catch_warnings():  # of values that an earlier generation logged, Lightning doesn't know that they are everybody's
                warnings.filterwarnings("ignore", message="It is recommended to use .self.log.*sync_dist=True")
                write_notes(trainer, folder, complete, {"step": trainer.global_step, "journal": where})
        except Exception as error:  # a full disk, a stranger's object: what is lost is a chance
            gate.noted = -1
            return f"what goes with it couldn't be written: {type(error).__name__}: {error}"
        gate.noted = 2 * boundary + slot
        return None

    def _metrics_are_in_parts(self) -> bool:
        """Whether a metric may have seen something in training: a part of it is on each rank, and only all ranks bring that together.

        A rank without rows of a batch is no witness of what others saw of it.
        """
        trainer: Any = self._trainer
        metrics = [each for each in trainer.lightning_module.modules() if isinstance(each, Metric)]
        share = self._engine.share()
        if metrics and share is not None and not share.rows:
            return True
        logged = trainer.fit_loop.epoch_loop._results.values()
        return any(each._update_count for each in metrics) or any(not each.is_tensor for each in logged)

    def _weigh(self) -> None:
        """Leave notes alone where they take more of a batch than they may, by the medians of some batches."""
        if len(self._times) < _TIMED:
            return
        begun, takes = zip(*self._times, strict=True)
        batch = sorted(later - earlier for earlier, later in pairwise(begun))[_TIMED // 2 - 1]
        note = sorted(takes)[_TIMED // 2]
        self._times.clear()
        if note > self._elastic.notes_share * batch:
            why = (
                f"notes of each batch for it would take {format_seconds(note)} of {format_seconds(batch)}, more than "
                f"{self._elastic.notes_share:.2%}"
            )
            self._elastic.gate.noted = -1
            self._say_why_no_notes(why)
            self._off = True
            rank_zero_info(f"autopar: after a failure this run goes back to its last snapshot: {why}")

    def _say_why_no_notes(self, why: str | None) -> None:
        if why is not None and why != self._no_notes:
            self._elastic.say_why_not_saved(self._rank, why)
        self._no_notes = why

    def _watch_updates(self) -> None:
        """Know when an update begins: when the closure is over that an optimizer's step begins with."""
        original: Callable[..., Any] = self._engine.optimizer_step

        def optimizer_step(optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
            def last() -> Any:
                value = closure()
                self._update_begins()
                return value

            return original(optimizer, last, *args, **kwargs)

        vars(self._engine)["optimizer_step"] = optimizer_step

    def _update_begins(self) -> None:
        if self._off or self._dirty:
            return
        if self._engine.root_device.type == "cuda":
            # The host runs ahead of the device: it must not ask for an update before it knows that the gradients came together.
            torch.cuda.current_stream(self._engine.root_device).synchronize()
        with self._lock:
            self._wait_if_saved()
            self._dirty = True

    def _wait_if_saved(self) -> None:
        """The run goes on elsewhere from what was saved: nothing may follow it here. The agent ends this process."""
        if self._saved:
            threading.Event().wait()

    def _tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """What must be as it was, and what only an update writes to."""
        return large_tensors(self._trainer.lightning_module), list(_states(self._engine.optimizers))

    # -- when something failed ---------------------------------------------------------------------------------------------------------

    def save_in_time(self, seconds: float) -> None:
        """As :meth:`save`, by a rank that failed itself: rank 0 may be some moments from noting the boundary where this one is.

        Args:
            seconds: to wait for that.
        """
        until = time.monotonic() + seconds
        while 0 <= self._elastic.gate.noted // 2 < self._noted and not self._off and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS / 10)
        self.save()

    def save(self) -> None:
        """Write the snapshot of the noted boundary, if this rank can vouch for it and no other one does."""
        if self._off:
            return
        with self._lock, torch.no_grad():
            if self._saved:
                return
            noted = self._elastic.gate.noted
            with _beside(self._engine.root_device, self._event):
                try:
                    why = self._why_not(noted) or self._make(noted % 2)
                except Exception as error:  # a full disk, a device that is gone
                    why = f"{type(error).__name__}: {error}"
        if why is not None and why != self._why:
            self._why = why
            self._elastic.say_why_not_saved(self._rank, why)

    def _why_not(self, noted: int) -> str | None:
        if self._no_notes is not None:
            return self._no_notes
        if noted <= 0:
            return "there are no notes"
        if self._dirty:
            return "an update had begun"
        if noted // 2 != self._noted:
            return "rank 0 and this one were at different batches"
        return None if self._guard.is_same(*self._tensors()) else "weights were written to outside of an update"

    def _make(self, slot: int) -> str | None:
        """The snapshot; why not, where the state was changed meanwhile."""
        partial, whole = self._elastic.saving, self._elastic.saved
        try:
            partial.mkdir()
        except FileExistsError:
            return "another rank was at it"
        try:
            if whole.exists():
                return "another rank has done it"
            make_snapshot(self._engine, self._elastic.notes(slot), partial)
            if not self._guard.is_same(*self._tensors()):
                return "weights were written to while they were saved"
            partial.rename(whole)
            self._saved = True
            return None
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _wait_for_failure(self) -> None:
        """In a thread of its own: another rank has failed, and this one may be in a collective that nobody ends (NCCL), or hang itself."""
        while not self._saved:
            time.sleep(_LOOK_SECONDS)
            if self._elastic.gate.to_be_saved and not self._dirty:
                if self._engine.root_device.type == "cuda":
                    torch.cuda.set_device(self._engine.root_device)
                self.save()


class _beside:
    """On a GPU, work beside what its streams wait for, but after the noted boundary; elsewhere nothing.

    Args:
        device: the rank's.
        event: recorded at the boundary.
    """

    def __init__(self, device: torch.device, event: Any) -> None:
        self._stream: Any = None
        if device.type == "cuda" and event is not None:
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_event(event)

    def __enter__(self) -> None:
        if self._stream is not None:
            self._context = torch.cuda.stream(self._stream)
            self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._stream is not None:
            self._context.__exit__(*error)


def _states(optimizers: Iterable[Any]) -> Iterable[Tensor]:
    for optimizer in optimizers:
        for state in getattr(bare_optimizer(optimizer), "state", {}).values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _is_overridden(target: Any, hook: str) -> bool:
    """Whether a module or a callback has a hook that isn't its base class's."""
    base = LightningModule if isinstance(target, LightningModule) else Callback
    return hook in vars(target) or getattr(type(target), hook, None) is not getattr(base, hook)


def _is_users(target: Any, hook: str) -> bool:
    """Whether a callback's or a DataModule's hook is neither Lightning's nor this package's."""
    return not str(getattr(getattr(target, hook), "__module__", "")).startswith(("lightning.", "lightning_autopar."))
