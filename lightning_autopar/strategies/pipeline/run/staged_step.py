"""Runs one of the user's steps through the stages of a pipeline: it takes micro-batches and returns what the step would return in one
piece.

Every rank of a pipeline has the same batch, and runs the user's own hook on each micro-batch for each of its stages. Only the last stage
sees what the hook returns; it tells the others. Knows Lightning's step, a schedule and a plan; not how batches are loaded, nor what becomes
of gradients afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_autopar._lightning import Trainer
from lightning_autopar.exact.data.rank_share import BatchShare
from lightning_autopar.exact.logs.logging_hooks import overridden
from lightning_autopar.exact.logs.self_log import GlobalLogging
from lightning_autopar.exact.step.micro_batches import detached, joined, several_loaders, take_part, uncut
from lightning_autopar.exact.step.users_backward import weighed
from lightning_autopar.memory.trace.first_batch import copied
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.pipeline.run.stage_draws import StageDraws
from lightning_autopar.strategies.pipeline.run.stage_shapes import SameBatch, Signature, signature_of
from lightning_autopar.strategies.pipeline.run.torch_schedules import Stage, count_parts, make_schedule
from lightning_autopar.strategies.pipeline.stages.stage_module import StageModule

#: The hooks that see a step's output; predictions are collected in any case.
_WATCHERS = {
    "training_step": "on_train_batch_end",
    "validation_step": "on_validation_batch_end",
    "test_step": "on_test_batch_end",
    "predict_step": None,
}


@dataclass(kw_only=True)
class _Run:
    """The step that runs.

    Args:
        args: the hook's, the batch first.
        share: the replica's of the whole batch.
        number: how many micro-batches there are.
        factors: the weight of each one's loss in the sum from which backward starts; none where there is no backward.
        outputs: of the last stage, by micro-batch, without their graphs.
        appended: by micro-batch, what the last stage appended to each of the lists that all stages must have.
    """

    hook: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    share: BatchShare
    number: int
    factors: Sequence[float] = ()
    outputs: dict[int, Any] = field(default_factory=dict)
    appended: dict[int, list[list[Any]]] = field(default_factory=dict)


class StagedStep:
    """Runs hooks through the stages of this rank's pipeline.

    Args:
        logging: brings together what the stages log.
        draws: keeps random draws what they would be on one device.
        changing: hooks that write to the tensors of their batch.
        appended: lists to which a step appends what only the last stage has; see :class:`.cut_tensors.Staging`.
        contexts: makes the precision's context of a hook.
        around: makes a context around a whole schedule.
        scale: scales a loss for half precision.
        note: called when a micro-batch's backward begins, and when it is over.
    """

    def __init__(
        self,
        trainer: Trainer,
        plan: Plan,
        logging: GlobalLogging,
        draws: StageDraws,
        *,
        changing: Collection[str],
        appended: Sequence[str] = (),
        contexts: Callable[[str], AbstractContextManager[Any]],
        around: Callable[[], AbstractContextManager[Any]],
        scale: Callable[[Tensor], Tensor],
        note: Callable[[Any], None],
    ) -> None:
        self._trainer = trainer
        self._plan = plan
        self._logging = logging
        self._draws = draws
        self._changing = frozenset(changing)
        self._appended = appended
        self._contexts, self._around_schedule, self._scale, self._note = contexts, around, scale, note
        self._modules: dict[int, StageModule] = {}
        self._stages: list[Stage] = []
        self._group: dist.ProcessGroup | None = None
        self._schedules: dict[int, Any] = {}
        self._same: SameBatch | None = None
        self._tables: list[dict[str, Any]] = []
        #: The current batch's fingerprint, see :class:`.stage_shapes.SameBatch`.
        self.fingerprint = 0
        self._run: _Run | None = None

    def install(self, modules: Mapping[int, StageModule], stages: Sequence[Stage], host_group: dist.ProcessGroup) -> None:
        """Give it what it runs.

        Args:
            modules: of this rank's stages, by index.
            stages: the same for torch's schedules, made with :meth:`around`.
            host_group: a gloo group of the ranks of this pipeline.
        """
        self._modules, self._stages, self._group = dict(modules), list(stages), host_group
        self._same = SameBatch(host_group)
        self._tables = [child._parameters for child in self._trainer.lightning_module.modules()]

    # -- steps -------------------------------------------------------------------------------------------------------------------------

    def train(self, args: Sequence[Any], kwargs: Mapping[str, Any], share: BatchShare, *, goes_back: bool) -> Any:
        """Run the user's ``training_step``, with forward and backward of all micro-batches; returns its output, without a graph.

        Args:
            goes_back: whether there is a backward at all.

        Raises:
            ValueError: if the batch can't be cut into samples.
            RuntimeError: if the step returns a loss for some micro-batches only.
        """
        plan = self._plan
        assert plan.schedule is not None
        rows = share.rows if share.world_size == 1 else max(plan.rows(share.of))
        number = count_parts(plan.schedule, plan.micro_batches, plan.devices_per_replica, rows)
        parts = [share.part(index, number) for index in range(number)]
        each = self._trainer.accumulate_grad_batches
        run = _Run(
            hook="training_step",
            args=args,
            kwargs=kwargs,
            share=share,
            number=number,
            factors=[part.weight / each for part in parts] if goes_back else (),
        )
        # Replicas may communicate in a backward, so all replicas must run it.
        idle = frozenset(index for index, part in enumerate(parts) if not part.rows) if plan.replicas == 1 else frozenset()
        with self._logging.step():
            self._go(run, idle, goes_back=goes_back)
        return self._output(run, [part.rows for part in parts], self._logging.loss)

    def evaluate(
        self,
        hook: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        share: BatchShare,
        parts: int,
        put_together: Callable[[str, Sequence[Any], Sequence[int]], Any],
    ) -> Any:
        """Run the user's ``validation_step``, ``test_step`` or ``predict_step`` on the whole batch; returns its output on every rank.

        Args:
            parts: in how many parts, where it has as many samples.
            put_together: makes the whole batch's output of the parts', and of how many samples these have.
        """
        number = min(parts, max(1, share.rows if share.world_size == 1 else max(self._plan.rows(share.of))))
        run = _Run(hook=hook, args=args, kwargs=kwargs, share=share, number=number)
        self._go(run, frozenset(), goes_back=False)
        found = run.outputs.get(0)
        if number > 1 and run.outputs:
            found = put_together(
                hook, [run.outputs[part] for part in range(number)], [share.part(part, number).rows for part in range(number)]
            )
        return self._told(found) if self._watched(hook) else None

    def _go(self, run: _Run, idle: frozenset[int], *, goes_back: bool) -> None:
        signatures = self._signatures(run)
        for stage in self._stages:
            stage.begin(signatures, idle=idle)
        for module in self._modules.values():
            module.hook = run.hook
        if run.number not in self._schedules:
            assert self._plan.schedule is not None
            self._schedules[run.number] = make_schedule(self._plan.schedule, self._stages, run.number, self._weigh)
        schedule = self._schedules[run.number]
        last = any(stage.is_last for stage in self._stages)
        target = torch.arange(run.number) if last else None
        self._run = run
        assert self._same is not None, "it has been installed"
        self._same.begin(self.fingerprint)
        try:
            self._draws.begin(run.share, run.number)
            with self._around_schedule():
                (schedule.step if goes_back else schedule.eval)(target=target, return_outputs=False)
            for stage in self._stages:
                stage.finish()
            self._draws.finish()
        finally:
            self._run = None
        self._same.finish()
        if self._appended:
            found = self._told([run.appended[chunk] for chunk in sorted(run.appended)])
            for each in found:
                for kept, items in zip(self._lists(), each, strict=True):
                    kept.extend(items)

    def _lists(self) -> list[list[Any]]:
        """The lists that all stages must have; one for nobody where there is none now."""
        module = self._trainer.lightning_module
        owners = [(module.get_submodule(path), name) for path, _, name in (each.rpartition(".") for each in self._appended)]
        found = [getattr(owner, name, None) for owner, name in owners]
        return [each if isinstance(each, list) else [] for each in found]

    def _signatures(self, run: _Run) -> list[Signature | None]:
        """The micro-batches' signatures: all on which shapes and gradients at a boundary depend."""
        index, *others = run.args[1:] or (None,)  # the signature of the batch, if the step uses it
        if (batch := signature_of((run.args[:1], others, run.kwargs))) is None:
            return [None] * run.number
        with torch._C.DisableTorchFunctionSubclass():  # reading an absent tensor is slow
            tables = (table.values() for table in self._tables)
            trained = hash(tuple(parameter.requires_grad for table in tables for parameter in table if parameter is not None))
        rows = (run.share.part(chunk, run.number).rows for chunk in range(run.number))
        return [Signature((run.hook, batch, trained, run.number, each), index) for each in rows]

    # -- in the schedule ---------------------------------------------------------------------------------------------------------------

    def call(self, stage: int, hook: str, chunk: int) -> Any:
        """Run the user's hook on a micro-batch, for a stage; returns its result."""
        run, module = self._run, self._modules[stage]
        assert run is not None, "stages run within a step"
        part = run.share.part(chunk, run.number) if run.number > 1 else run.share
        rows = self._rows(run, chunk)
        begun = [len(each) for each in self._lists()]
        with self._contexts(hook), self._logging.part(part, rows, chunk, stage=stage, owns=lambda: module.owns_now):
            output = getattr(self._trainer.lightning_module, hook)(rows, *run.args[1:], **run.kwargs)
            if hook == "training_step":
                self._logging.note_loss(output)
        if self._appended:  # each stage appends, and only the last one has the values
            kept = self._lists()
            if stage == self._plan.stages - 1:
                run.appended[chunk] = [each[before:] for each, before in zip(kept, begun, strict=True)]
            for each, before in zip(kept, begun, strict=True):
                del each[before:]
        return output

    def _rows(self, run: _Run, chunk: int) -> Any:
        """The micro-batch's samples; a copy, if the step writes to them."""
        rows = run.args[0]
        if run.number > 1:
            try:
                rows = take_part(rows, chunk, run.number, run.share.fed, several=several_loaders(self._trainer))
            except ValueError as error:
                raise uncut(self._plan, error) from error
        return copied(rows) if run.hook in self._changing else rows

    @contextmanager
    def around(self, stage: Stage, work: str, chunk: int) -> Iterator[None]:
        """The context of a stage's work on a micro-batch."""
        module = self._modules[stage.stage_index]
        with ExitStack() as stack:
            if work == "forward":
                module.chunk = chunk
                stack.enter_context(self._draws.forward(chunk, stage.stage_index))
            else:
                self._note("backward")
                stack.enter_context(self._draws.backward(chunk))
            yield
        if work != "forward":
            self._note("gradients")
        elif stage.is_last:
            self._take(module, chunk)

    def _take(self, module: StageModule, chunk: int) -> None:
        """Keep the last stage's output, without its graph."""
        run = self._run
        assert run is not None
        output = module.outputs.pop(chunk)
        if run.hook != "training_step":
            run.outputs[chunk] = output
            return
        loss = _loss(output)
        if run.factors and loss is not None and not loss.requires_grad:
            raise RuntimeError(
                "training_step returned a loss that depends on no trained parameter: element 0 of tensors does not require grad "
                "and does not have a grad_fn"
            )
        run.outputs[chunk] = detached(output) if isinstance(output, Mapping) else output.detach() if isinstance(output, Tensor) else output
        if (loss is None) != (_loss(next(iter(run.outputs.values()))) is None):
            raise RuntimeError(
                f"training_step returned a loss for some parts of a batch and None for others, which {self._plan.title()!r} can't undo; "
                "return a loss for every batch, or take a plan without a pipeline"
            )

    def _weigh(self, loss: Tensor, chunk: Tensor) -> Tensor:
        """A micro-batch's part of the whole batch's loss."""
        run = self._run
        assert run is not None
        return self._scale(weighed(loss, run.factors[int(chunk)])) if run.factors and loss.requires_grad else loss

    # -- afterwards --------------------------------------------------------------------------------------------------------------------

    def _output(self, run: _Run, rows: Sequence[int], loss: Tensor | None) -> Any:
        """The step's output, on every rank."""
        outputs = [run.outputs[chunk] for chunk in range(run.number)] if run.outputs else []
        if outputs and (_loss(outputs[0]) is None) != (loss is None):
            raise RuntimeError(
                "training_step returned a loss for some replicas' parts of a batch and None for others; return a loss for every batch"
            )
        extras: Any = None
        if outputs and isinstance(outputs[0], Mapping):
            extras = {name: value for name, value in outputs[-1].items() if name != "loss"}
            if loss is not None and run.number > 1:
                extras |= {name: value for name, value in joined(outputs, rows).items() if name != "loss"}
        if self._watched(run.hook):
            extras = self._told(extras)
        if loss is None:
            return extras
        return loss if extras is None else {**extras, "loss": loss}

    def _watched(self, hook: str) -> bool:
        """Whether any code sees the hook's output."""
        watcher = _WATCHERS[hook]
        return watcher is None or any(True for _ in overridden(self._trainer, (watcher,)))

    def _told(self, value: Any) -> Any:
        """The last stage's value, on every rank of the pipeline; a collective."""
        assert self._group is not None
        ranks = self._plan.devices_per_replica
        source = dist.get_global_rank(self._group, (self._plan.stages - 1) % ranks)
        mine = dist.get_rank() == source
        packed = [tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), value) if mine else None]
        dist.broadcast_object_list(packed, source, group=self._group)
        if mine:
            return value
        device = self._stages[0].device
        return tree_map_only(Tensor, lambda tensor: tensor.to(device), packed[0])


def _loss(output: Any) -> Any:
    return output.get("loss") if isinstance(output, Mapping) else output
