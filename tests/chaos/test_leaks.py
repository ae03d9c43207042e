"""Many moves of one run leave nothing behind: no file, no process, no descriptor, no memory of the host's or of a GPU's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import lean_path

_SCRIPT = Path(__file__).with_name("leaks.py")
on = pytest.mark.parametrize("kind", ["cpu", pytest.param("gpu", marks=[pytest.mark.gpu, pytest.mark.two_gpus])])


def _moved(moves: int, kind: str, seconds: float) -> dict[str, Any]:
    """A run of its own process that is moved so often."""
    environment = {**os.environ, "PYTHONPATH": lean_path()}
    command = [sys.executable, str(_SCRIPT), str(moves), kind]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.rpartition("LEAKS ")[2])
    assert found["moves"] == moves
    return found


def _assert_nothing_left(found: dict[str, Any]) -> None:
    warm, last, after = found["warm"], found["last"], found["after"]
    assert after["processes"] == after["shared_files"] == 0, found
    assert after["descriptors"] <= found["before"]["descriptors"], found
    assert after["threads"] <= found["before"]["threads"] + 1, found
    assert after.get("device_mib", 0) <= found["before"].get("device_mib", 0), found
    assert found["left"] == ["end"], found
    # A generation of two workers has some more than one of one.
    for name, most in {"descriptors": 8, "threads": 1, "processes": 1, "shared_files": 8, "mappings": 30, "resident_mib": 64}.items():
        assert last[name] <= warm[name] + most, (name, found)


@on
def test_some_moves_through_every_engine(kind: str) -> None:
    _assert_nothing_left(_moved(8, kind, 180))


@pytest.mark.nightly_chaos
@pytest.mark.timeout(3600)
@on
def test_five_hundred_moves(kind: str) -> None:
    _assert_nothing_left(_moved(500, kind, 3500))
