"""A batch that ran out of memory, run again in more parts.

The rank that runs out of memory gets over it alone; nothing is agreed on. DDP's ranks exchange nothing in a step's forward, and in backward
each sends its gradients once, however many parts they came from. So the others wait in a collective until this rank is there, as they would
for a slow one, and no communicator is given up.

In forward: what the step has changed is put back (``exact.step.step_rollback``), and the batch runs in twice as many parts
(``exact.step.micro_batches``), with the draws that it had. Hooks aren't called again, and nothing is counted twice.

In backward: a parameter either has its batch's whole gradient by then, and DDP may have sent it, or nothing of it. The forward's results
stand. The batch's graph is dropped; forward and backward run once more in parts for the gradients that are missing, and what these forwards
change is put back. Then DDP gets these gradients as from the backward pass that failed, and sends them in the order that its peers expect.

The number of parts stays. A batch can't be run again where its module can't be split, where its forward has exchanged something with other
ranks, where gradients of several batches can't be told apart, where ``LightningModule.backward`` is overridden, and in one sample: then the
exception is raised, with a note that says why. FSDP's and a pipeline's ranks, which exchange parameters or activations all the time, leave
their step together instead (``strategies.processes.out_of_memory_exit``). An optimizer's step, a validation, or a step of manual
optimization isn't run again.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_autopar._lightning_compat import is_overridden
from lightning_autopar._temporary import patched
from lightning_autopar.exact.data.rank_share import BatchShare
from lightning_autopar.exact.logs.logging_hooks import shadow_log
from lightning_autopar.exact.logs.metrics_over_ranks import metrics_of
from lightning_autopar.exact.random import generator_states as rng
from lightning_autopar.exact.step.micro_batches import several_loaders, take_part, whole_share
from lightning_autopar.exact.step.step_rollback import StepState
from lightning_autopar.strategies.base.worker_exception import out_of_memory

if TYPE_CHECKING:
    from lightning_autopar.strategies.base.engine_mixin import EngineMixin

#: On whichever rank it happens. No warning: one that somebody has turned into an exception would end the run.
_LOG = logging.getLogger(__name__)


class Reruns:
    """Runs a rank's batches again.

    Args:
        found: what the running step found.
    """

    def __init__(self, engine: EngineMixin, found: StepState) -> None:
        self._engine: Any = engine
        self._found = found
        self._planned: int = engine.run_plan.plan.micro_batches
        #: Into how many parts each batch is cut, where it has as many samples.
        self.parts = self._planned
        #: How many samples that makes; None before a batch ran out of memory.
        self.samples_at_once: int | None = None
        self._left: list[Parameter] = []
        self._synced = False

    # -- a step that failed in its forward ---------------------------------------------------------------------------------------------

    def may_begin_anew(self, error: Exception) -> bool:
        """Whether the step can be begun anew in more parts; if not, and memory ran out, the error gets a note that says why."""
        return may_run_again(self._engine, error, self._why_not_anew, planned=not self._engine._alone)

    def _why_not_anew(self) -> str | None:
        micro = self._engine._micro
        if micro is not None and self._planned > 1 and dist.is_initialized() and not getattr(self._engine, "_reduced", True):
            return "it is the first one, whose parts communicate"
        if micro is not None and micro.gradients.mixed:
            return "its parts' gradients were added to those of earlier batches already"
        return self._why_not(self.parts)

    def begin_anew(self) -> None:
        """Put back what the step has changed, and prepare to run it in more parts."""
        engine, found = self._engine, self._found
        if engine._micro is not None:
            engine._micro.gradients.give_up()
        found.put_back(engine._logging, engine._draws)
        free_memory()
        self._go_on_in(min(2 * self.parts, self._share().fed), "forward")
        found.note(engine._logging, engine._draws, copy_all=True)

    # -- a step that failed in its backward --------------------------------------------------------------------------------------------

    def may_complete(self, error: Exception, marks: list[int] | None) -> bool:
        """Whether the gradients that a backward pass left out can be computed in parts; if not, and memory ran out, the error gets a note.

        Args:
            marks: of :meth:`.EngineMixin.gradient_marks` when it began.
        """
        return may_run_again(self._engine, error, partial(self._why_not_complete, marks), planned=not self._engine._alone)

    def _why_not_complete(self, marks: list[int] | None) -> str | None:
        engine = self._engine
        if is_overridden("backward", engine.lightning_module):
            return "the module has a backward() of its own, which may do anything"
        why = self._why_not(1 if engine._micro is None else engine._micro.parts, anew=False)
        if why is not None:
            return why
        self._left, shared = self._found.unfinished()
        self._synced = marks is not None
        if marks is None and not self._left:
            return "no gradient is missing"
        if marks is None:
            return "gradients of several batches lie in DDP's buckets, and can't be told apart" if shared else None
        now = engine.gradient_marks()
        trained = engine._in_order
        assert now is not None, "as before"
        assert len(now) == len(trained) == len(marks), "one for each"
        done = [index for index, (before, after) in enumerate(zip(marks, now, strict=True)) if before != after]
        if shared and any(marks):
            # A time could be the same by chance. Gradients come in the order of the step before, so that this would be a gap.
            order = sorted(range(len(marks)), key=lambda index: marks[index])
            if set(order[: len(done)]) != set(done):
                return "gradients came in another order than in the step before, so it isn't known which of them were sent"
        sent = {id(trained[index]) for index in done}
        fresh = set() if shared else {id(each) for each in self._left}
        self._left = [each for each in trained if id(each) not in sent and (shared or id(each) in fresh)]
        return None if self._left else "no gradient is missing"

    def complete(self, held: Sequence[Tensor]) -> None:
        """Compute the missing gradients in parts, and let them go to the other ranks.

        Args:
            held: tensors that hold the graph of the backward pass that failed.
        """
        for tensor in held:
            tensor.detach_()
        free_memory()
        engine, found, share = self._engine, self._found, self._share()
        run, began, pieces = 1 if engine._micro is None else engine._micro.parts, found.draws, 1
        micro = engine.run_in(2 * self.parts)
        last = micro.part
        found.note(engine._logging, engine._draws, copy_all=True)
        gradients: dict[Parameter, Tensor] | None = None
        while gradients is None:
            pieces = min(2 * pieces, -(-share.fed // run))
            try:
                gradients = self._gradients(share, run, pieces, began)
            except Exception as error:  # several classes say that memory ran out; the others are raised
                why_not = partial(self._why_not, run * pieces, anew=False)
                if not may_run_again(engine, error, why_not, planned=not engine._alone):
                    raise
            found.put_back(engine._logging, engine._draws)
            free_memory()
        with torch.no_grad():
            for parameter, gradient in gradients.items():
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        micro.part = last
        if self._synced:
            engine.send_gradients(self._left)
        self._left = []
        found.drop()
        self._go_on_in(max(self.parts, run * pieces), "backward")

    def _gradients(self, share: BatchShare, run: int, pieces: int, began: tuple[rng.RngState, int]) -> dict[Parameter, Tensor]:
        """The missing gradients of the batch's last part of ``run``, computed in ``pieces``."""
        engine, trainer, (args, kwargs) = self._engine, self._engine._trainer, self._engine._arguments
        several, found = several_loaders(trainer), dict[Parameter, Tensor]()
        with _muted(trainer.lightning_module):
            for piece in range(pieces):
                index, number = run - 1 + run * piece, run * pieces
                part = share.part(index, number)
                if not part.weight:
                    continue
                rows = take_part(args[0], index, number, share.fed, several=several, collates=True)
                rng.restore(began[0], self._found.generators)
                if engine._draws is not None:
                    engine._draws.begin(began[1])
                loss = self._loss(part, (rows, *args[1:]), kwargs)
                for parameter, gradient in zip(self._left, torch.autograd.grad(loss, self._left, allow_unused=True), strict=True):
                    if gradient is not None:
                        found[parameter] = found[parameter].add_(gradient) if parameter in found else gradient
                del loss, rows
        return found

    def _loss(self, part: BatchShare, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The weighted loss of a part of the batch, as the precision wants it for backward. Neither hooks are called nor DDP's wrapper,
        which prepares for a backward pass of its own.
        """
        engine, precision, trainer = self._engine, self._engine.precision_plugin, self._engine._trainer
        engine._micro.part, engine._drawing = part, True
        with precision.train_step_context():
            output = trainer.lightning_module.training_step(*args, **kwargs)
        loss = (output["loss"] if isinstance(output, Mapping) else output) * (part.weight / trainer.accumulate_grad_batches)
        with engine._micro.silent():
            scaled: Tensor = precision.pre_backward(loss, trainer.lightning_module)
        return scaled

    # -- both ----------------------------------------------------------------------------------------------------------------------------

    def _why_not(self, parts: int, *, anew: bool = True) -> str | None:
        """Why the batch, which ran in so many parts, can't be run in more."""
        why = why_in_one(parts, self._share)
        if why is not None:
            return why
        if self._found.exchanges() if anew else self._found.exchanged:
            return "its ranks have exchanged something in its forward, and can't do so again"
        return self._found.why_not() if anew else None

    def _share(self) -> BatchShare:
        engine = self._engine
        if engine._share is None:
            trainer = engine._trainer
            engine._share = engine._counts.on(whole_share(engine._arguments[0][0], engine._samples, several=several_loaders(trainer)))
        share: BatchShare = engine._share
        return share

    def _go_on_in(self, parts: int, where: str) -> None:
        engine, before = self._engine, self.parts
        self.parts, self.samples_at_once = parts, -(-self._share().fed // parts)
        engine.run_in(parts)
        rank, plan = f" of rank {engine._rank}" if engine.run_plan.plan.world_size > 1 else "", engine.run_plan.plan
        unknown = f"; {engine.run_plan.unknown}" if engine.run_plan.unknown else ""
        _LOG.warning(
            f"autopar: {plan.devices[engine._rank]}{rank} ran out of memory in the {where} of batch "
            f"{engine._trainer.fit_loop.epoch_loop.batch_idx}, whose {self._share().fed} samples ran in "
            f"{'one piece' if before == 1 else f'{before} parts'}. The batch is run again, with the same samples and the same random "
            f"numbers, in {parts} parts, and so are all that follow{unknown}"
        )

    def exchanged(self) -> None:
        """Called where ranks have exchanged something in the user's step on a batch or a part of it.

        Raises:
            RuntimeError: if this rank runs its step more often than others run theirs.
        """
        if self._engine._alone:
            raise RuntimeError(
                f"rank {self._engine._rank} ran out of memory, so that it runs each batch in {self.parts} parts, and its training_step "
                "exchanges something with other ranks, which run a batch in one piece; take a smaller batch, or a plan with more "
                "micro-batches"
            )


def may_run_again(engine: Any, error: Exception, why_not: Callable[[], str | None], *, planned: bool) -> bool:
    """Whether a batch can be run again in more parts; if not, and memory ran out, the error gets a note that says why.

    Args:
        engine: which learns how much memory was lacking, where it ran in as many parts as planned.
        why_not: asked where memory ran out.
        planned: whether it did.
    """
    # A communicator that lacked memory is broken; a user's own exception may speak of memory.
    if not isinstance(error, (RuntimeError, MemoryError)) or isinstance(error, dist.DistError) or not out_of_memory(error):
        return False
    why = why_not()
    if why is not None:
        error.add_note(f"autopar: the batch wasn't run again in more parts: {why}")
    elif planned:
        engine.meter.lacked_bytes = 0 if engine.gpu_limit is None else engine.gpu_limit.lacked_bytes()
    return why is None


def why_in_one(parts: int, share: Callable[[], BatchShare]) -> str | None:
    """Why a batch, which ran in so many parts, has no more of them; None where it has."""
    try:
        samples = share().fed
    except ValueError as error:
        return str(error)
    if parts < samples:
        return None
    return "it has one sample on this device" if samples == 1 else f"one of its {samples} samples alone takes more"


def free_memory() -> None:
    """What a failed step held may wait in cycles, and in pieces that are too small for the next one."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@contextmanager
def _muted(module: Any) -> Iterator[None]:
    """While open, the module logs nothing, and its metrics exchange nothing."""
    undo = shadow_log(module, lambda name, value: None)
    with ExitStack() as stack:
        stack.callback(undo)
        for metric in metrics_of(module):
            stack.enter_context(patched(metric, "dist_sync_on_step", False))
        yield
