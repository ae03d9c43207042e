"""The longest batch of a loader, as far as samples or batches that are picked at random show it, within a second; and a line about each
batch of the run that is longer than the plan counts with.

Only a map-style dataset can be looked at without using it up. Its samples are loaded by their indices, in the forked child that plans, and
nothing but their sizes is read. Torch's own batches are made by the loader's collate function of the longest samples that were seen, among
as many others as a batch has; of a sampler with batches of its own some are made as they are. Knows batches; no module and no plan.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from numbers import Number
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from lightning_autopar._lightning import Trainer
from lightning_autopar.exact.data.unlike_samples import Known, kind, unlike
from lightning_autopar.exact.random import generator_states as rng
from lightning_autopar.memory.length_spread import DRAWN_ANEW, ENOUGH, Lengths, reach_of
from lightning_autopar.memory.trace.first_batch import FirstBatch, fresh, indexed, order_of
from lightning_autopar.text import error_line

_LOG = logging.getLogger(__name__)

#: Seconds that a look may take; the first of these where all sizes are the same so far.
ALIKE_SECONDS, _SECONDS = 0.15, 0.7
#: At most so many samples or batches are looked at, so many batches are put together by chance, and samples of so many numbers kept.
MOST, _GROUPS, _KEPT_NUMBERS = 20_000, 200, 8_000_000
#: How many samples are loaded twice, to see whether they keep their size.
_AGAIN = 4
#: Of a list of other things than numbers so many are looked into.
_MOST_LISTED = 1024
#: Of a name in a batch, and the dimension.
_Key = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a look at a loader gives.

    Args:
        lengths: what was seen; the bytes aren't known yet.
        usual: a batch like most, or one that is shorter than the first; None where that is the first one.
        longest: the batches of which one takes most, without the first one; empty where no other takes more.
        times_of_first: whether times are for the first batch, which is as long as most, although ``usual`` is another.
        unlike: a batch whose first samples have something that a loss may leave out, and that the first batch has not; None where no
            other was seen.
        unmade: how making such a batch fails, where there are such samples and none of the loader's own batches has any; else empty.
    """

    lengths: Lengths
    usual: FirstBatch | None = None
    longest: tuple[FirstBatch, ...] = ()
    times_of_first: bool = False
    unlike: FirstBatch | None = None
    unmade: str = ""


def look(first: FirstBatch, *, seconds: float = _SECONDS, clock: Callable[[], float] = time.monotonic) -> Look:
    """Look at the sizes of the samples of a stage's loaders. Random generators are left as they were.

    Args:
        seconds: how long that may take, but for the sample or batch that is being loaded then.
    """
    if first.kind == "combined":
        return Look(lengths=Lengths(unseen="a step's batch comes from several loaders"))
    if not first.loaders:
        return Look(lengths=Lengths(unseen="there is no loader"))
    found = [_look(loader, first, seconds / len(first.loaders), clock) for loader in first.loaders]
    longest = max(found, key=lambda each: max(map(_volume_of, each.longest), default=0))
    return replace(longest, unlike=found[0].unlike, unmade=found[0].unmade)  # of the loader that gave the first batch


def _look(loader: Any, first: FirstBatch, seconds: float, clock: Callable[[], float]) -> Look:
    if (why := _unseen(loader)) is not None:
        return Look(lengths=Lengths(unseen=why))
    own = rng.find_generators((("dataset", loader.dataset), ("loader", loader), ("order", order_of(loader)), ("sampler", loader.sampler)))
    state, ends = rng.capture(own), clock() + seconds
    try:
        plain = type(loader.batch_sampler) is BatchSampler and isinstance(first.samples, (list, type(None)))
        samples = _Samples(loader, first, seconds, clock) if plain else None
        if samples is None or (found := _of_samples(samples, first)) is None:
            return _of_batches(loader, first, ends, clock)
        try:
            return replace(found, unlike=samples.unlike(first))
        except Exception as error:  # samples that the sampler keeps apart: then some batch of its own may have them
            _LOG.debug("samples unlike the first batch's don't make a batch", exc_info=True)
            made: FirstBatch | None = None
            with suppress(Exception):  # they can't be made either: then it is said
                made = _of_batches(loader, first, clock() + ALIKE_SECONDS, clock).unlike
            return replace(found, unlike=made, unmade=error_line(error) if made is None else "")
    except Exception as error:  # the user's dataset, sampler or collate function; if it is at fault, the run will say so
        _LOG.debug("a loader's sizes can't be looked at", exc_info=True)
        return Look(lengths=Lengths(unseen=f"loading others failed ({type(error).__name__})"))
    finally:
        rng.restore(state, own)


