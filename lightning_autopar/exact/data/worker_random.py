"""The random states of a loader's worker processes: sent with each batch, and restored in the workers of a loader that resumes.

A loader that resumes in the middle of an epoch starts new workers, which torch seeds as at the epoch's start. A dataset that draws in its
workers would then draw the epoch's first numbers again. Knows workers and random states; no loader of ours, no rank.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch.utils.data import get_worker_info

from lightning_autopar.exact import random_state as rng

#: The most batches that may be handed out and not yet finished, as in ``pass_record``.
_AHEAD = 8


@dataclass(frozen=True)
class CollateAndTell:
    """Collates a batch, and adds the worker's random state after it, as bytes. Runs in the loader's workers."""

    collate: Callable[[Any], Any]

    def __call__(self, samples: Any) -> tuple[Any, bytes]:
        """Collate one batch."""
        collated = self.collate(samples)
        return collated, pickle.dumps(rng.capture(_generators(), cuda=False), protocol=pickle.HIGHEST_PROTOCOL)


@dataclass(frozen=True, kw_only=True)
class GoOn:
    """A ``worker_init_fn``: gives a worker the random state of the earlier loader's worker whose work it continues, then calls the user's.

    Args:
        base: the seed that the earlier loader gave its workers; each adds its number.
        first: the epoch's batch that worker 0 begins with.
        states: each worker's in the earlier loader; None for a worker that had loaded nothing.
        then: the user's.
    """

    base: int
    first: int
    states: tuple[rng.RngState | None, ...]
    then: Callable[[int], None] | None

    def __call__(self, worker_id: int) -> None:
        """Seed one worker, in its process."""
        number = (self.first + worker_id) % len(self.states)
        info = get_worker_info()
        assert info is not None, "it runs in a worker"
        for name, value in (("id", number), ("seed", self.base + number)):  # set what the user's code reads; torch keeps it private
            object.__setattr__(info, name, value)
        # As torch.utils.data._utils.worker._worker_loop seeds it.
        random.seed(self.base + number)
        torch.manual_seed(self.base + number)
        from torch.utils.data._utils.worker import _generate_state

        numpy.random.seed(_generate_state(self.base, number))
        if self.then is not None:
            self.then(number)
        state = self.states[number]
        if state is not None:
            rng.restore(state, _generators())


@dataclass(kw_only=True)
class WorkerStates:
    """The random states that workers sent in a pass.

    Args:
        base: the seed that torch's iterator gave its workers.
        states: each worker's state before the batches that are remembered.
    """

    base: int
    states: list[rng.RngState | None]
    _told: dict[int, bytes] = field(default_factory=dict)

    def note(self, position: int, told: bytes) -> None:
        """A batch was handed out."""
        self._told[position] = told
        while len(self._told) > len(self.states) + _AHEAD:
            oldest = next(iter(self._told))
            self.states[oldest % len(self.states)] = pickle.loads(self._told.pop(oldest))

    def at(self, finished: int) -> dict[str, Any]:
        """The workers' states after so many batches of the pass, as plain values."""
        states = list(self.states)
        for position, told in self._told.items():
            if position < finished:
                states[position % len(states)] = pickle.loads(told)
        return {"base": self.base, "states": [None if state is None else rng.to_plain(state) for state in states]}


def states_of(data: Mapping[str, Any]) -> list[rng.RngState | None]:
    """The workers' states, out of the values that :meth:`WorkerStates.at` returned."""
    return [None if state is None else rng.from_plain(state) for state in data["states"]]


def _generators() -> dict[str, Any]:
    """Generator objects of this worker's copy of the dataset."""
    info = get_worker_info()
    assert info is not None, "it runs in a worker"
    return rng.find_generators([("dataset", info.dataset)])
