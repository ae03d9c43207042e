"""A sweep at work: what starts where, what is told of it, and that nothing of it is left behind. Its scripts are plain Python."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from lightning_autopar.sharing.sweep.runs_file import ListedRun, ListedSweep, sweep_folder, sweep_of
from tests.sharing.sweep.plain import report, swept

ROOT = Path(__file__).parents[3]
#: Waits for as long as it is told to, and for the files that it is told; then writes down when it ran and what it may use.
SCRIPT = """
    import os, sys, time
    from pathlib import Path
    begin = time.time()
    time.sleep(float(sys.argv[2]))
    while not all(map(os.path.exists, sys.argv[3:])):
        time.sleep(0.01)
    devices = Path(os.environ["AUTOPAR_DEVICES_FILE"]).read_text().split()
    Path(sys.argv[1]).write_text(f"{begin} {time.time()} {' '.join(devices)}")
    print("said by", sys.argv[1], os.environ.get("COLOUR"))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOPAR_RUNS", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "wait.py").write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "fail.py").write_text("import pathlib, sys\npathlib.Path(sys.argv[1]).open('a').write('x')\nsys.exit(3)\n")
    return tmp_path


def seen(path: Path) -> tuple[float, float, list[str]]:
    begin, end, *devices = path.read_text().split()
    return float(begin), float(end), devices


def test_each_run_has_devices_of_its_own_a_log_and_an_entry(folder: Path) -> None:
    sweep = ListedSweep(
        name="s",
        runs=(
            ListedRun(name="long", words=("wait.py", "a", "1.0", "b", "c")),
            ListedRun(name="short", words=("wait.py", "b", "0.3"), env={"COLOUR": "blue"}),
            ListedRun(name="other", words=("wait.py", "c", "0.3"), cwd=str(folder)),
        ),
    )
    told: list[str] = []
    controller = swept(sweep, [10, 4, 5], folder, told=told)
    assert [run.word for run in controller.runs] == ["done"] * 3
    spans = {name: seen(folder / name) for name in "abc"}
    assert all(len(devices) == 1 for _, _, devices in spans.values())
    on = [(devices[0], begin, end) for begin, end, devices in spans.values()]
    for one in on:
        for other in on:
            assert one == other or one[0] != other[0] or one[2] <= other[1] or other[2] <= one[1], "two runs on a device"
    assert spans["b"][2] == spans["c"][2] != spans["a"][2], "the two short ones share a device, one after the other"
    assert "said by b blue" in (folder / "sweep-s" / "short.log").read_text()
    assert "said by a None" in (folder / "sweep-s" / "long.log").read_text()
    done = json.loads((folder / "sweep-s" / "done.json").read_text())["runs"]
    assert set(done) == {"long", "short", "other"}
    assert done["long"]["exit_code"] == 0
    assert done["long"]["seconds"] >= 1
    assert any("long starts on cpu:" in words for words in told)


def test_a_sweep_that_is_started_again_leaves_out_what_is_done(folder: Path) -> None:
    sweep = sweep_of([f"wait.py {folder}/a 0", f"fail.py {folder}/f"])
    first = swept(sweep, [1, 1], folder)
    assert [run.word for run in first.runs] == ["done", "failed"]
    (folder / "a").unlink()
    again = swept(sweep, [1, 1], folder)
    assert [run.word for run in again.runs] == ["done before", "failed"]
    assert not (folder / "a").exists()
    assert (folder / "f").read_text() == "xx"
    changed = swept(sweep_of([f"wait.py {folder}/a 0.01", f"fail.py {folder}/f"]), [1, 1], folder)
    assert changed.runs[0].word == "done"


def test_a_run_that_fails_is_tried_again_and_stops_nobody(folder: Path) -> None:
    sweep = ListedSweep(name="s", runs=sweep_of([f"fail.py {folder}/f", f"wait.py {folder}/a 0.1"]).runs, retries=2)
    controller = swept(sweep, [1, 1], folder)
    fail, wait = controller.runs
    assert (fail.word, fail.exit_code, fail.attempts, fail.reason) == ("failed", 3, 3, "it ended with 3")
    assert (folder / "f").read_text() == "xxx"
    assert (folder / "sweep-s" / f"{fail.name}.log").read_text().count("---- attempt") == 2
    assert wait.word == "done"


