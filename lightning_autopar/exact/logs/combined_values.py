"""Logged values, and how the values of a batch's parts make the whole batch's, whether the parts ran on several ranks or one after the
other.

It also writes to Lightning's result collections past ``self.log``: it takes a local value back and logs the whole batch's in its place.
Knows the arguments of Lightning's ``log`` and numbers; nothing of ranks or of how they agreed on a value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_autopar._lightning import Trainer, rank_zero_warn
from lightning_autopar.exact.data.counted_entries import Count, Rule
from lightning_autopar.exact.data.rank_share import BatchShare
from lightning_autopar.exact.logs.log_rules import MEANS, LogRules

#: Lightning's own reductions by their names, which other processes understand.
REDUCTIONS: dict[Any, str] = {
    torch.mean: "mean",
    torch.sum: "sum",
    torch.max: "max",
    torch.min: "min",
    sum: "sum",
    max: "max",
    min: "min",
}
#: The collection in the entry of the step's loss, which nobody logged.
LOSS = -1
#: How a value goes into a sum that is the usual mean, and how it comes back.
_AS_IT_IS: Any = (lambda value: value,) * 2
OPTIONS = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "add_dataloader_idx", "metric_attribute")


@dataclass(kw_only=True)
class Entry:
    """One call of ``log``.

    Args:
        fx: the hook that logged.
        options: ``log``'s other arguments, in the order of ``OPTIONS``.
        dataloader_idx: the collection's at that time.
        is_metric: whether a torchmetrics object was logged, which exchanges its states itself.
        value: what this rank logged; None if another rank logged it, and for a metric. In a pipeline's step, a metric's value is that of
            its ``forward`` on the batch so far.
        dtype: the value's, as Lightning keeps it.
        batch_size: what the value weighs in its epoch's mean.
        rows: how many samples of this rank the value speaks for.
        of: how many samples the global batch had; 0 outside a batch.
        own: whether it is this rank's alone (``rank_zero_only``).
        stage: which stage of a pipeline logged it in a step; None outside of one, and where there are no stages.
        given_as_number: whether the user gave a number rather than a tensor.
        deferred: whether it is a metric whose value of the step still has to be combined, from ``states``.
        states: of the metric on this rank's part of the batch, and how many updates they have seen.
        packed: the states as a row of numbers, where possible; after the exchange those of the ranks that logged it, a row each.
        packed_numbers: how many numbers that row has.
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
    own: bool = False
    stage: int | None = None
    given_as_number: bool = False
    #: Whether a metric has left a value of the step to be logged, which ``value`` is.
    valued: bool = False
    deferred: bool = False
    states: Any = None
    packed: Tensor | None = None
    packed_numbers: int = 0

    @property
    def key(self) -> tuple[Any, ...]:
        """The key that is equal for two ranks' entries of the same value."""
        return (self.collection, self.fx, self.name, self.options, self.dataloader_idx, self.is_metric)

    @property
    def number(self) -> float:
        """The value on the host; 0 where there is none."""
        return 0.0 if self.value is None else float(self.value)

    @property
    def reduction(self) -> str:
        """``mean``, ``sum``, ``max`` or ``min``, however the user wrote it."""
        name = str(self.options[OPTIONS.index("reduce_fx")]).lower()
        return "mean" if name == "avg" else name


