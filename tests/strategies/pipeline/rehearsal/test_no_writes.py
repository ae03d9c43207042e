"""What a user's hook writes while a trial runs it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_autopar.strategies.pipeline.rehearsal.no_writes import no_writes


def append(path: Path) -> None:
    with open(path, "a") as file:
        file.write("new")


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
    "emptied": lambda there: os.close(os.open(there / "kept", os.O_WRONLY | os.O_TRUNC)),
}


@pytest.mark.parametrize("how", WRITES)
def test_files_stay_as_they_are(tmp_path: Path, how: str) -> None:
    (tmp_path / "kept").write_text("old")
    with no_writes():
        WRITES[how](tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"kept": "old"}
    WRITES["text"](tmp_path)  # afterwards they can be written
    assert (tmp_path / "kept").read_text() == "new"


def test_files_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("old")
    with no_writes():
        assert (tmp_path / "kept").read_text() == "old"
        assert (tmp_path / "kept").read_bytes() == b"old"


def test_what_a_library_in_c_writes_fails(tmp_path: Path) -> None:
    def write() -> None:
        file = torch._C.PyTorchFileWriter(str(tmp_path / "new.pt"))
        file.write_record("data", b"new", 3)
        file.write_end_of_file()

    with no_writes(), pytest.raises(RuntimeError):
        write()
    assert (tmp_path / "new.pt").stat().st_size == 0


def test_no_process_is_started_or_connected_to() -> None:
    with no_writes():
        with pytest.raises(OSError, match="may not start a process"):
            subprocess.run([sys.executable, "-c", ""], check=True)
        with socket.socket() as ours, pytest.raises(OSError, match="may not connect to another process"):
            ours.connect(("127.0.0.1", 9))