def _unseen(loader: Any) -> str | None:
    """Why a loader's batches can't be looked at without using them up."""
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return "the loader makes its batches by itself"
    if isinstance(loader.dataset, IterableDataset):
        return "the dataset is a stream, which can't be read twice"
    return "the loader has no sampler of batches" if order_of(loader) is None else None


# -- samples that torch's own sampler puts together ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Sample:
    """A sample's sizes, and the sample itself where there was room to keep it."""

    index: Any
    shapes: Mapping[str, tuple[int, ...]]
    numbers: int
    sample: Any = None

    def at(self, key: _Key) -> int:
        shape = self.shapes.get(key[0], ())
        return shape[key[1]] if key[1] < len(shape) else 0


class _Samples:
    """Samples of a dataset, loaded until the time is over."""

    def __init__(self, loader: DataLoader[Any], first: FirstBatch, seconds: float, clock: Callable[[], float]) -> None:
        self.loader, self._clock, self._kept, self._alike = loader, clock, 0, True
        self.of = self.population(first)
        self.seen: list[_Sample] = []
        for sample in first.known_samples:
            self._measure(None, sample)
        begun, known = clock(), len(self.seen)
        for index, sample in self._loaded(random.Random(0).sample(self.of, min(len(self.of), MOST))):
            self._measure(index, sample)
            alike = self._alike and len(self.seen) >= ENOUGH
            if self._clock() - begun > (min(seconds, ALIKE_SECONDS) if alike else seconds):
                break
        loaded = len(self.seen) - known
        #: The first batch's samples are some of the others, of which nobody knows.
        self.looked = loaded if loaded == len(self.of) else min(len(self.of) - 1, len(self.seen))

    def population(self, first: FirstBatch) -> Sequence[Any]:
        """The indices that the sampler gives in an epoch, as far as that is known without drawing all of them."""
        sampler: Any = self.loader.sampler
        if type(sampler) is RandomSampler:
            return range(len(sampler.data_source))
        if type(sampler) is SequentialSampler:
            count = len(sampler.data_source)
            return range(count if first.epoch_batches is None else min(count, first.epoch_batches * first.batch_size))
        return list(dict.fromkeys(itertools.islice(iter(sampler), MOST)))

    def _loaded(self, indices: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        """The samples, as the loader's fetcher gets them; several at a time where the dataset can and is quick."""
        dataset: Any = self.loader.dataset
        fetch, place, count = getattr(dataset, "__getitems__", None), 0, 1
        while place < len(indices):
            some, begun = list(indices[place : place + count]), self._clock()
            loaded = list(fetch(some)) if fetch else [dataset[index] for index in some]
            place += len(some)
            if fetch and self._clock() - begun < 0.01:
                count = min(2 * count, 256)
            yield from zip(some, loaded, strict=True)

    def _measure(self, index: Any, sample: Any) -> None:
        shapes = shapes_in(sample)
        numbers = sum(map(prod, shapes.values()))
        self._kept += numbers
        keep = self._kept <= _KEPT_NUMBERS or index is None
        self.seen.append(_Sample(index=index, shapes=shapes, numbers=numbers, sample=sample if keep else None))
        self._alike = self._alike and shapes == self.seen[0].shapes

    def varying(self) -> list[_Key]:
        """The sizes in which samples differ; one that only some have counts as 0 in the others."""
        if self._alike:
            return []
        keys = {name: len(shape) for each in self.seen for name, shape in each.shapes.items()}
        every = ((name, dimension) for name, count in keys.items() for dimension in range(count))
        return [key for key in every if len({each.at(key) for each in self.seen}) > 1]

    def drawn(self) -> bool:
        """Whether a sample has another size when it is loaded again: a few are, as long as that is quick."""
        dataset, begun = self.loader.dataset, self._clock()
        for each in itertools.islice((each for each in self.seen if each.index is not None), _AGAIN):
            if shapes_in(dataset[each.index]) != each.shapes:
                return True
            if self._clock() - begun > ALIKE_SECONDS:
                break
        return False

    def unlike(self, first: FirstBatch) -> FirstBatch | None:
        """A batch whose first samples have something that the first batch has not."""
        kept = [each for each in self.seen if each.sample is not None]
        chosen = unlike([each.sample for each in kept], first.known_samples, first.batch_size)
        return self.batch([kept[number] for number in chosen]) if chosen else None

    def batch(self, samples: Sequence[_Sample]) -> FirstBatch:
        """The batch of these samples."""
        dataset: Any = self.loader.dataset
        chosen = [dataset[each.index] if each.sample is None else each.sample for each in samples]
        collate = self.loader.collate_fn
        return FirstBatch(batch=collate(fresh(chosen)), samples=chosen, collate=collate, batch_size=len(chosen), kind="map")


def _of_samples(samples: _Samples, first: FirstBatch) -> Look | None:
    """What samples show; None where their batch can't be made, so that the sampler puts together what suits."""
    varying, seen, size = samples.varying(), samples.seen, first.batch_size
    told = Lengths(looked=samples.looked, of=len(samples.of))
    if not varying:
        return Look(lengths=told)
    chance = random.Random(0)
    groups = [chance.sample(seen, min(size, len(seen))) for _ in range(min(_GROUPS, first.epoch_batches or _GROUPS))]
    groups.sort(key=lambda group: max(each.numbers for each in group))
    fullest = max(groups, key=lambda group: sum(each.numbers for each in group))
    extremes = {id(each): each for each in (max(seen, key=lambda one, key=key: one.at(key)) for key in varying)}  # type: ignore[misc]
    others = sorted((each for each in fullest if id(each) not in extremes), key=lambda each: -each.numbers)
    chosen = [*sorted(extremes.values(), key=lambda each: -each.numbers), *others][:size]
    main = max({name for name, _ in varying}, key=lambda name: max(prod(each.shapes.get(name, (0,))) for each in seen))
    dimensions = [key for key in varying if key[0] == main]
    of, drawn = len(samples.of), samples.drawn()
    reach = 1.0
    if drawn or samples.looked < of:
        reach = reach_of([prod(each.at(key) for key in dimensions) for each in seen], of * (DRAWN_ANEW if drawn else 1))
    shorter = groups[len(groups) // 2], sorted(seen, key=lambda each: each.numbers)[:size]
    try:
        return _told(replace(told, drawn=drawn), first, [samples.batch(chosen)], map(samples.batch, shorter), reach)
    except Exception:  # pictures of several sizes, say, which the sampler keeps apart
        _LOG.debug("the longest samples don't make a batch, or shorter ones", exc_info=True)
        return None


# -- batches that a sampler of the user's puts together ----------------------------------------------------------------------------------


def _of_batches(loader: DataLoader[Any], first: FirstBatch, ends: float, clock: Callable[[], float]) -> Look:
    """What batches show."""
    order, half = order_of(loader), ends - (ends - clock()) / 2
    listed: list[Any] = []
    for indices in itertools.islice(iter(order), MOST):
        listed.append(indices)
        if clock() > half:
            break
    volumes: list[int] = [_volume_of(first)]
    largest: dict[int, FirstBatch] = {}
    known, unlike_by, other = Known.of(first.known_samples), math.inf, None
    picked = random.Random(0).sample(range(len(listed)), len(listed))
    looked: list[int] = []
    for place in picked:
        batch = indexed(loader, list(listed[place]))
        if batch is not None:
            looked.append(place)
            volumes.append(_volume_of(batch))
            if (by := min((kind(mark) for sample in batch.known_samples for mark in known.new(sample)), default=math.inf)) < unlike_by:
                unlike_by, other = by, batch
            # By its numbers, and by what attention makes of them.
            for which, measure in enumerate((_volume_of, _stretch_of)):
                if which not in largest or measure(batch) > measure(largest[which]):
                    largest[which] = batch
        if clock() > ends:
            break
    of = len(order) if hasattr(order, "__len__") else len(listed)
    told = Lengths(unit="batches", looked=len(looked), of=of)
    if not looked:
        return Look(lengths=told)
    ordered = [place for _, place in sorted(zip(volumes[1:], looked, strict=True))]
    shorter = (indexed(loader, list(listed[place])) for place in (ordered[len(looked) // 2], ordered[0]))
    reach = 1.0 if len(looked) >= of else reach_of(volumes, of)
    found = _told(told, first, list({id(batch): batch for batch in largest.values()}.values()), shorter, reach)
    return replace(found, unlike=other)


def _volume_of(batch: FirstBatch) -> int:
    return sum(map(prod, shapes_in(batch.batch, tensors=True).values()))


def _stretch_of(batch: FirstBatch) -> float:
    return sum(prod(shape) ** 2 for shape in shapes_in(batch.batch, tensors=True).values()) / max(1, batch.batch_size)


# -- both ----------------------------------------------------------------------------------------------------------------------------------


def _told(told: Lengths, first: FirstBatch, longest: Sequence[FirstBatch], shorter: Iterable[FirstBatch | None], reach: float) -> Look:
    """The look, where these batches are the longest that were seen; of the shorter ones the first is like most, and the last like few."""
    more = tuple(each for each in longest if _volume_of(each) > _volume_of(first) or _stretch_of(each) > _stretch_of(first))
    lengths = replace(told, reach=reach)
    if more:
        return Look(lengths=lengths, longest=more)
    for number, other in enumerate(shorter):
        if other is not None and _volume_of(other) < _volume_of(first):
            return Look(lengths=lengths, usual=other, times_of_first=number > 0)
    return Look(lengths=told)  # all batches are as long as the first


def between(lengths: Lengths, usual: FirstBatch, longest: FirstBatch) -> Lengths:
    """What was seen, with the shapes of the largest tensor that varies in these two batches, or with the numbers of both batches where
    several vary, each in its own way.
    """
    ones, others = (shapes_in(each.batch, tensors=True) for each in (usual, longest))
    differ = [name for name, shape in others.items() if len(ones.get(name, ())) == len(shape) and ones[name] != shape]
    name = max(differ, key=lambda each: prod(others[each]), default="")
    alike = len({prod(ones[each]) / max(1, prod(others[each])) for each in differ}) == 1
    if not differ or (not alike and 2 * prod(others[name]) < _volume_of(longest)):
        return replace(lengths, usual=(_volume_of(usual),), longest=(_volume_of(longest),))
    return replace(lengths, name=name, usual=ones[name], longest=others[name])


def shapes_in(value: Any, *, tensors: bool = False) -> dict[str, tuple[int, ...]]:
    """The sizes of a sample or batch, by where they lie in it: of tensors, and unless only those are wanted of arrays, pictures, lists of
    numbers, and texts.
    """
    found = _sized("", value, frozenset())
    return {name: shape for name, part, shape in found if not tensors or isinstance(part, Tensor)}


def _sized(name: str, value: Any, seen: frozenset[int]) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
    if value is None or isinstance(value, (Number, type)) or id(value) in seen:
        return
    shape = getattr(value, "shape", None)
    if not isinstance(shape, tuple):
        shape = getattr(value, "size", None)  # a picture of PIL's
    if isinstance(value, (str, bytes)) or (isinstance(value, (list, tuple)) and value and isinstance(value[0], Number)):
        yield name, value, (len(value),)
    elif isinstance(shape, tuple) and all(isinstance(each, int) for each in shape):
        yield name, value, tuple(shape)
    else:
        yield from _inside(name, value, seen | {id(value)})


def _inside(name: str, value: Any, seen: frozenset[int]) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
    parts: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, (list, tuple)):
        if isinstance(value, list):
            yield f"{name}[]", value, (len(value),)
        parts = enumerate(value[:_MOST_LISTED])
    else:
        slots = {slot: getattr(value, slot, None) for slot in getattr(type(value), "__slots__", ())}
        parts = {**getattr(value, "__dict__", {}), **slots}.items()
    for key, part in parts:
        yield from _sized(f"{name}.{key}" if name else str(key), part, seen)


class LongerBatches:
    """Looks at each batch of a rank.

    Args:
        most: the largest size of a sample in it.
    """

    def __init__(self, lengths: Lengths, most: int) -> None:
        self._lengths, self._most = lengths, most

    @classmethod
    def of(cls, lengths: Lengths) -> LongerBatches | None:
        """What looks at batches; None where their sizes don't vary, or a longer one can't be told by a sample."""
        most = lengths.planned()
        return None if most is None else cls(lengths, most)

    def look(self, trainer: Trainer, batch: Any, rank: int) -> None:
        """Log a line for a batch that is longer than planned for, and than all before it."""
        if not trainer.training:
            return
        shape = shapes_in(batch, tensors=True).get(self._lengths.name, ())
        if len(shape) != len(self._lengths.longest) or math.prod(shape[1:]) <= self._most:
            return
        times = math.prod(shape[1:]) / math.prod(self._lengths.longest[1:])
        self._most = math.prod(shape[1:])
        _LOG.warning(
            f"autopar: rank {rank} has a batch of size {self._lengths.size(times)} ({self._lengths.label}), but its plan has memory for at "
            f"most {self._lengths.size(self._lengths.reach)}; it may run out of memory"
        )
