"""A module's metrics while a batch's parts, one for each rank, are tried in one process: it does what the ranks would exchange.

The parts run twice. The first time, each part's metric states are noted; the second time, each part's metric gets those of all parts. Knows
metrics; nothing of batches.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torchmetrics import Metric

from lightning_autopar.exact.logs.metrics_over_ranks import exchanges_by_itself, merge_states, metrics_of

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

    @property
    def exchanged(self) -> bool:
        """Whether any metric's states of the parts must be combined."""
        return bool(self._noted)

    def next_run(self) -> None:
        """The step is about to run once more."""
        self._run += 1
        self._calls.clear()

    @contextmanager
    def runs(self, *, merge: bool = False) -> Iterator[None]:
        """The context of the run on the whole batch and of those on its parts.

        Args:
            merge: whether each part's metrics get the states that the last runs recorded.
        """
        self._run, self._merges = -1, merge
        if not merge:
            self._noted.clear()
            self.trained.clear()
        metrics = [metric for metric in metrics_of(self._module) if not exchanges_by_itself(metric)]
        before = [{name: metric.__dict__[name] for name in _ATTRIBUTES if name in metric.__dict__} for metric in metrics]
        for metric in metrics:
            metric.__dict__["_sync_dist"] = types.MethodType(lambda this, *_, **__: self._sync(this), metric)
            metric.dist_sync_on_step, metric.distributed_available_fn = True, lambda: True
        try:
            yield
        finally:
            for metric, attributes in zip(metrics, before, strict=True):
                for name in _ATTRIBUTES:
                    metric.__dict__.pop(name, None)
                metric.__dict__.update(attributes)

    def _sync(self, metric: Metric) -> None:
        """Replaces ``Metric._sync_dist``."""
        call = id(metric), self._calls[id(metric)]
        self._calls[id(metric)] += 1
        states = {name: getattr(metric, name) for name in metric._reductions}
        if any(getattr(leaf, "requires_grad", False) for leaf in tree_leaves(states)):
            self.trained[type(metric).__name__] = None
        if self._run == 0:
            return
        if self._merges:
            theirs = {**self._noted.get(call, {}), self._run: (metric._update_count, states)}
            merge_states(metric, [theirs[run] for run in sorted(theirs)])
        else:
            detached = tree_map(lambda leaf: leaf.detach().clone() if hasattr(leaf, "detach") else leaf, states)
            self._noted.setdefault(call, {})[self._run] = (metric._update_count, detached)
