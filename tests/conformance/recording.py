"""What a run is watched with: loggers and a callback that a user could have written. Knows of no plan, engine or strategy."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only


class FileLogger(Logger):
    """Writes each row as a line of JSON, so that it is seen whichever process logged it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @property
    def name(self) -> str:
        return "file"

    @property
    def version(self) -> int:
        return 0

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def rows(self) -> list[dict[str, float]]:
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]


class MemoryLogger(Logger):
    """Keeps its rows in memory: they are there after fit only if the run brought them back."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> int:
        return 0

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append({"step": step or 0, **metrics})

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass


class Recorder(Callback):
    """Notes what happened when, in an attribute, and leaves a file for each process that began to train."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.events: list[str] = []

    def note(self, trainer: Any, what: str) -> None:
        self.events.append(f"{what} at epoch {trainer.current_epoch}, step {trainer.global_step}")

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        (self.root / f"process-{os.getpid()}").touch()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note(trainer, f"batch {batch_idx}")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.note(trainer, "sanity check" if trainer.sanity_checking else "validation")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.note(trainer, "epoch's end")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.note(trainer, "end")


class Draws(Callback):
    """Gives plain Lightning's resumed run the random state in which the run before it stopped, which it doesn't restore itself."""

    def __init__(self, states: list[torch.Tensor]) -> None:
        self.states = states

    @classmethod
    def now(cls) -> Draws:
        """With the state in which this process is: the CPU's, and a GPU's where it has used one."""
        gpus = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
        return cls([torch.get_rng_state(), *gpus])

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        # The loader's first draws come before on_train_start.
        torch.set_rng_state(self.states[0])
        for state in self.states[1:]:
            torch.cuda.set_rng_state(state)
