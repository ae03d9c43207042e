"""What is told of a run."""

from __future__ import annotations

from types import SimpleNamespace

from lightning_autopar.report.run_history import PlanSpan, RunHistory, RunMark


def test_what_ran_where_and_what_moved_it() -> None:
    spans = (
        PlanSpan(start_seconds=0, end_seconds=30, title="single", devices=("cpu:0",)),
        PlanSpan(start_seconds=32, end_seconds=60, title="ddp ×2", devices=("cpu:0", "cpu:1")),
        PlanSpan(start_seconds=60, end_seconds=100, title="parked"),
    )
    marks = (
        RunMark(at_seconds=30, kind="move", words="a device is free again"),
        RunMark(at_seconds=60, kind="park", words="nothing fits " * 20),
    )
    lines = str(history := RunHistory(title="Net", spans=spans, marks=marks)).splitlines()
    assert lines[:4] == [
        "Net, 100 s, 1 move, 1 park",
        "0 s to 30 s: single on cpu:0",
        "32 s to 60 s: ddp ×2 on cpu:0, cpu:1",
        "60 s to 100 s: parked",
    ]
    assert lines[4] == "at 30 s, move: a device is free again"
    assert lines[5].startswith("at 60 s, park: nothing fits")
    assert all(line.startswith("    ") for line in lines[6:])
    said: list[str] = []
    history._repr_pretty_(SimpleNamespace(text=said.append), cycle=False)
    assert said == [str(history)]
