"""What ``self.log`` says, of the whole batch and the same on every rank.

Knows Lightning's result collections and torchmetrics, a process group and a rank's share of the batch; it doesn't know which engine runs.

A logged value is first taken in as Lightning does, so that whoever reads it in the same hook finds it. At the end of the step, before any
other hook runs, the ranks exchange what they logged by one collective; the local values are taken back and the whole batch's logged in
their place. What hooks outside a step log is exchanged before something could read it: at the batch's end, and at the epoch's. Where a
batch is worked off in parts, what the parts logged is brought together first; on one device that is all.
"""

from __future__ import annotations

import hashlib
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_autopar._lightning_compat import is_overridden
from lightning_autopar.state.share import BatchShare
from lightning_autopar.strategies.logentries import OPTIONS, REDUCTIONS, Combiner, Entry
from lightning_autopar.strategies.logrules import LogRules
from lightning_autopar.strategies.metrics import MetricParts, adopt, hold_metrics

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

#: Values that one exchange carries without asking first how many there are.
_SLOTS = 64
_HEADER = 2
#: Stands for a collection in the entry of the step's loss, which nobody logged.
_LOSS = -1
#: What can be logged while a batch is worked on, but outside its step.
_BATCH_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "backward",
    "on_train_batch_end",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_test_batch_start",
    "on_test_batch_end",
)