class Combiner:
    """Combines the parts' values into the whole batch's.

    A mean is weighted by the parts' samples, or by what it is a mean over. A sum, maximum or minimum (``reduce_fx``) is that over the
    parts.

    Args:
        rules: how the parts' values combine into the whole batch's, where that was found out; elsewhere ``reduce_fx`` decides.
    """

    def __init__(self, rules: LogRules | None = None) -> None:
        self._rules = rules or {}
        self._constant: dict[tuple[Any, ...], int] = {}
        self._added_up: set[tuple[Any, ...]] = set()
        self._told: set[tuple[str, str]] = set()

    def part(self, fx: str, name: str, value: Tensor, share: BatchShare | None) -> Tensor:
        """A part's value, as :meth:`combine` adds it up: where it is a mean over something that the batch counts, times its weight.

        Args:
            fx: the hook that logged it.
            name: the value's; that of the loss is ``""``.
            share: the part's of the batch.
        """
        rule = self._rules.get((fx, name))
        if not isinstance(rule, Count) or share is None:  # a hook, of a batch that isn't split
            return value
        weight = share.fraction(rule)
        into, back = MEANS.get(rule.mean, _AS_IT_IS)
        part: Tensor = back(into(value.double()) * weight if weight else torch.zeros_like(value, dtype=torch.float64))
        return part

    def _simple(self, entry: Entry) -> Rule:
        rule = self._rules.get((entry.fx, entry.name)) or entry.reduction
        return "sum" if isinstance(rule, Count) and not rule.mean else rule

    def combine(
        self, entries: Sequence[Entry], values: Tensor, rows: Tensor, batch_sizes: list[list[float]], *, last: Collection[str] = ()
    ) -> list[tuple[Entry, Tensor | None, int]]:
        """The whole batch's values, and what they weigh in an epoch's mean.

        Args:
            values: a row for each part, float64; any value, NaN included, for a part without samples.
            rows: samples that each of them speaks for, float64, on the host.
            last: names of values whose last part's value is the whole batch's, even if that part has no samples.
        """
        # Before any sample was seen (on_train_start), all parts weigh the same.
        rows = torch.where(rows.sum(0) > 0, rows, torch.ones_like(rows))
        row_lists = rows.tolist()
        weights = rows.to(values.device, non_blocking=True)
        counts = weights > 0
        combined: dict[Rule, Tensor] = {}
        found: list[tuple[Entry, Tensor | None, int]] = []
        for column, entry in enumerate(entries):
            if entry.is_metric and not entry.valued:
                found.append((entry, None, 1))
                continue
            by_rule = "latest" if entry.is_metric else self._simple(entry)
            kind = "last" if entry.name in last else by_rule
            if kind not in combined:
                combined[kind] = _reduce(kind, values, weights, counts)
            sizes = [(int(row[column]), int(size[column])) for row, size in zip(row_lists, batch_sizes, strict=True) if row[column] > 0]
            found.append((entry, combined[kind][column], self._batch_size(entry, sizes)))
        return found

    def fold(self, parts: Sequence[Sequence[Entry]], *, last: Collection[str] = ()) -> list[Entry]:
        """Combine what parts logged one after the other into one log."""
        if len(parts) == 1:
            return list(parts[0])
        if all([entry.key for entry in part] == [entry.key for entry in parts[0]] for part in parts):
            return self._folded(parts, last)
        by_key: dict[tuple[Any, ...], list[Entry]] = {}
        for part in parts:
            seen: defaultdict[tuple[Any, ...], int] = defaultdict(int)
            for entry in part:
                seen[entry.key] += 1
                by_key.setdefault((*entry.key, seen[entry.key]), []).append(entry)
        counted = [[entry for entry in same if entry.rows or entry.is_metric or entry.name in last] or same for same in by_key.values()]
        folded = [each for same in counted for each in self._folded([[entry] for entry in same], last)]
        for each in folded:
            self.tell_partly(each, each.rows, sum(max((entry.rows for entry in part), default=0) for part in parts))
        return folded

    def tell_partly(self, entry: Entry, rows: int, of: int) -> None:
        """Say, once, that a mean was logged for some of a batch's samples, as each of its parts decides by its own whether it logs."""
        key = entry.fx, entry.name
        is_mean = (self._rules.get(key) or entry.reduction) in ("mean", *MEANS)
        if not is_mean or not 0 < rows < of or entry.is_metric or entry.own or key in self._told:
            return
        self._told.add(key)
        rank_zero_warn(
            f"{entry.name!r}, logged in {entry.fx}, was logged for {rows} of a batch's {of} samples, and is a mean over these: each part "
            "of the batch decides by its own samples whether it is logged, where on one device the whole batch decides. Log it at every "
            "batch, or run the model on one device in one piece (plan=Plan(engine='single', devices=[...]))"
        )

    def _folded(self, parts: Sequence[Sequence[Entry]], last: Collection[str]) -> list[Entry]:
        """Combine the entries of parts that logged the same values."""
        first = parts[0]
        device = next((entry.value.device for entry in first if entry.value is not None), torch.device("cpu"))
        zero = torch.zeros((), dtype=torch.float64, device=device)
        stacked = [zero if entry.value is None else entry.value.to(device, torch.float64).reshape(()) for part in parts for entry in part]
        if not stacked:
            return []
        rows = torch.tensor([[entry.rows for entry in part] for part in parts], dtype=torch.float64)
        sizes = [[float(entry.batch_size) for entry in part] for part in parts]
        together = self.combine(first, torch.stack(stacked).view(len(parts), -1), rows, sizes, last=last)
        counts = rows.sum(0).tolist()
        return [
            replace(entry, value=value, batch_size=size, rows=int(count), states=latest.states)
            for (entry, value, size), count, latest in zip(together, counts, parts[-1], strict=True)
        ]

    def _batch_size(self, entry: Entry, sizes: list[tuple[int, int]]) -> int:
        """What the whole batch weighs in its epoch's mean, from the parts' (rows, batch size).

        Sizes that follow the part's rows add up; one that doesn't (``batch_size=1``, or the loader's as a constant) means the same with any
        number of parts. A value's sizes that were added up once always are: a hook that halves batches may leave each part one row. Sizes
        that looked like one and later don't (two views of each sample, on two ranks) go on by that scale, as an epoch's mean has but one.
        """
        first = sizes[0][1]
        if any(size != first for _, size in sizes):
            total = sum(size for _, size in sizes)
            return total if entry.key not in self._constant else max(1, round(total / len(sizes)))
        if self._constant.get(entry.key) != first:
            follows = all(size == rows for rows, size in sizes)
            ragged = len({rows for rows, _ in sizes}) > 1
            if follows or entry.key in self._added_up or not (ragged or first in (1, entry.of)):
                self._added_up.add(entry.key)
                return first * len(sizes)
            self._constant[entry.key] = first
        return first


