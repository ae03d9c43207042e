"""A run's public folder: what it shows, who may ask it, and what is left when it dies. Two processes where it takes two."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_autopar.sharing.runs import folders as run_folders
from lightning_autopar.sharing.runs import status as run_files
from lightning_autopar.sharing.runs.folders import is_abandoned, is_alive
from lightning_autopar.sharing.runs.requests import ask, runs, yield_run
from lightning_autopar.sharing.runs.status import Request, RunFiles, RunStatus, open_run

#: An agent: shows itself, and for each line that it is given takes its requests and answers them. Its child must not keep its lock.
AGENT = """
import json, os, signal, sys
from dataclasses import replace
from lightning_autopar.sharing.runs.status import open_run

with open_run("train_gpt.py") as files:
    files.show(replace(files.status, state="running", elastic=True, devices=("cpu:0", "cpu:1"), step=3))
    if not os.fork():
        print(files.run_id, os.getpid(), flush=True)
        signal.pause()
    for line in sys.stdin:
        taken = files.requests()
        for request in taken:
            files.answer(request, f"moving off {request.device or 'all'}: {request.by} asked")
        print(json.dumps([[request.ask, request.device] for request in taken]), flush=True)
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOPAR_RUNS", str(tmp_path))
    return tmp_path


def root_of(home: Path) -> Path:
    return home / f"autopar-runs-{os.geteuid()}"


