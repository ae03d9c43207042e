"""The memory benchmark on a small set: the gate's bounds hold, and what it measures agrees with a count made another way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "memory_cpu.py"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("memory") / "memory_cpu.json"
    command = [sys.executable, str(BENCHMARK), "--quick", "--json", str(out)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=290, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert out.with_suffix(".png").stat().st_size > 10_000
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


@pytest.mark.timeout(300)  # eight jobs, each in several processes
def test_predictions_are_within_the_gate(report: dict[str, Any]) -> None:
    assert {"date", "machine", "versions"} <= set(report)
    jobs = report["jobs"]
    assert len(jobs) == 8
    errors = sorted(abs(job["predicted"]["bytes"] / job["measured_bytes"] - 1) for job in jobs.values())
    assert errors[len(errors) // 2] <= 0.001
    assert sum(error <= 0.01 for error in errors) >= 0.9 * len(errors)
    assert errors[-1] <= 0.05
    assert report["summary"]["within"] is True
    assert report["summary"]["lightning-autopar"]["worst"] == pytest.approx(errors[-1])


@pytest.mark.timeout(300)
def test_what_is_measured_is_true(report: dict[str, Any]) -> None:
    counted = {name: (job["counted_bytes"], job["measured_bytes"]) for name, job in report["jobs"].items() if "counted_bytes" in job}
    if not counted:
        pytest.skip("no C compiler to build the counter with")
    assert len(counted) == 4
    for name, (count, measured) in counted.items():
        # The count comes out above the profiler's sum where oneDNN works; see memory/counted.py.
        own_share = 0.02 if name in ("ResNet-18", "LSTM") else 0.001
        assert measured * 0.999 <= count <= measured * (1 + own_share)


@pytest.mark.timeout(300)
def test_rivals_predict_the_same_jobs(report: dict[str, Any]) -> None:
    for job in report["jobs"].values():
        assert set(job["rivals"]) == {"MemTracker", "DeepSpeed ZeRO-2", "DeepSpeed ZeRO-3", "accelerate", "16 bytes a parameter"}
        assert job["rivals"]["16 bytes a parameter"]["bytes"] == 16 * job["predicted"]["parameters"]
    # MemTracker is exact where no kernel takes scratch at the peak: it was called as it should be.
    assert report["jobs"]["GPT-2"]["rivals"]["MemTracker"]["error"] == pytest.approx(0, abs=0.001)
    ours, tracker = (report["summary"][name] for name in ("lightning-autopar", "MemTracker"))
    assert ours["worst"] < tracker["worst"]
