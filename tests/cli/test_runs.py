"""The command line about one's own runs that are on: ``yield``, ``pause``, ``resume`` and ``cancel``."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_autopar.cli import main
from lightning_autopar.sharing.runs.folders import user_name
from lightning_autopar.sharing.runs.status import RunFiles, open_run
from tests.processes import python

UUIDS = ("GPU-7c1e9b04-1111-2222-3333-444455556666", "GPU-90aa77b1-1111-2222-3333-444455556666")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_RUNS", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")


def other(code: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """Another process, once it has said something."""
    before = (
        "import os, signal, sys; from lightning_autopar.sharing.runs.status import open_run; from tests.processes import wait_for_signal"
    )
    default = "signal.signal(signal.SIGINT, signal.default_int_handler)"  # whatever this process ignores
    return python("\n".join((before, default, code)))


def running(files: RunFiles) -> None:
    files.show(
        replace(
            files.status,
            state="running",
            elastic=True,
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


@pytest.mark.parametrize(("command", "asked"), [("pause", "park"), ("resume", "resume")])
def test_pause_and_resume_ask(command: str, asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    with open_run("train_gpt.py") as files:
        assert main([command, "train"]) == 2
        assert f"{files.run_id} isn't elastic" in capsys.readouterr().err
        running(files)
        assert main([command, "train"]) == 0
        assert f"{files.run_id} has been asked to {asked}; it answers between two batches" in capsys.readouterr().out
        assert [request.ask for request in files.requests()] == [asked]


def test_cancel_ends_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    with other("with open_run('train.py'): print(os.getpid(), flush=True); wait_for_signal()") as process:
        assert main(["cancel", "train", "--wait", "30", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["signal"], told["ended"]) == ("SIGINT", True)
        assert told["message"] == f"{told['run']} has ended by SIGINT; it hadn't begun to train"
        assert process.wait(30) == -signal.SIGINT  # as Python ends by KeyboardInterrupt
    assert main(["cancel", told["run"]]) == 2
    assert "(one that has ended isn't there any more)" in capsys.readouterr().err


def test_cancel_says_when_a_run_has_not_ended(capsys: pytest.CaptureFixture[str]) -> None:
    lingers = "signal.signal(signal.SIGINT, lambda *_: None)\nwith open_run('train.py'): print(1, flush=True); sys.stdin.read()"
    with other(lingers):
        assert main(["cancel", "train", "--wait", "0.05"]) == 1
        assert "has been told to end by SIGINT; it hadn't begun to train; after 0.05 s it is still there" in capsys.readouterr().out


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
        (["train", "--wait", "-3"], "must be at least 0, but are -3.0"),
        (["train", "--device", ""], "the device '' is no device's id"),
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


@pytest.mark.parametrize("arguments", [["clean", "--snapshot"], ["run", "--prio", "5", "train.py"]])
def test_no_option_is_taken_for_one_that_is_longer(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """``clean --snapshot`` removed snapshots."""
    with pytest.raises(SystemExit):
        main(arguments)
    assert f"{arguments[0]} has no option {arguments[1]}" in capsys.readouterr().err


def test_the_command_line_starts_without_torch() -> None:
    code = (
        "import sys; from lightning_autopar.cli import main; main(['status']); sys.exit(not {'torch', 'lightning'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_help_has_examples_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("status", "yield", "pause", "resume", "cancel"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        shown = capsys.readouterr().out
        assert f"lightning-autopar {command}" in shown
        assert "exit code" in shown
