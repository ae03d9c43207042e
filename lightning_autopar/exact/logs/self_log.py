"""What ``self.log`` says, of the whole batch and the same on every rank.

Knows Lightning's result collections and torchmetrics, a process group and a rank's share of the batch; it doesn't know which engine runs.

A logged value is first taken in as Lightning does, so that whoever reads it in the same hook finds it. At the end of the step, before any
other hook runs, the ranks exchange what they logged (see `exchange`); the local values are taken back and the whole batch's logged in
their place. What hooks outside a step log is exchanged before something could read it: at the batch's end, and at the epoch's. Where a
batch is worked off in parts, what the parts logged is brought together first; on one device that is all.

A training step exchanges nothing where the code of ``training_step`` logs nothing and nobody gets to see the loss. Should something be
logged there all the same, by code that isn't found, it waits for the epoch's end, and later epochs exchange at each step.

Under a pipeline every stage runs the user's step; what counts is what a stage's own code logs. The rest is dropped unseen, as its values
may be absent tensors. The same exchange brings the last stage's values to the other ranks, and so to
rank 0's loggers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchmetrics import Metric, MetricCollection

from lightning_autopar._lightning import LightningModule, Trainer, rank_zero_warn
from lightning_autopar._lightning_compat import step_name
from lightning_autopar.exact.absent.absent_tensor import is_absent
from lightning_autopar.exact.data.rank_share import BatchShare
from lightning_autopar.exact.logs.combined_values import (
    LOSS,
    OPTIONS,
    Combiner,
    Entry,
    already_global,
    kept_dtype,
    log_again,
    loss_entry,
    take_back,
)
from lightning_autopar.exact.logs.log_rules import LogRules
from lightning_autopar.exact.logs.logging_hooks import (
    is_of_batch,
    logs_between_steps,
    logs_in_training_step,
    looks_within_step,
    sees_loss,
    shadow_hooks,
    shadow_log,
)
from lightning_autopar.exact.logs.metrics_of_values import APART, MetricRules, adding, adopt_values, averaging, fraction, of_samples
from lightning_autopar.exact.logs.metrics_over_parts import MetricParts
from lightning_autopar.exact.logs.metrics_over_ranks import (
    States,
    adopt,
    hold_metrics,
    metrics_of,
    named_metrics,
    packed,
    sync_states,
    unpack,
    value_of,
)
from lightning_autopar.exact.logs.rank_exchange import Exchange
from lightning_autopar.exact.step.attribute_rules import KeptRules
from lightning_autopar.exact.step.kept_attributes import KeptSteps


class GlobalLogging:
    """Makes every logged value that of the whole batch, on every rank.

    A mean over ranks is weighted by their samples; a sum, maximum or minimum (``reduce_fx``) is that over the ranks. ``sync_dist`` makes no
    difference; what is logged with ``rank_zero_only=True`` stays rank 0's (except in a pipeline's steps, which end on another rank). If
    only some ranks log a value, only theirs count. torchmetrics objects of the module synchronise at each step as well, and a rank without
    samples leaves them as they were.

    Args:
        share: gives this rank's part of the current batch, None where batches aren't split (each rank then weighs the same).
        device: where the default process group's collectives want their tensors.
        rules: how the ranks' values combine into the whole batch's, where that was found out; elsewhere ``reduce_fx`` decides.
        kept: how the values that a batch's parts leave on the module combine into the whole batch's.
        metrics: which metrics a step updates with a value of its batch.
        parts: whether a training step may come in parts.
        ranks_per_replica: how many ranks, one after the other, hold one replica: a pipeline's. What a stage's own code logs in a step
            counts for its whole replica; what hooks log outside of a step counts once, and must be the same on all of them.
    """

    def __init__(
        self,
        trainer: Trainer,
        share: Callable[[], BatchShare | None],
        *,
        device: torch.device | None = None,
        rules: LogRules | None = None,
        kept: KeptRules | None = None,
        metrics: MetricRules | None = None,
        parts: bool = False,
        ranks_per_replica: int = 1,
    ) -> None:
        self._trainer = trainer
        self._share = share
        self._device = device or torch.device("cpu")
        self._combiner = Combiner(rules)
        self._exchange = Exchange(self._combiner, device=self._device, ranks_per_replica=ranks_per_replica)
        self._kept_rules = kept or {}
        self._metric_rules = metrics or {}
        self._kept = self._keeper(parts)
        self._installed = False
        self._in_parts = self._planned_parts = parts
        self._alone = True
        self._undo: list[Callable[[], None]] = []
        self._collections: list[Any] = []
        self._adopted: set[int] = set()
        self._staged_metrics: set[int] = set()
        self._current: BatchShare | None = None
        self._latest: BatchShare | None = None  # of the last step
        self._ranks_per_replica = ranks_per_replica
        self._pending: list[Entry] = []
        #: What each part of the running step logged, by stage (None where there are no stages) and the part's number.
        self._parts: dict[int | None, dict[int, list[Entry]]] = {}
        self._in_part = False
        self._stage: int | None = None
        self._owns = _always
        self._in_step = False
        self._given_as_number = False
        self._metric_parts = MetricParts()
        #: Names under which a step logged the value of a metric's ``forward``: the last part's value counts for all.
        self._last: set[str] = set()
        #: For each metric that a step called and whose value it discarded: the states of this rank's part of the batch.
        self._metric_states: dict[int, States] = {}
        #: Results before the first value since the last exchange; None if that value made them.
        self._before: dict[tuple[int, str], dict[str, Any] | None] = {}
        self._rows: defaultdict[int, int] = defaultdict(int)
        self._loss: Tensor | None = None
        #: Whether training steps exchange what they log, the loss included. The same on all ranks.
        self._steps_log = self._shows_loss = True
        #: Whether they do so at the end of the whole step, after backward and the optimizer's step: the ranks have just waited for each
        #: other then, and a GPU is still busy.
        self._late = False
        self._decided = False

    def install(self) -> None:
        """Start. Every rank calls this, once the process group exists. With one rank there is something to do only for parts."""
        self._alone = not dist.is_initialized() or dist.get_world_size() == 1
        if self._installed or (self._alone and not self._in_parts):
            return
        self._installed = True
        if not self._alone:
            self._exchange.open()
            self._undo.append(self._exchange.close)
        trainer = self._trainer
        loops = (trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
        self._collections = [loop._results for loop in loops]
        for index, results in enumerate(self._collections):
            self._patch_collection(index, results)
        if not self._alone:
            between = logs_between_steps(trainer)
            self._undo.append(
                shadow_hooks(
                    trainer, self.flush if between else _nothing, self._end_epoch, self.flush, self._with_global_loss, self._end_step
                )
            )
        if self._in_parts:
            self._undo.append(shadow_log(self._module, self._note_log))
        self._adopt_metrics()

    def begin_parts(self) -> None:
        """From the next step on, this rank's training steps come in parts; those of others may go on without. Between two steps, or where
        one is begun again. A step's exchange stays where it was.
        """
        if self._in_parts:
            return
        self._in_parts = True
        self._kept = self._keeper(parts=True)
        if self._installed:
            self._undo.append(shadow_log(self._module, self._note_log))
            self._undo += [self._metric_parts.adopt(metric) for metric in metrics_of(self._module) if id(metric) in self._adopted]

    def _keeper(self, parts: bool) -> KeptSteps | None:
        if not self._kept_rules:
            return None
        return KeptSteps(self._trainer, self._kept_rules, device=self._device, group=lambda: self._exchange.host_group, parts=parts)

    def noted(self) -> tuple[list[Entry], dict[tuple[int, str], dict[str, Any] | None]]:
        """What waits for the next exchange, for :meth:`go_back`."""
        return list(self._pending), dict(self._before)

    def go_back(self, noted: tuple[list[Entry], dict[tuple[int, str], dict[str, Any] | None]]) -> None:
        """Forget what was logged since; the results themselves are the caller's matter."""
        self._pending, self._before = list(noted[0]), dict(noted[1])

    def join_again(self) -> None:
        """The process group is another one."""
        self._exchange.open_again()

    def uninstall(self) -> None:
        """Stop, and restore everything as it was before :meth:`install`."""
        while self._undo:
            self._undo.pop()()
        self._pending.clear()
        self._before.clear()
        self._adopted.clear()
        self._staged_metrics.clear()
        self._installed = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """The context of one of the user's steps; every rank runs equally many. On leaving, what was logged is the whole batch's."""
        if not self._installed:
            yield
            return
        if not self._decided and self._trainer.training:
            self._decided = True
            self._shows_loss = self._exchange.staged or sees_loss(self._trainer)
            self._steps_log = self._shows_loss or logs_in_training_step(self._trainer)
            # As planned, the same on all ranks: this one may run its validations in parts by now.
            self._late = not self._planned_parts and self._module.automatic_optimization and not looks_within_step(self._trainer)
        self._current = self._latest = share = self._share()
        self._parts.clear()
        self._last.clear()
        if self._in_parts:
            self._metric_parts.clear()
        self._metric_states.clear()
        self._in_step = True
        if self._exchange.staged:
            self._loss = None
        try:
            if self._trainer._logger_connector._first_loop_iter:
                self._adopt_metrics()
            empty = share is not None and share.rows == 0
            with self._kept.step(share) if self._kept else nullcontext(), hold_metrics(self._module) if empty else nullcontext():
                yield
        finally:
            self._current, self._in_step = None, False
        for stage in sorted(self._parts, key=lambda stage: -1 if stage is None else stage, reverse=True):
            parts = self._parts[stage]
            in_order = [parts[number] for number in sorted(parts)]
            self._pending = [*self._combiner.fold(in_order, last=self._last), *self._pending]
        self._parts.clear()
        index = self._index()
        if index is not None:
            self._rows[index] += 1 if share is None else share.rows
        training = self._trainer.training
        if self._alone or not training or (self._steps_log and not self._late):
            self.flush()

    @contextmanager
    def part(
        self, share: BatchShare, batch: Any, number: int, *, stage: int | None = None, owns: Callable[[], bool] | None = None
    ) -> Iterator[None]:
        """The context of a part of a step, or of a stage on it, within :meth:`step` if it logs. It may be left by an exception. Every rank
        runs equally many parts; each stage's rank runs its own, in any order of stages and parts.

        Args:
            share: what the part is of the whole batch.
            batch: what the user's step gets.
            number: 0 for the first part of the step.
            owns: whether the code that runs now is the stage's own. Values that other code logs, or updates metrics with, are left out.
        """
        assert self._in_parts
        whole, self._current = self._current, share
        before, self._pending = self._pending, []
        results: Any = self._trainer._results
        if results is not None:  # None in a predict step, which can't log
            of_whole = results.batch, results.batch_size
            results.batch, results.batch_size = batch, None  # where Lightning reads a value's weight in its epoch's mean
        self._in_part, self._stage, self._owns = True, stage, owns or _always
        in_step, self._in_step = self._in_step, True
        if not in_step:  # a predict step, which logs nothing
            self._metric_parts.clear()
        try:
            holds = hold_metrics(self._module) if share.rows == 0 else nullcontext()
            kept = self._kept.part(share) if self._kept else nullcontext()
            with kept, self._metric_parts.part(share.rows, stage, self._owns), holds:
                yield
        finally:
            self._current, self._in_part, self._stage, self._owns = whole, False, None, _always
            self._in_step = in_step
            if results is not None:
                results.batch, results.batch_size = of_whole
            self._parts.setdefault(stage, {})[number] = self._pending
            self._pending = before

    def note_loss(self, output: Any) -> None:
        """Let the next exchange combine the loss of ``training_step``, for the code that sees it: the optimizer, which may use it to choose
        its step's length, and the hooks at a batch's end.

        Args:
            output: of ``training_step``, under automatic optimization.
        """
        loss = output.get("loss") if isinstance(output, Mapping) else output
        self._loss = None
        if not self._shows_loss or not self._installed or self._current is None or not isinstance(loss, Tensor) or loss.numel() != 1:
            return
        entry = loss_entry(loss, self._current.rows, self._current.of, self._stage)
        assert entry.value is not None
        self._pending.append(replace(entry, value=self._combiner.part(entry.fx, entry.name, entry.value, self._current)))

    @property
    def loss(self) -> Tensor | None:
        """The whole batch's loss, once :meth:`step` is over; None where no rank noted one."""
        return self._loss

    @property
    def host_group(self) -> dist.ProcessGroup | None:
        """The group of all ranks for values on the host; None for the default group."""
        return self._exchange.host_group

    def flush(self) -> None:
        """Exchange what was logged since the last time, with the states of metrics. Every rank calls this alike."""
        if not self._installed:
            return
        entries, self._pending = self._pending, []
        before, self._before = self._before, {}
        shared: list[Entry] = []
        own: list[Entry] = []
        for entry in entries:
            (own if self._alone or entry.own else shared).append(entry)
        shared = [self._with_packed_states(entry) for entry in shared]
        agreed, exchanged = (True, []) if self._alone else self._exchange(shared)
        take_back(self._collections, before, keep=agreed)
        states = {entry.key: entry.states for entry in shared if entry.deferred}
        if not self._steps_log and any(entry.fx == "training_step" for entry, _, _ in exchanged):
            self._steps_log = True
            rank_zero_warn(
                "autopar: training_step logs values by code that planning didn't find in it. The values of single steps until now are "
                "those of rank 0's samples. The epoch's values, and all values from now on, are those of all samples"
            )
        exchanged += [(entry, entry.value, entry.batch_size) for entry in own]
        for entry, value, batch_size in exchanged:
            if entry.collection == LOSS:
                assert value is not None
                self._loss = value.to(entry.dtype)
            elif entry.deferred:
                self._log_metric(entry, states.get(entry.key), batch_size)
            else:
                log_again(self._trainer, self._collections[entry.collection], entry, value, batch_size)

    def _with_packed_states(self, entry: Entry) -> Entry:
        """The entry with its metric's states, to be sent in the same exchange, where possible."""
        row = packed(self._metric(entry), entry.states) if entry.deferred else None
        return entry if row is None else replace(entry, packed=row, packed_numbers=row.numel())

    def _log_metric(self, entry: Entry, states: States | None, batch_size: int) -> None:
        """Log a metric with the whole batch's value; a collective, unless the exchange has sent its states."""
        metric = self._metric(entry)
        everyones, group = entry.packed, self._exchange.host_group

        def synchronise(metric: Metric) -> None:
            if everyones is None:
                sync_states(metric, group)
            else:
                unpack(metric, everyones.to(metric.device))

        value = value_of(metric, states, synchronise)
        log_again(self._trainer, self._collections[entry.collection], replace(entry, dtype=value.dtype), value, batch_size)

    def _metric(self, entry: Entry) -> Metric:
        metric = self._module.get_submodule(entry.options[OPTIONS.index("metric_attribute")])
        assert isinstance(metric, Metric), "as logged"
        return metric

    # -- taking in -------------------------------------------------------------------------------------------------------------------------

    @property
    def _module(self) -> LightningModule:
        module = self._trainer.lightning_module
        assert module is not None
        return module

    def _index(self) -> int | None:
        """Which collection is logged to now."""
        results = self._trainer._results
        return next((index for index, each in enumerate(self._collections) if each is results), None)

    def _patch_collection(self, index: int, results: Any) -> None:
        """Shadow the collection's ``log`` and, to learn the batch size that it found out, ``update_metrics``."""
        own_log, own_update = type(results).log.__get__(results), type(results).update_metrics.__get__(results)
        logging: list[tuple[Entry, int]] = []
        keys: dict[tuple[Any, ...], str] = {}

        def log(fx: str, name: str, value: Any, **arguments: Any) -> None:
            if isinstance(value, DTensor):  # computed from shards: a norm of gradients, say
                value = value.full_tensor()
            # A step ends on the last stage's rank, which isn't rank 0: there a stage's log counts for its replica.
            own = bool(arguments.get("rank_zero_only")) and self._stage is None
            if not self._in_part and (own or self._alone):
                own_log(fx, name, value, **arguments)
                return
            # One rank's results keep the user's options: its run may have logged to them before its batches came in parts.
            given, arguments = arguments, {**already_global(arguments), "rank_zero_only": own}
            passed = given if self._alone else arguments
            entry = Entry(
                collection=index,
                fx=fx,
                name=name,
                options=tuple(arguments.get(option) for option in OPTIONS),
                dataloader_idx=results.dataloader_idx,
                is_metric=isinstance(value, Metric),
                own=own,
                stage=self._stage,
                given_as_number=self._given_as_number,
            )
            if entry.is_metric and arguments.get("on_step"):
                entry.states = self._metric_states.get(id(value))
                entry.deferred = entry.states is not None
            logging.append((entry, len(results)))
            try:
                result = results.get(keys.get(entry.key))
                if result is None or entry.is_metric or result.value.device != value.device:
                    own_log(fx, name, value, **passed)
                    keys[entry.key] = entry.result
                else:
                    # Instead of Lightning's own, which moves every tensor of a result, and so costs more than all the rest.
                    batch_size = results._extract_batch_size(result, arguments.get("batch_size"), result.meta)
                    results.update_metrics(keys[entry.key], value if result.meta.enable_graph else value.detach(), batch_size)
            finally:
                logging.pop()
            self._pending.append(entry)

        def update_metrics(key: str, value: Any, batch_size: int) -> None:
            if logging:
                entry, size_before = logging[-1]
                made = len(results) > size_before
                self._before.setdefault((index, key), None if made else dict(results[key].__dict__))
                entry.result, entry.batch_size = key, int(batch_size)
                entry.rows, entry.of = self._speaks_for(index)
                left = value._forward_cache if entry.is_metric and entry.stage is not None else None
                if isinstance(left, Tensor) and left.numel() == 1:
                    entry.value, entry.dtype, entry.valued = left.detach().reshape(()), left.dtype, True
                if not entry.is_metric:
                    entry.value = self._combiner.part(entry.fx, entry.name, value.detach(), self._current or self._share())
                    entry.dtype = kept_dtype(value)
            own_update(key, value, batch_size)

        results.log, results.update_metrics = log, update_metrics

        def undo() -> None:
            del results.log, results.update_metrics

        self._undo.append(undo)

    def _speaks_for(self, index: int) -> tuple[int, int]:
        """How many of this rank's samples a value that is logged now is for, and of how many."""
        share = self._current
        if share is None and self._trainer._logger_connector._first_loop_iter is not None:
            share = self._share()
        return (self._rows[index], 0) if share is None else (share.rows, share.of)

    # -- where hooks log -------------------------------------------------------------------------------------------------------------------

    def _end_epoch(self) -> None:
        self.flush()
        self._exchange.settle()
        index = self._index()
        if index is not None:
            self._rows[index] = 0

    def _end_step(self, output: Any) -> None:
        """An automatic step is over; hooks get to see its output now."""
        if not (self._late and self._steps_log):
            return
        self.flush()
        if self._loss is not None and output.get("loss") is not None:
            output["loss"] = (self._loss / self._trainer.accumulate_grad_batches).reshape(output["loss"].shape)

    def _with_global_loss(self, result: Any) -> Any:
        """Lightning's output of a step, with the whole batch's loss."""
        if self._loss is not None and result.loss is not None:
            result.loss = (self._loss / self._trainer.accumulate_grad_batches).reshape(result.loss.shape)
        return result

    def _note_log(self, name: str, value: Any) -> Any:
        """The part of the user's log that counts, or None. Records which names log the value of a metric's ``forward``."""
        if self._in_part and not self._owns():
            return None
        if is_absent(value):
            where = f"stage {self._stage}" if self._in_part else f"the hook {self._module._current_fx_name}"
            raise RuntimeError(
                f"{name!r} is logged in {where} of a pipeline, which doesn't have its value: it depends on another stage's parameters. "
                "Log it where it is computed, or run without a pipeline (allow=['single', 'ddp', 'fsdp'])"
            )
        self._given_as_number = not isinstance(value, (Tensor, Metric))
        of_batch = self._metric_parts.of_batch(value)
        if of_batch is None:
            return value
        self._last.add(name)
        return of_batch

    # -- torchmetrics ----------------------------------------------------------------------------------------------------------------------

    def _adopt_metrics(self) -> None:
        """Make every metric of the module synchronise at each step, by an exchange that works with uneven and empty shares."""
        for name, metric in named_metrics(self._module):
            if id(metric) in self._adopted:
                continue
            self._adopted.add(id(metric))
            self._undo.append(adopt_values(metric, partial(self._counts, name)))
            if not self._alone:
                self._undo.append(adopt(metric, self._metric_group, self._keep_states))
            if self._in_parts:
                self._undo.append(self._metric_parts.adopt(metric))
        if not self._exchange.staged:
            return
        staged: list[Metric | MetricCollection] = [*metrics_of(self._module)]
        staged += [each for each in self._module.modules() if isinstance(each, MetricCollection)]
        for each in staged:
            if id(each) not in self._staged_metrics:
                self._staged_metrics.add(id(each))
                self._undo.append(self._metric_parts.leave_out(each))

    def _counts(self, name: str, metric: Metric, given: tuple[Any, ...]) -> dict[str, float]:
        """How much of what an update adds to a metric's states counts: all, but in a step of a value of its batch, and in a hook of what
        all ranks add alike. In a hook of a batch these are numbers alone: of samples, each rank has its own. So it may be in any hook
        where a step keeps what ranks don't put together.
        """
        if self._in_step:
            share, rules = self._current, self._metric_rules.get(step_name(self._trainer), {})
            return {state: fraction(rule, share) for (of, state), rule in rules.items() if of == name} if share else {}
        hook = self._module._current_fx_name
        if self._alone or hook is None or not metric.sync_on_compute:
            return {}
        if of_samples(given) and (is_of_batch(hook) or any(APART in rules for rules in self._metric_rules.values())):
            return {}
        once = dict.fromkeys(adding(metric), 0.0 if dist.get_rank() else 1.0)
        if is_of_batch(hook) and self._latest is not None:  # a number may be this rank's samples' as well
            once |= dict.fromkeys(averaging(metric), fraction("mean", self._latest) / self._ranks_per_replica)
        return {state: by for state, by in once.items() if by != 1}

    def _keep_states(self, metric: Metric, states: States) -> bool:
        """A metric's value was discarded: it is combined only if it is logged."""
        if not self._in_step or self._exchange.staged:
            return False
        self._metric_states[id(metric)] = states
        return True

    def _metric_group(self) -> tuple[dist.ProcessGroup | None, int]:
        """The group with which a metric exchanges its states, and its size: in a stage's step, only ranks that run the same stage."""
        if not (self._exchange.staged and self._in_step):
            return self._exchange.host_group, dist.get_world_size()
        peers = self._exchange.peers
        return peers, 1 if peers is None else dist.get_world_size(peers)


def _always() -> bool:
    """True: without stages, all code is a rank's own."""
    return True


def _nothing() -> None:
    """Where no hook logs, there is nothing to exchange."""
