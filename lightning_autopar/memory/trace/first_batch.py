"""The first batch of a run, as the module's step would get it, drawn without worker processes. Knows Lightning; nothing of fakes or memory.

Runs in a forked child: the user's ``prepare_data``, ``setup`` and loaders are called as Lightning will call them later.
"""

from __future__ import annotations

import copy
import dis
import itertools
import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from lightning_autopar._lightning import CombinedLoader, DummyLogger, LightningModule, Trainer
from lightning_autopar._lightning_compat import (
    TrainerFn,
    attach_loaders,
    combined_mode,
    is_overridden,
    loader_source,
    loaders_apart,
    transfer_batch,
)
from lightning_autopar._root import LIGHTNING
from lightning_autopar.memory.trace.no_writes import no_writes
from lightning_autopar.text import error_line

log = logging.getLogger(__name__)

#: Exceptions that the user's code may raise while planning runs it. It runs in a forked child, which gets no Ctrl-C: a KeyboardInterrupt
#: comes from that code.
RAISED = (Exception, KeyboardInterrupt, SystemExit)
#: The classes of generator objects.
GENERATORS = (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)
#: How far own generators of a dataset are looked for.
_DEEP, _FEW = 3, 32
#: How many batches of a loader are looked at, and from how many of its order they are picked.
_LOOKS = 6
_LISTED = 20_000
#: How many times as long a loader that makes its batches by itself is read: its batches can't be picked.
_MADE_SECONDS = 0.6

BatchKind = Literal["map", "iterable", "combined", "other"]

_LIMITS = {"fit": "limit_train_batches", "validate": "limit_val_batches", "test": "limit_test_batches"}

_BEFORE_BATCHES = {
    "fit": ("on_fit_start", "on_train_start", "on_train_epoch_start"),
    "validate": ("on_validation_start", "on_validation_epoch_start"),
    "test": ("on_test_start", "on_test_epoch_start"),
    "predict": ("on_predict_start", "on_predict_epoch_start"),
}


