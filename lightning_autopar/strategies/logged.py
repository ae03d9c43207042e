"""What ``self.log`` says, of the whole batch and the same on every rank.

Knows Lightning's result collections and torchmetrics, a process group and a rank's share of the batch; it doesn't know which engine runs.

A logged value is first taken in as Lightning does, so that whoever reads it in the same hook finds it. At the end of the step, before any
other hook runs, the ranks exchange what they logged by one collective; the local values are taken back and the whole batch's logged in
their place. What hooks outside a step log is exchanged before something could read it: at the batch's end, and at the epoch's.
"""

from __future__ import annotations

import hashlib
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_autopar._lightning_compat import is_overridden
from lightning_autopar.state.share import BatchShare
from lightning_autopar.strategies.logrules import LogRules
from lightning_autopar.strategies.metrics import adopt, hold_metrics

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
_REDUCTIONS: dict[Any, str] = {
    torch.mean: "mean",
    torch.sum: "sum",
    torch.max: "max",
    torch.min: "min",
    sum: "sum",
    max: "max",
    min: "min",
}
_OPTIONS = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "add_dataloader_idx", "metric_attribute")


@dataclass(kw_only=True)
class _Entry:
    """One call of ``log``.

    Args:
        collection: which of the trainer's result collections.
        fx: the hook that logged.
        options: ``log``'s other arguments, in the order of ``_OPTIONS``.
        dataloader_idx: the collection's at that time.
        result: the key of its result in the collection.
        is_metric: whether a torchmetrics object was logged, which exchanges its states itself.
        value: what this rank logged; None for a metric, and where another rank logged it.
        dtype: the value's, as Lightning keeps it.
        batch_size: what the value weighs in its epoch's mean.
        rows: how many samples of this rank the value speaks for.
        of: how many samples the global batch had; 0 outside a batch.
    """

    collection: int
    fx: str
    name: str
    options: tuple[Any, ...]
    dataloader_idx: int | None
    is_metric: bool
    result: str = ""
    value: Tensor | None = None
    dtype: torch.dtype = torch.float32
    batch_size: int = 1
    rows: int = 0
    of: int = 0

    @property
    def key(self) -> tuple[Any, ...]:
        """What two ranks' entries have in common if they are the same."""
        return (self.collection, self.fx, self.name, self.options, self.dataloader_idx, self.is_metric)


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
    """

    def __init__(
        self, trainer: Trainer, share: Callable[[], BatchShare | None], *, device: torch.device | None = None, rules: LogRules | None = None
    ) -> None:
        self._trainer = trainer
        self._share = share
        self._device = device or torch.device("cpu")
        self._rules = rules or {}
        self._host_group: dist.ProcessGroup | None = None
        self._installed = False
        self._undo: list[Callable[[], None]] = []
        self._collections: list[Any] = []
        self._adopted: set[int] = set()
        self._current: BatchShare | None = None
        self._pending: list[_Entry] = []
        #: Results as they were before the first value since the last exchange; None where that made them.
        self._before: dict[tuple[int, str], dict[str, Any] | None] = {}
        self._rows: defaultdict[int, int] = defaultdict(int)
        self._loss: Tensor | None = None
        self._constant: dict[tuple[Any, ...], int] = {}
        self._hashes: dict[tuple[Any, ...], int] = {}

    def install(self) -> None:
        """Start. Every rank calls this, when the process group is there. With one rank there is nothing to do."""
        if self._installed or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        self._installed = True
        if self._device.type != "cpu":
            # What the host knows (names, batch sizes) goes by the host: reading it from the device would wait for the step's kernels.
            self._host_group = dist.new_group(backend="gloo")
            group = self._host_group
            self._undo.append(lambda: dist.destroy_process_group(group))
        trainer = self._trainer
        loops = (trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
        self._collections = [loop._results for loop in loops]
        for index, results in enumerate(self._collections):
            self._patch_collection(index, results)
        self._patch_hooks()
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
        try:
            if self._trainer._logger_connector._first_loop_iter:
                self._adopt_metrics()
            empty = share is not None and share.rows == 0
            with hold_metrics(self._module) if empty else nullcontext():
                yield
        finally:
            self._current = None
        index = self._index()
        if index is not None:
            self._rows[index] += 1 if share is None else share.rows
        self.flush()

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
            _Entry(
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
        agreed, exchanged = self._exchange(entries)
        self._take_back(before, keep=agreed)
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
        logging: list[tuple[_Entry, int]] = []

        def log(fx: str, name: str, value: Any, **arguments: Any) -> None:
            if arguments.get("rank_zero_only"):
                own_log(fx, name, value, **arguments)
                return
            arguments = _already_global(arguments)
            entry = _Entry(
                collection=index,
                fx=fx,
                name=name,
                options=tuple(arguments.get(option) for option in _OPTIONS),
                dataloader_idx=results.dataloader_idx,
                is_metric=isinstance(value, Metric),
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

    def _exchange(self, entries: list[_Entry]) -> tuple[bool, list[tuple[_Entry, Tensor | None, int]]]:
        """Whether all ranks logged the same, and what all of them logged together, in an order that is the same everywhere."""
        on_host = self._device.type == "cpu"
        width = 3 if on_host else 2
        header = [float(self._hash(entries)), float(len(entries))]
        numbers = [float(number) for entry in entries for number in (entry.rows, entry.batch_size, _item(entry) if on_host else 0)[:width]]
        gathered = self._gather(header + numbers[: width * _SLOTS], _HEADER + width * _SLOTS)
        if any(row[:_HEADER] != gathered[0][:_HEADER] for row in gathered):
            return False, self._exchange_by_name(entries)
        if not entries:
            return True, []
        if len(entries) > _SLOTS:
            gathered = self._gather(header + numbers, _HEADER + width * len(entries))
        table = torch.tensor(gathered, dtype=torch.float64)[:, _HEADER : _HEADER + width * len(entries)].view(len(gathered), -1, width)
        values = table[:, :, 2] if on_host else self._gather_values(entries)
        return True, self._combine(entries, values, table[:, :, 0], table[:, :, 1].tolist())

    def _gather(self, numbers: list[float], size: int) -> list[list[float]]:
        """Every rank's numbers, padded to ``size``."""
        mine = torch.zeros(size, dtype=torch.float64)
        mine[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        gathered = torch.empty(dist.get_world_size(), size, dtype=torch.float64)
        dist.all_gather(list(gathered.unbind()), mine, group=self._host_group)
        rows: list[list[float]] = gathered.tolist()
        return rows

    def _gather_values(self, entries: list[_Entry]) -> Tensor:
        """Every rank's values on the device, (ranks, entries), without waiting for it."""
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        mine = torch.stack([zero if entry.value is None else entry.value.to(self._device, torch.float64) for entry in entries])
        gathered = mine.new_empty(dist.get_world_size(), len(entries))
        dist.all_gather(list(gathered.unbind()), mine)
        return gathered

    def _exchange_by_name(self, entries: list[_Entry]) -> list[tuple[_Entry, Tensor | None, int]]:
        """Ranks logged different names: bring together what has the same name, in the order of the first rank that logged it."""
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, [(replace(entry, value=None), _item(entry)) for entry in entries], group=self._host_group)
        by_key: dict[tuple[Any, ...], dict[int, tuple[_Entry, float]]] = {}
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
            exchanged += self._combine([first], values, rows, [[float(entry.batch_size)] for entry, _ in ordered])
        return exchanged

    def _combine(
        self, entries: Sequence[_Entry], values: Tensor, rows: Tensor, batch_sizes: list[list[float]]
    ) -> list[tuple[_Entry, Tensor | None, int]]:
        """The whole batch's values: ``values`` and ``rows`` are (ranks, entries), float64."""
        # Before any sample was seen (on_train_start), ranks weigh the same.
        rows = torch.where(rows.sum(0) > 0, rows, torch.ones_like(rows))
        row_lists = rows.tolist()
        weights = rows.to(values.device)
        counts = weights > 0
        combined: dict[str, Tensor] = {}
        exchanged: list[tuple[_Entry, Tensor | None, int]] = []
        for column, entry in enumerate(entries):
            if entry.is_metric:
                exchanged.append((entry, None, 1))
                continue
            kind = self._rules.get((entry.fx, entry.name)) or _reduction(entry)
            if kind not in combined:
                combined[kind] = _reduce(kind, values, weights, counts)
            sizes = [(int(row[column]), int(size[column])) for row, size in zip(row_lists, batch_sizes, strict=True) if row[column] > 0]
            exchanged.append((entry, combined[kind][column], self._batch_size(entry, sizes)))
        return exchanged

    def _batch_size(self, entry: _Entry, sizes: list[tuple[int, int]]) -> int:
        """What the whole batch weighs in its epoch's mean, from the ranks' (rows, batch size).

        Sizes that follow the rank's rows add up; one that doesn't (``batch_size=1``, or the loader's as a constant) means the same with any
        number of ranks.
        """
        first = sizes[0][1]
        if any(size != first for _, size in sizes):
            return sum(size for _, size in sizes)
        if self._constant.get(entry.key) != first:
            follows = all(size == rows for rows, size in sizes)
            ragged = len({rows for rows, _ in sizes}) > 1
            if follows or not (ragged or first in (1, entry.of)):
                return first * len(sizes)
            self._constant[entry.key] = first
        return first

    def _hash(self, entries: list[_Entry]) -> int:
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

    def _log_again(self, entry: _Entry, value: Tensor | None, batch_size: int) -> None:
        results = self._collections[entry.collection]
        connector = self._trainer._logger_connector
        if connector.should_reset_tensors(entry.fx):
            results.reset(metrics=False, fx=entry.fx)
        metric_attribute = entry.options[_OPTIONS.index("metric_attribute")]
        logged: Any = self._module.get_submodule(metric_attribute) if value is None else value.to(entry.dtype)
        if entry.result in results:
            # Past log(), whose moving of a result's every tensor costs more than the exchange.
            if value is not None:
                logged = logged.to(results[entry.result].value.device)
            if "begin" in vars(results):  # a resumed epoch's result begins with what was saved of it
                results.begin(entry.result)
            type(results).update_metrics(results, entry.result, logged, batch_size)
        else:
            arguments = dict(zip(_OPTIONS, entry.options, strict=True), batch_size=batch_size)
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
            self._undo.append(adopt(metric, self._host_group))


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
        "reduce_fx": _REDUCTIONS.get(reduction, reduction),
        "sync_dist": True,
        "sync_dist_fn": _given,
        "sync_dist_group": None,
    }


def _default_dtype(value: Tensor) -> torch.dtype:
    """What Lightning keeps a value as: float32, or the default type where it is wider and the value no float32."""
    return torch.float32 if value.dtype == torch.float32 or torch.get_default_dtype() != torch.float64 else torch.float64


def _item(entry: _Entry) -> float:
    return 0.0 if entry.value is None else float(entry.value)


def _reduction(entry: _Entry) -> str:
    """``mean``, ``sum``, ``max`` or ``min``, however the user wrote it."""
    name = str(entry.options[_OPTIONS.index("reduce_fx")]).lower()
    return "mean" if name == "avg" else name


def _reduce(kind: str, values: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Over the ranks that count; a value of a rank that doesn't may be anything, NaN included."""
    if kind == "max":
        return torch.where(counts, values, -torch.inf).amax(0)
    if kind == "min":
        return torch.where(counts, values, torch.inf).amin(0)
    if kind == "sum":
        return torch.where(counts, values, 0.0).sum(0)
    return torch.where(counts, values * weights, 0.0).sum(0) / weights.sum(0)
