"""Workers that are stopped or killed at a collective: the n-th that torch dispatches in one of them, whatever library makes it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Struck(TorchDispatchMode):
    """Counts the collectives of this process, and sends it a signal at one of them.

    Args:
        at: which, from 1; 0 for none.
        number: the signal.
        names: a file in which each one's name is a line.
    """

    def __init__(self, at: int, number: int, names: Path) -> None:
        super().__init__()
        self._at, self._number, self._names = at, number, names
        self._count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self._count += 1
            with self._names.open("a", encoding="utf-8") as file:
                file.write(f"{function.overloadpacket.__name__}\n")
            if self._count == self._at:
                os.kill(os.getpid(), self._number)
        return function(*args, **(kwargs or {}))


class Strikes(pl.Callback):
    """Strikes a rank at its n-th collective after the run's second batch has begun; before that a step isn't like the later ones.

    Args:
        at: see :class:`Struck`.
        number: see :class:`Struck`.
        folder: for the collectives' names.
        rank: whose.
    """

    def __init__(self, at: int, number: int, folder: Path, rank: int = 1) -> None:
        self.at, self.number, self.folder, self.rank = at, number, folder, rank
        self._mode: Struck | None = None

    @property
    def names(self) -> list[str]:
        """The collectives of the rank, in the order in which it came to them."""
        path = self.folder / "collectives"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == self.rank and torch.distributed.is_initialized() and batch_idx == 1 and trainer.current_epoch == 0:
            self._mode = Struck(self.at, self.number, self.folder / "collectives")
            self._mode.__enter__()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None
