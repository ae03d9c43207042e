"""Workers that are stopped or killed at a collective, of those that torch dispatches; and how many of them steps begin."""

from __future__ import annotations

import json
import os
import traceback
from collections import Counter
from collections.abc import Iterator
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
        if trainer.global_rank == self.rank and torch.distributed.group.WORLD is not None and batch_idx == 1 and trainer.current_epoch == 0:
            self._mode = Struck(self.at, self.number, self.folder / "collectives")
            self._mode.__enter__()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None


#: Whose frames are around a call of a collective.
_WRAPPERS = ("distributed_c10d.py", "c10d_logger.py", "contextlib.py", "eval_frame.py", "_compile.py")


class Counted(TorchDispatchMode):
    """Counts collectives by their names and the files of the code that begins them, while there is a counter.

    Args:
        everyones: whether also those that others than this package's code begin.
    """

    counter: Counter[str] | None = None

    def __init__(self, everyones: bool = False) -> None:
        super().__init__()
        self._everyones = everyones

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d" and self.counter is not None:
            caller = next(_callers())
            if self._everyones or "lightning_autopar" in caller.parts:
                self.counter[f"{function.overloadpacket.__name__} in {caller.name}"] += 1
        return function(*args, **(kwargs or {}))


def _callers() -> Iterator[Path]:
    """The files of the code that called a collective, the innermost first."""
    files = [Path(frame.filename) for frame in reversed(traceback.extract_stack()) if frame.filename != __file__]
    return (file for file in files if file.name not in _WRAPPERS)


class Counts(pl.Callback):
    """Writes for each step of a rank which collectives this package began in it, between one batch's begin and the next one's.

    Args:
        folder: where each rank's file goes.
        skip: steps that aren't counted: the first ones find things out.
        everyones: see :class:`Counted`.
    """

    def __init__(self, folder: Path, skip: int = 3, *, everyones: bool = False) -> None:
        self.folder, self.skip = folder, skip
        self._mode = Counted(everyones)
        self._steps: list[Counter[str]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._mode.__enter__()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._close()
        self._mode.counter = Counter() if batch_idx >= self.skip else None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._mode.__exit__(None, None, None)
        (self.folder / f"counts{trainer.global_rank}.json").write_text(json.dumps(self._steps), encoding="utf-8")

    def _close(self) -> None:
        if self._mode.counter is not None:
            self._steps.append(self._mode.counter)

    def read(self) -> dict[int, list[dict[str, int]]]:
        """By rank, each counted step's."""
        files = sorted(self.folder.glob("counts*.json"))
        return {int(file.stem.removeprefix("counts")): json.loads(file.read_text(encoding="utf-8")) for file in files}