@dataclass(frozen=True, kw_only=True)
class FirstBatch:
    """A batch and how to make smaller ones.

    Args:
        batch: as the module's step gets it, on the CPU.
        samples: what it was collated from, a list or what the dataset's ``__getitems__`` gives; None where that isn't known (several
            loaders, a loader of ready batches).
        collate: makes a batch of samples; None where they aren't known.
        batch_size: samples in it; of several loaders the smallest; 0 where it can't be told.
        draws: where random numbers were drawn in making it: ``"samples"`` (augmentation in the dataset), ``"collate"`` (masking, say).
        seconds: for loading and collating it; 0 where that isn't known.
        cut: whether its parts are cut out of the whole batch's collation, rather than collated by themselves.
        kind: a loader over a map-style or iterable dataset, several loaders, or some other iterable.
        together: for several loaders, the numbers of samples of their batches of one step, each combination of an epoch once; empty where a
            loader doesn't know its length.
        loader: its loader's number, in an evaluation.
        besides: the first batches of the evaluation's other loaders, where somebody has asked for them.
        calls: the part of the module that the loader called to make it, as one that plays a game does; empty where it called none.
        unprepared: a sentence for each callback that may change the module, and couldn't be set up before it.
    """

    batch: Any
    samples: list[Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    batch_size: int = 0
    kind: BatchKind = "other"
    loaders: tuple[Any, ...] = ()
    seconds: float = 0.0
    cut: bool = False
    draws: tuple[str, ...] = ()
    epoch_batches: int | None = None
    together: tuple[tuple[int, ...], ...] = ()
    calls: str = ""
    loader: int = 0
    besides: tuple[FirstBatch, ...] = ()
    unprepared: tuple[str, ...] = ()

    @property
    def known_samples(self) -> Sequence[Any]:
        """What is known of its samples; what ``__getitems__`` gives may have no truth value, as a TensorDict."""
        return () if self.samples is None else self.samples

    def without_makers(self) -> FirstBatch:
        """The batch without the objects that made it, which may not be picklable."""
        return replace(self, samples=None, collate=None, loaders=())


def first_batch(module: LightningModule, trainer: Trainer, stage: str = "fit", *, prepared: bool = False) -> FirstBatch:
    """Do what Lightning does up to a stage's first batch, and return that batch.

    Args:
        module: the user's module, the trainer's own; its ``prepare_data`` and ``setup`` are called, and ``setup`` of those of the user's
            callbacks whose code uses the module: they may wrap its layers, or freeze them.
        trainer: with its loaders or DataModule attached.
        stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        prepared: whether module and DataModule have been set up already.

    Raises:
        ValueError: if there is no loader for the stage, or it has no batch.
    """
    module.trainer = trainer  # a module that was sent to another process has lost it
    sources = [source for source in (getattr(trainer, "datamodule", None), module) if source is not None]
    unprepared: tuple[str, ...] = ()
    if not prepared:
        for source in sources:
            source.prepare_data()
        for source in sources:
            if source is module:
                unprepared = tuple(_set_up_by_callbacks(module, trainer, stage))
            source.setup(stage=TrainerFn(stage))
    loader = loader_source(trainer, stage)
    if loader is None:
        raise ValueError(f"there is no data for the stage {stage!r}; pass loaders to the trainer or define the module's dataloader hook")
    combined = (
        loader if isinstance(loader, CombinedLoader) else CombinedLoader(loader, "max_size_cycle" if stage == "fit" else "sequential")
    )
    loaders, shaped = loaders_apart(combined)
    if not loaders:
        raise ValueError(f"there is no loader for the stage {stage!r}: {combined.iterables!r}; give it one")
    mode = combined_mode(combined)
    counts = _batches(loaders, getattr(trainer, _LIMITS[stage])) if stage in _LIMITS else [math.inf]
    most = sum(counts) if mode == "sequential" else min(counts) if mode == "min_size" else max(counts)
    batches = int(most) if most < math.inf else None
    attach_loaders(trainer, stage, combined, batches, counts)

    def draw() -> FirstBatch:
        if mode == "sequential" or combined.iterables is loaders[0]:
            return _draw(loaders[0])
        parts = [_draw(each) for each in loaders]
        sizes = [part.batch_size for part in parts if part.batch_size]
        return FirstBatch(batch=shaped([part.batch for part in parts]), batch_size=min(sizes, default=0), kind="combined")

    with _calls_of(module) as called:
        try:
            first = draw()
        except RAISED:
            if not _started(module, stage):
                raise
            first = draw()
    batch = transfer_batch(module, first.batch)
    size = first.batch_size or batch_size_of(batch)
    together = _together(loaders, mode, batches) if first.kind == "combined" and batches else ()
    epoch_batches = batches if stage == "fit" else None
    found = replace(first, batch=batch, batch_size=size, epoch_batches=epoch_batches, loaders=tuple(loaders), together=together)
    return replace(found, calls=next(iter(called), ""), unprepared=unprepared)


def _set_up_by_callbacks(module: LightningModule, trainer: Trainer, stage: str) -> Iterator[str]:
    """Call ``setup`` of those of the user's callbacks whose code uses the module, without files and loggers; gives a sentence for each that
    fails.
    """
    loggers: list[Any] = trainer.loggers
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by a connector
        setup: Any = type(callback).setup
        if f"{setup.__module__}.".startswith(LIGHTNING) or not _uses_module(setup):
            continue
        trainer.loggers = [DummyLogger() for _ in loggers]
        try:
            with no_writes({}):
                callback.setup(trainer, module, stage=TrainerFn(stage))
        except RAISED as error:  # it may need what only the run has
            name = type(callback).__name__
            yield f"the callback {name} couldn't be set up in planning ({error_line(error)}); what it makes of the module isn't counted"
        finally:
            trainer.loggers = loggers


def _uses_module(setup: Any) -> bool:
    """Whether a callback's method names its third argument, the module. Others aren't called: they may open files."""
    code = getattr(setup, "__code__", None)
    if code is None or code.co_argcount < len(("self", "trainer", "pl_module")):
        return False
    loaded = (each.argval for each in dis.get_instructions(code) if each.opname.startswith("LOAD"))
    return any(code.co_varnames[2] in (names if isinstance(names, tuple) else (names,)) for names in loaded)


def _started(module: LightningModule, stage: str) -> bool:
    """Call the module's hooks that come before the stage's first batch: one may make what the loader reads (a replay buffer, a cache).
    False where it has none, or one fails.
    """
    hooks = [hook for hook in _BEFORE_BATCHES[stage] if is_overridden(hook, module)]
    try:
        with no_writes({}):
            for hook in hooks:
                getattr(module, hook)()
    except RAISED:
        log.debug("the hooks before the first batch can't run", exc_info=True)
        return False
    return bool(hooks)


@contextmanager
def _calls_of(module: LightningModule) -> Iterator[list[str]]:
    """Which children with parameters are called meanwhile."""
    called: list[str] = []
    handles = [
        child.register_forward_pre_hook(lambda *_, name=name: called.append(name))
        for name, child in module.named_children()
        if any(True for _ in child.parameters())
    ]
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()


def _batches(loaders: list[Any], limit: int | float | None) -> list[float]:
    """Each loader's number of batches, as in Lightning (``_FitLoop.setup_data``); infinite where it has no length."""
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
    return lengths


def _together(loaders: list[Any], mode: str, steps: int) -> tuple[tuple[int, ...], ...]:
    """The numbers of samples of one step's batches, each combination once; empty where a loader doesn't know them."""
    sizes: list[list[int]] = []
    for loader in loaders:
        sampler = getattr(loader, "batch_sampler", None)
        plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__ and type(sampler) is BatchSampler
        if not plain or sampler is None or isinstance(loader.dataset, IterableDataset):
            return ()
        count, size = len(sampler.sampler), sampler.batch_size
        ragged = [count % size] if count % size and not sampler.drop_last else []
        sizes.append(([size] * (count // size) + ragged)[:_LISTED])
    if not all(sizes):
        return ()
    found: dict[tuple[int, ...], None] = {}
    for step in range(min(steps, _LISTED)):
        there = (each[step % len(each)] for each in sizes if mode != "max_size" or step < len(each))
        found[tuple(there)] = None
    return tuple(found)


def _draw(loader: Any) -> FirstBatch:
    """The first batch of one loader, in this process."""
    if isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__ and order_of(loader) is not None:
        return _draw_by_hand(loader)
    for batch in _alone(loader):
        return FirstBatch(batch=batch, batch_size=batch_size_of(batch))
    raise ValueError(f"the loader {loader!r} has no batch; give it data, or make its batch_size smaller if it drops the last batch")


def _alone(loader: Any) -> Any:
    """The loader without worker processes, which would outlive the call, and without pinning, which needs a GPU."""
    if isinstance(loader, DataLoader):
        loader = copy.copy(loader)
        loader.num_workers, loader.timeout, loader.pin_memory, loader._iterator = 0, 0, False, None
    return loader


def _draw_by_hand(loader: DataLoader[Any]) -> FirstBatch:
    """Samples and their batch, as the loader's fetcher makes them (``torch.utils.data._utils.fetch``)."""
    if isinstance(loader.dataset, IterableDataset):
        batch = _streamed(loader, iter(loader.dataset))
    else:
        batch = indexed(loader, list(next(iter(order_of(loader)), [])))
    if batch is None:
        raise ValueError(f"the loader over {type(loader.dataset).__name__} has no batch; give it data, or set drop_last=False")
    return batch


def order_of(loader: DataLoader[Any]) -> Any:
    """The sampler of a loader's batches of indices; None where there is none."""
    return (
        loader.batch_sampler if loader.batch_sampler is not None else loader.sampler if isinstance(loader.sampler, BatchSampler) else None
    )


def _streamed(loader: DataLoader[Any], source: Iterator[Any]) -> FirstBatch | None:
    """The next batch of a stream; None at its end."""
    began = time.monotonic()
    samples = list(itertools.islice(source, loader.batch_size))
    if not samples or (loader.drop_last and len(samples) < (loader.batch_size or 0)):
        return None
    return FirstBatch(
        batch=loader.collate_fn(fresh(samples)),
        samples=samples,
        collate=loader.collate_fn,
        batch_size=len(samples),
        kind="iterable",
        seconds=time.monotonic() - began,
    )


def indexed(loader: DataLoader[Any], indices: list[Any]) -> FirstBatch | None:
    """The batch of these samples; None without samples."""
    dataset, own = cast(Any, loader.dataset), _own_generators((loader.dataset, loader.collate_fn))
    before, began = _random_states(own), time.monotonic()
    fetch = getattr(dataset, "__getitems__", None)
    if not indices:
        return None
    if loader.batch_sampler is None:  # a sampler of batches: the dataset loads a batch at a time
        samples: Any = indices
        collate: Callable[[Any], Any] = lambda own: loader.collate_fn(dataset[own])  # noqa: E731
    else:
        samples, collate = fetch(indices) if fetch else [dataset[index] for index in indices], loader.collate_fn
    loaded = _random_states(own)
    batch = collate(fresh(samples))
    draws = [name for name, moved in (("samples", loaded != before), ("collate", _random_states(own) != loaded)) if moved]
    return FirstBatch(
        batch=batch,
        samples=samples,
        collate=collate,
        batch_size=len(indices),
        kind="map",
        draws=tuple(draws),
        seconds=time.monotonic() - began,
    )


def some_batches(loader: Any, seconds: float) -> list[FirstBatch]:
    """Batches of a loader, within a time: the first and last of its order, and others between, or a stream's first ones. They aren't
    transferred. A loader that makes its batches by itself gives them without samples.
    """
    ends = time.monotonic() + seconds
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return _made(_alone(loader), ends + _MADE_SECONDS)
    if isinstance(loader.dataset, IterableDataset):
        source = iter(loader.dataset)
        streamed = (_streamed(loader, source) for _ in range(_LOOKS if loader.batch_size else 0))
        return list(_until(ends, itertools.takewhile(lambda batch: batch is not None, streamed)))
    if order_of(loader) is None:
        return []
    listed = _drawn_anew(order_of(loader)) or list(_until(ends - seconds / 2, itertools.islice(iter(order_of(loader)), _LISTED)))
    step = max(1, len(listed) // (_LOOKS - 1))
    picked = [*listed[:1], *(listed[-1:] if len(listed) > 1 else []), *listed[step:-1:step]][:_LOOKS]
    return [batch for batch in _until(ends, (_tried(loader, list(indices)) for indices in picked)) if batch is not None]


def _made(loader: Any, ends: float) -> list[FirstBatch]:
    """The first and the last of the batches that a loader gives until then, and some whose tensors have other shapes."""
    found: dict[tuple[torch.Size, ...], Any] = {}
    first = last = None
    for last in _until(ends, _as_in_an_epoch(loader)):
        shapes = tuple(tensor.shape for tensor in tensors_of(last))
        first = last if first is None else first
        if len(found) < _LOOKS:
            found.setdefault(shapes, last)
    picked = [first, *([] if last is first else [last]), *(batch for batch in found.values() if batch is not first and batch is not last)]
    return [FirstBatch(batch=batch, batch_size=batch_size_of(batch)) for batch in picked if batch is not None]


def _as_in_an_epoch(loader: Any) -> Iterator[Any]:
    """The batches that a run draws in an epoch: at most the loader's length, beyond which some fail (scvi-tools' ``ConcatDataLoader``)."""
    try:
        length = len(loader)
    except (TypeError, NotImplementedError):  # as in Lightning for a loader without a length
        length = _LISTED
    return itertools.islice(loader, min(length, _LISTED))


def _tried(loader: DataLoader[Any], indices: list[Any]) -> FirstBatch | None:
    """Like :func:`indexed`; None where the user's code can't make the batch. The run may draw another one instead."""
    try:
        return indexed(loader, indices)
    except Exception as error:
        log.debug("a batch can't be looked at: %s", error)
        return None


def _drawn_anew(order: Any) -> list[list[int]]:
    """Batches of torch's own samplers, without drawing a whole epoch's order, which takes seconds for a large dataset."""
    if type(order) is not BatchSampler or type(order.sampler) not in (RandomSampler, SequentialSampler):
        return []
    sampler, size, generator = cast(Any, order.sampler), order.batch_size, torch.Generator().manual_seed(0)
    count, total, shuffled = len(sampler), len(sampler.data_source), isinstance(sampler, RandomSampler)
    sizes = [size] * min(_LOOKS - 1, count // size) + ([count % size] if count % size and not order.drop_last else [])
    starts = [count - each if index == len(sizes) - 1 else index * (count // _LOOKS) for index, each in enumerate(sizes)]
    if shuffled:
        return [torch.randint(total, (each,), generator=generator).tolist() for each in sizes]
    return [list(range(start, start + each)) for start, each in zip(starts, sizes, strict=True)]


def _until(ends: float, values: Iterable[Any]) -> Iterator[Any]:
    """The values up to a time, but at least one."""
    for value in values:
        yield value
        if time.monotonic() > ends:
            return


def _random_states(own: Iterable[Any] = ()) -> tuple[Any, ...]:
    """The states of the generators that a dataset may draw from in this process, for comparison.

    Args:
        own: generators besides torch's, Python's and NumPy's.
    """
    numpy_state: Any = numpy.random.get_state()
    states = [repr(each.bit_generator.state) if isinstance(each, numpy.random.Generator) else _state(each) for each in own]
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), (numpy_state[1].tobytes(), *numpy_state[2:]), states


def _state(generator: Any) -> Any:
    """Of one of torch's, Python's, or NumPy's older class."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    return repr(generator.getstate() if isinstance(generator, random.Random) else generator.get_state())


def _own_generators(owners: Iterable[Any], depth: int = _DEEP) -> list[Any]:
    """The generators that objects and their attributes have, as a dataset that augments its samples, or the dataset within a subset."""
    found: list[Any] = []
    for owner in owners:
        inside = owner if isinstance(owner, (list, tuple)) and len(owner) <= _FEW else getattr(owner, "__dict__", {}).values()
        for value in inside:
            if isinstance(value, GENERATORS):
                found.append(value)
            elif depth and not isinstance(value, (torch.Tensor, torch.nn.Module, type)):
                found += _own_generators([value], depth - 1)
    return found


def fresh(samples: Any) -> Any:
    """A copy of samples for a collate function, which may change them."""
    if not isinstance(samples, list):
        return samples
    return [copy.copy(sample) if isinstance(sample, (dict, list)) else sample for sample in samples]


def batch_size_of(batch: Any) -> int:
    """The leading dimension of the first tensor that has one, else the length of the first list of other things; else 0."""
    for tensor in tensors_of(batch):
        if tensor.dim():
            return tensor.size(0)  # a nested tensor may have no shape
    lists = [batch, *(batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ())]
    return next((len(item) for item in lists if isinstance(item, (list, tuple)) and item and not isinstance(item[0], (list, tuple))), 0)


def tensors_of(batch: Any) -> list[Tensor]:
    """Every tensor in a batch, also in mappings and plain objects that torch's pytree takes for leaves."""
    return list(_tensors(batch, set()))


def mapped(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A copy of a batch with a function applied to each of its tensors, wherever they lie; tensors' attributes are copied, too."""
    memo: dict[int, Any] = {}
    kept = tensors_of(batch)  # keeps their ids unique
    for tensor in kept:
        memo[id(tensor)] = made = function(tensor)
        if type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ and vars(tensor):
            vars(made).update(copy.deepcopy(vars(tensor), memo))
    try:
        return copy.deepcopy(batch, memo)
    except Exception as error:  # a user's object that can't be copied, and is shared
        log.debug("a batch can't be copied as a whole: %s", error)
        return tree_map(lambda leaf: memo.get(id(leaf), leaf), batch)


def copied(batch: Any) -> Any:
    """A batch with tensors of its own, for a step that may write to them."""
    return mapped(batch, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad))


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
        children = [
            *getattr(value, "__dict__", {}).values(),
            *(getattr(value, name, None) for name in getattr(type(value), "__slots__", ())),
        ]
    for child in children:
        yield from _tensors(child, seen)
