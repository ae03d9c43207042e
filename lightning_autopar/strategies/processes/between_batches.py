"""A rank of an elastic run at the boundary between two batches: it reports its progress, writes snapshots, leaves and resumes.

All of it happens before a batch is fetched: the step before is over, its validation as well, and the next one hasn't begun. The module also
keeps a list of checkpoint files that the run wrote since its latest snapshot. A run that goes back to the snapshot removes them; otherwise
``ModelCheckpoint``, whose state comes from the snapshot, would write the same checkpoint under another name ("-v1") and leave the file
behind. It doesn't know why a snapshot is wanted, nor what runs next.
"""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning_utilities.core import rank_zero

from lightning_autopar._lightning import ProgressBar, Trainer, get_filesystem
from lightning_autopar._lightning_compat import mute_hooks, no_hyperparameters
from lightning_autopar.exact.random import generator_states as rng
from lightning_autopar.sharing.runs.progress import batches_left
from lightning_autopar.strategies.processes.agent_protocol import BEGIN, GenerationFiles, ShortageRendezvous
from lightning_autopar.strategies.processes.handover.to_next_generation import carry_loggers_in, read_objects, whole_shards, write_objects

if TYPE_CHECKING:
    from lightning_autopar.strategies.processes.handover.back_to_script import Before


_SUFFIX = ".since"


class CheckpointJournal:
    """Records the files that were written since one snapshot.

    Args:
        beside: the snapshot's folder, or another path that stands for the run's beginning; the journal lies beside it.
    """

    def __init__(self, beside: Path) -> None:
        self._beside = beside
        self._path = beside.with_name(beside.name + _SUFFIX)

    def note(self, file: str) -> None:
        """A file is about to be written. One that exists already is left out: the run will write it again."""
        if get_filesystem(file).exists(file):
            return
        with self._path.open("a", encoding="utf-8") as journal:
            journal.write(json.dumps(file) + "\n")

    def undo(self, remove: Callable[[str], None]) -> None:
        """Remove the files written since, also those after later snapshots; on the process that writes, before it writes anything."""
        for path in self._journals():
            if path.name >= self._path.name:
                for line in path.read_text(encoding="utf-8").splitlines():
                    remove(json.loads(line))
                path.unlink()

    def clear(self) -> None:
        """Remove the journals of snapshots that no longer exist."""
        for path in self._journals():
            if not path.with_name(path.name.removesuffix(_SUFFIX)).exists() and path != self._path:
                path.unlink()

    def _journals(self) -> Iterator[Path]:
        yield from sorted(self._beside.parent.glob(f"{self._beside.name[:1]}*{_SUFFIX}"))


#: Hooks that the first generation has run: their effects are handed over.
MUTED = frozenset({"prepare_data", "on_fit_start", "on_train_start"})


class Paused(BaseException):
    """All ranks leave at this boundary, after a snapshot. It is no Exception, so that no hook of the user sees it."""


