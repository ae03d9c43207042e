"""Ending a run from another process: which signal, to which process, and what is said of it."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_autopar.sharing.process_ids import is_stopped
from lightning_autopar.sharing.runs.requests import cancel, runs
from lightning_autopar.sharing.runs.status import open_run
from tests.processes import python

#: A run that says when it is shown, and waits for a signal.
RUN = """
import os, signal, sys
from dataclasses import replace
from lightning_autopar.sharing.runs.status import open_run
from tests.processes import wait_for_signal

for number in (signal.SIGINT, signal.SIGTERM):
    handler = signal.SIG_IGN if number.name in sys.argv[2] else signal.default_int_handler
    signal.signal(number, handler)
with open_run("train.py") as files:
    files.show(replace(files.status, state=sys.argv[1], elastic="elastic" in sys.argv[2]))
    print("there", flush=True)
    wait_for_signal()
"""


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_RUNS", str(tmp_path))


def a_run(state: str = "running", words: str = "") -> AbstractContextManager[subprocess.Popen[str]]:
    return python(RUN, state, words)


@pytest.mark.parametrize(
    ("state", "words", "number", "outlook"),
    [
        ("running", "", signal.SIGINT, "Lightning ends it as on Ctrl-C, and its checkpoints stay"),
        ("running", "elastic", signal.SIGINT, "its checkpoints stay, and its snapshots are deleted"),
        # As a job that a shell script has put in the background.
        ("parked", "elastic SIGINT", signal.SIGTERM, "it saves a snapshot first, and the next start of the same script goes on from there"),
        ("queued", "SIGINT", signal.SIGTERM, "it leaves the queue; it hadn't begun to train"),
    ],
)
def test_a_run_is_ended_by_what_it_does_not_ignore(state: str, words: str, number: signal.Signals, outlook: str) -> None:
    with a_run(state, words) as process:
        (status,) = runs()
        found = cancel("train", wait_seconds=30.0)
        assert (found.signal, found.ended) == (number.name, True)
        assert str(found) == f"{status.run_id} has ended by {number.name}; {outlook}"
        assert process.wait(30) == -signal.SIGINT, "which is how Python ends by KeyboardInterrupt"


def test_a_run_that_ignores_both_is_told_as_such() -> None:
    with a_run(words="SIGINT SIGTERM") as process:
        with pytest.raises(ValueError, match=f"ignores SIGINT and SIGTERM; only 'kill -KILL {process.pid}' ends it"):
            cancel("train")
        assert process.poll() is None


def test_a_stopped_run_ends_when_it_is_let_go_on() -> None:
    with a_run() as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert is_stopped(process.pid)
        found = cancel(process.pid, wait_seconds=0.05)
        assert found.ended is False
        assert f"its process is stopped, and ends once you continue it (kill -CONT {process.pid})" in str(found)
        assert str(found).endswith("after 0.05 s it is still there")
        process.send_signal(signal.SIGCONT)
        assert process.wait(30) == -signal.SIGINT
        assert not is_stopped(process.pid)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"external": True}, r"was started by torchrun or Slurm, .*end it there \(Ctrl-C, or scancel\)"),
        ({"namespace": "pid:[1]"}, "runs in another container; cancel it there"),
        ({"started_ticks": 1}, "has just ended"),  # somebody else's process has the number by now
    ],
)
def test_no_other_process_is_told(changes: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda process, number: told.append(number))
    with open_run("train.py") as files:
        monkeypatch.setattr(files, "_status", replace(files.status, **changes))
        files.show(replace(files.status, state="running"))
        with pytest.raises(ValueError, match=f"{files.run_id} {says}"):
            cancel("train")
        with pytest.raises(ValueError, match="must be at least 0, but are -1"):
            cancel("train", wait_seconds=-1.0)
        with pytest.raises(ValueError, match="there is no run 'eval'"):
            cancel("eval")
    assert told == []
