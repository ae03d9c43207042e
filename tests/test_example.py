"""The example trains, without importing this package itself."""

from __future__ import annotations

import ast
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ForkedScript, ended

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_gpt.py"
#: What the byte frequencies of the text alone would give.
UNIGRAM_NATS = 3.4


def test_it_does_not_import_the_package() -> None:
    nodes = list(ast.walk(ast.parse(EXAMPLE.read_text(encoding="utf-8"))))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported = plain | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    assert "lightning" in imported
    assert not [name for name in imported if name.startswith("lightning_autopar")]


def test_it_trains_and_generates_text(tmp_path: Path) -> None:
    options = ["--layers=1", "--width=64", "--context=64", "--batch=16", "--steps=60", "--sample=40"]
    code, said = ended(ForkedScript(EXAMPLE, *options, environment={**os.environ, "AUTOPAR_DEVICES": "2xcpu:2GiB"}, folder=tmp_path))
    assert code == 0, said
    loss = re.search(r"validation loss (\d+\.\d+) nats", said)
    assert loss is not None, said
    assert float(loss[1]) < UNIGRAM_NATS < math.log(256)
    assert "def " in said.split(loss[0])[1]


@pytest.mark.slow  # make demo does it, too
def test_a_run_moves_off_a_device_and_comes_to_the_same_model(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(EXAMPLE.with_name("elastic.py")), "--steps=60"],
        env={name: value for name, value in os.environ.items() if name != "AUTOPAR_DEVICES"},
        capture_output=True,
        text=True,
        timeout=230,
        check=False,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    spans = re.findall(r"s: (.+) on (.+)", result.stdout)
    assert len(spans) >= 3, result.stdout
    difference = re.search(r"differs by more than ([^\s)]+)", result.stdout)
    assert difference is not None, result.stdout
    assert float(difference[1]) < 1e-3
