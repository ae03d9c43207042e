"""What a job's step really takes on the CPU, and what is predicted for it. Each call wants a process of its own.

The real peak is that of plain Lightning's Trainer in steady state: bytes that live from step to step (parameters, buffers, optimizer
state) plus the running sum of torch's memory events, which see every block that torch's allocator hands out, also inside of operations.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_autopar.devices.discover import probe
from lightning_autopar.memory.trace.trace import trace
from lightning_autopar.planning.plan_bytes import predict
from lightning_autopar.plans import Plan
from memory.job import Batches, Job

MARK = "counted from here"


class RealPeak(pl.Callback):
    """Watches the last batches of a short run, of which an optimizer's step ends the last.

    Args:
        accumulate: batches to a step of the optimizer.
    """

    def __init__(self, accumulate: int) -> None:
        self.profiled = accumulate
        self.counted = 2 * accumulate
        self.last = max(3, 4 * accumulate - 1)
        self.resident_bytes = 0
        self.events: list[tuple[int, int]] = []
        self.start_ns = 0
        self.names: list[tuple[int, int, str]] = []
        self._profile: Any = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.profiled:
            # Gradients and batches of what came before are freed by the time that counting starts: from there the sum is exact.
            states = [leaf for optimizer in trainer.optimizers for leaf in tree_leaves(dict(optimizer.state)) if isinstance(leaf, Tensor)]
            resident = [*module.parameters(), *module.buffers(), *states]
            self.resident_bytes = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in resident}.values())
            self._profile = torch.autograd.profiler.profile(profile_memory=True)
            self._profile.__enter__()
        if batch_idx == self.counted:
            with torch.autograd.profiler.record_function(MARK):
                pass

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != self.last:
            return
        self._profile.__exit__(None, None, None)
        for event in self._profile.kineto_results.events():
            if event.name() == "[memory]":
                self.events.append((event.start_ns(), event.nbytes()))
            else:
                self.names.append((event.start_ns(), event.duration_ns(), event.name()))
        self.events.sort(key=lambda event: event[0])
        self.start_ns = next(start for start, _, name in self.names if name == MARK)

    @property
    def bytes(self) -> int:
        """The peak."""
        level = peak = 0
        for time_ns, size in self.events:
            level += size
            peak = max(peak, level) if time_ns >= self.start_ns else 0
        return self.resident_bytes + peak


def make_trainer(job: Job, **kwargs: Any) -> pl.Trainer:
    """Plain Lightning on one CPU, with the job's settings."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, **{**quiet, **job.trainer, **kwargs})


def real_run(job: Job, seed: int = 0) -> RealPeak:
    """Train with a watching callback."""
    warnings.simplefilter("ignore")
    torch.manual_seed(seed)
    module, batch = job.build(), job.batch()
    peak = RealPeak(int(job.trainer.get("accumulate_grad_batches", 1)))
    make_trainer(job, callbacks=[peak]).fit(module, DataLoader(Batches(batch, peak.last + 1), batch_size=None))
    return peak


def predicted(job: Job, seed: int = 0) -> dict[str, Any]:
    """What is said of a single device, without running the step."""
    warnings.simplefilter("ignore")
    torch.manual_seed(seed)
    module, batch = job.build(), job.batch()
    begun = time.perf_counter()
    footprint = trace(module, make_trainer(job), batch, precision=job.precision)
    inventory = probe("1xcpu:64GiB")
    device = inventory.devices[0].id
    held = predict(footprint, Plan(engine="single", devices=(device,)), inventory)[device]
    return {
        "bytes": held.allocated,
        "seconds": time.perf_counter() - begun,
        "categories": {name: size for name, size in dataclasses.asdict(held).items() if size},
        "parameters": footprint.parameters,
        "margin": footprint.margin,
        "assumptions": list(footprint.assumptions),
    }
