"""What an agent writes down becomes a history."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from lightning_autopar.plans import Plan
from lightning_autopar.strategies.elastic.run_state import PARKED, HistoryRecorder


def _decision(device: str) -> Any:
    plan = Plan(engine="single", devices=(device,))
    return SimpleNamespace(run_plan=SimpleNamespace(plan=plan, reserved_bytes={device: 700}))


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
