"""What an agent writes down becomes a history that can be drawn."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from lightning_autopar.devices.inventory import Device, Inventory
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.elastic.run_state import PARKED, HistoryRecorder


def _decision(device: str) -> Any:
    plan = Plan(engine="single", devices=(device,))
    return SimpleNamespace(run_plan=SimpleNamespace(plan=plan, reserved_bytes={device: 700}))


def _inventory(free_bytes: int) -> Inventory:
    device = Device(id="cpu:0", kind="cpu", name="CPU", total_bytes=1000, free_bytes=free_bytes)
    return Inventory(devices=(device,), host_total_bytes=1, host_free_bytes=1, source="test")


def test_spans_follow_each_other_and_say_why() -> None:
    recorder = HistoryRecorder()
    recorder.begin(_decision("cpu:0"), "the run begins")
    recorder.begin(_decision("cpu:1"), "somebody came")
    recorder.paused(0.25)
    recorder.park("nothing fits")
    recorder.begin(_decision("cpu:0"), "it fits again")
    recorder.failed("a worker was killed")
    recorder.close()
    spans = recorder.spans
    assert [span.title for span in spans] == ["single", "single", PARKED, "single"]
    assert [span.devices for span in spans] == [("cpu:0",), ("cpu:1",), (), ("cpu:0",)]
    assert spans[1].pause_seconds == 0.25
    assert all(span.end_seconds == after.start_seconds for span, after in pairwise(spans))
    history = recorder.history("Module")
    assert [(mark.kind, mark.words) for mark in history.marks] == [
        ("move", "somebody came"),
        ("park", "nothing fits"),
        ("resume", "it fits again"),
        ("failure", "a worker was killed"),
    ]
    assert history.spans[0].predicted_bytes == {"cpu:0": 700}


def test_samples_hold_what_is_ours_and_what_others_take() -> None:
    recorder = HistoryRecorder()
    assert recorder.is_due()
    recorder.sample(_inventory(600), {"cpu:0": 300}, (4, 2.5))
    assert not recorder.is_due()
    recorder.sample(_inventory(1000), {}, (4, 2.5))
    history = recorder.history("Module")
    assert [sample.devices["cpu:0"] for sample in history.memory] == [(300, 400, 1000), (0, 0, 1000)]
    assert [(point.step, point.value) for point in history.losses] == [(4, 2.5)], "the same step is noted once"


def test_a_long_run_is_thinned_out() -> None:
    recorder = HistoryRecorder()
    for step in range(9000):
        recorder.sample(_inventory(1000), {}, (step, 1.0))
    history = recorder.history("Module")
    assert len(history.memory) <= 4001
    assert len(history.losses) <= 4001
    assert history.losses[-1].step == 8999
