"""The overhead benchmark runs and writes every figure; what the figures are is the benchmark's own business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "overhead.py"


@pytest.mark.slow
def test_a_quick_run_writes_every_figure(tmp_path: Path) -> None:
    out = tmp_path / "overhead.json"
    command = [sys.executable, str(BENCHMARK), "--quick", "--engine", "ddp", "--out", str(out)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=230, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["quick"] is True
    assert {"date", "machine", "versions", "settings"} <= set(report)
    for figure in (report["step"]["ddp"]["no_dropout"], report["step"]["ddp"]["dropout"], report["first_step"]):
        assert figure["ratio"] == pytest.approx(figure["autopar"][0] / figure["hand"][0], rel=0.01)
        assert figure["within"] is (figure["ratio"] <= figure["bound"])
    memory = report["memory"]
    assert memory["hand_ddp"]["peak_bytes"] > memory["hand_ddp"]["built_bytes"] > memory["model_bytes"]
    assert memory["autopar_ddp"]["peak_bytes"] > memory["autopar_ddp"]["built_bytes"] > memory["model_bytes"]
    assert memory["within"] is (memory["autopar_ddp"]["peak_over_model"] <= memory["bound"])
