"""What of a batch a rank runs, for when memory runs out in it: where that was, and the step undone, so that all ranks can leave it.

Knows an engine and its step's state; neither the other ranks, nor who asks.
"""

from __future__ import annotations

from collections.abc import Callable
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

import torch

from lightning_autopar.devices.discover import of_its_gpu
from lightning_autopar.exact.step.step_rollback import StepState
from lightning_autopar.strategies.base.out_of_memory.gpu_limit import shortage_words
from lightning_autopar.strategies.base.out_of_memory.rerun import free_memory
from lightning_autopar.strategies.base.process_group import join_group
from lightning_autopar.strategies.base.worker_exception import AT_FIRST, IN_STEP, LACKED, WHERE, out_of_memory

if TYPE_CHECKING:
    from lightning_autopar.strategies.base.engine_mixin import EngineMixin

#: All parts of a batch but the last run their backward where Lightning runs the forward, and a pipeline all of them: ``BOTH``.
FORWARD, BACKWARD, BOTH, OPTIMIZER = (
    "the forward", "the backward", "the forward and the backward", "the optimizer's step",
)  # fmt: skip
#: Of these, what a batch that is run again runs anew.
_IN_STEP = FORWARD, BACKWARD, BOTH


class RunningStep:
    """The batch that a rank runs."""

    def __init__(self, engine: EngineMixin) -> None:
        self._engine: Any = engine
        #: The part of the batch that runs now, one of the words above; empty between batches.
        self.place = ""
        #: How many training batches have begun in this process.
        self.begun = 0
        #: Whether all ranks leave a step together in which one of them runs out of memory, if it can be undone.
        self.leaves = False
        #: The state in which it began; None where it isn't left.
        self.found: StepState | None = None
        #: Called when the gradients of a batch are complete.
        self.before_optimizer: Callable[[], None] = lambda: None

    def begin(self, place: str) -> None:
        """The user's training step begins; ``place`` says what runs in it."""
        if self.found is not None:
            self.found.note(self._engine._logging, self._engine._draws)
        self.place = place

    def complete(self) -> None:
        """The batch's gradients are complete."""
        self.place = OPTIMIZER
        self.before_optimizer()
        if self.found is not None:
            self.found.drop()

    @property
    def samples_at_once(self) -> int | None:
        """How many samples fitted at once, after a batch ran out of memory and was run again; None where none was."""
        reruns = self._engine._reruns
        return None if reruns is None else reruns.samples_at_once

    def explain(self, error: BaseException) -> None:
        """If memory ran out, add to the exception where, what was promised and predicted of a GPU, and what to do; to an error of CUDA's
        what is wrong with the GPU, if the driver knows.
        """
        engine = self._engine
        device = engine.run_plan.devices[engine._rank]
        if isinstance(error, torch.AcceleratorError) and (said := of_its_gpu(device)):
            error.add_note(f"autopar: this is rank {engine._rank} on {device.id}{said}")
        if not out_of_memory(error) or WHERE in vars(error):  # it may be asked of a rank that couldn't leave its step
            return
        self._describe(error)
        if self.place_of(error) in _IN_STEP and engine.run_plan.undivided is not None:
            error.add_note(f"autopar: the batch wasn't run again in more parts: {engine.run_plan.undivided}")
        if device.kind == "cuda":
            error.add_note(shortage_words(engine.run_plan, engine._rank, engine.gpu_limit))
            if engine.gpu_limit is not None:
                vars(error)[LACKED] = {device.id: engine.gpu_limit.lacked_bytes()}

    def _describe(self, error: BaseException) -> None:
        engine, trainer = self._engine, self._engine._trainer
        automatic = trainer.training and trainer.lightning_module.automatic_optimization
        place = self.place_of(error)
        batch = f" of batch {trainer.fit_loop.epoch_loop.batch_idx}" if trainer.training and place else ""
        plan, rank = engine.run_plan.plan, engine._rank
        which = f"{plan.devices[rank]} of rank {rank}" if plan.world_size > 1 else plan.devices[rank]
        where = f"{which} ran out of memory in {place or 'a hook'}{batch}"
        vars(error).update({IN_STEP: automatic and self.in_step, AT_FIRST: self.begun <= 1, WHERE: where})

    @property
    def in_step(self) -> bool:
        """Whether the batch's forward or backward runs."""
        return self.place in _IN_STEP

    def place_of(self, error: BaseException) -> str:
        """Where an exception was raised, in the words above; empty for a hook. Nobody tells this object of a step's end, nor of the
        optimizers' steps in manual optimization: who called whom says so.
        """
        if not self._engine._trainer.training:
            return self.place
        called = {frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__)}
        if not called & {"training_step", "backward", "optimizer_step"}:
            return ""
        return OPTIMIZER if called >= {"training_step", "optimizer_step"} and self.place == BACKWARD else self.place

    def undo(self) -> None:
        """Undo the running step, after it failed on some rank and before any rank began its optimizer's step; no communication. This
        process runs no step any more.
        """
        engine = self._engine
        assert self.found is not None, "asked before"
        if hasattr(engine, "give_up_gathered"):
            engine.give_up_gathered()
        if engine._micro is not None:
            engine._micro.gradients.give_up()
        self.found.put_back(engine._logging, engine._draws)
        self.found.drop()
        engine._arguments = (), {}
        for parameter in engine.lightning_module.parameters():
            parameter.grad = None
        free_memory()

    def join_again(self, backend: str) -> None:
        """Join a new process group, after the old one was given up; a collective."""
        join_group(self._engine, backend)
        if self._engine._logging is not None:
            self._engine._logging.join_again()
