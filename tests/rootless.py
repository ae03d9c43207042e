"""Runs scripts in forks of a Python that has imported what both Lightnings and this package import, but neither of them: a script decides
which one it is.

To start Python anew for each takes three seconds of a core.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path

from tests.processes import lean_path

#: Answers each line of its input, a script and its environment, with the script's exit code.
_SERVER = """
import gc, json, os, runpy, signal, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
import cloudpickle, fsspec.implementations.local, jsonargparse, psutil, rich.progress, tensorboard, torch, torchmetrics, tqdm.auto
import torch._dynamo, torch.distributed.checkpoint, torch.distributed.fsdp, torch.distributed.tensor, torch.nn.utils.prune, torch.onnx
import lightning_autopar.planning.make_report
torch.set_num_threads(1)
gc.collect()
gc.freeze()
for line in sys.stdin:
    script, words, environment, said = json.loads(line)
    pid = os.fork()
    if not pid:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers, flush=True)
else:
    sys.exit()
os.setsid()
signal.alarm(100)
os.environ.update(environment)
os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 1)
os.dup2(1, 2)
sys.argv[:] = [script, *words]
runpy.run_path(script, run_name="__main__")
"""


class Rootless:
    """The Python that scripts are forked from."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        environment = {**os.environ, "PYTHONPATH": lean_path(), "AUTOPAR_DEVICES": "2xcpu:1GiB", "PYTHONWARNINGS": "ignore"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER], env=environment, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, code: str, *arguments: str, **environment: str) -> tuple[int, str]:
        """Run the code of a script; returns its exit code and what it printed, errors included.

        Args:
            code: the script.
            arguments: what it finds in ``sys.argv``.
            environment: variables to add.
        """
        self._count += 1
        script, said = self._folder / f"script_{self._count}.py", self._folder / f"said_{self._count}.txt"
        script.write_text(code)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps((str(script), arguments, environment, str(said))), file=self._process.stdin, flush=True)
        assert select.select([self._process.stdout], [], [], 110)[0], f"{script} hasn't ended"
        return int(self._process.stdout.readline()), said.read_text()

    def close(self) -> None:
        """End it."""
        self._process.kill()
        with self._process:  # closes the pipes
            pass
