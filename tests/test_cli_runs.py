"""The command line about runs that are on: ``status`` and ``yield``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_autopar.cli import main
from lightning_autopar.strategies.run_files import RunFiles, open_run
from lightning_autopar.strategies.run_folders import user_name

UUIDS = ("GPU-7c1e9b04-1111-2222-3333-444455556666", "GPU-90aa77b1-1111-2222-3333-444455556666")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_RUNS", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")


def running(files: RunFiles) -> None:
    files.show(
        replace(
            files.status,
            state="running",
            plan="FSDP[2]",
            devices=UUIDS,
            leased_bytes=dict.fromkeys(UUIDS, 3 << 30),
            used_bytes={UUIDS[0]: 2 << 30},
            step=12,
            steps=400,
            step_seconds=0.1234,
            generation=1,
            since=time.time() - 3 * 3600,
            reason="12 GiB became free [on both]",
        )
    )


def test_without_runs_status_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 0
    assert capsys.readouterr().out == f"No elastic runs of {user_name()} on this host.\n"
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"runs": []}


def test_status_is_a_table_of_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with open_run("train_gpt.py") as files, open_run("other.py") as other:
        running(files)
        assert main(["status"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == ["run", "state", "plan", "devices", "step", "s/step", "since", "reason"]
        (row,) = (line for line in lines if files.run_id in line)
        for words in ("running", "FSDP[2]", "GPU-7c1e9b04 2 GiB", "12/400", "0.123", "3 h", "12 GiB became free [on both]"):
            assert words in row
        assert any("GPU-90aa77b1 3 GiB" in line for line in lines)
        (row,) = (line for line in lines if other.run_id in line)
        assert row.split()[1:] == ["planning", "now"]
        assert main(["status", "--json"]) == 0
        found = {run["run_id"]: run for run in json.loads(capsys.readouterr().out)["runs"]}
        assert found[files.run_id]["devices"] == list(UUIDS)
        assert found[files.run_id]["pid"] == os.getpid()
        assert found[other.run_id]["step"] is None


def test_a_run_that_says_nothing_any_more_is_called_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with open_run("train_gpt.py") as files:
        shown = {**files.status.to_dict(), "shown_at": time.time() - 600}
        (files.folder / "status.json").write_text(json.dumps(shown))
        assert main(["status"]) == 0
        assert "silent for 10 min: stopped, or it hangs" in capsys.readouterr().out


def test_a_narrow_terminal_keeps_the_names(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with open_run("train_gpt.py") as files:
        running(files)
        assert main(["status"]) == 0
        shown = capsys.readouterr().out
        assert files.run_id in shown
        assert "12/400" in shown
        assert f"{files.run_id}: 12 GiB became free [on both]" in shown
        assert all(uuid[:12] in shown for uuid in UUIDS)
        assert max(map(len, shown.splitlines())) <= 80


def test_yield_asks(capsys: pytest.CaptureFixture[str]) -> None:
    with open_run("train_gpt.py") as files:
        running(files)
        assert main(["yield", "train", "--device", "GPU-90aa77b1"]) == 0
        assert f"{files.run_id} has been asked to yield {UUIDS[1]}" in capsys.readouterr().out
        (request,) = files.requests()
        assert (request.ask, request.device, request.by) == ("yield", UUIDS[1], f"{user_name()} (command line)")
        assert main(["yield", "train", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["run"], found["device"], found["answered"], found["ended"]) == (files.run_id, None, None, False)


def test_yield_waits_for_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with open_run("train_gpt.py") as files, ThreadPoolExecutor() as pool:
        running(files)
        code = pool.submit(main, ["yield", "train", "--wait", "60"])
        while not (taken := files.requests()):
            assert not code.done()
        files.answer(taken[0], "moves to cpu:1")
        assert code.result() == 0
        assert capsys.readouterr().out == f"{files.run_id}: moves to cpu:1\n"
        assert main(["yield", "train", "--wait", "0.01"]) == 1
        assert "hasn't answered within 0.01 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "there is no run 'nowhere' of yours; there are: train-gpt-"),
        (["train", "--device", "cpu:7"], "'cpu:7' is no device of train-gpt-"),
        (["train", "--wait", "-3"], "an answer can't be waited for -3.0 s"),
        (["train", "--device", ""], "the device '' says nothing"),
    ],
)
def test_what_cannot_be_asked_is_said_in_a_sentence(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with open_run("train_gpt.py") as files:
        running(files)
        assert main(["yield", *arguments]) == 2
        shown = capsys.readouterr()
        assert says in shown.err
        assert not shown.out
        assert files.requests() == []


def test_the_command_line_starts_without_torch() -> None:
    code = (
        "import sys; from lightning_autopar.cli import main; main(['status']); sys.exit(not {'torch', 'lightning'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_help_has_examples_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("status", "yield"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        shown = capsys.readouterr().out
        assert f"lightning-autopar {command}" in shown
        assert "exit code" in shown
