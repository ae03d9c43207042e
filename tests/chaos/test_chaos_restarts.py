"""The script itself is killed and started again: the run goes on where it was."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import time
import warnings
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chaos import chaos_script
from tests.chaos.chaos_runs import Figures, compare_batches, compare_logged, fit_plainly, logged, notes
from tests.chaos.chaos_script import VARIANT
from tests.processes import lean_path


class Script:
    """A start of the script: as a process of its own, or, which is quicker, as a fork of this one."""

    def __init__(self, folder: Path, *, forked: bool) -> None:
        self.said = folder / "said"
        file = Path(chaos_script.__file__)
        if forked:
            process = get_context("fork").Process(target=self._run, args=(folder,))
            process.start()
            self._process: Any = process
            return
        environment = {**os.environ, "PYTHONPATH": lean_path(file.parent), "OMP_NUM_THREADS": "1"}
        with self.said.open("a", encoding="utf-8") as said:
            self._process = subprocess.Popen([sys.executable, str(file), str(folder)], env=environment, stdout=said, stderr=said)

    def _run(self, folder: Path) -> None:
        said = os.open(self.said, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(said, stream)
        sys.stdout = sys.stderr = out = os.fdopen(said, "a", buffering=1)
        logging.getLogger("lightning.pytorch").addHandler(logging.StreamHandler(out))
        warnings.showwarning = lambda message, *_, **__: print(message, file=out)
        chaos_script.main(folder)

    def wait_for(self, folder: Path, step: int) -> None:
        """Until so many steps are done."""
        until = time.monotonic() + 60
        while not (folder / "step").exists() or int((folder / "step").read_text(encoding="utf-8")) < step:
            assert self.wait(0) is None, self.said.read_text(encoding="utf-8")
            assert time.monotonic() < until, self.said.read_text(encoding="utf-8")
            time.sleep(0.01)

    def end_by(self, number: int) -> str:
        """Send a signal, and wait; what it has said."""
        os.kill(self._process.pid, number)
        assert self.wait(60) is not None
        return self.said.read_text(encoding="utf-8")

    def wait(self, seconds: float) -> int | None:
        """Its exit code, None while it runs."""
        if isinstance(self._process, subprocess.Popen):
            try:
                return self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                return None
        self._process.join(seconds)
        return self._process.exitcode


@pytest.mark.parametrize("forked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_killed_script_goes_on_at_its_next_start(tmp_path: Path, forked: bool) -> None:
    plain = fit_plainly(VARIANT, tmp_path / "plain")
    folder = tmp_path / "killed"
    folder.mkdir()
    script = Script(folder, forked=forked)
    script.wait_for(folder, 12)
    script.end_by(signal.SIGKILL)
    script = Script(folder, forked=forked)
    script.wait_for(folder, 18)
    said = script.end_by(signal.SIGTERM)
    assert "resumes from its snapshot of step" in said, said
    assert "the next start of this run goes on from there" in said, said
    script = Script(folder, forked=forked)
    assert script.wait(60) == 0, script.said.read_text(encoding="utf-8")
    state, step = pickle.loads((folder / "run.pkl").read_bytes())
    assert step == plain.trainer.global_step
    for name, value in plain.module.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-6)
    figures = Figures()
    compare_batches(plain, notes(folder), figures, redone=True)
    assert figures.again < 10
    compare_logged(plain, logged(folder), figures)
    assert figures.loss < 1e-5
    assert figures.logged < 1e-5
