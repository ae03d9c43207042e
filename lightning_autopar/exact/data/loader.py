"""The exact, position-aware data loader: the user's global batches, in the user's order, cut for one rank, resumable at any batch.

Wraps a DataLoader after Lightning processed it. Every draw from a random generator happens when and as often as in the plain DataLoader in
one process. Which strategy runs, and how its ranks communicate, it doesn't know: it is told its rank, and given a function that broadcasts.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, IterDataPipe, MapDataPipe

from lightning_autopar._lightning import Trainer, pl_worker_init_function
from lightning_autopar._root import LIGHTNING
from lightning_autopar.exact.data.batch_order import Order, draws_at_start_only, draws_nothing, index_sampler
from lightning_autopar.exact.data.collate import CollateAll, CollateParts, CollateRows, CollateSamples
from lightning_autopar.exact.data.loader_pass import LoaderPass, alone
from lightning_autopar.exact.data.pass_record import (
    STATE_VERSION,
    CollateAndTell,
    EpochProgress,
    GoOn,
    PassRecord,
    SharedRandomState,
    states_of,
)
from lightning_autopar.exact.data.rank_share import BatchShare, Dealing
from lightning_autopar.exact.random import generator_states as rng

__all__ = ["BatchShare", "ExactLoader", "is_loader_state", "orders_alike", "unwrapped"]

#: What Lightning reads from a DataLoader, for iterables that are no DataLoader.
_WITHOUT_WORKERS: Mapping[str, Any] = {"num_workers": 0, "multiprocessing_context": None, "persistent_workers": False, "pin_memory": False}
#: Attributes of samplers and datasets (DistributedSampler's, timm's, litdata's) that say among how many processes they divide the data.
_COUNTS_PROCESSES = ("num_replicas", "world_size")
#: The variables in which launchers tell it, and one that they alone set.
_TOLD_BY = {"WORLD_SIZE": "LOCAL_WORLD_SIZE", "SLURM_NTASKS": "SLURM_PROCID", "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK"}
#: How many shares are kept where nobody takes them; who takes them is a batch or two behind.
_SHARES_KEPT = 64

Split = Literal["indices", "samples", "rows", "none"]
Source = Literal["order", "stream", "iterable"]


def is_loader_state(state: object) -> bool:
    """Whether this is a state that :meth:`ExactLoader.state_dict` returned."""
    return isinstance(state, Mapping) and STATE_VERSION in state


def unwrapped(loader: Any) -> Any:
    """The user's own loader in an :class:`ExactLoader`; anything else is returned as it is."""
    return loader.wrapped if isinstance(loader, ExactLoader) else loader


