"""The pipeline's zoo on a small set: gradients in stages are one process's, and what can't run says why."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pipeline_zoo import is_right
from benchmarks.zoo.members import MEMBERS

ROOT = Path(__file__).parents[2]
BENCHMARK = ROOT / "benchmarks" / "pipeline_zoo.py"
QUICK = {name for name, member in MEMBERS.items() if member.quick}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("zoo") / "pipeline_zoo.json"
    command = [sys.executable, str(BENCHMARK), "--quick", "--json", str(out)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def test_gradients_in_stages(report: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in report["rows"]}
    assert set(rows) == QUICK
    assert report["counts"] == {"right": len(QUICK) - 1, "wrong": 0, "refused": 1}
    assert rows["ALBERT"]["verdict"] == "refused"
    for name, row in rows.items():
        if name != "ALBERT":
            assert len(row["cuts"]) >= 3, name
            assert all(found["float64"]["relative"] < 1e-6 and found["float32"]["max_abs"] < 1e-6 for found in row["cuts"].values()), name


def test_a_difference_that_rounding_does_not_explain_is_wrong() -> None:
    close = {"relative": 1e-7, "max_abs": 1e-8, "largest_gradient": 0.5}
    rounded = {"relative": 3e-6, "max_abs": 1e-7, "largest_gradient": 0.5}
    assert is_right({"float32": close})
    assert is_right({"float32": rounded, "float64": close})
    assert not is_right({"float32": rounded})
    assert not is_right({"float32": rounded, "float64": rounded})
    assert not is_right({"float32": {**close, "missing": ["a"]}})
    assert not is_right({"float32": close, "failure": "RuntimeError: a value is missing"})


def test_the_committed_result_meets_the_goal() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "pipeline_zoo.json").read_text(encoding="utf-8"))
    assert found["counts"]["wrong"] == 0
    assert found["hugging_face_right"] >= 22
    assert {row["name"] for row in found["rows"]} == set(MEMBERS)
