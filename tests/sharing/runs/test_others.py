"""Runs of several users on one host: whose files are believed, and that nobody but its user can ask a run for something."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_autopar.sharing.process_ids import pid_namespace, started_ticks
from lightning_autopar.sharing.runs import folders as run_folders
from lightning_autopar.sharing.runs import status as run_files
from lightning_autopar.sharing.runs.requests import cancel, everyones_runs, runs, yield_run
from lightning_autopar.sharing.runs.status import RunFiles, RunStatus, open_run

NOBODY = 65534
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="takes another user")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOPAR_RUNS", str(tmp_path))
    return tmp_path


def root_of(home: Path) -> Path:
    return home / f"autopar-runs-{os.geteuid()}"


@contextmanager
def elastic(script: str) -> Iterator[RunFiles]:
    """A run that can be asked."""
    with open_run(script) as files:
        files.show(replace(files.status, elastic=True))
        yield files


def a_status(run_id: str) -> RunStatus:
    return RunStatus(run_id=run_id, pid=1, user="x", script="a.py", state="running", since=0.0)


def as_user(uid: int, function: Callable[[], object]) -> Any:
    """What a function says to another user, in a forked child."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.seteuid(uid)
            try:
                found: Any = function()
            except ValueError as error:
                found = str(error)
            os.write(writing, json.dumps(found).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(child, 0)
    return json.loads(text)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder like /tmp, whose way nobody is barred from."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o1777)
        monkeypatch.setenv("AUTOPAR_RUNS", name)
        yield Path(name)


@AS_ROOT
def test_another_users_run_is_seen_and_refused(shared: Path) -> None:
    me = run_folders.user_name()
    with elastic("train.py") as files:
        agent_pid = os.getpid()
        (seen,) = as_user(NOBODY, lambda: [status.to_dict() for status in everyones_runs()])
        assert (seen["run_id"], seen["user"], seen["pid"]) == (files.run_id, me, agent_pid)
        refused = f"the run {files.run_id} is {me}'s, and only {me} can ask it for something"
        assert as_user(NOBODY, lambda: str(yield_run("train"))) == refused
        assert as_user(NOBODY, lambda: str(cancel("train"))) == refused
        assert as_user(NOBODY, lambda: str(yield_run("eval"))) == f"you have no run on this host; runs of others ({me}) only they can ask"
        assert as_user(NOBODY, lambda: str(yield_run(agent_pid))).startswith(f"the process {agent_pid} is {me}'s")
        assert as_user(NOBODY, lambda: len(runs())) == 0
        assert files.requests() == []
        assert len(runs()) == 1
    assert as_user(NOBODY, lambda: len(everyones_runs())) == 0


@AS_ROOT
def test_another_user_is_believed_what_the_file_system_and_the_kernel_confirm(shared: Path) -> None:
    root = shared / f"autopar-runs-{NOBODY}"
    with subprocess.Popen(["sleep", "60"], user=NOBODY) as process:
        began = {"pid": process.pid, "started_ticks": started_ticks(process.pid), "namespace": pid_namespace()}

        def shows(name: str, **changes: Any) -> Path:
            """A run's folder as that user could make it."""
            (root / name).mkdir(parents=True)
            path = root / name / "status.json"
            path.write_text(json.dumps({**a_status(name).to_dict(), "user": "root", **began, **changes}))
            for each in (root, root / name, path):
                os.chown(each, NOBODY, NOBODY)
            return path

        def seen() -> list[tuple[str, str]]:
            return [(status.run_id, status.user) for status in everyones_runs()]

        try:
            shows("good-1234")
            good = [("good-1234", run_folders.user_name(NOBODY))]
            assert seen() == good
            shows("earlier-1234", started_ticks=1)
            shows("noones-1234", pid=2**22 + 1)
            shows("mine-1234", pid=os.getpid(), started_ticks=started_ticks(os.getpid()))
            shows("nothere-1234", namespace="pid:[1]", shown_at=1.0)
            shows("named-1234", run_id="good-1234")
            os.chown(shows("roots-1234"), 0, 0)
            path = shows("link-1234")
            path.unlink()
            path.symlink_to(root / "good-1234" / "status.json")
            path = shows("pipe-1234")
            path.unlink()
            os.mkfifo(path)
            os.chown(path, NOBODY, NOBODY)
            shows("large-1234", plan="x" * 70_000)
            (root / "deep-1234").mkdir()
            (root / "deep-1234" / "status.json").write_text("[" * 60_000)
            os.chown(root / "deep-1234" / "status.json", NOBODY, NOBODY)
            assert seen() == good
            assert len(list(root.iterdir())) == 11, "what is another's is left alone"
            # A container's run can't be looked at; it counts as long as it shows itself.
            shows("elsewhere-1234", namespace="pid:[1]", shown_at=time.time())
            assert [run_id for run_id, _ in seen()] == ["elsewhere-1234", "good-1234"]
        finally:
            process.kill()
    assert [run_id for run_id, _ in seen()] == ["elsewhere-1234"]


@AS_ROOT
def test_a_folder_of_the_right_name_that_is_anothers_is_not_trusted(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squatted = root_of(shared)
    (squatted / "train-1234").mkdir(parents=True)
    (squatted / "train-1234" / "status.json").write_text(json.dumps(a_status("train-1234").to_dict()))
    os.chown(squatted, NOBODY, NOBODY)
    with pytest.raises(
        ValueError,
        match=f"exists already, and belongs to {run_folders.user_name(NOBODY)} or.*set AUTOPAR_RUNS to a folder of your own that exists",
    ):
        open_run("a.py").__enter__()
    assert runs() == []
    assert (squatted / "train-1234").exists()
    other = shared / "other"
    other.mkdir()
    for module in (run_files, run_folders):
        monkeypatch.setattr(module, "run_homes", lambda: [shared, other])
    with open_run("a.py") as files:
        assert files.folder.parent.parent == other
        assert len(runs()) == 1


def test_a_link_of_the_right_name_is_not_trusted(home: Path) -> None:
    (home / "elsewhere").mkdir()
    root_of(home).symlink_to(home / "elsewhere")
    with pytest.raises(ValueError, match="exists already"):
        open_run("a.py").__enter__()
    assert runs() == []
    assert list((home / "elsewhere").iterdir()) == []
