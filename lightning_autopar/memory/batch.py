"""The first batch of a run, as the module's step would get it, drawn without worker processes. Knows Lightning; nothing of fakes or memory.

Runs in a forked child: the user's ``prepare_data``, ``setup`` and loaders are called as Lightning will call them later.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader, IterableDataset

from lightning_autopar._lightning_compat import combined_mode, loader_source, transfer_batch

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

BatchKind = Literal["map", "iterable", "combined", "other"]


@dataclass(frozen=True, kw_only=True)
class FirstBatch:
    """A batch and how to make smaller ones.

    Args:
        batch: as the module's step gets it, on the CPU.
        samples: what it was collated from; None where that isn't known (several loaders, a loader of ready batches).
        collate: makes a batch of samples; None where they aren't known.
        batch_size: samples in it; of several loaders the smallest; 0 where it can't be told.
        draws: where random numbers were drawn in making it: ``"samples"`` (augmentation in the dataset), ``"collate"`` (masking, say).
        kind: a loader over a map-style or iterable dataset, several loaders, or some other iterable.
    """

    batch: Any
    samples: list[Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    batch_size: int = 0
    kind: BatchKind = "other"
    draws: tuple[str, ...] = ()
    epoch_batches: int | None = None


def first_batch(module: LightningModule, trainer: Trainer, stage: str = "fit", *, prepared: bool = False) -> FirstBatch:
    """Do what Lightning does up to a stage's first batch, and return that.

    Args:
        module: the user's module, attached to the trainer; its ``prepare_data`` and ``setup`` are called.
        trainer: with its loaders or DataModule attached.
        stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        prepared: whether module and DataModule have been set up already.

    Raises:
        ValueError: if there is no loader for the stage, or it has no batch.
    """
    sources = [source for source in (getattr(trainer, "datamodule", None), module) if source is not None]
    if not prepared:
        for source in sources:
            source.prepare_data()
        for source in sources:
            source.setup(stage=stage)
    loader = loader_source(trainer, stage)
    if loader is None:
        raise ValueError(f"there is no data for the stage {stage!r}; pass loaders to the trainer or define the module's dataloader hook")
    combined = (
        loader if isinstance(loader, CombinedLoader) else CombinedLoader(loader, "max_size_cycle" if stage == "fit" else "sequential")
    )
    loaders, structure = tree_flatten(combined.iterables)
    if not loaders:
        raise ValueError(f"there is no loader for the stage {stage!r}: {combined.iterables!r}; give it one")
    if combined_mode(combined) == "sequential" or combined.iterables is loaders[0]:
        first = _draw(loaders[0])
    else:
        parts = [_draw(each) for each in loaders]
        sizes = [part.batch_size for part in parts if part.batch_size]
        first = FirstBatch(
            batch=tree_unflatten([part.batch for part in parts], structure), batch_size=min(sizes, default=0), kind="combined"
        )
    batch = transfer_batch(module, first.batch)
    size = first.batch_size or batch_size_of(batch)
    epoch_batches = _epoch_batches(loaders, combined_mode(combined), trainer.limit_train_batches) if stage == "fit" else None
    return replace(first, batch=batch, batch_size=size, epoch_batches=epoch_batches)


def _epoch_batches(loaders: list[Any], mode: str, limit: int | float | None) -> int | None:
    """As Lightning counts them (``_FitLoop.setup_data``, ``CombinedLoader._MODES``); None where a loader can't tell its length."""
    lengths: list[float] = []
    for loader in loaders:
        length: float
        try:
            length = len(loader)
        except (TypeError, NotImplementedError):
            length = math.inf
        if isinstance(limit, int):
            length = min(length, limit)
        elif limit is not None and length < math.inf:
            length = int(length * limit)
        lengths.append(length)
    found = sum(lengths) if mode == "sequential" else min(lengths) if mode == "min_size" else max(lengths)
    return int(found) if found < math.inf else None


def _draw(loader: Any) -> FirstBatch:
    """The first batch of one loader, in this process."""
    if isinstance(loader, DataLoader):
        if type(loader).__iter__ is DataLoader.__iter__ and loader.batch_sampler is not None:
            return _draw_by_hand(loader)
        loader = copy.copy(loader)
        # Workers would outlive the call, and pinning needs a GPU.
        loader.num_workers, loader.timeout, loader.pin_memory, loader._iterator = 0, 0, False, None
    for batch in loader:
        return FirstBatch(batch=batch, batch_size=batch_size_of(batch))
    raise ValueError(f"the loader {loader!r} has no batch; give it data, or make its batch_size smaller if it drops the last batch")


def _draw_by_hand(loader: DataLoader[Any]) -> FirstBatch:
    """Samples and their batch, as the loader's fetcher makes them (``torch.utils.data._utils.fetch``)."""
    samples: list[Any]
    before = _random_states()
    if isinstance(loader.dataset, IterableDataset):
        samples = list(itertools.islice(iter(loader.dataset), loader.batch_size))
        if loader.drop_last and len(samples) < (loader.batch_size or 0):
            samples = []
        kind: BatchKind = "iterable"
    else:
        indices = list(next(iter(loader.batch_sampler), []))  # type: ignore[arg-type]
        before = _random_states()
        dataset: Any = loader.dataset
        fetch = getattr(dataset, "__getitems__", None)
        samples = (list(fetch(indices)) if fetch else [dataset[index] for index in indices]) if indices else []
        kind = "map"
    if not samples:
        raise ValueError(f"the loader over {type(loader.dataset).__name__} has no batch; give it data, or set drop_last=False")
    loaded = _random_states()
    batch = loader.collate_fn(samples)
    draws = [name for name, moved in (("samples", loaded != before), ("collate", _random_states() != loaded)) if moved]
    return FirstBatch(
        batch=batch,
        samples=samples,
        collate=loader.collate_fn,
        batch_size=len(samples),
        kind=kind,
        draws=tuple(draws) if kind == "map" else (),
    )


def _random_states() -> tuple[bytes, object, object]:
    """The generators that a dataset may draw from in this process, as something to compare."""
    numpy_state = numpy.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), (numpy_state[1].tobytes(), *numpy_state[2:])  # type: ignore[index]


def batch_size_of(batch: Any) -> int:
    """The leading dimension of the first tensor that has one, else the length of the first list of other things; else 0."""
    for tensor in tensors_of(batch):
        if tensor.dim():
            return tensor.shape[0]
    lists = [batch, *(batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ())]
    return next((len(item) for item in lists if isinstance(item, (list, tuple)) and item and not isinstance(item[0], (list, tuple))), 0)


def tensors_of(batch: Any) -> list[Tensor]:
    """Every tensor in a batch, also in mappings and plain objects that torch's pytree takes for leaves."""
    return list(_tensors(batch, set()))


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    if value is None or isinstance(value, (str, bytes, int, float, type)) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        children: Iterable[Any] = value.values()
    elif isinstance(value, (list, tuple)):
        children = value
    else:
        children = getattr(value, "__dict__", {}).values()
    for child in children:
        yield from _tensors(child, seen)
