"""What a user's step or hook writes while a trial runs it."""

from __future__ import annotations

import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_autopar import _fork
from lightning_autopar.memory.trace.no_writes import no_effects, no_writes


def append(path: Path) -> None:
    with open(path, "a") as file:
        file.write("new")


def insert(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("create table losses (loss)")
        database.commit()


def sync(path: Path) -> None:
    with path.open("w") as file:
        file.write("new")
        file.flush()
        os.fsync(file.fileno())


def fill(folder: Path) -> None:
    folder.mkdir()
    (folder / "new").write_bytes(b"new")


WRITES: dict[str, Callable[[Path], object]] = {
    "text": lambda there: (there / "kept").write_text("new"),
    "open": lambda there: append(there / "kept"),
    "new": lambda there: (there / "new").open("x").close(),
    "torch": lambda there: torch.save(torch.ones(3), there / "kept"),
    "torch to a new one": lambda there: torch.save(torch.ones(3), str(there / "new.pt")),
    "array": lambda there: np.save(there / "new.npy", np.ones(3)),
    "arrays": lambda there: np.savez(there / "new.npz", a=np.ones(3)),
    "folders": lambda there: (there / "a" / "b").mkdir(parents=True, exist_ok=True),
    "a folder and a file in it": lambda there: fill(there / "a"),
    "removed": lambda there: (there / "kept").unlink(),
    "removed, with its folder": lambda there: shutil.rmtree(there),
    "renamed": lambda there: os.replace(there / "kept", there / "new"),
    "copied": lambda there: shutil.copyfile(there / "kept", there / "new"),
    "with its number": lambda there: np.ones(3).tofile(there / "new"),
    "synced": lambda there: sync(there / "kept"),
    "a database": lambda there: insert(there / "new.db"),
    "a command": lambda there: os.system(f"touch {there}/new"),
    "emptied": lambda there: os.close(os.open(there / "kept", os.O_WRONLY | os.O_TRUNC)),
}


@pytest.mark.parametrize("how", WRITES)
def test_files_stay_as_they_are(tmp_path: Path, how: str) -> None:
    (tmp_path / "kept").write_text("old")
    with no_writes({}):
        WRITES[how](tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"kept": "old"}
    WRITES["text"](tmp_path)  # afterwards they can be written
    assert (tmp_path / "kept").read_text() == "new"


def test_files_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("old")
    with no_writes({}):
        assert (tmp_path / "kept").read_text() == "old"
        assert (tmp_path / "kept").read_bytes() == b"old"


def test_a_trial_reads_what_it_wrote(tmp_path: Path) -> None:
    """A step that keeps its best loss in a file, reads it in the next step, and adds a line to a log."""
    (tmp_path / "log").write_text("old ")
    written: dict[str, Any] = {}
    with no_writes(written):
        torch.save(torch.ones(3), tmp_path / "best.pt")
        append(tmp_path / "log")
        with pytest.raises(FileExistsError):
            (tmp_path / "log").open("x")
    with no_writes(written):
        assert torch.load(tmp_path / "best.pt").tolist() == [1, 1, 1]
        append(tmp_path / "log")
        assert (tmp_path / "log").read_text() == "old newnew"
    assert (tmp_path / "log").read_text() == "old "


def test_a_temporary_file_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries in C are given its path."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with no_writes({}):
        with tempfile.NamedTemporaryFile() as file:
            assert Path(file.name).stat().st_size == 0
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "new").write_text("new")
            assert os.stat(f"{folder}/new").st_size == 3
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with no_writes({}):
        print("from Python", file=sys.stderr)
        os.write(2, b"from C")
    print("after", file=sys.stderr)
    assert capfd.readouterr().err == "after\n"


def test_a_child_adds_nothing_to_an_open_log(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:

        def trial() -> int:
            return file.write("trial") + (file.flush() or 0)

        file.write("before ")
        file.flush()
        assert _fork.run_forked(trial) == 5
        file.write("after")
    assert (tmp_path / "log").read_text() == "before after"


def test_what_a_library_in_c_writes_fails(tmp_path: Path) -> None:
    def write() -> None:
        file = torch._C.PyTorchFileWriter(str(tmp_path / "new.pt"))
        file.write_record("data", b"new", 3)
        file.write_end_of_file()

    with no_effects(), pytest.raises(RuntimeError):
        write()
    assert (tmp_path / "new.pt").stat().st_size == 0


def test_no_process_is_started_or_connected_to() -> None:
    with no_effects():
        with pytest.raises(OSError, match="may not start a process"):
            subprocess.run([sys.executable, "-c", ""], check=True)
        with socket.socket() as ours, pytest.raises(OSError, match="may not connect to another process"):
            ours.connect(("127.0.0.1", 9))
