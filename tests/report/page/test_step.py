"""Spans of a step: in order, without overlaps on a lane, and as long as the step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from lightning_autopar.planning.plan_seconds import predict_seconds
from lightning_autopar.plans import Plan
from lightning_autopar.report.page.step import Span, timeline
from tests.fakes.rates import PlainRates
from tests.fakes.traced import BLOCKS, GPUS, HERE, traced
from tests.fakes.values import MIB

PLANS: tuple[dict[str, Any], ...] = (
    {"engine": "single", "devices": GPUS[:1], "micro_batches": 2, "recompute": BLOCKS[:1]},
    {"engine": "ddp", "devices": GPUS[:3]},
    {"engine": "ddp", "devices": (GPUS[0], GPUS[4])},
    {"engine": "ddp", "devices": ("cpu:0", "cpu:1")},
    {"engine": "fsdp", "devices": GPUS[:2], "reshard_after_forward": True, "shard": BLOCKS},
    {"engine": "fsdp", "devices": ("cpu:0", "cpu:1"), "reshard_after_forward": False, "shard": BLOCKS},
    {"engine": "zero", "devices": GPUS[:2], "zero_stage": 2, "offload": ("optimizer",)},
    {"engine": "pipeline", "devices": GPUS[:2], "cuts": ("net.2",), "schedule": "1f1b", "micro_batches": 4},
    {"engine": "pipeline", "devices": GPUS[:4], "cuts": ("net.1",), "schedule": "gpipe", "micro_batches": 2, "replicas": 2},
    {"engine": "pipeline", "devices": GPUS[:2], "cuts": ("net.2",), "schedule": "1f1b", "micro_batches": 4, "recompute": BLOCKS},
)


def spans(parts: dict[str, Any], **rates: Any) -> tuple[Span, ...]:
    return timeline(traced(update=64 * MIB), Plan(**parts), HERE, rates=PlainRates(**rates))


@pytest.mark.parametrize("parts", PLANS, ids=lambda parts: Plan(**parts).title())
def test_lanes_are_in_order_and_end_with_the_step(parts: dict[str, Any]) -> None:
    rates = {"wire_bytes_per_second": 50 * MIB, "bytes_per_second": 100 * MIB, "adam_seconds": 1e-9}
    rates["hides"] = 0.0 if parts["devices"][0].startswith("cpu") else 1.0
    found = spans(parts, **rates)
    step = predict_seconds(traced(update=64 * MIB), Plan(**parts), HERE, rates=PlainRates(**rates)).step
    assert {span.rank for span in found} == set(range(len(parts["devices"])))
    ends = []
    for rank in range(len(parts["devices"])):
        for lane in ("compute", "communication"):
            own = [span for span in found if span.rank == rank and span.lane == lane]
            assert all(span.end_seconds >= span.start_seconds >= 0 for span in own)
            if lane == "compute" or parts["engine"] != "pipeline":  # a pipeline's ranks send both ways at once
                assert all(before.end_seconds <= after.start_seconds + 1e-9 for before, after in pairwise(own)), (rank, lane)
            ends += [span.end_seconds for span in own]
    assert max(ends) == pytest.approx(step)


def test_an_even_step_has_its_kinds_in_order() -> None:
    kinds = [span.kind for span in spans(PLANS[0]) if span.kind != "idle"]
    one = ["forward"] * 4 + ["backward"] * 3 + ["recompute", "backward"]
    assert kinds == one * 2


def test_a_fast_rank_waits_for_a_slow_one() -> None:
    found = spans(PLANS[2])
    idle = [span for span in found if span.kind == "idle"]
    assert {span.rank for span in idle} == {0}
    assert sum(span.end_seconds - span.start_seconds for span in idle) == pytest.approx(6, rel=1e-3)  # of 12 that the slow one takes


def test_the_bubble_of_a_pipeline_is_what_its_ranks_wait() -> None:
    parts = PLANS[7]
    found = [span for span in spans(parts) if span.rank == 0 and span.kind == "idle"]
    step = predict_seconds(traced(update=64 * MIB), Plan(**parts), HERE, rates=PlainRates())
    assert sum(span.end_seconds - span.start_seconds for span in found) == pytest.approx(step.bubble, rel=1e-3)


def test_only_the_first_ranks_where_asked() -> None:
    plan = Plan(engine="ddp", devices=GPUS[:4])
    assert {span.rank for span in timeline(traced(), plan, HERE, ranks=2)} == {0, 1}