def _reduce(kind: Rule, values: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Reduce over the parts that count; the value of another part may be anything, NaN included."""
    if kind == "max":
        return torch.where(counts, values, -torch.inf).amax(0)
    if kind == "min":
        return torch.where(counts, values, torch.inf).amin(0)
    if kind == "sum":
        return torch.where(counts, values, 0.0).sum(0)
    if kind == "last":
        return values[-1]
    if kind == "latest":
        place = torch.arange(len(values), device=values.device).unsqueeze(1)
        return values.gather(0, torch.where(counts, place, -1).amax(0, keepdim=True)).squeeze(0)
    if isinstance(kind, Count) or kind in MEANS:
        name, how = (kind.mean, "sum") if isinstance(kind, Count) else (kind, "mean")
        into, back = MEANS[name]
        return back(_reduce(how, into(values), weights, counts))
    return torch.where(counts, values * weights, 0.0).sum(0) / weights.sum(0)


def loss_entry(loss: Tensor, rows: int, of: int, stage: int | None) -> Entry:
    """The loss of a part of a batch, to be brought together like what is logged."""
    value = loss.detach().reshape(())
    return Entry(
        collection=LOSS,
        fx="training_step",
        name="",  # not a user's name: what is known of a value that is logged as "loss" doesn't hold for this one
        options=(False, False, False, False, "mean", False, False, None),
        dataloader_idx=None,
        is_metric=False,
        value=value,
        dtype=value.dtype,
        batch_size=rows,
        rows=rows,
        of=of,
        stage=stage,
    )


def already_global(arguments: dict[str, Any]) -> dict[str, Any]:
    """``log``'s arguments with a reduction over ranks that does nothing (which spares the advice to pass ``sync_dist=True``).

    Lightning's own reductions go by their names, which other processes understand; anything else is refused by Lightning.
    """
    reduction = arguments.get("reduce_fx", "mean")
    return {
        **arguments,
        "reduce_fx": REDUCTIONS.get(reduction, reduction),
        "sync_dist": True,
        "sync_dist_fn": _given,
        "sync_dist_group": None,
    }


def _given(value: Any, *_: Any, **__: Any) -> Any:
    """Replaces Lightning's reduction over ranks for a value that all ranks have already."""
    return value


def kept_dtype(value: Tensor) -> torch.dtype:
    """The type in which Lightning keeps a value: float32, or float64 if it or the default type is that and it isn't float32."""
    wide = value.dtype == torch.float64 or (value.dtype != torch.float32 and torch.get_default_dtype() == torch.float64)
    return torch.float64 if wide else torch.float32


def take_back(collections: Sequence[Any], before: Mapping[tuple[int, str], dict[str, Any] | None], *, keep: bool) -> None:
    """Undo local values.

    Args:
        before: by collection and key, results as they were before; None where the values made them.
        keep: whether results that they made stay, empty; where ranks disagree they are removed, to be made anew in the same order on all
            ranks.
    """
    for (index, key), state in before.items():
        results = collections[index]
        metric = results[key]
        if state is not None:
            metric.__dict__.clear()
            metric.__dict__.update(state)
        elif not keep:
            del results[key]
        elif metric.is_tensor:
            metric.reset()
            metric.has_reset = False


def log_again(trainer: Trainer, results: Any, entry: Entry, value: Tensor | None, batch_size: int) -> None:
    """Log the whole batch's value in place of a local one.

    Args:
        trainer: whose module has logged it.
        results: the collection that it belongs to.
        value: the whole batch's; None of a metric that has its own.
        batch_size: what it weighs in its epoch's mean.
    """
    connector = trainer._logger_connector
    if connector.should_reset_tensors(entry.fx):
        results.reset(metrics=False, fx=entry.fx)
    logged: Any
    if entry.is_metric:
        logged = trainer.lightning_module.get_submodule(entry.options[OPTIONS.index("metric_attribute")])
        if value is not None:  # on every stage's rank, the step's states of the rank that updates the metric
            logged._forward_cache = value.to(logged.device, entry.dtype)
    else:
        assert value is not None
        logged = value.to(entry.dtype)
    if entry.result in results:
        # Not by log(), which moves every tensor of a result, and so costs more than the exchange.
        if not entry.is_metric:
            logged = logged.to(results[entry.result].value.device)
        if "begin" in vars(results):  # a resumed epoch's result begins with its saved sum
            results.begin(entry.result)
        type(results).update_metrics(results, entry.result, logged, batch_size)
    else:
        arguments = dict(zip(OPTIONS, entry.options, strict=True), batch_size=batch_size)
        now, results.dataloader_idx = results.dataloader_idx, entry.dataloader_idx
        try:
            type(results).log(results, entry.fx, entry.name, logged, **already_global(arguments))
        finally:
            results.dataloader_idx = now
    connector._current_fx = entry.fx
