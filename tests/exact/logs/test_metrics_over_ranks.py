"""torchmetrics over ranks: what is exchanged, and that the host needn't wait for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import ExplainedVariance, MaxMetric, MeanMetric, Metric, MetricCollection, MinMetric, SumMetric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy

from lightning_autopar.exact.logs.metrics_over_parts import _without
from lightning_autopar.exact.logs.metrics_over_ranks import States, adopt, sync_states, value_of
from tests.blocking import Blocking
from tests.ranks import run_ranks

SAMPLES = torch.arange(14.0).sin()
#: Of three ranks, the last one without samples.
PARTS = (SAMPLES[:9], SAMPLES[9:], SAMPLES[:0])
KINDS = (SumMetric, MeanMetric, MaxMetric, MinMetric)


def _synced(rank: int, world_size: int) -> list[float]:
    metrics: list[Metric] = [kind() for kind in KINDS]
    for metric in metrics:
        if len(PARTS[rank]):
            metric.update(PARTS[rank])
        adopt(metric, lambda: (None, world_size))
        with Blocking() as blocking:
            metric.sync()
        assert not blocking.found
        metric._to_sync, metric._update_count = False, 1
    return [float(metric.compute()) for metric in metrics]


def test_a_rank_without_samples_counts_for_nothing() -> None:
    whole = [kind() for kind in KINDS]
    for metric in whole:
        metric.update(SAMPLES)
    for found in run_ranks(_synced, 3):
        assert found == pytest.approx([float(metric.compute()) for metric in whole])


class Caller:
    """A user's step: what it does with what a metric gives."""

    def __init__(self, metric: Any) -> None:
        self.metric = metric

    def drop(self, *batch: Any) -> None:
        self.metric(*batch)

    def use(self, *batch: Any) -> Any:
        return self.metric(*batch)

    def use_by_map(self, *batch: Any) -> list[Any]:
        """What the call on the next line gives is dropped; what the metric gives isn't."""
        found: list[Any] = []
        found.extend(map(self.metric, *([each] for each in batch)))
        return found


def _called(rank: int, world_size: int) -> list[Any]:
    kept: dict[int, States] = {}

    def keep(metric: Metric, states: States) -> bool:
        kept[id(metric)] = states
        return True

    torch.manual_seed(rank)
    batch = torch.rand(5 + rank, 3), torch.arange(5 + rank) % 3
    accuracy, collection = MulticlassAccuracy(3, average="micro"), MetricCollection([MulticlassAccuracy(3)])
    for metric in (accuracy, collection["MulticlassAccuracy"]):
        adopt(metric, lambda: (None, world_size), keep)
    calls = []
    gather = dist.all_gather
    dist.all_gather = lambda *args, **kwargs: (calls.append(1), gather(*args, **kwargs))[1]  # type: ignore[assignment]
    Caller(accuracy).drop(*batch)
    Caller(collection).drop(*batch)
    dropped, before = len(calls), accuracy.tp.clone()
    later = float(value_of(accuracy, kept[id(accuracy)], lambda metric: sync_states(metric, None)))
    assert torch.equal(accuracy.tp, before)
    assert accuracy._update_count == 1
    used = float(Caller(accuracy).use(*batch))
    assert Caller(accuracy).use_by_map(*batch) == [used]
    return [dropped, later, used, len(calls)]


def test_a_value_that_is_dropped_is_exchanged_when_it_is_asked_for() -> None:
    found = run_ranks(_called, 2)
    dropped, later, used, calls = found[0]
    assert dropped == 0
    assert later == used == found[1][1] == found[1][2]
    assert calls == 2, "two values that are used; what is asked for later travels whole"


def _lists(rank: int, world_size: int) -> float:
    metric = BinaryAUROC()
    torch.manual_seed(rank)
    metric.update(torch.rand(4 + rank), torch.arange(4 + rank) % 2)
    sync_states(metric, None)
    metric._to_sync = False
    return float(metric.compute())


def test_lists_of_unequal_lengths_are_brought_together() -> None:
    first, second = run_ranks(_lists, 2)
    assert first == second


def _outputs(rank: int, world_size: int) -> float:
    metric = ExplainedVariance()
    if len(PARTS[rank]):
        metric.update(*_pair(PARTS[rank]))
    adopt(metric, lambda: (None, world_size))
    metric.sync()
    metric._to_sync, metric._update_count = False, 1
    return float(metric.compute())


def _pair(samples: Tensor) -> tuple[Tensor, Tensor]:
    targets = torch.stack([samples, samples**2, samples.cos()], 1)
    return targets.roll(1, 0), targets


def test_states_that_the_first_update_gives_their_shape_are_exchanged_by_all_ranks_alike() -> None:
    """A rank without samples still has them as they begin: by its own states it would take them for ones of fixed shapes."""
    whole = ExplainedVariance()
    whole.update(*(torch.cat(parts) for parts in zip(*map(_pair, PARTS[:2]), strict=True)))
    assert run_ranks(_outputs, 3, timeout_seconds=20) == pytest.approx([float(whole.compute())] * 3)


@pytest.mark.parametrize("value", [3.0, torch.inf, torch.nan])
def test_an_update_that_counts_for_nothing_leaves_its_graph_alone(value: float) -> None:
    updated = torch.tensor(value, requires_grad=True)
    (state,) = _without([torch.tensor(1.0)], [torch.tensor(1.0)])
    assert float(state) == 1.0
    found = _without(torch.tensor(2.0), updated.clone())
    assert float(found.detach()) == 2.0
    found.backward()
    assert updated.grad == 0.0