@contextmanager
def agent() -> Iterator[tuple[subprocess.Popen[str], str]]:
    with subprocess.Popen([sys.executable, "-c", AGENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        run_id, child = said(process).split()
        try:
            yield process, run_id
        finally:
            process.kill()
            os.kill(int(child), signal.SIGKILL)


@contextmanager
def elastic(script: str) -> Iterator[RunFiles]:
    """A run that can be asked."""
    with open_run(script) as files:
        files.show(replace(files.status, elastic=True))
        yield files


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def told(process: subprocess.Popen[str]) -> Any:
    assert process.stdin is not None
    process.stdin.write("look\n")
    process.stdin.flush()
    return json.loads(said(process))


# -- showing -----------------------------------------------------------------------------------------------------------------------------


def test_a_run_is_seen_while_it_is_open(home: Path) -> None:
    assert runs() == []
    with open_run("/somewhere/Train_GPT (2).py") as files:
        assert files.run_id.startswith("train-gpt-2-")
        assert len(files.run_id) == len("train-gpt-2-3f2a")
        (seen,) = runs()
        assert (seen.state, seen.pid, seen.script) == ("planning", os.getpid(), "/somewhere/Train_GPT (2).py")
        status = replace(
            files.status,
            state="running",
            plan="FSDP on 2 devices",
            devices=("GPU-a", "GPU-b"),
            leased_bytes={"GPU-a": 5, "GPU-b": 6},
            used_bytes={"GPU-a": 4},
            step=7,
            steps=100,
            step_seconds=0.25,
            generation=2,
            reason="a neighbour left",
        )
        files.show(status)
        (seen,) = runs()
        assert replace(seen, shown_at=0.0) == replace(status, shown_at=0.0)
        assert seen.shown_at > 0
    assert runs() == []
    assert list(root_of(home).iterdir()) == []


@pytest.mark.parametrize(
    ("script", "stem"), [("", "run"), ("-c", "run"), ("/a/tool/__main__.py", "tool"), ("训练.py", "run"), ("x" * 99 + ".py", "x" * 24)]
)
def test_a_runs_name_can_be_said(script: str, stem: str) -> None:
    with open_run(script) as files:
        assert files.run_id[:-5] == stem


def test_figures_alone_are_written_now_and_then_and_all_else_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "SHOW_SECONDS", 1e9)
    with open_run("a.py") as files:
        files.show(replace(files.status, step=1, step_seconds=0.1))
        assert runs()[0].step is None
        files.show(replace(files.status, state="running"))
        assert (runs()[0].step, runs()[0].step_seconds) == (1, 0.1)
        files.show(replace(files.status, step=2))
        assert runs()[0].step == 1
        monkeypatch.setattr(run_files, "SHOW_SECONDS", 0.0)
        files.show(replace(files.status, step=3))
        assert runs()[0].step == 3


def test_figures_that_are_none_are_shown_as_none() -> None:
    with open_run("a.py") as files:
        files.show(replace(files.status, state="running", step_seconds=float("nan"), steps=float("inf")))  # type: ignore[arg-type]
        (seen,) = runs()
        assert (seen.step_seconds, seen.steps) == (None, None)


@pytest.mark.parametrize("mask", [0, 0o077])
def test_all_can_read_its_status_and_nobody_else_the_rest(home: Path, mask: int) -> None:
    root_of(home).mkdir(mode=0o700)
    before = os.umask(mask)
    try:
        with open_run("a.py") as files:
            files.show(replace(files.status, state="running", elastic=True))
            ask(files.run_id, Request(ask="snapshot"))
            files.answer(Request(ask="yield", id="1"), "no")
            assert {stat.S_IMODE(path.stat().st_mode) for path in (root_of(home), files.folder)} == {0o755}
            modes = {path.name.partition("-")[0]: stat.S_IMODE(path.stat().st_mode) for path in files.folder.iterdir()}
            assert modes == {"status.json": 0o644, "lock": 0o600, "request": 0o600, "answer": 0o600}  # and nothing half written
    finally:
        os.umask(before)


def test_a_full_disk_costs_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def full(path: Path, data: Any, mode: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with open_run("a.py") as files:
        monkeypatch.setattr(run_files, "write_json", full)
        for step in range(3):
            files.show(replace(files.status, state="running", reason=str(step)))
    assert [record.message.count("No space left") for record in caplog.records] == [1]


def test_a_folder_that_was_removed_under_the_run_comes_back(home: Path) -> None:
    with elastic("a.py") as files:
        shutil.rmtree(root_of(home) / files.run_id)
        assert files.requests() == []
        assert runs() == []
        files.show(replace(files.status, state="running"))
        assert [status.state for status in runs()] == ["running"]
        ask(files.run_id, Request(ask="park"))
        assert [request.ask for request in files.requests()] == ["park"]
        # And the lock alone, as cleaners of old files do it.
        (files.folder / "lock").unlink()
        files.show(replace(files.status, state="parked"))
        assert [status.state for status in runs()] == ["parked"]
    assert list(root_of(home).iterdir()) == []


# -- dying -------------------------------------------------------------------------------------------------------------------------------


def test_a_killed_runs_folder_is_removed_though_its_child_lives(home: Path) -> None:
    with agent() as (process, run_id):
        (status,) = runs()
        assert (status.run_id, status.pid, status.step) == (run_id, process.pid, 3)
        assert (root_of(home) / run_id).is_dir()
        process.kill()
        process.wait()
        assert runs() == []
        assert not (root_of(home) / run_id).exists()
        with pytest.raises(ValueError, match=r"you have no run on this host \(one that has ended isn't there any more\)"):
            yield_run(run_id)


def test_a_forked_childs_leaving_is_not_the_runs() -> None:
    context = open_run("a.py")
    files = context.__enter__()
    child = os.fork()
    if not child:
        try:
            context.__exit__(None, None, None)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert [status.run_id for status in runs()] == [files.run_id]
    context.__exit__(None, None, None)
    assert runs() == []


def test_half_made_folders_are_left_alone_until_they_are_old(home: Path) -> None:
    with open_run("a.py"):
        half = root_of(home) / ".new-x"
        half.mkdir()
        runs()
        assert half.exists()
        os.utime(half, (0, 0))
        assert is_abandoned(half)
        runs()
        assert not half.exists()
        stray = root_of(home) / "notes.txt"
        stray.write_text("kept")
        assert len(runs()) == 1
        assert stray.exists()


def test_of_two_runs_that_draw_one_name_the_second_draws_again(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = iter(["aaaa", "aaaa", "aaaa", "bbbb"])
    real = secrets.token_hex
    monkeypatch.setattr(secrets, "token_hex", lambda count: next(draws) if count == 2 else real(count))
    with open_run("a.py") as one, open_run("a.py") as other:
        assert (one.run_id, other.run_id) == ("a-aaaa", "a-bbbb")
        assert len(runs()) == 2
        assert not [path for path in one.folder.parent.iterdir() if path.name.startswith(".")]


# -- asking ------------------------------------------------------------------------------------------------------------------------------


def test_a_stopped_run_is_asked_and_answers_when_it_goes_on() -> None:
    with agent() as (process, run_id):
        process.send_signal(signal.SIGSTOP)
        assert "has been asked to yield" in str(yield_run(run_id))
        asked = yield_run("train", "cpu:1", wait_seconds=0.05)
        assert asked.answered is None
        assert str(asked).startswith(f"{run_id} hasn't answered within 0.05 s; the request stays")
        process.send_signal(signal.SIGCONT)
        assert told(process) == [["yield", None], ["yield", "cpu:1"]]
        assert told(process) == []
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(yield_run, process.pid, wait_seconds=30.0)
            while not told(process):
                assert not answer.done()
            assert answer.result().answered == f"moving off all: {run_folders.user_name()} asked"
        (child,) = psutil.Process(process.pid).children()
        assert yield_run(child.pid).run_id == run_id  # nvidia-smi shows workers


def test_a_run_that_ends_answers_no_more() -> None:
    with ThreadPoolExecutor() as pool:
        with elastic("a.py") as files:
            asked = pool.submit(ask, files.run_id, Request(ask="park"), wait_seconds=60.0)
            while not files.requests():
                assert not asked.done()
        assert asked.result().ended
        assert str(asked.result()) == f"{files.run_id} ended before it answered"


def test_garbage_is_dropped_with_a_warning(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    good = {"ask": "yield", "device": None, "at": 1.0, "by": "ada"}
    with open_run("a.py") as files:
        folder = files.folder
        bad: list[Any] = [[], None, 3, {}, {**good, "ask": "explode"}, {**good, "device": 3}, {**good, "at": "soon"}, {**good, "at": None}]
        bad.append({**good, "ask": "park", "device": "cpu:0"})
        for number, data in enumerate(bad):
            (folder / f"request-{number}.json").write_text(json.dumps(data))
        (folder / "request-a.json").write_bytes(b"\xff\x00{")
        (folder / "request-b.json").write_text("[" * 60_000)
        (folder / "request-c.json").write_text(json.dumps({**good, "by": "x" * 70_000}))
        os.mkfifo(folder / "request-d.json")
        (folder / "request-e.json").mkdir()
        (tmp_path / "elsewhere").write_text(json.dumps(good))
        (folder / "request-f.json").symlink_to(tmp_path / "elsewhere")
        (folder / "request-g.json").write_text(json.dumps(good))
        assert [(request.ask, request.by, request.id) for request in files.requests()] == [("yield", "ada", "g")]
        assert sum("this run ignores a request" in record.message for record in caplog.records) == len(bad) + 6
        caplog.clear()
        assert files.requests() == []
        assert not caplog.records
        assert sorted(path.name for path in folder.iterdir()) == ["lock", "status.json"]
        assert (tmp_path / "elsewhere").exists()


def test_a_run_whose_status_is_garbage_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    with open_run("a.py") as one, open_run("b.py") as other:
        for text in (
            "{",
            "[]",
            "{}",
            json.dumps({**one.status.to_dict(), "state": "lost"}),
            json.dumps({**one.status.to_dict(), "step": {}}),
        ):
            (one.folder / "status.json").write_text(text)
            caplog.clear()
            assert [status.run_id for status in runs()] == [other.run_id]
            assert "a run isn't shown" in caplog.text
        newer = {**one.status.to_dict(), "mood": "good"}
        (one.folder / "status.json").write_text(json.dumps(newer))
        assert len(runs()) == 2


def test_simultaneous_asks_are_each_taken_once() -> None:
    askers, each = 6, 20
    script = "import sys; from lightning_autopar.sharing.runs.requests import *; [yield_run(sys.argv[1]) for _ in range(20)]"
    taken: list[Request] = []
    with elastic("a.py") as files:
        over = threading.Event()

        def take() -> None:
            while not over.is_set():
                taken.extend(files.requests())

        takers = [threading.Thread(target=take) for _ in range(2)]
        for taker in takers:
            taker.start()
        others = [subprocess.Popen([sys.executable, "-c", script, files.run_id]) for _ in range(2)]
        with ThreadPoolExecutor(askers) as pool:
            for done in [pool.submit(ask, files.run_id, Request(ask="snapshot", by=f"{number}")) for number in range(askers * each)]:
                done.result()
        assert [other.wait() for other in others] == [0, 0]
        over.set()
        for taker in takers:
            taker.join()
        taken.extend(files.requests())
    assert len({request.id for request in taken}) == len(taken) == askers * each + 2 * 20
    assert {request.by for request in taken if request.ask == "snapshot"} == set(map(str, range(askers * each)))


def test_answers_that_nobody_reads_are_few() -> None:
    with open_run("a.py") as files:
        for number in range(80):
            files.answer(Request(ask="yield", id=f"{number:03}"), "no")
        files.answer(Request(ask="yield"), "came by no file")
        names = sorted(path.name for path in files.folder.glob("answer-*"))
        assert names[0] == "answer-016.json"
        assert len(names) == 64


def test_which_run_is_meant() -> None:
    with elastic("train.py") as one, elastic("train_more.py") as other:
        assert yield_run(other.run_id).run_id == other.run_id
        assert yield_run("train-m").run_id == other.run_id
        for run in ("train", os.getpid()):
            with pytest.raises(ValueError, match=rf"may be any of the runs {one.run_id} .*, {other.run_id} .*; say more"):
                yield_run(run)
        for run in ("eval", "", 999_999_999):
            with pytest.raises(
                ValueError, match=rf"there is no run '{run}' of yours; there are: {one.run_id} \(pid {os.getpid()}, planning\), "
            ):
                yield_run(run)


def test_which_device_is_meant() -> None:
    with elastic("train.py") as files:
        yield_run("train", "GPU-7c")  # it holds none now, and may hold this one when it looks
        files.show(replace(files.status, state="running", devices=("GPU-7c1e", "GPU-7d00")))
        yield_run("train", "GPU-7c")
        yield_run("train", "GPU-7d00")
        assert [request.device for request in files.requests()] == ["GPU-7c", "GPU-7c1e", "GPU-7d00"]
        with pytest.raises(ValueError, match=r"'GPU-7' may mean several devices of train-\w+, which is on GPU-7c1e, GPU-7d00"):
            yield_run("train", "GPU-7")
        with pytest.raises(ValueError, match="'cpu:0' is no device of train"):
            yield_run("train", "cpu:0")
        assert files.requests() == []


def test_what_cannot_be_asked() -> None:
    with pytest.raises(ValueError, match="can't be asked for 'explode'; ask for one of yield, park, resume, snapshot"):
        Request(ask="explode")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the request 'park' takes no device"):
        Request(ask="park", device="cpu:0")
    with elastic("a.py") as files:
        with pytest.raises(ValueError, match="must be at least 0, but are -1"):
            yield_run("a", wait_seconds=-1.0)
        for changes, says in (
            ({"elastic": False}, "isn't elastic, .*add CheckpointMigrate"),
            ({"elastic": False, "external": True}, "was started by torchrun or Slurm"),
            ({"state": "queued"}, f"is queued, and holds no device; 'lightning-autopar cancel {files.run_id}'"),
            ({"state": "finished"}, "has finished"),
        ):
            before = files.status
            files.show(replace(before, **changes))
            with pytest.raises(ValueError, match=f"{files.run_id} {says}"):
                yield_run("a")
            files.show(before)
        assert files.requests() == []


@pytest.mark.parametrize(
    "changes",
    [
        {"since": float("inf")},
        {"shown_at": -1.0},
        {"ends_at": 1e300},
        {"step_seconds": float("nan")},
        {"step": 10**30},
        {"leased_bytes": 3},
    ],
)
def test_a_figure_that_is_none_makes_no_status(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"number|status"):
        RunStatus.from_dict({**a_status("a-1234").to_dict(), **changes})


def test_what_a_run_says_is_printable() -> None:
    """Anybody can write a status; on a terminal it must not move the cursor, nor turn the direction of writing."""
    nasty = "a\x1b[2J\x07\n\u202eb\ud800"
    seen = RunStatus.from_dict({**a_status("a-1234").to_dict(), "script": nasty, "reason": nasty, "devices": [nasty], "plan": "x" * 9999})
    for text in (seen.script, seen.reason, *seen.devices):
        assert text == "a\ufffd[2J\ufffd\ufffd\ufffdb\ufffd"
    assert len(seen.plan) == 500


def test_without_a_place_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AUTOPAR_RUNS", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"can't show itself on this host \(.*nowhere: No such file"):
        open_run("a.py").__enter__()
    assert runs() == []


def a_status(run_id: str) -> RunStatus:
    return RunStatus(run_id=run_id, pid=1, user="x", script="a.py", state="running", since=0.0)


def test_shared_memory_is_the_first_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOPAR_RUNS")
    assert run_folders.run_homes()[0] == Path("/dev/shm")
    assert Path(tempfile.gettempdir()) in run_folders.run_homes()


def test_the_lock_is_the_runs_whole_life(home: Path) -> None:
    with open_run("a.py") as files:
        assert isinstance(files, RunFiles)
        assert is_alive(files.folder)
        kept = files.folder
    assert not is_alive(kept)