def test_a_run_on_all_devices_waits_until_all_are_idle(folder: Path) -> None:
    sweep = sweep_of([f"wait.py {folder}/wide 0.2", f"wait.py {folder}/a 0.3", f"wait.py {folder}/b 0.5"])
    names = [run.name for run in sweep.runs]
    reports = {names[0]: report(100.0, 20.0), names[1]: report(3.0), names[2]: report(5.0)}
    swept(sweep, reports, folder)
    wide, a, b = (seen(folder / name) for name in ("wide", "a", "b"))
    assert sorted(wide[2]) == ["cpu:0", "cpu:1"]
    assert wide[1] <= min(a[0], b[0]) or wide[0] >= max(a[1], b[1])


def test_what_cant_be_planned_or_started_has_failed_with_the_reason(folder: Path) -> None:
    sweep = ListedSweep(
        name="s",
        runs=(ListedRun(name="big", words=("wait.py", "x", "0")), ListedRun(name="lost", words=("wait.py", "y", "0"), cwd="nowhere")),
    )
    words = report(1.0)
    words["candidates"][0]["fits"] = False
    controller = swept(sweep, {"big": words, "lost": report(1.0)}, folder)
    big, lost = controller.runs
    assert (big.word, big.reason) == ("failed", "no plan fits on the devices")
    assert lost.word == "failed"
    assert "nowhere" in lost.reason


def test_a_length_that_nobody_knows_counts_as_the_longest_and_is_no_figure(folder: Path) -> None:
    sweep = sweep_of([f"wait.py {folder}/a 0", f"wait.py {folder}/b 0"])
    names = [run.name for run in sweep.runs]
    controller = swept(sweep, {names[0]: report(None), names[1]: report(7.0)}, folder)
    unknown, known = controller.runs
    assert unknown.predicted_seconds == pytest.approx(7.1)
    assert unknown.to_dict()["predicted_seconds"] is None
    assert known.to_dict()["predicted_seconds"] == pytest.approx(7.1)


def test_two_sweeps_of_a_name_arent_run_at_a_time(folder: Path) -> None:
    sweep = sweep_of(["wait.py x 0"])
    with sweep_folder(sweep, folder), pytest.raises(ValueError, match="runs already"), sweep_folder(sweep, folder):
        pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_sweep_that_is_ended(folder: Path, number: signal.Signals) -> None:
    """Two runs, each with a child that ignores everything but SIGKILL, and is no child of the run any more."""
    (folder / "stubborn.py").write_text(
        textwrap.dedent(
            """
            import os, signal, sys, time
            from pathlib import Path
            if os.fork() == 0:
                for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    signal.signal(each, signal.SIG_IGN)
                Path(sys.argv[1] + ".child").write_text(str(os.getpid()))
            else:
                Path(sys.argv[1]).write_text(str(os.getpid()))
            time.sleep(600)
            """
        )
    )
    # With a default handler, whatever this process ignores.
    begin = "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); sys.argv[0:1] = []"
    code = f"{begin}; runpy.run_module('tests.sharing.sweep.plain', run_name='__main__')"
    command = [sys.executable, "-c", code, "-", "stubborn.py a", "stubborn.py b"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    files = [folder / name for name in ("a", "b", "a.child", "b.child")]
    until(lambda: all(file.exists() and file.read_text() for file in files), 30)
    left = [psutil.Process(int(file.read_text())) for file in files]
    watchdogs = [child for child in psutil.Process(process.pid).children() if "orphan_watchdog.py" in " ".join(child.cmdline())]
    assert len(watchdogs) == 1
    process.send_signal(number)
    process.wait(40)
    _, alive = psutil.wait_procs([*left, *watchdogs], timeout=30)
    assert not alive
    assert process.returncode == (0 if number != signal.SIGKILL else -signal.SIGKILL)


def until(found: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)
