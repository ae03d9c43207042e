"""A rank's stages under the schedules of ``torch.distributed.pipelining``, with micro-batches of any shapes.

The order of a step, its communication and its backward passes are torch's. What a stage receives is allocated when it is asked for, in
the shapes that the stage before has told (:mod:`.stage_shapes`): torch's own buffers have the first micro-batch's shapes for good, and lie
there for all micro-batches at once (torch 2.13, ``stage.py``, ``_setup_forward_recv_info``). Knows stages that are modules; neither
Lightning nor how a batch is cut.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, schedules

from lightning_autopar._temporary import patched
from lightning_autopar.plans import INTERLEAVED, Schedule
from lightning_autopar.strategies.pipeline.run.stage_shapes import Meta, ShapeMessages, Signature, as_told

_LOG = logging.getLogger("torch.distributed.pipelining.schedules")

#: Why a step can't go on in stages.
_DEPENDS = 'which parts of the step count depends on the batch: run without a pipeline (allow=["single", "ddp", "fsdp"])'
#: The kind of a stage's work that is about to run.
Work = Literal["forward", "backward"]
#: Makes the context of a stage's work on a micro-batch.
Around = Callable[["Stage", Work, int], AbstractContextManager[Any]]


class Stage(PipelineStage):
    """A stage whose micro-batches may have different shapes.

    Args:
        module: computes the stage: from what it receives to what it sends, or in the last stage to the loss. Its ``parameters()`` are those
            that backward reaches.
        group: the ranks of its pipeline, None for all ranks; stage ``s`` runs on the rank ``s mod ranks``.
        host_group: a gloo group of them, only for messages about shapes.
        around: makes a context around each piece of work.
        reduce: called when all of its backward passes are over, to combine its replicas' gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        stages: int,
        device: torch.device,
        *,
        group: dist.ProcessGroup | None,
        host_group: dist.ProcessGroup,
        around: Around = lambda stage, work, chunk: nullcontext(),
        reduce: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(module, index, stages, device, group=group or dist.group.WORLD)
        self._around = around
        self._reduce = reduce
        #: Messages about activations and, backwards, about gradients.
        self._before = None if index == 0 else _Boundary.to(self._rank_of(index - 1), host_group, index - 1)
        self._after = None if index == stages - 1 else _Boundary.to(self._rank_of(index + 1), host_group, index)
        self._signatures: Sequence[Signature | None] = ()
        self._idle: frozenset[int] = frozenset()
        self._metas: dict[int, tuple[Meta, ...]] = {}
        self._inputs: dict[int, tuple[Tensor, ...]] = {}
        self._gradients: dict[int, tuple[Tensor | None, ...]] = {}
        #: Of each micro-batch that has gone back: which received tensors have a gradient, and for which one is sent.
        self._had: list[tuple[tuple[bool, ...], tuple[bool, ...]]] = []
        self._error: Exception | None = None

    def begin(self, signatures: Sequence[Signature | None], *, idle: frozenset[int] = frozenset()) -> None:
        """A schedule is about to run.

        Args:
            signatures: of each micro-batch, see :class:`.stage_shapes.ShapeMessages`.
            idle: micro-batches that only fill up the schedule's rounds: they run no backward.
        """
        self.clear_runtime_states()
        self.chunks = len(signatures)
        self._signatures, self._idle = signatures, idle

    def finish(self) -> None:
        """The schedule is over: drop all references to its tensors."""
        for boundary in (self._before, self._after):
            if boundary is not None:
                boundary.forward.settle()
                boundary.backward.settle()
        had, due = ({place for each in self._had for place, there in enumerate(each[side]) if there} for side in (0, 1))
        self.clear_runtime_states()
        if had != due:  # zeros were sent, by which an optimizer moves the parameters behind them
            raise RuntimeError(f"a tensor between two stages has no gradient for this batch, but had one for an earlier one; {_DEPENDS}")

    def clear_runtime_states(self) -> None:
        """Like torch's, also for our own state."""
        self.fwd_cache.clear()
        self.bwd_cache.clear()
        self.output_chunks.clear()
        self.backward_state.clear()
        self.dw_runner.clear()
        self._had.clear()
        for kept in (self._metas, self._inputs, self._gradients):
            kept.clear()

    # -- communication -----------------------------------------------------------------------------------------------------------------

    def _rank_of(self, stage: int) -> int:
        assert self.group is not None
        return dist.get_global_rank(self.group, stage % self.group_size)

    def _ops(self, operation: Callable[..., Any], tensors: Sequence[Tensor | None], peer: int) -> list[dist.P2POp]:
        return [dist.P2POp(operation, tensor, peer, self.group) for tensor in tensors if tensor is not None]

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive a micro-batch's activations; waits for a message on their shapes where they are new."""
        if self._before is None:
            return []
        metas = self._before.forward.hear(self._signature(fwd_chunk_id))
        buffers = tuple(torch.empty(meta.shape, dtype=meta.dtype, device=self.device) for meta in metas)
        self._metas[fwd_chunk_id], self._inputs[fwd_chunk_id] = metas, buffers
        return self._ops(dist.irecv, buffers, self._rank_of(self.stage_index - 1))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send a micro-batch's activations.

        Raises:
            RuntimeError: if the next stage expects something else.
        """
        if self._after is None:
            return []
        outputs = self.fwd_cache[fwd_chunk_id][0]
        as_told(self._after.forward.tell(self._signature(fwd_chunk_id), tuple(map(Meta.of, outputs))), outputs)
        return self._ops(dist.isend, [output.detach() for output in outputs], self._rank_of(self.stage_index + 1))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive the gradients of sent tensors that have one; where that is new, waits for a message on which these are."""
        if not self.has_backward or self._after is None:
            return []
        outputs = self.fwd_cache[bwd_chunk_id][0]
        come = self._after.backward.hear(self._signature(bwd_chunk_id))
        buffers = tuple(
            torch.empty_like(output, memory_format=torch.contiguous_format) if comes else None
            for output, comes in zip(outputs, come, strict=True)
        )
        self._gradients[bwd_chunk_id] = buffers
        return self._ops(dist.irecv, buffers, self._rank_of(self.stage_index + 1))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send back the gradients of received tensors. A tensor that wasn't used has none; the parameters behind it must not get zeros
        then, which an optimizer would take for a gradient. If an earlier micro-batch of the same shapes had a gradient, zeros must be sent.

        Raises:
            RuntimeError: if there is one where an earlier micro-batch had none.
        """
        gradients = self.bwd_cache.pop(bwd_chunk_id, ())
        if not self.has_backward or self._before is None:
            return []
        metas = self._metas.pop(bwd_chunk_id)
        there = tuple(gradient is not None for gradient in gradients)
        sent: list[Tensor | None] = []
        told = self._before.backward.tell(self._signature(bwd_chunk_id), there)
        self._had.append((there, tuple(told)))
        for meta, gradient, goes in zip(metas, gradients, told, strict=True):
            if gradient is not None and not goes:
                raise RuntimeError(
                    "a tensor between two stages has a gradient for this batch, but had none for an earlier one of the same shapes; "
                    f"{_DEPENDS}"
                )
            if goes and gradient is None:
                sent.append(torch.zeros(meta.shape, dtype=meta.dtype, device=self.device))
            elif gradient is not None:
                sent.append(gradient.contiguous())
        return self._ops(dist.isend, sent, self._rank_of(self.stage_index - 1))

    def _signature(self, chunk: int) -> Signature | None:
        signature = self._signatures[chunk]
        return None if signature is None else replace(signature, shapes=(signature.shapes, self.has_backward, chunk in self._idle))

    # -- work --------------------------------------------------------------------------------------------------------------------------

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        goes_back = self.has_backward and torch.is_grad_enabled()
        metas, buffers = self._metas[fwd_chunk_id], self._inputs.pop(fwd_chunk_id)
        return tuple(buffer.requires_grad_(goes_back and meta.requires_grad) for meta, buffer in zip(metas, buffers, strict=True))

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        return self._gradients.pop(bwd_chunk_id)

    def _validate_fwd_input(self, *args: Any) -> None:
        """Skip the check of torch 2.11 against the first micro-batch's shapes."""

    def _validate_fwd_outputs(self, *args: Any) -> None:
        """Skip the check of torch 2.11 against the first micro-batch's shapes."""

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Record what the user's code raises, for :meth:`forward_one_chunk` to raise it."""
        try:
            return super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]
        except Exception as error:
            self._error = error
            raise

    def backward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Raise what the user's hooks raise in a backward as it is: torch turns it into a RuntimeError (``_backward.py``)."""
        try:
            return super().backward_maybe_with_nosync(*args, **kwargs)
        except RuntimeError as wrapper:
            error = wrapper.__cause__
            if error is None or not str(wrapper).lstrip().startswith("Failed to run stage backward"):
                raise
            raise error from error.__cause__

    def forward_one_chunk(self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True) -> Any:
        """A micro-batch's forward. What the user's code raises is raised as it is: torch turns it into a RuntimeError (``stage.py``)."""
        try:
            with self._around(self, "forward", fwd_chunk_id):
                output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        except RuntimeError as wrapper:
            error, self._error = self._error, None
            if error is None or wrapper.__cause__ is not error:
                raise
            raise error from error.__cause__
        if not self.has_backward and self._after is None:
            del self.fwd_cache[fwd_chunk_id]
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False) -> None:
        """A micro-batch's backward."""
        if not self.has_backward:
            return
        received = len(self._metas.get(bwd_chunk_id, ()))
        self._expect(received)
        with self._around(self, "backward", bwd_chunk_id):
            if bwd_chunk_id in self._idle:
                self.fwd_cache.pop(bwd_chunk_id)
                self._gradients.pop(bwd_chunk_id, None)
                self.bwd_cache[bwd_chunk_id] = (None,) * len(self._metas.get(bwd_chunk_id, ()))
                return
            if self._after is not None:
                # Outputs without a gradient are left out: torch would need them to be scalars
                outputs, inputs = self.fwd_cache[bwd_chunk_id]
                gradients = self._gradients[bwd_chunk_id]
                kept = tuple(
                    output if gradient is not None else output.detach() for output, gradient in zip(outputs, gradients, strict=True)
                )
                self.fwd_cache[bwd_chunk_id] = kept, inputs
            super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward)
            self.bwd_cache[bwd_chunk_id] = self.bwd_cache[bwd_chunk_id][:received]  # torch 2.11 has keyword arguments' gradients there, too
            if loss is not None and not loss._is_view():
                loss.detach_()  # torch keeps the output until the schedule is over, and with its graph all received tensors

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """All backward passes are over."""
        if self.has_backward:
            self._reduce()
        super().perform_reduce_grad(grad_scale_factor)

    def _expect(self, inputs: int) -> None:
        """Set how many inputs' gradients are sent, which torch 2.13 (not 2.11) takes from its own shape inference."""
        if hasattr(self, "_stage_meta"):
            self._stage_meta.inputs = (None,) * inputs  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class _Boundary:
    forward: ShapeMessages
    backward: ShapeMessages

    @classmethod
    def to(cls, peer: int, group: dist.ProcessGroup, number: int) -> _Boundary:
        """The messages of the boundary after the stage with that number."""
        return cls(forward=ShapeMessages(peer, group, 2 * number), backward=ShapeMessages(peer, group, 2 * number + 1))


