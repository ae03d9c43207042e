"""The CPU's real peak of a LightningModule's training step, by the profiler, and the footprint's. Also trainers that keep quiet."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_autopar._fork import run_forked
from lightning_autopar._lightning_compat import attach_data
from lightning_autopar.memory.footprint import Footprint


def peak_bytes(footprint: Footprint) -> int:
    """The step's peak on one device."""
    resident = footprint.parameter_bytes + footprint.buffer_bytes + footprint.optimizer_bytes + footprint.input_bytes
    if not footprint.moments:
        return resident + footprint.gradient_bytes + footprint.activation_bytes + footprint.temporary_bytes
    return resident + max(moment.total_bytes for moment in footprint.moments)


def make_trainer(**kwargs: Any) -> pl.Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(**{"accelerator": "cpu", "devices": 1, "max_steps": 4, **quiet, **kwargs})


def attached(module: pl.LightningModule, stage: str = "fit", **data: Any) -> pl.Trainer:
    """A trainer as it is when a plan is due: module and data attached, nothing set up."""
    trainer = make_trainer()
    trainer.strategy._lightning_module = module
    attach_data(trainer, {"model": module, "train_dataloaders": None, "val_dataloaders": None, **data})
    return trainer


class Copies:
    """A loader of one batch, again and again: a copy each time, so that the profiler sees it made.

    Args:
        batch: anything that can be deep-copied.
        steps: how many.
    """

    def __init__(self, batch: Any, steps: int = 4) -> None:
        self.batch = batch
        self.steps = steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Any]:
        return (copy.deepcopy(self.batch) for _ in range(self.steps))


class RealPeak(pl.Callback):
    """Peak bytes of the third and fourth batch: what lives from step to step plus the running sum of the profiler's memory events."""

    def __init__(self) -> None:
        self.bytes = 0
        self._profile: Any = None
        self._before: list[weakref.ref[Tensor]] = []
        self._gradients: list[tuple[weakref.ref[Tensor], int]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            states = [dict(state) for optimizer in trainer.optimizers for state in optimizer.state.values()]
            loose = [value for value in vars(module).values() if isinstance(value, nn.Module)]
            parts = [tensor for part in (module, *loose) for tensor in (*part.parameters(), *part.buffers())]
            found = (parameter.grad for parameter in module.parameters() if parameter.grad is not None)
            self._gradients = [(weakref.ref(gradient), sum(size for _, size in _storages(gradient))) for gradient in found]
            self._before = [weakref.ref(leaf) for leaf in tree_leaves([parts, states]) if isinstance(leaf, Tensor)]
            self._profile = torch.autograd.profiler.profile(profile_memory=True)
            self._profile.__enter__()
        if batch_idx == 2:
            # What the profiler hasn't seen made, less the state that batch 1 replaced. From here on the sum is exact.
            alive = [tensor for reference in self._before if (tensor := reference()) is not None]
            self.bytes = sum({key: size for tensor in alive for key, size in _storages(tensor)}.values())
            with torch.autograd.profiler.record_function("counted from here"):
                pass

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 3:
            return
        self._profile.__exit__(None, None, None)
        events, start = _allocations(self._profile.kineto_results.experimental_event_tree())
        sizes: dict[int, int] = {}
        level, peak = 0, 0
        for time, address, size in events:
            if size > 0:
                sizes[address] = size
                level += size
            else:  # what was allocated earlier doesn't count when it goes
                level -= sizes.pop(address, 0)
            peak = max(peak, level) if time >= start else 0
        # Gradients that were made before the profile began, and never freed.
        self.bytes += peak + sum(size for reference, size in self._gradients if reference() is not None)
        trainer.should_stop = True


def _allocations(tree: list[Any]) -> tuple[list[tuple[int, int, int]], int]:
    """Time, address and bytes of each allocation (and of each free, below zero); and when counting starts."""
    found, start, stack = [], 0, list(tree)
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        kind, fields = event.typed
        if kind == torch._C._profiler._EventType.Allocation:
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
        elif event.name == "counted from here":
            start = event.start_time_ns
    return sorted(found, key=lambda allocation: allocation[0]), start


def _storages(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """Address and bytes of each storage that holds the tensor."""
    if tensor.layout is torch.sparse_coo:
        parts: tuple[Tensor, ...] = (tensor._indices(), tensor._values())
    elif tensor.layout is torch.sparse_csr:
        parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    else:
        parts = (tensor,)
    for part in parts:
        yield part.untyped_storage().data_ptr(), part.untyped_storage().nbytes()


def real_peak_bytes(module: pl.LightningModule, loader: Any, **kwargs: Any) -> int:
    """In a child: the profiler remembers what earlier runs in its process allocated."""

    def run() -> int:
        warnings.simplefilter("ignore")
        peak = RealPeak()
        make_trainer(**{"max_steps": -1, "max_epochs": 1, **kwargs, "callbacks": [*kwargs.get("callbacks", []), peak]}).fit(module, loader)
        return peak.bytes

    return run_forked(run, timeout_seconds=60)