class Boundary:
    """One rank's boundaries.

    Args:
        trainer: with the engine installed.
        elastic: the generation's files; None in a class whose ranks meet in another way.
        before: the survey made before the fork.
    """

    def __init__(self, trainer: Trainer, elastic: GenerationFiles | None, before: Before, rank: int) -> None:
        self._trainer, self._before, self._rank = trainer, before, rank
        if elastic is not None:
            self._elastic = elastic
        self._epoch_loop: Any = trainer.fit_loop.epoch_loop
        self._advance: Callable[[Any], None] = self._epoch_loop.advance
        #: Says whether a rank has run out of memory, where all ranks leave a batch together.
        self._shortage: ShortageRendezvous | None = None
        vars(self._epoch_loop)["advance"] = self._meet_and_advance
        #: Only on rank 0, which writes checkpoints; None until the run begins or goes on.
        self._journal: CheckpointJournal | None = None
        if rank == 0:
            self._note_checkpoints()

    def _note_checkpoints(self) -> None:
        engine = self._trainer.strategy
        save: Callable[..., None] = engine.save_checkpoint

        def save_checkpoint(checkpoint: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
            if self._journal is not None:
                self._journal.note(str(filepath))
            save(checkpoint, filepath, *args, **kwargs)

        vars(engine)["save_checkpoint"] = save_checkpoint

    def _go_on_after(self, beside: Path) -> None:
        """The run goes on from here: remove what it wrote after this point before it was lost."""
        if self._rank == 0:
            self._journal = CheckpointJournal(beside)
            self._journal.undo(self._trainer.strategy.remove_checkpoint)

    def begin_anew(self) -> None:
        """Before the trainer's function runs: where an earlier generation has lost what it did, its loggers go on as they began."""

    def take_up(self, snapshot: Path) -> None:
        """Before the trainer's function runs, prepare this process to go on from a snapshot; the rest follows when the loops begin."""
        trainer, engine = self._trainer, self._trainer.strategy
        self._go_on_after(snapshot)
        carry_loggers_in(trainer, self._before, snapshot)
        say_again = _say_no_restore()
        unmute = mute_hooks(MUTED, heard_by=ProgressBar)
        log_again = no_hyperparameters(trainer)

        def go_on() -> None:
            read_objects(trainer, self._before, snapshot)
            log_again()
            unmute()
            say_again()

        engine.before_loops = go_on  # type: ignore[attr-defined]  # of EngineMixin
        rng.restore(self._before.random, {})

    def _meet_and_advance(self, data_fetcher: Any) -> None:
        """``_TrainingEpochLoop.advance``, after a boundary."""
        try:
            if self._shortage is not None:
                self._shortage.look()
            self._meet()
            self._advance(data_fetcher)
            return
        except Exception as error:  # several classes say that memory ran out, or that a peer is gone; the others are raised
            if not self._leaves(error):
                raise
        # Outside of the handler, as the exception holds the failed step's tensors.
        self._save_here()
        raise Paused

    def _leaves(self, error: Exception) -> bool:
        """Whether all ranks leave the batch that one of them couldn't finish, with a snapshot of the state before it; the same on all."""
        return False

    def _save_here(self) -> None:
        """Undo the batch's step and write that snapshot."""

    def _meet(self) -> None:
        """All ranks are at this boundary, or will be: report, and save or leave here if the agent asks for it."""
        rendezvous, trainer = self._elastic.rendezvous, self._trainer
        if self._journal is None:
            self._go_on_after(self._elastic.folder.parent / BEGIN)
        rendezvous.tell_memory(self._rank, self._used_bytes(), trainer.strategy.samples_at_once)  # type: ignore[attr-defined]  # of EngineMixin
        ask = rendezvous.arrive(self._rank, step=trainer.global_step, batches_left=batches_left(trainer), in_window=self._in_window)
        if ask is not None:
            trainer.strategy.meter.pause(trainer.strategy)  # type: ignore[attr-defined]  # a snapshot is no part of a step
            started = time.monotonic()
            saved = self._save(target := self._elastic.target())
            if saved and self._rank == 0:
                self._journal = CheckpointJournal(target)
                self._journal.clear()
            rendezvous.answer(self._rank, done=saved, save_seconds=time.monotonic() - started)
            if saved and ask == "pause":
                raise Paused

    @property
    def _in_window(self) -> bool:
        """Whether gradients of earlier batches still wait for their optimizer's step."""
        return self._epoch_loop.batch_progress.current.ready > 0 and bool(self._epoch_loop._should_accumulate())

    def _used_bytes(self) -> int:
        device = self._trainer.strategy.root_device
        if device.type == "cuda":
            return torch.cuda.memory_reserved(device)
        return 0

    def _save(self, target: Path) -> bool:
        """Write a snapshot, all ranks together; False on every rank if one rank failed."""
        from lightning_autopar.state.snapshot import save_snapshot  # takes long to import, and most runs write none

        trainer, engine = self._trainer, self._trainer.strategy

        def make_folder() -> None:
            target.mkdir(parents=True, exist_ok=True)

        shards: list[Any] = []

        def gather() -> None:
            shards.extend(whole_shards(trainer, self._before, self._rank))

        def bring() -> None:
            write_objects(trainer, self._before, target, self._rank, shards)

        def save() -> None:
            engine.at_boundary = True  # type: ignore[attr-defined]  # of EngineMixin
            try:
                save_snapshot(trainer, target)
            finally:
                engine.at_boundary = False  # type: ignore[attr-defined]

        # All ranks must know that one rank failed before they wait for it in a collective.
        return all(self._do_together(part) for part in (make_folder, gather, bring, save))

    def _do_together(self, part: Callable[[], None]) -> bool:
        """Do a part of the saving; False on every rank if one rank failed."""
        from torch.distributed.checkpoint.api import CheckpointException

        failure: BaseException | None = None
        try:
            part()
        except (Exception, CheckpointException) as error:  # a full disk, a user's object: training goes on; the agent hears
            failure = error
            self._refuse(error)
        if self._trainer.strategy.run_plan.plan.world_size == 1:  # type: ignore[attr-defined]  # of EngineMixin
            return failure is None
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, failure is None)
        return all(everyones)

    def _refuse(self, error: BaseException) -> None:
        self._elastic.refuse(error)

    def close_bars(self) -> None:
        """Close the progress bars: the next generation makes its own."""
        if self._rank == 0:
            for callback in self._trainer.callbacks:  # type: ignore[attr-defined]  # set by a connector
                if isinstance(callback, ProgressBar):
                    callback.teardown(self._trainer, self._trainer.lightning_module, "fit")


def say_no_folder() -> None:
    """Keep Lightning from warning that a checkpoint folder has files: this run has written them."""
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")


def _say_no_restore() -> Callable[[], None]:
    """Keep Lightning from logging that it restores a checkpoint, and that its folder has files: the user has asked for neither. Returns a
    function that allows messages on checkpoints again; the warning of the folder stays off, as each setup of a callback would repeat it.
    """
    say_no_folder()
    speaker = rank_zero.log  # of ``_CheckpointConnector``'s ``rank_zero_info``: the one of that Lightning which was imported last

    def is_other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(("Restoring states from the checkpoint path", "Restored all states from the checkpoint"))

    speaker.addFilter(is_other)
    return lambda: speaker.removeFilter(is_other)