# -- schedules -------------------------------------------------------------------------------------------------------------------------


class _Prepared:
    """A schedule with ready stages: torch infers nothing from a first micro-batch, which would run the module once more."""

    def _initialize_stage(self, *args: Any, **kwargs: Any) -> None:
        """Of one stage."""

    def _initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        """Of several."""


class _GPipe(_Prepared, ScheduleGPipe):
    def _step_microbatches(self, *args: Any, **kwargs: Any) -> None:
        with patched(schedules, "_wait_batch_p2p", _wait):
            super()._step_microbatches(*args, **kwargs)


def _wait(messages: list[dist.Work]) -> None:
    """Wait for messages, and let go of their tensors. torch (2.11 to 2.13) keeps all that forward has sent until the last backward is over:
    each micro-batch's output, and what a stage only passes on, though nothing needs them after their own backward.
    """
    for message in messages:
        message.wait()
    messages.clear()


class _OneForwardOneBackward(_Prepared, Schedule1F1B):
    pass


class _Interleaved(_Prepared, ScheduleInterleaved1F1B):
    def _step_microbatches(self, *args: Any, **kwargs: Any) -> None:
        with _without_schedules():
            super()._step_microbatches(*args, **kwargs)


@contextmanager
def _without_schedules() -> Iterator[None]:
    """While open, torch doesn't write the whole schedule to stderr with an exception (``_PipelineScheduleRuntime``)."""
    level = _LOG.level
    _LOG.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        _LOG.setLevel(level)