class ExactLoader(DataLoader[Any]):
    """One rank's part of every batch of the user's loader.

    Attributes that it doesn't define (``dataset``, ``sampler``, ``num_workers``, …) are read from the user's loader, and set there.

    - A map-style dataset's indices are split before anything is loaded: a rank loads only the samples that it is dealt.
    - Every rank reads the whole stream of an IterableDataset, and collates its own samples of each batch.
    - Where the dataset makes the batches itself (``batch_size=None``), or the loader isn't a plain DataLoader, the rank's rows are cut out
      of the batch's tensors.

    All ranks follow rank 0's random state where the order is drawn, so all must begin an epoch together. With more than one rank, each
    rank's augmentation of a map-style dataset draws from a random stream of its own, since no rank sees all samples; ``load_all`` avoids
    that. Batches come in order, whatever the loader's ``in_order`` is: out of order, no two runs would be the same.

    Args:
        loader: the user's loader; any iterable of batches will do.
        dealing: which of a batch's samples each rank gets; by default one in turn: rank r has the samples ``[r::world_size]``.
        whole_batches: for prediction: rank r gets the whole batches r, r + world_size, … In the last round, ranks without one are given
            the last batch again, with a share of no rows.
        sync: gives every rank the object that rank 0 called it with; a collective. Ranks that all get the same batches need it as well.
            None with one rank, or where every rank's order is the same without it (a map-style dataset read in sequence).
        boundary: called with a batch's position just before it is fetched, when all state is as a checkpoint saves it.
        progress: how far training has come. Without it, each batch handed out counts as finished when a state is taken.
        load_all: every rank loads all samples of a map-style dataset's batch and keeps its own: world_size times the work, and the
            dataset's random draws are those of one process.
        collate_all: every rank collates whole batches, too, and takes its rows of them: the batches, and the collate function's random
            draws, are those of one process.
        by_samples: with ``collate_all``, a batch that can't be cut into rows is collated from the rank's own samples.
        alike: whether all ranks called it with the same number; a collective. Where each rank collates its own samples, the ranks compare
            their parts' shapes at every batch; if the shapes differ, as some parts are padded further, each rank collates the whole batch.
        of_trainer: whether a Trainer has it, which gives it to users, too: code that isn't Lightning's iterates over the user's loader
            (``update_bn(trainer.train_dataloader, self.average)`` in a hook), and has the whole batches.

    Raises:
        ValueError: if rank, world size or dealing make no sense, or the loader already distributes its samples.
    """

    wrapped: Any
    _rank: int
    _world_size: int
    _dealing: Dealing
    _whole_batches: bool
    _load_all: bool
    _collate_all: bool
    _by_samples: bool
    _of_trainer: bool
    _alike: Callable[[int], bool] | None
    _sync: Callable[[object], object] | None
    _boundary: Callable[[int], None] | None
    _progress: Callable[[], EpochProgress] | None
    _source: Source
    _split: Split
    _own: dict[str, Any]
    _order: Order | None
    _track: PassRecord | None
    _resume: dict[str, Any] | None
    _shared_random: SharedRandomState
    #: This rank's shares of the batches that were handed out, the earliest first; whoever sees a batch takes its share.
    shares: deque[BatchShare]

    def __init__(
        self,
        loader: Any,
        *,
        rank: int = 0,
        world_size: int = 1,
        dealing: Dealing | None = None,
        whole_batches: bool = False,
        sync: Callable[[object], object] | None = None,
        boundary: Callable[[int], None] | None = None,
        progress: Callable[[], EpochProgress] | None = None,
        load_all: bool = False,
        collate_all: bool = False,
        by_samples: bool = False,
        alike: Callable[[int], bool] | None = None,
        parts: int = 1,
        of_trainer: bool = False,
    ) -> None:
        # DataLoader's own constructor is left out on purpose: its attributes are those of the user's loader.
        if isinstance(loader, ExactLoader):
            loader = loader.wrapped
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in a world of {world_size}; give a rank from 0 to {world_size - 1}")
        dealing = dealing or Dealing.even(world_size)
        if dealing.holders != world_size:
            raise ValueError(
                f"the samples are dealt out to {dealing.holders} ranks, but there are {world_size}; give a dealing for as many"
            )
        own: dict[str, Any] = {}
        self.__dict__.update(wrapped=loader, _rank=rank, _world_size=world_size, _dealing=dealing, _whole_batches=whole_batches)
        self.__dict__.update(_load_all=load_all or collate_all, _collate_all=collate_all, _by_samples=by_samples, _alike=alike)
        self.__dict__.update(_parts=parts, _of_trainer=of_trainer, _sync=sync, _boundary=boundary, _progress=progress, _own=own)
        self.__dict__.update(_source=_find_source(loader), _inner=None, _order=None, _track=None, _resume=None, _shared_random=None)
        self.__dict__.update(shares=deque(maxlen=_SHARES_KEPT), _split=self._find_split())
        if world_size > 1 or sync is not None:
            _check_distributable(loader, sync is not None)
        _check_takes_all(loader)

    # -- the user's loader, seen through --------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name == "wrapped" or (name.startswith("__") and name.endswith("__")):  # it is being copied or unpickled: there is no loader yet
            raise AttributeError(name)
        if name in _WITHOUT_WORKERS and not isinstance(self.wrapped, DataLoader):
            return getattr(self.wrapped, name, _WITHOUT_WORKERS[name])
        return getattr(self.wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__ or name == "_iterator":
            object.__setattr__(self, name, value)
        else:
            setattr(self.wrapped, name, value)

    @property
    def _iterator(self) -> Any:
        """The persistent workers' iterator, where Lightning looks for it to shut them down."""
        return getattr(self.wrapped if self._source == "iterable" else self._inner, "_iterator", None)

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        self.__dict__.update(_inner=None, _order=None)
        if self._source == "iterable" and hasattr(self.wrapped, "_iterator"):
            self.wrapped._iterator = value

    def __len__(self) -> int:
        """How many batches this rank gets in an epoch: as many as the loader has; with whole batches, one a round."""
        length = alone(len, self.wrapped)
        return -(-length // self._world_size) if self._whole_batches else length

    @property
    def knows_samples(self) -> bool:
        """Whether a share counts samples. A batch may have more or fewer rows than samples."""
        return self._split in ("indices", "samples")

    @property
    def generators(self) -> Mapping[str, Any]:
        """The generator objects that the user gave to the loader, its samplers or its dataset, by their names in a state."""
        return dict(self._own)

    # -- iteration ------------------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._of_trainer and not f"{sys._getframe(1).f_globals.get('__name__', '')}.".startswith((*LIGHTNING, "lightning_autopar.")):
            return alone(iter, self.wrapped)
        self.__dict__["_own"] = rng.find_generators(self._places())
        return LoaderPass(self)

    def _places(self) -> list[tuple[str, object]]:
        loader = self.wrapped
        sampler = index_sampler(loader) if self._source == "order" else None
        places = [("loader", loader), ("sampler", getattr(loader, "sampler", None)), ("batch_sampler", sampler)]
        return [*places, ("batch_sampler.sampler", getattr(sampler, "sampler", None)), ("dataset", getattr(loader, "dataset", None))]

    def _find_split(self) -> Split:
        if self._whole_batches:
            return "none"
        # So it is where batch_size=None and the sampler is a BatchSampler: the documented way to have a dataset load a batch at a time.
        if self._indexed:
            if self.wrapped.batch_sampler is not None:
                return "samples" if self._load_all and self._world_size > 1 else "indices"
            return "rows" if self._collate_all and self._world_size > 1 else "indices"
        if self._source == "stream" and self.wrapped.batch_sampler is not None:
            return "samples"
        return "rows"

    def _make_inner(self, workers: Mapping[str, Any] | None = None, first: int = 0) -> Any:
        """The iterable that loads: a torch DataLoader like the user's, with another order and another collate function.

        Args:
            workers: what is known of the workers of the earlier loader whose work this one continues.
            first: the epoch's batch that it begins with.
        """
        if self._inner is not None and workers is None:  # its persistent workers hold the dataset
            return self._inner
        loader = self.wrapped
        if self._source == "iterable":
            return loader
        collate = loader.collate_fn if self._parts == 1 else CollateParts(loader.collate_fn, self._parts)
        if self._counts:
            batched = loader.batch_sampler is not None
            whole = self._collate_all and self._split == "samples" and self._world_size > 1
            samples = partial(CollateAll, by_samples=self._by_samples) if whole else CollateSamples
            collate = (samples if batched else CollateRows)(collate, *self._cutting())
        init = self._worker_init()
        if self._tells:
            collate = CollateAndTell(collate)
            if workers is not None:
                init = GoOn(base=int(workers["base"]), first=first, states=tuple(states_of(workers)), then=init)
        # Persistent workers are seeded once: torch's draw for those that replace them must not be one more draw of the run.
        lived = workers is not None and loader.persistent_workers
        generator = torch.Generator() if lived else loader.generator
        settings: dict[str, Any] = {"collate_fn": collate, "worker_init_fn": init, "generator": generator}
        for name in ("num_workers", "pin_memory", "timeout", "persistent_workers"):
            settings[name] = getattr(loader, name)
        if loader.num_workers > 0:
            settings.update(prefetch_factor=loader.prefetch_factor, multiprocessing_context=loader.multiprocessing_context)
        if getattr(loader, "pin_memory_device", ""):
            settings["pin_memory_device"] = loader.pin_memory_device
        if self._source == "order":
            batched = loader.batch_sampler is not None
            order = Order(
                index_sampler(loader),
                rank=self._rank,
                world_size=self._world_size,
                split=self._dealing if self._split == "indices" else None,
                whole=self._whole_batches,
                batched=self._indexed,
                own=self._own,
                watch=not draws_at_start_only(loader) or bool(self._own),
            )
            self.__dict__["_order"] = order
            settings |= {"batch_sampler": order} if batched else {"sampler": order, "batch_size": None}
        else:
            settings |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        inner: DataLoader[Any] = DataLoader(loader.dataset, **settings)
        # In the next epoch worker 0 has the first batch again: workers that took other workers' places can't go on then.
        keep = loader.persistent_workers and (workers is None or first % loader.num_workers == 0)
        self.__dict__["_inner"] = inner if keep else None
        return inner

    @property
    def _tells(self) -> bool:
        """Whether the loader's workers send their random states, which a loader that resumes must give to its own workers.

        The workers of a stream need none: they read its batches again, and so come to the same states.
        """
        return self._load_all and self._source == "order" and self.wrapped.num_workers > 0 and not self._whole_batches

    @property
    def _counts(self) -> bool:
        """Whether collating returns the number of samples as well, because the indices don't tell it."""
        return self._split in ("samples", "rows") or (self._split == "none" and not self._indexed)

    @property
    def _indexed(self) -> bool:
        """Whether the sampler gives batches of indices."""
        loader = self.wrapped
        return self._source == "order" and (loader.batch_sampler is not None or isinstance(loader.sampler, BatchSampler))

    def _cutting(self) -> tuple[int, Dealing]:
        return (0, Dealing.even(1)) if self._split == "none" else (self._rank, self._dealing)

    def collated_whole(self, indices: Any) -> tuple[int, Any]:
        """Loads and collates the batch with these indices, whole, in this process: its number of samples, and this rank's part."""
        loader = self.wrapped
        if loader.batch_sampler is None:
            return CollateRows(loader.collate_fn, self._rank, self._dealing)(loader.dataset[indices])
        fetch = getattr(loader.dataset, "__getitems__", None)
        samples = fetch(indices) if fetch else [loader.dataset[index] for index in indices]
        return CollateAll(loader.collate_fn, self._rank, self._dealing)(samples)

    def _worker_init(self) -> Callable[[int], None] | None:
        """The user's worker_init_fn, with the seed that this rank's workers must have."""
        function: Callable[[int], None] | None = self.wrapped.worker_init_fn
        if isinstance(function, partial) and function.func is pl_worker_init_function:
            # Lightning seeds by the process's rank, but ranks with the same part of a batch, or the same stream, must load it alike.
            function = partial(pl_worker_init_function, rank=0)
        if self._world_size > 1 and (self._split == "indices" or (self._whole_batches and self._source == "order")):
            # Each rank's workers see other samples: with equal seeds they would augment them alike.
            return rng.RankSeed(self._rank, function) if self._rank else function
        return function

    @property
    def _draws_late(self) -> bool:
        """Whether the order may depend on the main process's random state after an epoch's first batch."""
        if self._source == "order":
            return not draws_at_start_only(self.wrapped)
        return self._source == "iterable" or not self.wrapped.num_workers

    @property
    def _isolates(self) -> bool:
        """Whether the dataset's draws in this process must be kept from the global random state, which is the same on all ranks."""
        return self._world_size > 1 and self._source == "order" and self._split in ("indices", "none") and self.wrapped.num_workers == 0

    # -- checkpoints ----------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The run's position in the data, and the random states there; the same for any number of ranks.

        At the end of an epoch it says that the next epoch begins.
        """
        track = self._track
        if self._resume is not None:
            return dict(self._resume)
        if track is None:
            return {STATE_VERSION: 1, "finished": 0, "rng": rng.to_plain(rng.capture(self._own))}
        return track.state_dict(self._progress() if self._progress else None, self._own)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` says; takes effect at the next batch, whether its iterator was made before or is made later.

        It doesn't read the batches that are done from a map-style dataset; from an IterableDataset it reads and drops them.

        Raises:
            ValueError: if the state is not of an exact loader of this version, or this loader hands out whole batches.
        """
        if state_dict.get(STATE_VERSION) != 1:
            found = ", ".join(map(str, state_dict)) or "nothing"
            raise ValueError(
                f"the checkpoint's loader state isn't one that this version reads (it holds {found}); resume it with the loader that it "
                'was saved with, or remove "combined_loader" from the checkpoint\'s fit loop to begin the epoch anew'
            )
        if self._whole_batches:
            raise ValueError("a prediction can't be resumed in the middle of its data; predict from the start")
        self.__dict__.update(_resume=dict(state_dict), _shared_random=SharedRandomState.of(state_dict))


def _find_source(loader: Any) -> Source:
    """How to get a loader's batches: by its indices, as a stream of samples, or only by iterating over the loader itself."""
    kind = type(loader)
    if not isinstance(loader, DataLoader) or kind.__iter__ is not DataLoader.__iter__:
        return "iterable"
    if getattr(kind, "_get_iterator", None) is not getattr(DataLoader, "_get_iterator", None):
        return "iterable"
    if isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        return "iterable"
    return "stream" if isinstance(loader.dataset, IterableDataset) else "order"


def orders_alike(loader: Any) -> bool:
    """Whether a loader's order is the same on every rank without communication; asking is a collective that every rank must join."""
    return _find_source(loader) == "order" and draws_nothing(loader)


def _check_distributable(loader: Any, synced: bool) -> None:
    """Raise for what would give the ranks different global batches."""
    for sampler in (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)):
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            raise ValueError(
                f"the loader's {type(sampler).__name__} already takes 1 of {sampler.num_replicas} parts of the data, and the batches "
                "would be split again; remove it (shuffle=True does the same), or give it num_replicas=1, rank=0"
            )
    if isinstance(getattr(loader, "dataset", None), (IterDataPipe, MapDataPipe)):
        raise ValueError("a DataPipe splits its samples over the ranks by itself, and the batches would be split again; use a Dataset")
    if not synced and not orders_alike(loader):
        raise ValueError("all ranks must use one order: give sync a function that broadcasts from rank 0")


def _check_takes_all(loader: Any) -> None:
    """Raise for what a launcher (torchrun, srun) told of several processes, so that it takes a part of the data by itself."""
    told = [os.environ.get(size) for size, sign in _TOLD_BY.items() if sign in os.environ]
    for count in {int(each) for each in told if each and each.isdecimal()} - {0, 1}:
        for name in ("dataset", "sampler", "batch_sampler"):
            path = _takes_part(getattr(loader, name, None), count, name)
            if path is not None:
                raise ValueError(
                    f"the loader's {path} is {count}: it takes 1 of {count} parts of the data, as its environment told it when it was "
                    "made, and the batches would be split again; make it in train_dataloader() or in the DataModule's setup(), which are "
                    "told of one process"
                )


def _takes_part(owner: Any, processes: int, path: str, depth: int = 3) -> str | None:
    """Which attribute says that a part of the data is taken, as one of so many processes; None where none does."""
    if isinstance(owner, (Tensor, Module, Trainer, ModuleType, FunctionType, type)):
        return None
    for name, value in getattr(owner, "__dict__", {}).items():
        if name in _COUNTS_PROCESSES and type(value) is int and value == processes:
            return f"{path}.{name}"
        if depth and (found := _takes_part(value, processes, f"{path}.{name}", depth - 1)) is not None:
            return found
    return None
