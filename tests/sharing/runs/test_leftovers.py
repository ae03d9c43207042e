"""What killed runs leave: it is shown, and removed, and what a living run has is neither."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest

from lightning_autopar.cli import main
from lightning_autopar.sharing.runs import folders as module
from lightning_autopar.sharing.runs.folders import Kind, Leftover, leftovers, remove


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place for such folders."""
    monkeypatch.setenv("AUTOPAR_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def made(home: Path, kind: Kind) -> Path:
    folder = home / ("autopar-x1" if kind == "files" else f"autopar-snapshots-{os.getuid()}-00ff-0")
    (folder / "s000001").mkdir(parents=True)
    (folder / "s000001" / "tensors").write_bytes(bytes(3 << 20))
    (folder / module.LOCKS[kind]).touch()
    return folder


def test_a_living_runs_folders_are_not_left(home: Path) -> None:
    folders = {kind: made(home, kind) for kind in module.LOCKS}
    found = {left.kind: left for left in leftovers()}
    assert {kind: left.path for kind, left in found.items()} == folders
    for kind, folder in folders.items():
        with (folder / module.LOCKS[kind]).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            assert folder not in [left.path for left in leftovers()]
            assert not remove(found[kind]), "its run has come back since it was looked at"
            assert folder.exists()
    assert all(map(remove, found.values()))
    assert leftovers() == ()
    assert remove(Leftover(path=home / "autopar-gone", kind="files", size_bytes=0, since=0.0))


def test_status_shows_it_and_clean_removes_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, snapshots = made(home, "files"), made(home, "snapshots")
    assert main(["status"]) == 0
    shown = capsys.readouterr().out
    assert str(files) in shown
    assert str(snapshots) in shown
    assert "(6 MiB)" in shown
    assert "lightning-autopar clean" in shown
    assert main(["status", "--json"]) == 0
    assert {each["kind"] for each in json.loads(capsys.readouterr().out)["left"]} == {"files", "snapshots"}
    assert main(["clean"]) == 0
    assert not files.exists()
    assert f"kept {snapshots}" in capsys.readouterr().out
    assert main(["clean", "--snapshots"]) == 0
    assert not snapshots.exists()
    assert main(["status"]) == 0
    assert "Left by" not in capsys.readouterr().out


def test_a_run_that_was_killed_before_its_first_snapshot_has_left_nothing_to_go_on_from(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(home, "snapshots")
    (folder / "s000001" / "tensors").unlink()
    assert main(["status"]) == 0
    assert "next start goes on" not in capsys.readouterr().out
    assert main(["clean"]) == 0
    assert not folder.exists()
