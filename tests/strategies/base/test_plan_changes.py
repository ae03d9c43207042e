"""How a run came to its plan, as workers of one plan after the other know it."""

from __future__ import annotations

import time
from pathlib import Path

from lightning_autopar.strategies.base.run_plan import PlanChange, PlanChanges


def change(reason: str, left_at: float | None) -> PlanChange:
    return PlanChange(from_plan="single", from_devices="cpu:0", to_plan="ddp ×2", to_devices="cpu:0-1", reason=reason, left_at=left_at)


def test_later_workers_know_what_earlier_ones_noted(tmp_path: Path) -> None:
    left_at = time.monotonic() - 2.0
    first = PlanChanges(changes=(change("it is faster", left_at),), folder=tmp_path)
    assert first.arrivals() == {}
    arrival = first.arrive(step=7)
    assert (arrival.number, arrival.step) == (1, 7)
    assert arrival.pause_seconds is not None
    assert 2.0 <= arrival.pause_seconds <= time.monotonic() - left_at
    # the second one's workers ended before their first batch
    third = PlanChanges(changes=(*first.changes, change("lost", None), change("found", None)), folder=tmp_path)
    latest = third.arrive(step=9)
    assert third.arrivals() == {1: arrival, 3: latest}
    assert latest.pause_seconds is None
    assert third.words(latest) == "step 9: from single on cpu:0 to ddp ×2 on cpu:0-1: found"
    assert f"after {arrival.pause_seconds:.3g} s" in third.words(arrival)