class GlobalLogging:
    """Makes every logged value that of the whole batch, on every rank.

    A mean over ranks is weighted by their samples; a sum, maximum or minimum (``reduce_fx``) is that over the ranks. ``sync_dist`` makes no
    difference; what is logged with ``rank_zero_only=True`` stays rank 0's. A value that only some ranks log is taken from those.
    torchmetrics objects of the module synchronise at each step as well, and a rank without samples leaves them as they were.

    Args:
        trainer: whose module logs.
        share: gives this rank's part of the current batch, None where batches aren't split (each rank then weighs the same).
        device: where the default process group's collectives want their tensors.
        rules: how the ranks' values make the whole batch's, where that was found out; elsewhere ``reduce_fx`` must tell.
        parts: whether a training step may come in parts.
    """

    def __init__(
        self,
        trainer: Trainer,
        share: Callable[[], BatchShare | None],
        *,
        device: torch.device | None = None,
        rules: LogRules | None = None,
        parts: bool = False,
    ) -> None:
        self._trainer = trainer
        self._share = share
        self._device = device or torch.device("cpu")
        self._combiner = Combiner(rules)
        self._host_group: dist.ProcessGroup | None = None
        self._installed = False
        self._in_parts = parts
        self._alone = True
        self._undo: list[Callable[[], None]] = []
        self._collections: list[Any] = []
        self._adopted: set[int] = set()
        self._current: BatchShare | None = None
        self._pending: list[Entry] = []
        #: What each part of the running step logged.
        self._parts: list[list[Entry]] = []
        self._in_part = False
        self._metric_parts = MetricParts()
        #: Names under which a step logged what a metric's ``forward`` gave: the last part's speaks for all.
        self._last: set[str] = set()
        #: Results as they were before the first value since the last exchange; None where that made them.
        self._before: dict[tuple[int, str], dict[str, Any] | None] = {}
        self._rows: defaultdict[int, int] = defaultdict(int)
        self._loss: Tensor | None = None
        self._hashes: dict[tuple[Any, ...], int] = {}

    def install(self) -> None:
        """Start. Every rank calls this, when the process group is there. With one rank there is nothing to do but for parts."""
        self._alone = not dist.is_initialized() or dist.get_world_size() == 1
        if self._installed or (self._alone and not self._in_parts):
            return
        self._installed = True
        if self._device.type != "cpu" and not self._alone:
            # What the host knows (names, batch sizes) goes by the host: reading it from the device would wait for the step's kernels.
            self._host_group = dist.new_group(backend="gloo")
            group = self._host_group
            self._undo.append(lambda: dist.destroy_process_group(group))
        trainer = self._trainer
        loops = (trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
        self._collections = [loop._results for loop in loops]
        for index, results in enumerate(self._collections):
            self._patch_collection(index, results)
        if not self._alone:
            self._patch_hooks()
        if self._in_parts:
            self._patch_log()
        self._adopt_metrics()

    def uninstall(self) -> None:
        """Stop, and leave everything as it was before :meth:`install`."""
        while self._undo:
            self._undo.pop()()
        self._pending.clear()
        self._before.clear()
        self._adopted.clear()
        self._installed = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one of the user's steps; every rank goes through as many. On leaving, what was logged is the whole batch's."""
        if not self._installed:
            yield
            return
        self._current = share = self._share()
        self._parts.clear()
        self._last.clear()
        try:
            if self._trainer._logger_connector._first_loop_iter:
                self._adopt_metrics()
            empty = share is not None and share.rows == 0
            with hold_metrics(self._module) if empty else nullcontext():
                yield
        finally:
            self._current = None
        if self._parts:
            self._pending = [*self._combiner.fold(self._parts, last=self._last), *self._pending]
            self._parts.clear()
        index = self._index()
        if index is not None:
            self._rows[index] += 1 if share is None else share.rows
        self.flush()

    @contextmanager
    def part(self, share: BatchShare, batch: Any, number: int) -> Iterator[None]:
        """Around a part of a training step, within :meth:`step`; every rank goes through as many.

        Args:
            share: what the part is of the whole batch.
            batch: what the user's step gets.
            number: 0 for the first part of the step.
        """
        assert self._in_parts
        whole, self._current = self._current, share
        before, self._pending = self._pending, []
        results: Any = self._trainer._results
        of_whole = results.batch, results.batch_size
        results.batch, results.batch_size = batch, None  # where Lightning looks for what a value weighs in its epoch's mean
        self._in_part = True
        try:
            with self._metric_parts.part(first=number == 0), hold_metrics(self._module) if share.rows == 0 else nullcontext():
                yield
        finally:
            self._current, self._in_part = whole, False
            results.batch, results.batch_size = of_whole
        self._parts.append(self._pending)
        self._pending = before

    def note_loss(self, output: Any) -> None:
        """Have the next exchange bring the loss of ``training_step`` together, for those who get to see it: the optimizer, which may choose
        its step's length by it, and the hooks at a batch's end.

        Args:
            output: of ``training_step``, under automatic optimization.
        """
        loss = output.get("loss") if isinstance(output, Mapping) else output
        self._loss = None
        if not self._installed or self._current is None or not isinstance(loss, Tensor) or loss.numel() != 1:
            return
        value = loss.detach().reshape(())
        rows, of = self._current.rows, self._current.of
        options = (False, False, False, False, "mean", False, False, None)
        self._pending.append(
            Entry(
                collection=_LOSS,
                fx="training_step",
                name="loss",
                options=options,
                dataloader_idx=None,
                is_metric=False,
                value=value,
                dtype=value.dtype,
                batch_size=rows,
                rows=rows,
                of=of,
            )
        )

    def flush(self) -> None:
        """Exchange what was logged since the last time: one collective if all ranks logged the same names. Every rank calls this alike."""
        if not self._installed:
            return
        entries, self._pending = self._pending, []
        before, self._before = self._before, {}
        own = [(entry, entry.value, entry.batch_size) for entry in entries if entry.own or self._alone]
        agreed, exchanged = (True, []) if self._alone else self._exchange([entry for entry in entries if not entry.own])
        self._take_back(before, keep=agreed)
        exchanged += own
        for entry, value, batch_size in exchanged:
            if entry.collection == _LOSS:
                assert value is not None
                self._loss = value.to(entry.dtype)
            else:
                self._log_again(entry, value, batch_size)

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

        def log(fx: str, name: str, value: Any, **arguments: Any) -> None:
            own = bool(arguments.get("rank_zero_only"))
            if not self._in_part and (own or self._alone):
                own_log(fx, name, value, **arguments)
                return
            arguments = _already_global(arguments)
            entry = Entry(
                collection=index,
                fx=fx,
                name=name,
                options=tuple(arguments.get(option) for option in OPTIONS),
                dataloader_idx=results.dataloader_idx,
                is_metric=isinstance(value, Metric),
                own=own,
            )
            logging.append((entry, len(results)))
            try:
                own_log(fx, name, value, **arguments)
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
                if not entry.is_metric:
                    entry.value = value.detach()
                    entry.dtype = value.dtype if value.dtype == torch.float64 else _default_dtype(value)
            own_update(key, value, batch_size)

        results.log, results.update_metrics = log, update_metrics

        def undo() -> None:
            del results.log, results.update_metrics

        self._undo.append(undo)

    def _speaks_for(self, index: int) -> tuple[int, int]:
        """How many of this rank's samples a value logged now is about, and of how many."""
        share = self._current
        if share is None and self._trainer._logger_connector._first_loop_iter is not None:
            share = self._share()
        return (self._rows[index], 0) if share is None else (share.rows, share.of)

    # -- exchanging ------------------------------------------------------------------------------------------------------------------------

    def _exchange(self, entries: list[Entry]) -> tuple[bool, list[tuple[Entry, Tensor | None, int]]]:
        """Whether all ranks logged the same, and what all of them logged together, in an order that is the same everywhere."""
        on_host = self._device.type == "cpu"
        width = 3 if on_host else 2
        header = [float(self._hash(entries)), float(len(entries))]
        numbers = [float(number) for entry in entries for number in (entry.rows, entry.batch_size, entry.number if on_host else 0)[:width]]
        gathered = self._gather(header + numbers[: width * _SLOTS], _HEADER + width * _SLOTS)
        if any(row[:_HEADER] != gathered[0][:_HEADER] for row in gathered):
            return False, self._exchange_by_name(entries)
        if not entries:
            return True, []
        if len(entries) > _SLOTS:
            gathered = self._gather(header + numbers, _HEADER + width * len(entries))
        table = torch.tensor(gathered, dtype=torch.float64)[:, _HEADER : _HEADER + width * len(entries)].view(len(gathered), -1, width)
        values = table[:, :, 2] if on_host else self._gather_values(entries)
        return True, self._combiner.combine(entries, values, table[:, :, 0], table[:, :, 1].tolist())

    def _gather(self, numbers: list[float], size: int) -> list[list[float]]:
        """Every rank's numbers, padded to ``size``."""
        mine = torch.zeros(size, dtype=torch.float64)
        mine[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        gathered = torch.empty(dist.get_world_size(), size, dtype=torch.float64)
        dist.all_gather(list(gathered.unbind()), mine, group=self._host_group)
        rows: list[list[float]] = gathered.tolist()
        return rows

    def _gather_values(self, entries: list[Entry]) -> Tensor:
        """Every rank's values on the device, (ranks, entries), without waiting for it."""
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        mine = torch.stack([zero if entry.value is None else entry.value.to(self._device, torch.float64) for entry in entries])
        gathered = mine.new_empty(dist.get_world_size(), len(entries))
        dist.all_gather(list(gathered.unbind()), mine)
        return gathered

    def _exchange_by_name(self, entries: list[Entry]) -> list[tuple[Entry, Tensor | None, int]]:
        """Ranks logged different names: bring together what has the same name, in the order of the first rank that logged it."""
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, [(replace(entry, value=None), entry.number) for entry in entries], group=self._host_group)
        by_key: dict[tuple[Any, ...], dict[int, tuple[Entry, float]]] = {}
        for rank, theirs in enumerate(gathered):
            seen: defaultdict[tuple[Any, ...], int] = defaultdict(int)
            for entry, value in theirs:
                seen[entry.key] += 1
                by_key.setdefault((*entry.key, seen[entry.key]), {})[rank] = (entry, value)
        exchanged = []
        for ranks in by_key.values():
            ordered = list(ranks.values())
            first = ordered[0][0]
            if not first.is_metric and first.of and not any(entry.rows for entry, _ in ordered):
                continue  # only a rank that was fed somebody else's row saw it
            values = torch.tensor([[value] for _, value in ordered], dtype=torch.float64, device=self._device)
            rows = torch.tensor([[entry.rows] for entry, _ in ordered], dtype=torch.float64)
            exchanged += self._combiner.combine([first], values, rows, [[float(entry.batch_size)] for entry, _ in ordered])
        return exchanged

    def _hash(self, entries: list[Entry]) -> int:
        """48 bits of what was logged, the same in every process: a float64 holds them exactly."""
        keys = tuple(entry.key for entry in entries)
        if keys not in self._hashes:
            self._hashes[keys] = int.from_bytes(hashlib.blake2b(repr(keys).encode(), digest_size=6).digest(), "big")
        return self._hashes[keys]

    # -- giving out ------------------------------------------------------------------------------------------------------------------------

    def _take_back(self, before: dict[tuple[int, str], dict[str, Any] | None], *, keep: bool) -> None:
        """Undo the local values. Results that they made go where ranks disagree, to be made anew in an order that all have."""
        for (index, key), state in before.items():
            results = self._collections[index]
            metric = results[key]
            if state is not None:
                metric.__dict__.clear()
                metric.__dict__.update(state)
            elif not keep:
                del results[key]
            elif metric.is_tensor:
                metric.reset()
                metric.has_reset = False

    def _log_again(self, entry: Entry, value: Tensor | None, batch_size: int) -> None:
        results = self._collections[entry.collection]
        connector = self._trainer._logger_connector
        if connector.should_reset_tensors(entry.fx):
            results.reset(metrics=False, fx=entry.fx)
        metric_attribute = entry.options[OPTIONS.index("metric_attribute")]
        logged: Any = self._module.get_submodule(metric_attribute) if value is None else value.to(entry.dtype)
        if entry.result in results:
            # Past log(), whose moving of a result's every tensor costs more than the exchange.
            if value is not None:
                logged = logged.to(results[entry.result].value.device)
            if "begin" in vars(results):  # a resumed epoch's result begins with what was saved of it
                results.begin(entry.result)
            type(results).update_metrics(results, entry.result, logged, batch_size)
        else:
            arguments = dict(zip(OPTIONS, entry.options, strict=True), batch_size=batch_size)
            now, results.dataloader_idx = results.dataloader_idx, entry.dataloader_idx
            try:
                type(results).log(results, entry.fx, entry.name, logged, **_already_global(arguments))
            finally:
                results.dataloader_idx = now
        connector._current_fx = entry.fx

    # -- where hooks log -------------------------------------------------------------------------------------------------------------------

    def _patch_hooks(self) -> None:
        """Exchange what hooks logged before Lightning or a monitoring callback reads it."""
        connector = self._trainer._logger_connector
        between = self._logs_between_steps()

        def on_batch_end() -> None:
            if between:
                self.flush()
            type(connector).on_batch_end(connector)

        def on_epoch_end() -> None:
            self.flush()
            index = self._index()
            if index is not None:
                self._rows[index] = 0
            type(connector).on_epoch_end(connector)

        connector.on_batch_end, connector.on_epoch_end = on_batch_end, on_epoch_end  # type: ignore[method-assign]
        optimization = self._trainer.fit_loop.epoch_loop.automatic_optimization

        def _make_step_fn(*args: Any, **kwargs: Any) -> Callable[[], Any]:
            step = type(optimization)._make_step_fn(optimization, *args, **kwargs)

            def with_global_loss() -> Any:
                result = step()
                if self._loss is not None and result.loss is not None:
                    result.loss = (self._loss / self._trainer.accumulate_grad_batches).reshape(result.loss.shape)
                return result

            return with_global_loss

        optimization.__dict__["_make_step_fn"] = _make_step_fn
        module = self._module
        shadowed = module.__dict__.get("on_train_epoch_end")
        logging = self

        def on_train_epoch_end(self: LightningModule) -> None:
            if shadowed is None:
                type(self).on_train_epoch_end(self)
            else:
                shadowed()
            logging.flush()

        on_train_epoch_end.__wrapped__ = module.on_train_epoch_end  # type: ignore[attr-defined]  # is_overridden() looks behind it
        module.__dict__["on_train_epoch_end"] = types.MethodType(on_train_epoch_end, module)

        def undo() -> None:
            del connector.on_batch_end, connector.on_epoch_end, optimization.__dict__["_make_step_fn"]
            del module.__dict__["on_train_epoch_end"]
            if shadowed is not None:
                module.__dict__["on_train_epoch_end"] = shadowed

        self._undo.append(undo)

    def _patch_log(self) -> None:
        """Notice under which names the user's step logs what a metric's ``forward`` gave."""
        module = self._module
        shadowed = module.__dict__.get("log")

        def log(module: LightningModule, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            if any(value is given for given in self._metric_parts.given):
                self._last.add(name)
            own = type(module).log.__get__(module) if shadowed is None else shadowed
            own(name, value, *args, **kwargs)

        module.__dict__["log"] = types.MethodType(log, module)

        def undo() -> None:
            del module.__dict__["log"]
            if shadowed is not None:
                module.__dict__["log"] = shadowed

        self._undo.append(undo)

    def _logs_between_steps(self) -> bool:
        """Whether the user's code may log in a hook of a batch. Lightning's own callbacks have the hooks, but don't log in them."""
        watched: list[Any] = [self._module]
        callbacks: list[Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        watched += [each for each in callbacks if not type(each).__module__.startswith("lightning.pytorch.")]
        parents = {id(each): Callback if isinstance(each, Callback) else LightningModule for each in watched}
        return any(hasattr(parents[id(each)], hook) and is_overridden(hook, each) for each in watched for hook in _BATCH_HOOKS)

    # -- torchmetrics ----------------------------------------------------------------------------------------------------------------------

    def _adopt_metrics(self) -> None:
        """Have every metric of the module synchronise at each step, by an exchange that ragged and empty shares can't disturb."""
        for metric in self._module.modules():
            if not isinstance(metric, Metric) or id(metric) in self._adopted:
                continue
            self._adopted.add(id(metric))
            if not self._alone:
                self._undo.append(adopt(metric, self._host_group))
            if self._in_parts:
                self._undo.append(self._metric_parts.adopt(metric))


def _given(value: Any, *_: Any, **__: Any) -> Any:
    """Stands for Lightning's reduction over ranks where a value is everybody's already."""
    return value


def _already_global(arguments: dict[str, Any]) -> dict[str, Any]:
    """``log``'s arguments with a reduction over ranks that does nothing (which spares the advice to pass ``sync_dist=True``).

    Lightning's own reductions go by their names, which other processes understand; what else it may be is for Lightning to refuse.
    """
    reduction = arguments.get("reduce_fx", "mean")
    return {
        **arguments,
        "reduce_fx": REDUCTIONS.get(reduction, reduction),
        "sync_dist": True,
        "sync_dist_fn": _given,
        "sync_dist_group": None,
    }


def _default_dtype(value: Tensor) -> torch.dtype:
    """What Lightning keeps a value as: float32, or the default type where it is wider and the value no float32."""
    return torch.float32 if value.dtype == torch.float32 or torch.get_default_dtype() != torch.float64 else torch.float64
