"""The benchmark of the way to the first step runs and writes every part; what the figures are is the benchmark's own business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "first_step.py"


@pytest.mark.slow
def test_a_quick_run_writes_every_part(tmp_path: Path) -> None:
    out = tmp_path / "first_step.json"
    result = subprocess.run([sys.executable, str(BENCHMARK), "--quick", "--out", str(out)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(out.read_text(encoding="utf-8"))
    assert {"date", "machine", "versions", "rounds", "load"} <= set(report)
    one = report["warm"]["one"]
    assert {"import autopar", "planning", "finding out", "trace", "engines look", "report", "over import", "processor"} <= set(one)
    assert one["over import"]["least"] >= one["planning"]["least"] >= one["finding out"]["least"] >= one["trace"]["least"] > 0
    assert set(report["over_plain"]["one"]) == {"seconds", "processor", "goal"}
