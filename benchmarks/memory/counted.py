"""The same peak, counted another way: by a library under the process that counts what torch's allocator asks of the C library.

It knows nothing of the profiler, of parameters, or of steady states: live bytes over all threads, from the process's start on. What the
dataset holds is taken off, as it is no part of the step. It comes out
above the profiler's sum where oneDNN works (1.2 % for ResNet-18, 0.4 % for the LSTM, 0.02 % for BERT): most likely what oneDNN allocates
for itself, past torch's allocator. That wasn't traced to its calls.

    LD_PRELOAD=live_bytes.so python -m memory.counted "GPT-2"    # prints the bytes; see :func:`counted_bytes`
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import live_bytes
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from memory.job import Batches, Job
from memory.measure import RealPeak, make_trainer

_TIMEOUT_SECONDS = 300


def build_counter(folder: Path) -> Path | None:
    """The library, compiled; None where there is no compiler."""
    cc = live_bytes.compiler()
    if cc is None:
        return None
    library = folder / "live_bytes.so"
    source = Path(live_bytes.__file__).with_suffix(".c")
    subprocess.run([cc, "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return library


def counted_bytes(name: str, library: Path) -> int:
    """The job's peak, from a process under the library."""
    folder = str(Path(__file__).resolve().parent.parent)
    environment = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": os.pathsep.join((folder, str(Path(folder).parent)))}
    command = [sys.executable, "-m", "memory.counted", name]
    done = subprocess.run(command, env=environment, check=False, timeout=_TIMEOUT_SECONDS, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"counting {name} failed: {done.stderr[-2000:]}")
    return int(done.stdout.rpartition("counted ")[2])


class _CountedPeak(pl.Callback):
    """Reads the counter over the same batches as :class:`RealPeak`."""

    def __init__(self, accumulate: int) -> None:
        self.batches = RealPeak(accumulate)
        self.bytes = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batches.counted:
            live_bytes.reset_peak()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batches.last:
            self.bytes = live_bytes.peak_bytes()


def _run(job: Job) -> int:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    before = live_bytes.live_bytes()
    module, batch = job.build(), job.batch()
    held = sum(leaf.untyped_storage().nbytes() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
    peak = _CountedPeak(int(job.trainer.get("accumulate_grad_batches", 1)))
    make_trainer(job, callbacks=[peak]).fit(module, DataLoader(Batches(batch, peak.batches.last + 1), batch_size=None))
    return peak.bytes - held - before


if __name__ == "__main__":
    from memory.zoo import JOBS

    print(f"counted {_run(JOBS[sys.argv[1]])}")
