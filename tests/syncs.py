"""Counts, step by step, where the host waits for a device, and which collectives it begins.

torch says of each of its synchronising calls by ``torch.cuda.set_sync_debug_mode`` (``item()``, ``nonzero``, copies to and from pageable
memory that aren't ``non_blocking``). It says nothing of ``synchronize()`` and of collectives, which are counted where they are called. On
the stub (tests/nullgpu) the runtime has a count of its own.
"""

from __future__ import annotations

import json
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from tests.nullgpu import control

#: Of torch.distributed's Python functions; DDP's reducer calls none of them.
_COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce_scatter_tensor", "all_gather_object",
    "broadcast_object_list", "barrier", "send", "recv",
)  # fmt: skip
_SYNCHRONISING = ((torch.cuda, "synchronize"), (torch.cuda.Stream, "synchronize"), (torch.cuda.Event, "synchronize"))
#: How many frames of a place are told.
_FRAMES = 6


class HostSyncs(pl.Callback):
    """Writes for each step of a rank what it counted to a file of the rank's: ``wait`` or a collective's name, and where that was.

    Args:
        folder: where the files go.
        skip: steps that aren't counted: the first ones find things out.
    """

    def __init__(self, folder: Path, skip: int = 3) -> None:
        self.folder = folder
        self.skip = skip
        self._steps: list[dict[str, int]] = []
        self._now: Counter[str] | None = None
        self._before: dict[str, int] = {}
        self._undo: list[Callable[[], None]] = []
        self._inside = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._catch_warnings()
        for owner, name in _SYNCHRONISING:
            self._count_calls(owner, name, "wait")
        for name in _COLLECTIVES:
            self._count_calls(dist, name, name)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if self._now is not None:
            if control.on_stub():
                after = control.counters()
                self._now["waits of the runtime"] = sum(after[name] - self._before[name] for name in control.WAITS)
            self._steps.append(dict(self._now))
            self._now = None
        if batch_idx >= self.skip:
            self._before = control.counters() if control.on_stub() else {}
            self._now = Counter()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._now = None  # the last step's end belongs to the epoch's
        while self._undo:
            self._undo.pop()()
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(self._steps), encoding="utf-8")

    def _note(self, kind: str) -> None:
        if self._now is not None:
            self._now[f"{kind} at {_place()}"] += 1

    def _catch_warnings(self) -> None:
        shown, filters = warnings.showwarning, warnings.filters[:]

        def show(message: Any, *more: Any, **also: Any) -> None:
            if "called a synchronizing CUDA operation" in str(message):
                self._note("wait")
            else:
                shown(message, *more, **also)

        warnings.filterwarnings("always", message="called a synchronizing CUDA operation")
        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")

        def undo() -> None:
            torch.cuda.set_sync_debug_mode("default")
            warnings.showwarning = shown
            warnings.filters[:] = filters  # type: ignore[index]

        self._undo.append(undo)

    def _count_calls(self, owner: Any, name: str, kind: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            if not self._inside:
                self._note(kind)
            self._inside += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._inside -= 1

        setattr(owner, name, counted)
        self._undo.append(lambda: setattr(owner, name, original))


def _place() -> str:
    """Files and lines that led here, the innermost first."""
    frames = [frame for frame in reversed(traceback.extract_stack()) if frame.filename != __file__]
    return " < ".join(f"{'/'.join(frame.filename.split('/')[-3:])}:{frame.lineno}" for frame in frames[:_FRAMES])


def read(folder: Path) -> dict[int, list[dict[str, int]]]:
    """By rank, each counted step's waits and collectives."""
    return {int(path.stem.removeprefix("rank")): json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("rank*.json"))}
