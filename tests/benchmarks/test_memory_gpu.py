"""The GPU memory benchmark runs from end to end on a machine without one; what its figures are on a GPU is its own business."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "memory_gpu.py"


@pytest.mark.slow
def test_it_runs_on_a_cpu_and_writes_every_part(tmp_path: Path) -> None:
    out = tmp_path / "memory_gpu.json"
    command = [sys.executable, str(BENCHMARK), "--device", "cpu", "--quick", "--models", "MLP", "--json", str(out)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=230, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(out.read_text())
    assert {"date", "machine", "versions", "device", "goals", "summary", "rows", "fits", "failed", "context"} <= set(found)
    assert found["device"] == "cpu"
    assert not found["failed"]
    assert {row["precision"] for row in found["rows"]} == {"32-true", "bf16-mixed"}
    for row in found["rows"]:
        assert row["measured"]["reserved"] is None
        assert abs(row["allocated_error"]) < 0.05
    assert found["summary"]["allocated"]["median"] < 0.05


@pytest.mark.gpu
def test_what_is_predicted_is_what_torchs_allocator_takes(tmp_path: Path) -> None:
    """On a stub GPU (``tests/nullgpu``) torch's allocator is the real one; on a GPU cuBLAS and cuDNN are, too."""
    out = tmp_path / "memory_nullgpu.json"
    command = [
        sys.executable,
        str(BENCHMARK.with_name("memory_nullgpu.py")),
        "--sets",
        "unseen",
        "--only",
        "StableLM, bf16-mixed",
        "--json",
    ]
    environment = {**os.environ, "NULLGPU_COMPUTE_BYTES": "4194304", "NULLGPU_COPY_MIB": "4"}
    result = subprocess.run([*command, str(out)], capture_output=True, text=True, timeout=230, check=False, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 2  # without and with recomputation
    for row in rows:
        assert abs(row["allocated_error"]) <= 0.03, row
        assert -0.05 <= row["reserved_error"] <= 0.05, row
