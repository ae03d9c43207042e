"""What a GPU is asked first: its parts are there, end in time, and each leaves a result, whatever becomes of the others."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.gpu_all import GROUPS, ROOT, Part, run_all, sentences
from benchmarks.gpu_checks import SECTIONS, _run


@pytest.mark.parametrize(("which", "seconds"), [("first", 420), ("memory", 420), ("offload", 540)])
def test_the_parts_are_there_and_end_in_time(which: str, seconds: int) -> None:
    groups = GROUPS[which]
    assert sum(max(part.seconds for part in group) for group in groups) <= seconds
    for part in (part for group in groups for part in group):
        paths = [word for word in part.command if word.endswith(".py")]
        assert paths
        assert [path for path in paths if not (ROOT / path).is_file()] == []


def test_every_section_of_checks_is_asked() -> None:
    parts = [part for group in GROUPS["first"] for part in group]
    assert {part.command[1] for part in parts if part.command[0].endswith("gpu_checks.py")} == set(SECTIONS)


def test_the_script_asks_for_a_folder() -> None:
    script = ROOT / "benchmarks" / "gpu_all.sh"
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "give the folder for the results" in done.stderr


def test_each_part_leaves_a_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = "import json, sys; json.dump({'figure': 7}, open(sys.argv[1], 'w'))"
    waits = "import threading; threading.Event().wait()"
    parts = (
        Part(name="good", command=("-c", figures, "{json}"), seconds=20),
        Part(name="bad", command=("-c", "print('no GPU'); raise SystemExit(3)"), seconds=20),
        Part(name="hangs", command=("-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {waits!r}])"), seconds=1),
        Part(name="last", command=("-c", "pass"), seconds=20),
    )
    assert not run_all([parts], tmp_path / "results")
    found = {part.name: json.loads((tmp_path / "results" / f"1-{part.name}.json").read_text()) for part in parts}
    assert [each["part"] for each in found.values()] == ["good", "bad", "hangs", "last"]
    assert [each["status"] for each in found.values()] == ["passed", "failed with exit code 3", "stopped after 1 s", "passed"]
    assert found["good"]["found"] == {"figure": 7}
    assert "no GPU" in found["bad"]["said"]
    said = capsys.readouterr().out
    assert "hangs: the part stopped after 1 s" in said
    assert "bad: the part failed with exit code 3" in said
    assert "the last it said was: no GPU" in said


def test_each_check_has_a_sentence() -> None:
    rows = [
        {"check": "single", "passed": True, "status": "ended", "seconds": 3.21},
        {"check": "lora", "passed": False, "status": "stopped after 9 s", "seconds": 9.0},
    ]
    found = {"checks": rows, "left_out": ["elastic"]}
    result = {"part": "fits", "status": "failed with exit code 1", "seconds": 12.3, "found": found, "said": "a\nlora: FAILED\n"}
    assert sentences(result) == [
        "fits: the check single passed, in 3.2 s.",
        "fits: the check lora FAILED, its process stopped after 9 s, in 9.0 s.",
        "fits: the check elastic wasn't made, as the part's time was up.",
        "fits: the part failed with exit code 1, in 12.3 s; the last it said was: lora: FAILED",
    ]


def test_a_check_that_crashes_costs_no_other() -> None:
    row = _run("caps", "no such check", 30.0)
    assert (row["passed"], row["status"]) == (False, "exit code 1")
    assert "KeyError: 'no such check'" in row["said"]
