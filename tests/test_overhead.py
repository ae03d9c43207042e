"""The overhead benchmark runs and writes every figure; what the figures are is the benchmark's own business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "overhead.py"


@pytest.mark.timeout(240)
def test_quick_run_writes_every_figure(tmp_path: Path) -> None:
    out = tmp_path / "overhead.json"
    result = subprocess.run(
        [sys.executable, str(BENCHMARK), "--quick", "--out", str(out)], capture_output=True, text=True, timeout=230, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["quick"] is True
    assert {"date", "machine", "versions", "settings"} <= set(report)
    compared = [*report["step"].values(), report["first_step"]]
    assert list(report["step"]) == ["single", "ddp", "fsdp"]
    for figure in compared:
        assert figure["ratio"] == pytest.approx(figure["autopar"][0] / figure["hand"][0], rel=0.01)
        assert figure["within"] is (figure["ratio"] <= figure["bound"])
    for figure in report["memory"].values():
        assert figure["hand"]["peak_bytes"] > figure["hand"]["built_bytes"] > figure["model_bytes"]
        assert figure["autopar"]["peak_bytes"] > figure["model_bytes"]
