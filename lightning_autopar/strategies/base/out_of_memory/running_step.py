"""What of a batch a rank runs, for when memory runs out in it: where that was, and the step undone, so that all ranks can leave it.

Knows an engine and its step's state; neither the other ranks, nor who asks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any

import torch

from lightning_autopar._root import is_users
from lightning_autopar.devices.discover import of_its_gpu
from lightning_autopar.exact.step.step_rollback import StepState
from lightning_autopar.strategies.base.out_of_memory.gpu_limit import shortage_words
from lightning_autopar.strategies.base.out_of_memory.rerun import free_memory
from lightning_autopar.strategies.base.process_group import join_group
from lightning_autopar.strategies.base.worker_exception import AT_FIRST, IN_STEP, LACKED, WHERE, out_of_memory

#: All parts of a batch but the last run their backward where Lightning runs the forward, and a pipeline all of them: ``BOTH``.
FORWARD, BACKWARD, BOTH, OPTIMIZER = (
    "the forward", "the backward", "the forward and the backward", "the optimizer's step",
)  # fmt: skip
#: Of these, what a batch that is run again runs anew.
_IN_STEP = FORWARD, BACKWARD, BOTH
#: Words in the errors of code that refuses to run in several processes.
_SEVERAL = re.compile(r"\b(ddp|fsdp|deepspeed|distributed\w*|multi-?(gpu|process|device)\w*|world.?size)\b", re.IGNORECASE)


@dataclass(kw_only=True)
class RunningStep:
    """The batch that a rank runs.

    Args:
        place: the part of the batch that runs now, one of the words above; empty between batches.
        begun: how many training batches have begun in this process.
        leaves: whether all ranks leave a step together in which one of them runs out of memory, if it can be undone.
        found: the state in which it began; None where it isn't left.
        before_optimizer: called when the gradients of a batch are complete.
    """

    place: str = ""
    begun: int = 0
    leaves: bool = False
    found: StepState | None = None
    before_optimizer: Callable[[], None] | None = None

    @property
    def in_step(self) -> bool:
        """Whether the batch's forward or backward runs."""
        return self.place in _IN_STEP


def explain(engine: Any, error: BaseException) -> None:
    """If memory ran out, add to the exception where, what was promised and predicted of a GPU, and what to do; to an error of CUDA's
    what is wrong with the GPU, if the driver knows; and that other ranks run the user's code, to one of a file that is there already, or
    that speaks of several processes before the first batch.

    Args:
        engine: an :class:`.EngineMixin`, on whose rank it was raised.
    """
    device = engine.run_plan.devices[engine._rank]
    if isinstance(error, torch.AcceleratorError) and (said := of_its_gpu(device)):
        error.add_note(f"autopar: this is rank {engine._rank} on {device.id}{said}")
    ranks = engine.run_plan.plan.world_size
    if isinstance(error, FileExistsError) and ranks > 1:
        error.add_note(
            f"autopar: this is rank {engine._rank} of {ranks}, and all of them run this code: another one may have made {error.filename!r} "
            "first. Let it be there (exist_ok=True), or make it where trainer.is_global_zero is true"
        )
    at_start = ranks > 1 and not engine.running.begun
    if at_start and _SEVERAL.search(str(error)) and any(is_users(frame) for frame, _ in [*walk_tb(error.__traceback__)][-1:]):
        error.add_note(
            f"autopar: this is rank {engine._rank} of {ranks}, under the plan {engine.run_plan.plan.title()!r}. If the code that raised "
            "this can't run in several processes, start the script by python, not torchrun: AutoParallelStrategy(allow=['single']) plans "
            "for one"
        )
    if not out_of_memory(error) or WHERE in vars(error):  # it may be asked of a rank that couldn't leave its step
        return
    trainer, running = engine._trainer, engine.running
    automatic = trainer.training and trainer.lightning_module.automatic_optimization
    place = place_of(engine, error)
    batch = f" of batch {trainer.fit_loop.epoch_loop.batch_idx}" if trainer.training and place else ""
    plan, rank = engine.run_plan.plan, engine._rank
    which = f"{plan.devices[rank]} of rank {rank}" if plan.world_size > 1 else plan.devices[rank]
    where = f"{which} ran out of memory in {place or 'a hook'}{batch}"
    vars(error).update({IN_STEP: automatic and running.in_step, AT_FIRST: running.begun <= 1, WHERE: where})
    if place_of(engine, error) in _IN_STEP and engine.run_plan.undivided is not None:
        error.add_note(f"autopar: the batch wasn't run again in more parts: {engine.run_plan.undivided}")
    if device.kind == "cuda":
        error.add_note(shortage_words(engine.run_plan, engine._rank, engine.gpu_limit))
        if engine.gpu_limit is not None:
            vars(error)[LACKED] = {device.id: engine.gpu_limit.lacked_bytes()}


def place_of(engine: Any, error: BaseException) -> str:
    """Where an exception was raised, in the words above; empty for a hook. Nobody notes a step's end, nor the optimizers' steps in manual
    optimization: who called whom says so.
    """
    place: str = engine.running.place
    if not engine._trainer.training:
        return place
    called = {frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__)}
    if not called & {"training_step", "backward", "optimizer_step"}:
        return ""
    return OPTIMIZER if called >= {"training_step", "optimizer_step"} and place == BACKWARD else place


def undo(engine: Any) -> None:
    """Undo the running step, after it failed on some rank and before any rank began its optimizer's step; no communication. This
    process runs no step any more.
    """
    found = engine.running.found
    assert found is not None, "asked before"
    if hasattr(engine, "give_up_gathered"):
        engine.give_up_gathered()
    if engine._micro is not None:
        engine._micro.gradients.give_up()
    found.put_back(engine._logging, engine._draws)
    found.drop()
    engine._arguments = (), {}
    for parameter in engine.lightning_module.parameters():
        parameter.grad = None
    free_memory()


def join_again(engine: Any, backend: str) -> None:
    """Join a new process group, after the old one was given up; a collective."""
    join_group(engine, backend)
    if engine._logging is not None:
        engine._logging.join_again()
