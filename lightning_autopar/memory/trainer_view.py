"""The trainer as a rehearsed module sees it: reads pass through, nothing is written, logged or communicated. Knows Lightning's names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins.precision import Precision

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

#: What ``trainer.estimated_stepping_batches`` answers where the true number needs the loaders; it shapes schedules, never memory.
_SOME_STEPS = 10_000


class Silent:
    """Stands in for a logger: whatever is asked of it, it answers with itself, and nothing happens."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Whatever is done with it comes to nothing."""
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        return None

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return True

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: Any) -> None:
        return None


class TrainerView:
    """The trainer, read-only: reads pass through, writes vanish, nothing is logged or saved.

    Args:
        trainer: the trainer; None where there is none yet.
    """

    barebones = True
    progress_bar_callback = None

    def __init__(self, trainer: Trainer | None) -> None:
        object.__setattr__(self, "_real", trainer)
        object.__setattr__(self, "_own", {"optimizers": [], "lr_scheduler_configs": [], "precision_plugin": Precision()})
        object.__setattr__(self, "asked_for_world", False)

    @property
    def num_training_batches(self) -> int | float:
        """The true number where it is known, or some number: the loaders aren't set up."""
        known = getattr(self._real, "num_training_batches", 0)
        return known if 0 < known < float("inf") else _SOME_STEPS

    @property
    def strategy(self) -> Any:
        """The trainer's strategy without its communication, which nothing has set up."""
        return StrategyView(getattr(self._real, "strategy", None))

    def give(self, **values: Any) -> None:
        """Answer with these values instead of the trainer's."""
        self._own.update(values)

    @property
    def logger(self) -> Any:
        """A silent one, if there is any."""
        return Silent() if self._real is not None and self._real.loggers else None

    @property
    def loggers(self) -> list[Any]:
        """As :attr:`logger`."""
        return [Silent()] if self._real is not None and self._real.loggers else []

    @property
    def estimated_stepping_batches(self) -> int:
        """``max_steps``, or some number; the true one would set the loaders up."""
        steps = getattr(self._real, "max_steps", -1)
        return steps if steps > 0 else _SOME_STEPS

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Saves nothing."""

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints nothing."""

    def __getattr__(self, name: str) -> Any:
        if name in ("world_size", "num_devices"):
            object.__setattr__(self, "asked_for_world", True)
        own = object.__getattribute__(self, "_own")
        if name in own:
            return own[name]
        real = object.__getattribute__(self, "_real")
        if real is None:
            if name in _WITHOUT_TRAINER:
                return _WITHOUT_TRAINER[name]
            raise AttributeError(f"there is no trainer to ask for {name!r}")
        return getattr(real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        return None


class StrategyView:
    """A strategy of one process: nobody to wait for, nothing to exchange; reads pass through.

    Args:
        strategy: the trainer's own; None where there is none.
    """

    def __init__(self, strategy: Any) -> None:
        self._real = strategy
        self.root_device = torch.device("cpu")

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for nobody."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """What the only process has."""
        return obj

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Of one process."""
        return tensor

    all_gather = reduce_boolean_decision = reduce

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


_WITHOUT_TRAINER: dict[str, Any] = {
    "accumulate_grad_batches": 1,
    "callbacks": [],
    "current_epoch": 0,
    "datamodule": None,
    "global_rank": 0,
    "global_step": 0,
    "gradient_clip_algorithm": None,
    "gradient_clip_val": None,
    "is_global_zero": True,
    "local_rank": 0,
    "max_epochs": 1,
    "max_steps": -1,
    "num_devices": 1,
    "num_nodes": 1,
    "is_last_batch": False,
    "world_size": 1,
}
