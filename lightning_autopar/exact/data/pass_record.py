"""The record of a pass over an exact loader, from which a checkpoint is made, and the random state that all resumed loaders share.

Those of the loader's worker processes are sent with each batch, and restored in the workers of a loader that resumes: in the middle of an
epoch it starts new ones, which torch seeds as at the epoch's start, so that a dataset would draw the epoch's first numbers again. It loads
nothing, and knows no iterator.
"""

from __future__ import annotations

import logging
import pickle
import random
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch.utils.data import get_worker_info

from lightning_autopar.exact.data.batch_order import DrawLog, Order
from lightning_autopar.exact.random import generator_states as rng

if TYPE_CHECKING:
    from lightning_autopar.exact.data.loader_pass import LoaderPass

_log = logging.getLogger(__name__)

#: The key that holds a loader's state.
STATE_VERSION = "exact_loader_version"

#: Batches that a trainer may have fetched and not finished: Lightning prefetches one, and runs one.
_FETCHES_KEPT = 8


@dataclass(frozen=True, kw_only=True)
class EpochProgress:
    """How far Lightning has come in the current epoch, all loaders' batches counted once.

    Args:
        started: batches whose step was begun.
        finished: batches whose step was ended.
        last: whether the batch started last is the epoch's last one.
    """

    started: int
    finished: int
    last: bool


def fit_progress(trainer: Any) -> Callable[[], EpochProgress]:
    """The progress that an :class:`ExactLoader` for training asks for, read from a Lightning Trainer's own counters.

    A batch is finished once Lightning counts it as processed: a checkpoint of ``on_train_batch_end`` is written before Lightning counts the
    batch as completed, and yet Lightning resumes after that batch.
    """

    def ask() -> EpochProgress:
        batches = trainer.fit_loop.epoch_loop.batch_progress
        return EpochProgress(started=batches.current.ready, finished=batches.current.processed, last=batches.is_last_batch)

    return ask


class SharedRandomState:
    """A checkpoint's random state. Of the loaders that were saved together, the first one sets it, and the others must not set it again.

    Args:
        state: the random state, as it is in the checkpoint.
    """

    _latest: weakref.ref[SharedRandomState] | None = None

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._mark: torch.Tensor = state["torch"]
        self.done = False
        #: Whether some loader was in the middle of its data; else an epoch begins, and all loaders' iterators are made before any batch.
        self.mid_epoch = False
        self.waiting: list[weakref.ref[LoaderPass]] = []

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> SharedRandomState:
        """The object for a loader's state: that of another loader of the same checkpoint where there is one, else a new one."""
        latest = cls._latest() if cls._latest is not None else None
        if latest is None or latest.done or not torch.equal(latest._mark, state["rng"]["torch"]):
            latest = cls(state["rng"])
            cls._latest = weakref.ref(latest)
        latest.mid_epoch = latest.mid_epoch or "base" in state
        return latest

    def settle(self, state: rng.RngState, own: Mapping[str, Any]) -> None:
        """Set the random state; where that is done already, only that of the loader's own generators."""
        rng.restore({name: value for name, value in state.items() if name in own} if self.done else state, own)
        self.done = True


class PassRecord:
    """What happened in a pass so far.

    Args:
        order: the order of a map-style dataset; None for a stream, whose draws are logged here.
        samplers: the user's samplers, by name, whose epoch or state must be set again before a replay.
        length: how many batches the pass has; None if that isn't known.
    """

    def __init__(self, order: Order | None, samplers: Mapping[str, Any], length: int | None) -> None:
        self.order = order
        self.length = length
        self.base = 0
        self.handed = 0
        self.exhausted = False
        #: The state that this pass resumes from, until its random state is set.
        self.unsettled: dict[str, Any] | None = None
        self.samplers = samplers
        self.sampler_states = _sampler_states(samplers)
        #: The random states that the loader's workers sent, where they send any; and whether the workers live on in the next pass.
        self.workers: WorkerStates | None = None
        self.workers_persist = False
        self._log = DrawLog()
        #: For the last batches handed out: the position in this pass, and the random states before and after the fetch.
        self.fetches: deque[tuple[int, rng.RngState, rng.RngState]] = deque(maxlen=_FETCHES_KEPT)

    @property
    def log(self) -> DrawLog:
        """The draws of this pass."""
        return self._log if self.order is None else self.order.log

    @log.setter
    def log(self, log: DrawLog) -> None:
        self._log = log

    def state_dict(self, progress: EpochProgress | None, own: Mapping[str, Any]) -> dict[str, Any]:
        """The position and random states for a checkpoint."""
        if self.unsettled is not None:
            return dict(self.unsettled)
        now = rng.capture(own)
        finished, running, last = self.handed, False, False
        if progress is not None:
            finished, running, last = progress.finished - self.base, progress.started > progress.finished, progress.last
        if finished >= self.handed and (self.exhausted or self.handed == self.length or (last and not running and self.handed > 0)):
            begins = {STATE_VERSION: 1, "finished": 0, "rng": rng.to_plain(now)}
            return begins if self.workers is None or not self.workers_persist else {**begins, "workers": self.workers.at(self.handed)}
        ahead = [(before, after) for position, before, after in self.fetches if position >= finished]
        if not 0 <= self.handed - finished == len(ahead):
            _log.warning("a batch of the loader's previous round isn't finished yet; a run resumed from here leaves it out")
            finished, ahead = self.handed, []
        if running and ahead:
            now = ahead[-1][1]
        state: dict[str, Any] = {STATE_VERSION: 1, "finished": finished, "base": self.base, "log": self.log.to_plain()}
        state["exact"] = self.log.complete
        state["made"] = self.order.made if self.order else 0
        state["ended"] = self.order.ended if self.order else False
        state["samplers"] = self.sampler_states
        state["ahead"] = [rng.to_plain(before) for before, _ in ahead]
        state["running"] = running and bool(ahead)
        state["rng"] = rng.to_plain(now)
        if self.workers is not None:
            state["workers"] = self.workers.at(finished)
        return state


def _sampler_states(samplers: Mapping[str, Any]) -> dict[str, Any]:
    """What the samplers' orders depend on besides random draws: the epoch that was set, or a state of their own."""
    states: dict[str, Any] = {}
    for name, sampler in samplers.items():
        if callable(getattr(sampler, "state_dict", None)) and callable(getattr(sampler, "load_state_dict", None)):
            states[name] = {"state": sampler.state_dict()}
        elif callable(getattr(sampler, "set_epoch", None)) and isinstance(getattr(sampler, "epoch", None), int):
            states[name] = {"epoch": sampler.epoch}
    return states


def load_sampler_states(samplers: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Give the samplers back what :class:`PassRecord` found in them."""
    for name, sampler in samplers.items():
        state = states.get(name, {})
        if "state" in state:
            sampler.load_state_dict(state["state"])
        elif "epoch" in state:
            sampler.set_epoch(state["epoch"])


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
