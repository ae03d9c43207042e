"""A module's metrics while a batch's parts, one for each rank, are tried in one process: it does what the ranks would exchange.

The parts run twice. The first time, each part's metric states are noted; the second time, each part's metric gets those of all parts. Knows
metrics; nothing of batches.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torchmetrics import Metric

from lightning_autopar.exact.data.rank_share import BatchShare
from lightning_autopar.exact.logs.metrics_of_values import adopt_values, fraction
from lightning_autopar.exact.logs.metrics_over_ranks import exchanges_by_itself, merge_states, metrics_of, named_metrics

_ATTRIBUTES = ("_sync_dist", "dist_sync_on_step", "distributed_available_fn")


class MetricTrial:
    """The states of a module's metrics in the runs of its step: run 0 on the whole batch, the others on its parts."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._run = -1
        self._calls: Counter[int] = Counter()
        self._noted: dict[tuple[int, int], dict[int, tuple[int, dict[str, Any]]]] = {}
        self._merges = False
        #: Types of the metrics whose value is part of the loss.
        self.trained: dict[str, None] = {}
        #: The nodes of graphs that lead to the states of the running step's metrics, each with the metric's type.
        self._graphs: list[tuple[str, set[Any]]] = []
        #: By what a part adds to each state of each metric, None where that isn't known; and why it couldn't be tried.
        self.rules: dict[tuple[str, str], str | None] = {}
        self.failed: str | None = None
        self._shares: Sequence[BatchShare] = ()

    @property
    def settled(self) -> dict[tuple[str, str], str]:
        """The rules of metrics that get a value of their batch, where it is known how parts make it."""
        unknown = {name for (name, _), rule in self.rules.items() if rule is None}
        return {pair: rule for pair, rule in self.rules.items() if rule not in (None, "own") and pair[0] not in unknown}

    @property
    def exchanged(self) -> bool:
        """Whether any metric's states of the parts must be combined."""
        return bool(self._noted)

    def next_run(self) -> None:
        """The step is about to run once more."""
        self._run += 1
        self._calls.clear()

    @contextmanager
    def runs(self, shares: Sequence[BatchShare] = (), *, merge: bool = False) -> Iterator[None]:
        """The context of the run on the whole batch and of those on its parts.

        Args:
            shares: the parts.
            merge: whether each part's metrics get the states that the last runs recorded.
        """
        self._run, self._merges, self._shares = -1, merge, shares
        if not merge:
            self._noted.clear()
            self.trained.clear()
        metrics = [metric for metric in metrics_of(self._module) if not exchanges_by_itself(metric)]
        before = [{name: metric.__dict__[name] for name in _ATTRIBUTES if name in metric.__dict__} for metric in metrics]
        for metric in metrics:
            metric.__dict__["_sync_dist"] = types.MethodType(lambda this, *_, **__: self._sync(this), metric)
            metric.dist_sync_on_step, metric.distributed_available_fn = True, lambda: True
        undo = [adopt_values(metric, partial(self._counts, name)) for name, metric in named_metrics(self._module)]
        try:
            yield
        finally:
            for each in undo:
                each()
            for metric, attributes in zip(metrics, before, strict=True):
                for name in _ATTRIBUTES:
                    metric.__dict__.pop(name, None)
                metric.__dict__.update(attributes)

    def looked_at(self, losses: list[Tensor]) -> list[Tensor]:
        """The losses of a step; records which of its metrics lead to them. Many a metric is given the loss itself, with its graph."""
        reached = _nodes(losses) if self._graphs else set()
        self.trained |= {name: None for name, nodes in self._graphs if not reached.isdisjoint(nodes)}
        self._graphs.clear()
        return losses

    def _counts(self, name: str, metric: Metric, given: Any) -> dict[str, float]:
        """How much of what a part's update adds to a metric's states counts."""
        if not 0 < self._run <= len(self._shares):
            return {}
        share = self._shares[self._run - 1]
        return {state: fraction(rule, share) for (of, state), rule in self.settled.items() if of == name}

    def _sync(self, metric: Metric) -> None:
        """Replaces ``Metric._sync_dist``."""
        call = id(metric), self._calls[id(metric)]
        self._calls[id(metric)] += 1
        states = {name: getattr(metric, name) for name in metric._reductions}
        nodes = {leaf.grad_fn for leaf in tree_leaves(states) if isinstance(leaf, Tensor)} - {None}
        self._graphs += [(type(metric).__name__, nodes)] * bool(nodes)
        if self._run == 0:
            return
        if self._merges:
            theirs = {**self._noted.get(call, {}), self._run: (metric._update_count, states)}
            merge_states(metric, [theirs[run] for run in sorted(theirs)])
        else:
            detached = tree_map(lambda leaf: leaf.detach().clone() if hasattr(leaf, "detach") else leaf, states)
            self._noted.setdefault(call, {})[self._run] = (metric._update_count, detached)


def _nodes(losses: list[Tensor]) -> set[Any]:
    """The nodes of the graphs that lead to these losses."""
    left: list[Any] = [loss.grad_fn for loss in losses]
    seen: set[Any] = {None}
    while left:
        if (node := left.pop()) not in seen:
            seen.add(node)
            left += [earlier for earlier, _ in node.next_functions]
    return seen - {None}