def make_schedule(schedule: Schedule, stages: Sequence[Stage], parts: int, loss: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """A schedule of ``torch.distributed.pipelining``.

    Args:
        schedule: the plan's. With fewer micro-batches than stages 1F1B equals GPipe, all forwards first, and torch only takes it by that
            name.
        parts: how many micro-batches, as :func:`count_parts` counts them.
        loss: gets the last stage's output, and the micro-batch's number.
    """
    options: dict[str, Any] = {"n_microbatches": parts, "loss_fn": loss, "scale_grads": False}
    if schedule in INTERLEAVED:
        return _Interleaved(list(stages), **options)
    (stage,) = stages
    return (_OneForwardOneBackward if schedule == "1f1b" and parts >= stage.num_stages else _GPipe)(stage, **options)


def count_parts(schedule: Schedule, micro_batches: int, ranks: int, rows: int) -> int:
    """The number of a batch's micro-batches: at most its number of samples, unless the schedule's rounds need some more.

    Args:
        micro_batches: the plan's; as many are always possible.
        rows: the most samples that a pipeline gets of the batch.
    """
    wanted = max(1, min(micro_batches, rows))
    if schedule not in INTERLEAVED:
        return wanted
    # As Plan checks: torch runs micro-batches in equal rounds.
    return next(parts for parts in range(wanted, micro_batches + 1) if parts % max(1, parts // ranks) == 0)
